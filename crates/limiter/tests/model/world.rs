//! A limiter and its model side by side, and everything a caller can do to both.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use tidegate_limiter::{
    Ask, Clock, Idle, Limiter, Limits, Linger, ManualClock, Place, Reason, Refused, Slot, Snapshot,
    Started, Waiter,
};

use crate::choice::Choice;
use crate::naive::{Left, Naive, Seen, State};

/// What the caller of one call still holds.
#[derive(Default)]
pub(crate) struct Hands {
    pub(crate) place: Option<Place>,
    pub(crate) waiter: Option<Waiter>,
    pub(crate) slot: Option<Slot>,
    pub(crate) linger: Option<Linger>,
    pub(crate) alarm: Arc<Alarm>,
    /// It was polled in the queue, so the alarm must ring when its state changes.
    pub(crate) polled: bool,
}

#[derive(Default)]
pub(crate) struct Alarm(pub(crate) AtomicBool);

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

pub(crate) struct World {
    pub(crate) limiter: Limiter,
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) naive: Naive,
    pub(crate) hands: Vec<Hands>,
    pub(crate) idle: Idle,
    pub(crate) idle_alarm: Arc<Alarm>,
    pub(crate) idle_awaited: bool,
    /// Offers rejected for their predicted wait.
    pub(crate) predicted: u64,
}

impl World {
    pub(crate) fn new(limits: Limits) -> Self {
        let clock = Arc::new(ManualClock::new());
        let limiter = Limiter::with_clock(limits, clock.clone()).expect("sound limits");
        Self {
            idle: limiter.idle(),
            idle_alarm: Arc::default(),
            idle_awaited: false,
            predicted: 0,
            limiter,
            clock,
            naive: Naive::new(limits),
            hands: Vec::new(),
        }
    }

    pub(crate) fn step(&mut self, word: u32) {
        let mut choice = Choice(word);
        match choice.of(16) {
            0..=4 => self.offer(&mut choice),
            5 => self.advance(Duration::from_millis(u64::from(choice.of(3_000)))),
            6 if choice.of(2) == 0 => {
                let limits = choice.limits();
                self.limiter.resize(limits).expect("sound limits");
                self.naive.resize(limits);
            }
            7 if choice.of(12) == 0 => {
                if choice.of(2) == 0 {
                    self.limiter.seal();
                    self.naive.closed = true;
                } else {
                    self.limiter.close();
                    self.naive.close();
                }
            }
            _ => self.touch(&mut choice),
        }
        self.check();
    }

    fn offer(&mut self, choice: &mut Choice) {
        let mut asked = choice.ask(self.naive.now);
        let label = self.hands.len().to_string();
        let mut ask = Ask::new(label, asked.bytes)
            .with_weight(
                u32::try_from(asked.weight)
                    .expect("light")
                    .try_into()
                    .expect("not zero"),
            )
            .with_class(asked.class)
            .with_flow(asked.flow);
        ask.deadline = asked
            .deadline
            .map(|deadline| self.clock.now() + deadline - self.naive.now);
        let queued_until = self
            .naive
            .limits
            .queue_time
            .map(|time| self.naive.now + time);
        asked.deadline = asked.deadline.into_iter().chain(queued_until).min();
        let advice = self.limiter.would_reject_ask(&ask);
        let real = self.limiter.offer(ask);
        assert_eq!(advice, real.as_ref().err().copied(), "advice");
        self.naive.totals.offered += 1;
        match (real, self.naive.reject(&asked)) {
            (Ok(place), None) => {
                self.naive.admitted(asked);
                self.hands.push(Hands {
                    place: Some(place),
                    ..Hands::default()
                });
            }
            (Err(rejected), Some(reason)) => {
                assert_eq!(rejected.reason(), reason);
                self.naive.rejected(reason);
            }
            (Err(rejected), None) => {
                assert_eq!(rejected.reason(), Reason::Deadline);
                let left = asked.deadline.expect("a deadline") - self.naive.now;
                assert!(left < rejected.predicted_wait(), "it could start in time");
                self.predicted += 1;
                self.naive.rejected(Reason::Deadline);
            }
            (Ok(_), Some(reason)) => panic!("admitted in spite of {reason:?}"),
        }
    }

    /// Finds out what the limiter did with its queue.
    pub(crate) fn look(&self) -> Seen {
        let holding: Vec<usize> = self
            .limiter
            .running()
            .iter()
            .map(|call| call.label.as_deref()?.parse().ok())
            .map(|label| label.expect("a number"))
            .collect();
        let sent_away = |call: &usize| {
            let place = self.hands[*call].place.as_ref();
            self.naive.calls[*call].state == State::Queued
                && !holding.contains(call)
                && place.is_some_and(|place| place.position().is_none())
        };
        Seen {
            next_weight: self.limiter.snapshot().next_weight,
            sent_away: (0..self.hands.len()).filter(sent_away).collect(),
            holding,
        }
    }

    fn advance(&mut self, by: Duration) {
        self.clock.advance(by);
        self.naive.advance(by);
    }

