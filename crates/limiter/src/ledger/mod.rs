//! The one owner of every state and every counter. Plain data: no lock, no clock, no waking.
//!
//! ```text
//! offered --no--> rejected
//! offered --slot free--> running(attended)
//! offered --else--> queued --slot free, first in order--> running(attended)
//! queued --waiter leaves, deadline, overload, close--> left
//! running(attended) <--waiter leaves / comes back--> running(abandoned)
//! running --work over--> ended | lingering --> ended
//! ```
//!
//! Every method is one transition and leaves every identity of
//! [`Snapshot::broken_identity`](crate::Snapshot::broken_identity) true. Who is served next is decided in
//! [`line`], nowhere else. Deliberate faults for the mutation tests sit behind `cfg!(mutation = "..")`.

mod drain;
mod line;
mod overload;
mod queue;
mod slots;
mod tally;
mod wakes;

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

pub(crate) use self::queue::Terms;
pub(crate) use self::tally::{Leave, Outcome};
pub(crate) use self::wakes::Wakes;
use self::{
    drain::Drain,
    line::Line,
    overload::Overload,
    tally::{Tally, duration, integrate},
};
use crate::arena::{Arena, Key, List};
use crate::clock::Micros;
use crate::limits::{Class, Limits};
use crate::snapshot::{RunningCall, Snapshot};

#[derive(Debug)]
pub(crate) struct Ledger {
    limits: Limits,
    closed: bool,
    /// Set by a shrinking resize until the calls above the new limits have gone.
    over_limit: bool,
    now: Micros,
    calls: Arena<Call>,
    line: Line,
    /// Link set 0: a call is in a flow's queue, running or lingering.
    running: List<0>,
    lingering: List<0>,
    /// Link set 1: every queued call in the order they came; of the running ones, those whose waiter has
    /// left, in the order they left.
    queue: List<1>,
    abandoned: List<1>,
    queued_bytes: u64,
    /// Slots of the attended calls, and of all that hold any.
    attended_weight: usize,
    held_weight: usize,
    lingering_abandoned: usize,
    tally: Tally,
    drain: Drain,
    overload: Overload,
    /// Who waits for the limiter to be idle.
    watchers: Vec<(u64, Waker)>,
    watches: u64,
}

#[derive(Debug)]
struct Call {
    label: Option<Arc<str>>,
    bytes: u64,
    /// Slots asked for; once started, slots held.
    weight: usize,
    class: Class,
    flow: Key,
    /// `Micros::MAX` for none.
    deadline: Micros,
    state: State,
    /// Somebody waits for it, or did when its local work ended.
    attended: bool,
    /// When the present state began.
    since: Micros,
    /// When it got its slot; for a queued call, when it came.
    began: Micros,
    queued_for: Micros,
    /// What its flow was charged for it in advance.
    estimate: Micros,
    /// The waiter's while queued, the work's while running.
    waker: Option<Waker>,
}

/// What a queued call holds, beside its label and its share of a flow.
#[cfg(test)]
pub(crate) const ENTRY_BYTES: usize = Arena::<Call>::CELL_BYTES;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Queued,
    /// Out of the queue without a slot; the entry tells the waiter why and goes with it.
    SentAway(Leave),
    Running,
    /// And since when.
    Lingering(Outcome, Micros),
}

/// What a waiter finds when it looks after its call.
#[derive(Debug)]
pub(crate) enum Look {
    Waits,
    Started {
        queued_for: Duration,
    },
    SentAway {
        why: Leave,
        waited: Duration,
        retry_after: Duration,
    },
    Closed,
}

/// A queued call was asked to leave.
#[derive(Debug)]
pub(crate) enum Departure {
    /// It left. What it held is to be dropped without the lock.
    Left { wakes: Wakes, _remains: Remains },
    /// It had a slot already.
    Running { queued_for: Duration },
    /// It had gone already.
    Gone,
}

/// Labels and wakers of a call that is gone, handed out so that nothing of it is dropped under the lock.
#[derive(Debug)]
pub(crate) struct Remains {
    _label: Option<Arc<str>>,
    _waker: Option<Waker>,
}

/// Why a waiter cannot come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoReturn {
    Over,
    Full,
}

// === impl Ledger ===

