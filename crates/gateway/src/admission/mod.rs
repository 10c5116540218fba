//! Queue → slot, and the ways of being turned away. Nothing is sent upstream without a slot.

use std::time::Duration;

use tidegate_limiter::{Ask, Limiter, Place, Reason, Rejected};

/// Turned away: no slot was given and none will be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shed {
    QueueFull {
        retry_after: Duration,
    },
    /// Calls whose clients have gone hold the slots.
    LeftoverFull {
        retry_after: Duration,
    },
    /// The key has as many calls as it may: abandoned ones that hold slots, or queued ones.
    ShareFull {
        retry_after: Duration,
    },
    Closed,
}

impl From<Rejected> for Shed {
    fn from(rejected: Rejected) -> Self {
        let retry_after = rejected.retry_after();
        match rejected.reason() {
            Reason::LeftoverFull => Self::LeftoverFull { retry_after },
            Reason::FlowFull => Self::ShareFull { retry_after },
            Reason::Closed => Self::Closed,
            _ => Self::QueueFull { retry_after },
        }
    }
}

/// Asks for a slot; the place may have one already.
///
/// `flow` stands for the key: between keys that wait the limiter is fair.
pub fn offer(limiter: &Limiter, bytes: u64, flow: u64) -> Result<Place, Shed> {
    Ok(limiter.offer(Ask::unnamed(bytes).with_flow(flow))?)
}

/// Whether every slot is held by a call whose client has gone.
pub fn are_all_left(limiter: &Limiter) -> bool {
    let now = limiter.snapshot();
    now.attended == 0 && now.leftovers_block()
}

/// Whether a request of `bytes` would be turned away by every one of `limiters`: then its body need not be read.
pub fn would_shed<'a>(
    mut limiters: impl Iterator<Item = &'a Limiter>,
    bytes: u64,
    flow: u64,
) -> Option<Shed> {
    let ask = Ask::unnamed(bytes).with_flow(flow);
    let mut last = limiters.next()?.would_reject_ask(&ask)?;
    for limiter in limiters {
        last = limiter.would_reject_ask(&ask)?;
    }
    Some(last.into())
}
