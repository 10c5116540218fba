//! What a call cost after its client had left. Pure.

use std::time::Duration;

use tidegate_wire::UsageSource;

use super::outcome::WorkEnd;

/// Least time over which a pace is taken.
const PACE_TIME: Duration = Duration::from_millis(50);

/// A call whose client has left, and whose request was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    pub work: WorkEnd,
    /// Since the beginning.
    pub left: Duration,
    /// Since the beginning: the exchange was over.
    pub ended: Duration,
    /// How long the server can have run on after that, unseen. `None`: nothing is known of it.
    pub unseen: Option<Duration>,
    /// The first token, since the beginning.
    pub first_token: Option<Duration>,
    /// Deltas that came before the client left.
    pub before: u64,
    /// Deltas that came after.
    pub after: u64,
    /// Output tokens of the whole call, as far as they are known.
    pub output: Option<u64>,
    pub source: UsageSource,
}

/// What was spent for nobody.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Waste {
    /// Output tokens. `None`: unknown.
    pub tokens: Option<u64>,
    pub known: Known,
    /// From the client's leaving to the end of the work, as far as the contract tells.
    pub time: Duration,
}

/// How the number of tokens is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// By the server.
    Reported,
    /// By the deltas that came: a lower bound, since one may hold several tokens.
    Counted,
    /// From the pace before, for the time in which the server is held to have run on unseen.
    Estimated,
    Unknown,
}

impl Ended {
    pub fn waste(&self) -> Waste {
        let time = self.ended.saturating_sub(self.left) + self.unseen.unwrap_or_default();
        let (tokens, known) = self.tokens();
        Waste {
            tokens,
            known,
            time,
        }
    }

    fn tokens(&self) -> (Option<u64>, Known) {
        if self.work == WorkEnd::Complete {
            if self.ended <= self.left {
                return (Some(0), Known::Counted); // all of it was made for a client that was there
            }
            return match (self.output, self.source) {
                (Some(output), UsageSource::Reported) => {
                    (Some(output.saturating_sub(self.before)), Known::Reported)
                }
                (Some(_), _) => (Some(self.after), Known::Counted),
                (None, _) => (None, Known::Unknown),
            };
        }
        let Some(unseen) = self.unseen else {
            return (None, Known::Unknown);
        };
        if unseen.is_zero() {
            return (Some(self.after), Known::Counted);
        }
        match self.pace() {
            Some(pace) => {
                let unseen = (pace * unseen.as_secs_f64()).round() as u64;
                (Some(self.after.saturating_add(unseen)), Known::Estimated)
            }
            None => (None, Known::Unknown),
        }
    }

    /// Tokens a second, as long as somebody was there. What came at once tells no pace.
    fn pace(&self) -> Option<f64> {
        let time = self.left.checked_sub(self.first_token?)?;
        let known = self.before >= 2 && time >= PACE_TIME;
        known.then(|| (self.before - 1) as f64 / time.as_secs_f64())
    }
}

impl Known {
    /// For metrics and the log.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reported => "reported",
            Self::Counted => "counted",
            Self::Estimated => "estimated",
            Self::Unknown => "unknown",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    fn drained() -> Ended {
        Ended {
            work: WorkEnd::Complete,
            left: 3 * S,
            ended: 10 * S,
            unseen: Some(Duration::ZERO),
            first_token: Some(S),
            before: 21,
            after: 70,
            output: Some(100),
            source: UsageSource::Reported,
        }
    }

    #[test]
    fn what_was_read_on_is_known_as_its_usage_is() {
        let waste = drained().waste();
        assert_eq!(
            (waste.tokens, waste.known, waste.time),
            (Some(79), Known::Reported, 7 * S)
        );
        let counted = Ended {
            source: UsageSource::Counted,
            ..drained()
        };
        assert_eq!(counted.tokens(), (Some(70), Known::Counted));
        let nothing = Ended {
            output: None,
            source: UsageSource::Unknown,
            ..drained()
        };
        assert_eq!(nothing.tokens(), (None, Known::Unknown));
        let over_before = Ended {
            ended: 3 * S,
            ..drained()
        };
        let waste = over_before.waste();
        assert_eq!((waste.tokens, waste.time), (Some(0), Duration::ZERO));
    }

    #[test]
    fn what_runs_on_unseen_is_estimated_from_its_pace() {
        let closed = Ended {
            work: WorkEnd::Cancelled,
            ended: 3 * S,
            unseen: Some(5 * S),
            after: 0,
            ..drained()
        };
        // Twenty tokens in two seconds.
        assert_eq!(closed.tokens(), (Some(50), Known::Estimated));
        assert_eq!(closed.waste().time, 5 * S);
        let at_once = Ended {
            left: S + Duration::from_millis(3),
            ..closed
        };
        assert_eq!(at_once.tokens(), (None, Known::Unknown));
        let in_prefill = Ended {
            first_token: None,
            before: 0,
            ..closed
        };
        assert_eq!(in_prefill.tokens(), (None, Known::Unknown));
        let stops_at_once = Ended {
            unseen: Some(Duration::ZERO),
            ..closed
        };
        assert_eq!(stops_at_once.tokens(), (Some(0), Known::Counted));
        let of_nobody_knows_what = Ended {
            unseen: None,
            ..closed
        };
        assert_eq!(of_nobody_knows_what.tokens(), (None, Known::Unknown));
    }
}
