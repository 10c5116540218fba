//! Results as a page: medians with their spread, and ratios within a round.

use std::fmt::Write as _;

use super::Machine;
use super::verdict::{Verdict, verdicts};
use crate::compare::{Get, Run, after, names, ratio, spread, values};
use crate::load::{Report, float};
use crate::storm::Ceiling;

/// One column of a scenario's table.
struct Column {
    title: &'static str,
    digits: usize,
    get: Get,
}

/// One scenario's table; ratios are made of its first column.
struct Table {
    scenario: &'static str,
    title: &'static str,
    columns: &'static [Column],
}

fn errors(report: &Report) -> Option<f64> {
    Some(float(report.error_count()))
}

const fn column(title: &'static str, digits: usize, get: Get) -> Column {
    Column { title, digits, get }
}

const STORM: &[Column] = &[
    column("wasted, % of planned", 3, |r| {
        Some(r.waste?.percent_of_planned)
    }),
    column("wasted tokens", 0, |r| Some(float(r.waste?.wasted))),
    column("running after 1 s", 0, |r| r.running_after.map(float)),
    column("CLOSE_WAIT", 0, |r| after(r, "CLOSE_WAIT")),
    column("TIME_WAIT", 0, |r| after(r, "TIME_WAIT")),
    column("MiB left over", 1, Report::memory_left),
    column("first event p99 ms", 2, |r| Some(r.first_event?.p99_ms)),
    column("the same undisturbed", 2, |r| {
        Some(r.first_event_undisturbed?.p99_ms)
    }),
    column("errors", 0, errors),
];

const TABLES: &[Table] = &[
    Table {
        scenario: "calls",
        title: "Small calls, 64 connections, not streamed",
        columns: &[
            column("µs of CPU a call", 1, |r| r.cpu_us_per_call),
            column("calls/s", 0, |r| {
                (r.seconds > 0.0).then(|| float(r.calls) / r.seconds)
            }),
            column("p50 ms", 2, |r| Some(r.latency?.p50_ms)),
            column("p99 ms", 2, |r| Some(r.latency?.p99_ms)),
            column("errors", 0, errors),
        ],
    },
    Table {
        scenario: "streams",
        title: "500 streams, a chunk each 20 ms",
        columns: &[
            column("µs of CPU a chunk", 1, |r| r.cpu_us_per_chunk),
            column("delay p50 ms", 3, |r| Some(r.delay?.p50_ms)),
            column("delay p99 ms", 3, |r| Some(r.delay?.p99_ms)),
            column("first event p99 ms", 2, |r| Some(r.first_event?.p99_ms)),
            column("errors", 0, errors),
        ],
    },
    Table {
        scenario: "steady",
        title: "200 users who read answers of 50 tokens, one after the other, a connection each",
        columns: &[
            column("µs of CPU a call", 1, |r| r.cpu_us_per_call),
            column("first event p50 ms", 2, |r| Some(r.first_event?.p50_ms)),
            column("first event p99 ms", 2, |r| Some(r.first_event?.p99_ms)),
            column("delay p99 ms", 3, |r| Some(r.delay?.p99_ms)),
            column("TIME_WAIT", 0, |r| after(r, "TIME_WAIT")),
            column("errors", 0, errors),
        ],
    },
    Table {
        scenario: "idle",
        title: "Idle streams",
        columns: &[
            column("KiB of memory each", 1, |r| r.kib_per_stream),
            column("MiB in all", 1, |r| r.mib_taken),
            column("errors", 0, errors),
        ],
    },
    Table {
        scenario: "slow",
        title: "200 slow readers of a fast upstream",
        columns: &[
            column("MiB taken", 1, |r| r.mib_taken),
            column("running after 1 s", 0, |r| r.running_after.map(float)),
            column("errors", 0, errors),
        ],
    },
    Table {
        scenario: "storm-rst",
        title: "The storm: 500 users, 5,000 calls of 400 tokens, cut at the 5th chunk by RST",
        columns: STORM,
    },
    Table {
        scenario: "storm-fin",
        title: "The storm, by FIN",
        columns: STORM,
    },
];

/// The page.
#[must_use]
pub fn markdown(machine: &Machine, ceiling: Option<Ceiling>, runs: &[Run]) -> String {
    let mut page = String::from("# Benchmarks\n\n");
    preface(&mut page, machine, ceiling, runs);
    let mut names = names(runs, |r| &r.gateway);
    let order = ["direct", "nginx", "HAProxy", "Tidegate", "naive"];
    names.sort_by_key(|n| order.iter().position(|o| o == n));
    for table in TABLES {
        if runs.iter().any(|r| r.scenario == table.scenario) {
            table_into(&mut page, table, &names, runs);
        }
    }
    if names.contains(&"Tidegate") {
        bars_into(&mut page, runs, names.contains(&"naive"));
    }
    page
}

