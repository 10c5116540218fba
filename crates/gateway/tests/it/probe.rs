//! The prober on the fake upstream's ways of treating a close: right from wrong, and "unknown" where nothing can be seen.

use std::time::Duration;

use serde_json::json;
use tidegate::config::Kind;
use tidegate::probe::{Report, Route, Settings, Verdict, run};
use tidegate_rig::Script;

use crate::support::{endpoint, upstream};

/// The first report that `fits`, else the third: a machine that stands still makes a server look late, but seldom thrice. One that runs on
/// does so each time.
async fn probe_until(
    (route, quick): (Route, bool),
    script: serde_json::Value,
    fits: impl Fn(&Report) -> bool,
) -> Report {
    for _ in 0..2 {
        let report = probe_by(route, script.clone(), quick).await;
        if fits(&report) {
            return report;
        }
    }
    probe_by(route, script, quick).await
}

/// A model of 100 tokens a second behind one slot or two, as it is when nothing else is said.
async fn probe(script: serde_json::Value, quick: bool) -> Report {
    probe_by(Route::Chat, script, quick).await
}

async fn probe_by(route: Route, script: serde_json::Value, quick: bool) -> Report {
    let mut whole = json!({"pace_ms": 10.0, "slots": 1, "idle_close_ms": 1500});
    let (Some(fields), serde_json::Value::Object(more)) = (whole.as_object_mut(), script) else {
        panic!("a script is an object");
    };
    fields.extend(more);
    let script = Script::from_json(&whole.to_string()).expect("a script");
    let up = upstream(script).await;
    let settings = Settings {
        endpoint: endpoint(up.addr()),
        key: None,
        model: None,
        route,
        quick,
        at_once: 4,
        tokens: 1_000_000,
        long: Duration::from_secs(4),
    };
    let mut said = Vec::new();
    let report = run(&settings, &mut |line| said.push(line.to_owned())).await;
    let report = report.unwrap_or_else(|failure| panic!("{}", failure.0));
    assert!(!said.is_empty());
    report
}

fn verdicts(report: &Report) -> Vec<Verdict> {
    ["stream", "whole"]
        .iter()
        .map(|id| report.finding(id).expect("a finding").verdict)
        .collect()
}

/// Milliseconds that a stream ran on.
fn late(report: &Report) -> u64 {
    report.finding("stream").and_then(|f| f.millis).unwrap_or(0)
}

