//! What becomes of a call at its upstream when its client has left. Pure: the one place that reads the contract.
//!
//! A background response is a drain without bounds of its own: its client comes back for it.

use std::time::Duration;

use crate::config::{self, Abandon, Contract};

/// A call whose client has just left, and whose request was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaving {
    /// A background response.
    pub background: bool,
    /// Calls that run on for nobody at this upstream, this one among them.
    pub at_once: usize,
    /// How long it may wait for its client's retry, if it can be taken up.
    pub grace: Option<Duration>,
}

/// What follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The exchange is closed now.
    Close,
    /// The answer is read to its end, for nobody.
    ReadOn(Bounds),
    /// The same, until its client's retry has had its chance.
    Grace(Bounds),
    /// It would be read on, but for this bound: it is closed now.
    Overrun(Bound),
}

/// How far an answer is read for nobody. `None`: no bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    pub time: Option<Duration>,
    pub bytes: Option<u64>,
    pub tokens: Option<u64>,
}

/// The bound that ended a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    Time,
    Bytes,
    Tokens,
    AtOnce,
    /// Nobody came back in time.
    Grace,
}

pub fn at_leaving(abandon: &Abandon, leaving: Leaving) -> Fate {
    let bounds = |time| Bounds {
        time: Some(time),
        bytes: Some(abandon.bytes),
        tokens: abandon.tokens,
    };
    let drains = abandon.contract == Contract::Drain;
    match leaving.grace {
        _ if leaving.background => Fate::ReadOn(Bounds::default()),
        None if !drains => Fate::Close,
        _ if leaving.at_once > abandon.at_once => Fate::Overrun(Bound::AtOnce),
        _ if drains => Fate::ReadOn(bounds(abandon.time)),
        Some(grace) => Fate::Grace(bounds(grace)),
        None => Fate::Close,
    }
}

/// How long the slot is kept once we have closed an exchange whose request was sent, and asked for a `stream` or for one piece.
pub fn kept(upstream: &config::Upstream, stream: bool) -> Duration {
    match upstream.abandon.contract {
        Contract::Cancel | Contract::Drain => {
            let whole = upstream.settle_whole.filter(|_| !stream);
            whole.unwrap_or(upstream.settle)
        }
        Contract::Linger => upstream.abandon.time,
    }
}

/// How long it is kept when the exchange broke by itself: a server that runs on after a close does so after a break, too.
pub fn kept_broken(upstream: &config::Upstream) -> Duration {
    match upstream.abandon.contract {
        Contract::Cancel | Contract::Drain => Duration::ZERO,
        Contract::Linger => upstream.abandon.time,
    }
}

/// How long the server can have run on unseen behind a closed exchange whose slot was `kept` by contract. `None`: nothing is known of it.
pub fn unseen(upstream: &config::Upstream, stream: bool, kept: Duration) -> Option<Duration> {
    let seen = upstream.kind.row().stream_ran_on;
    match upstream.abandon.contract {
        _ if !upstream.stops_known => None,
        Contract::Cancel | Contract::Drain if stream => Some(seen.unwrap_or(kept).min(kept)),
        _ => Some(kept),
    }
}

impl Bounds {
    /// The bound that so many bytes and tokens are past.
    pub fn passed(&self, bytes: u64, tokens: u64) -> Option<Bound> {
        if self.bytes.is_some_and(|most| bytes > most) {
            return Some(Bound::Bytes);
        }
        self.tokens
            .is_some_and(|most| tokens > most)
            .then_some(Bound::Tokens)
    }
}

impl Bound {
    /// For metrics and the log; as in `[upstreams.abandon]`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Time => "time",
            Self::Bytes => "bytes",
            Self::Tokens => "tokens",
            Self::AtOnce => "at_once",
            Self::Grace => "grace",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;
    use crate::config::{Endpoint, Kind};

    fn abandon(contract: Contract) -> Abandon {
        let slots = NonZeroUsize::new(4).unwrap();
        Abandon {
            contract,
            ..Abandon::of(Kind::Other, slots)
        }
    }

