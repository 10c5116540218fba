//! One place for each thing.

use std::collections::BTreeSet;

use crate::text::{files_under, first_word, found, gateway, module_of, none, pages, read, words};

/// Compared with what was answered, never chosen.
const READ_STATUSES: [&str; 6] = [
    "crates/gateway/src/call/answer.rs",
    "crates/gateway/src/call/listing.rs",
    "crates/gateway/src/serve/http1/encode.rs",
    "crates/gateway/src/upstream/http1/decode.rs",
    "crates/gateway/src/upstream/http1/head.rs",
    "crates/gateway/src/upstream/http1/mod.rs",
];

#[test]
fn status_codes_are_chosen_at_the_edge() {
    let mut breaches = Vec::new();
    for file in gateway() {
        if ["front", "admin"].contains(&module_of(&file.path)) {
            continue;
        }
        for (number, line) in file.code() {
            let named = line.split("StatusCode::").skip(1).any(|rest| {
                let word = first_word(rest).unwrap_or_default();
                word.chars().all(|c| c.is_ascii_uppercase() || c == '_')
                    || word.starts_with("from_")
            });
            let read = READ_STATUSES.contains(&file.path.as_str())
                && (line.contains("== StatusCode::") || line.contains("!= StatusCode::"));
            if named && !read {
                breaches.push(format!("{}:{number}: {}", file.path, line.trim()));
            }
        }
    }
    none(
        &breaches,
        "only front/ and admin/ choose a status; the rest of the gateway says why with a `Rejection`",
    );
}

const METRICS: [&str; 3] = [
    "crates/gateway/src/telemetry/metrics.rs",
    "crates/gateway/src/telemetry/limiters.rs",
    "crates/gateway/src/telemetry/process.rs",
];
/// Kinds of metric, whatever they are named.
const KINDS: [&str; 2] = [
    "crates/gateway/src/telemetry/histogram.rs",
    "crates/gateway/src/telemetry/shares.rs",
];

#[test]
fn metrics_are_named_in_one_file() {
    let mut breaches = Vec::new();
    let names = metric_names();
    for file in gateway()
        .iter()
        .filter(|file| !METRICS.contains(&file.path.as_str()))
    {
        let parts = ["registry", "family", "collector", "encoding", "histogram"];
        for part in parts
            .iter()
            .filter(|_| !KINDS.contains(&file.path.as_str()))
        {
            breaches.extend(found(file, &format!("prometheus_client::{part}")));
            breaches.extend(found(file, &format!("prometheus_client::metrics::{part}")));
        }
        for (number, line) in file.code() {
            let quoted = line.split('"').skip(1).step_by(2).flat_map(words);
            for word in quoted.filter(|word| names.contains(*word)) {
                breaches.push(format!("{}:{number}: {word}", file.path));
            }
        }
    }
    none(
        &breaches,
        "families are made and named in telemetry/metrics.rs, telemetry/limiters.rs and telemetry/process.rs alone",
    );
}

/// As they are scraped, from the page that a test keeps equal to the code.
fn metric_names() -> BTreeSet<String> {
    let page = read("docs/metrics.md");
    let names: BTreeSet<_> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
        .filter(|name| name.starts_with("tidegate_"))
        .map(str::to_owned)
        .collect();
    assert!(
        names.len() > 40,
        "docs/metrics.md lists {} families",
        names.len()
    );
    names
}

#[test]
fn metrics_that_pages_and_dashboards_name_exist() {
    let names = metric_names();
    let mut texts = pages();
    for extension in ["json", "yaml", "yml", "toml"] {
        texts.append(&mut files_under("deploy", extension));
    }
    let crates = ["tidegate_limiter", "tidegate_wire", "tidegate_rig"];
    let mut breaches = Vec::new();
    for file in &texts {
        for (number, line) in (1..).zip(file.text.lines()) {
            for word in words(line).filter(|word| word.starts_with("tidegate_")) {
                let parts = ["_bucket", "_sum", "_count"];
                let family = parts.iter().find_map(|part| word.strip_suffix(part));
                let known = names.contains(word) || family.is_some_and(|f| names.contains(f));
                if !known && !word.ends_with('_') && !crates.contains(&word) {
                    breaches.push(format!("{}:{number}: {word}", file.path));
                }
            }
        }
    }
    none(
        &breaches,
        "a query for a metric that does not exist is silently empty",
    );
}

/// Detached work that is allowed, with its reason.
const DETACHED: [(&str, &str, &str); 1] = [(
    "crates/gateway/src/upstream/exchange.rs",
    "TokioExecutor",
    "hyper's HTTP/2 client writes request bodies in tasks that end with their connection",
)];

#[test]
fn every_task_is_tracked() {
    let mut breaches = Vec::new();
    for file in gateway() {
        for what in [
            "tokio::spawn",
            "task::spawn",
            "spawn_local",
            "TokioExecutor",
        ] {
            let excepted = DETACHED
                .iter()
                .any(|(path, which, _)| *path == file.path && *which == what);
            let found = found(&file, what);
            if excepted {
                assert!(
                    !found.is_empty(),
                    "the exception for {what} in {} is not used any more",
                    file.path
                );
            } else {
                breaches.extend(found);
            }
        }
    }
    none(
        &breaches,
        "spawn on a TaskTracker: a drain waits for what it knows",
    );
}

#[test]
fn time_can_be_stopped() {
    let mut breaches = Vec::new();
    for file in gateway() {
        let std_time = file.code().filter(|(_, line)| line.contains("std::time"));
        breaches.extend(
            std_time
                .filter(|(_, line)| words(line).any(|word| word == "Instant"))
                .map(|(number, line)| format!("{}:{number}: {}", file.path, line.trim())),
        );
    }
    none(
        &breaches,
        "tokio::time::Instant, so that tests can stop the clock",
    );
}
