use super::ask::{Call, Dress, Server};
use super::report::{Finding, Report, Verdict, config};
use super::{Allowance, Route, Settings, plan};
use crate::config::{Endpoint, Kind, Sources};
use std::time::Duration;

fn finding(id: &'static str, verdict: Verdict, millis: Option<u64>) -> Finding {
    Finding {
        id,
        question: "what",
        verdict,
        answer: "so".to_owned(),
        millis,
        tokens: None,
    }
}

fn report(findings: Vec<Finding>) -> Report {
    let mut report = Report {
        url: "http://127.0.0.1:8000".to_owned(),
        model: "m".to_owned(),
        route: Route::Chat.path(),
        kind: Kind::LlamaCpp,
        shows: "nothing",
        confirm: None,
        first_token_ms: 1,
        tokens_per_second: 10.0,
        calls_at_once: Some(2),
        findings,
        spent: Allowance {
            calls: 1,
            tokens: 1,
            prompt_tokens: 1,
        },
        seconds: 1.0,
        config: String::new(),
    };
    report.config = config(&report);
    report
}

/// What the block means to the gateway.
fn settings(report: &Report) -> crate::config::Upstream {
    let folder = std::env::temp_dir().join(format!(
        "tidegate-probe-{}-{}",
        std::process::id(),
        fastrand::u64(..)
    ));
    std::fs::write(&folder, &report.config).unwrap();
    let loaded = crate::config::load(&Sources::file(folder.to_str().unwrap()));
    std::fs::remove_file(&folder).unwrap();
    loaded
        .unwrap_or_else(|mistakes| panic!("{mistakes}\n{}", report.config))
        .config
        .upstreams
        .remove(0)
}

#[test]
fn the_block_is_a_configuration_and_says_what_was_found() {
    let found = settings(&report(vec![
        finding("stream", Verdict::Stops, Some(30)),
        finding("prefill", Verdict::StopsLate, Some(1100)),
        finding("whole", Verdict::StopsLate, Some(1600)),
        finding("whole_beside", Verdict::RunsOn, Some(5000)),
        finding("usage", Verdict::AtTheEnd, None),
        finding("idle", Verdict::Closes, Some(4700)),
    ]));
    assert_eq!(found.settle, Duration::from_millis(1250));
    assert_eq!(found.pool.idle, Duration::from_millis(4000));
    assert!(found.ask_stream && found.ask_usage);
    assert_eq!(found.abandon.contract, crate::config::Contract::Cancel);
    assert_eq!(found.slots.get(), 2);
}

#[test]
fn a_server_that_runs_on_is_drained_and_what_is_unknown_is_the_kinds() {
    let found = settings(&report(vec![finding(
        "stream",
        Verdict::RunsOn,
        Some(5000),
    )]));
    assert_eq!(found.abandon.contract, crate::config::Contract::Drain);
    let unknown = report(vec![finding("stream", Verdict::Unknown, None)]);
    assert!(
        unknown.config.contains("# on_abandon: unknown"),
        "{}",
        unknown.config
    );
    assert_eq!(settings(&unknown).settle, Kind::LlamaCpp.row().settle);
    assert!(
        unknown.table().contains("unknown: so"),
        "{}",
        unknown.table()
    );
}

#[test]
fn what_it_may_cost_is_told_first() {
    let settings = Settings {
        endpoint: Endpoint::parse("http://127.0.0.1:8000").unwrap(),
        key: None,
        model: None,
        route: Route::Chat,
        quick: true,
        at_once: 8,
        tokens: 12_345,
        long: Duration::from_secs(6),
    };
    let plan = plan(&settings);
    assert!(plan.contains("12345 generated tokens"), "{plan}");
}

/// Off as it stands, since what it needs cannot be seen from outside; on without the comment's sign.
#[test]
fn the_servers_own_count_is_offered_and_not_switched_on() {
    use crate::config::Confirm;
    for (kind, confirm, is) in [
        (Kind::Vllm, "vllm-metrics", Confirm::VllmMetrics),
        (Kind::LlamaCpp, "llama-slots", Confirm::LlamaSlots),
    ] {
        let mut report = report(vec![
            finding("stream", Verdict::Stops, Some(30)),
            finding("idle", Verdict::Closes, Some(4700)),
        ]);
        (report.kind, report.confirm) = (kind, Some(confirm));
        report.config = config(&report);
        assert_eq!(settings(&report).abandon.confirm, Confirm::Off);
        report.config = report
            .config
            .replace("# abandon.confirm", "abandon.confirm");
        assert_eq!(settings(&report).abandon.confirm, is, "{}", report.config);
    }
}

#[test]
fn the_block_of_another_api_asks_for_no_usage() {
    let mut report = report(vec![finding("usage", Verdict::AtTheEnd, None)]);
    for (route, asked) in [
        (Route::Completions, true),
        (Route::Messages, false),
        (Route::Responses, false),
    ] {
        report.route = route.path();
        report.config = config(&report);
        assert_eq!(
            report.config.contains("ask_usage"),
            asked,
            "{}",
            report.config
        );
    }
}

/// Some tokens have no text. A call of one such token has none with a text, and took its time all the same.
#[tokio::test]
async fn a_first_token_without_a_text_is_one() {
    let script = tidegate_rig::Script {
        tokens: Some(1),
        token_text: Some(String::new()),
        ..tidegate_rig::Script::default()
    };
    let nowhere = "127.0.0.1:0".parse().unwrap();
    let upstream = tidegate_rig::FakeUpstream::start(nowhere, script).await;
    let upstream = upstream.unwrap();
    let server = Server {
        endpoint: Endpoint::parse(&format!("http://{}", upstream.addr())).unwrap(),
        key: None,
        tls: None,
        model: "tiny".to_owned(),
        route: Route::Chat,
        dress: Dress {
            ignore_eos: false,
            bound: "max_tokens",
        },
    };
    let call = Call {
        stream: true,
        tokens: 1,
        prompt: "hello".to_owned(),
        usage: false,
    };
    let within = Duration::from_secs(20);
    let took = server.first_token(&call, within).await;
    assert!(took.is_ok_and(|took| took < within));
    assert_eq!(upstream.truth().calls_begun, 1);
}
