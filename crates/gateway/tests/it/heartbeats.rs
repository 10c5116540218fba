//! Comments that keep a silent stream alive: between two events, after the head, and nowhere else.

use std::time::Duration;

use serde_json::{Value, json};
use tidegate_rig::{BodyEnd, Script};

use crate::support::{CHAT, Gate, gateway, only, stream, upstream};

const BEAT: &[u8] = b": keep-alive\n\n";

fn beating(up: &tidegate_rig::FakeUpstream) -> Gate {
    gateway(up, |c| only(c).heartbeat = Some(Duration::from_millis(40)))
}

/// The body without its heartbeats, and how many there were. Each must stand at the start or directly after a blank line.
pub(crate) fn without_beats(body: &[u8]) -> (Vec<u8>, usize) {
    let (mut kept, mut beats, mut at) = (Vec::new(), 0, 0);
    while at < body.len() {
        if body[at..].starts_with(BEAT) {
            let ends = [&b""[..], b"\n\n", b"\r\n\r\n", b"\r\r"];
            assert!(
                kept.is_empty() || ends[1..].iter().any(|end| kept.ends_with(end)),
                "a heartbeat after {:?}",
                String::from_utf8_lossy(&kept[kept.len().saturating_sub(30)..])
            );
            beats += 1;
            at += BEAT.len();
        } else {
            kept.push(body[at]);
            at += 1;
        }
    }
    (kept, beats)
}

async fn run(gate: &Gate, script: Value) -> Vec<u8> {
    let mut client = gate.post(CHAT, &stream(script)).await;
    assert_eq!(client.final_head().await.expect("head").status, 200);
    let (body, end) = client.rest().await.expect("body");
    assert_eq!(end, BodyEnd::Clean);
    body
}

#[tokio::test]
async fn a_pause_after_the_head_is_filled() {
    let up = upstream(Script::default()).await;
    let gate = beating(&up);
    let (_, beats) = without_beats(&run(&gate, json!({"tokens": 2, "first_ms": 2500})).await);
    assert!(beats >= 2, "{beats}");
    gate.settled(&up).await;
}

#[tokio::test]
async fn a_pause_inside_an_event_is_not() {
    let up = upstream(Script::default()).await;
    let gate = beating(&up);
    let long = "x".repeat(100_000);
    for (before, after) in [
        ("data: {\"a\":".to_owned(), "1}\n\n".to_owned()),
        ("data: {}\n".to_owned(), "\n".to_owned()),
        ("event: message\n".to_owned(), "data: {}\n\n".to_owned()),
        ("data: {}\r\n\r".to_owned(), "\n".to_owned()),
        ("data: {}\r".to_owned(), "\n\r\n".to_owned()),
        (format!("data: \"{long}"), format!("{long}\"\n\n")),
    ] {
        // The only pause is the one inside: a beat between two writes elsewhere would be right.
        let first = format!("data: {{\"choices\":[]}}\n\n{before}");
        let last = format!("{after}data: [DONE]\n\n");
        let pieces = json!([{"text": first, "pause_ms": 200}, {"text": last}]);
        let body = run(&gate, json!({"body": {"pieces": pieces}})).await;
        let (kept, beats) = without_beats(&body);
        assert!(
            kept == (first + &last).as_bytes(),
            "{:?}",
            &before[..before.len().min(40)]
        );
        let held = before.len() < 65_536 && !before.ends_with("\n\r");
        // While less than an event was sent on, the client stands between two events.
        assert!(
            held || beats == 0,
            "{:?}: {beats}",
            &before[..before.len().min(40)]
        );
    }
    gate.settled(&up).await;
}

#[tokio::test]
async fn c33_a_character_cut_in_two_stays_whole() {
    let up = upstream(Script::default()).await;
    let gate = beating(&up);
    // "ä" in base64, cut between its two bytes: "data: \"\xc3" and "\xa4\"\n\n".
    let pieces = json!([
        {"b64": "ZGF0YTogIsM=", "pause_ms": 150}, {"b64": "pCIKCg=="}, {"text": "data: [DONE]\n\n"},
    ]);
    let body = run(&gate, json!({"body": {"pieces": pieces}})).await;
    let (kept, _) = without_beats(&body);
    assert_eq!(
        String::from_utf8(kept).expect("text"),
        "data: \"ä\"\n\ndata: [DONE]\n\n"
    );
    gate.settled(&up).await;
}

#[tokio::test]
async fn a_stream_that_flows_gets_none_and_neither_does_an_answer_in_one_piece() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| only(c).heartbeat = Some(Duration::from_secs(5)));
    let (_, beats) = without_beats(&run(&gate, json!({"tokens": 20, "pace_ms": 5.0})).await);
    assert_eq!(beats, 0);
    let gate = beating(&up);
    let script = json!({"tokens": 4, "stall": {"at": {"mid_event": 1}, "ms": 400}});
    let mut client = gate.post(CHAT, &crate::support::whole(script)).await;
    client.final_head().await.expect("head");
    let (body, _) = client.rest().await.expect("body");
    assert!(serde_json::from_slice::<Value>(&body).is_ok());
    gate.settled(&up).await;
}

#[tokio::test]
async fn an_error_answer_is_never_preceded_by_one() {
    let up = upstream(Script::default()).await;
    let gate = beating(&up);
    let script = json!({"status": 503, "delay_ms": 400});
    let mut client = gate.post(CHAT, &stream(script)).await;
    let head = client.final_head().await.expect("head");
    assert_eq!(
        (head.status, head.header("content-type")),
        (503, Some("application/json"))
    );
    client.rest().await.expect("body");
    gate.settled(&up).await;
}
