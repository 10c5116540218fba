//! What every call counts at its upstream: looked up once, not by its labels with each call.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;

use super::histogram::Histogram;
use super::metrics::{CallLabels, Count, Metrics, PhaseLabels, TokenLabels, UpstreamLabel};

/// Phases with a histogram of their own, in the order of `call::outcome::Phase`.
#[rustfmt::skip]
pub const PHASES: [&str; 9] =
    ["accepted", "body", "queued", "pool", "connecting", "waiting_head", "waiting_first_event", "streaming", "done"];

/// One upstream's share of the families that every call touches.
#[derive(Debug)]
pub struct UpstreamMetrics {
    pub name: Arc<str>,
    pub call_seconds: Histogram,
    pub ttft_seconds: Histogram,
    pub usage_unknown: Counter,
    phases: [Histogram; PHASES.len()],
    calls: Kept,
    tokens: Kept,
}

impl UpstreamMetrics {
    pub fn new(metrics: &Metrics, name: &Arc<str>) -> Self {
        let label = UpstreamLabel {
            upstream: Arc::clone(name),
        };
        Self {
            name: Arc::clone(name),
            call_seconds: metrics.call_seconds.get_or_create_owned(&label),
            ttft_seconds: metrics.ttft_seconds.get_or_create_owned(&label),
            usage_unknown: metrics.usage_unknown.get_or_create_owned(&label),
            phases: PHASES.map(|phase| {
                metrics.phase_seconds.get_or_create_owned(&PhaseLabels {
                    upstream: Arc::clone(name),
                    phase,
                })
            }),
            calls: Kept::default(),
            tokens: Kept::default(),
        }
    }

    /// So much time was spent in the phase of this number.
    pub fn phase(&self, number: u8, time: Duration) {
        if let Some(phase) = self.phases.get(usize::from(number)) {
            phase.observe(time);
        }
    }

    /// A call of this route ended so.
    pub fn call(&self, metrics: &Metrics, route: &'static str, outcome: &'static str) {
        let find = || {
            metrics.calls.get_or_create_owned(&CallLabels {
                upstream: Arc::clone(&self.name),
                route,
                outcome,
            })
        };
        self.calls.add(1, [route, outcome], find);
    }

    pub fn tokens(&self, metrics: &Metrics, tokens: u64, [direction, source]: [&'static str; 2]) {
        let find = || {
            metrics.tokens.get_or_create_owned(&TokenLabels {
                upstream: Arc::clone(&self.name),
                direction,
                source,
            })
        };
        self.tokens.add(tokens, [direction, source], find);
    }
}

/// Two label values out of closed sets.
type Names = [&'static str; 2];

/// How many counters are kept of a family; what an upstream mostly does comes first.
const KEPT: usize = 16;

/// Counters of one family that have been touched; more than [`KEPT`] of them are looked up as ever.
#[derive(Debug, Default)]
struct Kept([OnceLock<(Names, Count)>; KEPT]);

impl Kept {
    fn add(&self, by: u64, names: Names, find: impl Fn() -> Count) {
        for place in &self.0 {
            let (known, count) = place.get_or_init(|| (names, find()));
            if is(known[0], names[0]) && is(known[1], names[1]) {
                count.add(by);
                return;
            }
        }
        find().add(by);
    }
}

/// Mostly one is the very same text as the other.
fn is(a: &'static str, b: &'static str) -> bool {
    std::ptr::eq(a, b) || a == b
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_counts_in_its_family_however_many_there_are_and_after_a_reload() {
        let metrics = Metrics::new();
        let name: Arc<str> = "u".into();
        let names: Vec<&'static str> = (0..2 * KEPT)
            .map(|n| &*String::leak(format!("route{n}")))
            .collect();
        for _ in 0..2 {
            // Each generation of the configuration has its own.
            let upstream = UpstreamMetrics::new(&metrics, &name);
            for _ in 0..2 {
                names
                    .iter()
                    .for_each(|route| upstream.call(&metrics, route, "ok"));
                upstream.tokens(&metrics, 7, ["input", "reported"]);
                upstream.tokens(&metrics, 3, ["output", "counted"]);
            }
        }
        let text = metrics.encode();
        let count = |line: &str| text.lines().filter(|shown| shown.contains(line)).count();
        for name in names {
            let line =
                format!("tidegate_calls_total{{upstream=\"u\",route=\"{name}\",outcome=\"ok\"}} 4");
            assert_eq!(count(&line), 1, "{line}\n{text}");
        }
        for line in [
            "tidegate_tokens_total{upstream=\"u\",direction=\"input\",source=\"reported\"} 28",
            "tidegate_tokens_total{upstream=\"u\",direction=\"output\",source=\"counted\"} 12",
        ] {
            assert_eq!(count(line), 1, "{line}\n{text}");
        }
        assert_eq!(
            count("tidegate_tokens_total"),
            2,
            "nothing that was not counted"
        );
    }
}
