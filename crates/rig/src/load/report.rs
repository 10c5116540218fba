//! Results: a table for people, JSON for machines, bars for the exit code.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use super::sample::{ProcessUse, Sockets};
use super::{float, millis};
use crate::storm::Tick;
use crate::truth::Truth;

/// Quantiles of a distribution, milliseconds.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Quantiles {
    /// Values recorded.
    pub count: u64,
    /// Median.
    pub p50_ms: f64,
    /// 90 %.
    pub p90_ms: f64,
    /// 99 %.
    pub p99_ms: f64,
    /// Largest.
    pub max_ms: f64,
}

impl Quantiles {
    pub(crate) fn of(histogram: &Histogram<u64>) -> Self {
        let at = |q: f64| millis(histogram.value_at_quantile(q));
        Self {
            count: histogram.len(),
            p50_ms: at(0.50),
            p90_ms: at(0.90),
            p99_ms: at(0.99),
            max_ms: millis(histogram.max()),
        }
    }
}

/// A histogram of nanoseconds up to two minutes.
pub(crate) fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1_000, 120_000_000_000, 3).expect("bounds are sound")
}

/// What was generated for nobody.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Waste {
    /// Tokens that all calls would have taken.
    pub planned: u64,
    /// Tokens the upstream generated.
    pub generated: u64,
    /// Tokens the clients had read when they left.
    pub received: u64,
    /// Generated and not received.
    pub wasted: u64,
    /// Wasted, of what was planned.
    pub percent_of_planned: f64,
    /// Wasted, of what was generated.
    pub percent_of_generated: f64,
}

impl Waste {
    pub(crate) fn of(planned: u64, generated: u64, received: u64) -> Self {
        let wasted = generated.saturating_sub(received);
        let percent = |of: u64| 100.0 * float(wasted) / float(of.max(1));
        Self {
            planned,
            generated,
            received,
            wasted,
            percent_of_planned: percent(planned),
            percent_of_generated: percent(generated),
        }
    }
}

/// What one scenario found.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Name of the scenario.
    pub scenario: String,
    /// Length of the measured part.
    pub seconds: f64,
    /// Calls measured.
    pub calls: u64,
    /// Requests sent, retries included, where a call may be more than one.
    #[serde(default)]
    pub attempts: u64,
    /// Chunks measured.
    pub chunks: u64,
    /// What went wrong, by kind.
    pub errors: BTreeMap<String, u64>,
    /// Whole calls.
    pub latency: Option<Quantiles>,
    /// Time to the first event.
    pub first_event: Option<Quantiles>,
    /// The same of an undisturbed run.
    pub first_event_undisturbed: Option<Quantiles>,
    /// From the upstream's stamp to the client.
    pub delay: Option<Quantiles>,
    /// CPU of the process in the measured part, microseconds.
    pub cpu_us: Option<u64>,
    /// CPU per call.
    pub cpu_us_per_call: Option<f64>,
    /// CPU per chunk.
    pub cpu_us_per_chunk: Option<f64>,
    /// Process before the load.
    pub before: Option<ProcessUse>,
    /// Highest values during it.
    pub peak: Option<ProcessUse>,
    /// Process after it.
    pub after: Option<ProcessUse>,
    /// Memory per held stream, KiB.
    pub kib_per_stream: Option<f64>,
    /// Memory taken in all, MiB.
    pub mib_taken: Option<f64>,
    /// Socket states when the sockets were most.
    pub sockets_during: Option<Sockets>,
    /// Socket states after it.
    pub sockets_after: Option<Sockets>,
    /// Calls running at the upstream one second after the end.
    pub running_after: Option<u64>,
    /// What was generated for nobody.
    pub waste: Option<Waste>,
    /// The upstream's counts.
    pub truth: Option<Truth>,
    /// Why it ended before its time.
    pub ended_early: Option<String>,
    /// Why its figures say nothing of the gateway, if they do not.
    #[serde(default)]
    pub void: Option<String>,
    /// Upstream calls for each call that a user wanted.
    pub amplification: Option<f64>,
    /// Most calls at once that ran for nobody.
    pub max_abandoned: Option<u64>,
    /// Calls that ran for nobody, times how long.
    pub abandoned_call_seconds: Option<f64>,
    /// From the loss of all clients until nothing ran.
    pub stopped_after_seconds: Option<f64>,
    /// From SIGTERM until the process had ended.
    pub exit_seconds: Option<f64>,
    /// Calls open when the process was asked to end.
    #[serde(default)]
    pub open_at_drain: Option<u64>,
    /// Whether nothing went wrong before the process was asked to end.
    pub error_free_until_drain: Option<bool>,
    /// By name: shares of values, and what they lie below, ms.
    #[serde(default)]
    pub distributions: BTreeMap<String, Vec<(f64, f64)>>,
    /// What happened over time.
    #[serde(default)]
    pub series: Vec<Tick>,
}

