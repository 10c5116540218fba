//! The fake upstream's healthy answers and its books.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;
use tidegate_rig::{BodyEnd, Ended, FakeUpstream, PeerEnd, RawClient, Script};

const SOON: Duration = Duration::from_secs(5);
const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

async fn start() -> FakeUpstream {
    FakeUpstream::start(ANY, Script::default())
        .await
        .expect("a loopback port")
}

fn chat(extra: serde_json::Value) -> String {
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]});
    if let (Some(fields), serde_json::Value::Object(extra)) = (body.as_object_mut(), extra) {
        fields.extend(extra);
    }
    body.to_string()
}

#[tokio::test]
async fn a_chat_stream_looks_like_vllm() {
    let upstream = start().await;
    let mut client = RawClient::connect(upstream.addr()).await.expect("connect");
    let body = chat(json!({
        "stream": true, "max_tokens": 6, "stream_options": {"include_usage": true},
    }));
    client
        .post("/v1/chat/completions", &body)
        .await
        .expect("send");
    let head = client.head().await.expect("head");
    assert_eq!(head.status, 200);
    assert_eq!(
        head.header("content-type"),
        Some("text/event-stream; charset=utf-8")
    );
    assert_eq!(head.header("transfer-encoding"), Some("chunked"));
    let (events, end) = client.all_events().await.expect("events");
    assert_eq!(end, BodyEnd::Clean);
    assert_eq!(events.len(), 9, "role, 6 tokens, usage, sentinel");
    let first = events[0].json().expect("json");
    assert_eq!(first["choices"][0]["delta"]["role"], "assistant");
    let last = events[6].json().expect("json");
    assert_eq!(last["choices"][0]["finish_reason"], "length");
    let usage = events[7].json().expect("json");
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], 6);
    assert_eq!(events[8].data, "[DONE]");
    let truth = upstream
        .wait_for(|t| t.ended_complete == 1, SOON)
        .await
        .expect("ended");
    assert_eq!((truth.tokens, truth.running, truth.max_running), (6, 0, 1));
}

#[tokio::test]
async fn every_route_answers_in_json_and_the_connection_is_kept() {
    let upstream = start().await;
    let mut client = RawClient::connect(upstream.addr()).await.expect("connect");
    for (path, field) in [
        ("/v1/chat/completions", "choices"),
        ("/v1/completions", "choices"),
        ("/v1/embeddings", "data"),
        ("/v1/responses", "output"),
        ("/v1/messages", "content"),
        ("/v1/messages/count_tokens", "input_tokens"),
        ("/v1/models", "data"),
        ("/v1/else", "body_hash"),
    ] {
        for stream in [false, true] {
            client
                .post(path, &chat(json!({"stream": stream, "max_tokens": 3})))
                .await
                .expect("send");
            let head = client.head().await.expect("head");
            assert_eq!(head.status, 200, "{path}");
            let (body, end) = client.rest().await.expect("body");
            assert_eq!(end, BodyEnd::Clean, "{path}");
            if stream && head.header("content-length").is_none() {
                assert!(body.starts_with(b"event: ") || body.starts_with(b"data: "));
            } else {
                let json: serde_json::Value = serde_json::from_slice(&body).expect(path);
                assert!(!json[field].is_null(), "{path}: {json}");
            }
        }
    }
    let calls = upstream.calls();
    assert_eq!(calls.len(), 16);
    assert!(calls.iter().all(|c| c.connection == 1));
    assert_eq!(calls[15].nth_on_connection, 16);
}

