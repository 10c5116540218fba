//! How fast slots come free, measured.

use std::time::Duration;

use crate::clock::Micros;
use crate::error::{RETRY_AFTER_MAX, RETRY_AFTER_MIN};

/// A window is closed after so many ended calls, or after [`WINDOW_MICROS`] and [`SURE_CALLS`].
const WINDOW_CALLS: u64 = 32;
const WINDOW_MICROS: Micros = 30_000_000;

/// Below so many ended calls nobody is turned away for a predicted wait.
const SURE_CALLS: u64 = 8;

/// What a call is taken to cost before any has ended.
const FIRST_GUESS_MICROS: Micros = 1_000_000;

/// What a call costs in slot time, over the last one to two windows.
///
/// Slot time, not wall time, is what is divided by: an idle limiter teaches nothing, and a call
/// that still runs counts with its age, so a stuck upstream shows before anything has ended.
#[derive(Debug, Default)]
pub(super) struct Drain {
    earlier: Window,
    current: Window,
    since: Micros,
}

#[derive(Debug, Default, Clone, Copy)]
struct Window {
    ended: u64,
    slot_micros: u64,
}

// === impl Drain ===

impl Drain {
    pub(super) fn held(&mut self, slot_micros: u64) {
        self.current.slot_micros = self.current.slot_micros.saturating_add(slot_micros);
    }

    pub(super) fn ended(&mut self, now: Micros) {
        self.current.ended += 1;
        let old = now.saturating_sub(self.since) >= WINDOW_MICROS;
        if self.current.ended >= if old { SURE_CALLS } else { WINDOW_CALLS } {
            self.earlier = std::mem::take(&mut self.current);
            self.since = now;
        }
    }

    /// What a call costs in slot time, in microseconds; a guess of one second before any has ended.
    pub(super) fn per_call(&self) -> Micros {
        let ended = self.earlier.ended + self.current.ended;
        if ended == 0 {
            return FIRST_GUESS_MICROS;
        }
        let held = self
            .earlier
            .slot_micros
            .saturating_add(self.current.slot_micros);
        (held / ended).max(1)
    }

    /// Whether enough calls have ended for a prediction to turn somebody away.
    pub(super) const fn is_sure(&self) -> bool {
        self.earlier.ended + self.current.ended >= SURE_CALLS
    }

    /// When the call behind `ahead` others can expect a slot, with `slots` slots at work.
    pub(super) fn wait(&self, ahead: usize, slots: usize) -> Duration {
        let ended = (self.earlier.ended + self.current.ended).max(1);
        let slot_micros = self
            .earlier
            .slot_micros
            .saturating_add(self.current.slot_micros);
        let per_call = u128::from(slot_micros) / u128::from(ended);
        let micros = per_call * (ahead as u128 + 1) / (slots.max(1) as u128);
        Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
    }

    pub(super) fn retry_after(&self, ahead: usize, slots: usize) -> Duration {
        self.wait(ahead, slots)
            .clamp(RETRY_AFTER_MIN, RETRY_AFTER_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_is_the_queue_ahead_at_the_measured_rate() {
        let mut drain = Drain::default();
        for call in 1..=10 {
            drain.held(4_000_000);
            drain.ended(call * 2_000_000);
        }
        // 4 s of slot time a call, two slots: one call every 2 s.
        assert_eq!(drain.retry_after(0, 2), Duration::from_secs(2));
        assert_eq!(drain.retry_after(4, 2), Duration::from_secs(10));
        assert_eq!(drain.retry_after(1_000, 2), RETRY_AFTER_MAX);
    }

    #[test]
    fn a_fresh_limiter_says_one_second() {
        assert_eq!(Drain::default().retry_after(7, 1), RETRY_AFTER_MIN);
    }

    #[test]
    fn a_stuck_upstream_shows_before_anything_ends() {
        let mut drain = Drain::default();
        drain.held(20_000_000);
        assert_eq!(drain.retry_after(0, 1), Duration::from_secs(20));
    }

    #[test]
    fn old_windows_are_forgotten() {
        let mut drain = Drain::default();
        for call in 0..64 {
            drain.held(60_000_000);
            drain.ended(call);
        }
        for call in 0..64 {
            drain.held(2_000_000);
            drain.ended(call);
        }
        assert_eq!(drain.retry_after(0, 1), Duration::from_secs(2));
    }
}
