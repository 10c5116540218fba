//! The report as one HTML file: no script, nothing loaded from elsewhere.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use clap::ValueEnum as _;

use super::compare::{Table, tables};
use super::failure::Failure;
use super::plot::{Line, Plot};
use super::series::Tick;
use super::{Ceiling, Scenario};
use crate::bench::Machine;
use crate::compare::{Run, names};
use crate::load::float;

const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1180px;padding:0 1em;color:#1a1a1a}\
h1{font-size:1.5em}h2{margin-top:2em;border-bottom:1px solid #ccc}table{border-collapse:collapse;margin:1em 0}\
td,th{padding:.2em .8em;text-align:left;border-bottom:1px solid #e3e3e3;vertical-align:top}\
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}figure{display:inline-block;margin:.3em}\
.bad{color:#b00020;font-weight:600}.good{color:#00695c}pre{background:#f5f5f5;padding:.7em;overflow-x:auto}\
svg{max-width:100%;height:auto}small{color:#555}summary{cursor:pointer;font-weight:600;margin:.6em 0}";

/// The page: machine, bars, comparison, and per scenario tables and plots.
#[must_use]
pub fn page(
    machine: &Machine,
    ceiling: Option<Ceiling>,
    runs: &[Run],
    failures: &[Failure],
) -> String {
    let mut out = String::from("<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">");
    let _ = write!(
        out,
        "<title>Storm</title><style>{STYLE}</style><h1>Storm</h1>"
    );
    about(&mut out, machine, ceiling);
    verdict(&mut out, runs, failures);
    let tables = tables(runs);
    if names(runs, |r| &r.gateway).len() > 1 {
        out.push_str(
            "<p>In the tables: medians over the rounds, lowest and highest in brackets; × is the ratio to the first gateway, \
taken within a round. Plots and lists are of the first round.</p>",
        );
    }
    for table in &tables {
        let of = |r: &&Run| r.scenario == table.scenario;
        section(&mut out, table, &runs.iter().filter(of).collect::<Vec<_>>());
    }
    out.push_str("</html>\n");
    out
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

fn about(out: &mut String, machine: &Machine, ceiling: Option<Ceiling>) {
    let _ = write!(
        out,
        "<p>{}, {} cores, {} MiB, Linux {}, load average before {}. {}</p><pre>{}</pre>",
        escaped(&machine.processor),
        machine.cores,
        machine.memory_mib,
        escaped(&machine.kernel),
        escaped(&machine.load_before),
        escaped(&machine.date),
        escaped(&machine.command)
    );
    if let Some(c) = ceiling {
        let _ = write!(
            out,
            "<p>Ceiling: without a gateway, load and upstream on this machine reach {c}.</p>"
        );
    }
}

fn verdict(out: &mut String, runs: &[Run], failures: &[Failure]) {
    if failures.is_empty() {
        out.push_str("<p class=\"good\">All bars held.</p>");
        return;
    }
    let gateways = names(runs, |r| &r.gateway);
    out.push_str("<h2>Bars that did not hold</h2><table><tr><th>scenario");
    for gateway in &gateways {
        let _ = write!(out, "<th>{}", escaped(gateway));
    }
    out.push_str("</tr>");
    let rounds = runs.iter().map(|r| r.round + 1).max().unwrap_or(1);
    for scenario in names(runs, |r| &r.scenario) {
        let _ = write!(out, "<tr><td>{}", escaped(scenario));
        for gateway in &gateways {
            let here = |f: &&Failure| f.scenario == scenario && f.gateway == *gateway;
            let whats = by_bar(failures.iter().filter(here), rounds);
            if whats.is_empty() {
                out.push_str("<td class=\"good\">held");
            } else {
                let _ = write!(out, "<td class=\"bad\">{}", whats.join("<br>"));
            }
        }
        out.push_str("</tr>");
    }
    out.push_str("</table>");
}

/// One line for each bar: its first failure, and in how many rounds it failed.
fn by_bar<'a>(failures: impl Iterator<Item = &'a Failure>, rounds: usize) -> Vec<String> {
    let mut all: Vec<(&str, &str, usize)> = Vec::new();
    for failure in failures {
        let what = failure.what.as_str();
        let bar = what.split_once(": ").map_or(what, |(bar, _)| bar);
        match all.iter_mut().find(|(known, ..)| *known == bar) {
            Some((_, _, times)) => *times += 1,
            None => all.push((bar, what, 1)),
        }
    }
    let text = |(_, what, times): (&str, &str, usize)| match rounds {
        1 => escaped(what),
        _ => format!("{} ({times} of {rounds} rounds)", escaped(what)),
    };
    all.into_iter().map(text).collect()
}

fn comparison(out: &mut String, table: &Table<'_>) {
    out.push_str("<table><tr><th>");
    for gateway in &table.gateways {
        let _ = write!(out, "<th class=\"n\">{}", escaped(gateway));
    }
    out.push_str("</tr>");
    for (figure, cells) in &table.rows {
        let _ = write!(out, "<tr><td>{}", escaped(figure));
        for cell in cells {
            let (value, ratio) = cell
                .as_ref()
                .map_or_else(|| ("–".to_owned(), None), super::compare::Compared::texts);
            let _ = write!(out, "<td class=\"n\">{value}");
            if let Some(ratio) = ratio {
                let _ = write!(out, "<br><small>{ratio}</small>");
            }
        }
        out.push_str("</tr>");
    }
    out.push_str("</table>");
    if !table.nought.is_empty() {
        let _ = write!(out, "<p>0 everywhere: {}.</p>", table.nought.join(", "));
    }
}

fn section(out: &mut String, table: &Table<'_>, runs: &[&Run]) {
    let scenario = Scenario::from_str(table.scenario, false);
    let _ = write!(
        out,
        "<h2>{}</h2><p>{}.</p>",
        escaped(table.scenario),
        escaped(&scenario.map(Scenario::about).unwrap_or_default())
    );
    let first: Vec<&Run> = runs.iter().copied().filter(|r| r.round == 0).collect();
    let several = first.len() > 1;
    if several {
        comparison(out, table);
        for plot in beside(&first) {
            figure(out, &plot);
        }
    }
    for plot in distributions(&first) {
        figure(out, &plot);
    }
    for run in first {
        if several {
            let name = escaped(&run.gateway);
            let _ = write!(out, "<details><summary>{name}</summary>");
        }
        if let Some(why) = &run.report.ended_early {
            let _ = write!(out, "<p class=\"bad\">{}</p>", escaped(why));
        }
        let _ = write!(out, "<pre>{}</pre>", escaped(run.report.table().trim_end()));
        for plot in over_time(&run.report.series) {
            figure(out, &plot);
        }
        if several {
            out.push_str("</details>");
        }
    }
}

fn figure(out: &mut String, plot: &Plot) {
    let svg = plot.svg();
    if !svg.is_empty() {
        let _ = write!(out, "<figure>{svg}</figure>");
    }
}

fn line(name: &str, series: &[Tick], value: impl Fn(&Tick) -> Option<f64>) -> Line {
    let points = series.iter().filter_map(|t| Some((t.at, value(t)?)));
    Line {
        name: name.to_owned(),
        points: points.collect(),
    }
}

fn plot(title: &str, y: &'static str, lines: Vec<Line>) -> Plot {
    Plot {
        title: title.to_owned(),
        x: "seconds",
        y,
        lines,
        tail: false,
    }
}

fn mib(tick: &Tick) -> Option<f64> {
    Some(float(tick.process?.rss_kib) / 1024.0)
}

/// One figure of all gateways in one plot.
fn beside(runs: &[&Run]) -> Vec<Plot> {
    let lines = |value: fn(&Tick) -> Option<f64>| {
        let of = |run: &&Run| line(&run.gateway, &run.report.series, value);
        runs.iter().map(of).collect()
    };
    vec![
        plot(
            "Calls that run for nobody",
            "calls",
            lines(|t| Some(float(t.abandoned))),
        ),
        plot("Memory of the gateway", "MiB resident", lines(mib)),
    ]
}

fn over_time(series: &[Tick]) -> Vec<Plot> {
    let count = |n: u64| Some(float(n));
    let mut states: BTreeMap<&str, ()> = BTreeMap::new();
    for state in series.iter().flat_map(|t| t.sockets.keys()) {
        states.insert(state, ());
    }
    let sockets = states.keys().map(|state| {
        line(state, series, |t| {
            count(t.sockets.get(*state).copied().unwrap_or(0))
        })
    });
    vec![
        plot(
            "Calls",
            "calls",
            vec![
                line("open", series, |t| count(t.open)),
                line("running", series, |t| count(t.running)),
                line("queued", series, |t| count(t.queued)),
                line("abandoned", series, |t| count(t.abandoned)),
            ],
        ),
        plot(
            "Memory of the gateway",
            "MiB",
            vec![
                line("resident", series, mib),
                line("proportional", series, |t| {
                    Some(float(t.process?.pss_kib) / 1024.0)
                }),
            ],
        ),
        plot("Sockets of the gateway", "sockets", sockets.collect()),
        plot(
            "Descriptors and threads of the gateway",
            "how many",
            vec![
                line("descriptors", series, |t| count(t.process?.descriptors)),
                line("threads", series, |t| count(t.process?.threads)),
            ],
        ),
    ]
}

fn distributions(runs: &[&Run]) -> Vec<Plot> {
    let mut kinds: BTreeMap<&str, Vec<Line>> = BTreeMap::new();
    for run in runs {
        for (kind, points) in &run.report.distributions {
            kinds.entry(kind).or_default().push(Line {
                name: run.gateway.clone(),
                points: points.clone(),
            });
        }
    }
    let plot = |(kind, lines): (&str, Vec<Line>)| Plot {
        title: format!("Distribution: {kind}"),
        x: "share of calls or chunks below",
        y: "ms",
        lines,
        tail: true,
    };
    kinds.into_iter().map(plot).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_that_failed_in_several_rounds_is_one_line_of_the_page() {
        let failed = |round, what: &str| Failure {
            gateway: "mine".to_owned(),
            scenario: "abort".to_owned(),
            round,
            what: what.to_owned(),
        };
        let run = |round, gateway: &str| Run {
            round,
            gateway: gateway.to_owned(),
            scenario: "abort".to_owned(),
            ..Run::default()
        };
        let runs = [
            run(0, "mine"),
            run(0, "other"),
            run(1, "mine"),
            run(1, "other"),
        ];
        let failures = [
            failed(0, "TIME_WAIT: 300, bar 150"),
            failed(0, "errors: 1, bar 0"),
            failed(1, "TIME_WAIT: 288, bar 150"),
        ];
        let page = page(&Machine::default(), None, &runs, &failures);
        let line = "TIME_WAIT: 300, bar 150 (2 of 2 rounds)<br>errors: 1, bar 0 (1 of 2 rounds)<td class=\"good\">held";
        assert!(page.contains(line), "{page}");
    }
}
