//! The same load on several gateways in turn, interleaved and repeated.

mod busy;
mod contender;
mod figures;
mod machine;
mod markdown;
mod upstream;
mod verdict;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use busy::Busy;
pub use contender::{Contender, Kind};
pub(crate) use figures::median;
pub use machine::Machine;
pub use markdown::markdown;
use upstream::Upstream;
pub use verdict::{Verdict, verdicts};

use crate::load::{
    CallsPlan, Cut, HeldPlan, Report, StormPlan, StreamsPlan, Target, calls, idle, slow, storm,
    streams,
};

/// What is compared, and how much of it.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The contenders, direct first.
    pub contenders: Vec<(Kind, PathBuf)>,
    /// Scenarios by name.
    pub scenarios: Vec<String>,
    /// Rounds.
    pub rounds: usize,
    /// Smaller loads, for a first look.
    pub quick: bool,
    /// How long a run waits for other programs to leave the machine alone.
    pub wait_quiet: Duration,
}

/// One scenario on one contender in one round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    /// Number of the round.
    pub round: usize,
    /// Name of the contender.
    pub contender: String,
    /// Name of the scenario.
    pub scenario: String,
    /// CPU that neither the load nor the upstream nor the contender used,
    /// percent of the machine: how much the run was disturbed.
    pub others_percent: Option<f64>,
    /// What it found.
    pub report: Report,
}

/// All scenarios, in the order they run.
pub const SCENARIOS: [&str; 6] = ["calls", "streams", "idle", "slow", "storm-rst", "storm-fin"];

/// Runs the plan; runs are given to `done` one by one, so that an interrupted
/// bench has a result.
pub async fn run(plan: &Plan, mut done: impl FnMut(&Run)) -> io::Result<Vec<Run>> {
    let mut runs = Vec::new();
    let say = crate::cli::complain;
    for round in 0..plan.rounds {
        for scenario in &plan.scenarios {
            for at in 0..plan.contenders.len() {
                // Each round begins with another contender.
                let (kind, program) = &plan.contenders[(at + round) % plan.contenders.len()];
                say(&format!(
                    "rig: round {}/{}: {scenario}: {}",
                    round + 1,
                    plan.rounds,
                    kind.name()
                ));
                let (report, others_percent) = match one(plan, *kind, program, scenario).await {
                    Ok(found) => found,
                    Err(e) => {
                        say(&format!("rig: {}: {scenario}: {e}", kind.name()));
                        let mut report = Report::default();
                        report.errors.insert(e.to_string(), 1);
                        (report, None)
                    }
                };
                let run = Run {
                    round,
                    contender: kind.name().to_owned(),
                    scenario: scenario.clone(),
                    others_percent,
                    report,
                };
                done(&run);
                runs.push(run);
            }
        }
    }
    Ok(runs)
}

async fn one(
    plan: &Plan,
    kind: Kind,
    program: &std::path::Path,
    scenario: &str,
) -> io::Result<(Report, Option<f64>)> {
    busy::wait_quiet(plan.wait_quiet).await;
    // Fresh ports each time: sockets that linger from the run before are not
    // counted in this one.
    let upstream = Upstream::start().await?;
    let contender = Contender::start(kind, program, upstream.addr()).await?;
    let mut target = Target::new(contender.addr());
    target.upstream = Some(upstream.addr());
    target.pid = contender.pid();
    let before = Busy::now();
    let report = load(plan, &target, scenario).await;
    let others = before.others_percent(&Busy::now());
    contender.stop().await;
    upstream.stop().await;
    Ok((report?, others))
}

async fn load(plan: &Plan, target: &Target, scenario: &str) -> io::Result<Report> {
    let quick = plan.quick;
    match scenario {
        "calls" => {
            let plan = CallsPlan {
                calls: if quick { 40_000 } else { 200_000 },
                ..CallsPlan::default()
            };
            calls(target, &plan).await
        }
        "streams" => {
            let plan = StreamsPlan {
                seconds: if quick { 3.0 } else { 8.0 },
                ..StreamsPlan::default()
            };
            streams(target, &plan).await
        }
        "idle" => {
            let plan = HeldPlan {
                streams: if quick { 2_000 } else { 5_000 },
                seconds: 2.0,
            };
            idle(target, &plan).await
        }
        "slow" => {
            let plan = HeldPlan {
                streams: 200,
                seconds: if quick { 3.0 } else { 8.0 },
            };
            slow(target, &plan).await
        }
        "storm-rst" | "storm-fin" => {
            let plan = StormPlan {
                cut: match scenario {
                    "storm-rst" => Cut::Rst,
                    _ => Cut::Fin,
                },
                ..StormPlan::default()
            };
            storm(target, &plan).await
        }
        other => Err(io::Error::other(format!("no scenario {other:?}"))),
    }
}
