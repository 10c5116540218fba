//! The limiters' own counts, read at the scrape.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use tidegate_limiter::{Limiter, Snapshot};

use super::metrics::UpstreamLabel;

/// All limiters.
#[derive(Clone, Default)]
pub(super) struct Limiters(Arc<Mutex<Vec<Shown>>>);

/// A limiter in the scrape.
pub(super) struct Shown {
    pub(super) upstream: Arc<str>,
    pub(super) limiter: Limiter,
    /// No configuration names it any more: it is shown while work is left in it.
    pub(super) removed: bool,
}

impl Limiters {
    pub(super) fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Shown>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Limiters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiters").finish_non_exhaustive()
    }
}

type Rows = Vec<(Arc<str>, Snapshot)>;

type Gauges = (&'static str, &'static str, fn(&Snapshot) -> usize);
type Seconds64 = (&'static str, &'static str, fn(&Snapshot) -> f64);
type Counters = (&'static str, &'static str, fn(&Snapshot) -> u64);

#[rustfmt::skip] // one line per family
const LIMITER_GAUGES: [Gauges; 8] = [
    ("limit", "Slots for calls somebody waits for", |s| s.limit),
    ("hard_limit", "Slots for all work, abandoned and lingering included", |s| s.hard_limit),
    ("queue_limit", "Places in the queue", |s| s.queue_limit),
    ("queued", "Calls waiting for a slot", |s| s.queued),
    ("running", "Calls whose upstream work runs; attended + abandoned", |s| s.running),
    ("attended", "Running calls whose client still waits", |s| s.attended),
    ("abandoned", "Running calls whose client has gone", |s| s.abandoned),
    ("lingering", "Slots kept after the exchange ended, because the server may run on", |s| s.lingering),
];

#[rustfmt::skip]
const LIMITER_AGES: [Seconds64; 4] = [
    ("oldest_queued_seconds", "Age of the longest wait for a slot", |s| age(s.oldest_queued)),
    ("oldest_running_seconds", "Age of the longest running call", |s| age(s.oldest_running)),
    ("oldest_abandoned_seconds", "Time since the longest abandoned call lost its client", |s| age(s.oldest_abandoned)),
    ("oldest_lingering_seconds", "Time since the exchange ended of the slot that is kept longest", |s| age(s.oldest_lingering)),
];

#[rustfmt::skip]
const LIMITER_COUNTERS: [Counters; 8] = [
    ("offered", "Calls that asked for a slot", |s| s.offered),
    ("admitted", "Calls that got a slot or a place in the queue", |s| s.admitted),
    ("rejected", "Calls that were turned away at once", |s| s.rejected.total()),
    ("started", "Calls that got a slot", |s| s.started),
    ("left_queue", "Calls that left the queue without a slot", |s| s.left.total()),
    ("ended", "Calls whose slot was given back", |s| s.ended.sum().total()),
    ("abandoned_calls", "Running calls whose client went away", |s| s.abandoned_total),
    ("reattached_calls", "Of those, the ones that a retry took up again", |s| s.reattached_total),
];

#[rustfmt::skip]
const LIMITER_TIMES: [Seconds64; 3] = [
    ("queued_seconds", "Time spent in the queue by all calls", |s| s.queued_time.as_secs_f64()),
    ("running_seconds", "Time slots were held", |s| s.running_time.as_secs_f64()),
    ("abandoned_seconds", "Time calls ran on for nobody, their exchanges open; not that of slots kept after a close (lingering)", |s| s.abandoned_time.as_secs_f64()),
];

impl Collector for Limiters {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut rows = Rows::new();
        self.lock().retain(|row| {
            let now = row.limiter.snapshot();
            let shows = !row.removed || now.running + now.lingering + now.queued > 0;
            if shows {
                rows.push((Arc::clone(&row.upstream), now));
            }
            shows
        });
        let e = &mut encoder;
        for (name, help, value) in LIMITER_GAUGES {
            let whole = |s: &Snapshot| i64::try_from(value(s)).unwrap_or(i64::MAX);
            family(e, &rows, name, help, |s| ConstGauge::new(whole(s)))?;
        }
        for (name, help, value) in LIMITER_AGES {
            family(e, &rows, name, help, |s| ConstGauge::new(value(s)))?;
        }
        for (name, help, value) in LIMITER_COUNTERS {
            family(e, &rows, name, help, |s| ConstCounter::new(value(s)))?;
        }
        for (name, help, value) in LIMITER_TIMES {
            family(e, &rows, name, help, |s| ConstCounter::new(value(s)))?;
        }
        Ok(())
    }
}

fn age(age: Option<std::time::Duration>) -> f64 {
    age.unwrap_or_default().as_secs_f64()
}

fn family<M>(
    e: &mut DescriptorEncoder<'_>,
    rows: &Rows,
    name: &str,
    help: &str,
    metric: impl Fn(&Snapshot) -> M,
) -> fmt::Result
where
    M: EncodeMetric + prometheus_client::metrics::TypedMetric,
{
    let mut family = e.encode_descriptor(name, help, None, M::TYPE)?;
    for (upstream, snapshot) in rows {
        let labels = UpstreamLabel {
            upstream: Arc::clone(upstream),
        };
        metric(snapshot).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}
