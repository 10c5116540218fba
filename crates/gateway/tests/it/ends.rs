//! Streams that break: an error in the caller's dialect between two events, then a visible break. Never a clean end.

use std::time::Duration;

use serde_json::{Value, json};
use tidegate_rig::{BodyEnd, Event, PeerEnd, Script};

use crate::support::{
    CHAT, Gate, MESSAGES, RESPONSES, SOON, gateway, only, room_for, stream, upstream, whole,
};

const DIALECTS: [&str; 3] = [CHAT, MESSAGES, RESPONSES];

/// Whether this is the one error event that the clients of this path know.
pub(crate) fn assert_error(path: &str, event: &Event, code: &str) {
    let json = event.json().expect("an error event is JSON");
    let text = |value: &Value| value.as_str().is_some_and(|s| !s.is_empty());
    match path {
        CHAT | "/v1/completions" => {
            assert_eq!(event.name, "");
            let error = json["error"].as_object().expect("an object");
            for key in ["message", "type", "param", "code"] {
                assert!(error.contains_key(key), "{json}");
            }
            assert!(text(&error["message"]));
            assert_eq!(error["code"], code);
        }
        MESSAGES => {
            assert_eq!(event.name, "error");
            assert_eq!(json["type"], "error");
            assert!(text(&json["error"]["type"]) && text(&json["error"]["message"]));
        }
        _ => {
            assert_eq!(event.name, "error");
            assert_eq!(json["type"], "error");
            assert_eq!(json["code"], code);
            assert!(text(&json["message"]));
            assert!(
                json["sequence_number"].as_u64().is_some_and(|n| n > 0),
                "{json}"
            );
        }
    }
}

pub(crate) fn errors(events: &[Event]) -> usize {
    let is_error = |e: &&Event| e.name == "error" || e.data.starts_with("{\"error\":{");
    events.iter().filter(is_error).count()
}

pub(crate) fn assert_no_end(path: &str, events: &[Event]) {
    let ends = ["[DONE]", "message_stop", "response.completed"];
    for event in events {
        assert!(
            !ends.iter().any(|end| event.data.contains(end)),
            "{path}: {event:?}"
        );
    }
}

/// Runs a call that is to break after five events; its events and how it ended.
async fn broken(gate: &Gate, path: &str, script: Value) -> (Vec<Event>, BodyEnd) {
    let mut client = gate.post(path, &stream(script)).await;
    assert_eq!(client.final_head().await.expect("head").status, 200);
    client.all_events().await.expect("events")
}

#[tokio::test]
async fn a_cut_stream_ends_with_one_error_event_and_a_break() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let ends = [
        json!({"end": "fin"}),
        json!({"end": "short_length", "framing": "length"}),
        json!({"end": "bad_chunk"}),
        // Proper for HTTP, and yet cut: no event has said that it is over.
        json!({"end": "clean"}),
        json!({"end": "fin", "end_mid_event": true}),
        json!({"end": "clean", "end_mid_event": true}),
        json!({"end": "fin", "framing": "close"}),
    ];
    for path in DIALECTS {
        for end in &ends {
            let mut script = end.clone();
            script["end_at"] = json!(5);
            let (events, ended) = broken(&gate, path, script).await;
            assert!(!ended.looks_whole(), "{path} {end}: {ended:?}");
            assert_eq!(errors(&events), 1, "{path} {end}: {events:#?}");
            assert!(events.len() >= 6, "{path} {end}: {events:#?}");
            let code = if end["end"] == "clean" || end["framing"] == "close" {
                "no_end_event"
            } else {
                "transport"
            };
            assert_error(path, &events[events.len() - 1], code);
            assert_no_end(path, &events);
        }
    }
    gate.settled_with(&up, 30).await;
    let lines = gate.stop();
    assert_eq!(lines.len(), 21);
    for line in lines {
        assert_eq!(line["outcome"], "upstream_truncated", "{line}");
        assert_eq!(
            (&line["wait_end"], &line["work_end"]),
            (&json!("failed"), &json!("failed"))
        );
        assert_eq!(line["attempts"], 1, "{line}");
    }
    assert_eq!(up.truth().calls_begun, 21, "nothing was tried again");
}

