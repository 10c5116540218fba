//! One call's part in the ledger, and every step that it can take.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use pyo3::prelude::*;
use tidegate_limiter::{Ended, Place, Refused, Rejected, Slot, Started, Waiter};

use crate::ledger::{Offer, Woken, lock};
use crate::sever;

/// Why a call got no slot. None of its work has started.
#[pyclass(frozen, get_all, module = "tidegate._core")]
#[derive(Debug, Clone)]
pub(crate) struct Refusal {
    /// `queue_full`, `queue_bytes`, `leftover_full`, `flow_full`, `deadline`, `overload` or `closed`.
    reason: &'static str,
    /// In the words of the ledger.
    message: String,
    /// Seconds until it is worth asking again.
    retry_after: f64,
}

/// What a look for the slot finds.
#[derive(IntoPyObject)]
pub(crate) enum Look {
    Started(bool),
    Never(Refusal),
}

/// One call: queued, granted, running or over. Each step happens once, whoever takes it first.
#[pyclass(frozen, module = "tidegate._core")]
#[derive(Debug)]
pub(crate) struct Entry {
    number: u64,
    state: Mutex<State>,
    /// Its waiter has gone for good: what it still begins is refused.
    severed: AtomicBool,
    woken: Woken,
}

#[derive(Debug)]
enum State {
    Queued(Place),
    /// It has a slot, and nothing of it has begun.
    Granted(Holding),
    Running(Holding),
    Over,
}

#[derive(Debug)]
struct Holding {
    tenure: Arc<Tenure>,
    /// None if its waiter is gone, or the slot is another call's.
    waiter: Option<Waiter>,
    /// Whether a call that it makes itself is under its slot now.
    lends: Arc<AtomicBool>,
    /// That of the call it is made by, if it has its slot from there.
    borrows: Option<Arc<AtomicBool>>,
}

/// A slot, and the calls that are under it: its owner, and those that the owner's work makes itself.
#[derive(Debug)]
struct Tenure(Mutex<Lease>);

#[derive(Debug)]
struct Lease {
    slot: Option<Slot>,
    calls: usize,
    /// How the owner's work ended, once it has.
    ended: Ended,
}

// === impl Refusal ===

impl From<Rejected> for Refusal {
    fn from(rejected: Rejected) -> Self {
        Self {
            reason: rejected.reason().as_str(),
            message: rejected.to_string(),
            retry_after: rejected.retry_after().as_secs_f64(),
        }
    }
}

impl From<Refused> for Refusal {
    fn from(refused: Refused) -> Self {
        Self {
            reason: match refused {
                Refused::Closed => "closed",
                Refused::Deadline { .. } => "deadline",
                Refused::Overloaded { .. } => "overload",
            },
            message: refused.to_string(),
            retry_after: refused.retry_after().as_secs_f64(),
        }
    }
}

// === impl Holding ===

impl Holding {
    fn new(started: Started) -> Self {
        Self {
            tenure: Arc::new(Tenure(Mutex::new(Lease {
                slot: Some(started.slot),
                calls: 1,
                ended: Ended::Ok,
            }))),
            waiter: Some(started.waiter),
            lends: Arc::default(),
            borrows: None,
        }
    }

    /// For a call that this one's work makes itself. One at a time.
    fn lend(&self) -> Option<Self> {
        if self.lends.swap(true, Ordering::AcqRel) {
            return None;
        }
        lock(&self.tenure.0).calls += 1;
        Some(Self {
            tenure: self.tenure.clone(),
            waiter: None,
            lends: Arc::default(),
            borrows: Some(self.lends.clone()),
        })
    }

    /// The work is over. The slot is given back when that of all calls under it is.
    fn end(self, ended: Ended) {
        let mut lease = lock(&self.tenure.0);
        match &self.borrows {
            Some(lends) => lends.store(false, Ordering::Release),
            None => lease.ended = ended,
        }
        lease.calls -= 1;
        if lease.calls == 0
            && let Some(slot) = lease.slot.take()
        {
            slot.finish(lease.ended);
        }
        drop(lease);
        if let Some(waiter) = self.waiter {
            waiter.done();
        }
    }
}

// === impl Entry ===

impl Entry {
    /// The entry of a call that has been offered.
    pub(crate) fn offered(place: Place, number: u64, woken: Woken) -> Offer {
        let entry = Self {
            number,
            state: Mutex::new(State::Queued(place)),
            severed: AtomicBool::new(false),
            woken,
        };
        // Nobody is to be woken yet: whoever made the offer looks again once the call is known by its number.
        match entry.look(Waker::noop()) {
            Look::Started(started) => Offer::Taken((entry, started)),
            Look::Never(refusal) => Offer::Rejected(refusal),
        }
    }

