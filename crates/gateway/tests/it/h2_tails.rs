//! The end of an answer over HTTP/2, which flow control keeps back: for a slow reader it is whole, for one that reads nothing it is not kept.

use std::time::Duration;

use h2::{Reason, RecvStream};
use serde_json::{Value, json};
use tidegate_rig::Script;
use tokio::net::TcpStream;

use crate::http2::Client;
use crate::support::{CHAT, Gate, SOON, gateway, only, stream, upstream, whole};
use crate::tls::{Pair, over, pair, serve_tls};

const WINDOW: u32 = 8 * 1024;
const IDLE: Duration = Duration::from_millis(100);

async fn connect(gate: &Gate, tls: Option<&Pair>) -> Client {
    let tcp = TcpStream::connect(gate.addr()).await.expect("accepted");
    tcp.set_nodelay(true).expect("an option");
    match tls {
        Some(pair) => {
            let tls = over(tcp, &pair.cert, "h2").await.expect("a handshake");
            Client::with_window(tls, WINDOW).await
        }
        None => Client::with_window(tcp, WINDOW).await,
    }
}

fn long(body: fn(Value) -> Value) -> Value {
    body(json!({"tokens": 1000, "event_bytes": 150}))
}

/// A window after each pause.
async fn slowly(mut body: RecvStream, pause: Duration) -> Result<Vec<u8>, h2::Error> {
    let mut read = Vec::new();
    let mut pace = tokio::time::interval(pause);
    loop {
        pace.tick().await;
        let taken = read.len();
        while read.len() - taken < WINDOW as usize {
            let data = tokio::time::timeout(SOON, body.data())
                .await
                .expect("in time");
            let Some(data) = data else { return Ok(read) };
            read.extend_from_slice(&data?);
            if body.is_end_stream() {
                return Ok(read);
            }
        }
        let room = body.flow_control();
        room.release_capacity(read.len() - taken).expect("released");
    }
}

/// Also where all of the answer was in the hands of the connection long before, and nothing else is asked for on it.
#[tokio::test]
async fn a_slow_reader_gets_all_of_its_answer() {
    let (up, pair) = (upstream(Script::default()).await, pair());
    for tls in [None, Some(&pair)] {
        for ask_stream in [false, true] {
            let gate = gateway(&up, |c| {
                only(c).ask_stream = ask_stream;
                c.server.keep_alive = IDLE;
                if tls.is_some() {
                    serve_tls(c, &pair);
                }
            });
            for kind in [stream, whole] {
                let at = format!(
                    "tls {} ask_stream {ask_stream} {}",
                    tls.is_some(),
                    kind(json!({}))
                );
                let mut client = connect(&gate, tls).await;
                let (status, body) = client.post(CHAT, &long(kind)).await;
                assert_eq!(status, 200, "{at}");
                let read = slowly(body, IDLE / 2).await;
                let read = read.unwrap_or_else(|cut| panic!("{at}: {cut}"));
                assert!(read.len() > 2 * WINDOW as usize, "{at}: {}", read.len());
                let text = String::from_utf8(read).expect("text");
                let end = text.trim_end();
                assert!(end.ends_with('}') || end.ends_with("[DONE]"), "{at}: {end}");
            }
            gate.settled(&up).await;
        }
    }
}

/// What nobody reads is kept no longer than `write` allows, although the gateway is done with it and its connection is used all the while.
#[tokio::test]
async fn an_answer_that_is_not_read_is_not_kept() {
    let (up, pair) = (upstream(Script::default()).await, pair());
    for tls in [None, Some(&pair)] {
        let gate = gateway(&up, |c| {
            only(c).ask_stream = true;
            only(c).timeouts.write = Duration::from_millis(300);
            if tls.is_some() {
                serve_tls(c, &pair);
            }
        });
        let mut client = connect(&gate, tls).await;
        let mut unread = Vec::new();
        for _ in 0..4 {
            unread.push(client.post(CHAT, &long(whole)).await.1);
        }
        let cut = async {
            for mut body in unread {
                loop {
                    match body.data().await.expect("no clean end") {
                        Ok(_) => {}
                        Err(cut) => break assert_eq!(cut.reason(), Some(Reason::CANCEL)),
                    }
                }
            }
        };
        let little = whole(json!({}));
        let mut cut = std::pin::pin!(tokio::time::timeout(SOON, cut));
        loop {
            tokio::select! {
                cut = &mut cut => break cut.expect("in time"),
                (status, body) = client.post(CHAT, &little) => {
                    assert_eq!(status, 200);
                    slowly(body, IDLE).await.expect("whole");
                }
            }
        }
        gate.settled(&up).await;
    }
}
