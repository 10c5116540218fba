//! The queue: from the offer to the slot, or to the leaving of it.

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use super::tally::{Leave, duration};
use super::{Call, Departure, Ledger, Look, Remains, State, Wakes};
use crate::arena::Key;
use crate::clock::{Micros, micros};
use crate::error::{RETRY_AFTER_MIN, Reason, Rejected};
use crate::limits::{Ask, Class};

/// What the ledger has to know of an ask before it takes it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    pub(crate) bytes: u64,
    pub(crate) weight: usize,
    pub(crate) class: Class,
    pub(crate) flow: u64,
    /// `Micros::MAX` for none.
    pub(crate) deadline: Micros,
}

/// An offer that was taken.
#[derive(Debug)]
pub(crate) struct Admitted {
    pub(crate) key: Key,
    pub(crate) started: bool,
    pub(crate) wakes: Wakes,
}

// === impl Ledger: the queue ===

impl Ledger {
    /// Whether an offer on these terms would be turned down now.
    pub(crate) fn verdict(&self, terms: &Terms) -> Option<Rejected> {
        if self.starts_at_once(terms) {
            return None;
        }
        self.refusal(terms)
    }

    fn refusal(&self, terms: &Terms) -> Option<Rejected> {
        let reason = self.obstacle(terms)?;
        Some(Rejected {
            reason,
            predicted_wait: self.wait(terms.class),
            retry_after: if self.closed {
                RETRY_AFTER_MIN
            } else {
                self.retry_after()
            },
        })
    }

    /// What keeps a call from being queued.
    fn obstacle(&self, terms: &Terms) -> Option<Reason> {
        let limits = &self.limits;
        if self.closed {
            return Some(Reason::Closed);
        }
        if self.queue.len() >= limits.queue + usize::from(cfg!(mutation = "queue_one_longer")) {
            let weight = terms.weight.min(limits.limit.get());
            let leftovers = self.attended_weight + weight <= limits.limit.get();
            return Some(if self.fits(terms.weight) && self.is_capped(terms) {
                Reason::FlowFull
            } else if leftovers {
                Reason::LeftoverFull
            } else {
                Reason::QueueFull
            });
        }
        let bytes = self.queued_bytes.checked_add(terms.bytes);
        if bytes.is_none_or(|bytes| bytes > limits.queue_bytes) {
            return Some(Reason::QueueBytes);
        }
        if self.line.queued_of(terms.class, terms.flow) >= limits.flow_queue {
            return Some(Reason::FlowFull);
        }
        let deadline = self.deadline(terms);
        if deadline == Micros::MAX {
            return None;
        }
        let left = duration(deadline.saturating_sub(self.now));
        let too_late = left.is_zero() || (self.drain.is_sure() && left < self.wait(terms.class));
        too_late.then_some(Reason::Deadline)
    }

    /// Takes an offer: with a slot at once or with a place in the queue.
    pub(crate) fn offer(&mut self, ask: &mut Ask, terms: &Terms) -> Result<Admitted, Rejected> {
        self.tally.offered += 1;
        let starts = self.starts_at_once(terms);
        if !starts && let Some(rejected) = self.refusal(terms) {
            self.tally.rejected(rejected.reason);
            return Err(rejected);
        }
        Ok(self.admit(ask.label.take(), terms, starts))
    }

    fn admit(&mut self, label: Option<Arc<str>>, terms: &Terms, starts: bool) -> Admitted {
        let mut wakes = Wakes::default();
        self.tally.admitted += 1;
        let flow = self.line.flow(terms.class, terms.flow);
        let key = self.calls.insert(Call {
            label,
            bytes: terms.bytes,
            weight: terms.weight,
            class: terms.class,
            flow,
            deadline: self.deadline(terms),
            state: State::Queued,
            attended: true,
            since: self.now,
            began: self.now,
            queued_for: 0,
            estimate: 0,
            waker: None,
        });
        if starts {
            self.overload.observe(self.now, 0, self.limits.target_delay);
            self.charge(key, flow);
            self.start(key);
        } else {
            self.queue.push_back(&mut self.calls, key);
            self.line.push(&mut self.calls, key, flow);
            self.queued_bytes += terms.bytes;
            // It may be the next now, and lighter than the one that was.
            if !cfg!(mutation = "newcomer_not_served") {
                self.hand_off(&mut wakes);
            }
        }
        let call = self.calls.get(key);
        Admitted {
            key,
            started: call.is_some_and(|call| call.state == State::Running),
            wakes,
        }
    }

