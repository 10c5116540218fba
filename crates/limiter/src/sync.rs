//! The primitives the crate stands on, exchangeable for loom's and shuttle's.

#[cfg(loom)]
pub(crate) use loom::sync::{Arc, Mutex, MutexGuard};
#[cfg(shuttle)]
pub(crate) use shuttle::sync::{Arc, Mutex, MutexGuard};
#[cfg(not(any(loom, shuttle)))]
pub(crate) use std::sync::{Arc, Mutex, MutexGuard};

/// What the threads for blocking work stand on: loom has no part in these.
#[cfg(not(shuttle))]
pub(crate) mod pool {
    pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
    pub(crate) use std::thread::Builder;

    use std::sync::PoisonError;
    use std::time::Duration;

    /// Waits for a notification, at most for `time`. Says whether the time ran out.
    pub(crate) fn wait_for<'a, T>(
        wanted: &Condvar,
        guard: MutexGuard<'a, T>,
        _: &'a Mutex<T>,
        time: Duration,
    ) -> (MutexGuard<'a, T>, bool) {
        let waited = wanted.wait_timeout(guard, time);
        let (guard, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        (guard, timeout.timed_out())
    }
}

#[cfg(shuttle)]
pub(crate) mod pool {
    pub(crate) use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard};
    pub(crate) use shuttle::thread::Builder;

    use std::sync::PoisonError;
    use std::time::Duration;

    use shuttle::rand::Rng;

    /// Time is the scheduler's to choose: the wait ends at a notification, or runs out at some moment.
    pub(crate) fn wait_for<'a, T>(
        wanted: &Condvar,
        guard: MutexGuard<'a, T>,
        mutex: &'a Mutex<T>,
        _: Duration,
    ) -> (MutexGuard<'a, T>, bool) {
        if shuttle::rand::thread_rng().gen_bool(0.5) {
            drop(guard);
            shuttle::thread::yield_now();
            let guard = mutex.lock().unwrap_or_else(PoisonError::into_inner);
            return (guard, true);
        }
        let guard = wanted.wait(guard).unwrap_or_else(PoisonError::into_inner);
        (guard, false)
    }
}