async fn expect(script: serde_json::Value, both: Verdict, millis: std::ops::Range<u64>) {
    let fits = |r: &Report| verdicts(r) == [both; 2] && millis.contains(&late(r));
    let report = probe_until((Route::Chat, true), script.clone(), fits).await;
    let table = report.table();
    assert_eq!(verdicts(&report), [both; 2], "{script}\n{table}");
    assert!(millis.contains(&late(&report)), "{script}\n{table}");
    assert_eq!(report.calls_at_once, Some(1), "{table}");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_stops_at_once() {
    expect(json!({"on_close": "stop"}), Verdict::Stops, 0..301).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_finishes_its_step() {
    let after = json!({"on_close": {"after_tokens": 120}});
    tokio::join!(
        expect(json!({"on_close": "step"}), Verdict::Stops, 0..301),
        expect(after, Verdict::StopsLate, 900..2000),
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_stops_late() {
    expect(
        json!({"on_close": {"late_ms": 1200}}),
        Verdict::StopsLate,
        1000..2200,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_never_stops() {
    let script = json!({"on_close": "never"});
    let report = probe(script, true).await;
    let table = report.table();
    assert_eq!(verdicts(&report), [Verdict::RunsOn; 2], "{table}");
    assert!(late(&report) > 3000, "{table}");
    assert!(report.config.contains("on_abandon = \"drain\""), "{table}");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_looks_each_second_for_whole_answers_only() {
    let script = json!({"on_close": "stop", "on_close_plain": "never", "slots": 2});
    let is = [Verdict::Stops, Verdict::RunsOn];
    let report = probe_until((Route::Chat, true), script, |r| verdicts(r) == is).await;
    let table = report.table();
    assert_eq!(verdicts(&report), is, "{table}");
    assert!(report.config.contains("ask_stream = true"), "{table}");
    assert_eq!(report.calls_at_once, Some(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_polls() {
    // Each look comes up to 1 s after the close.
    let script = json!({"on_close": {"poll_ms": 1000}});
    let report = probe_until((Route::Chat, true), script, |r| late(r) < 1800).await;
    let table = report.table();
    let stopped = verdicts(&report);
    assert!(
        stopped
            .iter()
            .all(|v| matches!(v, Verdict::Stops | Verdict::StopsLate)),
        "{table}"
    );
    assert!(late(&report) < 1800, "{table}");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_whose_work_nobody_can_see_is_unknown() {
    let unseen = async |on_close: &str| {
        let report = probe(json!({"on_close": on_close, "slots": null}), true).await;
        let table = report.table();
        assert_eq!(
            verdicts(&report),
            [Verdict::Unknown; 2],
            "{on_close}\n{table}"
        );
        assert!(report.config.contains("# on_abandon: unknown"), "{table}");
        assert_eq!(report.calls_at_once, None);
    };
    tokio::join!(unseen("never"), unseen("bills"), unseen("stop"));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_shows_its_work_is_believed_without_being_full() {
    let shown = async |pages: &str, kind: Kind, on_close: &str, verdict: Verdict| {
        let script = json!({"on_close": on_close, "slots": 8, "pages": pages});
        let found = |r: &Report| r.finding("stream").map(|f| f.verdict);
        let fits = |r: &Report| found(r) == Some(verdict);
        let report = probe_until((Route::Chat, true), script, fits).await;
        let table = report.table();
        assert_eq!(report.kind, kind);
        let offered = match kind {
            Kind::Vllm => "# abandon.confirm = \"vllm-metrics\"",
            _ => "# abandon.confirm = \"llama-slots\"",
        };
        assert!(report.config.contains(offered), "{}", report.config);
        assert!(fits(&report), "{on_close} {table}");
    };
    tokio::join!(
        shown("vllm", Kind::Vllm, "stop", Verdict::Stops),
        shown("vllm", Kind::Vllm, "never", Verdict::RunsOn),
        shown("llama_cpp", Kind::LlamaCpp, "stop", Verdict::Stops),
        shown("llama_cpp", Kind::LlamaCpp, "never", Verdict::RunsOn),
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_whole_run_tells_of_queue_overload_usage_and_idle() {
    let script = json!({"capacity": 5, "retry_after": "3"});
    let forgotten = |r: &Report| r.finding("queued").map(|f| f.verdict) == Some(Verdict::Forgotten);
    let report = probe_until((Route::Chat, false), script, forgotten).await;
    let table = report.table();
    let verdict = |id| report.finding(id).expect("a finding").verdict;
    assert_eq!(verdict("queued"), Verdict::Forgotten, "{table}");
    assert_eq!(verdict("queue"), Verdict::Bounded, "{table}");
    assert_eq!(verdict("overload"), Verdict::Refuses, "{table}");
    assert!(
        report.finding("overload").unwrap().answer.contains("503"),
        "{table}"
    );
    assert_eq!(verdict("usage"), Verdict::OnTheWay, "{table}");
    assert_eq!(verdict("idle"), Verdict::Closes, "{table}");
    assert_eq!(
        verdict("prefill"),
        Verdict::Unknown,
        "its prompts take no time: {table}"
    );
    let json: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
    assert_eq!(json["findings"][0]["id"], "stream");
    // What was said to be the most it costs is.
    let plan = tidegate::probe::plan(&Settings {
        endpoint: tidegate::config::Endpoint::parse(&report.url).unwrap(),
        key: None,
        model: None,
        route: Route::Chat,
        quick: false,
        at_once: 4,
        tokens: 1_000_000,
        long: Duration::from_secs(4),
    });
    assert!(plan.contains("1000000 generated tokens"), "{plan}");
    assert!(
        report.spent.tokens < 1_000_000 && report.spent.calls > 10,
        "{table}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_begins_what_left_its_queue() {
    let report = probe(
        json!({"on_close": "stop", "on_close_plain": "never"}),
        false,
    )
    .await;
    let table = report.table();
    assert_eq!(
        report.finding("queued").map(|f| f.verdict),
        Some(Verdict::Launched),
        "{table}"
    );
}

/// The same questions by each API, and the same answers.
#[tokio::test(flavor = "multi_thread")]
async fn by_another_api_the_same_is_found() {
    let found = async |route, on_close: &str, expected| {
        let script = json!({"on_close": on_close, "usage": "yes"});
        let fits = |r: &Report| verdicts(r) == [expected; 2];
        let report = probe_until((route, true), script, fits).await;
        let table = report.table();
        assert_eq!(verdicts(&report), [expected; 2], "{route:?}\n{table}");
        assert_eq!(
            report.finding("usage").map(|f| f.verdict),
            Some(Verdict::AtTheEnd),
            "{table}"
        );
        assert_eq!(report.calls_at_once, Some(1), "{table}");
        assert!(table.contains(report.route), "{table}");
        assert!(!report.config.contains("confirm"), "it shows nothing");
        assert_eq!(
            report.config.contains("ask_usage"),
            route == Route::Completions
        );
    };
    tokio::join!(
        found(Route::Completions, "stop", Verdict::Stops),
        found(Route::Completions, "never", Verdict::RunsOn),
        found(Route::Messages, "stop", Verdict::Stops),
        found(Route::Messages, "never", Verdict::RunsOn),
        found(Route::Responses, "stop", Verdict::Stops),
        found(Route::Responses, "never", Verdict::RunsOn),
    );
}
