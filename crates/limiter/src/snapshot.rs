//! One consistent reading of a limiter: gauges, counters and ages of the same instant.

use std::sync::Arc;
use std::time::Duration;

/// How a call's work ended, as its owner says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ended {
    /// It did what it was meant to do.
    Ok,
    /// It failed.
    Error,
    /// It was stopped before its end, by the waiter's wish or ours.
    Cancelled,
    /// It panicked. Counted also for a slot that is dropped while its thread unwinds.
    Panicked,
}

/// Ended calls of one outcome, by whether the waiter was still there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Split {
    /// The waiter was there, or had its answer.
    pub attended: u64,
    /// The waiter had left.
    pub abandoned: u64,
}

/// Ended calls by outcome.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EndedCounts {
    /// [`Ended::Ok`].
    pub ok: Split,
    /// [`Ended::Error`].
    pub error: Split,
    /// [`Ended::Cancelled`].
    pub cancelled: Split,
    /// [`Ended::Panicked`].
    pub panicked: Split,
    /// The slot was dropped without a word, or never picked up.
    pub dropped: Split,
}

/// Offers turned down, by [`Reason`](crate::Reason).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RejectedCounts {
    /// [`Reason::QueueFull`](crate::Reason::QueueFull).
    pub queue_full: u64,
    /// [`Reason::QueueBytes`](crate::Reason::QueueBytes).
    pub queue_bytes: u64,
    /// [`Reason::LeftoverFull`](crate::Reason::LeftoverFull).
    pub leftover_full: u64,
    /// [`Reason::FlowFull`](crate::Reason::FlowFull).
    pub flow_full: u64,
    /// [`Reason::Deadline`](crate::Reason::Deadline).
    pub deadline: u64,
    /// [`Reason::Closed`](crate::Reason::Closed).
    pub closed: u64,
}

/// Queued calls that left before they started, by why.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LeftCounts {
    /// The waiter left.
    pub caller: u64,
    /// The waiter's deadline passed.
    pub deadline: u64,
    /// The queue stood, and the call had waited too long.
    pub overload: u64,
    /// The limiter was closed.
    pub closed: u64,
}

/// Everything a limiter knows, taken under its lock: never torn.
///
/// Gauges are in calls, `queued_bytes` in bytes, counters in calls since the limiter was made, and
/// the three times are integrals of their gauges in call-seconds: two calls queued for three
/// seconds make six. [`broken_identity`](Self::broken_identity) lists the sums that always hold.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Snapshot {
    /// The most attended calls.
    pub limit: usize,
    /// The most calls that may really occupy the upstream.
    pub hard_limit: usize,
    /// The most queued calls.
    pub queue_limit: usize,
    /// The most bytes the queued calls may hold.
    pub queue_bytes_limit: u64,
    /// No new offers are taken.
    pub closed: bool,
    /// A resize left more calls running than the new limits allow, and they have not drained yet.
    pub over_limit: bool,
    /// The queue stands: see [`Limits::target_delay`](crate::Limits::target_delay).
    pub overloaded: bool,

    /// Flows the limiter remembers: those with calls, and those that owe while others wait.
    pub flows: usize,
    /// Calls in the queue.
    pub queued: usize,
    /// Those of them that wait for another call of their flow, not for a slot: see
    /// [`Limits::flow_limit`](crate::Limits::flow_limit).
    pub queued_capped: usize,
    /// What the queued calls hold, in bytes.
    pub queued_bytes: u64,
    /// Calls whose work runs: `attended + abandoned`.
    pub running: usize,
    /// Running calls somebody waits for.
    pub attended: usize,
    /// Running calls nobody waits for.
    pub abandoned: usize,
    /// The slots of the attended calls: `attended` when every call has weight one.
    pub attended_weight: usize,
    /// The slots of all running and lingering calls: their number when every call has weight one.
    pub held_weight: usize,
    /// What the next call in the queue takes, if any waits for a slot.
    pub next_weight: Option<usize>,
    /// Calls whose local work is over and whose remote part may run on. Each holds a slot.
    pub lingering: usize,
    /// Those of them whose waiter had left before.
    pub lingering_abandoned: usize,

    /// Offers made.
    pub offered: u64,
    /// Offers taken: they got a slot or a place in the queue.
    pub admitted: u64,
    /// Offers turned down.
    pub rejected: RejectedCounts,
    /// Calls that left the queue without a slot.
    pub left: LeftCounts,
    /// Calls that got a slot.
    pub started: u64,
    /// Calls whose slot was given back.
    pub ended: EndedCounts,
    /// Running calls whose waiter left.
    pub abandoned_total: u64,
    /// Waiters that came back to their running call.
    pub reattached_total: u64,
    /// Started calls whose waiter left before it had picked up the slot: they did nothing. Each is
    /// also in `ended.dropped.attended`.
    pub unclaimed_total: u64,
    /// Calls that lingered.
    pub lingered_total: u64,
    /// Lingering calls whose end was confirmed.
    pub confirmed_total: u64,

    /// How long the call at the head of the queue has been waiting.
    pub oldest_queued: Option<Duration>,
    /// How long the longest running call has been running.
    pub oldest_running: Option<Duration>,
    /// How long ago the waiter of the longest abandoned running call left.
    pub oldest_abandoned: Option<Duration>,
    /// How long ago the local work of the longest lingering call ended.
    pub oldest_lingering: Option<Duration>,
    /// The integral of `queued` over time.
    pub queued_time: Duration,
    /// The integral of `running` over time.
    pub running_time: Duration,
    /// The integral of `abandoned` over time.
    pub abandoned_time: Duration,
}

