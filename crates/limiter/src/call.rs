//! The two handles of a started call: the waiter's and the work's, with lives of their own.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::ledger::{NoReturn, Outcome};
use crate::limiter::Handle;
use crate::snapshot::Ended;

/// A call that has its slot. Dropped whole, the work ends before the waiter leaves: nothing ran that
/// nobody waited for, so nothing counts as abandoned.
#[derive(Debug)]
#[must_use = "dropping it ends the call"]
pub struct Started {
    /// Goes with the work: into its task, its thread, its body.
    pub slot: Slot, // first, so that it is dropped first
    /// Stays with whoever wants the answer.
    pub waiter: Waiter,
    /// How long the call was queued.
    pub queued_for: Duration,
}

/// Somebody's interest in a running call. Dropping it says "I leave".
///
/// A call whose waiter has left while its work still ran is *abandoned*: it keeps its slot, is counted
/// apart, and [`Slot::abandoned`] resolves.
#[derive(Debug)]
#[must_use = "dropping a waiter abandons the call"]
pub struct Waiter {
    handle: Handle,
    present: bool,
}

/// The right to occupy the upstream, owned by the work. Dropping it says "it is over", counted as
/// `dropped`, or as `panicked` while the thread unwinds.
#[derive(Debug)]
#[must_use = "dropping a slot ends the call"]
pub struct Slot {
    handle: Handle,
    over: bool,
}

/// A slot kept for a remote that may run on after the local work is over. Dropping it gives the slot
/// back.
#[derive(Debug)]
#[must_use = "dropping it gives the slot back"]
pub struct Linger {
    handle: Handle,
    over: bool,
}

/// A future that resolves when the waiter has left. Made by [`Slot::abandoned`].
///
/// # Cancel safety
///
/// May be dropped and made anew at any time; no event is lost.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct Abandoned<'a> {
    slot: &'a mut Slot,
}

/// Why a waiter that had stepped away cannot come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CannotReturn {
    /// The work is over.
    Over,
    /// `limit` other calls are attended by now. Possible only below a `hard_limit` above the `limit`.
    Full,
}

// === impl Started ===

impl Started {
    pub(crate) fn new(handle: Handle, queued_for: Duration) -> Self {
        Self {
            waiter: Waiter {
                handle: handle.again(),
                present: true,
            },
            slot: Slot {
                handle,
                over: false,
            },
            queued_for,
        }
    }
}

// === impl Waiter ===

impl Waiter {
    /// The call's number, as in [`RunningCall::id`](crate::RunningCall::id).
    #[must_use]
    pub fn id(&self) -> u64 {
        self.handle.key().id()
    }

    /// Has its answer and goes. The call does not count as abandoned, even if its slot is held for a
    /// moment longer. Of a waiter that had stepped away, the call stays abandoned.
    pub fn done(mut self) {
        self.present = false;
    }

    /// Leaves, but keeps the handle: the call is abandoned until [`come_back`](Self::come_back).
    pub fn step_away(&mut self) {
        if std::mem::take(&mut self.present) {
            self.leave();
        }
    }

    /// Takes up a call again that it had stepped away from.
    ///
    /// # Errors
    ///
    /// If the work is over, or the limit of attended calls is used up by others; the call then stays
    /// abandoned and its outcome may still be awaited.
    pub fn come_back(&mut self) -> Result<(), CannotReturn> {
        let back = self.handle.step(|ledger, key| ledger.come_back(key));
        let wakes = back.map_err(|reason| match reason {
            NoReturn::Over => CannotReturn::Over,
            NoReturn::Full => CannotReturn::Full,
        })?;
        wakes.wake();
        self.present = true;
        Ok(())
    }

    fn leave(&self) {
        let wakes = self.handle.step(|ledger, key| ledger.abandon(key));
        wakes.wake();
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        if self.present {
            self.leave();
        }
    }
}

// === impl Slot ===

impl Slot {
    /// The call's number, as in [`RunningCall::id`](crate::RunningCall::id).
    #[must_use]
    pub fn id(&self) -> u64 {
        self.handle.key().id()
    }

