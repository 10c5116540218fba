//! The same load on several gateways in turn, interleaved and repeated.

mod busy;
mod contender;
mod machine;
mod markdown;
mod upstream;
mod verdict;

use std::io;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Duration;

use busy::Busy;
pub use contender::{Contender, Kind};
pub use machine::Machine;
pub use markdown::markdown;
use upstream::Upstream;
pub use verdict::{Verdict, verdicts};

use crate::compare::{Run, in_turn};
use crate::load::{CallsPlan, Report, StreamsPlan, Target, calls, streams};
use crate::storm::{By, Ceiling, Gateway, Plan as StormPlan, Scenario, storm, upstream_at};

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

/// All scenarios, in the order they run: two that measure what a call and a
/// chunk cost, and storms.
pub const SCENARIOS: [&str; 7] = [
    "calls",
    "streams",
    "steady",
    "idle",
    "slow",
    "storm-rst",
    "storm-fin",
];

/// Runs the plan; runs are given to `done` one by one, so that an interrupted
/// bench has a result.
pub async fn run(plan: &Plan, mut done: impl FnMut(&Run)) -> Vec<Run> {
    let mut runs = Vec::new();
    let say = crate::cli::complain;
    let (rounds, scenarios, contenders) = (plan.rounds, &plan.scenarios, &plan.contenders);
    in_turn(
        rounds,
        scenarios,
        contenders,
        async |round, scenario, (kind, program)| {
            let name = kind.name();
            say(&format!(
                "rig: round {}/{rounds}: {scenario}: {name}",
                round + 1
            ));
            let (report, others_percent) = match one(plan, *kind, program, scenario).await {
                Ok(found) => found,
                Err(e) => {
                    say(&format!("rig: {name}: {scenario}: {e}"));
                    let mut report = Report::default();
                    report.errors.insert(e.to_string(), 1);
                    (report, None)
                }
            };
            let run = Run {
                round,
                gateway: name.to_owned(),
                scenario: scenario.clone(),
                others_percent,
                report,
            };
            done(&run);
            runs.push(run);
            ControlFlow::Continue(())
        },
    )
    .await;
    runs
}

/// What load and upstream do on this machine without a gateway.
pub async fn ceiling() -> io::Result<Ceiling> {
    let upstream = Upstream::start().await?;
    let source = upstream_at(upstream.addr()).await?;
    let ceiling = crate::storm::ceiling(&source).await;
    upstream.stop().await;
    ceiling
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
    let before = Busy::now();
    let report = load(plan, &contender, upstream.addr(), scenario).await;
    let others = before.others_percent(&Busy::now());
    contender.stop().await;
    upstream.stop().await;
    Ok((report?, others))
}

async fn load(
    plan: &Plan,
    contender: &Contender,
    upstream: SocketAddr,
    scenario: &str,
) -> io::Result<Report> {
    let quick = plan.quick;
    let mut target = Target::new(contender.addr());
    target.upstream = Some(upstream);
    target.pid = contender.pid();
    match scenario {
        "calls" => {
            let plan = CallsPlan {
                calls: if quick { 40_000 } else { 200_000 },
                ..CallsPlan::default()
            };
            calls(&target, &plan).await
        }
        "streams" => {
            let plan = StreamsPlan {
                seconds: if quick { 3.0 } else { 8.0 },
                ..StreamsPlan::default()
            };
            streams(&target, &plan).await
        }
        name => {
            let (scenario, plan) = stormy(name, quick)
                .ok_or_else(|| io::Error::other(format!("no scenario {name:?}")))?;
            let mut gateway = Gateway::direct(contender.addr());
            gateway.pid = contender.pid();
            let source = upstream_at(upstream).await?;
            storm(&gateway, Some(&source), scenario, &plan).await
        }
    }
}

/// The storms of the bench.
fn stormy(name: &str, quick: bool) -> Option<(Scenario, StormPlan)> {
    let abort = |by| StormPlan {
        users: 500,
        calls: Some(5_000),
        tokens: 400,
        by,
        undisturbed: true,
        ..StormPlan::default()
    };
    let held = |users, seconds| StormPlan {
        users,
        seconds: Some(seconds),
        ..StormPlan::default()
    };
    Some(match name {
        "steady" => (
            Scenario::Steady,
            StormPlan {
                users: 200,
                calls: Some(if quick { 1_000 } else { 4_000 }),
                tokens: 50,
                ..StormPlan::default()
            },
        ),
        "idle" => (Scenario::Idle, held(if quick { 2_000 } else { 5_000 }, 2.0)),
        "slow" => (Scenario::Slow, held(200, if quick { 3.0 } else { 8.0 })),
        "storm-rst" => (Scenario::Abort, abort(By::Rst)),
        "storm-fin" => (Scenario::Abort, abort(By::Fin)),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scenario_is_a_load_or_a_storm_that_makes_sense() {
        for name in SCENARIOS {
            let storm = stormy(name, true);
            assert_eq!(
                storm.is_none(),
                matches!(name, "calls" | "streams"),
                "{name}"
            );
            if let Some((scenario, plan)) = storm {
                assert_eq!(scenario.contradiction(&plan), None, "{name}");
            }
        }
    }
}