#[tokio::test]
async fn a_reset_upstream_is_told_of_in_each_dialect() {
    for path in DIALECTS {
        let up = upstream(Script::default()).await;
        let gate = gateway(&up, |_| {});
        let ask = stream(json!({"stall": {"at": {"event": 5}}}));
        let mut client = gate.post(path, &ask).await;
        client.final_head().await.expect("head");
        assert_eq!(client.events(5).await.expect("events").len(), 5);
        up.cut_all(PeerEnd::Rst);
        let (events, end) = client.all_events().await.expect("events");
        assert!(!end.looks_whole(), "{path}");
        assert_eq!(errors(&events), 1, "{path}");
        assert_error(path, &events[events.len() - 1], "transport");
        gate.settled_with(&up, 0).await;
        assert_eq!(gate.stop()[0]["outcome"], "upstream_truncated");
    }
}

#[tokio::test]
async fn a_hundred_streams_reset_in_one_moment_leave_nothing() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| room_for(c, 100));
    let ask = stream(json!({"stall": {"at": {"event": 2}}}));
    let mut clients = Vec::new();
    for _ in 0..100 {
        clients.push(gate.post(CHAT, &ask).await);
    }
    for client in &mut clients {
        assert_eq!(client.final_head().await.expect("head").status, 200);
        client.events(2).await.expect("events");
    }
    up.cut_all(PeerEnd::Rst);
    for client in &mut clients {
        let (events, end) = client.all_events().await.expect("events");
        assert_eq!(errors(&events), 1, "{end:?}: {events:?}");
        assert!(!end.looks_whole());
    }
    gate.settled_with(&up, 0).await;
    let mut client = gate.post(CHAT, &stream(json!({"tokens": 1}))).await;
    assert_eq!(client.final_head().await.expect("head").status, 200);
    client.rest().await.expect("body");
    gate.settled(&up).await;
}

#[tokio::test]
async fn c41_no_error_is_put_inside_an_event_that_is_half_sent() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| c.limits.event_bytes = 1024);
    for path in DIALECTS {
        let ask = stream(json!({
            "event_bytes": 100_000, "stall": {"at": {"mid_event": 9}}, "tokens": 20,
        }));
        let mut client = gate.post(path, &ask).await;
        client.final_head().await.expect("head");
        let before = client.events(3).await.expect("events");
        assert_eq!(before.len(), 3);
        client.body_bytes(10_000).await.expect("half an event");
        up.cut_all(PeerEnd::Fin);
        let (body, end) = client.rest().await.expect("body");
        assert!(!end.looks_whole(), "{path}");
        let text = String::from_utf8_lossy(&body);
        assert!(
            !text.contains("\"transport\""),
            "{path}: an error inside an event"
        );
        assert!(
            !text.contains("event: error"),
            "{path}: an error inside an event"
        );
    }
    gate.settled_with(&up, 0).await;
}

#[tokio::test]
async fn an_error_event_of_the_upstream_goes_on_once_and_nothing_is_added() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).timeouts.silence = Duration::from_millis(300);
    });
    for path in DIALECTS {
        for after in [
            json!({"end_at": 10}),
            json!({"end_at": 10, "end": "fin"}),
            // It tells, goes on as if nothing had happened, and says that it is done.
            json!({}),
            // It tells and then stays.
            json!({"stall": {"at": {"event": 10}}}),
        ] {
            let mut script = after.clone();
            script["tokens"] = json!(20);
            script["error_at"] = json!(2);
            script["message"] = json!("overloaded just now");
            let (events, end) = broken(&gate, path, script).await;
            assert!(!end.looks_whole(), "{path} {after}");
            assert_eq!(errors(&events), 1, "{path} {after}: {events:#?}");
            let told = |e: &&Event| e.data.contains("overloaded just now");
            assert_eq!(events.iter().filter(told).count(), 1, "{path} {after}");
            assert_no_end(path, &events);
        }
    }
    gate.settled_with(&up, 3).await;
    for line in gate.stop() {
        assert_eq!(line["outcome"], "upstream_error", "{line}");
        assert_eq!(line["status"], 200);
    }
}

#[tokio::test]
async fn an_error_that_clients_would_not_see_is_said_again_in_their_shape() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    // Anthropic clients drop data without an event name.
    let script =
        json!({"tokens": 8, "error_at": 3, "error_shape": "data", "message": "out of memory"});
    let (events, end) = broken(&gate, MESSAGES, script).await;
    assert!(!end.looks_whole());
    let last = events.last().expect("events");
    assert_error(MESSAGES, last, "error_event");
    assert!(last.data.contains("out of memory"), "{last:?}");
    assert_no_end(MESSAGES, &events);
    gate.settled_with(&up, 0).await;
}

