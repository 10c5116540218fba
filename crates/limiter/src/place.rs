//! The waiter's place in the queue.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::call::Started;
use crate::error::Refused;
use crate::ledger::{Departure, Leave, Look};
use crate::limiter::Handle;

/// A place in the queue, owned by the waiter; a future of the slot.
///
/// # Cancel safety
///
/// Dropping it leaves the queue at once, counted as `left.caller`, and holds no memory behind. If the
/// slot had been granted in the same instant, the call is counted as started and as ended without
/// having done anything (`ended.dropped`, `unclaimed_total`), and the slot goes to the next in the
/// queue. Nothing leaks in either case.
#[derive(Debug)]
#[must_use = "dropping a place leaves the queue"]
pub struct Place {
    call: Option<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    handle: Handle,
    /// It had a slot from the start.
    started: bool,
}

// === impl Place ===

impl Place {
    pub(crate) const fn new(handle: Handle, started: bool) -> Self {
        Self {
            call: Some(Waiting { handle, started }),
        }
    }

    /// The call, if its slot was free when it was offered: nothing is to be waited for.
    ///
    /// # Errors
    ///
    /// The place in the queue, to be awaited. What has come free meanwhile shows there.
    pub fn claim(mut self) -> Result<Started, Self> {
        match self.call.take() {
            Some(call) if call.started => Ok(Started::new(call.handle, Duration::ZERO)),
            call => {
                self.call = call;
                Err(self)
            }
        }
    }

    /// Gives up because the deadline has passed, counted as `left.deadline`.
    ///
    /// If a slot was granted in the same instant, the call has started after all: it is returned and
    /// nothing is counted as left.
    pub fn expire(mut self) -> Option<Started> {
        let call = self.call.take()?;
        match call.leave(Leave::Deadline) {
            Departure::Running { queued_for } => Some(Started::new(call.handle, queued_for)),
            Departure::Left { wakes, .. } => {
                wakes.wake();
                None
            }
            Departure::Gone => None,
        }
    }

    /// How many queued calls of the same class or a higher one came before. `None` if the call has a slot, or the limiter is closed.
    ///
    /// Walks the queue under the lock: for a page or a header now and then, not for every poll.
    #[must_use]
    pub fn position(&self) -> Option<usize> {
        let handle = &self.call.as_ref()?.handle;
        handle.peek(|ledger, key| ledger.position(key))
    }

    /// When a call that leaves this queue should ask again.
    #[must_use]
    pub fn retry_after(&self) -> Duration {
        match &self.call {
            Some(call) => call.handle.peek(|ledger, _| ledger.retry_after()),
            None => crate::error::RETRY_AFTER_MIN,
        }
    }
}

impl Future for Place {
    type Output = Result<Started, Refused>;

    /// Ready with the slot, or with why there is none. A place polled after that is no place any more:
    /// it says [`Refused::Closed`].
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(call) = self.call.take() else {
            return Poll::Ready(Err(Refused::Closed));
        };
        if call.started {
            return Poll::Ready(Ok(Started::new(call.handle, Duration::ZERO)));
        }
        let waker = cx.waker().clone();
        let (look, unused) = call
            .handle
            .peek(|ledger, key| ledger.poll_start(key, waker));
        drop(unused);
        Poll::Ready(match look {
            Look::Waits => {
                self.call = Some(call);
                return Poll::Pending;
            }
            Look::Started { queued_for } => Ok(Started::new(call.handle, queued_for)),
            Look::Closed => Err(Refused::Closed),
            Look::SentAway {
                why,
                waited,
                retry_after,
            } => {
                // It has left already; this takes its entry away.
                if let Departure::Left { wakes, .. } = call.leave(why) {
                    wakes.wake();
                }
                Err(if why == Leave::Overload {
                    Refused::Overloaded {
                        waited,
                        retry_after,
                    }
                } else {
                    Refused::Deadline {
                        waited,
                        retry_after,
                    }
                })
            }
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let Some(call) = self.call.take() else { return };
        match call.leave(Leave::Caller) {
            Departure::Running { .. } => {
                call.handle.release(|ledger, key| ledger.end_unclaimed(key));
            }
            Departure::Left { wakes, .. } => wakes.wake(),
            Departure::Gone => {}
        }
    }
}

// === impl Waiting ===

impl Waiting {
    fn leave(&self, why: Leave) -> Departure {
        self.handle.step(|ledger, key| ledger.leave(key, why))
    }
}
