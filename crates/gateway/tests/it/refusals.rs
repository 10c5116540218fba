//! Failures before the first byte: the true status, in a shape that the caller's SDK can read; never a 200 with an error inside.

use serde_json::{Value, json};
use tidegate_rig::{BodyEnd, ResponseHead, Script};

use crate::support::{
    CHAT, Gate, MESSAGES, RESPONSES, SOON, ask, endpoint, gateway, gateway_at, only, slots, stream,
    upstream, whole,
};

const DIALECTS: [&str; 3] = [CHAT, MESSAGES, RESPONSES];

async fn answer(gate: &Gate, path: &str, body: &Value) -> (ResponseHead, Vec<u8>) {
    let mut client = gate.post(path, body).await;
    let head = client.final_head().await.expect("head");
    let (body, end) = client.rest().await.expect("body");
    assert_eq!(end, BodyEnd::Clean, "{path}");
    (head, body)
}

/// The error object of a body in this path's dialect.
fn error_of(path: &str, head: &ResponseHead, body: &[u8]) -> Value {
    assert_eq!(
        head.header("content-type"),
        Some("application/json"),
        "{path}"
    );
    let json: Value = serde_json::from_slice(body).expect("json");
    if path == MESSAGES {
        assert_eq!(json["type"], "error", "{json}");
    } else {
        for key in ["message", "type", "param", "code"] {
            assert!(json["error"].get(key).is_some(), "{json}");
        }
    }
    assert!(json["error"]["message"].is_string(), "{json}");
    json["error"].clone()
}

#[tokio::test]
async fn an_upstreams_status_and_words_pass_as_they_are() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for path in DIALECTS {
        for status in [400, 401, 403, 404, 413, 422, 429, 500, 503, 529] {
            for ask in [stream, whole] {
                let script = json!({
                    "status": status, "message": "its own words", "retry_after": "7",
                    "headers": [["x-request-id", "req_upstream"], ["x-ratelimit-remaining-requests", "3"],
                                ["retry-after-ms", "300"], ["x-should-retry", "true"]],
                });
                let (head, body) = answer(&gate, path, &ask(script)).await;
                assert_eq!(head.status, status, "{path}");
                assert_eq!(error_of(path, &head, &body)["message"], "its own words");
                for (name, value) in [
                    ("retry-after", "7"),
                    ("x-request-id", "req_upstream"),
                    ("x-ratelimit-remaining-requests", "3"),
                    ("retry-after-ms", "300"),
                    ("x-should-retry", "true"),
                ] {
                    assert_eq!(head.header(name), Some(value), "{path} {status}");
                }
                assert!(
                    head.header("x-tidegate-id")
                        .is_some_and(|id| id.starts_with("req_"))
                );
            }
        }
    }
    gate.settled(&up).await;
    let lines = gate.stop();
    assert_eq!(lines.len(), 60);
    for line in lines {
        assert_eq!(line["outcome"], "upstream_error", "{line}");
        assert_eq!(
            (&line["usage"], &line["work_end"]),
            (&json!("unknown"), &json!("complete"))
        );
    }
    assert_eq!(up.truth().calls_begun, 60, "nothing was tried again");
}

#[tokio::test]
async fn a_late_status_is_the_true_one_too() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).heartbeat = Some(std::time::Duration::from_millis(50))
    });
    let script = json!({"status": 429, "delay_ms": 600, "message": "later"});
    let (head, body) = answer(&gate, CHAT, &stream(script)).await;
    assert_eq!(head.status, 429);
    assert_eq!(error_of(CHAT, &head, &body)["message"], "later");
    gate.settled(&up).await;
}

#[tokio::test]
async fn foreign_error_bodies_are_put_into_the_dialect_and_keep_their_text() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let bodies = [
        (
            "application/json",
            r#"{"detail":"Not authenticated here"}"#,
            "Not authenticated here",
        ),
        (
            "application/json",
            r#"{"object":"error","message":"the old shape"}"#,
            "the old shape",
        ),
        (
            "application/json",
            r#"{"error":"just a string"}"#,
            "just a string",
        ),
        (
            "text/html",
            "<html><body><h1>Bad gateway page</h1></body></html>",
            "Bad gateway page",
        ),
        (
            "text/plain",
            "upstream connect error",
            "upstream connect error",
        ),
        ("application/json", "", "502"),
    ];
    for path in DIALECTS {
        for (kind, text, kept) in bodies {
            for ask in [stream, whole] {
                let script = json!({
                    "status": 502, "headers": [["content-type", kind]],
                    "body": {"pieces": [{"text": text}]}, "framing": "length",
                });
                let (head, body) = answer(&gate, path, &ask(script)).await;
                assert_eq!(head.status, 502, "{path} {text}");
                let message = error_of(path, &head, &body)["message"].to_string();
                assert!(message.contains(kept), "{path} {text}: {message}");
            }
        }
    }
    gate.settled(&up).await;
}

