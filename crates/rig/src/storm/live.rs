//! What users count while they are at it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hdrhistogram::Histogram;
use tokio::time::{Instant, sleep};

use super::target::{Gateway, alive};
use crate::load::histogram;

/// Counts and distributions of one storm.
#[derive(Debug, Default)]
pub(super) struct Live {
    taken: AtomicU64,
    wanted: AtomicU64,
    open: AtomicU64,
    begun: AtomicU64,
    refused: AtomicU64,
    received: AtomicU64,
    refused_in_a_row: AtomicU64,
    drains: AtomicBool,
    seen: Mutex<Seen>,
}

#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) done: u64,
    pub(super) chunks: u64,
    pub(super) first: Histogram<u64>,
    pub(super) delay: Histogram<u64>,
    pub(super) latency: Histogram<u64>,
    pub(super) errors: BTreeMap<String, u64>,
}

impl Default for Seen {
    fn default() -> Self {
        Self {
            done: 0,
            chunks: 0,
            first: histogram(),
            delay: histogram(),
            latency: histogram(),
            errors: BTreeMap::new(),
        }
    }
}

/// Counts a call as open until it is dropped.
pub(super) struct Open<'a>(&'a Live);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Live {
    /// Whether one of `calls` is left to make.
    pub(super) fn take(&self, calls: u64) -> bool {
        self.taken.fetch_add(1, Ordering::Relaxed) < calls
    }

    pub(super) fn opened(&self) -> Open<'_> {
        self.open.fetch_add(1, Ordering::Relaxed);
        self.begun.fetch_add(1, Ordering::Relaxed);
        Open(self)
    }

    pub(super) fn open(&self) -> u64 {
        self.open.load(Ordering::Relaxed)
    }

    /// Attempts that were sent.
    pub(super) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    /// An attempt was answered with a refusal.
    pub(super) fn refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Attempts from which tokens can be expected.
    pub(super) fn not_refused(&self) -> u64 {
        self.begun()
            .saturating_sub(self.refused.load(Ordering::Relaxed))
    }

    /// A user wants something, however often it has to ask.
    pub(super) fn wants(&self) {
        self.wanted.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn wanted(&self) -> u64 {
        self.wanted.load(Ordering::Relaxed)
    }

    pub(super) fn draining(&self) {
        self.drains.store(true, Ordering::Relaxed);
    }

    pub(super) fn drains(&self) -> bool {
        self.drains.load(Ordering::Relaxed)
    }

    pub(super) fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    pub(super) fn got(&self, tokens: u64) {
        self.received.fetch_add(tokens, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn seen(&self) -> Seen {
        self.lock().clone()
    }

    pub(super) fn done(&self) -> u64 {
        self.lock().done
    }

    pub(super) fn note(&self, what: impl FnOnce(&mut Seen)) {
        what(&mut self.lock());
    }

    pub(super) fn failed(&self, why: &str) {
        const KINDS_KEPT: usize = 50;
        let mut seen = self.lock();
        let known = seen.errors.len() < KINDS_KEPT || seen.errors.contains_key(why);
        let kind = if known { why } else { "others" };
        *seen.errors.entry(kind.to_owned()).or_insert(0) += 1;
    }

    /// A connection was made, or was not.
    pub(super) fn connected(&self, made: bool) {
        if made {
            self.refused_in_a_row.store(0, Ordering::Relaxed);
        } else {
            self.refused_in_a_row.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns when the gateway is not there any more, or never says anything
    /// that can be understood, with what is to be said about it.
    pub(super) async fn lost(&self, gateway: &Gateway) -> String {
        /// More than a gateway refuses that is only short of room.
        const REFUSED: u64 = 200;
        /// Calls after which rubbish is no accident.
        const RUBBISH: u64 = 50;
        let start = Instant::now();
        loop {
            sleep(Duration::from_millis(100)).await;
            let after = start.elapsed().as_secs_f64();
            if let Some(pid) = gateway.pid
                && !alive(pid)
            {
                return format!("the gateway (pid {pid}) ended after {after:.1} s");
            }
            if self.refused_in_a_row.load(Ordering::Relaxed) >= REFUSED {
                return format!(
                    "{}: no connection could be made any more after {after:.1} s",
                    gateway.url()
                );
            }
            let seen = self.lock();
            let rubbish = seen.errors.get(super::user::NO_HTTP).copied().unwrap_or(0);
            if rubbish >= RUBBISH && rubbish >= seen.done {
                return format!("{} does not speak HTTP", gateway.url());
            }
        }
    }
}
