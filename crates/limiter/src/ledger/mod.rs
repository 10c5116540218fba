//! The one owner of every state and every counter. Plain data: no lock, no clock, no waking.
//!
//! ```text
//! offered --no--> rejected
//! offered --slot free--> running(attended)
//! offered --else--> queued --slot free, first in order--> running(attended)
//! queued --waiter leaves, deadline, close--> left
//! running(attended) <--waiter leaves / comes back--> running(abandoned)
//! running --work over--> ended | lingering --> ended
//! ```
//!
//! Every method is one transition and leaves every identity of
//! [`Snapshot::broken_identity`](crate::Snapshot::broken_identity) true. The *order* of the queue is
//! decided in [`Ledger::admit`] (where a call is put) and [`Ledger::next`] (who is served), nowhere
//! else. Deliberate faults for the mutation tests sit behind `cfg!(mutation = "..")`.

mod drain;
mod tally;
mod wakes;

use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

pub(crate) use self::tally::{Leave, Outcome};
pub(crate) use self::wakes::Wakes;
use self::{
    drain::Drain,
    tally::{Tally, duration, integrate},
};
use crate::arena::{Arena, Key, List};
use crate::clock::Micros;
use crate::error::{RETRY_AFTER_MIN, Reason, Rejected};
use crate::limits::{Ask, Limits};
use crate::snapshot::{RunningCall, Snapshot};

#[derive(Debug)]
pub(crate) struct Ledger {
    limits: Limits,
    closed: bool,
    /// Set by a shrinking resize until the calls above the new limits have gone.
    over_limit: bool,
    now: Micros,
    calls: Arena<Call>,
    /// Link set 0: a call is queued, running or lingering.
    queue: List<0>,
    running: List<0>,
    lingering: List<0>,
    /// Link set 1: of the running calls, those whose waiter has left, in the order they left.
    abandoned: List<1>,
    queued_bytes: u64,
    lingering_abandoned: usize,
    tally: Tally,
    drain: Drain,
}

#[derive(Debug)]
struct Call {
    label: Arc<str>,
    bytes: u64,
    state: State,
    /// Somebody waits for it, or did when its local work ended.
    attended: bool,
    /// When the present state began.
    since: Micros,
    /// When it got its slot; for a queued call, when it came.
    began: Micros,
    queued_for: Micros,
    /// The waiter's while queued, the work's while running.
    waker: Option<Waker>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Queued,
    Running,
    Lingering(Outcome),
}

/// A queued call was asked to leave.
#[derive(Debug)]
pub(crate) enum Departure {
    /// It left. What it held is to be dropped without the lock.
    Left { _remains: Remains },
    /// It had a slot already.
    Running { queued_for: Duration },
    /// It had gone already.
    Gone,
}

/// Labels and wakers of a call that is gone, handed out so that nothing of it is dropped under the lock.
#[derive(Debug)]
pub(crate) struct Remains {
    _label: Arc<str>,
    _waker: Option<Waker>,
}

/// Why a waiter cannot come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoReturn {
    Over,
    Full,
}

// === impl Ledger: the queue ===