#[tokio::test]
async fn an_error_body_that_breaks_off_keeps_its_status() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let script = json!({
        "status": 500, "headers": [["content-type", "text/plain"]],
        "body": {"pieces": [{"text": "half of the st"}, {"text": "ory"}]}, "end": "fin", "end_at": 1,
    });
    let (head, body) = answer(&gate, CHAT, &stream(script)).await;
    assert_eq!(head.status, 500);
    let message = error_of(CHAT, &head, &body)["message"].to_string();
    assert!(message.contains("half of the st"), "{message}");
    gate.settled_with(&up, 0).await;
}

#[tokio::test]
async fn a_server_that_cannot_be_reached_is_a_502() {
    let refusing = tidegate_rig::free_port().expect("a port");
    let gate = gateway_at(refusing, |_| {});
    for path in DIALECTS {
        for body in [ask(json!({"stream": true})), ask(json!({}))] {
            let (head, body) = answer(&gate, path, &body).await;
            assert_eq!(head.status, 502);
            error_of(path, &head, &body);
            assert_eq!(head.header("x-tidegate-started"), Some("false"));
            let wait: u64 = head
                .header("retry-after")
                .expect("a wait")
                .parse()
                .expect("seconds");
            assert!((1..=60).contains(&wait));
        }
    }
    for line in gate.logged(6).await {
        assert_eq!(
            (&line["outcome"], &line["reason"]),
            (&json!("upstream_failed"), &json!("refused"))
        );
        assert_eq!(line["work_end"], "none");
    }
}

#[tokio::test]
async fn an_upstream_that_breaks_before_its_first_event_is_a_502() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let breaks = [
        json!({"body": {"wire": [{"text": "HTTP/1.1 200 OK\r\ncontent-ty"}]}}),
        json!({"body": {"wire": [{"text": "no http at all\r\n\r\n"}]}}),
        json!({"body": {"wire": []}}),
        json!({"end": "fin", "end_at": 0}),
        json!({"end": "rst", "end_at": 0}),
        json!({"end": "clean", "end_at": 0}),
        json!({"end": "fin", "end_at": 0, "end_mid_event": true}),
    ];
    for path in DIALECTS {
        for script in &breaks {
            let (head, body) = answer(&gate, path, &stream(script.clone())).await;
            assert_eq!(head.status, 502, "{path} {script}");
            error_of(path, &head, &body);
            assert_eq!(head.header("x-tidegate-started"), Some("true"), "{script}");
        }
    }
    gate.settled_with(&up, 3).await;
    assert_eq!(
        up.truth().calls_begun,
        21,
        "a request that may have run is not sent again"
    );
}

#[tokio::test]
async fn a_stream_is_never_answered_with_something_else_and_200() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for path in DIALECTS {
        for script in [
            json!({"body": "chat"}),
            json!({"body": "chat", "headers": [["content-type", "text/plain"]]}),
            json!({"body": "html"}),
            json!({"body": "chat", "framing": "close"}),
            json!({"body": "empty"}),
        ] {
            let (head, body) = answer(&gate, path, &stream(script.clone())).await;
            assert_eq!(head.status, 502, "{path} {script}");
            error_of(path, &head, &body);
        }
    }
    gate.settled_with(&up, 20).await;
    for line in gate.stop() {
        let outcome = line["outcome"].as_str().expect("text");
        assert!(
            ["unexpected_content_type", "upstream_truncated"].contains(&outcome),
            "{line}"
        );
    }
}

#[tokio::test]
async fn a_stream_with_a_wrong_label_is_a_stream() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for script in [
        json!({"headers": [["content-type", "application/json"]]}),
        json!({"without_headers": ["content-type"]}),
        json!({"headers": [["content-type", "text/plain"]], "comment": ": hello\n\n"}),
    ] {
        let (head, body) = answer(&gate, CHAT, &stream(script.clone())).await;
        assert_eq!(head.status, 200, "{script}");
        assert_eq!(head.header("content-type"), Some("text/event-stream"));
        assert!(String::from_utf8_lossy(&body).ends_with("data: [DONE]\n\n"));
    }
    gate.settled(&up).await;
}

