//! The handle everybody shares, and the lock around the ledger.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::PoisonError;
use std::task::{Context, Poll};

use crate::arena::Key;
use crate::clock::{Clock, Micros, Ticks};
use crate::error::Rejected;
use crate::ledger::{Ledger, Remains, Terms, Wakes};
use crate::limits::{Ask, Limits, LimitsError};
use crate::place::Place;
use crate::snapshot::{RunningCall, Snapshot};
use crate::sync::{Arc, Mutex, MutexGuard};

/// Limits calls to one upstream. Clones share the same limits, queue and counts.
#[derive(Clone)]
pub struct Limiter {
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    ledger: Mutex<Ledger>,
    ticks: Ticks,
}

/// A future that resolves when nothing is queued and no slot is held. Made by [`Limiter::idle`].
///
/// # Cancel safety
///
/// May be dropped and made anew at any time.
#[must_use = "futures do nothing unless polled"]
pub struct Idle {
    shared: Arc<Shared>,
    watch: Option<u64>,
}

/// One call as its handles know it.
pub(crate) struct Handle {
    shared: Arc<Shared>,
    key: Key,
}

// === impl Limiter ===

impl Limiter {
    /// A limiter with these bounds, on the system's monotonic clock.
    ///
    /// # Errors
    ///
    /// If `hard_limit` is below `limit`, or a bound is above [`MAX_CALLS`](crate::MAX_CALLS).
    pub fn new(limits: Limits) -> Result<Self, LimitsError> {
        Self::build(limits, Ticks::system())
    }

    /// A limiter on a clock of the caller's, for tests and simulations.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_clock(limits: Limits, clock: impl Clock + 'static) -> Result<Self, LimitsError> {
        Self::build(limits, Ticks::of(Box::new(clock)))
    }

    fn build(limits: Limits, ticks: Ticks) -> Result<Self, LimitsError> {
        limits.check()?;
        let shared = Shared {
            ledger: Mutex::new(Ledger::new(limits)),
            ticks,
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// Asks for a slot. The place that is returned has one already, or waits in the queue for it.
    ///
    /// Never blocks and never waits: what cannot be queued is rejected at once.
    ///
    /// # Errors
    ///
    /// If the queue is full, by count or by bytes, or the limiter is closed.
    pub fn offer(&self, mut ask: Ask) -> Result<Place, Rejected> {
        let terms = self.terms(&ask);
        let (mut ledger, _) = self.shared.now();
        // The label of one that is turned away is dropped outside the lock, with its ask.
        let admitted = ledger.offer(&mut ask, &terms)?;
        drop(ledger);
        admitted.wakes.wake();
        Ok(Place::new(self.handle(admitted.key), admitted.started))
    }

    /// What [`offer`](Self::offer) would say now to a call of so many bytes, without counting an offer
    /// or taking a place: to refuse a request before its body is read.
    ///
    /// Advisory: the answer may have changed by the time the offer is made.
    #[must_use]
    pub fn would_reject(&self, bytes: u64) -> Option<Rejected> {
        self.would_reject_ask(&Ask::unnamed(bytes))
    }

    /// As [`would_reject`](Self::would_reject), for an ask with a flow, a class or a deadline.
    #[must_use]
    pub fn would_reject_ask(&self, ask: &Ask) -> Option<Rejected> {
        let terms = self.terms(ask);
        if self.shared.lock().starts_at_once(&terms) {
            return None;
        }
        let (ledger, _) = self.shared.now();
        ledger.verdict(&terms)
    }

    /// Changes the bounds while calls run.
    ///
    /// Growing starts exactly as many queued calls as now have room. Shrinking takes nothing from
    /// anybody: queued calls stay queued, running ones run on, and nothing starts until enough of them
    /// have ended; until then the snapshot says `over_limit`.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new); the old bounds stay.
    pub fn resize(&self, limits: Limits) -> Result<(), LimitsError> {
        limits.check()?;
        let (mut ledger, _) = self.shared.now();
        let wakes = ledger.resize(limits);
        drop(ledger);
        wakes.wake();
        Ok(())
    }

    /// Takes no more offers. Queued calls end with [`Refused::Closed`](crate::Refused::Closed); running
    /// ones run on. A closed limiter stays closed.
    pub fn close(&self) {
        let (mut ledger, _) = self.shared.now();
        let (wakes, remains) = ledger.close();
        drop(ledger);
        wakes.wake();
        drop(remains);
    }

    /// Takes no more offers, but serves the queue to its end: the gentle half of a shutdown.
    pub fn seal(&self) {
        let (mut ledger, _) = self.shared.now();
        ledger.seal();
    }

    /// Every gauge, counter and age at one instant.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let (ledger, _) = self.shared.now();
        ledger.snapshot()
    }

    /// The bounds in force.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.shared.lock().limits()
    }

    /// Every call that holds a slot: the running ones, longest first, then the lingering ones.
    #[must_use]
    pub fn running(&self) -> Vec<RunningCall> {
        let (ledger, _) = self.shared.now();
        ledger.running()
    }

    /// Waits until nothing is queued and no slot is held: after [`seal`](Self::seal) or
    /// [`close`](Self::close), the end of it all.
    pub fn idle(&self) -> Idle {
        Idle {
            shared: self.shared.clone(),
            watch: None,
        }
    }

    fn terms(&self, ask: &Ask) -> Terms {
        Terms {
            bytes: ask.bytes,
            weight: usize::try_from(ask.weight.get()).unwrap_or(usize::MAX),
            class: ask.class,
            flow: ask.flow,
            deadline: match ask.deadline {
                Some(deadline) => self.shared.ticks.at(deadline),
                None => Micros::MAX,
            },
        }
    }

    fn handle(&self, key: Key) -> Handle {
        Handle {
            shared: self.shared.clone(),
            key,
        }
    }
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let snapshot = self.snapshot();
        f.debug_struct("Limiter")
            .field("limit", &snapshot.limit)
            .field("hard_limit", &snapshot.hard_limit)
            .field("queued", &snapshot.queued)
            .field("attended", &snapshot.attended)
            .field("abandoned", &snapshot.abandoned)
            .field("lingering", &snapshot.lingering)
            .finish_non_exhaustive()
    }
}