impl Ledger {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            closed: false,
            over_limit: false,
            now: 0,
            calls: Arena::new(),
            queue: List::new(),
            running: List::new(),
            lingering: List::new(),
            abandoned: List::new(),
            queued_bytes: 0,
            lingering_abandoned: 0,
            tally: Tally::default(),
            drain: Drain::default(),
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
        let occupied = self.running.len() + self.lingering.len();
        self.drain.held((occupied as u64).saturating_mul(micros));
    }

    /// Whether an offer of so many bytes would be turned down now.
    pub(crate) fn verdict(&self, bytes: u64) -> Option<Rejected> {
        let reason = if self.closed {
            Reason::Closed
        } else if self.has_room() {
            return None;
        } else if self.queue_is_full() {
            if self.attended() < self.limits.limit.get() {
                Reason::LeftoverFull
            } else {
                Reason::QueueFull
            }
        } else if self.queued_bytes.saturating_add(bytes) > self.limits.queue_bytes {
            Reason::QueueBytes
        } else {
            return None;
        };
        let retry_after = if self.closed {
            RETRY_AFTER_MIN
        } else {
            self.retry_after()
        };
        Some(Rejected {
            reason,
            retry_after,
        })
    }

    /// Takes an offer: with a slot at once (`true`) or with a place in the queue.
    pub(crate) fn offer(&mut self, ask: &Ask) -> Result<(Key, bool), Rejected> {
        self.tally.offered += 1;
        if let Some(rejected) = self.verdict(ask.bytes) {
            self.tally.rejected(rejected.reason);
            return Err(rejected);
        }
        Ok(self.admit(ask))
    }

    fn admit(&mut self, ask: &Ask) -> (Key, bool) {
        self.tally.admitted += 1;
        let key = self.calls.insert(Call {
            label: ask.label.clone(),
            bytes: ask.bytes,
            state: State::Queued,
            attended: true,
            since: self.now,
            began: self.now,
            queued_for: 0,
            waker: None,
        });
        self.queue.push_back(&mut self.calls, key);
        self.queued_bytes += ask.bytes;
        // The queue is empty whenever a slot is free, so this call is the next one.
        let starts = self.has_room();
        if starts {
            self.start(key);
        }
        (key, starts)
    }

    /// Who is served next.
    fn next(&self) -> Option<Key> {
        if cfg!(mutation = "newest_first") {
            return self.queue.keys(&self.calls).last();
        }
        self.queue.front(&self.calls)
    }

    fn start(&mut self, key: Key) -> Option<Waker> {
        let now = self.now;
        self.unqueue(key);
        self.running.push_back(&mut self.calls, key);
        self.tally.started += 1;
        let call = self.calls.get_mut(key)?;
        call.state = State::Running;
        call.queued_for = now - call.since;
        call.since = now;
        call.began = now;
        call.waker.take()
    }

    /// Hands every free slot to the next in the queue, before anybody else can see it free.
    fn hand_off(&mut self, wakes: &mut Wakes) {
        if self.over_limit {
            self.over_limit = self.attended() > self.limits.limit.get()
                || self.occupied() > self.limits.hard_limit.get();
        }
        while self.has_room() {
            let Some(key) = self.next() else { return };
            if cfg!(mutation = "barging") {
                // Left for whoever comes first.
                wakes.push(self.calls.get_mut(key).and_then(|call| call.waker.take()));
                return;
            }
            let waker = self.start(key);
            if !cfg!(mutation = "lost_wakeup") {
                wakes.push(waker);
            }
        }
    }

    /// Looks after a queued call. `Ready(Some(..))`: it has a slot since; `Ready(None)`: it was closed.
    /// Hands back the waker that is not needed any more.
    pub(crate) fn poll_start(
        &mut self,
        key: Key,
        waker: Waker,
    ) -> (Poll<Option<Duration>>, Option<Waker>) {
        if cfg!(mutation = "barging") && self.position(key).is_some() && self.has_room() {
            drop(self.start(key));
        }
        let Some(call) = self.calls.get_mut(key) else {
            return (Poll::Ready(None), Some(waker));
        };
        if call.state != State::Queued {
            let queued_for = duration(call.queued_for);
            return (Poll::Ready(Some(queued_for)), Some(waker));
        }
        (Poll::Pending, call.waker.replace(waker))
    }

    /// The waiter of a queued call leaves.
    pub(crate) fn leave(&mut self, key: Key, why: Leave) -> Departure {
        let Some(call) = self.calls.get(key) else {
            return Departure::Gone;
        };
        if call.state != State::Queued {
            let queued_for = duration(call.queued_for);
            return Departure::Running { queued_for };
        }
        self.tally.left(why);
        if cfg!(mutation = "tombstone") {
            return Departure::Gone;
        }
        self.unqueue(key);
        match self.forget(key) {
            Some(remains) => Departure::Left { _remains: remains },
            None => Departure::Gone,
        }
    }

    pub(crate) fn position(&self, key: Key) -> Option<usize> {
        match self.calls.get(key)?.state {
            State::Queued => self.queue.keys(&self.calls).position(|other| other == key),
            _ => None,
        }
    }

    fn unqueue(&mut self, key: Key) {
        self.queue.unlink(&mut self.calls, key);
        if cfg!(mutation = "bytes_leak") {
            return;
        }
        if let Some(call) = self.calls.get(key) {
            self.queued_bytes -= call.bytes;
        }
    }

    fn forget(&mut self, key: Key) -> Option<Remains> {
        self.calls.remove(key).map(|call| Remains {
            _label: call.label,
            _waker: call.waker,
        })
    }
}

