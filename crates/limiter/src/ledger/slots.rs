//! Slots: from a started call to its end.

use std::task::{Poll, Waker};

use super::{Ledger, NoReturn, Outcome, Remains, State, Wakes};
use crate::arena::Key;

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
        self.attended_weight -= call.weight;
        wakes.push(call.waker.take());
        let flow = call.flow;
        self.line.abandoned(flow);
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
    pub(crate) fn come_back(&mut self, key: Key) -> Result<Wakes, NoReturn> {
        let mut wakes = Wakes::default();
        let limit = self.limits.limit.get();
        let taken = self.attended_weight;
        let call = self.calls.get_mut(key).ok_or(NoReturn::Over)?;
        if call.state != State::Running {
            return Err(NoReturn::Over);
        }
        if call.attended {
            return Ok(wakes);
        }
        if taken + call.weight > limit && !cfg!(mutation = "back_above_the_limit") {
            return Err(NoReturn::Full);
        }
        call.attended = true;
        self.attended_weight += call.weight;
        let flow = call.flow;
        self.line.returned(flow);
        self.abandoned.unlink(&mut self.calls, key);
        self.tally.reattached += u64::from(!cfg!(mutation = "return_not_counted"));
        // Its flow may have had as many abandoned calls as it may.
        if !cfg!(mutation = "return_frees_nobody") {
            self.hand_off(&mut wakes);
        }
        Ok(wakes)
    }

    pub(crate) fn is_abandoned(&self, key: Key) -> bool {
        self.calls.get(key).is_none_or(|call| !call.attended)
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
        let remains = self.settle(key, outcome, attended);
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
            call.state = State::Lingering(outcome, now);
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
        let (State::Lingering(outcome, _), attended) = (call.state, call.attended) else {
            return (wakes, None);
        };
        self.lingering.unlink(&mut self.calls, key);
        self.lingering_abandoned -= usize::from(!attended);
        self.tally.confirmed += u64::from(confirmed);
        let remains = self.settle(key, outcome, attended);
        self.hand_off(&mut wakes);
        (wakes, remains)
    }

    /// The slot of a call that is on no list any more comes free.
    fn settle(&mut self, key: Key, outcome: Outcome, attended: bool) -> Option<Remains> {
        self.tally.ended(outcome, attended);
        self.drain.ended(self.now);
        if let Some(call) = self.calls.get(key) {
            let (flow, estimate, weight) = (call.flow, call.estimate, call.weight);
            let cost = (self.now - call.began).saturating_mul(weight as u64);
            self.held_weight -= weight;
            self.line.ended(flow, estimate, cost, attended);
        }
        self.forget(key)
    }

    /// Takes a call off the running ones. Says whether it was attended.
    fn stop(&mut self, key: Key) -> Option<bool> {
        let call = self.calls.get(key)?;
        if call.state != State::Running {
            return None;
        }
        let attended = call.attended;
        if attended {
            self.attended_weight -= call.weight;
        }
        self.running.unlink(&mut self.calls, key);
        if !attended {
            self.abandoned.unlink(&mut self.calls, key);
        }
        Some(attended)
    }
}
