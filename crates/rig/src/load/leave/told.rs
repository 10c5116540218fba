//! What was found, as a table, a document and bars.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::load::report::{Quantiles, histogram};

type Row = (&'static str, &'static str);

/// When upstreams were told.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// Length of the measurement.
    pub seconds: f64,
    /// Calls whose upstream was never told, by the client's ways and so on.
    pub never: u64,
    rows: Vec<(Row, Histogram<u64>, u64)>,
    all: Option<Histogram<u64>>,
    errors: BTreeMap<String, u64>,
}

/// What may at most be found, ms.
#[derive(Clone, Copy, Debug, Default)]
pub struct ToldBars {
    /// Of 99 in 100 calls.
    pub p99_ms: Option<f64>,
    /// Of every call.
    pub max_ms: Option<f64>,
}

/// As JSON.
#[derive(Serialize)]
struct Document<'a> {
    seconds: f64,
    all: Option<Quantiles>,
    never: u64,
    by: BTreeMap<&'a str, BTreeMap<&'a str, Quantiles>>,
    errors: &'a BTreeMap<String, u64>,
}

impl Told {
    fn row(&mut self, row: Row) -> &mut (Row, Histogram<u64>, u64) {
        let at = self.rows.iter().position(|(r, ..)| *r == row);
        let at = at.unwrap_or_else(|| {
            self.rows.push((row, histogram(), 0));
            self.rows.len() - 1
        });
        &mut self.rows[at]
    }

    /// One was told after so many nanoseconds.
    pub(super) fn after(&mut self, labels: &[Row], ns: u64) {
        for row in labels {
            self.row(*row).1.saturating_record(ns);
        }
        self.all.get_or_insert_with(histogram).saturating_record(ns);
    }

    /// One was not told.
    pub(super) fn never(&mut self, labels: &[Row]) {
        for row in labels {
            self.row(*row).2 += 1;
        }
        self.never += 1;
    }

    /// One could not be made.
    pub(super) fn error(&mut self, what: String) {
        *self.errors.entry(what).or_insert(0) += 1;
    }

    /// Times of all calls that were told.
    #[must_use]
    pub fn all(&self) -> Option<Quantiles> {
        self.all.as_ref().map(Quantiles::of)
    }

    /// Calls that could not be made.
    #[must_use]
    pub fn error_count(&self) -> u64 {
        self.errors.values().sum()
    }

    /// What is wrong: a call that was never told or not made, always; a time
    /// beyond a bar.
    #[must_use]
    pub fn failures(&self, bars: &ToldBars) -> Vec<String> {
        let mut failures = Vec::new();
        for (n, what) in [
            (self.never, "never told"),
            (self.error_count(), "could not be made"),
        ] {
            if n > 0 {
                failures.push(format!("{n} calls: {what}"));
            }
        }
        let all = self.all();
        for (name, bar, value) in [
            ("closed after, p99", bars.p99_ms, all.map(|q| q.p99_ms)),
            ("closed after, max", bars.max_ms, all.map(|q| q.max_ms)),
        ] {
            let Some(bar) = bar else { continue };
            match value {
                Some(value) if value <= bar => {}
                Some(value) => failures.push(format!("{name}: {value:.2} ms, bar {bar}")),
                None => failures.push(format!("{name}: not measured, bar {bar}")),
            }
        }
        failures
    }

    /// The table for people.
    #[must_use]
    pub fn table(&self) -> String {
        let mut text = String::from(
            "client left → upstream saw the close, ms\n\n                                         calls     p50     p90     p99     max\n",
        );
        let mut line = |name: &str, q: Option<Quantiles>, never: u64| {
            let q = q.unwrap_or_default();
            // Writing to a String cannot fail.
            let _ = write!(
                text,
                "{name:38}  {:6}  {:6.2}  {:6.2}  {:6.2}  {:6.2}",
                q.count, q.p50_ms, q.p90_ms, q.p99_ms, q.max_ms
            );
            if never > 0 {
                let _ = write!(text, "  never: {never}");
            }
            text.push('\n');
        };
        for kind in ["way", "phase", "route", "answer"] {
            for ((_, name), times, never) in self.rows.iter().filter(|((k, _), ..)| *k == kind) {
                line(name, Some(Quantiles::of(times)), *never);
            }
        }
        line("all", self.all(), self.never);
        for (what, n) in &self.errors {
            let _ = writeln!(text, "error: {n} x {what}");
        }
        text
    }

    /// The same as JSON.
    pub fn json(&self) -> serde_json::Result<String> {
        let mut by: BTreeMap<&str, BTreeMap<&str, Quantiles>> = BTreeMap::new();
        for ((kind, name), times, _) in &self.rows {
            by.entry(kind)
                .or_default()
                .insert(name, Quantiles::of(times));
        }
        serde_json::to_string_pretty(&Document {
            seconds: self.seconds,
            all: self.all(),
            never: self.never,
            by,
            errors: &self.errors,
        })
    }
}
