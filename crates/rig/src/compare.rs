//! The same load on several gateways: in turn, interleaved, repeated; and the
//! figures of many runs, with ratios taken within a round, and their spread.
//!
//! `storm --compare` and `bench` both run through here.

use std::ops::ControlFlow;

use serde::{Deserialize, Serialize};

use crate::load::{Report, float};

/// One scenario on one gateway in one round.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Run {
    /// Round, from 0.
    pub round: usize,
    /// Name of the gateway.
    pub gateway: String,
    /// Name of the scenario.
    pub scenario: String,
    /// CPU that neither the load nor the upstream nor the gateway used,
    /// percent of the machine: how much the run was disturbed. Where it is
    /// known.
    pub others_percent: Option<f64>,
    /// What was found.
    pub report: Report,
}

/// Has `one` run each scenario on each gateway in each round. Gateways take
/// turns within a scenario, and each round begins with another one, so that
/// what drifts on the machine meets all of them.
pub(crate) async fn in_turn<S, G>(
    rounds: usize,
    scenarios: &[S],
    gateways: &[G],
    mut one: impl AsyncFnMut(usize, &S, &G) -> ControlFlow<()>,
) {
    for round in 0..rounds {
        for scenario in scenarios {
            for at in 0..gateways.len() {
                let gateway = &gateways[(at + round) % gateways.len()];
                if one(round, scenario, gateway).await.is_break() {
                    return;
                }
            }
        }
    }
}

/// Takes a figure out of a report.
pub(crate) type Get = fn(&Report) -> Option<f64>;

/// Sockets in a state after the run.
pub(crate) fn after(report: &Report, state: &str) -> Option<f64> {
    Some(float(report.sockets_after.as_ref()?.count(state)))
}

/// Values of one figure of one gateway, by round.
pub(crate) fn values(runs: &[Run], scenario: &str, gateway: &str, get: Get) -> Vec<(usize, f64)> {
    runs.iter()
        .filter(|r| r.scenario == scenario && r.gateway == gateway)
        .filter_map(|r| Some((r.round, get(&r.report)?)))
        .collect()
}

/// Names in the order in which they first appear.
pub(crate) fn names(runs: &[Run], name: fn(&Run) -> &str) -> Vec<&str> {
    let mut all: Vec<&str> = Vec::new();
    for run in runs {
        if !all.contains(&name(run)) {
            all.push(name(run));
        }
    }
    all
}

/// Median, lowest and highest of some values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Median.
    pub median: f64,
    /// Lowest.
    pub low: f64,
    /// Highest.
    pub high: f64,
}

impl Spread {
    /// None of no values.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        let upper = *values.get(middle)?;
        let median = if values.len().is_multiple_of(2) {
            f64::midpoint(values[middle - 1], upper)
        } else {
            upper
        };
        let (low, high) = (*values.first()?, *values.last()?);
        Some(Self { median, low, high })
    }

    /// As text; the spread only where it shows.
    pub(crate) fn text(&self, digits: usize) -> String {
        let shown = |v: f64| format!("{v:.digits$}");
        let (low, high) = (shown(self.low), shown(self.high));
        if low == high {
            return low;
        }
        format!("{} ({low}–{high})", shown(self.median))
    }

    /// As many digits as such a value needs.
    pub(crate) fn digits(&self) -> usize {
        match self.high.abs() {
            v if v.fract() == 0.0 && self.low.fract() == 0.0 && self.median.fract() == 0.0 => 0,
            v if v >= 100.0 => 0,
            v if v >= 10.0 => 1,
            v if v >= 0.1 => 2,
            _ => 3,
        }
    }
}

/// Of the values of a figure.
pub(crate) fn spread(values: &[(usize, f64)]) -> Option<Spread> {
    Spread::of(values.iter().map(|(_, v)| *v))
}

/// Of the ratios within each round; a round whose other value is 0 has none.
pub(crate) fn ratio(mine: &[(usize, f64)], theirs: &[(usize, f64)]) -> Option<Spread> {
    let ratios = mine.iter().filter_map(|(round, value)| {
        let (_, other) = theirs.iter().find(|(r, _)| r == round)?;
        (*other > 0.0).then(|| value / other)
    });
    Spread::of(ratios)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_shown_where_there_is_one() {
        let of = |values: &[f64]| Spread::of(values.iter().copied()).expect("values");
        assert_eq!(Spread::of([]), None);
        assert_eq!(of(&[3.0, 1.0, 2.0]).text(0), "2 (1–3)");
        assert_eq!(of(&[1.0, 2.0]).text(1), "1.5 (1.0–2.0)");
        assert_eq!(of(&[1.001, 1.002]).text(1), "1.0");
        assert_eq!(of(&[5000.0, 4999.0]).digits(), 0);
        assert_eq!(of(&[0.25]).digits(), 2);
    }

    #[tokio::test]
    async fn each_round_begins_with_another_gateway() {
        let mut order = String::new();
        in_turn(2, &["x", "y"], &["a", "b"], async |round, s, g| {
            order += &format!("{round}{s}{g} ");
            match order.len() {
                28.. => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        })
        .await;
        assert_eq!(order, "0xa 0xb 0ya 0yb 1xb 1xa 1yb ");
    }

    #[test]
    fn ratios_are_taken_within_a_round_and_have_a_spread() {
        let found = ratio(
            &[(0, 20.0), (1, 30.0), (2, 9.0)],
            &[(1, 10.0), (0, 10.0), (2, 0.0)],
        );
        let found = found.expect("two rounds");
        assert_eq!((found.median, found.low, found.high), (2.5, 2.0, 3.0));
    }
}
