//! Where the limiter takes its time from.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A source of monotonic time, for tests and simulations that want to own it.
///
/// Called outside every lock. A clock that steps back is held at its latest reading.
pub trait Clock: Send + Sync {
    /// The current instant.
    fn now(&self) -> Instant;
}

/// A clock that moves only when told to.
///
/// ```
/// use std::time::Duration;
/// use tidegate_limiter::{Clock, ManualClock};
///
/// let clock = ManualClock::new();
/// let before = clock.now();
/// clock.advance(Duration::from_secs(3));
/// assert_eq!(clock.now() - before, Duration::from_secs(3));
/// ```
pub struct ManualClock {
    origin: Instant,
    elapsed_micros: AtomicU64,
}

// === impl ManualClock ===

impl ManualClock {
    /// A clock that stands still at the current instant.
    #[must_use]
    pub fn new() -> Self {
        Self {
            origin: Instant::now(),
            elapsed_micros: AtomicU64::new(0),
        }
    }

    /// Moves the clock on, in whole microseconds.
    pub fn advance(&self, by: Duration) {
        self.elapsed_micros.fetch_add(micros(by), Ordering::Relaxed);
    }
}

impl Default for ManualClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Instant {
        let elapsed = Duration::from_micros(self.elapsed_micros.load(Ordering::Relaxed));
        self.origin.checked_add(elapsed).unwrap_or(self.origin)
    }
}

impl fmt::Debug for ManualClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ManualClock")
            .field("elapsed_micros", &self.elapsed_micros)
            .finish_non_exhaustive()
    }
}

/// The ledger's own unit: whole microseconds since the limiter was made.
pub(crate) type Micros = u64;

/// A duration in the ledger's unit, rounded down.
pub(crate) fn micros(duration: Duration) -> Micros {
    Micros::try_from(duration.as_micros()).unwrap_or(Micros::MAX)
}

/// Reads a clock as [`Micros`].
pub(crate) struct Ticks {
    origin: Instant,
    clock: Option<Box<dyn Clock>>,
}

// === impl Ticks ===

impl Ticks {
    pub(crate) fn system() -> Self {
        Self {
            origin: Instant::now(),
            clock: None,
        }
    }

    pub(crate) fn of(clock: Box<dyn Clock>) -> Self {
        Self {
            origin: clock.now(),
            clock: Some(clock),
        }
    }

    pub(crate) fn now(&self) -> Micros {
        let now = match &self.clock {
            None => Instant::now(),
            Some(clock) => clock.now(),
        };
        self.at(now)
    }

    /// An instant in the ledger's unit; one before the origin is the origin.
    pub(crate) fn at(&self, instant: Instant) -> Micros {
        let since = instant.saturating_duration_since(self.origin);
        since
            .as_secs()
            .saturating_mul(1_000_000)
            .saturating_add(u64::from(since.subsec_micros()))
    }
}

impl<C: Clock + ?Sized> Clock for std::sync::Arc<C> {
    fn now(&self) -> Instant {
        (**self).now()
    }
}