/// One call that holds a slot, for drain reports and live pages.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunningCall {
    /// Unique within the limiter.
    pub id: u64,
    /// [`Ask::label`](crate::Ask::label).
    pub label: Option<Arc<str>>,
    /// How many slots it holds.
    pub weight: usize,
    /// Since it got its slot.
    pub age: Duration,
    /// Since its waiter left, if it has.
    pub abandoned_since: Option<Duration>,
    /// Its local work is over; the slot is kept for the remote part.
    pub lingering: bool,
}

// === impl Ended ===

impl Ended {
    /// The value of a metric label. A slot dropped without a word is `dropped`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Error => "error",
            Self::Cancelled => "cancelled",
            Self::Panicked => "panicked",
        }
    }
}

// === impl Split ===

impl Split {
    /// Both together.
    #[must_use]
    pub const fn total(self) -> u64 {
        self.attended + self.abandoned
    }
}

// === impl EndedCounts ===

impl EndedCounts {
    /// Every outcome with the value of its metric label.
    #[must_use]
    pub const fn by_outcome(&self) -> [(&'static str, Split); 5] {
        [
            ("ok", self.ok),
            ("error", self.error),
            ("cancelled", self.cancelled),
            ("panicked", self.panicked),
            ("dropped", self.dropped),
        ]
    }

    /// All outcomes together.
    #[must_use]
    pub const fn sum(&self) -> Split {
        let mut sum = Split {
            attended: 0,
            abandoned: 0,
        };
        let mut index = 0;
        let all = self.by_outcome();
        while index < all.len() {
            sum.attended += all[index].1.attended;
            sum.abandoned += all[index].1.abandoned;
            index += 1;
        }
        sum
    }
}

// === impl RejectedCounts ===

impl RejectedCounts {
    /// Every reason with the value of its metric label.
    #[must_use]
    pub const fn by_reason(&self) -> [(&'static str, u64); 6] {
        [
            ("queue_full", self.queue_full),
            ("queue_bytes", self.queue_bytes),
            ("leftover_full", self.leftover_full),
            ("flow_full", self.flow_full),
            ("deadline", self.deadline),
            ("closed", self.closed),
        ]
    }

    /// All reasons together.
    #[must_use]
    pub const fn total(&self) -> u64 {
        let Self {
            queue_full,
            queue_bytes,
            leftover_full,
            flow_full,
            deadline,
            closed,
        } = *self;
        queue_full + queue_bytes + leftover_full + flow_full + deadline + closed
    }
}

// === impl LeftCounts ===

impl LeftCounts {
    /// Every reason with the value of its metric label.
    #[must_use]
    pub const fn by_reason(&self) -> [(&'static str, u64); 4] {
        [
            ("caller", self.caller),
            ("deadline", self.deadline),
            ("overload", self.overload),
            ("closed", self.closed),
        ]
    }

    /// All reasons together.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.caller + self.deadline + self.overload + self.closed
    }
}

// === impl Snapshot ===

impl Snapshot {
    /// Whether one more call of weight one would start at once.
    #[must_use]
    pub const fn has_room(&self) -> bool {
        !self.closed && self.queued == self.queued_capped && self.has_free_slot()
    }

    const fn has_free_slot(&self) -> bool {
        self.attended_weight < self.limit && self.held_weight < self.hard_limit
    }

    /// Whether the next in the queue could start.
    fn next_fits(&self) -> bool {
        self.next_weight.is_some_and(|weight| {
            let weight = weight.min(self.limit);
            self.attended_weight + weight <= self.limit
                && self.held_weight + weight <= self.hard_limit
        })
    }

    /// Whether leftovers are all that keeps the next call from starting.
    #[must_use]
    pub const fn leftovers_block(&self) -> bool {
        self.attended_weight < self.limit && self.held_weight >= self.hard_limit
    }

    /// Names a sum that does not hold, which would be a bug of this crate.
    ///
    /// - `running = attended + abandoned`
    /// - `attended <= attended_weight <= limit` and
    ///   `running + lingering <= held_weight <= hard_limit`, the limits but while `over_limit`
    /// - `offered = rejected + admitted`
    /// - `admitted = queued + started + left`
    /// - `started = running + lingering + ended`
    /// - `abandoned_total = abandoned + lingering_abandoned + ended(abandoned) + reattached_total`
    /// - `queued > queued_capped` implies that the next does not fit: with weight one, that no slot is free
    #[must_use]
    pub fn broken_identity(&self) -> Option<&'static str> {
        let count = |calls: usize| calls as u64;
        let ended = self.ended.sum();
        let occupied = self.running + self.lingering;
        let identities = [
            (
                "running = attended + abandoned",
                self.running == self.attended + self.abandoned,
            ),
            (
                "attended <= limit",
                self.over_limit || self.attended_weight <= self.limit,
            ),
            (
                "running + lingering <= hard_limit",
                self.over_limit || self.held_weight <= self.hard_limit,
            ),
            (
                "calls weigh at least one each",
                self.attended <= self.attended_weight && occupied <= self.held_weight,
            ),
            (
                "offered = rejected + admitted",
                self.offered == self.rejected.total() + self.admitted,
            ),
            (
                "admitted = queued + started + left",
                self.admitted == count(self.queued) + self.started + self.left.total(),
            ),
            (
                "started = running + lingering + ended",
                self.started == count(occupied) + ended.total(),
            ),
            (
                "abandoned_total = abandoned + lingering_abandoned + ended + reattached",
                self.abandoned_total
                    == count(self.abandoned + self.lingering_abandoned)
                        + ended.abandoned
                        + self.reattached_total,
            ),
            (
                "queued > queued_capped implies that the next does not fit",
                (self.queued > self.queued_capped) == self.next_weight.is_some()
                    && !self.next_fits(),
            ),
        ];
        identities
            .into_iter()
            .find_map(|(name, holds)| (!holds).then_some(name))
    }
}
