//! Streams that end well: what came is what was sent, at once, and the end is an end.

use serde_json::{Value, json};
use tidegate_rig::clock::now_ns;
use tidegate_rig::{BodyEnd, RawClient, Script};

use crate::support::{CHAT, Gate, MESSAGES, RESPONSES, SOON, gateway, stream, upstream};

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
async fn bytes_pass_unchanged_in_all_line_ends_and_cuts() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut client = gate.client().await;
    for line_end in ["\n", "\r\n", "\r"] {
        let sent = odd(line_end);
        let cuts = [
            json!("event"),
            json!("byte"),
            json!("once"),
            json!({"size": 2}),
            json!({"size": 7}),
            json!({"size": 64}),
            json!({"wire": 3}),
        ];
        for segment in cuts {
            let got = body_of(&mut client, &bytes_in(&sent, &segment)).await;
            same(&got, &sent, &format!("{line_end:?} {segment}"));
        }
    }
    gate.settled(&up).await;
    let lines = gate.stop();
    assert_eq!(lines.len(), 21);
    for line in lines {
        assert_eq!(line["outcome"], "ok", "{line}");
        assert_eq!(line["events"], 10, "{line}");
        let usage = (
            &line["usage"],
            &line["input_tokens"],
            &line["output_tokens"],
        );
        assert_eq!(usage, (&json!("reported"), &json!(7), &json!(9)), "{line}");
    }
}

#[tokio::test]
async fn c29_c30_bytes_pass_unchanged_cut_at_each_single_position() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut client = gate.client().await;
    for line_end in ["\n", "\r\n"] {
        let sent = odd(line_end);
        for cut in 1..sent.len() {
            let got = body_of(&mut client, &bytes_in(&sent, &json!({"cut_at": [cut]}))).await;
            same(&got, &sent, &format!("{line_end:?}, cut at {cut}"));
        }
    }
    gate.settled(&up).await;
}

#[tokio::test]
async fn c29_bytes_that_are_no_text_pass_too() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut client = gate.client().await;
    let mut sent =
        b"\xef\xbb\xbfdata: {\"choices\":[{\"delta\":{\"content\":\"\xff\xfe\"}}]}\n\n".to_vec();
    sent.extend_from_slice(b"data: \x00\n\ndata: [DONE]\n\n");
    for segment in [json!("event"), json!("byte")] {
        let got = body_of(&mut client, &bytes_in(&sent, &segment)).await;
        same(&got, &sent, &segment.to_string());
    }
    gate.settled(&up).await;
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
async fn sentinels_inside_the_text_are_text() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let text = "data: [DONE]\n\nevent: error\n: ping \"error\":{\"message\":\"x\"} {\"choices\":[],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":999}}";
    for path in [CHAT, MESSAGES, RESPONSES] {
        let ask = stream(json!({"tokens": 4, "token_text": text, "usage": "yes"}));
        let mut client = gate.post(path, &ask).await;
        let (events, end) = {
            client.final_head().await.expect("head");
            client.all_events().await.expect("events")
        };
        assert_eq!(end, BodyEnd::Clean);
        let said = events.iter().filter(|e| e.data.contains("999")).count();
        assert!(said >= 4, "{path}: {said}");
    }
    gate.settled(&up).await;
    for line in gate.stop() {
        assert_eq!(line["outcome"], "ok", "{line}");
        assert_eq!(line["output_tokens"], 4, "{line}");
    }
}

#[tokio::test]
async fn an_event_name_and_its_data_may_come_apart() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let pieces = [
        "event: message_start\n",
        "data: {\"type\":\"message_start\",\"message\":{}}\n\n",
        "event: content_block_delta\n",
        "data: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"x\"}}\n\n",
        "event: message_stop\n",
        "data: {\"type\":\"message_stop\"}\n\n",
    ];
    let script: Vec<Value> = pieces
        .iter()
        .map(|text| json!({"text": text, "pause_ms": 5}))
        .collect();
    let ask = stream(json!({"body": {"pieces": script}}));
    let mut client = gate.post(MESSAGES, &ask).await;
    client.final_head().await.expect("head");
    let (body, end) = client.rest().await.expect("body");
    assert_eq!(end, BodyEnd::Clean);
    same(&body, pieces.concat().as_bytes(), "apart");
    gate.settled(&up).await;
    assert_eq!(up.truth().calls_begun, 1);
}