#[tokio::test]
async fn a_break_after_the_terminal_event_is_no_error() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for path in DIALECTS {
        for end in ["rst", "fin", "bad_chunk"] {
            let script = json!({"tokens": 3, "end": end, "end_delay_ms": 20});
            let (events, ended) = broken(&gate, path, script).await;
            assert_eq!(ended, BodyEnd::Clean, "{path} {end}");
            assert!(
                !events
                    .iter()
                    .any(|e| e.name == "error" || e.data.contains("\"error\":{"))
            );
        }
    }
    gate.settled_with(&up, 0).await;
    for line in gate.stop() {
        assert_eq!(line["outcome"], "ok", "{line}");
    }
}

#[tokio::test]
async fn content_is_never_followed_by_another_servers_answer() {
    let up = upstream(Script::default()).await;
    let other = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        c.upstreams[0]
            .endpoints
            .push(crate::support::endpoint(other.addr()));
    });
    for _ in 0..4 {
        let (events, end) = broken(&gate, CHAT, json!({"end": "fin", "end_at": 4})).await;
        assert!(events.len() == 5 && !end.looks_whole());
    }
    gate.settled_with(&up, 0).await;
    assert_eq!(up.truth().calls_begun + other.truth().calls_begun, 4);
}

/// Whether a break in mid-answer was a 502 in JSON. If not, it came after the time for which the head is held back, and was to be seen.
async fn half_is_502(gate: &Gate, path: &str, end: Value) -> bool {
    let mut client = gate.post(path, &whole(end.clone())).await;
    let head = client.final_head().await.expect("head");
    let (body, ended) = client.rest().await.expect("body");
    if head.status == 200 {
        assert!(!ended.looks_whole(), "{path} {end}");
        return false;
    }
    assert_eq!((head.status, ended), (502, BodyEnd::Clean), "{path} {end}");
    assert_eq!(head.header("content-type"), Some("application/json"));
    assert_eq!(head.header("x-tidegate-started"), Some("true"));
    let json: Value = serde_json::from_slice(&body).expect("json");
    assert!(json["error"]["message"].is_string(), "{json}");
    true
}

#[tokio::test]
async fn half_an_answer_in_one_piece_is_a_502_or_a_visible_break() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for path in DIALECTS {
        for end in [
            json!({"end": "fin"}),
            json!({"end": "rst", "end_delay_ms": 20}),
            json!({"end": "short_length"}),
            json!({"end": "bad_chunk", "framing": "chunked"}),
        ] {
            let mut tries = 0;
            while !half_is_502(&gate, path, end.clone()).await {
                // Where the end came too late the 200 was out: not each time.
                tries += 1;
                assert!(tries < 5, "{path} {end}: never a 502");
            }
        }
    }
    // Too long to be held back until it is complete: the 200 is out when the upstream breaks.
    let long = json!({
        "headers": [["content-type", "application/json"]],
        "body": {"pieces": [{"text": "{\"a\":\""}, {"text": "x".repeat(1000), "times": 1000}, {"text": "\"}"}]},
        "end": "fin", "end_at": 800,
    });
    let mut client = gate.post(CHAT, &whole(long)).await;
    assert_eq!(client.final_head().await.expect("head").status, 200);
    let (_, ended) = client.rest().await.expect("body");
    assert!(!ended.looks_whole());
    gate.settled_with(&up, 0).await;
    for line in gate.stop() {
        assert_eq!(line["outcome"], "upstream_truncated", "{line}");
    }
}

#[tokio::test]
async fn an_old_client_sees_a_break_too() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    // A body that ends with its connection can only be broken by a reset.
    let long = json!({
        "headers": [["content-type", "application/json"]],
        "body": {"pieces": [{"text": "x".repeat(1000), "times": 1000}]},
        "end": "fin", "end_at": 800,
    });
    let body = whole(long).to_string();
    let mut client = gate.client().await;
    let head = format!(
        "POST {CHAT} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    client.send(head).await.expect("sent");
    assert_eq!(client.final_head().await.expect("head").status, 200);
    let (_, end) = client.rest().await.expect("body");
    assert_eq!(end, BodyEnd::Rst);
    up.wait_for(|t| t.running == 0, SOON).await.expect("idle");
    gate.settled_with(&up, 0).await;
}

#[tokio::test]
async fn a_failure_after_the_client_left_is_not_the_calls_outcome() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for path in DIALECTS {
        let mut client = gate
            .post(path, &stream(json!({"stall": {"at": {"event": 3}}})))
            .await;
        client.final_head().await.expect("head");
        client.events(3).await.expect("events");
        let peer = client.local_addr().expect("an address");
        client.leave_fin();
        assert_eq!(gate.line_of(peer).await["outcome"], "client_closed");
        up.cut_all(PeerEnd::Rst);
    }
    gate.settled_with(&up, 0).await;
    assert_eq!(gate.stop().len(), 3);
}