/// Bars: a result above one of them fails the run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Bars {
    /// Wasted tokens, percent of the planned ones.
    pub max_waste_percent: Option<f64>,
    /// Gateway's sockets in `TIME_WAIT` after the run.
    pub max_time_wait: Option<u64>,
    /// Gateway's sockets in `CLOSE_WAIT` after the run.
    pub max_close_wait: Option<u64>,
    /// Calls running at the upstream a second after the end.
    pub max_running_after: Option<u64>,
    /// Memory kept after the run, MiB.
    pub max_memory_left_mib: Option<f64>,
    /// CPU per call, microseconds.
    pub max_cpu_us_per_call: Option<f64>,
    /// CPU per chunk, microseconds.
    pub max_cpu_us_per_chunk: Option<f64>,
    /// Memory per held stream, KiB.
    pub max_kib_per_stream: Option<f64>,
    /// Memory taken in all, MiB.
    pub max_mib: Option<f64>,
    /// 99th percentile of the delay per chunk, ms.
    pub max_delay_p99_ms: Option<f64>,
    /// Time to first event, 99th percentile, as a multiple of an undisturbed run's.
    pub max_first_event_ratio: Option<f64>,
    /// Things gone wrong.
    pub max_errors: Option<u64>,
    /// Upstream calls for each call that a user wanted.
    pub max_amplification: Option<f64>,
    /// Calls that ran for nobody, times how long, seconds.
    pub max_abandoned_seconds: Option<f64>,
    /// Most calls that may run at once.
    pub max_running: Option<u64>,
    /// From SIGTERM until the process has ended, seconds.
    pub max_exit_seconds: Option<f64>,
}

impl Bars {
    /// The options that set the bars which are set.
    #[must_use]
    pub fn set(&self) -> Vec<&'static str> {
        let n = |bar: Option<u64>| bar.is_some();
        let f = |bar: Option<f64>| bar.is_some();
        let all = [
            ("--max-waste", f(self.max_waste_percent)),
            ("--max-time-wait", n(self.max_time_wait)),
            ("--max-close-wait", n(self.max_close_wait)),
            ("--max-running-after", n(self.max_running_after)),
            ("--max-memory-left-mib", f(self.max_memory_left_mib)),
            ("--max-cpu-us-per-call", f(self.max_cpu_us_per_call)),
            ("--max-cpu-us-per-chunk", f(self.max_cpu_us_per_chunk)),
            ("--max-kib-per-stream", f(self.max_kib_per_stream)),
            ("--max-mib", f(self.max_mib)),
            ("--max-delay-p99-ms", f(self.max_delay_p99_ms)),
            ("--max-first-event-ratio", f(self.max_first_event_ratio)),
            ("--max-errors", n(self.max_errors)),
            ("--max-amplification", f(self.max_amplification)),
            ("--max-abandoned-seconds", f(self.max_abandoned_seconds)),
            ("--max-running", n(self.max_running)),
            ("--max-exit-seconds", f(self.max_exit_seconds)),
        ];
        all.into_iter()
            .filter(|(_, set)| *set)
            .map(|(name, _)| name)
            .collect()
    }

    /// Whether a bar is on something that only the upstream knows.
    #[must_use]
    pub fn needs_truth(&self) -> bool {
        self.max_waste_percent.is_some()
            || self.max_running_after.is_some()
            || self.max_amplification.is_some()
            || self.max_abandoned_seconds.is_some()
            || self.max_running.is_some()
    }

    /// Those that can be judged without a process.
    #[must_use]
    pub fn without_process(&self) -> Self {
        Self {
            max_memory_left_mib: None,
            max_cpu_us_per_call: None,
            max_cpu_us_per_chunk: None,
            max_kib_per_stream: None,
            max_mib: None,
            ..self.clone()
        }
    }

    /// Whether a bar is on something of the gateway's process.
    #[must_use]
    pub fn needs_process(&self) -> bool {
        self.set().len() > self.without_process().set().len()
    }
}

