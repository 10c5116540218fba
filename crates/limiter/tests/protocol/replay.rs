//! The crate itself, taken along a path of the protocol.

use std::num::{NonZeroU32, NonZeroUsize};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use tidegate_limiter::{
    Ask, Ended, Limiter, Limits, Linger, ManualClock, Place, Slot, Started, Waiter,
};

use crate::rules::{Bounds, CALLS, Call, Counts, Door, Phase, Rules, State, Step};

#[derive(Default)]
struct Hands {
    place: Option<Place>,
    waiter: Option<Waiter>,
    slot: Option<Slot>,
    linger: Option<Linger>,
}

pub(crate) struct Replay {
    limiter: Limiter,
    bounds: Bounds,
    hands: [Hands; CALLS],
}

fn calls(count: u8) -> NonZeroUsize {
    NonZeroUsize::new(count.into()).expect("not zero")
}

impl Replay {
    pub(crate) fn new(bounds: Bounds) -> Self {
        let limits = Limits::new(calls(bounds.limit))
            .with_hard_limit(calls(bounds.hard_limit))
            .with_queue(bounds.queue);
        let clock = Arc::new(ManualClock::new());
        Self {
            limiter: Limiter::with_clock(limits, clock).expect("sound limits"),
            bounds,
            hands: Default::default(),
        }
    }

    pub(crate) fn take(&mut self, step: Step) {
        match step {
            Step::Offer(call) => {
                let weight = slots(self.bounds.weights[call]);
                let ask = Ask::new(call.to_string(), 0).with_weight(weight);
                self.hands[call].place = self.limiter.offer(ask).ok();
            }
            Step::Poll(call) => self.poll(call),
            Step::DropPlace(call) => self.hands[call].place = None,
            Step::GoAway(call) => self.waiter(call).step_away(),
            Step::ComeBack(call) => drop(self.waiter(call).come_back()),
            Step::DropWaiter(call) => self.hands[call].waiter = None,
            Step::Done(call) => {
                let waiter = self.hands[call].waiter.take();
                waiter.expect("has a waiter").done();
            }
            Step::Finish(call) => self.slot(call).finish(Ended::Ok),
            Step::Linger(call) => {
                let linger = self.slot(call).linger_as(Ended::Ok);
                self.hands[call].linger = Some(linger);
            }
            Step::EndLinger(call) => self.hands[call].linger = None,
            Step::Seal => self.limiter.seal(),
            Step::Close | Step::Deadline => self.limiter.close(),
        }
    }

    fn poll(&mut self, call: usize) {
        let place = self.hands[call].place.as_mut().expect("has a place");
        let polled = Pin::new(place).poll(&mut Context::from_waker(Waker::noop()));
        self.hands[call].place = None;
        match polled {
            Poll::Ready(Ok(Started { waiter, slot, .. })) => {
                self.hands[call].waiter = Some(waiter);
                self.hands[call].slot = Some(slot);
            }
            Poll::Ready(Err(_)) => {}
            Poll::Pending => panic!("call {call} hears nothing"),
        }
    }

    fn waiter(&mut self, call: usize) -> &mut Waiter {
        self.hands[call].waiter.as_mut().expect("has a waiter")
    }

    fn slot(&mut self, call: usize) -> Slot {
        self.hands[call].slot.take().expect("has a slot")
    }

    /// Whether the crate is where the protocol is: every number, and who holds slots.
    pub(crate) fn compare(&self, state: &State, rules: &Rules) {
        let now = self.limiter.snapshot();
        assert_eq!(now.broken_identity(), None);
        assert_eq!(now.closed, state.door != Door::Open);
        let attended = |call: &Call| call.phase == Phase::Running && call.attended;
        let abandoned = |call: &Call| call.phase == Phase::Running && !call.attended;
        let held = |call: &Call| matches!(call.phase, Phase::Running | Phase::Lingering);
        let gauges = [
            (now.queued, state.in_phase(Phase::Queued)),
            (now.attended, state.count(attended)),
            (now.abandoned, state.count(abandoned)),
            (now.lingering, state.in_phase(Phase::Lingering)),
            (now.attended_weight, state.weight(rules, attended)),
            (now.held_weight, state.weight(rules, held)),
        ];
        for (index, (real, model)) in gauges.into_iter().enumerate() {
            assert_eq!(real, usize::from(model), "gauge {index}: {now:?}");
        }
        let small = |count: u64| u8::try_from(count).expect("few");
        let counts = Counts {
            offered: small(now.offered),
            rejected: small(now.rejected.total()),
            admitted: small(now.admitted),
            left: small(now.left.total()),
            started: small(now.started),
            ended: small(now.ended.sum().total()),
            ended_abandoned: small(now.ended.sum().abandoned),
            abandoned: small(now.abandoned_total),
            reattached: small(now.reattached_total),
            unclaimed: small(now.unclaimed_total),
        };
        assert_eq!(counts, state.counts);
        let running = self.limiter.running();
        let mut holding: Vec<usize> = running
            .iter()
            .map(|call| call.label.as_deref()?.parse().ok())
            .map(|label| label.expect("a number"))
            .collect();
        holding.sort_unstable();
        assert_eq!(holding, state.holding(), "who holds slots");
    }
}

fn slots(weight: u8) -> NonZeroU32 {
    NonZeroU32::new(weight.into()).expect("not zero")
}
