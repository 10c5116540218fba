//! Memory of the program under readers that do not read, seen from outside.

use serde_json::json;
use tidegate_rig::{RawClient, Script};

use crate::binary::{Program, file};
use crate::support::{CHAT, SOON, stream, upstream};

/// Bounded in bytes, not in events: of one size or another, what a stream may hold is the same.
#[tokio::test]
async fn readers_that_stop_take_bounded_memory_whatever_the_events() {
    let up = upstream(Script::default()).await;
    for (event_bytes, readers) in [(16_384, 40), (3 * 1024 * 1024, 20)] {
        let program = Program::configured(&file(&up, "slots = 100"));
        let addr = program.address("listen=").await;
        let before = program.resident();
        let body = stream(json!({"end": "never", "event_bytes": event_bytes})).to_string();
        let mut clients = Vec::new();
        for _ in 0..readers {
            let mut client = RawClient::connect_slow(addr, 4096).await.expect("accepted");
            client.post(CHAT, &body).await.expect("sent");
            client.final_head().await.expect("head");
            client.body_bytes(10_000).await.expect("a little");
            clients.push(client);
        }
        let grown = program.resident().saturating_sub(before);
        assert!(grown < readers * 512 * 1024, "{event_bytes}: {grown} bytes");
        drop(clients);
        up.wait_for(|t| t.running == 0, SOON).await.expect("let go");
    }
}