#[tokio::test]
async fn a_stream_that_nobody_asked_for_passes() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let (head, body) = answer(&gate, CHAT, &whole(json!({"body": "chat_stream"}))).await;
    assert_eq!(head.status, 200);
    assert!(
        head.header("content-type")
            .is_some_and(|k| k.starts_with("text/event-stream"))
    );
    assert!(String::from_utf8_lossy(&body).ends_with("data: [DONE]\n\n"));
    gate.settled(&up).await;
}

#[tokio::test]
async fn an_empty_answer_passes_as_one() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for ask in [stream, whole] {
        let (head, body) = answer(
            &gate,
            "/v1/files",
            &ask(json!({"status": 204, "body": "empty"})),
        )
        .await;
        assert_eq!((head.status, body.len()), (204, 0));
    }
    gate.settled(&up).await;
}

#[tokio::test]
async fn the_gateways_own_refusals_say_whether_to_try_again() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).slots = slots(1);
        only(c).queue = 0;
        only(c).models = vec!["tiny".to_owned()];
        c.unknown_models = tidegate::config::UnknownModels::Refuse;
        c.limits.request_body_bytes = 4096;
    });
    for path in DIALECTS {
        let unknown = answer(&gate, path, &ask(json!({"model": "other"}))).await;
        let big = answer(&gate, path, &ask(json!({"x": "y".repeat(8000)}))).await;
        let wrong = answer(&gate, path, &json!([1])).await;
        for ((head, body), status) in [(unknown, 404), (big, 413), (wrong, 400)] {
            assert_eq!(head.status, status, "{path}");
            error_of(path, &head, &body);
            assert_eq!(
                head.header("x-should-retry"),
                Some("false"),
                "{path} {status}"
            );
            assert_eq!(head.header("retry-after"), None);
        }
    }
    let holder = gate
        .post(CHAT, &whole(json!({"stall": {"at": "head"}})))
        .await;
    up.wait_for(|t| t.running == 1, SOON)
        .await
        .expect("running");
    for path in DIALECTS {
        let (head, body) = answer(&gate, path, &stream(json!({}))).await;
        assert_eq!(head.status, 503);
        error_of(path, &head, &body);
        let wait: u64 = head
            .header("retry-after")
            .expect("a wait")
            .parse()
            .expect("seconds");
        assert!((1..=60).contains(&wait));
        assert_eq!(head.header("x-should-retry"), None);
        assert_eq!(head.header("x-tidegate-started"), Some("false"));
    }
    holder.leave_fin();
    gate.settled_with(&up, 0).await;
    assert_eq!(up.truth().calls_begun, 1);
}

#[tokio::test]
async fn redirects_are_not_followed_nor_passed_on() {
    let up = upstream(Script::default()).await;
    let other = upstream(Script::default()).await;
    let gate = gateway(&up, |c| only(c).endpoints = vec![endpoint(up.addr())]);
    let to = format!("http://{}/v1/chat/completions", other.addr());
    let script = json!({"status": 307, "headers": [["location", to]], "body": "empty"});
    let (head, body) = answer(&gate, CHAT, &stream(script)).await;
    assert_eq!((head.status, head.header("location")), (502, None));
    error_of(CHAT, &head, &body);
    gate.settled(&up).await;
    assert_eq!(other.truth().connections_accepted, 0);
}

/// `Upgrade` is for one hop: without it the model server would answer a plain GET, in words that say nothing of WebSockets.
#[tokio::test]
async fn a_websocket_is_refused_in_so_many_words() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let shake = |upgrade: &str| {
        format!(
            "GET /v1/realtime?model=m HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: {upgrade}\r\n\
             Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
    };
    let mut client = gate.client().await;
    for upgrade in ["websocket", "WebSocket", "h2c, websocket"] {
        client.send(shake(upgrade)).await.expect("sent");
        let answer = client.final_head().await.expect("head");
        let (body, _) = client.rest().await.expect("body");
        let json: Value = serde_json::from_slice(&body).expect("JSON");
        let told = (answer.status, &json["error"]["code"]);
        assert_eq!(told, (501, &Value::from("websocket")), "{upgrade}: {json}");
        assert_eq!(answer.header("x-should-retry"), Some("false"));
        assert_eq!(answer.header("x-tidegate-started"), Some("false"));
    }
    assert_eq!(up.truth().calls_begun, 0);
    client.send(shake("h2c")).await.expect("sent");
    let answer = client.final_head().await.expect("head");
    assert_ne!(answer.status, 501, "h2c is answered over HTTP/1.1");
    assert_eq!(
        gate.metric("refusals_total", &[("reason", "websocket")]),
        3.0
    );
}
