//! `tidegate report`: what was spent for nobody, from the access log.

use std::collections::BTreeMap;
use std::io::BufRead;

use clap::Args;
use serde::Serialize;
use serde_json::Value;

use super::{Exit, Output};

/// A line longer than this is none of ours.
const LINE_BYTES: u64 = 1 << 20;
/// Different models, upstreams and keys that are told apart; what comes after goes to one row.
const ROWS_MAX: usize = 10_000;

/// What is reported.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct Report {
    /// Access logs, a JSON line for each call; standard input if there is none
    #[arg(value_name = "FILE")]
    pub files: Vec<std::path::PathBuf>,
    /// One JSON object
    #[arg(long)]
    pub json: bool,
}

/// Sums over calls.
#[derive(Clone, Debug, Default, Serialize)]
struct Sums {
    calls: u64,
    abandoned: u64,
    /// Calls that try an abandoned one again.
    retries: u64,
    /// Calls whose process was killed: nobody knows what became of them.
    lost: u64,
    output_tokens: u64,
    wasted_tokens: u64,
    /// Abandoned calls of which nobody knows what they generated.
    waste_unknown: u64,
    wasted_seconds: f64,
    wasted_money: f64,
}

#[derive(Debug, Serialize)]
struct Row {
    model: String,
    upstream: String,
    key: String,
    #[serde(flatten)]
    sums: Sums,
}

/// `tidegate report`. Blocks on the file.
pub fn report(args: &Report, stdin: impl BufRead) -> Output {
    let mut sums = BTreeMap::new();
    let mut other = 0;
    if args.files.is_empty() {
        match gather(stdin, &mut sums) {
            Ok(lines) => other += lines,
            Err(error) => return failed(&format!("the log cannot be read: {error}")),
        }
    }
    for path in &args.files {
        let opened = std::fs::File::open(path).map(std::io::BufReader::new);
        match opened.and_then(|file| gather(file, &mut sums)) {
            Ok(lines) => other += lines,
            Err(error) => return failed(&format!("{} cannot be read: {error}", path.display())),
        }
    }
    let rows = sorted(sums);
    if rows.is_empty() {
        return failed(
            "no line of an access log is in there; tidegate writes it to standard output",
        );
    }
    let stdout = if args.json {
        let value = serde_json::json!({"rows": rows, "other_lines": other});
        format!("{value}\n")
    } else {
        table(&rows)
    };
    let stderr = match other {
        0 => String::new(),
        n => format!("{n} other lines were passed over\n"),
    };
    Output {
        stdout,
        stderr,
        exit: Exit::Ok,
    }
}

fn failed(why: &str) -> Output {
    Output {
        stdout: String::new(),
        stderr: format!("tidegate: {why}\n"),
        exit: Exit::Failed,
    }
}

/// By model, upstream and key.
type All = BTreeMap<[String; 3], Sums>;

/// Adds the calls of one log; how many lines are none of ours.
fn gather(mut log: impl BufRead, sums: &mut All) -> std::io::Result<u64> {
    let mut other = 0;
    let mut line = Vec::new();
    loop {
        line.clear();
        let mut bounded = std::io::Read::take(&mut log, LINE_BYTES);
        if bounded.read_until(b'\n', &mut line)? == 0 {
            return Ok(other);
        }
        let call: Option<Value> = serde_json::from_slice(&line).ok();
        match call.filter(|call| call["wait_end"].is_string()) {
            Some(call) => add(sums, &call),
            None => other += 1,
        }
    }
}

/// The most wasted first.
fn sorted(sums: All) -> Vec<Row> {
    let mut rows: Vec<_> = sums
        .into_iter()
        .map(|([model, upstream, key], sums)| Row {
            model,
            upstream,
            key,
            sums,
        })
        .collect();
    rows.sort_by_key(|row| std::cmp::Reverse((row.sums.wasted_tokens, row.sums.abandoned)));
    rows
}

fn add(sums: &mut All, call: &Value) {
    let text = |name: &str| call[name].as_str().unwrap_or("-").to_owned();
    let mut of = [text("model"), text("upstream"), text("principal")];
    if sums.len() >= ROWS_MAX && !sums.contains_key(&of) {
        of = ["…".into(), "…".into(), "…".into()];
    }
    let count = |name: &str| call[name].as_u64().unwrap_or(0);
    let number = |name: &str| call[name].as_f64().unwrap_or(0.0);
    let row = sums.entry(of).or_default();
    row.calls += 1;
    row.abandoned += u64::from(matches!(
        call["wait_end"].as_str(),
        Some("left" | "stalled")
    ));
    row.retries += u64::from(call["retry_of"].is_string());
    row.lost += u64::from(call["outcome"] == "lost");
    // The numbers are the upstreams' own.
    row.output_tokens = row.output_tokens.saturating_add(count("output_tokens"));
    row.wasted_tokens = row.wasted_tokens.saturating_add(count("wasted_tokens"));
    row.waste_unknown += u64::from(call["waste"] == "unknown");
    row.wasted_seconds += number("wasted_ms") / 1e3;
    row.wasted_money += number("wasted_money");
}

