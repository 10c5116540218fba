//! A flag that is raised once and can be awaited by many: "begin to drain", "the drain is over".
//!
//! Asking is one atomic load; a long-lived poller registers its waker once instead of at every poll.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// Clones share the flag.
#[derive(Clone, Debug, Default)]
pub struct Signal(Arc<Flag>);

/// In one piece: a clone of the token alone would take a lock that all workers share.
#[derive(Debug, Default)]
struct Flag {
    raised: AtomicBool,
    token: CancellationToken,
}

impl Signal {
    pub fn raise(&self) {
        self.0.raised.store(true, Ordering::Release);
        self.0.token.cancel();
    }

    pub fn is_raised(&self) -> bool {
        self.0.raised.load(Ordering::Acquire)
    }

    pub async fn raised(&self) {
        self.0.token.cancelled().await;
    }

    pub fn watch(&self) -> Watch {
        Watch {
            signal: self.clone(),
            wake: Box::pin(self.0.token.clone().cancelled_owned()),
            armed: false,
        }
    }
}

/// Lets one long-lived poller know. The waker is registered once: a poller lives in one task.
#[derive(Debug)]
pub struct Watch {
    signal: Signal,
    wake: Pin<Box<WaitForCancellationFutureOwned>>,
    armed: bool,
}

impl Watch {
    /// As of now, without being woken later.
    pub fn is_raised(&self) -> bool {
        self.signal.is_raised()
    }

    /// Another task polls from here on.
    pub fn moved(&mut self) {
        self.armed = false;
    }

    pub fn poll_raised(&mut self, cx: &mut Context<'_>) -> bool {
        if !self.armed {
            self.armed = true;
            if let Poll::Ready(()) = self.wake.as_mut().poll(cx) {
                return true;
            }
        }
        self.is_raised()
    }
}
