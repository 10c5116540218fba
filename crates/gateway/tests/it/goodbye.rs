//! The end of an HTTP/2 connection: its client is told (GOAWAY) before it comes, and begins nothing more afterwards, whatever it makes of that.

use std::time::Duration;

use serde_json::{Value, json};
use tidegate_rig::Script;

use crate::frames::{ACK, Frame, Frames, GOAWAY, HEADERS, PING, frame};
use crate::support::{CHAT, Gate, SOON, gateway, only, stream, upstream, whole};

async fn connect(gate: &Gate) -> Frames {
    Frames::connect(gate.addr()).await
}

async fn post(client: &mut Frames, stream: u32, body: &Value) {
    let fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", CHAT),
        (":authority", "localhost"),
    ];
    let body = body.to_string();
    client.request_on(stream, &fields, body.as_bytes()).await;
}

/// The next one of this kind, and no answer to what was sent.
async fn next_of(client: &mut Frames, kind: u8) -> Frame {
    loop {
        let next = client.next().await.expect("not over");
        if next.kind == kind && (kind == HEADERS || next.flags & ACK == 0) {
            return next;
        }
    }
}

/// Waits for a GOAWAY that finds no fault; the last stream that may have been begun.
async fn told(client: &mut Frames) -> u32 {
    let told = next_of(client, GOAWAY).await.payload;
    assert_eq!(told[4..8], [0; 4], "no error");
    u32::from_be_bytes([told[0], told[1], told[2], told[3]])
}

async fn answer(client: &mut Frames, ping: &Frame) {
    client.send(&frame(PING, ACK, 0, &ping.payload)).await;
}

#[tokio::test]
async fn a_limit_that_ends_a_connection_is_announced() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        c.server.keep_alive = Duration::from_millis(200);
        only(c).timeouts.request_head = Duration::from_secs(1);
    });
    let ended = |reason| gate.metric("connections_ended_total", &[("reason", reason)]);
    for (asks, polite, reason) in [
        (false, false, "request_head"),
        (false, true, "request_head"),
        (true, false, "keep_alive"),
        (true, true, "keep_alive"),
    ] {
        let before = ended(reason);
        let mut client = connect(&gate).await;
        if asks {
            post(&mut client, 1, &whole(json!({}))).await;
        }
        told(&mut client).await;
        let ping = next_of(&mut client, PING).await;
        if polite {
            answer(&mut client, &ping).await;
            assert_eq!(told(&mut client).await, u32::from(asks), "{reason}");
        }
        client.closed().await;
        let counted = |_: &Gate| ended(reason) == before + 1.0;
        gate.eventually(reason, counted).await;
    }
    gate.settled(&up).await;
}

/// What is begun before the client can know of the end is served, and so is what had begun.
#[tokio::test]
async fn a_drain_begins_nothing_for_a_client_that_does_not_listen() {
    for polite in [false, true] {
        let up = upstream(Script::default()).await;
        let gate = gateway(&up, |c| c.server.drain = Duration::from_secs(20));
        let mut client = connect(&gate).await;
        let silent = json!({"tokens": 2, "stall": {"at": "head", "ms": 3000}});
        post(&mut client, 1, &stream(silent)).await;
        up.wait_for(|t| t.running == 1, SOON).await.expect("begun");
        let during = async {
            let all = told(&mut client).await;
            assert_eq!(all, u32::MAX >> 1, "none is turned away yet");
            let ping = next_of(&mut client, PING).await;
            post(&mut client, 3, &whole(json!({}))).await;
            assert_eq!(next_of(&mut client, HEADERS).await.stream, 3);
            up.wait_for(|t| t.calls_begun == 2, SOON)
                .await
                .expect("it is served");
            let over = || {
                let lines = gate.lines();
                let over = lines.iter().filter(|l| l["reason"] == "connection_over");
                over.map(|l| (l["status"].clone(), l["attempts"].clone()))
                    .collect::<Vec<_>>()
            };
            if polite {
                answer(&mut client, &ping).await;
                assert_eq!(told(&mut client).await, 3);
                for stream in [5, 7, 9] {
                    post(&mut client, stream, &whole(json!({}))).await;
                }
            } else {
                let (mut stream, mut pace) = (5, tokio::time::interval(Duration::from_millis(50)));
                while over().len() < 3 {
                    pace.tick().await;
                    post(&mut client, stream, &whole(json!({}))).await;
                    stream += 2;
                    assert!(stream < 400, "it is never over");
                }
                assert_eq!(over()[0], (json!(503), json!(0)));
            }
            let begun = up.truth().calls_begun;
            let last = loop {
                let part = next_of(&mut client, HEADERS).await;
                if part.stream == 1 {
                    break part;
                }
                assert!(!polite || part.stream < 5, "{part:?}");
            };
            assert_eq!(last.stream, 1, "what had begun is served");
            assert_eq!(up.truth().calls_begun, if polite { 2 } else { begun });
            drop(client);
        };
        let (drained, ()) = tokio::join!(gate.gateway.drain(), during);
        assert_eq!(drained.cut, 0);
        gate.settled(&up).await;
    }
}
