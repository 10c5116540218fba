//! Whether the queue stands, after the idea of controlled delay.
//!
//! A queue that runs short now and then is a burst and does its job. A queue whose oldest call was above
//! the target age at every hand-off of a whole interval stands: its calls only get older. From then on,
//! until the oldest is within the target again, the newest of a flow are served first, and calls that
//! have waited for more than twice the target are sent away early.

use std::time::Duration;

use crate::clock::{Micros, micros};

/// An interval, in targets.
const INTERVAL: u64 = 8;

/// A call is sent away when it waited for so many targets.
const SEND_AWAY: u64 = 2;

#[derive(Debug, Default)]
pub(super) struct Overload {
    standing: bool,
    /// The least age of the oldest queued call at the hand-offs of this interval.
    least: Option<Micros>,
    until: Micros,
}

// === impl Overload ===

impl Overload {
    /// A slot is handed out while the oldest queued call is of this age.
    pub(super) fn observe(&mut self, now: Micros, oldest: Micros, target: Option<Duration>) {
        let Some(target) = target.map(micros) else {
            *self = Self::default();
            return;
        };
        if now >= self.until {
            self.standing = self.least.is_some_and(|least| least > target);
            self.least = None;
            self.until = now.saturating_add(target.saturating_mul(INTERVAL));
        }
        self.least = Some(self.least.map_or(oldest, |least| least.min(oldest)));
        self.standing &= oldest > target;
    }

    pub(super) const fn stands(&self) -> bool {
        self.standing
    }

    /// Whether a call that has waited for so long is not worth a slot any more.
    pub(super) fn gives_up(&self, waited: Micros, target: Option<Duration>) -> bool {
        self.standing
            && target.is_some_and(|target| waited > micros(target).saturating_mul(SEND_AWAY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: Option<Duration> = Some(Duration::from_micros(10));

    #[test]
    fn a_burst_is_no_overload_and_a_standing_queue_is() {
        let mut overload = Overload::default();
        for now in (0..80).step_by(10) {
            overload.observe(now, 15, TARGET);
            assert!(!overload.stands());
        }
        overload.observe(80, 25, TARGET);
        assert!(overload.stands());
        assert!(overload.gives_up(21, TARGET));
        assert!(!overload.gives_up(20, TARGET));
        overload.observe(90, 10, TARGET);
        assert!(!overload.stands(), "within the target again");
        for now in (100..170).step_by(10) {
            overload.observe(now, 15, TARGET);
        }
        assert!(!overload.stands(), "it ran short within this interval");
    }

    #[test]
    fn without_a_target_nothing_is_overload() {
        let mut overload = Overload::default();
        for now in 0..100 {
            overload.observe(now, 1_000_000, None);
        }
        assert!(!overload.stands());
        assert!(!overload.gives_up(u64::MAX, None));
    }
}
