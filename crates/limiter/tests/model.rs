//! The limiter against a naive model: random sequences of everything a caller can do, every number
//! compared and every identity checked after each step.
#![cfg(not(loom))]

#[path = "model/naive.rs"]
mod naive;

use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use proptest::prelude::*;
use tidegate_limiter::{
    Ask, Ended, Limiter, Limits, Linger, ManualClock, Place, Refused, Slot, Started, Waiter,
};

use self::naive::{Left, Naive, State};

const SEQUENCES: u32 = 20_000;

/// What the caller of one call still holds.
#[derive(Default)]
struct Hands {
    place: Option<Place>,
    waiter: Option<Waiter>,
    slot: Option<Slot>,
    linger: Option<Linger>,
    alarm: Arc<Alarm>,
    /// It was polled in the queue, so the alarm must ring when its state changes.
    polled: bool,
}

#[derive(Default)]
struct Alarm(AtomicBool);

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

struct World {
    limiter: Limiter,
    clock: Arc<ManualClock>,
    naive: Naive,
    hands: Vec<Hands>,
}

/// A source of choices, made from one random word.
struct Choice(u32);

impl Choice {
    fn of(&mut self, options: u32) -> u32 {
        let chosen = self.0 % options;
        self.0 /= options;
        chosen
    }

    fn below(&mut self, options: usize) -> usize {
        self.of(u32::try_from(options).expect("few")) as usize
    }

    fn ended(&mut self) -> Ended {
        [Ended::Ok, Ended::Error, Ended::Cancelled, Ended::Panicked][self.below(4)]
    }

    fn limits(&mut self) -> Limits {
        let limit = 1 + self.below(3);
        let hard_limit = limit + self.below(3);
        let calls = |count| NonZeroUsize::new(count).expect("not zero");
        Limits::new(calls(limit))
            .with_hard_limit(calls(hard_limit))
            .with_queue(self.below(5))
            .with_queue_bytes([10, 60, 1_000][self.below(3)])
    }
}

impl World {
    fn new(limits: Limits) -> Self {
        let clock = Arc::new(ManualClock::new());
        Self {
            limiter: Limiter::with_clock(limits, clock.clone()).expect("sound limits"),
            clock,
            naive: Naive::new(limits),
            hands: Vec::new(),
        }
    }

    fn step(&mut self, word: u32) {
        let mut choice = Choice(word);
        match choice.of(16) {
            0..=4 => self.offer(u64::from(choice.of(4)) * 10),
            5 => self.advance(Duration::from_millis(u64::from(choice.of(5_000)))),
            6 if choice.of(2) == 0 => {
                let limits = choice.limits();
                self.limiter.resize(limits).expect("sound limits");
                self.naive.resize(limits);
            }
            7 if choice.of(12) == 0 => {
                self.limiter.close();
                self.naive.close();
            }
            _ => self.touch(&mut choice),
        }
        self.check();
    }

