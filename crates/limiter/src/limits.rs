//! What an operator sets and what a caller asks for.

use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The largest `limit`, `hard_limit` and `queue` that are accepted: 2^24, far above any sane setting.
pub const MAX_CALLS: usize = 1 << 24;

/// The bounds of one limiter, in calls of weight one ([`Ask::weight`]). There is no way to make an unbounded queue.
/// The bounds of a flow hold within its class and count calls, whatever their weight.
///
/// `limit` bounds the *attended* calls, `hard_limit` bounds everything that really occupies the
/// upstream: attended, abandoned and lingering. They are equal by default, so that a limit of one
/// never runs two. The difference, if any, is the number of leftovers an operator tolerates beside
/// a full set of attended calls.
///
/// ```
/// use std::num::NonZeroUsize;
/// use tidegate_limiter::Limits;
///
/// let eight = NonZeroUsize::new(8).expect("not zero");
/// let limits = Limits::new(eight).with_queue(4).with_queue_bytes(1 << 20);
/// assert_eq!(limits.hard_limit, eight);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// The most attended calls at once.
    pub limit: NonZeroUsize,
    /// The most calls that really occupy the upstream at once. Never below `limit`.
    pub hard_limit: NonZeroUsize,
    /// The most queued calls, whatever their weight. Zero means: start at once or be rejected.
    pub queue: usize,
    /// The most [`Ask::bytes`] the queued calls may hold together, in bytes.
    pub queue_bytes: u64,
    /// The most queued calls of one flow, in calls. Never binding by default.
    pub flow_queue: usize,
    /// The most calls of one flow that hold slots: running, attended or not, and lingering. The next ones
    /// of the flow stay queued, and the other flows are served past them. Never binding by default.
    pub flow_limit: NonZeroUsize,
    /// How many abandoned calls of one flow, running or lingering, keep its next ones from starting: so one
    /// tenant's dead calls do not take the pool. Calls that have started can be abandoned all the same, up
    /// to `flow_limit`. Never binding by default.
    pub flow_abandoned: NonZeroUsize,
    /// The longest a call may be queued: a deadline for every ask, beside its own. `None`, the default:
    /// as long as the waiter waits.
    pub queue_time: Option<Duration>,
    /// The age up to which a queued call is no sign of overload. `None`, the default: first in, first
    /// out whatever happens. Otherwise, once the oldest queued call has been older than this at every
    /// hand-off for eight times as long, the newest call of a flow is served first and those that waited
    /// twice as long are sent away, until the oldest is within the target again.
    pub target_delay: Option<Duration>,
}

/// Why [`Limits`] are not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitsError {
    /// A limit of zero would never start anything.
    Zero,
    /// `hard_limit` is below `limit`.
    HardBelowLimit {
        /// The attended limit, in calls.
        limit: usize,
        /// The hard limit, in calls.
        hard_limit: usize,
    },
    /// A number above [`MAX_CALLS`].
    TooLarge {
        /// The name of the setting.
        setting: &'static str,
        /// Its value, in calls.
        value: usize,
    },
}

/// What a caller brings to the limiter.
///
/// ```
/// use tidegate_limiter::Ask;
///
/// let ask = Ask::new("POST /v1/chat/completions", 4096);
/// assert_eq!(ask.bytes, 4096);
/// assert_eq!(Ask::default().bytes, 0);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ask {
    /// Names the call in reports of what still runs. Cheap to clone; none by default.
    pub label: Option<Arc<str>>,
    /// What the caller holds in memory while it is queued, in bytes.
    pub bytes: u64,
    /// How many slots it takes: one by default. A call heavier than the limit takes the whole limit. The
    /// next in the queue waits until it fits, and nobody behind it starts before, so a heavy call cannot
    /// starve.
    pub weight: NonZeroU32,
    /// Whose call it is, to be fair between them: any number that stands for a tenant or a key. Calls of
    /// one flow are first in, first out. Zero by default.
    pub flow: u64,
    /// How urgent it is.
    pub class: Class,
    /// When there is no use in starting any more. A call that cannot start in time is rejected at once,
    /// and one whose deadline has passed in the queue is not started.
    pub deadline: Option<Instant>,
}

/// How urgent a call is. A higher class is served first; a lower one that waits still gets at least every
/// tenth slot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Before the others.
    High,
    /// The usual.
    #[default]
    Normal,
    /// After the others.
    Low,
}

// === impl Limits ===

impl Limits {
    /// `limit` calls at once, attended or not, a queue of the same length, 256 MiB of queued bytes.
    #[must_use]
    pub const fn new(limit: NonZeroUsize) -> Self {
        Self {
            limit,
            hard_limit: limit,
            queue: limit.get(),
            queue_bytes: 256 << 20,
            flow_queue: usize::MAX,
            flow_limit: NonZeroUsize::MAX,
            flow_abandoned: NonZeroUsize::MAX,
            queue_time: None,
            target_delay: None,
        }
    }

