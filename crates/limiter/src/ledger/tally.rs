//! Counters and the time integrals of the gauges.

use std::time::Duration;

use crate::error::Reason;
use crate::snapshot::{Ended, EndedCounts, LeftCounts, RejectedCounts, Split};

/// How a call ended, with the case its owner cannot say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Said(Ended),
    Dropped,
}

/// Why a queued call leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leave {
    Caller,
    Deadline,
    Overload,
}

#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Tally {
    pub(super) offered: u64,
    pub(super) admitted: u64,
    pub(super) rejected: RejectedCounts,
    pub(super) left: LeftCounts,
    pub(super) started: u64,
    pub(super) ended: EndedCounts,
    pub(super) abandoned: u64,
    pub(super) reattached: u64,
    pub(super) unclaimed: u64,
    pub(super) lingered: u64,
    pub(super) confirmed: u64,
    pub(super) queued_micros: u64,
    pub(super) running_micros: u64,
    pub(super) abandoned_micros: u64,
}

// === impl Tally ===

impl Tally {
    pub(super) fn rejected(&mut self, reason: Reason) {
        let counter = match reason {
            Reason::QueueFull => &mut self.rejected.queue_full,
            Reason::QueueBytes => &mut self.rejected.queue_bytes,
            Reason::LeftoverFull => &mut self.rejected.leftover_full,
            Reason::FlowFull => &mut self.rejected.flow_full,
            Reason::Deadline => &mut self.rejected.deadline,
            Reason::Closed => &mut self.rejected.closed,
        };
        *counter += 1;
    }

    pub(super) fn left(&mut self, why: Leave) {
        match why {
            Leave::Caller => self.left.caller += 1,
            Leave::Deadline => self.left.deadline += 1,
            Leave::Overload => self.left.overload += 1,
        }
    }

    pub(super) fn ended(&mut self, outcome: Outcome, attended: bool) {
        let ended = &mut self.ended;
        let Split {
            attended: with,
            abandoned: without,
        } = match outcome {
            Outcome::Said(Ended::Ok) => &mut ended.ok,
            Outcome::Said(Ended::Error) => &mut ended.error,
            Outcome::Said(Ended::Cancelled) => &mut ended.cancelled,
            Outcome::Said(Ended::Panicked) => &mut ended.panicked,
            Outcome::Dropped => &mut ended.dropped,
        };
        *(if attended { with } else { without }) += 1;
    }
}

/// Adds `calls` for `micros` to an integral. 2^64 call-microseconds are 580,000 call-years.
pub(super) fn integrate(integral: &mut u64, calls: usize, micros: u64) {
    *integral = integral.saturating_add((calls as u64).saturating_mul(micros));
}

pub(super) fn duration(micros: u64) -> Duration {
    Duration::from_micros(micros)
}