    fn look(&self, waker: &Waker) -> Look {
        let mut state = lock(&self.state);
        let State::Queued(place) = &mut *state else {
            return Look::Started(false);
        };
        match Pin::new(place).poll(&mut Context::from_waker(waker)) {
            Poll::Pending => Look::Started(false),
            Poll::Ready(Ok(started)) => {
                *state = State::Granted(Holding::new(started));
                Look::Started(true)
            }
            Poll::Ready(Err(refused)) => {
                *state = State::Over;
                Look::Never(refused.into())
            }
        }
    }

    pub(crate) fn is_severed(&self) -> bool {
        self.severed.load(Ordering::Relaxed)
    }
}

#[pymethods]
impl Entry {
    /// Whether it has a slot and its work is not over.
    #[getter]
    fn holds(&self) -> bool {
        matches!(*lock(&self.state), State::Granted(_) | State::Running(_))
    }

    /// Whether its work has begun and is not over.
    #[getter]
    fn begun(&self) -> bool {
        matches!(*lock(&self.state), State::Running(_))
    }

    /// Whether its work runs and its waiter is away.
    #[getter]
    fn abandoned(&self) -> bool {
        match &*lock(&self.state) {
            State::Running(holding) => lock(&holding.tenure.0)
                .slot
                .as_ref()
                .is_some_and(Slot::is_abandoned),
            _ => false,
        }
    }

    /// Whether its waiter has gone for good.
    #[getter]
    fn severed(&self) -> bool {
        self.is_severed()
    }

    /// Looks for its slot: true for the one caller who finds that it has just come, why if it never will.
    fn start(&self) -> Look {
        self.look(&self.woken.waker(self.number))
    }

    /// The work begins. Whether it may: not if its waiter has left before.
    fn begin(&self) -> bool {
        let mut state = lock(&self.state);
        match std::mem::replace(&mut *state, State::Over) {
            State::Granted(holding) => {
                *state = State::Running(holding);
                true
            }
            other => {
                *state = other;
                false
            }
        }
    }

    /// The waiter leaves. `left`: nothing of it has begun, and nothing will. `abandoned`: its work runs on.
    /// `over`: there was nothing to leave. And who got a slot by it.
    fn leave(&self, keep: bool) -> (&'static str, Vec<u64>) {
        let mut state = lock(&self.state);
        let how = match std::mem::replace(&mut *state, State::Over) {
            State::Queued(place) => {
                drop(place);
                "left"
            }
            State::Granted(holding) => {
                holding.end(Ended::Cancelled);
                "left"
            }
            State::Running(mut holding) => {
                if keep {
                    if let Some(waiter) = &mut holding.waiter {
                        waiter.step_away();
                    }
                } else {
                    self.severed.store(true, Ordering::Relaxed);
                    drop(holding.waiter.take());
                }
                *state = State::Running(holding);
                "abandoned"
            }
            State::Over => "over",
        };
        drop(state);
        (how, self.woken.take())
    }

    /// The waiter is there again. Whether the call is attended now.
    fn come_back(&self) -> bool {
        match &mut *lock(&self.state) {
            State::Running(Holding {
                waiter: Some(waiter),
                ..
            }) => waiter.come_back().is_ok(),
            State::Queued(_) | State::Granted(_) => true,
            _ => false,
        }
    }

    /// Its time in the queue is up. `left`: it has gone. `granted`: its slot came in this very instant, and the
    /// asker is the one to start it. `late`: it has started or is over. And who got a slot by it.
    fn expire(&self) -> (&'static str, Vec<u64>) {
        let mut state = lock(&self.state);
        let how = match std::mem::replace(&mut *state, State::Over) {
            State::Queued(place) => match place.expire() {
                Some(started) => {
                    *state = State::Granted(Holding::new(started));
                    "granted"
                }
                None => "left",
            },
            other => {
                *state = other;
                "late"
            }
        };
        drop(state);
        (how, self.woken.take())
    }

    /// The work is over. Who got a slot by it.
    fn finish(&self, outcome: u8) -> Vec<u64> {
        let ended = match outcome {
            0 => Ended::Ok,
            1 => Ended::Error,
            2 => Ended::Cancelled,
            _ => Ended::Panicked,
        };
        let before = std::mem::replace(&mut *lock(&self.state), State::Over);
        if let State::Granted(holding) | State::Running(holding) = before {
            holding.end(ended);
        }
        self.woken.take()
    }

    /// An entry for a call that this one's work makes itself, under the same slot. None while another has it.
    fn lend(&self, number: u64) -> Option<Self> {
        let state = lock(&self.state);
        let State::Running(holding) = &*state else {
            return None;
        };
        Some(Self {
            number,
            state: Mutex::new(State::Granted(holding.lend()?)),
            severed: AtomicBool::new(false),
            woken: self.woken.clone(),
        })
    }

    /// Shuts the socket down that this call's thread is blocked on. Says what it found.
    fn sever(&self, py: Python<'_>, thread: u64) -> PyResult<&'static str> {
        let state = lock(&self.state);
        if !matches!(*state, State::Running(_)) {
            return Ok("over");
        }
        sever::thread(py, thread)
    }
}
