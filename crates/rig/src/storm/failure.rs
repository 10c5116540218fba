//! What the bars object to.

use clap::ValueEnum as _;
use serde::{Deserialize, Serialize};

use super::{Scenario, Source};
use crate::compare::Run;
use crate::load::{Bars, Report};

/// A bar that did not hold, or a storm that ended early or measured nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The gateway.
    pub gateway: String,
    /// The scenario.
    pub scenario: String,
    /// Round, from 0.
    pub round: usize,
    /// The figure and the bar, or why it ended.
    pub what: String,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}: {}", self.gateway, self.scenario, self.what)
    }
}

/// What the bars that the scenario can be judged by object to in a run; one
/// that ended early, or whose figures say nothing, fails in any case.
#[must_use]
pub fn failures(run: &Run, bars: &Bars) -> Vec<Failure> {
    let bars = match Scenario::from_str(&run.scenario, false) {
        Ok(scenario) => scenario.judged(bars),
        Err(_) => bars.clone(),
    };
    let report = &run.report;
    let anyhow = [&report.ended_early, &report.void];
    let anyhow = anyhow.into_iter().flatten().cloned();
    let all = anyhow.chain(report.failures(&bars));
    all.map(|what| Failure {
        gateway: run.gateway.clone(),
        scenario: run.scenario.clone(),
        round: run.round,
        what,
    })
    .collect()
}

/// Why the figures of a storm say nothing of the gateway: nothing of the load
/// came to the upstream, or nothing came back. Every bar on waste would hold.
pub(super) fn void(report: &Report, scenario: Scenario, source: Option<&Source>) -> Option<String> {
    if report.ended_early.is_some() {
        return None;
    }
    if let (Some(truth), Some(source)) = (report.truth, source)
        && truth.calls_begun == 0
        && report.attempts > 0
    {
        return Some(format!(
            "none of {} calls came to the upstream at {}; is the gateway pointed at it?{}",
            report.attempts,
            source.addr(),
            most(report).map_or_else(String::new, |kind| format!(" (users saw: {kind})"))
        ));
    }
    // What a drain cuts is what it is about; its bar is on errors.
    let users_saw = report.calls > 0 && scenario != Scenario::Drain;
    if users_saw && report.error_count() >= report.calls {
        let kind = most(report).unwrap_or_default();
        return Some(format!("every call went wrong: {kind}"));
    }
    None
}

/// The error seen most.
fn most(report: &Report) -> Option<String> {
    let most = report.errors.iter().max_by_key(|(_, n)| **n)?;
    Some(format!("{} x {}", most.1, most.0))
}
