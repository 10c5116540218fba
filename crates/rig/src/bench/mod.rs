//! The same load on several gateways in turn, interleaved and repeated.

mod contender;
mod figures;
mod machine;
mod markdown;
mod verdict;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use contender::{Contender, Kind};
pub use machine::Machine;
pub use markdown::markdown;
pub use verdict::{Verdict, verdicts};

use crate::load::{
    CallsPlan, Control, Cut, HeldPlan, Report, StormPlan, StreamsPlan, Target, calls, idle, slow,
    storm, streams,
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
    /// What it found.
    pub report: Report,
}

/// All scenarios, in the order they run.
pub const SCENARIOS: [&str; 6] = ["calls", "streams", "idle", "slow", "storm-rst", "storm-fin"];

/// Runs the plan against a fake upstream at `upstream`; runs done so far are
/// given to `done` one by one, so that an interrupted bench has a result.
pub async fn run(
    plan: &Plan,
    upstream: SocketAddr,
    mut done: impl FnMut(&Run),
) -> io::Result<Vec<Run>> {
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
                let report = match one(plan, *kind, program, upstream, scenario).await {
                    Ok(report) => report,
                    Err(e) => {
                        say(&format!("rig: {}: {scenario}: {e}", kind.name()));
                        let mut report = Report::default();
                        report.errors.insert(e.to_string(), 1);
                        report
                    }
                };
                let run = Run {
                    round,
                    contender: kind.name().to_owned(),
                    scenario: scenario.clone(),
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
    upstream: SocketAddr,
    scenario: &str,
) -> io::Result<Report> {
    let contender = Contender::start(kind, program, upstream).await?;
    let control = Control { addr: upstream };
    control.quiet(Duration::from_secs(20)).await?;
    control.reset().await?;
    let mut target = Target::new(contender.addr());
    target.upstream = Some(upstream);
    target.pid = contender.pid();
    let report = load(plan, &target, scenario).await;
    contender.stop().await;
    report
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
