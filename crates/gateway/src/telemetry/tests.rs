//! `docs/metrics.md` says what a scrape shows.

use std::num::NonZeroUsize;
use std::sync::Arc;

use tidegate_limiter::{Limiter, Limits};

use super::metrics::*;
use crate::config::tests::docs::up_to_date;

/// Metrics with one sample in every family that shows none by itself.
#[expect(clippy::too_many_lines, reason = "one line per family, nothing else")]
fn touched() -> Metrics {
    let m = Metrics::new();
    let upstream: Arc<str> = "u".into();
    let one = UpstreamLabel {
        upstream: Arc::clone(&upstream),
    };
    let phase = PhaseLabels {
        upstream: Arc::clone(&upstream),
        phase: "p",
    };
    let reason = ReasonLabel { reason: "r" };
    let upstream_reason = UpstreamReason {
        upstream: Arc::clone(&upstream),
        reason: "r",
    };
    let endpoint = EndpointLabels {
        upstream: Arc::clone(&upstream),
        endpoint: "e".into(),
    };
    let side = SideLabel { side: "s" };
    m.calls.get_or_create_owned(&CallLabels {
        upstream: Arc::clone(&upstream),
        route: "r",
        outcome: "o",
    });
    m.refusals.get_or_create_owned(&reason);
    m.timeouts.get_or_create_owned(&TierLabels {
        upstream: Arc::clone(&upstream),
        tier: "t",
    });
    m.disconnects.get_or_create_owned(&phase);
    m.overruns.get_or_create_owned(&BoundLabels {
        upstream: Arc::clone(&upstream),
        bound: "b",
    });
    let waste = WasteLabels {
        upstream: Arc::clone(&upstream),
        model: "m".into(),
        key: "k".into(),
    };
    m.wasted_seconds.get_or_create_owned(&waste);
    m.wasted_money.get_or_create_owned(&waste);
    m.wasted_tokens.get_or_create_owned(&WastedTokenLabels {
        upstream: Arc::clone(&upstream),
        model: "m".into(),
        key: "k".into(),
        source: "s",
    });
    let result = ConfirmLabels {
        upstream: Arc::clone(&upstream),
        result: "r",
    };
    m.confirmations.get_or_create_owned(&result);
    m.confirm_polls.get_or_create_owned(&result);
    m.abandoned_retries.get_or_create_owned(&one);
    m.attaches.get_or_create_owned(&one);
    m.attach_lost.get_or_create_owned(&BoundLabels {
        upstream: Arc::clone(&upstream),
        bound: "b",
    });
    m.retries.get_or_create_owned(&upstream_reason);
    m.call_seconds.get_or_create_owned(&one);
    m.phase_seconds.get_or_create_owned(&phase);
    m.ttft_seconds.get_or_create_owned(&one);
    m.tokens.get_or_create_owned(&TokenLabels {
        upstream: Arc::clone(&upstream),
        direction: "d",
        source: "s",
    });
    m.usage_unknown.get_or_create_owned(&one);
    m.malformed_events.get_or_create_owned(&one);
    m.connections.get_or_create_owned(&side);
    m.connections_opened.get_or_create_owned(&side);
    m.connections_refused.get_or_create_owned(&reason);
    m.connections_ended.get_or_create_owned(&reason);
    m.upstream_connections.get_or_create_owned(&endpoint);
    m.upstream_connects.get_or_create_owned(&endpoint);
    m.upstream_connect_errors
        .get_or_create_owned(&upstream_reason);
    m.endpoint_ejected.get_or_create_owned(&endpoint);
    m.loop_lag_seconds
        .get_or_create_owned(&WorkerLabel { worker: 0 });
    m.config_reloads
        .get_or_create_owned(&ResultLabel { result: "r" });
    m.certificate_expiry
        .get_or_create_owned(&FileLabel { file: "f".into() });
    let one = NonZeroUsize::MIN;
    m.show_limiter(&upstream, &Limiter::new(Limits::new(one)).unwrap());
    m
}

/// A row of the table from the text of one family: help, type, samples.
fn row(family: &str) -> String {
    let mut lines = family.lines();
    let (name, help) = lines.next().unwrap().split_once(' ').unwrap();
    let field = |start: &str| {
        let start = format!("# {start} {name} ");
        family.lines().find_map(|line| line.strip_prefix(&start))
    };
    let kind = field("TYPE").unwrap();
    let sample = lines
        .find(|line| line.starts_with(name))
        .unwrap_or_else(|| panic!("{name} shows no sample: touch it"));
    let labels: Vec<_> = sample
        .split_once('{')
        .map_or("", |(_, labels)| labels)
        .split(',')
        .filter_map(|label| label.split_once('='))
        .map(|(label, _)| format!("`{label}`"))
        .filter(|label| label != "`le`")
        .collect();
    let shown = match kind {
        "counter" => format!("{name}_total"),
        "info" => format!("{name}_info"),
        _ => name.to_owned(),
    };
    let help = help.trim_end_matches('.').replace('|', "\\|");
    format!("| `{shown}` | {kind} | {} | {help} |\n", labels.join(", "))
}

#[test]
fn the_page_is_up_to_date() {
    let mut page = include_str!("metrics.head.md").to_owned();
    let text = touched().encode();
    for family in text.trim_start_matches("# HELP ").split("\n# HELP ") {
        page += &row(family);
    }
    up_to_date("docs/metrics.md", &page);
}