    /// The ask's own deadline, or the end of the longest time in the queue.
    fn deadline(&self, terms: &Terms) -> Micros {
        let queue_time = self.limits.queue_time.map_or(Micros::MAX, micros);
        terms.deadline.min(self.now.saturating_add(queue_time))
    }

    /// Whether a call on these terms gets its slot without a place in the queue. No time plays a part in that.
    pub(crate) fn starts_at_once(&self, terms: &Terms) -> bool {
        !self.closed && !self.line.waits() && self.fits(terms.weight) && !self.is_capped(terms)
    }

    /// Whether its flow has as many calls with slots as it may.
    fn is_capped(&self, terms: &Terms) -> bool {
        self.line.is_capped(terms.class, terms.flow)
    }

    /// Charges its flow for a call that is about to start: before it leaves the queue, as a flow that holds
    /// nothing is forgotten.
    fn charge(&mut self, key: Key, flow: Key) {
        let estimate = self.drain.per_call();
        self.line.started(flow, estimate);
        if let Some(call) = self.calls.get_mut(key) {
            call.estimate = estimate;
        }
    }

    /// Gives its slots to a call that is on no list.
    fn start(&mut self, key: Key) -> Option<Waker> {
        let now = self.now;
        self.running.push_back(&mut self.calls, key);
        self.tally.started += 1;
        let call = self.calls.get_mut(key)?;
        call.weight = call.weight.min(self.limits.limit.get());
        self.attended_weight += call.weight;
        self.held_weight += call.weight;
        call.state = State::Running;
        call.queued_for = now - call.since;
        call.since = now;
        call.began = now;
        call.waker.take()
    }

    /// Hands free slots to the next in the queue as long as it fits, before anybody else can see them
    /// free.
    pub(super) fn hand_off(&mut self, wakes: &mut Wakes) {
        if self.over_limit {
            self.over_limit = self.attended_weight > self.limits.limit.get()
                || self.held() > self.limits.hard_limit.get();
        }
        while self.fits(1) {
            let oldest = if self.line.waits() {
                self.since_front(&self.queue).unwrap_or(0)
            } else {
                0
            };
            self.overload
                .observe(self.now, oldest, self.limits.target_delay);
            self.send_old_away(wakes);
            let Some(key) = self.line.next(&self.calls, self.overload.stands()) else {
                break;
            };
            if cfg!(mutation = "barging") {
                // Left for whoever comes first.
                wakes.push(self.calls.get_mut(key).and_then(|call| call.waker.take()));
                return;
            }
            let fits = self
                .calls
                .get(key)
                .is_some_and(|call| self.fits(call.weight));
            if !fits && !self.is_late(key) {
                break;
            }
            let waker = self.serve(key);
            if !cfg!(mutation = "lost_wakeup") {
                wakes.push(waker);
            }
        }
        if self.is_idle() && !cfg!(mutation = "idle_unheard") {
            for (_, waker) in self.watchers.drain(..) {
                wakes.push(Some(waker));
            }
        }
    }

    /// Starts a queued call, or sends it away if its deadline has passed.
    fn serve(&mut self, key: Key) -> Option<Waker> {
        if self.is_late(key) && !cfg!(mutation = "dead_on_arrival") {
            return self.send_away(key, Leave::Deadline);
        }
        let call = self.calls.get(key)?;
        let (class, flow) = (call.class, call.flow);
        self.charge(key, flow);
        self.unqueue(key);
        self.line.pass_over(class);
        self.start(key)
    }

