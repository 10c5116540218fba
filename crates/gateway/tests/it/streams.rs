//! Streams that end well: what came is what was sent, at once, and the end is an end.

use serde_json::json;
use tidegate_rig::{BodyEnd, Script};

use crate::support::{CHAT, MESSAGES, RESPONSES, gateway, stream, upstream};

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
