//! Durations, counted into buckets.
//!
//! Each call observes half a dozen of them. An observation is two additions to its thread's share, mostly in one line of the cache.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::{MetricType, TypedMetric};

use super::shares::Shares;

/// Upper bounds in nanoseconds, from a tenth of a millisecond to twenty minutes: a queue hand-off and a thinking model both have buckets.
#[rustfmt::skip]
const BOUNDS: [u64; 20] = [
    100_000, 500_000, 1_000_000, 2_500_000, 5_000_000, 10_000_000, 25_000_000, 50_000_000, 100_000_000, 250_000_000,
    500_000_000, SECOND, 5 * SECOND / 2, 5 * SECOND, 10 * SECOND, 30 * SECOND, 60 * SECOND, 120 * SECOND, 300 * SECOND, 1200 * SECOND,
];
const SECOND: u64 = 1_000_000_000;

/// Shown in seconds. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Histogram(Arc<Shares<Counts>>);

/// Of one thread. The sum stands beside the buckets of what is short.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct Counts {
    /// Seconds, as the bits of an `f64`.
    sum: AtomicU64,
    /// By bucket, what is longer than the last bound behind them.
    buckets: [AtomicU64; BOUNDS.len() + 1],
}

impl Histogram {
    pub fn observe(&self, time: Duration) {
        let seconds = time.as_secs().saturating_mul(SECOND);
        let nanos = seconds.saturating_add(u64::from(time.subsec_nanos()));
        // From the shortest on: most are short.
        let bucket = BOUNDS.iter().take_while(|bound| nanos > **bound).count();
        let (counts, writes) = self.0.mine();
        if let Some(bucket) = counts.buckets.get(bucket) {
            writes.change(bucket, |count| count.wrapping_add(1));
        }
        let add = |sum| (f64::from_bits(sum) + time.as_secs_f64()).to_bits();
        writes.change(&counts.sum, add);
    }
}

impl TypedMetric for Histogram {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for Histogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let bounds = BOUNDS.iter().map(|nanos| *nanos as f64 / SECOND as f64);
        let counts = (0..=BOUNDS.len()).map(|bucket| {
            let shares = self.0.all().filter_map(|share| share.buckets.get(bucket));
            shares.map(|count| count.load(Ordering::Relaxed)).sum()
        });
        let shown: Vec<_> = bounds.chain([f64::INFINITY]).zip(counts).collect();
        // Of the same reading as the buckets, so that the last of them is the count.
        let count = shown.iter().map(|(_, count)| count).sum();
        let sums = self.0.all().map(|share| share.sum.load(Ordering::Relaxed));
        let sum = sums.map(f64::from_bits).fold(0.0, std::ops::Add::add);
        encoder.encode_histogram::<NoLabelSet>(sum, count, &shown, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::histogram::Histogram as Known;
    use prometheus_client::registry::Registry;

    use super::*;

    fn text(metric: impl prometheus_client::registry::Metric) -> String {
        let mut registry = Registry::default();
        registry.register("times", "Times", metric);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        text
    }

    #[test]
    fn it_shows_what_the_librarys_own_shows() {
        let (ours, known) = (
            Histogram::default(),
            Known::new(BOUNDS.map(|nanos| nanos as f64 / 1e9)),
        );
        assert_eq!(text(ours.clone()), text(known.clone()));
        let around = |nanos: &u64| [nanos - 1, *nanos, nanos + 1, nanos * 3 / 2];
        let times = BOUNDS.iter().flat_map(around).chain([0, u64::MAX]);
        for time in times.map(Duration::from_nanos).chain([Duration::MAX]) {
            ours.observe(time);
            known.observe(time.as_secs_f64());
        }
        let shown = text(ours);
        assert_eq!(shown, text(known));
        assert!(shown.contains("times_bucket{le=\"0.0025\"}"), "{shown}");
        assert!(shown.contains("times_count 83\n"), "{shown}");
    }

    #[test]
    fn threads_that_observe_at_once_lose_nothing() {
        let times = Histogram::default();
        std::thread::scope(|scope| {
            for _ in 0..160 {
                scope.spawn(|| (0..1000).for_each(|_| times.observe(Duration::from_millis(250))));
            }
        });
        let shown = text(times);
        assert!(shown.contains("times_sum 40000.0\n"), "{shown}");
        assert!(shown.contains("times_bucket{le=\"0.1\"} 0\n"), "{shown}");
        assert!(
            shown.contains("times_bucket{le=\"0.25\"} 160000\n"),
            "{shown}"
        );
    }
}
