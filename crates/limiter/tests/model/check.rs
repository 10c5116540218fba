//! Every number of the limiter against the model's.

use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Waker};

use tidegate_limiter::Class;

use crate::naive::{self, State};
use crate::world::World;

impl World {
    /// Every number against the model, every identity, and no wake-up lost.
    pub(crate) fn check(&mut self) {
        let seen = self.look();
        self.naive.serve(&seen);
        self.check_idle();
        let real = self.limiter.snapshot();
        let naive = &self.naive;
        assert_eq!(real.broken_identity(), None, "{real:?}");
        assert_eq!(real.closed, naive.closed);
        assert_eq!(real.over_limit, naive.over_limit, "over limit");
        assert_eq!(real.queued, naive.in_state(State::Queued), "queued");
        assert_eq!(real.queued_capped, naive.queued_capped(), "capped");
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
        let oldest = naive.oldest(is(State::Lingering), |call| call.lingers_since);
        assert_eq!(real.oldest_lingering, oldest);
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
}