    fn offer(&mut self, bytes: u64) {
        let advice = self.limiter.would_reject(bytes);
        let real = self.limiter.offer(Ask::new("call", bytes));
        let naive = self.naive.offer(bytes);
        assert_eq!(advice, real.as_ref().err().copied(), "advice");
        match (real, naive) {
            (Ok(place), Ok(call)) => {
                assert_eq!(call, self.hands.len());
                self.hands.push(Hands {
                    place: Some(place),
                    ..Hands::default()
                });
            }
            (Err(rejected), Err(reason)) => assert_eq!(rejected.reason(), reason),
            (real, naive) => panic!("offered: {real:?}, expected {naive:?}"),
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
            (Poll::Ready(Err(Refused::Closed)), State::Left(Left::Closed)) => hands.place = None,
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

    /// Every number against the model, every identity, and no wake-up lost.
    fn check(&mut self) {
        let real = self.limiter.snapshot();
        let naive = &self.naive;
        assert_eq!(real.broken_identity(), None, "{real:?}");
        assert_eq!(real.closed, naive.closed);
        assert_eq!(real.over_limit, naive.over_limit, "over limit");
        assert_eq!(real.queued, naive.in_state(State::Queued), "queued");
        assert_eq!(real.queued_bytes, naive.queued_bytes(), "queued bytes");
        assert_eq!(real.running, naive.in_state(State::Running), "running");
        assert_eq!(real.attended, naive.attended(), "attended");
        assert_eq!(real.abandoned, naive.abandoned(), "abandoned");
        assert_eq!(real.lingering, naive.in_state(State::Lingering));
        assert_eq!(real.offered, naive.totals.offered);
        assert_eq!(real.rejected, naive.totals.rejected);
        assert_eq!(real.left, naive.left(), "left");
        assert_eq!(real.ended, naive.ended(), "ended");
        assert_eq!(real.abandoned_total, naive.totals.abandoned);
        assert_eq!(real.reattached_total, naive.totals.reattached);
        assert_eq!(real.unclaimed_total, naive.totals.unclaimed);
        assert_eq!(real.lingered_total, naive.totals.lingered);
        assert_eq!(real.confirmed_total, naive.totals.confirmed);
        assert_eq!(real.queued_time, naive.totals.queued_time);
        assert_eq!(real.running_time, naive.totals.running_time);
        assert_eq!(real.abandoned_time, naive.totals.abandoned_time);
        let is = |state| move |call: &naive::Call| call.state == state;
        let away = |call: &naive::Call| call.state == State::Running && !call.attended;
        let oldest = naive.oldest(is(State::Queued), |call| call.came);
        assert_eq!(real.oldest_queued, oldest);
        let oldest = naive.oldest(is(State::Running), |call| call.began);
        assert_eq!(real.oldest_running, oldest);
        assert_eq!(
            real.oldest_abandoned,
            naive.oldest(away, |call| call.away_since)
        );
        self.check_work_and_wakes();
    }

    /// Counts the slots the caller really holds, without asking anybody.
    fn check_work_and_wakes(&self) {
        let mut ahead = 0;
        let mut holding = 0;
        for (hands, naive) in self.hands.iter().zip(&self.naive.calls) {
            holding += usize::from(hands.slot.is_some() || hands.linger.is_some());
            let queued = naive.state == State::Queued;
            if let Some(place) = &hands.place {
                assert_eq!(place.position(), queued.then_some(ahead), "position");
            }
            ahead += usize::from(queued);
            let rung = hands.alarm.0.load(Ordering::Relaxed);
            if hands.polled {
                assert_eq!(rung, !queued, "a wake-up was lost or came too early");
            }
        }
        let real = self.limiter.snapshot();
        assert!(
            holding <= real.running + real.lingering,
            "slots out of nowhere"
        );
        assert!(
            real.over_limit || holding <= self.naive.limits.hard_limit.get(),
            "more at once than the hard limit"
        );
        assert_eq!(self.limiter.running().len(), self.naive.occupied());
    }

    /// Lets everything go, in the order the word says, and looks for leaks.
    fn finish(mut self, word: u32) {
        let mut choice = Choice(word);
        while let Some(call) = self.hands.iter().position(Hands::any) {
            match choice.of(2) {
                0 if self.hands[call].place.is_some() => self.poll(call),
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
            // Not yet ended calls of a waiter that is already gone keep their slot: next round.
            self.check();
        }
        let end = self.limiter.snapshot();
        assert_eq!((end.queued, end.running, end.lingering), (0, 0, 0));
        assert_eq!(end.queued_bytes, 0);
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

proptest! {
    #![proptest_config(ProptestConfig {
        cases: SEQUENCES,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_limiter_is_its_model(
        limits in any::<u32>(),
        words in proptest::collection::vec(any::<u32>(), 1..40),
        end in any::<u32>(),
    ) {
        let mut world = World::new(Choice(limits).limits());
        for word in words {
            world.step(word);
        }
        world.finish(end);
    }
}
