//! Figures out of many runs.

use super::Run;
use crate::load::Report;

/// Takes a figure out of a report.
pub(super) type Get = fn(&Report) -> Option<f64>;

pub(super) fn count(n: u64) -> Option<f64> {
    u32::try_from(n).ok().map(f64::from)
}

pub(super) fn after(report: &Report, state: &str) -> Option<f64> {
    count(report.sockets_after.as_ref()?.count(state))
}

/// MiB that a run left behind.
pub(super) fn left_over(report: &Report) -> Option<f64> {
    let left = report.after?.rss_kib.saturating_sub(report.before?.rss_kib);
    count(left).map(|kib| kib / 1024.0)
}

/// Values of one figure of one contender, by round.
pub(super) fn values(runs: &[Run], scenario: &str, contender: &str, get: Get) -> Vec<(usize, f64)> {
    runs.iter()
        .filter(|r| r.scenario == scenario && r.contender == contender)
        .filter_map(|r| Some((r.round, get(&r.report)?)))
        .collect()
}

pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = *values.get(middle)?;
    Some(if values.len().is_multiple_of(2) {
        f64::midpoint(values[middle - 1], upper)
    } else {
        upper
    })
}

/// Median of the ratios within each round.
pub(super) fn ratio(mine: &[(usize, f64)], theirs: &[(usize, f64)]) -> Option<f64> {
    let ratios = mine.iter().filter_map(|(round, value)| {
        let (_, other) = theirs.iter().find(|(r, _)| r == round)?;
        (*other > 0.0).then(|| value / other)
    });
    median(ratios.collect())
}