// === impl Ledger: the slots ===

impl Ledger {
    /// The waiter of a running call leaves. The slot stays with the work.
    pub(crate) fn abandon(&mut self, key: Key) -> Wakes {
        let mut wakes = Wakes::default();
        let now = self.now;
        let Some(call) = self.calls.get_mut(key) else {
            return wakes;
        };
        if call.state != State::Running || !call.attended {
            return wakes;
        }
        call.attended = false;
        call.since = now;
        wakes.push(call.waker.take());
        self.abandoned.push_back(&mut self.calls, key);
        self.tally.abandoned += 1;
        if cfg!(mutation = "slot_follows_waiter") {
            return self.end(key, Outcome::Dropped).0;
        }
        // Below a hard limit above the limit, an attended place has come free.
        if !cfg!(mutation = "no_hand_off_when_abandoned") {
            self.hand_off(&mut wakes);
        }
        wakes
    }

    /// The waiter of an abandoned call is back.
    pub(crate) fn come_back(&mut self, key: Key) -> Result<(), NoReturn> {
        let full =
            self.attended() >= self.limits.limit.get() && !cfg!(mutation = "back_above_the_limit");
        let call = self.calls.get_mut(key).ok_or(NoReturn::Over)?;
        if call.state != State::Running {
            return Err(NoReturn::Over);
        }
        if call.attended {
            return Ok(());
        }
        if full {
            return Err(NoReturn::Full);
        }
        call.attended = true;
        self.abandoned.unlink(&mut self.calls, key);
        self.tally.reattached += u64::from(!cfg!(mutation = "return_not_counted"));
        Ok(())
    }

    pub(crate) fn is_abandoned(&self, key: Key) -> bool {
        self.calls.get(key).is_some_and(|call| !call.attended)
    }

    /// Looks after the waiter of a running call. Hands back the waker that is not needed any more.
    pub(crate) fn poll_abandoned(&mut self, key: Key, waker: Waker) -> (Poll<()>, Option<Waker>) {
        match self.calls.get_mut(key) {
            Some(call) if call.attended => (Poll::Pending, call.waker.replace(waker)),
            _ => (Poll::Ready(()), Some(waker)),
        }
    }

    /// The work of a running call is over.
    pub(crate) fn end(&mut self, key: Key, outcome: Outcome) -> (Wakes, Option<Remains>) {
        let mut wakes = Wakes::default();
        let Some(attended) = self.stop(key) else {
            return (wakes, None);
        };
        self.tally.ended(outcome, attended);
        self.drain.ended(self.now);
        let remains = self.forget(key);
        self.hand_off(&mut wakes);
        (wakes, remains)
    }

    /// A slot that its waiter left before picking it up.
    pub(crate) fn end_unclaimed(&mut self, key: Key) -> (Wakes, Option<Remains>) {
        self.tally.unclaimed += 1;
        if cfg!(mutation = "unclaimed_leaks") {
            return (Wakes::default(), None);
        }
        self.end(key, Outcome::Dropped)
    }