/// Who has an answer's end sends the next call at once, while the writer's task may still be at the first.
#[tokio::test]
async fn an_answer_that_is_only_written_is_no_work() {
    let ways = ["/v1/chat/completions", "/v1/messages", "/v1/responses"];
    for (path, stream) in ways.iter().flat_map(|p| [(p, true), (p, false)]) {
        let upstream = start().await;
        let lingers = chat(json!({"stream": stream, "rig": {"end_delay_ms": 3_600_000}}));
        let mut first = RawClient::connect(upstream.addr()).await.expect("connect");
        first.post(path, &lingers).await.expect("send");
        let made = upstream.wait_for(|t| t.finishing == 1, SOON).await;
        made.expect("it finishes");
        let mut next = RawClient::connect(upstream.addr()).await.expect("connect");
        let ends = chat(json!({"stream": stream}));
        next.post(path, &ends).await.expect("send");
        next.head().await.expect("head");
        next.rest().await.expect("an answer");
        let one_left = upstream.wait_for(|t| t.ended() == 1, SOON).await;
        let truth = one_left.expect("the second has ended");
        let seen = (truth.running, truth.finishing, truth.max_running);
        assert_eq!(seen, (1, 1, 1), "{path} {stream}: {truth:?}");
    }
}

#[tokio::test]
async fn a_messages_stream_is_whole() {
    let upstream = start().await;
    let mut client = RawClient::connect(upstream.addr()).await.expect("connect");
    let body = chat(json!({"stream": true, "rig": {"reasoning_tokens": 2, "tool_calls": 1}}));
    client.post("/v1/messages", &body).await.expect("send");
    client.head().await.expect("head");
    let (events, _) = client.all_events().await.expect("events");
    let names: Vec<&str> = events.iter().map(|e| e.name.as_str()).collect();
    assert_eq!(names[..2], ["message_start", "ping"]);
    assert_eq!(names[names.len() - 2..], ["message_delta", "message_stop"]);
    let (starts, stops) = ("content_block_start", "content_block_stop");
    for name in [starts, stops] {
        assert_eq!(names.iter().filter(|n| **n == name).count(), 2, "{name}");
    }
    assert!(events.iter().all(|e| e.json().is_some()));
}

#[tokio::test]
async fn a_responses_stream_numbers_its_events() {
    let upstream = start().await;
    let mut client = RawClient::connect(upstream.addr()).await.expect("connect");
    client
        .post("/v1/responses", &chat(json!({"stream": true})))
        .await
        .expect("send");
    client.head().await.expect("head");
    let (events, _) = client.all_events().await.expect("events");
    for (n, event) in events.iter().enumerate() {
        let json = event.json().expect("json");
        assert_eq!(json["sequence_number"], n, "{}", event.name);
        assert_eq!(json["type"], event.name.as_str());
    }
}