/// Three digits after the point, where they say something.
fn short(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

impl Report {
    pub(crate) fn new(scenario: &str) -> Self {
        Self {
            scenario: scenario.to_owned(),
            ..Self::default()
        }
    }

    pub(crate) fn error(&mut self, kind: String) {
        *self.errors.entry(kind).or_insert(0) += 1;
    }

    /// Things gone wrong, all kinds together.
    #[must_use]
    pub fn error_count(&self) -> u64 {
        self.errors.values().sum()
    }

    /// Fills in the CPU used between two samples.
    pub(crate) fn cpu(&mut self, from: Option<ProcessUse>, to: Option<ProcessUse>) {
        let (Some(from), Some(to)) = (from, to) else {
            return;
        };
        let used = to.cpu_us.saturating_sub(from.cpu_us);
        self.cpu_us = Some(used);
        if self.calls > 0 {
            self.cpu_us_per_call = Some(float(used) / float(self.calls));
        }
        if self.chunks > 0 {
            self.cpu_us_per_chunk = Some(float(used) / float(self.chunks));
        }
    }

    /// Memory kept after the run, MiB.
    pub(crate) fn memory_left(&self) -> Option<f64> {
        let left = self.after?.rss_kib.saturating_sub(self.before?.rss_kib);
        Some(float(left) / 1024.0)
    }

    /// Fills in the memory that so many held streams took, by the larger of
    /// the kernel's two measures of the same kind.
    pub(crate) fn memory_of(&mut self, streams: u64) {
        let (Some(before), Some(peak)) = (self.before, self.peak) else {
            return;
        };
        let taken = if before.pss_kib > 0 && peak.pss_kib > 0 {
            peak.pss_kib.saturating_sub(before.pss_kib)
        } else {
            peak.rss_kib.saturating_sub(before.rss_kib)
        };
        self.kib_per_stream = Some(float(taken) / float(streams.max(1)));
        self.mib_taken = Some(float(taken) / 1024.0);
    }

    fn first_event_ratio(&self) -> Option<f64> {
        let calm = self.first_event_undisturbed?.p99_ms;
        Some(self.first_event?.p99_ms / calm.max(0.001))
    }

    /// What the bars object to; a figure that was not measured fails its bar.
    #[must_use]
    pub fn failures(&self, bars: &Bars) -> Vec<String> {
        let mut failures = Vec::new();
        let mut hold = |name: &str, bar: Option<f64>, value: Option<f64>| {
            if let Some(bar) = bar
                && value.is_none_or(|v| v > bar)
            {
                let value = value.map_or_else(|| "not measured".to_owned(), short);
                failures.push(format!("{name}: {value}, bar {bar}"));
            }
        };
        let after = |state: &str| self.sockets_after.as_ref().map(|s| float(s.count(state)));
        let int = |n: Option<u64>| n.map(float);
        hold(
            "waste %",
            bars.max_waste_percent,
            self.waste.map(|w| w.percent_of_planned),
        );
        hold("TIME_WAIT", int(bars.max_time_wait), after("TIME_WAIT"));
        hold("CLOSE_WAIT", int(bars.max_close_wait), after("CLOSE_WAIT"));
        hold(
            "running after",
            int(bars.max_running_after),
            int(self.running_after),
        );
        let left = self.memory_left();
        hold("memory left MiB", bars.max_memory_left_mib, left);
        hold(
            "CPU us per call",
            bars.max_cpu_us_per_call,
            self.cpu_us_per_call,
        );
        hold(
            "CPU us per chunk",
            bars.max_cpu_us_per_chunk,
            self.cpu_us_per_chunk,
        );
        hold(
            "KiB per stream",
            bars.max_kib_per_stream,
            self.kib_per_stream,
        );
        hold("MiB taken", bars.max_mib, self.mib_taken);
        hold(
            "delay p99 ms",
            bars.max_delay_p99_ms,
            self.delay.map(|d| d.p99_ms),
        );
        let ratio = self.first_event_ratio();
        hold("first event ratio", bars.max_first_event_ratio, ratio);
        hold("amplification", bars.max_amplification, self.amplification);
        hold(
            "abandoned call-seconds",
            bars.max_abandoned_seconds,
            self.abandoned_call_seconds,
        );
        hold(
            "running at most",
            int(bars.max_running),
            int(self.truth.map(|t| t.max_running)),
        );
        hold(
            "seconds from SIGTERM to its end",
            bars.max_exit_seconds,
            self.exit_seconds,
        );
        hold(
            "errors",
            int(bars.max_errors),
            Some(float(self.error_count())),
        );
        failures
    }

    /// The table for people.
    #[must_use]
    pub fn table(&self) -> String {
        let mut rows = self.figures();
        rows.extend(self.states());
        let width = rows.iter().map(|(n, _)| n.len()).max().unwrap_or(0);
        rows.iter().fold(String::new(), |mut text, (name, value)| {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{name:width$}  {value}");
            text
        })
    }

    fn figures(&self) -> Vec<(String, String)> {
        let rate = |n: u64| float(n) / self.seconds.max(1e-9);
        let mut rows: Vec<(String, String)> = vec![
            ("scenario".into(), self.scenario.clone()),
            ("seconds".into(), format!("{:.2}", self.seconds)),
        ];
        let mut row = |name: &str, value: String| rows.push((name.to_owned(), value));
        for (name, n) in [("calls", self.calls), ("chunks", self.chunks)] {
            if n > 0 {
                row(name, format!("{n} ({:.0}/s)", rate(n)));
            }
        }
        for (name, quantiles) in [
            ("latency", self.latency),
            ("first event", self.first_event),
            ("first event, undisturbed", self.first_event_undisturbed),
            ("delay per chunk", self.delay),
        ] {
            if let Some(q) = quantiles {
                let text = format!(
                    "p50 {:.3}  p90 {:.3}  p99 {:.3}  max {:.3} ms",
                    q.p50_ms, q.p90_ms, q.p99_ms, q.max_ms
                );
                row(name, text);
            }
        }
        for (name, value) in [
            ("CPU us per call", self.cpu_us_per_call),
            ("CPU us per chunk", self.cpu_us_per_chunk),
            ("KiB per stream", self.kib_per_stream),
            ("MiB taken", self.mib_taken),
        ] {
            if let Some(v) = value {
                row(name, format!("{v:.2}"));
            }
        }
        rows
    }

    /// What became of the work.
    fn work(&self) -> Vec<(String, String)> {
        let mut rows = Vec::new();
        let mut row = |name: &str, value: String| rows.push((name.to_owned(), value));
        if let Some(n) = self.max_abandoned {
            let area = self.abandoned_call_seconds.unwrap_or_default();
            row("abandoned", format!("{n} at most, {area:.2} call-seconds"));
        }
        for (name, value) in [
            ("upstream calls per call wanted", self.amplification),
            ("nothing ran after s", self.stopped_after_seconds),
            ("seconds from SIGTERM to its end", self.exit_seconds),
        ] {
            if let Some(v) = value {
                row(name, format!("{v:.2}"));
            }
        }
        if let Some(n) = self.open_at_drain {
            let before = match self.error_free_until_drain {
                Some(true) => "nothing went wrong before",
                _ => "errors came before it too",
            };
            row("open at SIGTERM", format!("{n}; {before}"));
        }
        if let Some(t) = self.truth {
            let text = format!(
                "{} begun, at most {} at once; complete {}, client gone {}, ran on {}, cut {}",
                t.calls_begun,
                t.max_running,
                t.ended_complete,
                t.ended_peer_fin + t.ended_peer_rst,
                t.ended_ran_on,
                t.ended_script
            );
            row("upstream", text);
        }
        rows
    }

    fn states(&self) -> Vec<(String, String)> {
        let mut rows = Vec::new();
        let mut row = |name: &str, value: String| rows.push((name.to_owned(), value));
        for (name, sample) in [
            ("before", self.before),
            ("peak", self.peak),
            ("after", self.after),
        ] {
            if let Some(s) = sample {
                let mib = |kib: u64| float(kib) / 1024.0;
                let text = format!(
                    "rss {:.1} MiB  pss {:.1} MiB  descriptors {}  threads {}",
                    mib(s.rss_kib),
                    mib(s.pss_kib),
                    s.descriptors,
                    s.threads
                );
                row(name, text);
            }
        }
        for (name, sockets) in [
            ("sockets at most", &self.sockets_during),
            ("sockets after", &self.sockets_after),
        ] {
            if let Some(s) = sockets {
                row(name, s.to_string());
            }
        }
        if let Some(n) = self.running_after {
            row("running after 1 s", n.to_string());
        }
        if let Some(w) = self.waste {
            let text = format!(
                "{} tokens = {:.3} % of {} planned, {:.2} % of {} generated",
                w.wasted, w.percent_of_planned, w.planned, w.percent_of_generated, w.generated
            );
            row("wasted", text);
        }
        rows.extend(self.work());
        let mut row = |name: &str, value: String| rows.push((name.to_owned(), value));
        for (name, why) in [("ended early", &self.ended_early), ("void", &self.void)] {
            if let Some(why) = why {
                row(name, why.clone());
            }
        }
        for (kind, n) in &self.errors {
            row("error", format!("{n} x {kind}"));
        }
        rows
    }
}
