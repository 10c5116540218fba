//! Refusals. Each says whether work had started, because that decides whether a retry can double it.

use std::fmt;
use std::time::Duration;

/// The least and the most a refused caller is told to wait.
pub(crate) const RETRY_AFTER_MIN: Duration = Duration::from_secs(1);
pub(crate) const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// An offer that was turned down at once. It never held a place or a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rejected {
    pub(crate) reason: Reason,
    pub(crate) predicted_wait: Duration,
    pub(crate) retry_after: Duration,
}

/// Why an offer was turned down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The queue holds as many calls as it may, behind attended work.
    QueueFull,
    /// The queue would hold more bytes than it may.
    QueueBytes,
    /// The queue is full, and what it waits for is leftover work: fewer than `limit` calls are
    /// attended, yet abandoned and lingering ones take up the hard limit.
    LeftoverFull,
    /// The caller's flow has as many queued calls as it may; or as many running or abandoned ones, and the
    /// queue is full.
    FlowFull,
    /// The call cannot start before its deadline: it has passed, or the predicted wait is longer.
    Deadline,
    /// The limiter was closed.
    Closed,
}

/// A place in the queue that ended without a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The limiter was closed while the call was queued.
    Closed,
    /// The caller's deadline passed while the call was queued.
    Deadline {
        /// How long the call was queued.
        waited: Duration,
        /// When it is worth asking again.
        retry_after: Duration,
    },
    /// The queue stands, and the call had waited too long to be worth a slot.
    Overloaded {
        /// How long the call was queued.
        waited: Duration,
        /// When it is worth asking again.
        retry_after: Duration,
    },
}

// === impl Rejected ===

impl Rejected {
    /// Why.
    #[must_use]
    pub const fn reason(&self) -> Reason {
        self.reason
    }

    /// Whether work had started: never. A retry cannot double anything.
    #[must_use]
    pub const fn started(&self) -> bool {
        false
    }

    /// How long the call would have been queued: the calls ahead at the measured drain rate, unclamped.
    #[must_use]
    pub const fn predicted_wait(&self) -> Duration {
        self.predicted_wait
    }

    /// When it is worth asking again: the queue ahead at the measured drain rate, 1 s to 60 s.
    #[must_use]
    pub const fn retry_after(&self) -> Duration {
        self.retry_after
    }
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.reason {
            Reason::QueueFull => "the queue is full",
            Reason::QueueBytes => "the queue holds too many bytes",
            Reason::LeftoverFull => "abandoned work holds the slots and the queue is full",
            Reason::FlowFull => "this flow has as many calls as it may",
            Reason::Deadline => "no slot can come free before the deadline",
            Reason::Closed => "the limiter is closed",
        })
    }
}

impl std::error::Error for Rejected {}

// === impl Reason ===

impl Reason {
    /// Every reason, in the order of the metrics.
    pub const ALL: [Self; 6] = [
        Self::QueueFull,
        Self::QueueBytes,
        Self::LeftoverFull,
        Self::FlowFull,
        Self::Deadline,
        Self::Closed,
    ];

    /// The value of a metric label.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::QueueFull => "queue_full",
            Self::QueueBytes => "queue_bytes",
            Self::LeftoverFull => "leftover_full",
            Self::FlowFull => "flow_full",
            Self::Deadline => "deadline",
            Self::Closed => "closed",
        }
    }
}

// === impl Refused ===

impl Refused {
    /// Whether work had started: never. A retry cannot double anything.
    #[must_use]
    pub const fn started(&self) -> bool {
        false
    }

    /// When it is worth asking again, 1 s to 60 s.
    #[must_use]
    pub const fn retry_after(&self) -> Duration {
        match self {
            Self::Closed => RETRY_AFTER_MIN,
            Self::Deadline { retry_after, .. } | Self::Overloaded { retry_after, .. } => {
                *retry_after
            }
        }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("the limiter was closed while the call was queued"),
            Self::Deadline { .. } => f.write_str("the deadline passed while the call was queued"),
            Self::Overloaded { .. } => f.write_str("the queue stands and the call waited too long"),
        }
    }
}

impl std::error::Error for Refused {}
