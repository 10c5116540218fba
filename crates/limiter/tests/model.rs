//! The limiter against a naive model: random sequences of everything a caller can do, every number
//! compared and every identity checked after each step.
#![cfg(not(any(loom, shuttle, protocol)))]

#[path = "model/naive.rs"]
mod naive;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use proptest::prelude::{ProptestConfig, any};
use proptest::test_runner::TestRunner;
use tidegate_limiter::{
    Ask, Class, Clock, Ended, Idle, Limiter, Limits, Linger, ManualClock, Place, Reason, Refused,
    Slot, Snapshot, Started, Waiter,
};

use self::naive::{Asked, Left, Naive, Seen, State};

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
    idle: Idle,
    idle_alarm: Arc<Alarm>,
    idle_awaited: bool,
    /// Offers rejected for their predicted wait.
    predicted: u64,
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
        let limits = Limits::new(calls(limit))
            .with_hard_limit(calls(hard_limit))
            .with_queue(self.below(6))
            .with_queue_bytes([10, 60, 1_000][self.below(3)])
            .with_flow_queue([1, 2, usize::MAX][self.below(3)]);
        let limits = match self.of(3) {
            0 => limits.with_queue_time(Duration::from_millis(200)),
            _ => limits,
        };
        if self.of(2) == 0 {
            limits.with_target_delay(Duration::from_millis(20))
        } else {
            limits
        }
    }

    fn ask(&mut self, now: Duration) -> Asked {
        let late = self.of(2) == 0;
        Asked {
            bytes: u64::from(self.of(4)) * 10,
            weight: [1, 1, 1, 2, 5][self.below(5)],
            class: Class::ALL[self.below(3)],
            flow: u64::from(self.of(3)),
            deadline: late.then(|| now + Duration::from_millis([0, 10, 300, 3_000][self.below(4)])),
        }
    }
}

impl World {
    fn new(limits: Limits) -> Self {
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

    fn step(&mut self, word: u32) {
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
    fn look(&self) -> Seen {
        let holding: Vec<usize> = self
            .limiter
            .running()
            .iter()
            .map(|call| call.label.parse().expect("a number"))
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

    /// Every number against the model, every identity, and no wake-up lost.
    fn check(&mut self) {
        let seen = self.look();
        self.naive.serve(&seen);
        self.check_idle();
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
        assert_eq!(real.attended_weight, naive.attended_weight());
        assert_eq!(real.held_weight, naive.held_weight());
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

    fn check_idle(&mut self) {
        let queued = self.naive.in_state(State::Queued);
        let idle = queued + self.naive.occupied() == 0;
        let rung = self.idle_alarm.0.swap(false, Ordering::Relaxed);
        let waker = Waker::from(self.idle_alarm.clone());
        let polled = Pin::new(&mut self.idle).poll(&mut Context::from_waker(&waker));
        assert_eq!(polled.is_ready(), idle, "idle");
        assert_eq!(rung, idle && self.idle_awaited, "the wake-up of the idle");
        self.idle_awaited = !idle;
    }

    /// Counts the slots the caller really holds, without asking anybody.
    fn check_work_and_wakes(&self) {
        let mut ahead = [0; Class::ALL.len()];
        let mut holding = 0;
        for (hands, naive) in self.hands.iter().zip(&self.naive.calls) {
            if hands.slot.is_some() || hands.linger.is_some() {
                holding += naive.held;
            }
            let queued = naive.state == State::Queued;
            if let Some(place) = &hands.place {
                let before = ahead[naive.ask.class as usize];
                assert_eq!(place.position(), queued.then_some(before), "position");
            }
            for ahead in &mut ahead[naive.ask.class as usize..] {
                *ahead += usize::from(queued);
            }
            let rung = hands.alarm.0.load(Ordering::Relaxed);
            if hands.polled {
                assert_eq!(rung, !queued, "a wake-up was lost or came too early");
            }
        }
        let real = self.limiter.snapshot();
        assert!(holding <= real.held_weight, "slots out of nowhere");
        assert!(
            real.over_limit || holding <= self.naive.limits.hard_limit.get(),
            "more at once than the hard limit"
        );
        assert_eq!(self.limiter.running().len(), self.naive.occupied());
    }

    /// Lets everything go, in the order the word says, and looks for leaks.
    fn finish(mut self, word: u32) -> (Snapshot, u64) {
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

#[test]
fn the_limiter_is_its_model() {
    let mut runner = TestRunner::new(ProptestConfig {
        cases: SEQUENCES,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let words = (
        any::<u32>(),
        proptest::collection::vec(any::<u32>(), 1..60),
        any::<u32>(),
    );
    let seen = RefCell::new(BTreeMap::new());
    let outcome = runner.run(&words, |(limits, words, end)| {
        let mut world = World::new(Choice(limits).limits());
        for word in words {
            world.step(word);
        }
        remember(&mut seen.borrow_mut(), &world.finish(end));
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
    for (event, times) in seen.take() {
        assert!(
            times > 10,
            "the sequences hardly ever came to {event}: {times}"
        );
    }
}

/// Counts what the sequences came to: a model that is never put to the test proves nothing.
fn remember(seen: &mut BTreeMap<String, u64>, (end, predicted): &(Snapshot, u64)) {
    let mut add = |event: String, times: u64| *seen.entry(event).or_default() += times;
    for (reason, times) in end.rejected.by_reason() {
        add(format!("rejected {reason}"), times);
    }
    for (reason, times) in end.left.by_reason() {
        add(format!("left {reason}"), times);
    }
    for (outcome, split) in end.ended.by_outcome() {
        add(format!("ended {outcome} attended"), split.attended);
        add(format!("ended {outcome} abandoned"), split.abandoned);
    }
    add("rejected for a predicted wait".into(), *predicted);
    add("abandoned".into(), end.abandoned_total);
    add("reattached".into(), end.reattached_total);
    add("unclaimed".into(), end.unclaimed_total);
    add("lingered".into(), end.lingered_total);
    add("confirmed".into(), end.confirmed_total);
}
