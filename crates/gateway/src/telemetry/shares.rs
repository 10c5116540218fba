//! What every call adds to, without a lock and without a locked bus: each thread has a share that it alone writes to, in a line of the cache
//! that no other thread has.

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::{MetricType, TypedMetric};

/// Threads with a share of their own; there are more workers only on larger machines. Those beyond have one together.
pub(super) const ALONE: usize = 64;

/// One `T` for each thread that has added to it.
#[derive(Debug)]
pub(super) struct Shares<T>([OnceLock<Box<T>>; ALONE + 1]);

thread_local! {
    /// Where this thread's share is, from its first one on.
    static MINE: Cell<Option<usize>> = const { Cell::new(None) };
}

#[cold]
fn first() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let mine = NEXT.fetch_add(1, Ordering::Relaxed).min(ALONE);
    MINE.set(Some(mine));
    mine
}

impl<T: Default> Shares<T> {
    /// This thread's share, and how it is written to.
    pub(super) fn mine(&self) -> (&T, Writes) {
        let mine = MINE.get().unwrap_or_else(first);
        let writes = if mine < ALONE {
            Writes::Alone
        } else {
            Writes::Together
        };
        (self.0[mine.min(ALONE)].get_or_init(Box::default), writes)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &T> {
        self.0
            .iter()
            .filter_map(|share| share.get())
            .map(|it| &**it)
    }
}

impl<T> Default for Shares<T> {
    fn default() -> Self {
        Self([const { OnceLock::new() }; ALONE + 1])
    }
}

/// Who writes to a share.
#[derive(Clone, Copy)]
pub(super) enum Writes {
    Alone,
    Together,
}

impl Writes {
    /// Sets what stands there to what `next` makes of it.
    #[inline]
    pub(super) fn change(self, count: &AtomicU64, next: impl Fn(u64) -> u64) {
        match self {
            Self::Alone => count.store(next(count.load(Ordering::Relaxed)), Ordering::Relaxed),
            Self::Together => {
                let next = |now| Some(next(now));
                // It always has something to set.
                let _ = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
            }
        }
    }
}

/// A counter. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Count(Arc<Shares<CacheLine>>);

/// Of the cache.
#[derive(Debug, Default)]
#[repr(align(64))]
struct CacheLine(AtomicU64);

impl Count {
    pub fn add(&self, by: u64) {
        let (share, writes) = self.0.mine();
        writes.change(&share.0, |now| now.wrapping_add(by));
    }

    fn get(&self) -> u64 {
        let shares = self.0.all().map(|share| share.0.load(Ordering::Relaxed));
        shares.fold(0, u64::wrapping_add)
    }
}

impl TypedMetric for Count {
    const TYPE: MetricType = MetricType::Counter;
}

impl EncodeMetric for Count {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        encoder.encode_counter::<NoLabelSet, _, u64>(&self.get(), None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_count_at_once_lose_nothing() {
        let count = Count::default();
        std::thread::scope(|scope| {
            // So many that some have their share together, whatever else runs here.
            for _ in 0..2 * ALONE {
                scope.spawn(|| (0..5000).for_each(|_| count.add(3)));
            }
        });
        assert_eq!(count.get(), 2 * ALONE as u64 * 15_000);
    }
}
