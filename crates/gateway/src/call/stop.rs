//! The end of a call from outside.

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// Who ends a call from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum By {
    /// The client, with the id that it chose. As if it had left, but it is told.
    Client = 1,
    /// The operator: the work ends and the slot is free, whatever the contract.
    Operator = 2,
}

/// Marked once by whoever ends the call; awaited by the one task that has it.
#[derive(Default)]
pub(super) struct Stop {
    by: AtomicU8,
    waker: Mutex<Option<Waker>>,
}

impl By {
    /// For metrics, the log and the error's code.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Client => "cancelled_by_client",
            Self::Operator => "killed",
        }
    }

    /// What the client is told.
    pub fn message(self) -> &'static str {
        match self {
            Self::Client => "the call was cancelled by its id",
            Self::Operator => "the call was ended by the operator of the gateway",
        }
    }
}

impl Stop {
    pub(super) fn mark(&self, by: By) {
        // The operator's word is the stronger one.
        self.by.fetch_max(by as u8, Ordering::AcqRel);
    }

    pub(super) fn wake(&self) {
        let waker = self.lock().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(super) fn by(&self) -> Option<By> {
        match self.by.load(Ordering::Acquire) {
            0 => None,
            1 => Some(By::Client),
            _ => Some(By::Operator),
        }
    }

    /// Ready when somebody of this standing, or a higher one, wants it.
    pub(super) fn poll_at(&self, cx: &mut Context<'_>, least: By) -> Poll<By> {
        let by = || self.by().filter(|by| *by as u8 >= least as u8);
        if let Some(by) = by() {
            return Poll::Ready(by);
        }
        {
            let mut waker = self.lock();
            if !waker.as_ref().is_some_and(|w| w.will_wake(cx.waker())) {
                *waker = Some(cx.waker().clone());
            }
        }
        // It may have been marked before the waker was there.
        by().map_or(Poll::Pending, Poll::Ready)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Waker>> {
        self.waker.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Stop").field(&self.by()).finish()
    }
}
