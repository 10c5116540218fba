//! Storms on several gateways in turn, and their figures side by side.

use std::ops::ControlFlow;

use serde::{Deserialize, Serialize};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{Gateway, Plan, Scenario, Source, storm};
use crate::compare::{Get, Run, Spread, after, in_turn, names, ratio, spread, values};
use crate::load::{Report, float};

/// A figure of one gateway beside the first one's.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Compared {
    /// The scenario.
    pub scenario: String,
    /// The figure.
    pub figure: String,
    /// The gateway.
    pub gateway: String,
    /// Over the rounds.
    pub value: Spread,
    /// Of the ratios to the first gateway within a round.
    pub ratio: Option<Spread>,
}

/// Runs all scenarios on all gateways, [`Plan::rounds`] times. What fails to
/// run is a report that ended early. SIGINT or SIGTERM ends it after the storm that runs,
/// which is told too.
pub async fn compare(
    gateways: &[Gateway],
    source: Option<&Source>,
    scenarios: &[Scenario],
    plan: &Plan,
    mut done: impl FnMut(&Run),
) -> Vec<Run> {
    let mut runs = Vec::new();
    let kinds = [SignalKind::interrupt(), SignalKind::terminate()];
    let mut signals: Vec<Signal> = kinds.into_iter().filter_map(|k| signal(k).ok()).collect();
    in_turn(
        plan.rounds,
        scenarios,
        gateways,
        async |round, scenario, gateway| {
            if plan.progress {
                let (name, of) = (scenario.name(), plan.rounds);
                crate::cli::complain(&format!(
                    "{}, {name}, round {} of {of}",
                    gateway.name,
                    round + 1
                ));
            }
            let report = match storm(gateway, source, *scenario, plan).await {
                Ok(report) => report,
                Err(e) => {
                    let mut report = Report::new(scenario.name());
                    report.ended_early = Some(e.to_string());
                    report
                }
            };
            let run = Run {
                round,
                gateway: gateway.name.clone(),
                scenario: scenario.name().to_owned(),
                others_percent: None,
                report,
            };
            done(&run);
            runs.push(run);
            if signals.iter_mut().any(asked) {
                return ControlFlow::Break(());
            }
            ControlFlow::Continue(())
        },
    )
    .await;
    runs
}

/// Whether a signal has come, without waiting for one.
fn asked(signal: &mut Signal) -> bool {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    signal.poll_recv(&mut context).is_ready()
}

/// What is compared.
const FIGURES: &[(&str, Get)] = &[
    ("wasted, % of planned", |r| {
        Some(r.waste?.percent_of_planned)
    }),
    ("running a second after", |r| r.running_after.map(float)),
    ("call-seconds abandoned", |r| r.abandoned_call_seconds),
    ("most running at once", |r| {
        Some(float(r.truth?.max_running))
    }),
    ("first event p50 ms", |r| Some(r.first_event?.p50_ms)),
    ("first event p99 ms", |r| Some(r.first_event?.p99_ms)),
    ("delay per chunk p50 ms", |r| Some(r.delay?.p50_ms)),
    ("delay per chunk p99 ms", |r| Some(r.delay?.p99_ms)),
    ("upstream calls per call wanted", |r| r.amplification),
    ("nothing ran after s", |r| r.stopped_after_seconds),
    ("CPU us per call", |r| r.cpu_us_per_call),
    ("KiB per stream", |r| r.kib_per_stream),
    ("MiB at the peak", |r| Some(float(r.peak?.rss_kib) / 1024.0)),
    ("MiB left over", Report::memory_left),
    ("descriptors left over", |r| {
        let (after, before) = (r.after?.descriptors, r.before?.descriptors);
        Some(float(after.saturating_sub(before)))
    }),
    ("TIME_WAIT after", |r| after(r, "TIME_WAIT")),
    ("CLOSE_WAIT after", |r| after(r, "CLOSE_WAIT")),
    ("errors", |r| Some(float(r.error_count()))),
];

/// A scenario's figures: a row each, a column for each gateway.
#[derive(Clone, Debug)]
pub(crate) struct Table<'a> {
    pub(crate) scenario: &'a str,
    pub(crate) gateways: Vec<&'a str>,
    pub(crate) rows: Vec<(&'static str, Vec<Option<Compared>>)>,
    /// Figures that were 0 in every run.
    pub(crate) nought: Vec<&'static str>,
}