/// The bars, and beside them what the naive proxy makes of them: a judge that
/// passes it is no judge.
fn bars_into(page: &mut String, runs: &[Run], naive: bool) {
    page.push_str("## The bars\n\n| bar | limit | Tidegate | met | naive | met |\n|---|---|---|---|---|---|\n");
    let text = |v: &Verdict| {
        let value = v.value.map(|v| format!("{v:.2}"));
        let met = if v.met() { "yes" } else { "**no**" };
        format!("{} | {met}", value.as_deref().unwrap_or("not measured"))
    };
    let judged = verdicts(runs, "naive");
    for (ours, theirs) in verdicts(runs, "Tidegate").iter().zip(&judged) {
        let theirs = if naive {
            text(theirs)
        } else {
            "– | –".to_owned()
        };
        put(
            page,
            format_args!(
                "| {} | {} | {} | {theirs} |\n",
                ours.bar,
                ours.limit,
                text(ours)
            ),
        );
    }
}

fn put(page: &mut String, text: std::fmt::Arguments<'_>) {
    page.write_fmt(text).expect("a String takes any text");
}

fn preface(page: &mut String, machine: &Machine, ceiling: Option<Ceiling>, runs: &[Run]) {
    let rounds = runs.iter().map(|r| r.round + 1).max().unwrap_or(0);
    put(
        page,
        format_args!(
            "Written by `rig bench`. Medians of {rounds} interleaved rounds, lowest and highest in brackets; \
             ratios are taken within a round. Load, upstream and gateway share the machine. \
             CPU is the gateway's processes alone, from the scheduler's counters. Delay is from the upstream's \
             stamp to the client's read, so the direct connection's line is the floor of the others. \
             Others' CPU is what neither load nor upstream nor gateway used: above a few percent, take the row with care.\n\n"
        ),
    );
    put(
        page,
        format_args!(
            "- Machine: {} × {}, {} MiB, Linux {}, load average before {}\n- Date: {}\n- Command: `{}`\n",
            machine.cores,
            machine.processor,
            machine.memory_mib,
            machine.kernel,
            machine.load_before,
            machine.date,
            machine.command
        ),
    );
    if let Some(ceiling) = ceiling {
        put(
            page,
            format_args!("- Load and upstream without a gateway: {ceiling}\n"),
        );
    }
    for (name, version) in &machine.versions {
        put(page, format_args!("- {name}: {version}\n"));
    }
    page.push('\n');
}

fn cell(values: &[(usize, f64)], digits: usize) -> String {
    spread(values).map_or_else(|| "–".to_owned(), |s| s.text(digits))
}

fn table_into(page: &mut String, table: &Table, names: &[&str], runs: &[Run]) {
    put(page, format_args!("## {}\n\n|  |", table.title));
    for column in table.columns {
        put(page, format_args!(" {} |", column.title));
    }
    put(page, format_args!(" others' CPU, % |"));
    let first = table.columns[0].get;
    let rivals: Vec<&str> = ["nginx", "HAProxy"]
        .into_iter()
        .filter(|r| names.contains(r) && !table.scenario.starts_with("storm"))
        .collect();
    for rival in &rivals {
        put(page, format_args!(" × {rival} |"));
    }
    page.push_str("\n|---|");
    page.push_str(&"---|".repeat(table.columns.len() + 1 + rivals.len()));
    page.push('\n');
    for name in names {
        put(page, format_args!("| {name} |"));
        for column in table.columns {
            let values = values(runs, table.scenario, name, column.get);
            put(page, format_args!(" {} |", cell(&values, column.digits)));
        }
        let others: Vec<(usize, f64)> = runs
            .iter()
            .filter(|r| r.scenario == table.scenario && r.gateway == *name)
            .filter_map(|r| Some((r.round, r.others_percent?)))
            .collect();
        put(page, format_args!(" {} |", cell(&others, 0)));
        let mine = values(runs, table.scenario, name, first);
        for rival in &rivals {
            let theirs = values(runs, table.scenario, rival, first);
            let ratio = ratio(&mine, &theirs).filter(|_| name != rival);
            let text = ratio.map_or_else(|| "–".to_owned(), |r| r.text(2));
            put(page, format_args!(" {text} |"));
        }
        page.push('\n');
    }
    page.push('\n');
}
