//! Streams that end well: what came is what was sent, at once, and the end is an end.

use serde_json::{Value, json};
use tidegate_rig::{BodyEnd, RawClient, Script};

use crate::support::{CHAT, MESSAGES, RESPONSES, SOON, gateway, stream, upstream};

#[tokio::test]
async fn a_stream_of_each_dialect_passes_whole() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for (path, last) in [
        (CHAT, "[DONE]"),
        (MESSAGES, "message_stop"),
        (RESPONSES, "\"response."),
    ] {
        let mut client = gate.post(path, &stream(json!({"tokens": 5}))).await;
        let head = client.final_head().await.expect("head");
        assert_eq!(head.status, 200, "{path}");
        let (events, end) = client.all_events().await.expect("events");
        assert_eq!(end, BodyEnd::Clean, "{path}");
        let event = events.last().expect("events came");
        assert!(event.data.contains(last), "{path}: {event:?}");
    }
    gate.settled(&up).await;
    for line in gate.stop() {
        assert_eq!(line["outcome"], "ok");
        assert_eq!(line["status"], 200);
    }
}

/// Events with everything that the standard allows and that readers trip over, in these line ends; ten of them have something in them.
pub(crate) fn odd(line_end: &str) -> Vec<u8> {
    let text = concat!(
        ": a comment first\n\n",
        "data: {\"choices\":[],\"note\":\"ä€😀e\u{301}\"}\n\n",
        "data:{\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":null}}]}\n\n",
        "event: message\ndata: {\"choices\":[{\"delta\":{\"content\":\"\u{2028}\u{2029}\u{85}\u{b}\u{c}\"}}]}\n\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"\\u2028\"}}],\"reasoning_content\":\"x\",\"timings\":{\"a\":1e3}}\n\n",
        "data: {\"choices\":\ndata: [{\"delta\":{\"content\":\"two lines\"}}]}\n\n",
        ":\n\n\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"\u{feff}\"}}],\"obfuscation\":\"abc\"}\n\n",
        "unknown: field\ndata: {\"choices\":[{\"delta\":{\"content\":\"x\"},\"token_ids\":[1]}]}\n: inside\n\n",
        "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":9}}\n\n",
        "data: [DONE]\n\n",
    );
    text.replace('\n', line_end).into_bytes()
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let bits = (u32::from(group[0]) << 16)
            | (u32::from(*group.get(1).unwrap_or(&0)) << 8)
            | u32::from(*group.get(2).unwrap_or(&0));
        for digit in 0..4 {
            if digit <= group.len() {
                let index = (bits >> (18 - 6 * digit)) & 63;
                text.push(DIGITS[index as usize] as char);
            } else {
                text.push('=');
            }
        }
    }
    text
}

/// A script that sends exactly these bytes, cut like this.
pub(crate) fn bytes_in(bytes: &[u8], segment: &Value) -> Value {
    stream(json!({"body": {"pieces": [{"b64": base64(bytes)}]}, "segment": segment}))
}

async fn body_of(client: &mut RawClient, ask: &Value) -> Vec<u8> {
    client.post(CHAT, &ask.to_string()).await.expect("sent");
    assert_eq!(client.final_head().await.expect("head").status, 200);
    let (body, end) = client.rest().await.expect("body");
    assert_eq!(end, BodyEnd::Clean);
    body
}

fn same(got: &[u8], sent: &[u8], how: &str) {
    assert!(
        got == sent,
        "{how}:\n got {:?}\nsent {:?}",
        String::from_utf8_lossy(got),
        String::from_utf8_lossy(sent)
    );
}

#[tokio::test]
async fn what_cannot_be_understood_passes_and_is_counted() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let deep = format!("{}1{}", "[".repeat(300), "]".repeat(300));
    let sent = format!(
        "data: {{broken\n\ndata: {{\"choices\":1e999}}\n\ndata: {{\"choices\":\"text\"}}\n\ndata: {{\"choices\":{deep}}}\n\ndata: {{\"choices\":[{{\"delta\":{{\"content\":\"x\"}}}}]}}\n\ndata: [DONE]\n\n"
    );
    let mut client = gate.client().await;
    let got = body_of(&mut client, &bytes_in(sent.as_bytes(), &json!("event"))).await;
    same(&got, sent.as_bytes(), "malformed");
    gate.settled(&up).await;
    assert!(gate.metric("malformed_events_total", &[]) >= 1.0);
    assert_eq!(gate.stop()[0]["outcome"], "ok");
}

#[tokio::test]
async fn the_body_ends_with_the_terminal_event_whatever_the_upstream_does() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for path in [CHAT, MESSAGES, RESPONSES] {
        let ask = stream(json!({"tokens": 3, "end": "hang"}));
        let mut client = gate.post(path, &ask).await;
        client.final_head().await.expect("head");
        let (_, end) = client.all_events().await.expect("events");
        assert_eq!(end, BodyEnd::Clean, "{path}");
        gate.settled_with(&up, 0).await;
    }
    for line in gate.stop() {
        assert_eq!(line["outcome"], "ok");
        assert_eq!(line["work_end"], "complete");
    }
}

#[tokio::test]
async fn nothing_follows_the_terminal_event() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut client = gate.client().await;
    let sent = "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\ndata: [DONE]\n\n";
    let more = format!("{sent}data: {{\"choices\":[{{\"delta\":{{\"content\":\"AFTER\"}}}}]}}\n\n");
    for segment in [json!("event"), json!({"size": 5})] {
        let got = body_of(&mut client, &bytes_in(more.as_bytes(), &segment)).await;
        same(&got, sent.as_bytes(), &segment.to_string());
    }
    gate.settled_with(&up, 0).await;
}

#[tokio::test]
async fn a_normal_end_leaves_the_connection_open_for_the_next_request() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut client = gate.client().await;
    for _ in 0..3 {
        body_of(&mut client, &stream(json!({"tokens": 3}))).await;
        up.wait_for(|t| t.running == 0, SOON).await.expect("idle");
    }
    gate.settled(&up).await;
    assert_eq!(up.truth().calls_begun, 3);
}
