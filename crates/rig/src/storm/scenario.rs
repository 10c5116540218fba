//! The scenarios, as values: what is asked, when users leave, how they read.

use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::Script;
use crate::load::Bars;

/// A scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Scenario {
    /// Users cut their stream at the n-th chunk
    Abort,
    /// Users leave before anything came: queued, or in the prompt's step
    LeaveEarly,
    /// Users give up on answers that are not streamed
    Abandon,
    /// Users read far slower than the upstream writes
    Slow,
    /// Users stop reading, and stay
    Stalled,
    /// Streams that say two words and fall silent
    Idle,
    /// Calls at a fixed rate, counted from when they were due
    Burst,
    /// Users who read their streams to the end, one after the other
    Steady,
    /// Users who give up and try again, as the SDKs do, on a server with few slots
    Retry,
    /// SIGTERM to the gateway while users read (needs its pid)
    Drain,
    /// Users whose machines vanish without a word (needs root: network namespaces)
    Vanish,
}

/// How users leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum By {
    /// A reset
    #[default]
    Rst,
    /// The end of their side (FIN); they go a moment later
    Fin,
    /// Their socket dropped, as the kernel does for a killed process
    Drop,
}

/// How much of a scenario, and with what.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Users at once.
    pub users: usize,
    /// Calls in all; without, ten for each user.
    pub calls: Option<u64>,
    /// Length of scenarios that are not over with their calls; without, what
    /// the scenario needs.
    pub seconds: Option<f64>,
    /// Calls a second of a burst.
    pub rate: f64,
    /// Tokens of an answer.
    pub tokens: u64,
    /// Time between tokens.
    pub pace_ms: f64,
    /// The chunk at which users leave.
    pub at: u64,
    /// How they leave.
    pub by: By,
    /// How long users wait who leave without an answer.
    pub patience: Duration,
    /// Slots of the upstream in `retry`.
    pub slots: u32,
    /// Rounds of a comparison.
    pub rounds: usize,
    /// Longest time of one scenario.
    pub limit: Duration,
    /// Before `abort`, also time the first event while nobody leaves.
    pub undisturbed: bool,
    /// A line on standard error now and then.
    #[serde(skip)]
    pub progress: bool,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            users: 100,
            calls: None,
            seconds: None,
            rate: 100.0,
            tokens: 200,
            pace_ms: 20.0,
            at: 5,
            by: By::Rst,
            patience: Duration::from_millis(200),
            slots: 8,
            rounds: 1,
            limit: Duration::from_secs(180),
            undisturbed: false,
            progress: false,
        }
    }
}

/// When calls begin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Arrivals {
    /// When the user's last one is over.
    Closed,
    /// So many a second.
    Open(f64),
}

/// When a user goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaves {
    AtChunk(u64),
    After(Duration),
    /// When all have held their streams for a while.
    Together,
    AtEnd,
}

/// How a user reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reads {
    Always,
    Slowly,
    /// A little, and then no more.
    Stops,
}