    /// Under overload, sends those away that have waited too long to be worth a slot.
    fn send_old_away(&mut self, wakes: &mut Wakes) {
        while let Some(waited) = self.since_front(&self.queue)
            && self.overload.gives_up(waited, self.limits.target_delay)
            && let Some(key) = self.queue.front(&self.calls)
        {
            let why = if self.is_late(key) {
                Leave::Deadline
            } else {
                Leave::Overload
            };
            wakes.push(self.send_away(key, why));
        }
    }

    fn is_late(&self, key: Key) -> bool {
        self.calls
            .get(key)
            .is_some_and(|call| call.deadline <= self.now)
    }

    fn send_away(&mut self, key: Key, why: Leave) -> Option<Waker> {
        self.unqueue(key);
        self.tally.left(why);
        let now = self.now;
        let call = self.calls.get_mut(key)?;
        call.state = State::SentAway(why);
        call.queued_for = now - call.since;
        call.waker.take()
    }

    /// Looks after a call whose waiter waits for its slot. Hands back the waker that is not needed any more.
    pub(crate) fn poll_start(&mut self, key: Key, waker: Waker) -> (Look, Option<Waker>) {
        if cfg!(mutation = "barging") && self.position(key).is_some() && self.fits(1) {
            drop(self.serve(key));
        }
        let retry_after = self.retry_after();
        let Some(call) = self.calls.get_mut(key) else {
            return (Look::Closed, Some(waker));
        };
        let queued_for = duration(call.queued_for);
        let look = match call.state {
            State::Queued => return (Look::Waits, call.waker.replace(waker)),
            State::SentAway(why) => Look::SentAway {
                why,
                waited: queued_for,
                retry_after,
            },
            State::Running | State::Lingering(..) => Look::Started { queued_for },
        };
        (look, Some(waker))
    }

    /// The waiter of a call that it has not seen started leaves.
    pub(crate) fn leave(&mut self, key: Key, why: Leave) -> Departure {
        let Some(call) = self.calls.get(key) else {
            return Departure::Gone;
        };
        let mut wakes = Wakes::default();
        match call.state {
            State::Queued => {
                self.tally.left(why);
                if cfg!(mutation = "tombstone") {
                    return Departure::Gone;
                }
                self.unqueue(key);
                // A heavy call that did not fit may have stood before one that does.
                if !cfg!(mutation = "leaving_frees_nobody") {
                    self.hand_off(&mut wakes);
                }
            }
            State::SentAway(_) => {}
            State::Running | State::Lingering(..) => {
                let queued_for = duration(call.queued_for);
                return Departure::Running { queued_for };
            }
        }
        match self.forget(key) {
            Some(remains) => Departure::Left {
                wakes,
                _remains: remains,
            },
            None => Departure::Gone,
        }
    }

    /// How many calls of the same class or a higher one came before and are still queued.
    pub(crate) fn position(&self, key: Key) -> Option<usize> {
        let call = self.calls.get(key)?;
        if call.state != State::Queued {
            return None;
        }
        let earlier = self
            .queue
            .keys(&self.calls)
            .take_while(|other| *other != key);
        let goes_before =
            |other: &Key| matches!(self.calls.get(*other), Some(o) if o.class <= call.class);
        Some(earlier.filter(goes_before).count())
    }

    /// Takes a call out of the queue.
    pub(super) fn unqueue(&mut self, key: Key) {
        let Some(call) = self.calls.get(key) else {
            return;
        };
        let (flow, bytes) = (call.flow, call.bytes);
        self.queue.unlink(&mut self.calls, key);
        self.line.remove(&mut self.calls, key, flow);
        if !cfg!(mutation = "bytes_leak") {
            self.queued_bytes -= bytes;
        }
    }

    pub(super) fn forget(&mut self, key: Key) -> Option<Remains> {
        self.calls.remove(key).map(|call| Remains {
            _label: call.label,
            _waker: call.waker,
        })
    }

    /// When a call of this class that is queued now can expect its slot.
    fn wait(&self, class: Class) -> Duration {
        let ahead = self.line.ahead_of(class);
        self.drain.wait(ahead, self.limits.limit.get())
    }
}