#[tokio::test]
async fn each_event_goes_on_before_the_next_one_comes() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for n in 1..4 {
        let ask = stream(json!({"stall": {"at": {"event": n}}}));
        let mut client = gate.post(CHAT, &ask).await;
        client.final_head().await.expect("head");
        assert_eq!(client.events(n).await.expect("events").len(), n);
    }
    gate.settled_with(&up, 0).await;
}

#[tokio::test]
async fn c40_small_events_are_not_held_back() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let ask = stream(json!({"tokens": 60, "pace_ms": 5.0, "stamp": true}));
    let mut client = gate.post(CHAT, &ask).await;
    client.final_head().await.expect("head");
    let mut delays = Vec::new();
    while let [event] = &client.events(1).await.expect("event")[..] {
        let stamp = event.json().and_then(|j| j["stamp"].as_u64());
        delays.extend(stamp.map(|at| now_ns().saturating_sub(at)));
    }
    delays.sort_unstable();
    assert!(delays.len() >= 50, "{}", delays.len());
    // Nagle's algorithm against a delayed acknowledgement takes 40 ms.
    let median = delays[delays.len() / 2];
    assert!(median < 20_000_000, "{median} ns");
    gate.settled(&up).await;
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

async fn ending(gate: &Gate, script: Value) -> (Vec<u8>, BodyEnd) {
    let mut client = gate.post(CHAT, &stream(script)).await;
    assert_eq!(client.final_head().await.expect("head").status, 200);
    client.rest().await.expect("body")
}

#[tokio::test]
async fn a_last_event_without_its_blank_line_is_passed_as_it_is() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for done in [true, false] {
        for newlines in [2, 1, 0] {
            let script =
                json!({"tokens": 3, "done": done, "final_newlines": newlines, "usage": "yes"});
            let (body, end) = ending(&gate, script).await;
            let text = String::from_utf8(body).expect("text");
            assert_eq!(end, BodyEnd::Clean, "{done} {newlines}");
            let tail = text.len() - text.trim_end_matches('\n').len();
            assert_eq!(tail, newlines, "{done} {newlines}: {text:?}");
            assert_eq!(text.contains("[DONE]"), done);
        }
    }
    gate.settled(&up).await;
    for line in gate.stop() {
        assert_eq!(line["outcome"], "ok", "{line}");
        assert_eq!(line["output_tokens"], 3, "{line}");
    }
}

#[tokio::test]
async fn event_streams_say_that_they_must_not_be_buffered() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let cases = [
        (json!({}), "no-cache"),
        (
            json!({"headers": [["cache-control", "no-store"]]}),
            "no-store",
        ),
        (
            json!({"headers": [["cache-control", "public"]]}),
            "no-cache",
        ),
        (
            json!({"headers": [["content-type", "Text/Event-Stream; charset=UTF-8"]]}),
            "no-cache",
        ),
    ];
    for (script, cache) in cases {
        let mut client = gate.post(CHAT, &stream(script)).await;
        let head = client.final_head().await.expect("head");
        let kind = head.header("content-type").expect("a type");
        assert!(kind.to_ascii_lowercase().starts_with("text/event-stream"));
        assert_eq!(head.header("cache-control"), Some(cache));
        assert_eq!(head.header("x-accel-buffering"), Some("no"));
        assert_eq!(head.header("connection"), None);
        assert_eq!(head.header("content-length"), None);
        assert_eq!(head.header("transfer-encoding"), Some("chunked"));
        client.rest().await.expect("body");
    }
    gate.settled(&up).await;
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
