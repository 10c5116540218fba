//! How busy the machine is with other things.

use std::fs;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::load::Watched;

/// Waits until others use little of the machine, or until `most` has passed.
pub(super) async fn wait_quiet(most: Duration) {
    /// As much as a machine does that does nothing.
    const QUIET_PERCENT: f64 = 5.0;
    let until = Instant::now() + most;
    while Instant::now() < until {
        let before = Busy::now();
        sleep(Duration::from_secs(1)).await;
        let others = before.others_percent(&Busy::now());
        if others.is_some_and(|o| o < QUIET_PERCENT) {
            return;
        }
    }
}

/// CPU time spent so far, by the whole machine and by the processes of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Busy {
    all_ticks: u64,
    busy_ticks: u64,
    ours_us: u64,
}

impl Busy {
    pub(super) fn now() -> Self {
        let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
        let fields: Vec<u64> = stat
            .lines()
            .next()
            .unwrap_or_default()
            .split_ascii_whitespace()
            .skip(1)
            .take(8)
            .filter_map(|f| f.parse().ok())
            .collect();
        let all_ticks: u64 = fields.iter().sum();
        // The fourth is idle, the fifth waits for disks.
        let idle: u64 = fields.iter().skip(3).take(2).sum();
        Self {
            all_ticks,
            busy_ticks: all_ticks - idle,
            // Upstream and contender are children of this process.
            ours_us: Watched::cpu_us_of(std::process::id()).unwrap_or(0),
        }
    }

    /// Share of the machine that others used from this moment to a later one.
    pub(super) fn others_percent(&self, later: &Self) -> Option<f64> {
        let all = later.all_ticks.checked_sub(self.all_ticks)?;
        let busy = later.busy_ticks.checked_sub(self.busy_ticks)?;
        let ours = later.ours_us.checked_sub(self.ours_us)? / 10_000;
        let float = |ticks: u64| u32::try_from(ticks).ok().map(f64::from);
        Some(100.0 * float(busy.saturating_sub(ours))? / float(all.max(1))?)
    }
}
