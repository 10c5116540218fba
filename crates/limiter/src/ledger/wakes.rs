//! Wakers collected under the lock, woken outside it.

use std::task::Waker;

/// At most one in nearly every case, so that one does not allocate.
#[must_use = "somebody waits for these"]
#[derive(Debug, Default)]
pub(crate) struct Wakes {
    first: Option<Waker>,
    more: Vec<Waker>,
}

// === impl Wakes ===

impl Wakes {
    pub(super) fn push(&mut self, waker: Option<Waker>) {
        let Some(waker) = waker else { return };
        if self.first.is_none() {
            self.first = Some(waker);
        } else {
            self.more.push(waker);
        }
    }

    /// Must be called without the lock: a waker may run its task here and now.
    #[inline]
    pub(crate) fn wake(self) {
        if self.first.is_some() {
            self.wake_all();
        }
    }

    fn wake_all(self) {
        for waker in self.first.into_iter().chain(self.more) {
            waker.wake();
        }
    }
}