    #[test]
    fn the_contract_decides_and_background_is_exempt() {
        let leaving = |background, at_once| Leaving {
            background,
            at_once,
            grace: None,
        };
        for contract in [Contract::Cancel, Contract::Linger] {
            let abandon = abandon(contract);
            assert_eq!(at_leaving(&abandon, leaving(false, 1)), Fate::Close);
            let on = Fate::ReadOn(Bounds::default());
            assert_eq!(at_leaving(&abandon, leaving(true, 99)), on);
        }
        let drain = abandon(Contract::Drain);
        let Fate::ReadOn(bounds) = at_leaving(&drain, leaving(false, 2)) else {
            panic!("half of four may run on");
        };
        assert_eq!(bounds.time, Some(drain.time));
        assert_eq!(
            at_leaving(&drain, leaving(false, 3)),
            Fate::Overrun(Bound::AtOnce)
        );
    }

    #[test]
    fn a_grace_goes_before_a_close_and_within_the_bounds() {
        let grace = Duration::from_secs(5);
        let leaving = |at_once| Leaving {
            background: false,
            at_once,
            grace: Some(grace),
        };
        for contract in [Contract::Cancel, Contract::Linger] {
            let abandon = abandon(contract);
            let Fate::Grace(bounds) = at_leaving(&abandon, leaving(2)) else {
                panic!("half of four may wait");
            };
            assert_eq!(
                (bounds.time, bounds.bytes),
                (Some(grace), Some(abandon.bytes))
            );
            let over = Fate::Overrun(Bound::AtOnce);
            assert_eq!(at_leaving(&abandon, leaving(3)), over);
        }
        let drain = abandon(Contract::Drain);
        let Fate::ReadOn(bounds) = at_leaving(&drain, leaving(1)) else {
            panic!("a drain goes on as long as it always does");
        };
        assert_eq!(bounds.time, Some(drain.time));
    }

    #[test]
    fn a_bound_is_passed_by_the_first_byte_or_token_above_it() {
        let bounds = Bounds {
            time: None,
            bytes: Some(10),
            tokens: Some(3),
        };
        assert_eq!(bounds.passed(10, 3), None);
        assert_eq!(bounds.passed(11, 3), Some(Bound::Bytes));
        assert_eq!(bounds.passed(10, 4), Some(Bound::Tokens));
        assert_eq!(Bounds::default().passed(u64::MAX, u64::MAX), None);
    }

    #[test]
    fn the_slot_is_kept_as_the_contract_says() {
        let endpoint = Endpoint::parse("http://a").unwrap();
        let mut upstream = config::Upstream::new("a", Kind::Other, vec![endpoint]);
        upstream.settle = Duration::from_secs(1);
        upstream.abandon.time = Duration::from_secs(9);
        for (contract, closed, broken) in [
            (Contract::Cancel, 1, 0),
            (Contract::Drain, 1, 0),
            (Contract::Linger, 9, 9),
        ] {
            upstream.abandon.contract = contract;
            assert_eq!(kept(&upstream, true), Duration::from_secs(closed));
            assert_eq!(kept_broken(&upstream), Duration::from_secs(broken));
        }
    }

    /// Streams of llama.cpp end within 33 ms of a close, its whole answers a second later at best.
    #[test]
    fn what_was_asked_for_decides_how_long_a_server_runs_on() {
        let endpoint: Endpoint = "http://127.0.0.1:1".parse().unwrap();
        let llama = config::Upstream::new("a", Kind::LlamaCpp, vec![endpoint.clone()]);
        let ms = Duration::from_millis;
        for (stream, held, ran) in [(true, 250, 33), (false, 1000, 1000)] {
            let kept = kept(&llama, stream);
            assert_eq!(kept, ms(held), "{stream}");
            assert_eq!(unseen(&llama, stream, kept), Some(ms(ran)), "{stream}");
        }
        let operators = config::Upstream {
            settle: ms(9),
            settle_whole: None,
            ..llama
        };
        assert_eq!(kept(&operators, false), ms(9));
        assert_eq!(unseen(&operators, true, ms(9)), Some(ms(9)));
        let other = config::Upstream::new("a", Kind::Other, vec![endpoint]);
        assert_eq!(unseen(&other, true, Duration::ZERO), None);
        let written = config::Upstream {
            stops_known: true,
            ..other
        };
        assert_eq!(unseen(&written, true, Duration::ZERO), Some(Duration::ZERO));
    }
}