/// All figures that were measured, each gateway beside the first.
pub(crate) fn tables(runs: &[Run]) -> Vec<Table<'_>> {
    let gateways = names(runs, |r| &r.gateway);
    let scenarios = names(runs, |r| &r.scenario);
    let table = |scenario| {
        let mut table = Table {
            scenario,
            gateways: gateways.clone(),
            rows: Vec::new(),
            nought: Vec::new(),
        };
        for (figure, get) in FIGURES {
            let cell = |gateway: &&str| {
                let mine = values(runs, scenario, gateway, *get);
                let first = gateways.first().filter(|first| *first != gateway);
                let base = first.map(|first| values(runs, scenario, first, *get));
                Some(Compared {
                    scenario: scenario.to_owned(),
                    figure: (*figure).to_owned(),
                    gateway: (*gateway).to_owned(),
                    value: spread(&mine)?,
                    ratio: ratio(&mine, &base.unwrap_or_default()),
                })
            };
            let row: Vec<Option<Compared>> = gateways.iter().map(cell).collect();
            if row.iter().flatten().next().is_none() {
                continue;
            }
            if row.iter().flatten().all(|c| c.value.high == 0.0) {
                table.nought.push(figure);
            } else {
                table.rows.push((figure, row));
            }
        }
        table
    };
    scenarios.into_iter().map(table).collect()
}

/// The same as a list, without what was 0 everywhere.
#[must_use]
pub fn ratios(runs: &[Run]) -> Vec<Compared> {
    let rows = tables(runs).into_iter().flat_map(|t| t.rows);
    rows.flat_map(|(_, cells)| cells.into_iter().flatten())
        .collect()
}

impl Compared {
    /// Value and ratio, as they are shown.
    pub(crate) fn texts(&self) -> (String, Option<String>) {
        let ratio = self.ratio.map(|r| format!("×{}", r.text(2)));
        (self.value.text(self.value.digits()), ratio)
    }
}

/// The tables as text; ratios stand below their values.
#[must_use]
pub fn side_by_side(runs: &[Run]) -> String {
    let mut text = String::from(
        "Medians over the rounds (lowest–highest); × is the ratio to the first gateway, taken within a round.\n",
    );
    for table in tables(runs) {
        let mut lines = vec![(
            table.scenario.to_owned(),
            table.gateways.iter().map(|g| (*g).to_owned()).collect(),
        )];
        for (figure, cells) in &table.rows {
            let texts = |c: &Option<Compared>| c.as_ref().map(Compared::texts).unwrap_or_default();
            let (values, ratios): (Vec<_>, Vec<_>) = cells.iter().map(texts).unzip();
            lines.push(((*figure).to_owned(), values));
            if ratios.iter().any(Option::is_some) {
                let ratios = ratios.into_iter().map(Option::unwrap_or_default);
                lines.push((String::new(), ratios.collect()));
            }
        }
        aligned(&mut text, &lines);
        if !table.nought.is_empty() {
            text += &format!("0 everywhere: {}\n", table.nought.join(", "));
        }
    }
    text
}

fn aligned(text: &mut String, lines: &[(String, Vec<String>)]) {
    let long = |text: &String| text.chars().count();
    let first = lines.iter().map(|(name, _)| long(name)).max().unwrap_or(0);
    let columns = lines.first().map_or(0, |(_, cells)| cells.len());
    let widths: Vec<usize> = (0..columns)
        .map(|n| lines.iter().map(|(_, c)| long(&c[n])).max().unwrap_or(0))
        .collect();
    text.push('\n');
    for (name, cells) in lines {
        let mut line = format!("{name:first$}");
        for (cell, width) in cells.iter().zip(&widths) {
            line += &format!("  {cell:>width$}");
        }
        *text += line.trim_end();
        text.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(round: usize, gateway: &str, cpu: f64) -> Run {
        Run {
            round,
            gateway: gateway.to_owned(),
            scenario: "steady".to_owned(),
            report: Report {
                cpu_us_per_call: Some(cpu),
                ..Report::default()
            },
            ..Run::default()
        }
    }

    #[test]
    fn gateways_stand_side_by_side_and_what_is_nought_is_said_once() {
        let runs = [
            run(0, "a", 10.0),
            run(0, "b", 20.0),
            run(1, "b", 30.0),
            run(1, "a", 10.0),
        ];
        let text = side_by_side(&runs);
        let lines: Vec<&str> = text.lines().skip(2).collect();
        assert_eq!(lines[0], "steady            a                  b");
        assert_eq!(lines[1], "CPU us per call  10         25 (20–30)");
        assert_eq!(lines[2], "                     ×2.50 (2.00–3.00)");
        assert_eq!(lines[3], "0 everywhere: errors");
        assert_eq!(ratios(&runs).len(), 2);
    }
}
