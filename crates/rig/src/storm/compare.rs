//! The same storms on several gateways: in turn, interleaved, repeated.

use std::io;

use serde::{Deserialize, Serialize};

use super::{Gateway, Plan, Scenario, Source, storm};
use crate::bench::median;
use crate::load::{Report, float};

/// One scenario on one gateway in one round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    /// Round, from 0.
    pub round: usize,
    /// Name of the gateway.
    pub gateway: String,
    /// The scenario.
    pub scenario: Scenario,
    /// What was found.
    pub report: Report,
}

/// A figure of one gateway beside the first one's.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Compared {
    /// The scenario.
    pub scenario: Scenario,
    /// The figure.
    pub figure: String,
    /// The gateway.
    pub gateway: String,
    /// Median over the rounds, lowest and highest.
    pub median: f64,
    /// Lowest.
    pub low: f64,
    /// Highest.
    pub high: f64,
    /// Median of the ratios to the first gateway within a round.
    pub ratio: Option<f64>,
    /// Lowest and highest of these ratios.
    pub ratio_range: Option<(f64, f64)>,
}

/// Runs all scenarios on all gateways, [`Plan::rounds`] times. Each round begins with
/// another gateway. What fails to run is a report with an error.
pub async fn compare(
    gateways: &[Gateway],
    source: Option<&Source>,
    scenarios: &[Scenario],
    plan: &Plan,
    mut done: impl FnMut(&Run),
) -> Vec<Run> {
    let mut runs = Vec::new();
    for round in 0..plan.rounds {
        for scenario in scenarios {
            for at in 0..gateways.len() {
                let gateway = &gateways[(at + round) % gateways.len()];
                let report = match storm(gateway, source, *scenario, plan).await {
                    Ok(report) => report,
                    Err(e) => failed(*scenario, &e),
                };
                let run = Run {
                    round,
                    gateway: gateway.name.clone(),
                    scenario: *scenario,
                    report,
                };
                done(&run);
                let asked = "stopped by a signal";
                let early = run.report.ended_early.as_deref().unwrap_or_default();
                let stop = early.starts_with(asked);
                runs.push(run);
                if stop {
                    return runs;
                }
            }
        }
    }
    runs
}

fn failed(scenario: Scenario, error: &io::Error) -> Report {
    let mut report = Report::new(scenario.name());
    report.ended_early = Some(error.to_string());
    report
}

type Get = fn(&Report) -> Option<f64>;

/// What is compared.
const FIGURES: &[(&str, Get)] = &[
    ("wasted, % of planned", |r| {
        Some(r.waste?.percent_of_planned)
    }),
    ("running a second after", |r| r.running_after.map(float)),
    ("call-seconds abandoned", |r| r.abandoned_call_seconds),
    ("first event p50 ms", |r| Some(r.first_event?.p50_ms)),
    ("first event p99 ms", |r| Some(r.first_event?.p99_ms)),
    ("delay per chunk p50 ms", |r| Some(r.delay?.p50_ms)),
    ("delay per chunk p99 ms", |r| Some(r.delay?.p99_ms)),
    ("upstream calls per call wanted", |r| r.amplification),
    ("CPU us per call", |r| r.cpu_us_per_call),
    ("MiB at the peak", |r| Some(float(r.peak?.rss_kib) / 1024.0)),
    ("MiB left over", |r| {
        Some(float(r.after?.rss_kib.saturating_sub(r.before?.rss_kib)) / 1024.0)
    }),
    ("descriptors left over", |r| {
        Some(float(
            r.after?.descriptors.saturating_sub(r.before?.descriptors),
        ))
    }),
    ("TIME_WAIT after", |r| {
        Some(float(r.sockets_after.as_ref()?.count("TIME_WAIT")))
    }),
    ("CLOSE_WAIT after", |r| {
        Some(float(r.sockets_after.as_ref()?.count("CLOSE_WAIT")))
    }),
    ("errors", |r| Some(float(r.error_count()))),
];

/// All figures that were measured, each gateway beside the first.
#[must_use]
pub fn ratios(runs: &[Run]) -> Vec<Compared> {
    let mut gateways: Vec<&str> = Vec::new();
    let mut scenarios: Vec<Scenario> = Vec::new();
    for run in runs {
        if !gateways.contains(&run.gateway.as_str()) {
            gateways.push(&run.gateway);
        }
        if !scenarios.contains(&run.scenario) {
            scenarios.push(run.scenario);
        }
    }
    let mut all = Vec::new();
    for scenario in scenarios {
        for (figure, get) in FIGURES {
            for gateway in &gateways {
                let of = |who: &str| values(runs, scenario, who, *get);
                let base = gateways.first().map(|first| of(first)).unwrap_or_default();
                all.extend(one(&of(gateway), &base).map(|found| Compared {
                    scenario,
                    figure: (*figure).to_owned(),
                    gateway: (*gateway).to_owned(),
                    ..found
                }));
            }
        }
    }
    all
}

fn values(runs: &[Run], scenario: Scenario, gateway: &str, get: Get) -> Vec<(usize, f64)> {
    runs.iter()
        .filter(|r| r.scenario == scenario && r.gateway == gateway)
        .filter_map(|r| Some((r.round, get(&r.report)?)))
        .collect()
}

fn range(values: &[f64]) -> (f64, f64) {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    (low, high)
}

fn one(mine: &[(usize, f64)], base: &[(usize, f64)]) -> Option<Compared> {
    let values: Vec<f64> = mine.iter().map(|(_, v)| *v).collect();
    let (low, high) = range(&values);
    let within = mine.iter().filter_map(|(round, value)| {
        let (_, other) = base.iter().find(|(r, _)| r == round)?;
        (*other > 0.0).then(|| value / other)
    });
    let within: Vec<f64> = within.collect();
    Some(Compared {
        scenario: Scenario::Abort,
        figure: String::new(),
        gateway: String::new(),
        median: median(values)?,
        low,
        high,
        ratio_range: (!within.is_empty()).then(|| range(&within)),
        ratio: median(within),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_taken_within_a_round_and_have_a_spread() {
        let run = |round, gateway: &str, cpu| Run {
            round,
            gateway: gateway.to_owned(),
            scenario: Scenario::Steady,
            report: Report {
                cpu_us_per_call: Some(cpu),
                ..Report::default()
            },
        };
        let runs = [
            run(0, "a", 10.0),
            run(0, "b", 20.0),
            run(1, "b", 30.0),
            run(1, "a", 10.0),
        ];
        let all = ratios(&runs);
        let found = all
            .iter()
            .find(|c| c.gateway == "b" && c.figure == "CPU us per call");
        let found = found.expect("compared");
        assert_eq!((found.median, found.low, found.high), (25.0, 20.0, 30.0));
        assert_eq!(found.ratio_range, Some((2.0, 3.0)));
        assert_eq!(found.ratio, Some(2.5));
    }
}
