//! The report as one HTML file: no script, nothing loaded from elsewhere.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::compare::{Run, ratios};
use super::plot::{Line, Plot};
use super::series::Tick;
use super::{Ceiling, Scenario};
use crate::bench::Machine;
use crate::load::float;

const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1180px;padding:0 1em;color:#1a1a1a}\
h1{font-size:1.5em}h2{margin-top:2em;border-bottom:1px solid #ccc}table{border-collapse:collapse;margin:1em 0}\
td,th{padding:.2em .8em;text-align:left;border-bottom:1px solid #e3e3e3;vertical-align:top}\
td.n{text-align:right;font-variant-numeric:tabular-nums}figure{display:inline-block;margin:.3em}\
.bad{color:#b00020;font-weight:600}.good{color:#00695c}pre{background:#f5f5f5;padding:.7em;overflow-x:auto}\
svg{max-width:100%;height:auto}";

/// The page: machine, bars, comparison, and per scenario tables and plots.
#[must_use]
pub fn page(
    machine: &Machine,
    ceiling: Option<Ceiling>,
    runs: &[Run],
    failures: &[String],
) -> String {
    let mut out = String::from("<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">");
    let _ = write!(
        out,
        "<title>Storm</title><style>{STYLE}</style><h1>Storm</h1>"
    );
    about(&mut out, machine, ceiling);
    verdict(&mut out, failures);
    let gateways: Vec<&str> = names(runs);
    if gateways.len() > 1 {
        comparison(&mut out, runs);
    }
    let mut scenarios: Vec<Scenario> = Vec::new();
    for run in runs {
        if !scenarios.contains(&run.scenario) {
            scenarios.push(run.scenario);
        }
    }
    for scenario in scenarios {
        let here: Vec<&Run> = runs.iter().filter(|r| r.scenario == scenario).collect();
        section(&mut out, scenario, &here);
    }
    out.push_str("</html>\n");
    out
}

fn names(runs: &[Run]) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for run in runs {
        if !names.contains(&run.gateway.as_str()) {
            names.push(&run.gateway);
        }
    }
    names
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

fn about(out: &mut String, machine: &Machine, ceiling: Option<Ceiling>) {
    let _ = write!(
        out,
        "<p>{}, {} cores, {} MiB, Linux {}, load before {}. {}</p><pre>{}</pre>",
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
            "<p>Without a gateway, load and upstream on this machine reach {:.0} small calls/s and {:.0} chunks/s.</p>",
            c.calls_per_second, c.chunks_per_second
        );
    }
}

fn verdict(out: &mut String, failures: &[String]) {
    if failures.is_empty() {
        out.push_str("<p class=\"good\">All bars held.</p>");
        return;
    }
    out.push_str("<p class=\"bad\">Bars that did not hold:</p><ul>");
    for failure in failures {
        let _ = write!(out, "<li class=\"bad\">{}</li>", escaped(failure));
    }
    out.push_str("</ul>");
}

fn comparison(out: &mut String, runs: &[Run]) {
    out.push_str(
        "<h2>Side by side</h2><p>Medians over the rounds, lowest and highest in brackets; ratios to the first gateway are taken within a round.</p>\
<table><tr><th>scenario<th>figure<th>gateway<th>median<th>ratio</tr>",
    );
    for c in ratios(runs) {
        let ratio = match (c.ratio, c.ratio_range) {
            (Some(ratio), Some((low, high))) => format!("{ratio:.2} ({low:.2}–{high:.2})"),
            _ => "–".to_owned(),
        };
        let _ = write!(
            out,
            "<tr><td>{}<td>{}<td>{}<td class=\"n\">{:.2} ({:.2}–{:.2})<td class=\"n\">{ratio}</tr>",
            c.scenario.name(),
            escaped(&c.figure),
            escaped(&c.gateway),
            c.median,
            c.low,
            c.high
        );
    }
    out.push_str("</table>");
}

fn section(out: &mut String, scenario: Scenario, runs: &[&Run]) {
    let _ = write!(
        out,
        "<h2>{}</h2><p>{}.</p>",
        scenario.name(),
        escaped(&scenario.about())
    );
    let several = names_of(runs).len() > 1;
    for run in runs.iter().filter(|r| r.round == 0) {
        if several {
            let _ = write!(out, "<h3>{}</h3>", escaped(&run.gateway));
        }
        if let Some(why) = &run.report.ended_early {
            let _ = write!(out, "<p class=\"bad\">{}</p>", escaped(why));
        }
        let _ = write!(out, "<pre>{}</pre>", escaped(run.report.table().trim_end()));
        for plot in over_time(&run.report.series) {
            figure(out, &plot);
        }
    }
    for plot in distributions(runs) {
        figure(out, &plot);
    }
}

fn names_of<'a>(runs: &[&'a Run]) -> Vec<&'a str> {
    let mut names: Vec<&str> = runs.iter().map(|r| r.gateway.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    names
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

fn over_time(series: &[Tick]) -> Vec<Plot> {
    let plot = |title: &str, y, lines| Plot {
        title: title.to_owned(),
        x: "s",
        y,
        lines,
        tail: false,
    };
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
                line("resident", series, |t| {
                    Some(float(t.process?.rss_kib) / 1024.0)
                }),
                line("proportional", series, |t| {
                    Some(float(t.process?.pss_kib) / 1024.0)
                }),
            ],
        ),
        plot("Sockets of the gateway", "sockets", sockets.collect()),
        plot(
            "Descriptors and threads of the gateway",
            "n",
            vec![
                line("descriptors", series, |t| count(t.process?.descriptors)),
                line("threads", series, |t| count(t.process?.threads)),
            ],
        ),
    ]
}

fn distributions(runs: &[&Run]) -> Vec<Plot> {
    let mut kinds: BTreeMap<&str, Vec<Line>> = BTreeMap::new();
    for run in runs.iter().filter(|r| r.round == 0) {
        for (kind, points) in &run.report.distributions {
            kinds.entry(kind).or_default().push(Line {
                name: run.gateway.clone(),
                points: points.clone(),
            });
        }
    }
    let plot = |(kind, lines): (&str, Vec<Line>)| Plot {
        title: format!("Distribution: {kind}"),
        x: "share of values below",
        y: "ms",
        lines,
        tail: true,
    };
    kinds.into_iter().map(plot).collect()
}