fn table(rows: &[Row]) -> String {
    let mut cells = vec![
        [
            "MODEL",
            "UPSTREAM",
            "KEY",
            "CALLS",
            "ABANDONED",
            "RETRIES",
            "LOST",
            "TOKENS",
            "WASTED",
            "UNKNOWN",
            "SECONDS",
            "MONEY",
        ]
        .map(str::to_owned),
    ];
    cells.extend(rows.iter().map(|row| {
        let s = &row.sums;
        let plain = |text: &str| text.replace(|c: char| c.is_control(), "?");
        [
            plain(&row.model),
            plain(&row.upstream),
            plain(&row.key),
            s.calls.to_string(),
            s.abandoned.to_string(),
            s.retries.to_string(),
            s.lost.to_string(),
            s.output_tokens.to_string(),
            s.wasted_tokens.to_string(),
            s.waste_unknown.to_string(),
            format!("{:.1}", s.wasted_seconds),
            format!("{:.4}", s.wasted_money),
        ]
    }));
    super::admin::aligned(&cells)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(log: &str, json: bool) -> Output {
        report(
            &Report {
                files: Vec::new(),
                json,
            },
            log.as_bytes(),
        )
    }

    #[test]
    fn the_sums_are_those_of_the_lines() {
        let log = r#"{"model":"a","upstream":"u","principal":"k","wait_end":"answered","output_tokens":10}
{"model":"a","upstream":"u","principal":"k","wait_end":"left","output_tokens":10,"wasted_tokens":4,"waste":"reported","wasted_ms":1500.000,"wasted_money":0.25}
{"model":"a","upstream":"u","principal":"k","wait_end":"left","waste":"unknown","wasted_ms":2000.000,"retry_of":"req_1"}
not a line
{"model":"a","upstream":"u","principal":"k","outcome":"lost","wait_end":"unknown","work_end":"unknown","usage":"unknown"}
{"model":"b","upstream":"u","principal":"k","wait_end":"stalled","output_tokens":9,"wasted_tokens":9,"waste":"counted"}
"#;
        let told = of(log, true);
        let value: Value = serde_json::from_str(&told.stdout).unwrap();
        assert_eq!(value["other_lines"], 1);
        assert_eq!(value["rows"][0]["model"], "b", "the most wasted first");
        let a = &value["rows"][1];
        for (name, is) in [
            ("calls", 4),
            ("lost", 1),
            ("abandoned", 2),
            ("retries", 1),
            ("output_tokens", 20),
            ("wasted_tokens", 4),
            ("waste_unknown", 1),
        ] {
            assert_eq!(a[name], is, "{name}");
        }
        assert_eq!(
            (a["wasted_seconds"].as_f64(), a["wasted_money"].as_f64()),
            (Some(3.5), Some(0.25))
        );
        let table = of(log, false).stdout;
        assert_eq!(table.lines().count(), 3, "{table}");
    }

    #[test]
    fn logs_that_were_rotated_are_summed_together() {
        let folder = std::env::temp_dir().join(format!("tidegate-report-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let files: Vec<_> = ["1", "2"].map(|name| folder.join(name)).into();
        for file in &files {
            std::fs::write(file, "{\"model\":\"a\",\"wait_end\":\"left\"}\nno\n").unwrap();
        }
        let told = report(&Report { files, json: true }, &b""[..]);
        let value: Value = serde_json::from_str(&told.stdout).unwrap();
        assert_eq!(
            (&value["other_lines"], &value["rows"][0]["calls"]),
            (&2.into(), &2.into())
        );
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn no_number_is_too_large_for_a_sum() {
        let line = r#"{"model":"a","wait_end":"left","output_tokens":18446744073709551615}"#;
        let told = of(&format!("{line}\n{line}\n"), true);
        let value: Value = serde_json::from_str(&told.stdout).unwrap();
        assert_eq!(value["rows"][0]["output_tokens"], u64::MAX);
    }

    #[test]
    fn what_is_no_log_is_said_so() {
        let told = of("hello\n", false);
        assert_eq!((told.exit, told.stdout.as_str()), (Exit::Failed, ""));
        assert!(told.stderr.contains("no line of an access log"));
        let none = Report {
            files: vec!["/nowhere".into()],
            json: false,
        };
        assert!(
            report(&none, &b""[..])
                .stderr
                .contains("/nowhere cannot be read")
        );
    }
}
