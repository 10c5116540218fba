//! Queue → slot, and the ways of being turned away. Nothing is sent upstream without a slot.

use std::sync::Arc;
use std::time::Duration;

use tidegate_limiter::{Ask, Limiter, Place, Reason, Rejected, Slot, Started, Waiter};

/// What a call holds from its admission to its end.
#[derive(Debug)]
pub struct Held {
    /// The right to occupy upstream capacity: goes with the work.
    pub slot: Slot,
    /// Whose answer it will be: goes with the client.
    pub waiter: Waiter,
    pub queued_for: Duration,
}

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
    Closed,
}

impl From<Started> for Held {
    fn from(started: Started) -> Self {
        Self {
            slot: started.slot,
            waiter: started.waiter,
            queued_for: started.queued_for,
        }
    }
}

impl From<Rejected> for Shed {
    fn from(rejected: Rejected) -> Self {
        let retry_after = rejected.retry_after();
        match rejected.reason() {
            Reason::LeftoverFull => Self::LeftoverFull { retry_after },
            Reason::Closed => Self::Closed,
            _ => Self::QueueFull { retry_after },
        }
    }
}

/// Asks for a slot; the place may have one already.
pub fn offer(limiter: &Limiter, id: &Arc<str>, bytes: u64) -> Result<Place, Shed> {
    Ok(limiter.offer(Ask::new(Arc::clone(id), bytes))?)
}

/// Whether a request of `bytes` would be turned away by every one of `limiters`: then its body need not be read.
pub fn would_shed<'a>(mut limiters: impl Iterator<Item = &'a Limiter>, bytes: u64) -> Option<Shed> {
    let mut last = limiters.next()?.would_reject(bytes)?;
    for limiter in limiters {
        last = limiter.would_reject(bytes)?;
    }
    Some(last.into())
}