    /// Does something with one of the calls whose handles are still held.
    fn touch(&mut self, choice: &mut Choice) {
        let held: Vec<usize> = (0..self.hands.len())
            .filter(|call| self.hands[*call].any())
            .collect();
        if held.is_empty() {
            return;
        }
        let call = held[choice.below(held.len())];
        if self.hands[call].place.is_some() {
            match choice.of(6) {
                0..=3 => self.poll(call),
                4 => self.drop_place(call),
                _ => self.expire(call),
            }
        } else if self.hands[call].linger.is_some() && choice.of(2) == 0 {
            self.end_linger(call, choice.of(2) == 0);
        } else if self.hands[call].waiter.is_some() && choice.of(2) == 0 {
            self.touch_waiter(call, choice);
        } else if self.hands[call].slot.is_some() {
            self.touch_slot(call, choice);
        }
    }

    fn poll(&mut self, call: usize) {
        let hands = &mut self.hands[call];
        let place = hands.place.as_mut().expect("has a place");
        let waker = Waker::from(hands.alarm.clone());
        let polled = Pin::new(place).poll(&mut Context::from_waker(&waker));
        match (polled, self.naive.calls[call].state) {
            (Poll::Pending, State::Queued) => hands.polled = true,
            (Poll::Ready(Ok(started)), State::Running) => self.pick_up(call, started),
            (Poll::Ready(Err(Refused::Closed)), State::Left(Left::Closed)) => {
                hands.place = None;
                hands.polled = false;
            }
            (Poll::Ready(Err(Refused::Deadline { .. })), State::Left(Left::Deadline))
            | (Poll::Ready(Err(Refused::Overloaded { .. })), State::Left(Left::Overload)) => {
                hands.place = None;
                hands.polled = false;
            }
            (polled, state) => panic!("polled {polled:?} while {state:?}"),
        }
    }

    fn pick_up(&mut self, call: usize, started: Started) {
        let naive = &self.naive.calls[call];
        assert_eq!(started.queued_for, naive.began - naive.came);
        let hands = &mut self.hands[call];
        hands.place = None;
        hands.polled = false;
        hands.waiter = Some(started.waiter);
        hands.slot = Some(started.slot);
    }

    fn drop_place(&mut self, call: usize) {
        self.hands[call].place = None;
        self.hands[call].polled = false;
        if self.naive.calls[call].state == State::Running {
            self.naive.totals.unclaimed += 1;
            self.naive.end(call, None);
        } else {
            self.naive.leave(call, Left::Caller);
        }
    }

    fn expire(&mut self, call: usize) {
        let place = self.hands[call].place.take().expect("has a place");
        self.hands[call].polled = false;
        let running = self.naive.calls[call].state == State::Running;
        match place.expire() {
            Some(started) if running => self.pick_up(call, started),
            None if !running => self.naive.leave(call, Left::Deadline),
            other => panic!("expired with {other:?}"),
        }
    }

    fn touch_waiter(&mut self, call: usize, choice: &mut Choice) {
        let waiter = self.hands[call].waiter.as_mut().expect("has a waiter");
        match choice.of(5) {
            0 => {
                waiter.step_away();
                self.naive.abandon(call);
            }
            1 | 2 => {
                let may = self.naive.can_come_back(call);
                assert_eq!(waiter.come_back().is_ok(), may, "coming back");
                if may {
                    self.naive.come_back(call);
                }
            }
            3 => self.hands[call].waiter.take().expect("has a waiter").done(),
            _ => {
                self.hands[call].waiter = None;
                self.naive.abandon(call);
            }
        }
    }

    fn touch_slot(&mut self, call: usize, choice: &mut Choice) {
        let slot = self.hands[call].slot.take().expect("has a slot");
        assert_eq!(slot.is_abandoned(), !self.naive.calls[call].attended);
        match choice.of(4) {
            0 => {
                drop(slot);
                self.naive.end(call, None);
            }
            1 => {
                let ended = choice.ended();
                self.hands[call].linger = Some(slot.linger_as(ended));
                self.naive.linger(call, ended);
            }
            _ => {
                let ended = choice.ended();
                slot.finish(ended);
                self.naive.end(call, Some(ended));
            }
        }
    }

    fn end_linger(&mut self, call: usize, confirmed: bool) {
        let linger = self.hands[call].linger.take().expect("lingers");
        if confirmed {
            linger.confirm_end();
        } else {
            drop(linger);
        }
        self.naive.end_linger(call, confirmed);
    }

    /// Lets everything go, in the order the word says, and looks for leaks.
    pub(crate) fn finish(mut self, word: u32) -> (Snapshot, u64) {
        let mut choice = Choice(word);
        while let Some(call) = self.hands.iter().position(Hands::any) {
            match choice.of(2) {
                0 if self.hands[call].place.is_some() => {
                    self.poll(call);
                    if self.hands[call].place.is_some() {
                        self.drop_place(call);
                    }
                }
                _ if self.hands[call].place.is_some() => self.drop_place(call),
                _ if self.hands[call].linger.is_some() => self.end_linger(call, false),
                0 if self.hands[call].waiter.is_some() => {
                    self.hands[call].waiter = None;
                    self.naive.abandon(call);
                }
                _ if self.hands[call].slot.is_some() => {
                    self.hands[call].slot = None;
                    self.naive.end(call, None);
                }
                _ => self.hands[call].waiter = None,
            }
            self.check();
        }
        let end = self.limiter.snapshot();
        assert_eq!((end.queued, end.running, end.lingering), (0, 0, 0));
        assert_eq!((end.queued_bytes, end.flows), (0, 0));
        (end, self.predicted)
    }
}

impl Hands {
    fn any(&self) -> bool {
        self.place.is_some()
            || self.waiter.is_some()
            || self.slot.is_some()
            || self.linger.is_some()
    }
}