impl Ledger {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            closed: false,
            over_limit: false,
            now: 0,
            calls: Arena::new(),
            line: Line::new(&limits),
            running: List::new(),
            lingering: List::new(),
            queue: List::new(),
            abandoned: List::new(),
            queued_bytes: 0,
            attended_weight: 0,
            held_weight: 0,
            lingering_abandoned: 0,
            tally: Tally::default(),
            drain: Drain::default(),
            overload: Overload::default(),
            watchers: Vec::new(),
            watches: 0,
        }
    }

    /// Brings the integrals up to `now`. Called before every transition.
    pub(crate) fn advance(&mut self, now: Micros) {
        let micros = now.saturating_sub(self.now);
        if micros == 0 {
            return;
        }
        self.now = now;
        let tally = &mut self.tally;
        integrate(&mut tally.queued_micros, self.queue.len(), micros);
        integrate(&mut tally.running_micros, self.running.len(), micros);
        integrate(&mut tally.abandoned_micros, self.abandoned.len(), micros);
        let held = self.held_weight as u64;
        self.drain.held(held.saturating_mul(micros));
    }

    pub(crate) fn resize(&mut self, limits: Limits) -> Wakes {
        let mut wakes = Wakes::default();
        self.limits = limits;
        self.over_limit = true;
        self.line.cap(&limits);
        if !cfg!(mutation = "growing_wakes_nobody") {
            self.hand_off(&mut wakes);
        }
        wakes
    }

    /// Takes no more offers; the queue is served to its end.
    pub(crate) const fn seal(&mut self) {
        self.closed = true;
    }

    /// Takes no more offers and sends the queued calls away.
    pub(crate) fn close(&mut self) -> (Wakes, Vec<Remains>) {
        let mut wakes = Wakes::default();
        let mut all = Vec::new();
        self.closed = true;
        if cfg!(mutation = "closing_forgets_the_queue") {
            return (wakes, all);
        }
        while let Some(key) = self.queue.front(&self.calls) {
            if let Some(call) = self.calls.get_mut(key) {
                wakes.push(call.waker.take());
            }
            self.unqueue(key);
            self.tally.left.closed += 1;
            all.extend(self.forget(key));
        }
        (wakes, all)
    }

    pub(crate) const fn limits(&self) -> Limits {
        self.limits
    }

    pub(crate) fn retry_after(&self) -> Duration {
        self.drain
            .retry_after(self.queue.len(), self.limits.limit.get())
    }

    fn attended(&self) -> usize {
        self.running.len() - self.abandoned.len()
    }

    /// Slots in use, by whomever.
    fn held(&self) -> usize {
        if cfg!(mutation = "abandoned_cost_nothing") {
            return self.attended_weight + self.lingering.len();
        }
        self.held_weight
    }

    /// Whether a call of this weight could start now. One heavier than the limit takes the whole limit.
    fn fits(&self, weight: usize) -> bool {
        let limit = self.limits.limit.get();
        let weight = weight.min(limit);
        self.attended_weight + weight <= limit
            && self.held() + weight <= self.limits.hard_limit.get()
    }

    fn next_weight(&self) -> Option<usize> {
        let next = self.line.next(&self.calls, self.overload.stands())?;
        Some(self.calls.get(next)?.weight)
    }

    fn is_idle(&self) -> bool {
        self.running.len() + self.lingering.len() + self.queue.len() == 0
    }

    /// Whether nothing is queued and no slot is held; if not, who is to be woken then. Hands back the
    /// waker that is not needed any more.
    pub(crate) fn poll_idle(
        &mut self,
        watch: &mut Option<u64>,
        waker: Waker,
    ) -> (bool, Option<Waker>) {
        if self.is_idle() {
            return (true, Some(waker));
        }
        let id = *watch.get_or_insert_with(|| {
            self.watches += 1;
            self.watches
        });
        if let Some((_, old)) = self.watchers.iter_mut().find(|(other, _)| *other == id) {
            return (false, Some(std::mem::replace(old, waker)));
        }
        self.watchers.push((id, waker));
        (false, None)
    }

    pub(crate) fn unwatch(&mut self, watch: u64) -> Option<Waker> {
        let index = self.watchers.iter().position(|(id, _)| *id == watch)?;
        Some(self.watchers.swap_remove(index).1)
    }

    /// For how long the call at the front of a list has been in its present state.
    fn since_front<const L: usize>(&self, list: &List<L>) -> Option<Micros> {
        let call = self.calls.get(list.front(&self.calls)?)?;
        Some(self.now - call.since)
    }

    fn lingering_for(&self) -> Option<Micros> {
        match self.calls.get(self.lingering.front(&self.calls)?)?.state {
            State::Lingering(_, since) => Some(self.now - since),
            _ => None,
        }
    }

    fn running_for(&self) -> Option<Micros> {
        let call = self.calls.get(self.running.front(&self.calls)?)?;
        Some(self.now - call.began)
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let tally = &self.tally;
        Snapshot {
            limit: self.limits.limit.get(),
            hard_limit: self.limits.hard_limit.get(),
            queue_limit: self.limits.queue,
            queue_bytes_limit: self.limits.queue_bytes,
            closed: self.closed,
            over_limit: self.over_limit,
            overloaded: self.overload.stands(),
            flows: self.line.flows(),
            queued: self.queue.len(),
            queued_capped: self.line.capped(),
            queued_bytes: self.queued_bytes,
            running: self.running.len(),
            attended: self.attended(),
            attended_weight: self.attended_weight,
            held_weight: self.held_weight,
            next_weight: self.next_weight(),
            abandoned: self.abandoned.len(),
            lingering: self.lingering.len(),
            lingering_abandoned: self.lingering_abandoned,
            offered: tally.offered,
            admitted: tally.admitted,
            rejected: tally.rejected,
            left: tally.left,
            started: tally.started,
            ended: tally.ended,
            abandoned_total: tally.abandoned,
            reattached_total: tally.reattached,
            unclaimed_total: tally.unclaimed,
            lingered_total: tally.lingered,
            confirmed_total: tally.confirmed,
            oldest_queued: self.since_front(&self.queue).map(duration),
            oldest_running: self.running_for().map(duration),
            oldest_abandoned: self.since_front(&self.abandoned).map(duration),
            oldest_lingering: self.lingering_for().map(duration),
            queued_time: duration(tally.queued_micros),
            running_time: duration(tally.running_micros),
            abandoned_time: duration(tally.abandoned_micros),
        }
    }

    /// Every call that holds a slot, the longest running first, then the lingering ones.
    pub(crate) fn running(&self) -> Vec<RunningCall> {
        let running = self.running.keys(&self.calls);
        let lingering = self.lingering.keys(&self.calls);
        running
            .chain(lingering)
            .filter_map(|key| {
                let call = self.calls.get(key)?;
                Some(RunningCall {
                    id: key.id(),
                    label: call.label.clone(),
                    weight: call.weight,
                    age: duration(self.now - call.began),
                    abandoned_since: (!call.attended).then(|| duration(self.now - call.since)),
                    lingering: call.state != State::Running,
                })
            })
            .collect()
    }
}