#[tokio::test]
async fn the_book_knows_what_crossed() {
    let upstream = start().await;
    let mut client = RawClient::connect(upstream.addr()).await.expect("connect");
    client
        .send(
            "POST /v1/x?y=1 HTTP/1.1\r\nHost: a\r\nX-Test-Id: t1\r\nX-Odd: b\r\n\
             Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        )
        .await
        .expect("send");
    client.head().await.expect("head");
    let (body, _) = client.rest().await.expect("body");
    let echo: serde_json::Value = serde_json::from_slice(&body).expect("json");
    assert_eq!(echo["body_length"], 3);
    let call = upstream
        .wait_for_call(|c| c.ended.is_some(), SOON)
        .await
        .expect("ended");
    assert_eq!(call.path, "/v1/x?y=1");
    assert_eq!(call.header("x-odd"), Some("b"));
    assert_eq!(call.body.as_deref(), Some(b"abc".as_slice()));
    assert_eq!((call.test_id.as_deref(), call.attempt), (Some("t1"), 1));
}

#[tokio::test]
async fn attempts_of_one_test_are_counted_and_scripted_apart() {
    let upstream = start().await;
    let body = chat(json!({"rig": {"id": "r", "attempts": [
        {"status": 503, "retry_after": "1"}, {"status": 529}, {},
    ]}}));
    for status in [503, 529, 200, 200] {
        let mut client = RawClient::connect(upstream.addr()).await.expect("connect");
        client
            .post("/v1/chat/completions", &body)
            .await
            .expect("send");
        let head = client.head().await.expect("head");
        assert_eq!(head.status, status);
        assert_eq!(head.header("retry-after").is_some(), status == 503);
    }
    let attempts: Vec<u32> = upstream.calls().iter().map(|c| c.attempt).collect();
    assert_eq!(attempts, [1, 2, 3, 4]);
}

#[tokio::test]
async fn a_misspelt_script_is_refused() {
    let upstream = start().await;
    let mut client = RawClient::connect(upstream.addr()).await.expect("connect");
    client
        .post("/v1/chat/completions", &chat(json!({"rig": {"tokenz": 3}})))
        .await
        .expect("send");
    assert_eq!(client.head().await.expect("head").status, 400);
    let (body, _) = client.rest().await.expect("body");
    assert!(String::from_utf8_lossy(&body).contains("tokenz"));
}

/// Streams three tokens' worth, then leaves; what the upstream saw.
async fn leave(rig: serde_json::Value, rst: bool) -> (FakeUpstream, tidegate_rig::CallTruth) {
    let upstream = start().await;
    let mut client = RawClient::connect(upstream.addr()).await.expect("connect");
    client
        .post(
            "/v1/chat/completions",
            &chat(json!({"stream": true, "rig": rig})),
        )
        .await
        .expect("send");
    client.head().await.expect("head");
    assert_eq!(client.events(3).await.expect("events").len(), 3);
    if rst {
        client.leave_rst().expect("reset");
    } else {
        client.leave_fin();
    }
    let call = upstream
        .wait_for_call(|c| c.ended.is_some(), SOON)
        .await
        .expect("the work ends");
    (upstream, call)
}

#[tokio::test]
async fn a_close_is_seen_in_silence_by_fin_and_by_rst() {
    let silent = json!({"tokens": 9, "stall": {"at": {"event": 3}}});
    for (rst, peer, ended) in [
        (false, PeerEnd::Fin, Ended::PeerFin),
        (true, PeerEnd::Rst, Ended::PeerRst),
    ] {
        let (upstream, call) = leave(silent.clone(), rst).await;
        assert_eq!((call.peer, call.ended), (Some(peer), Some(ended)));
        assert!(call.peer_gone_ns.is_some());
        assert_eq!(call.tokens_after_peer_left, 0);
        upstream
            .wait_for(|t| t.connections_open == 0, SOON)
            .await
            .expect("closed");
    }
}

#[tokio::test]
async fn a_close_is_seen_while_a_write_is_blocked() {
    let upstream = start().await;
    let mut client = RawClient::connect_slow(upstream.addr(), 4096)
        .await
        .expect("connect");
    let rig = json!({"tokens": 100_000, "event_bytes": 65536});
    client
        .post(
            "/v1/chat/completions",
            &chat(json!({"stream": true, "rig": rig})),
        )
        .await
        .expect("send");
    let blocked = |t: &tidegate_rig::Truth| t.bytes_written > 100_000;
    upstream.wait_for(blocked, SOON).await.expect("writes");
    client.leave_rst().expect("reset");
    let call = upstream
        .wait_for_call(|c| c.ended.is_some(), SOON)
        .await
        .expect("ends");
    assert_eq!(call.ended, Some(Ended::PeerRst));
}

#[tokio::test]
async fn work_that_runs_on_is_counted() {
    let rig = json!({"tokens": 300, "pace_ms": 10, "on_close": "never"});
    let (upstream, call) = leave(rig, true).await;
    assert_eq!(call.ended, Some(Ended::RanOn));
    assert_eq!(call.tokens, 300);
    assert!(call.tokens_after_peer_left > 0, "{call:?}");
    let truth = upstream.truth();
    assert_eq!(truth.tokens_after_peer_left, call.tokens_after_peer_left);
}

#[tokio::test]
async fn work_stops_after_so_many_tokens_or_so_late() {
    let rig = json!({"tokens": 4000, "pace_ms": 2, "on_close": {"after_tokens": 5}});
    let (_, call) = leave(rig, false).await;
    assert_eq!(call.tokens_after_peer_left, 5);
    let rig = json!({"tokens": 4000, "pace_ms": 2, "on_close": {"late_ms": 1500}});
    let (_, call) = leave(rig, false).await;
    assert!(call.tokens_after_peer_left > 0, "{call:?}");
    let gone = call.peer_gone_ns.expect("gone");
    let ended = call.ended_ns.expect("ended");
    assert!(ended - gone >= 1_499_000_000);
    let rig = json!({"tokens": 4000, "pace_ms": 2, "on_close": {"poll_ms": 150}});
    let (_, call) = leave(rig, false).await;
    let ended = call.ended_ns.expect("ended");
    assert!(ended - call.head_ns >= 150_000_000);
}

#[tokio::test]
async fn abandoned_work_without_a_stream_is_counted_too() {
    let upstream = start().await;
    let mut client = RawClient::connect(upstream.addr()).await.expect("connect");
    let rig = json!({"tokens": 1000, "pace_ms": 3, "on_close": "never"});
    client
        .post("/v1/chat/completions", &chat(json!({"rig": rig})))
        .await
        .expect("send");
    upstream
        .wait_for(|t| t.tokens >= 2, SOON)
        .await
        .expect("begun");
    client.leave_fin();
    let call = upstream
        .wait_for_call(|c| c.ended.is_some(), SOON)
        .await
        .expect("ends");
    assert_eq!((call.ended, call.tokens), (Some(Ended::RanOn), 1000));
}

#[tokio::test]
async fn slots_and_capacity_hold() {
    let script = Script {
        slots: Some(2),
        capacity: Some(4),
        ..Script::default()
    };
    let upstream = FakeUpstream::start(ANY, script).await.expect("a port");
    let mut clients = Vec::new();
    for _ in 0..6 {
        let mut client = RawClient::connect(upstream.addr()).await.expect("connect");
        let rig = json!({"tokens": 2, "stall": {"at": {"event": 1}}});
        let body = chat(json!({"stream": true, "rig": rig}));
        client
            .post("/v1/chat/completions", &body)
            .await
            .expect("send");
        let begun = clients.len() as u64 + 1;
        upstream
            .wait_for(|t| t.calls_begun == begun, SOON)
            .await
            .expect("begun");
        clients.push(client);
    }
    for (n, status) in [(0, 200), (1, 200), (4, 503), (5, 503)] {
        let head = clients[n].head().await.expect("head");
        assert_eq!(head.status, status, "call {n}");
    }
    // A slot that comes free is taken by one of those that wait unanswered.
    clients.remove(0).leave_rst().expect("reset");
    let begun = clients.remove(1).head().await.expect("head");
    assert_eq!(begun.status, 200);
    assert_eq!(upstream.truth().max_running, 5);
}

#[tokio::test]
async fn the_control_paths_answer_another_process() {
    let upstream = start().await;
    let mut client = RawClient::connect(upstream.addr()).await.expect("connect");
    client
        .post("/v1/chat/completions", &chat(json!({})))
        .await
        .expect("send");
    client.head().await.expect("head");
    client.rest().await.expect("body");
    client
        .request("GET", "/__rig/truth", &[], b"")
        .await
        .expect("send");
    client.head().await.expect("head");
    let (body, _) = client.rest().await.expect("body");
    let truth: tidegate_rig::Truth = serde_json::from_slice(&body).expect("json");
    assert_eq!((truth.calls_begun, truth.ended()), (1, 1));
}

#[tokio::test]
async fn a_body_before_its_head_is_an_error_and_no_endless_loop() {
    let upstream = start().await;
    let mut client = RawClient::connect(upstream.addr()).await.expect("connect");
    let body = chat(json!({"stream": true}));
    client
        .post("/v1/chat/completions", &body)
        .await
        .expect("sent");
    let errors = [
        client.events(1).await.expect_err("no head"),
        client.rest().await.expect_err("no head"),
        client.body_bytes(1).await.expect_err("no head"),
        client.all_events().await.expect_err("no head"),
    ];
    for error in errors {
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
        assert!(error.to_string().contains("call `head`"), "{error}");
    }
    assert_eq!(client.head().await.expect("head").status, 200);
    assert_eq!(client.events(2).await.expect("events").len(), 2);
}