// === impl Idle ===

impl Future for Idle {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let waker = cx.waker().clone();
        let Self { shared, watch } = &mut *self;
        let (idle, unused) = shared.lock().poll_idle(watch, waker);
        drop(unused);
        if idle { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        if let Some(watch) = self.watch {
            let unused = self.shared.lock().unwatch(watch);
            drop(unused);
        }
    }
}

impl fmt::Debug for Idle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idle").finish_non_exhaustive()
    }
}

// === impl Shared ===

impl Shared {
    /// No code but the ledger's runs under this lock, so a poisoned one holds sound data.
    fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The ledger, brought up to the present. The clock is read before the lock is taken.
    fn now(&self) -> (MutexGuard<'_, Ledger>, Micros) {
        let now = self.ticks.now();
        let mut ledger = self.lock();
        ledger.advance(now);
        (ledger, now)
    }
}

// === impl Handle ===

impl Handle {
    pub(crate) fn again(&self) -> Self {
        Self {
            shared: self.shared.clone(),
            key: self.key,
        }
    }

    pub(crate) const fn key(&self) -> Key {
        self.key
    }

    /// Reads without moving time.
    pub(crate) fn peek<T>(&self, read: impl FnOnce(&mut Ledger, Key) -> T) -> T {
        read(&mut self.shared.lock(), self.key)
    }

    /// One transition at the present time.
    pub(crate) fn step<T>(&self, transition: impl FnOnce(&mut Ledger, Key) -> T) -> T {
        let (mut ledger, _) = self.shared.now();
        transition(&mut ledger, self.key)
    }

    /// One transition that may free a slot: wakes whoever got it, and drops what is left of the call,
    /// both outside the lock.
    pub(crate) fn release(
        &self,
        transition: impl FnOnce(&mut Ledger, Key) -> (Wakes, Option<Remains>),
    ) {
        let (wakes, remains) = self.step(transition);
        wakes.wake();
        drop(remains);
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Call").field(&self.key.id()).finish()
    }
}
