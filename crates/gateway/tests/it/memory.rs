//! What the program takes of the machine, seen from outside: its memory under readers that do not read.

use serde_json::json;
use tidegate_rig::{RawClient, Script};

use crate::binary::{Program, file};
use crate::support::{CHAT, SOON, stream, upstream};

/// What the system says of it.
impl Program {
    /// Memory that it has now, in bytes.
    pub(crate) fn resident(&self) -> usize {
        let path = format!("/proc/{}/statm", self.pid());
        let statm = std::fs::read_to_string(path).expect("it runs");
        let pages = statm.split(' ').nth(1).expect("resident");
        4096 * pages.parse::<usize>().expect("a number")
    }

    /// Processor time that it has used so far, in ms.
    pub(crate) fn cpu_ms(&self) -> u64 {
        let path = format!("/proc/{}/stat", self.pid());
        let stat = std::fs::read_to_string(path).expect("it runs");
        let (_, after_name) = stat.rsplit_once(')').expect("a name");
        // utime and stime, in ticks of 10 ms.
        let times = after_name.split_whitespace().skip(11).take(2);
        10 * times
            .map(|t| t.parse::<u64>().expect("a number"))
            .sum::<u64>()
    }

    pub(crate) fn threads(&self) -> usize {
        let path = format!("/proc/{}/task", self.pid());
        std::fs::read_dir(path).expect("it runs").count()
    }
}

/// Bounded in bytes, not in events: of one size or another, what a stream may hold is the same.
#[tokio::test]
async fn c91_readers_that_stop_take_bounded_memory_whatever_the_events() {
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