    /// The work is over. The slot goes to the next in the queue before anybody else can take it.
    ///
    /// A call cannot end twice, nor end and linger: each takes the slot away.
    ///
    /// ```compile_fail,E0382
    /// fn twice(slot: tidegate_limiter::Slot) {
    ///     slot.finish(tidegate_limiter::Ended::Ok);
    ///     slot.finish(tidegate_limiter::Ended::Ok);
    /// }
    /// ```
    ///
    /// ```compile_fail,E0382
    /// fn ends_and_lingers(slot: tidegate_limiter::Slot) {
    ///     slot.finish(tidegate_limiter::Ended::Ok);
    ///     let _ = slot.linger();
    /// }
    /// ```
    ///
    /// And there is one slot for each call.
    ///
    /// ```compile_fail,E0599
    /// fn two(slot: &tidegate_limiter::Slot) -> tidegate_limiter::Slot {
    ///     tidegate_limiter::Slot::clone(slot)
    /// }
    /// ```
    pub fn finish(mut self, ended: Ended) {
        self.end(Outcome::Said(ended));
    }

    /// The local work is over, but the remote may run on: the slot stays taken until the returned
    /// [`Linger`] is dropped. The call counts as `lingering`, no longer as running, and in the end as
    /// [`Ended::Cancelled`].
    pub fn linger(self) -> Linger {
        self.linger_as(Ended::Cancelled)
    }

    /// As [`linger`](Self::linger), to be counted as `ended` in the end.
    pub fn linger_as(mut self, ended: Ended) -> Linger {
        self.over = true;
        let (wakes, unused) = self
            .handle
            .step(|ledger, key| ledger.linger(key, Outcome::Said(ended)));
        wakes.wake();
        drop(unused);
        Linger {
            handle: self.handle.again(),
            over: false,
        }
    }

    /// Whether the waiter has left and not come back.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        self.handle.peek(|ledger, key| ledger.is_abandoned(key))
    }

    /// Waits until the waiter has left: the moment to cancel what the work does, or to choose to go on.
    /// Never resolves for a waiter that said [`done`](Waiter::done).
    ///
    /// # Cancel safety
    ///
    /// May be dropped and called again at any time; no event is lost.
    pub fn abandoned(&mut self) -> Abandoned<'_> {
        Abandoned { slot: self }
    }

    /// Polls for the same event. The last waker is the one that is woken.
    pub fn poll_abandoned(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let waker = cx.waker().clone();
        let (poll, unused) = self
            .handle
            .peek(|ledger, key| ledger.poll_abandoned(key, waker));
        drop(unused);
        poll
    }

    fn end(&mut self, outcome: Outcome) {
        if !std::mem::replace(&mut self.over, true) {
            self.handle.release(|ledger, key| ledger.end(key, outcome));
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        self.end(if std::thread::panicking() {
            Outcome::Said(Ended::Panicked)
        } else {
            Outcome::Dropped
        });
    }
}

// === impl Linger ===

impl Linger {
    /// The call's number, as in [`RunningCall::id`](crate::RunningCall::id).
    #[must_use]
    pub fn id(&self) -> u64 {
        self.handle.key().id()
    }

    /// The remote is known to have ended: the slot is given back, counted as `confirmed_total`.
    pub fn confirm_end(mut self) {
        self.end(true);
    }

    fn end(&mut self, confirmed: bool) {
        if !std::mem::replace(&mut self.over, true) {
            self.handle
                .release(|ledger, key| ledger.end_linger(key, confirmed));
        }
    }
}

impl Drop for Linger {
    fn drop(&mut self) {
        self.end(false);
    }
}

// === impl Abandoned ===

impl Future for Abandoned<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.slot.poll_abandoned(cx)
    }
}

// === impl CannotReturn ===

impl fmt::Display for CannotReturn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Over => "the work is over",
            Self::Full => "the limit of attended calls is used up",
        })
    }
}

impl std::error::Error for CannotReturn {}