impl Scenario {
    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Abort => "abort",
            Self::LeaveEarly => "leave-early",
            Self::Abandon => "abandon",
            Self::Slow => "slow",
            Self::Stalled => "stalled",
            Self::Idle => "idle",
            Self::Burst => "burst",
            Self::Steady => "steady",
            Self::Retry => "retry",
            Self::Drain => "drain",
            Self::Vanish => "vanish",
        }
    }

    /// What it is, in a sentence.
    #[must_use]
    pub fn about(self) -> String {
        let value = self.to_possible_value();
        let help = value.and_then(|v| v.get_help().map(ToString::to_string));
        help.unwrap_or_default()
    }

    pub(super) fn arrivals(self, plan: &Plan) -> Arrivals {
        match self {
            Self::Burst => Arrivals::Open(plan.rate),
            _ => Arrivals::Closed,
        }
    }

    /// Calls in all, where it is over with them.
    pub(super) fn calls(self, plan: &Plan) -> Option<u64> {
        let users = plan.users as u64;
        match self {
            Self::Abort | Self::LeaveEarly | Self::Abandon | Self::Retry => {
                Some(plan.calls.unwrap_or(users * 10))
            }
            Self::Slow | Self::Stalled | Self::Idle | Self::Vanish => Some(users),
            Self::Steady => plan.calls,
            Self::Burst | Self::Drain => None,
        }
    }

    pub(super) fn streamed(self) -> bool {
        self != Self::Abandon
    }

    pub(super) fn retries(self) -> bool {
        self == Self::Retry
    }

    pub(super) fn leaves(self, plan: &Plan) -> Leaves {
        match self {
            Self::Abort => Leaves::AtChunk(plan.at),
            Self::LeaveEarly | Self::Abandon => Leaves::After(plan.patience),
            // Half of the answers come in time if nobody else is there.
            Self::Retry => Leaves::After(Duration::from_secs_f64(self.work_seconds(plan) * 1.5)),
            Self::Slow | Self::Stalled | Self::Idle => Leaves::Together,
            Self::Burst | Self::Steady | Self::Drain | Self::Vanish => Leaves::AtEnd,
        }
    }

    pub(super) fn reads(self) -> Reads {
        match self {
            Self::Slow => Reads::Slowly,
            Self::Stalled => Reads::Stops,
            _ => Reads::Always,
        }
    }

    /// Whether users hold a stream each, for a time.
    pub(super) fn held(self) -> bool {
        matches!(self, Self::Slow | Self::Stalled | Self::Idle)
    }

    /// How long it lasts where calls do not say.
    pub(super) fn seconds(self, plan: &Plan) -> f64 {
        plan.seconds.unwrap_or(match self {
            // TCP's own timers are what ends the work of machines that are
            // gone, half a minute where they are set well.
            Self::Vanish => 60.0,
            _ => 10.0,
        })
    }

    /// Those of the bars that are on figures this scenario has.
    pub(crate) fn judged(self, bars: &Bars) -> Bars {
        let mut bars = bars.clone();
        if self.tokens(&Plan::default()).is_none() {
            bars.max_waste_percent = None;
        }
        if !self.retries() {
            bars.max_amplification = None;
        }
        if !self.held() {
            bars.max_kib_per_stream = None;
            bars.max_mib = None;
        }
        if self != Self::Abort {
            bars.max_first_event_ratio = None;
        }
        if self.held() || self.gives_up() || self == Self::Vanish {
            bars.max_delay_p99_ms = None;
        }
        if matches!(
            self,
            Self::LeaveEarly | Self::Abandon | Self::Stalled | Self::Vanish
        ) {
            bars.max_cpu_us_per_chunk = None;
        }
        if self == Self::Drain {
            bars.max_memory_left_mib = None;
            bars.max_cpu_us_per_call = None;
            bars.max_cpu_us_per_chunk = None;
        } else {
            bars.max_exit_seconds = None;
        }
        bars
    }

    /// Whether leaving without an answer is what users are there for.
    pub(super) fn gives_up(self) -> bool {
        matches!(self, Self::LeaveEarly | Self::Abandon)
    }

    fn work_seconds(self, plan: &Plan) -> f64 {
        let tokens = self.tokens(plan).unwrap_or(plan.tokens);
        crate::load::float(tokens) * plan.pace_ms / 1000.0
    }

    /// From one user's coming to the next one's.
    pub(super) fn between(self, plan: &Plan) -> Duration {
        if self == Self::Drain {
            // In step, all of them could be between two calls at the signal.
            let users = u32::try_from(plan.users.max(1)).unwrap_or(u32::MAX);
            return Duration::from_secs_f64(self.work_seconds(plan)) / users;
        }
        Duration::from_secs_f64(plan.pace_ms.clamp(1.0, 100.0) / 1000.0) / 25
    }

    /// Tokens of each answer, where it has an end.
    pub(super) fn tokens(self, plan: &Plan) -> Option<u64> {
        match self {
            Self::Slow | Self::Stalled | Self::Idle | Self::Vanish => None,
            // Short ones, so that many begin and end.
            Self::Retry | Self::Burst | Self::Drain => Some(plan.tokens.min(50)),
            _ => Some(plan.tokens),
        }
    }

    /// What the request asks the fake upstream to do.
    pub(super) fn rig(self, plan: &Plan) -> Value {
        let tokens = self.tokens(plan).unwrap_or(plan.tokens);
        match self {
            Self::LeaveEarly => json!({
                "tokens": tokens, "pace_ms": plan.pace_ms, "role_chunk": false, "delay_ms": 5_000,
            }),
            Self::Slow | Self::Stalled => json!({"end": "never", "event_bytes": 4096}),
            Self::Idle => json!({"tokens": 3, "stall": {"at": {"event": 2}}}),
            _ => json!({
                "tokens": tokens, "pace_ms": plan.pace_ms, "role_chunk": false, "stamp": true,
            }),
        }
    }

    /// What the fake upstream has to be, if anything special.
    pub(super) fn upstream(self, plan: &Plan) -> Option<Script> {
        self.retries().then(|| Script {
            capacity: Some(u64::from(plan.slots)),
            ..Script::default()
        })
    }

    /// Why this plan makes no sense for it, if it does not.
    #[must_use]
    pub fn contradiction(self, plan: &Plan) -> Option<String> {
        match self {
            Self::Abort if plan.at >= plan.tokens => Some(format!(
                "abort: users would leave at chunk {} of answers of {} tokens; give --at less or --tokens more",
                plan.at, plan.tokens
            )),
            Self::Abandon if plan.patience.as_secs_f64() >= self.work_seconds(plan) => {
                Some(format!(
                    "abandon: answers take {:.1} s and users wait {:.1} s for them; give --patience less or --tokens more",
                    self.work_seconds(plan),
                    plan.patience.as_secs_f64()
                ))
            }
            Self::LeaveEarly if plan.patience >= Duration::from_secs(5) => Some(
                "leave-early: the upstream answers after 5 s; --patience has to be less".to_owned(),
            ),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_makes_no_sense_is_said() {
        let plan = Plan {
            at: 300,
            patience: Duration::from_secs(9),
            ..Plan::default()
        };
        for scenario in Scenario::value_variants() {
            let senseless = matches!(
                scenario,
                Scenario::Abort | Scenario::Abandon | Scenario::LeaveEarly
            );
            assert_eq!(scenario.contradiction(&plan).is_some(), senseless);
            assert_eq!(scenario.contradiction(&Plan::default()), None);
            assert!(!scenario.about().is_empty());
        }
    }
}
