//! Servers that quote the key that they were sent.

use serde_json::json;
use tidegate::config::Secret;
use tidegate_rig::{BodyEnd, Script};

use crate::support::{CHAT, MESSAGES, RESPONSES, gateway, only, upstream, whole};

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
