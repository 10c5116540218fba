//! Header fields, framing and versions of HTTP: what crosses, what does not, and what the gateway says itself.

use serde_json::{Value, json};
use tidegate::config::Secret;
use tidegate_rig::{BodyEnd, CallTruth, Script};

use crate::cases::stage::{Http, Stage, on_backs, routes};
use crate::support::{CHAT, Gate, MESSAGES, SOON, ask, gateway, only, stream, upstream, whole};

/// Sends a request with these fields; the answer's head and body.
async fn send(
    gate: &Gate,
    path: &str,
    fields: &[(&str, &str)],
    body: &Value,
) -> (tidegate_rig::ResponseHead, Vec<u8>) {
    let mut client = gate.client().await;
    let body = body.to_string();
    client
        .request("POST", path, fields, body.as_bytes())
        .await
        .expect("sent");
    let head = client.final_head().await.expect("head");
    let (body, _) = client.rest().await.expect("body");
    (head, body)
}

fn last(calls: &[CallTruth]) -> &CallTruth {
    calls.last().expect("a call")
}

#[tokio::test]
async fn the_body_decides_whether_it_is_a_stream_and_accept_does_not() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for accept in ["application/json", "text/event-stream", "*/*"] {
        let (head, _) = send(&gate, CHAT, &[("accept", accept)], &stream(json!({}))).await;
        assert!(
            head.header("content-type")
                .is_some_and(|k| k.starts_with("text/event-stream"))
        );
        let (head, _) = send(&gate, CHAT, &[("accept", accept)], &whole(json!({}))).await;
        assert_eq!(head.header("content-type"), Some("application/json"));
    }
    gate.settled(&up).await;
}

#[tokio::test]
async fn fields_of_one_connection_do_not_cross() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let asked = [
        ("connection", "keep-alive, x-hop"),
        ("x-hop", "1"),
        ("keep-alive", "timeout=9"),
        ("proxy-authorization", "Basic eDp5"),
        ("proxy-connection", "keep-alive"),
        ("te", "trailers"),
        ("upgrade", "h2c"),
        ("http2-settings", "AAMAAABkAAQAAP__"),
        ("cookie", "a=b"),
        ("x-forwarded-for", "1.2.3.4"),
        ("forwarded", "for=1.2.3.4"),
        ("x-real-ip", "1.2.3.4"),
        ("idempotency-key", "abc"),
        ("anthropic-beta", "x"),
        ("openai-organization", "org"),
        ("accept-encoding", "gzip, br"),
    ];
    let script = json!({"headers": [
        ["connection", "keep-alive, x-up-hop"], ["x-up-hop", "1"], ["keep-alive", "timeout=9"],
        ["proxy-authenticate", "Basic"], ["set-cookie", "a=b"], ["location", "http://inner/"],
        ["access-control-allow-origin", "*"], ["x-ratelimit-limit-tokens", "9"],
    ]});
    let (head, _) = send(&gate, CHAT, &asked, &stream(script)).await;
    assert_eq!(head.status, 200);
    for gone in [
        "connection",
        "x-up-hop",
        "keep-alive",
        "proxy-authenticate",
        "set-cookie",
        "location",
        "access-control-allow-origin",
    ] {
        assert_eq!(head.header(gone), None, "{gone}");
    }
    assert_eq!(head.header("x-ratelimit-limit-tokens"), Some("9"));
    gate.settled(&up).await;
    let calls = up.calls();
    let sent = last(&calls);
    for (name, _) in &asked[..12] {
        assert_eq!(sent.header(name), None, "{name}");
    }
    for (name, value) in &asked[12..15] {
        assert_eq!(sent.header(name), Some(*value), "{name}");
    }
    assert_eq!(sent.header("accept-encoding"), Some("identity"));
    assert_eq!(sent.header("host"), Some(up.addr().to_string().as_str()));
}

#[tokio::test]
async fn c101_a_clients_close_is_not_the_upstreams() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| c.server.workers = crate::support::slots(1));
    for _ in 0..3 {
        let (head, _) = send(&gate, CHAT, &[("connection", "close")], &whole(json!({}))).await;
        assert_eq!(head.header("connection"), Some("close"));
        gate.settled(&up).await;
    }
    assert_eq!(up.truth().connections_accepted, 1);
}

#[tokio::test]
async fn credentials_are_replaced_and_never_forwarded() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| only(c).api_key = Some(Secret::new("sk-upstream")));
    for path in [CHAT, MESSAGES] {
        for fields in [
            [("authorization", "Bearer sk-client")],
            [("x-api-key", "sk-client")],
            [("api-key", "sk-client")],
        ] {
            let (head, _) = send(&gate, path, &fields, &whole(json!({}))).await;
            assert_eq!(head.status, 200);
            let calls = up.calls();
            let sent = last(&calls);
            assert_eq!(sent.header("authorization"), Some("Bearer sk-upstream"));
            assert!(!format!("{:?}", sent.headers).contains("sk-client"));
        }
    }
    gate.settled(&up).await;
    for line in gate.stop() {
        assert!(!line.to_string().contains("sk-"), "{line}");
    }
}