    /// Sets the most queued calls.
    #[must_use]
    pub const fn with_queue(mut self, calls: usize) -> Self {
        self.queue = calls;
        self
    }

    /// Sets the most bytes the queued calls may hold together.
    #[must_use]
    pub const fn with_queue_bytes(mut self, bytes: u64) -> Self {
        self.queue_bytes = bytes;
        self
    }

    /// Sets the most queued calls of one flow.
    #[must_use]
    pub const fn with_flow_queue(mut self, calls: usize) -> Self {
        self.flow_queue = calls;
        self
    }

    /// Sets the most calls of one flow that hold slots.
    #[must_use]
    pub const fn with_flow_limit(mut self, calls: NonZeroUsize) -> Self {
        self.flow_limit = calls;
        self
    }

    /// Sets how many abandoned calls of one flow keep its next ones from starting.
    #[must_use]
    pub const fn with_flow_abandoned(mut self, calls: NonZeroUsize) -> Self {
        self.flow_abandoned = calls;
        self
    }

    /// Sets the longest a call may be queued.
    #[must_use]
    pub const fn with_queue_time(mut self, time: Duration) -> Self {
        self.queue_time = Some(time);
        self
    }

    /// Sets the age up to which a queued call is no sign of overload.
    #[must_use]
    pub const fn with_target_delay(mut self, age: Duration) -> Self {
        self.target_delay = Some(age);
        self
    }

    /// Sets the most calls that may really run, leftovers included.
    #[must_use]
    pub const fn with_hard_limit(mut self, calls: NonZeroUsize) -> Self {
        self.hard_limit = calls;
        self
    }

    pub(crate) fn check(&self) -> Result<(), LimitsError> {
        let (limit, hard_limit) = (self.limit.get(), self.hard_limit.get());
        for (setting, value) in [
            ("limit", limit),
            ("hard_limit", hard_limit),
            ("queue", self.queue),
        ] {
            if value > MAX_CALLS {
                return Err(LimitsError::TooLarge { setting, value });
            }
        }
        if hard_limit < limit {
            return Err(LimitsError::HardBelowLimit { limit, hard_limit });
        }
        Ok(())
    }
}

impl TryFrom<usize> for Limits {
    type Error = LimitsError;

    fn try_from(limit: usize) -> Result<Self, LimitsError> {
        let limits = Self::new(NonZeroUsize::new(limit).ok_or(LimitsError::Zero)?);
        limits.check()?;
        Ok(limits)
    }
}

// === impl LimitsError ===

impl fmt::Display for LimitsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero => write!(f, "a limit of zero would never start anything"),
            Self::HardBelowLimit { limit, hard_limit } => {
                write!(f, "hard_limit {hard_limit} is below limit {limit}")
            }
            Self::TooLarge { setting, value } => {
                write!(f, "{setting} {value} is above {MAX_CALLS}")
            }
        }
    }
}

impl std::error::Error for LimitsError {}

// === impl Ask ===

impl Ask {
    /// A call named `label` that holds `bytes` bytes while it is queued.
    #[must_use]
    pub fn new(label: impl Into<Arc<str>>, bytes: u64) -> Self {
        Self {
            label: Some(label.into()),
            ..Self::unnamed(bytes)
        }
    }

    /// A call that reports show by its number alone.
    #[must_use]
    pub fn unnamed(bytes: u64) -> Self {
        Self {
            label: None,
            bytes,
            weight: NonZeroU32::MIN,
            flow: 0,
            class: Class::default(),
            deadline: None,
        }
    }

    /// Sets how many slots it takes.
    #[must_use]
    pub const fn with_weight(mut self, slots: NonZeroU32) -> Self {
        self.weight = slots;
        self
    }

    /// Sets whose call it is.
    #[must_use]
    pub const fn with_flow(mut self, flow: u64) -> Self {
        self.flow = flow;
        self
    }

    /// Sets how urgent it is.
    #[must_use]
    pub const fn with_class(mut self, class: Class) -> Self {
        self.class = class;
        self
    }

    /// Sets when there is no use in starting any more.
    #[must_use]
    pub const fn with_deadline(mut self, deadline: Instant) -> Self {
        self.deadline = Some(deadline);
        self
    }
}

impl Default for Ask {
    fn default() -> Self {
        Self::unnamed(0)
    }
}

// === impl Class ===

impl Class {
    /// Every class, the highest first.
    pub const ALL: [Self; 3] = [Self::High, Self::Normal, Self::Low];
}
