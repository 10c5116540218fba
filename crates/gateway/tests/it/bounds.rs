//! Readers that are slow and lines that are long: what the gateway holds has a bound.

use std::time::Duration;

use serde_json::json;
use tidegate_rig::{BodyEnd, FakeUpstream, RawClient, Script};

use crate::binary::{Program, file, post};
use crate::support::{CHAT, Gate, SOON, gateway, stream, upstream, whole};

const MIB: usize = 1024 * 1024;

/// A stream whose one event is a line of so many MiB.
fn line(mib: usize) -> serde_json::Value {
    stream(json!({"body": {"pieces": [
        {"text": "data: {\"choices\":[{\"delta\":{\"content\":\""},
        {"text": "x".repeat(64 * 1024), "times": mib * 16},
        {"text": "\"},\"finish_reason\":\"stop\"}]}\n\n"},
        {"text": "data: [DONE]\n\n"},
    ]}}))
}

async fn slow(gate: &Gate, body: &serde_json::Value) -> RawClient {
    let mut client = RawClient::connect_slow(gate.addr(), 16 * 1024)
        .await
        .expect("connect");
    client.post(CHAT, &body.to_string()).await.expect("sent");
    client.final_head().await.expect("head");
    client
}

/// Waits until the upstream cannot write on; how much it has written by then.
pub(crate) async fn stuck(up: &FakeUpstream) -> u64 {
    let mut before = up.truth().bytes_written;
    loop {
        let moved = up
            .wait_for(|t| t.bytes_written > before, Duration::from_millis(300))
            .await;
        match moved {
            Ok(truth) => before = truth.bytes_written,
            Err(truth) => return truth.bytes_written,
        }
    }
}

#[tokio::test]
async fn a_line_of_16_mib_passes_and_is_not_gathered() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut client = slow(&gate, &line(16)).await;
    let written = stuck(&up).await;
    // What the kernel holds on two hops is in it: the gateway's own share is a small part.
    assert!(
        written < 12 * MIB as u64,
        "{written} bytes read ahead of the reader"
    );
    client.set_limit(SOON);
    let (body, end) = client.rest().await.expect("body");
    assert_eq!(end, BodyEnd::Clean);
    let text = body.iter().filter(|b| **b == b'x').count();
    assert_eq!(text, 16 * MIB);
    assert!(body.ends_with(b"\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n"));
    gate.settled(&up).await;
    let line = &gate.stop()[0];
    assert_eq!(
        (&line["outcome"], &line["events"]),
        (&json!("ok"), &json!(2))
    );
}

/// Linux takes 32,767 s of silence before probes; a longer time would reset every client at its first byte.
#[tokio::test]
async fn the_longest_keep_alive_that_is_taken_serves() {
    let up = upstream(Script::default()).await;
    let with = |time: &str| {
        let line = format!("[server]\ntcp_keep_alive = \"{time}\"\n");
        file(&up, "").replacen("[server]\n", &line, 1)
    };
    let program = Program::configured(&with("9h"));
    let mut client = post(program.address("listen=").await, &whole(json!({}))).await;
    assert_eq!(client.final_head().await.expect("head").status, 200);
    let refused = Program::configured(&with("10h"));
    refused.says("server.tcp_keep_alive").await;
}
