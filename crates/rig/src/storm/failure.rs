//! What the bars object to.

use clap::ValueEnum as _;
use serde::{Deserialize, Serialize};

use super::Scenario;
use crate::compare::Run;
use crate::load::Bars;

/// A bar that did not hold, or a storm that ended early.
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
/// that ended early fails in any case.
#[must_use]
pub fn failures(run: &Run, bars: &Bars) -> Vec<Failure> {
    let bars = match Scenario::from_str(&run.scenario, false) {
        Ok(scenario) => scenario.judged(bars),
        Err(_) => bars.clone(),
    };
    let early = run.report.ended_early.clone();
    let all = early.into_iter().chain(run.report.failures(&bars));
    all.map(|what| Failure {
        gateway: run.gateway.clone(),
        scenario: run.scenario.clone(),
        round: run.round,
        what,
    })
    .collect()
}
