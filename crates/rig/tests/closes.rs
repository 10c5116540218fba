//! Ways of treating a close, what they cost, and what the server shows of it.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};
use tidegate_rig::script::Pages;
use tidegate_rig::{CallTruth, Ended, FakeUpstream, RawClient, Script};

const SOON: Duration = Duration::from_secs(10);
const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

async fn start(script: Script) -> FakeUpstream {
    FakeUpstream::start(ANY, script).await.expect("a port")
}

async fn ask(upstream: &FakeUpstream, stream: bool, rig: &Value) -> RawClient {
    let mut client = RawClient::connect(upstream.addr()).await.expect("connect");
    let body = json!({"model": "tiny", "messages": [], "stream": stream, "rig": rig});
    client
        .post("/v1/chat/completions", &body.to_string())
        .await
        .expect("send");
    client
}

async fn begun(upstream: &FakeUpstream, calls: u64, tokens: u64) {
    upstream
        .wait_for(|t| t.calls_begun == calls && t.tokens >= tokens, SOON)
        .await
        .expect("begun");
}

/// Three seconds of work, so that who leaves is gone before it is done.
const TOKENS: u64 = 600;

/// One call whose client leaves after two tokens, until it has ended.
async fn left(stream: bool, way: Value) -> CallTruth {
    let upstream = start(Script::default()).await;
    let rig = json!({"tokens": TOKENS, "pace_ms": 5, "on_close": way});
    let client = ask(&upstream, stream, &rig).await;
    begun(&upstream, 1, 2).await;
    client.leave_rst().expect("reset");
    let ended = upstream.wait_for_call(|c| c.ended.is_some(), SOON).await;
    let truth = upstream.truth();
    assert_eq!((truth.running, truth.unattended, truth.hidden), (0, 0, 0));
    assert_eq!(truth.max_unattended, 1);
    ended.expect("ends")
}

#[tokio::test]
async fn each_way_holds_for_streams_and_for_answers_in_one_piece() {
    let mut calls = tokio::task::JoinSet::new();
    for stream in [true, false] {
        // Who stood still has tokens to make up for, and may make them after the close: bounds from above are far.
        for (way, late, ended) in [
            (json!("stop"), 0..=0, Ended::PeerRst),
            (json!("step"), 0..=0, Ended::PeerRst),
            (json!({"after_tokens": 3}), 3..=3, Ended::PeerRst),
            (json!({"late_ms": 1500}), 1..=TOKENS - 3, Ended::PeerRst),
            (json!({"poll_ms": 100}), 0..=300, Ended::PeerRst),
            (json!("never"), 1..=TOKENS - 2, Ended::RanOn),
            (json!("bills"), 1..=TOKENS - 2, Ended::RanOn),
        ] {
            calls.spawn(async move {
                let call = left(stream, way.clone()).await;
                assert_eq!(call.ended, Some(ended), "{way} {stream}");
                let after = call.tokens_after_peer_left;
                assert!(late.contains(&after), "{way} {stream}: {after} tokens");
                if ended == Ended::RanOn {
                    assert_eq!(call.tokens, TOKENS, "{way} {stream}");
                }
                if let Some(ms) = way["late_ms"].as_u64() {
                    let late = call.ended_ns.expect("ended") - call.peer_gone_ns.expect("gone");
                    assert!(late >= (ms - 1) * 1_000_000, "{way} {stream}: {late}");
                }
            });
        }
    }
    calls.join_all().await;
}

#[tokio::test]
async fn answers_in_one_piece_may_be_treated_otherwise() {
    let script = Script {
        on_close_plain: Some(tidegate_rig::script::OnClose::Never),
        tokens: Some(TOKENS),
        pace_ms: 5.0,
        ..Script::default()
    };
    for (stream, ended) in [(true, Ended::PeerRst), (false, Ended::RanOn)] {
        let upstream = start(script.clone()).await;
        let client = ask(&upstream, stream, &json!({})).await;
        begun(&upstream, 1, 2).await;
        client.leave_rst().expect("reset");
        let call = upstream.wait_for_call(|c| c.ended.is_some(), SOON).await;
        assert_eq!(call.expect("ends").ended, Some(ended), "{stream}");
    }
}

#[tokio::test]
async fn the_prompts_step_is_finished_and_no_token_is_made() {
    let upstream = start(Script::default()).await;
    let rig = json!({"delay_ms": 1500, "on_close": "step"});
    let client = ask(&upstream, true, &rig).await;
    begun(&upstream, 1, 0).await;
    client.leave_rst().expect("reset");
    let call = upstream.wait_for_call(|c| c.ended.is_some(), SOON).await;
    let call = call.expect("ends");
    assert_eq!((call.ended, call.tokens), (Some(Ended::PeerRst), 0));
    let ended = call.ended_ns.expect("ended");
    assert!(
        ended - call.body_ns.expect("read") >= 1_499_000_000,
        "{call:?}"
    );
}