#[tokio::test]
async fn every_answer_has_an_id_and_the_log_has_ours() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for (path, name) in [(CHAT, "x-request-id"), (MESSAGES, "request-id")] {
        for (body, theirs) in [
            (stream(json!({})), None),
            (stream(json!({"status": 429})), None),
            (json!([]), None),
            (
                stream(json!({"headers": [[name, "req_theirs"]]})),
                Some("req_theirs"),
            ),
        ] {
            let (head, _) = send(&gate, path, &[], &body).await;
            let shown = head.header(name).expect("an id");
            assert!(theirs.is_none_or(|id| id == shown), "{path} {shown}");
            let ours = head.header("x-tidegate-id").unwrap_or(shown).to_owned();
            gate.eventually("its line", |g| g.lines().iter().any(|l| l["id"] == *ours))
                .await;
        }
    }
    gate.settled(&up).await;
    assert_eq!(gate.stop().len(), 8);
}

#[tokio::test]
async fn an_old_client_gets_an_answer_that_ends_with_its_connection() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let body = stream(json!({"tokens": 5})).to_string();
    let mut client = gate.client().await;
    let head = format!(
        "POST {CHAT} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    client.send(head + &body).await.expect("sent");
    let head = client.final_head().await.expect("head");
    assert_eq!(head.status, 200);
    assert_eq!(head.header("transfer-encoding"), None);
    assert_eq!(head.header("content-length"), None);
    assert_eq!(head.header("x-accel-buffering"), Some("no"));
    let (events, end) = client.all_events().await.expect("events");
    assert_eq!(end, BodyEnd::Closed);
    assert_eq!(events.last().expect("events").data, "[DONE]");
    gate.settled(&up).await;
}

#[tokio::test]
async fn c101_a_client_that_asks_may_go_on_and_others_hear_no_100() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let body = whole(json!({})).to_string();
    let mut client = gate.client().await;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    client.send(head).await.expect("sent");
    assert_eq!(client.head().await.expect("interim").status, 100);
    client.send(&body).await.expect("sent");
    assert_eq!(client.head().await.expect("head").status, 200);
    client.rest().await.expect("body");
    client.post(CHAT, &body).await.expect("sent");
    assert_eq!(client.head().await.expect("head").status, 200);
    client.rest().await.expect("body");
    gate.settled(&up).await;
    assert!(up.calls().iter().all(|c| c.header("expect").is_none()));
}

#[tokio::test]
async fn interim_answers_of_the_upstream_end_here() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for status in [100, 102, 103] {
        for body in [stream, whole] {
            let script =
                json!({"interim": [{"status": status}, {"status": status, "pause_ms": 20}]});
            let mut client = gate.post(CHAT, &body(script)).await;
            assert_eq!(client.head().await.expect("head").status, 200, "{status}");
            assert_eq!(client.rest().await.expect("body").1, BodyEnd::Clean);
        }
    }
    gate.settled(&up).await;
}

#[tokio::test]
async fn a_compressed_answer_keeps_its_label_and_its_bytes() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).heartbeat = Some(std::time::Duration::from_millis(10))
    });
    for body in [stream, whole] {
        let script = json!({"compress": "gzip", "tokens": 8, "pace_ms": 30.0});
        let (head, bytes) = send(&gate, CHAT, &[("accept-encoding", "gzip")], &body(script)).await;
        assert_eq!(
            (head.status, head.header("content-encoding")),
            (200, Some("gzip"))
        );
        assert!(bytes.starts_with(b"\x1f\x8b"));
        assert!(
            !bytes.windows(12).any(|w| w == b": keep-alive"),
            "a comment inside gzip"
        );
    }
    // A server that compresses when it may is not asked to.
    let script = json!({"compress": "if_accepted", "tokens": 3, "usage": "yes"});
    let (head, bytes) = send(&gate, CHAT, &[("accept-encoding", "gzip")], &stream(script)).await;
    assert_eq!(head.header("content-encoding"), None);
    assert!(String::from_utf8_lossy(&bytes).ends_with("data: [DONE]\n\n"));
    gate.settled(&up).await;
    let lines = gate.stop();
    let usages: Vec<_> = lines
        .iter()
        .map(|l| l["usage"].as_str().expect("text"))
        .collect();
    assert_eq!(usages, ["unknown", "unknown", "reported"]);
}

#[tokio::test]
async fn there_is_one_framing_and_it_fits_the_bytes() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| only(c).ask_usage = true);
    for framing in ["length", "chunked", "close"] {
        for body in [stream, whole] {
            let (head, bytes) = send(
                &gate,
                CHAT,
                &[],
                &body(json!({"framing": framing, "tokens": 4})),
            )
            .await;
            let (chunked, length) = (
                head.header("transfer-encoding"),
                head.header("content-length"),
            );
            assert!(chunked.is_some() != length.is_some(), "{framing}: {head:?}");
            if let Some(length) = length {
                assert_eq!(length, bytes.len().to_string());
            }
        }
    }
    gate.settled(&up).await;
}

