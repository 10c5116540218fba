//! Servers that quote the key that they were sent.

use serde_json::json;
use tidegate::config::Secret;
use tidegate_rig::{BodyEnd, Script};

use crate::support::{CHAT, MESSAGES, RESPONSES, gateway, only, stream, upstream, whole};

const UPSTREAM: &str = "sk-marker-upstream-77c1";

/// Servers quote what they were sent: in words, in JSON, in fields, in success and in mid-stream of an error.
#[tokio::test]
async fn a_server_that_echoes_its_key_tells_it_to_nobody() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).api_key = Some(Secret::new(UPSTREAM));
        c.limits.error_body_bytes = 2000;
    });
    let echo = format!("Bearer {UPSTREAM}");
    let kind = |kind: &str| json!([["content-type", kind], ["x-echo", echo]]);
    let long = format!("{UPSTREAM} {}", "y".repeat(3000));
    let rigs = [
        json!({"status": 401, "message": format!("Incorrect API key provided: {UPSTREAM}.")}),
        json!({"status": 500, "headers": kind("text/plain"), "body": {"pieces": [{"text": "no: sk-marker-up", "pause_ms": 5}, {"text": "stream-77c1"}]}}),
        json!({"status": 403, "headers": kind("text/html"), "body": {"pieces": [{"text": format!("<p>{UPSTREAM}</p>")}]}, "framing": "length"}),
        json!({"status": 400, "headers": kind("application/json"), "body": {"pieces": [{"text": long}]}, "framing": "length"}),
        json!({"headers": kind("application/json"), "body": {"pieces": [{"text": format!("{{\"error\":{{\"message\":\"{UPSTREAM}\"}}}}")}]}}),
    ];
    for path in [CHAT, MESSAGES, RESPONSES] {
        for rig in &rigs {
            let mut client = gate.post(path, &whole(rig.clone())).await;
            let head = client.final_head().await.expect("head");
            let (body, end) = client.rest().await.expect("body");
            assert_eq!(end, BodyEnd::Clean, "{rig}");
            let shown = format!("{head:?}{}", String::from_utf8_lossy(&body));
            assert!(!shown.contains(UPSTREAM), "{path} {rig}: {shown}");
            assert!(
                shown.contains("*****"),
                "it is the echo that is seen: {shown}"
            );
        }
    }
    gate.settled(&up).await;
}

/// An error in the middle of a stream, told on or put together, is masked as any; one that came compressed is not passed on.
#[tokio::test]
async fn nor_in_the_middle_of_a_stream_or_compressed() {
    let message = format!("Incorrect API key provided: {UPSTREAM}.");
    for (ask_stream, at, compress) in [
        (false, 0, "no"),
        (false, 2, "no"),
        (true, 2, "no"),
        (false, 0, "gzip"),
    ] {
        let up = upstream(Script::default()).await;
        let gate = gateway(&up, |c| {
            only(c).api_key = Some(Secret::new(UPSTREAM));
            only(c).ask_stream = ask_stream;
        });
        for path in [CHAT, MESSAGES, RESPONSES] {
            let shapes = ["dialect", "data_text", "event", "event_text", "choices"];
            for shape in shapes
                .into_iter()
                .take(if compress == "no" { 5 } else { 1 })
            {
                let script = if compress == "no" {
                    json!({"error_at": at, "error_shape": shape, "message": message})
                } else {
                    json!({"status": 401, "message": message, "compress": compress})
                };
                let body = if ask_stream {
                    whole(script)
                } else {
                    stream(script)
                };
                let mut client = gate.post(path, &body).await;
                let head = client.final_head().await.expect("head");
                let (body, _) = client.rest().await.expect("body");
                let text = String::from_utf8_lossy(&body);
                let case = format!("{path} {ask_stream} {at} {compress} {shape}: {text}");
                assert!(!text.contains(UPSTREAM), "{case}");
                if compress == "no" {
                    assert!(text.contains("*****"), "the echo is seen: {case}");
                } else {
                    assert_eq!(head.header("content-encoding"), None, "{case}");
                    assert_eq!(head.status, 401, "{case}");
                    assert!(text.contains("compressed"), "{case}");
                }
            }
        }
        gate.settled(&up).await;
    }
}