#[tokio::test]
async fn who_waits_for_a_slot_is_forgotten_or_is_not() {
    for (way, prompts) in [("step", 1), ("stop", 1), ("never", 2)] {
        let script = Script {
            slots: Some(1),
            prompt_tokens: 7,
            ..Script::default()
        };
        let upstream = start(script).await;
        let rig = json!({"tokens": 2, "stall": {"at": {"event": 1}}});
        let first = ask(&upstream, true, &rig).await;
        begun(&upstream, 1, 0).await;
        let second = ask(&upstream, true, &json!({"tokens": 3, "on_close": way})).await;
        upstream
            .wait_for(|t| t.waiting == 1, SOON)
            .await
            .expect("waits");
        second.leave_rst().expect("reset");
        upstream
            .wait_for(|t| t.max_unattended == 1, SOON)
            .await
            .expect("seen");
        first.leave_rst().expect("reset");
        let truth = upstream
            .wait_for(|t| t.running == 0, SOON)
            .await
            .expect("ends");
        assert_eq!((truth.waiting, truth.max_waiting), (0, 1), "{way}");
        assert_eq!(truth.prompt_tokens, prompts * 7, "{way}");
    }
}

async fn page(upstream: &FakeUpstream, path: &str) -> String {
    let mut client = RawClient::connect(upstream.addr()).await.expect("connect");
    client.request("GET", path, &[], b"").await.expect("send");
    assert_eq!(client.head().await.expect("head").status, 200, "{path}");
    let (body, _) = client.rest().await.expect("body");
    String::from_utf8(body).expect("text")
}

#[tokio::test]
async fn what_bills_on_is_not_shown_and_what_runs_on_is() {
    for (way, shown) in [("never", 1), ("bills", 0)] {
        let script = Script {
            pages: Pages::Vllm,
            ..Script::default()
        };
        let upstream = start(script).await;
        let rig = json!({"end": "never", "pace_ms": 5, "on_close": way});
        let client = ask(&upstream, true, &rig).await;
        begun(&upstream, 1, 2).await;
        let running = |n: u64| {
            format!("vllm:num_requests_running{{engine=\"0\",model_name=\"tiny\"}} {n}.0\n")
        };
        assert!(page(&upstream, "/metrics").await.contains(&running(1)));
        client.leave_rst().expect("reset");
        upstream
            .wait_for(|t| t.unattended == 1, SOON)
            .await
            .expect("seen");
        let open = |n| upstream.wait_for(move |t| t.connections_open == n, SOON);
        // Of those for pages none stays; this call's does where it shows.
        open(shown).await.expect("closed");
        let text = page(&upstream, "/metrics").await;
        assert!(text.contains(&running(shown)), "{way}: {text}");
        let truth = upstream.truth();
        assert_eq!((truth.running, truth.hidden), (1, 1 - shown), "{way}");
        upstream.cut_all(tidegate_rig::PeerEnd::Fin);
        let truth = upstream
            .wait_for(|t| t.running == 0, SOON)
            .await
            .expect("cut");
        assert_eq!((truth.unattended, truth.hidden), (0, 0), "{way}");
    }
}

#[tokio::test]
async fn llama_cpps_pages_tell_slots_and_who_is_deferred() {
    let script = Script {
        pages: Pages::LlamaCpp,
        slots: Some(2),
        ..Script::default()
    };
    let upstream = start(script).await;
    let rig = json!({"tokens": 2, "stall": {"at": {"event": 1}}});
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(ask(&upstream, true, &rig).await);
    }
    upstream
        .wait_for(|t| t.waiting == 1, SOON)
        .await
        .expect("waits");
    let slots: Value = serde_json::from_str(&page(&upstream, "/slots").await).expect("json");
    let busy: Vec<_> = slots
        .as_array()
        .expect("list")
        .iter()
        .map(|s| &s["is_processing"])
        .collect();
    assert_eq!(busy, [&json!(true), &json!(true)]);
    let text = page(&upstream, "/metrics").await;
    for line in [
        "llamacpp:requests_processing 2\n",
        "llamacpp:requests_deferred 1\n",
    ] {
        assert!(text.contains(line), "{text}");
    }
    assert_eq!(page(&upstream, "/health").await, "{\"status\":\"ok\"}");
    assert_eq!(upstream.truth().calls_begun, 3, "a page is no call");
}