    /// The local work of a running call is over, the remote part may run on.
    pub(crate) fn linger(&mut self, key: Key, outcome: Outcome) -> (Wakes, Option<Waker>) {
        let mut wakes = Wakes::default();
        let now = self.now;
        let Some(attended) = self.stop(key) else {
            return (wakes, None);
        };
        self.lingering.push_back(&mut self.calls, key);
        self.lingering_abandoned += usize::from(!attended);
        self.tally.lingered += 1;
        let mut unused = None;
        if let Some(call) = self.calls.get_mut(key) {
            call.state = State::Lingering(outcome);
            if attended {
                call.since = now;
            }
            unused = call.waker.take();
        }
        if cfg!(mutation = "linger_frees_the_slot") {
            return (self.end_linger(key, false).0, unused);
        }
        self.hand_off(&mut wakes);
        (wakes, unused)
    }

    /// A lingering call gives its slot back.
    pub(crate) fn end_linger(&mut self, key: Key, confirmed: bool) -> (Wakes, Option<Remains>) {
        let mut wakes = Wakes::default();
        let Some(call) = self.calls.get(key) else {
            return (wakes, None);
        };
        let (State::Lingering(outcome), attended) = (call.state, call.attended) else {
            return (wakes, None);
        };
        self.lingering.unlink(&mut self.calls, key);
        self.lingering_abandoned -= usize::from(!attended);
        self.tally.ended(outcome, attended);
        self.tally.confirmed += u64::from(confirmed);
        self.drain.ended(self.now);
        let remains = self.forget(key);
        self.hand_off(&mut wakes);
        (wakes, remains)
    }

    /// Takes a call off the running ones. Says whether it was attended.
    fn stop(&mut self, key: Key) -> Option<bool> {
        let call = self.calls.get(key)?;
        if call.state != State::Running {
            return None;
        }
        let attended = call.attended;
        self.running.unlink(&mut self.calls, key);
        if !attended {
            self.abandoned.unlink(&mut self.calls, key);
        }
        Some(attended)
    }
}

// === impl Ledger: the whole ===

impl Ledger {
    pub(crate) fn resize(&mut self, limits: Limits) -> Wakes {
        let mut wakes = Wakes::default();
        self.limits = limits;
        self.over_limit = true;
        if !cfg!(mutation = "growing_wakes_nobody") {
            self.hand_off(&mut wakes);
        }
        wakes
    }

    /// Takes no more offers and sends the queued calls away.
    pub(crate) fn close(&mut self) -> (Wakes, Vec<Remains>) {
        let mut wakes = Wakes::default();
        let mut all = Vec::new();
        self.closed = true;
        if cfg!(mutation = "closing_forgets_the_queue") {
            return (wakes, all);
        }
        while let Some(key) = self.next() {
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

    fn occupied(&self) -> usize {
        if cfg!(mutation = "abandoned_cost_nothing") {
            return self.attended() + self.lingering.len();
        }
        self.running.len() + self.lingering.len()
    }

    fn has_room(&self) -> bool {
        self.attended() < self.limits.limit.get() && self.occupied() < self.limits.hard_limit.get()
    }

    fn queue_is_full(&self) -> bool {
        self.queue.len() >= self.limits.queue + usize::from(cfg!(mutation = "queue_one_longer"))
    }

    fn age_of<const L: usize>(
        &self,
        list: &List<L>,
        from: impl Fn(&Call) -> Micros,
    ) -> Option<Duration> {
        let call = self.calls.get(list.front(&self.calls)?)?;
        Some(duration(self.now - from(call)))
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
            queued: self.queue.len(),
            queued_bytes: self.queued_bytes,
            running: self.running.len(),
            attended: self.attended(),
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
            oldest_queued: self.age_of(&self.queue, |call| call.since),
            oldest_running: self.age_of(&self.running, |call| call.began),
            oldest_abandoned: self.age_of(&self.abandoned, |call| call.since),
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
                    age: duration(self.now - call.began),
                    abandoned_since: (!call.attended).then(|| duration(self.now - call.since)),
                    lingering: call.state != State::Running,
                })
            })
            .collect()
    }
}
