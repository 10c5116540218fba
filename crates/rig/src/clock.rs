//! One clock for all processes of a run: nanoseconds since the Unix epoch,
//! read from the monotonic clock after one reading of the system clock.

use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

static BASE: OnceLock<(u64, Instant)> = OnceLock::new();

fn base() -> (u64, Instant) {
    *BASE.get_or_init(|| {
        let epoch = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or(Duration::ZERO);
        (nanos(epoch), Instant::now())
    })
}

fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

/// Nanoseconds since the Unix epoch; never goes back within a process.
#[must_use]
pub fn now_ns() -> u64 {
    let (epoch, start) = base();
    epoch + nanos(start.elapsed())
}

/// Seconds since the Unix epoch, for `created` fields.
#[must_use]
pub fn now_secs() -> u64 {
    now_ns() / 1_000_000_000
}