#[tokio::test]
async fn c117_requests_framed_in_two_ways_are_refused_and_the_rest_is_not_read() {
    on_backs(Http::One, |_| {}, async |stage: &Stage| {
    let (gate, up) = (&stage.gate, &stage.up);
    let rest = "0\r\n\r\nPOST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}";
    for (fields, path) in [
        "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: +5\r\n",
        "X: a\r\n b\r\nContent-Length: 5\r\n",
        "X : a\r\nContent-Length: 5\r\n",
        "X: a\rb\r\nContent-Length: 5\r\n",
    ]
    .into_iter()
    .zip(routes().into_iter().cycle())
    {
        let mut client = gate.client().await;
        client
            .send(format!(
                "POST {path} HTTP/1.1\r\nHost: localhost\r\n{fields}\r\n{rest}"
            ))
            .await
            .expect("sent");
        let head = client.final_head().await.expect("head");
        assert_eq!(head.status, 400, "{fields:?}");
        assert_ne!(
            client.closed(SOON).await,
            tidegate_rig::Closed::Open,
            "{fields:?}"
        );
    }
    for (size, path) in ["zz", "-1", "0x5", "fffffffffffffffff", " 5"]
        .into_iter()
        .zip(routes().into_iter().rev().cycle())
    {
        let mut client = gate.client().await;
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n{size}\r\n{rest}"
        );
        client.send(request).await.expect("sent");
        assert_eq!(
            client.final_head().await.expect("head").status,
            400,
            "{size:?}"
        );
        assert_ne!(
            client.closed(SOON).await,
            tidegate_rig::Closed::Open,
            "{size:?}"
        );
    }
    assert_eq!(up.truth().calls_begun, 0);
    })
    .await;
}

#[tokio::test]
async fn browsers_get_their_fields_on_every_answer() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        c.cors.origins = vec!["https://app.example".to_owned()]
    });
    let mut client = gate.client().await;
    for known in &tidegate::front::route::KNOWN {
        let fields = [
            ("origin", "https://app.example"),
            ("access-control-request-method", "POST"),
            (
                "access-control-request-headers",
                "authorization,content-type",
            ),
        ];
        client
            .request("OPTIONS", known.path, &fields, b"")
            .await
            .expect("sent");
        let head = client.final_head().await.expect("head");
        assert_eq!(head.status, 204);
        assert_eq!(
            head.header("access-control-allow-origin"),
            Some("https://app.example")
        );
        assert_eq!(
            head.header("access-control-allow-headers"),
            Some("authorization,content-type")
        );
    }
    assert_eq!(up.truth().connections_accepted, 0);
    let fields = [("origin", "https://app.example")];
    for (body, status) in [
        (stream(json!({})), 200),
        (json!([]), 400),
        (stream(json!({"status": 401})), 401),
        (stream(json!({"status": 429})), 429),
        (stream(json!({"body": "html"})), 502),
        (stream(json!({"end": "fin", "end_at": 0})), 502),
    ] {
        let (head, _) = send(&gate, CHAT, &fields, &body).await;
        assert_eq!(head.status, status);
        assert_eq!(
            head.header("access-control-allow-origin"),
            Some("https://app.example"),
            "{status}"
        );
        assert!(
            head.header("vary").is_some_and(|v| v.contains("origin")),
            "{status}"
        );
    }
    for origin in ["https://evil.example", "null"] {
        let (head, _) = send(&gate, CHAT, &[("origin", origin)], &stream(json!({}))).await;
        assert_eq!(head.status, 403);
        assert_eq!(head.header("access-control-allow-origin"), None);
    }
    gate.settled_with(&up, 2).await;
}

#[tokio::test]
async fn head_has_the_fields_of_get_and_no_body() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut client = gate.client().await;
    for path in ["/v1/models", "/v1/files"] {
        client
            .request("HEAD", path, &[("content-length", "0")], b"")
            .await
            .expect("sent");
        assert_eq!(
            client.final_head().await.expect("head").status,
            200,
            "{path}"
        );
        client.expect_no_body();
        client.request("GET", path, &[], b"").await.expect("sent");
        assert_eq!(
            client.final_head().await.expect("head").status,
            200,
            "{path}"
        );
        let (body, end) = client.rest().await.expect("body");
        assert!(!body.is_empty() && end == BodyEnd::Clean, "{path}");
    }
    gate.settled(&up).await;
}

#[tokio::test]
async fn unknown_fields_of_requests_and_answers_survive() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let answer = r#"{"choices":[{"message":{"content":"x","reasoning":"y"}}],"timings":{"a":1.50},"n":12345678901234567890}"#;
    let script = json!({
        "headers": [["content-type", "application/json"]], "framing": "length",
        "body": {"pieces": [{"text": answer}]},
    });
    let mut body = ask(
        json!({"rig": script, "chat_template_kwargs": {"a": 1.50}, "seed": 12_345_678_901_234_567_890_u64}),
    );
    body["stream"] = json!(false);
    let (_, got) = send(&gate, CHAT, &[], &body).await;
    assert_eq!(got, answer.as_bytes());
    assert_eq!(
        up.calls()[0].body.clone().expect("kept"),
        body.to_string().into_bytes()
    );
    gate.settled(&up).await;
}
