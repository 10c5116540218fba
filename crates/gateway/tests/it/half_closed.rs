//! Clients that have said their last word, or whose words are not read on: only a reset tells that they have left, plain and over TLS; and
//! how the gateway says goodbye itself.

use std::time::Duration;

use serde_json::{Value, json};
use socket2::SockRef;
use tidegate::config::{Config, HalfClose};
use tidegate_rig::{FakeUpstream, Script};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use crate::http2::Client;
use crate::support::{
    CANCEL, CHAT, Gate, SOON, STUCK, ask, deaf, gateway, gateway_at, only, slots, stream, upstream,
    whole,
};
use crate::tls::{Pair, connect, over, pair, serve_tls};

/// A client's connection, plain or over TLS.
enum Socket {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// What a client does before it resets its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Before {
    Nothing,
    Fin,
    /// More than is read ahead comes behind its request.
    Flood,
    CloseNotify,
    CloseNotifyAndFin,
}

impl Before {
    fn all(tls: bool) -> &'static [Self] {
        const ALL: [Before; 5] = [
            Before::Nothing,
            Before::Fin,
            Before::Flood,
            Before::CloseNotify,
            Before::CloseNotifyAndFin,
        ];
        // Without TLS there is nothing to notify by; with it a FIN alone is a break.
        match tls {
            false => &ALL[..3],
            true => &ALL[2..],
        }
    }
}

impl Socket {
    async fn open(gate: &Gate, pair: Option<&Pair>) -> Self {
        let Some(pair) = pair else {
            let tcp = TcpStream::connect(gate.addr()).await;
            return Self::Plain(tcp.expect("accepted"));
        };
        let tls = connect(gate, &pair.cert, "http/1.1").await;
        Self::Tls(Box::new(tls.expect("a handshake")))
    }

    fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(tcp) => tcp,
            Self::Tls(tls) => tls.get_ref().0,
        }
    }

    async fn send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        match self {
            Self::Plain(tcp) => tcp.write_all(bytes).await,
            Self::Tls(tls) => {
                tls.write_all(bytes).await?;
                tls.flush().await
            }
        }
    }

    async fn post(&mut self, path: &str, body: &Value) {
        let request =
            tidegate_rig::raw::request_bytes("POST", path, &[], body.to_string().as_bytes());
        self.send(&request).await.expect("sent");
    }

    /// Reads until this has come.
    async fn reads(&mut self, what: &str) {
        let mut read = Vec::new();
        while tidegate_rig::raw::find(&read, what.as_bytes()).is_none() {
            let one = async {
                match self {
                    Self::Plain(tcp) => tcp.read_buf(&mut read).await,
                    Self::Tls(tls) => tls.read_buf(&mut read).await,
                }
            };
            let n = tokio::time::timeout(SOON, one).await;
            assert_ne!(n.expect("in time").expect("read"), 0, "{read:?}");
        }
    }

    async fn close_notify(&mut self) {
        let Self::Tls(tls) = self else {
            panic!("plain");
        };
        tls.get_mut().1.send_close_notify();
        tls.flush().await.expect("sent");
    }

    fn fin(&self) {
        let shut = SockRef::from(self.tcp()).shutdown(std::net::Shutdown::Write);
        shut.expect("a FIN");
    }

    async fn prepare(&mut self, before: Before) {
        match before {
            Before::Nothing => {}
            Before::Fin => self.fin(),
            Before::Flood => {
                // What the kernel does not take is more than enough.
                let _ = tokio::time::timeout(STUCK, self.send(&[b'x'; 200_000])).await;
            }
            Before::CloseNotify => self.close_notify().await,
            Before::CloseNotifyAndFin => {
                self.close_notify().await;
                self.fin();
            }
        }
    }

    fn reset(self) {
        let hard = SockRef::from(self.tcp()).set_linger(Some(Duration::ZERO));
        hard.expect("set");
    }
}

/// The one worker has seen all that was sent to it before.
async fn caught_up(gate: &Gate, pair: Option<&Pair>) {
    let mut other = Socket::open(gate, pair).await;
    other.post("/nowhere", &json!({})).await;
    other.reads("HTTP/1.1 404").await;
}

fn serving(up: &FakeUpstream, pair: Option<&Pair>, change: impl FnOnce(&mut Config)) -> Gate {
    gateway(up, |c| {
        c.server.half_close = HalfClose::Serve;
        c.server.workers = slots(1);
        only(c).queue = 10;
        pair.into_iter().for_each(|pair| serve_tls(c, pair));
        change(c);
    })
}

/// A call that waits for its answer, or for the rest of it.
fn stalled(streaming: bool, begun: bool) -> Value {
    match (streaming, begun) {
        (true, false) => stream(json!({"stall": {"at": "head"}})),
        (true, true) => stream(json!({"stall": {"at": {"event": 2}}})),
        (false, false) => whole(json!({"stall": {"at": "head"}})),
        (false, true) => {
            let pieces = json!([{"text": "{\"text\":\"", "pause_ms": 60_000}, {"text": "word\"}"}]);
            whole(json!({
                "headers": [["content-type", "application/json"]],
                "framing": "length", "body": {"pieces": pieces},
            }))
        }
    }
}

/// A client that may only have closed its half has left when it resets its connection, in whatever phase its call is.
#[tokio::test]
async fn c09_a_reset_is_noticed_where_nothing_is_read_any_more() {
    let up = upstream(Script::default()).await;
    for pair in [None, Some(pair())] {
        let pair = pair.as_ref();
        let gate = serving(&up, pair, |c| only(c).slots = slots(1));
        let mut calls = 0;
        for before in Before::all(pair.is_some()) {
            for streaming in [false, true] {
                for begun in [false, true] {
                    let tls = pair.is_some();
                    let name =
                        format!("{before:?}, begun {begun}, streaming {streaming}, TLS {tls}");
                    let body = stalled(streaming, begun);
                    let mut client = Socket::open(&gate, pair).await;
                    client.post(CHAT, &body).await;
                    let running = up.wait_for(|t| t.running == 1, SOON).await;
                    running.expect("running");
                    if begun {
                        client.reads("HTTP/1.1 200").await;
                    }
                    let mut queued = Socket::open(&gate, pair).await;
                    queued.post(CHAT, &ask(json!({"stream": streaming}))).await;
                    gate.eventually("it is queued", |g| g.metric("queued", &[]) == 1.0)
                        .await;
                    for client in [&mut queued, &mut client] {
                        client.prepare(*before).await;
                    }
                    caught_up(&gate, pair).await;
                    assert_eq!(gate.metric("running", &[]), 1.0, "{name}: it is served");
                    assert_eq!(gate.metric("queued", &[]), 1.0, "{name}: it is served");
                    queued.reset();
                    gate.eventually("it left the queue", |g| g.metric("queued", &[]) == 0.0)
                        .await;
                    client.reset();
                    let told = up.wait_for(|t| t.running == 0, CANCEL).await;
                    told.unwrap_or_else(|t| panic!("{name}: not told: {t:?}"));
                    calls += 2;
                }
            }
        }
        gate.settled_with(&up, 0).await;
        for line in gate.stop() {
            let sync = line["status"] == 404;
            assert!(sync || line["outcome"] == "client_closed", "{line}");
            calls -= usize::from(!sync);
        }
        assert_eq!(calls, 0);
    }
}

/// Nothing is read on of an upload whose server has stopped reading, and that is longer than what is read ahead.
#[tokio::test]
async fn c09_a_reset_is_noticed_in_an_upload_that_is_not_read_on() {
    for half_close in [HalfClose::Gone, HalfClose::Serve] {
        for pair in [None, Some(pair())] {
            let (_deaf, address) = deaf();
            let gate = gateway_at(address, |c| {
                c.server.half_close = half_close;
                pair.iter().for_each(|pair| serve_tls(c, pair));
            });
            let mut client = Socket::open(&gate, pair.as_ref()).await;
            let head = "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\n\
                Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 60000000\r\n\r\n";
            client.send(head.as_bytes()).await.expect("sent");
            let sends = async { while client.send(&[b'x'; 20_000]).await.is_ok() {} };
            let stuck = tokio::time::timeout(STUCK, sends).await;
            stuck.expect_err("nobody reads it");
            assert_eq!(gate.metric("running", &[]), 1.0, "it is still being sent");
            client.reset();
            gate.eventually("it was noticed", |g| g.metric("running", &[]) == 0.0)
                .await;
            assert_eq!(gate.logged(1).await[0]["outcome"], "client_closed");
        }
    }
}

/// HTTP/2 has no half-closed clients: a connection that ends, and one that is reset, are a client that has left.
#[tokio::test]
async fn c09_an_http2_client_that_resets_has_left_too() {
    let up = upstream(Script::default()).await;
    for pair in [None, Some(pair())] {
        let pair = pair.as_ref();
        let gate = serving(&up, pair, |_| {});
        for hard in [false, true] {
            for streaming in [false, true] {
                let tcp = TcpStream::connect(gate.addr()).await.expect("accepted");
                let again = tcp.into_std().expect("a socket");
                let tcp = TcpStream::from_std(again.try_clone().expect("twice")).expect("a socket");
                if hard {
                    let hard = SockRef::from(&again).set_linger(Some(Duration::ZERO));
                    hard.expect("set");
                }
                let mut client = match pair {
                    None => Client::over(tcp).await,
                    Some(pair) => {
                        Client::over(over(tcp, &pair.cert, "h2").await.expect("a handshake")).await
                    }
                };
                drop(again);
                let body = stalled(streaming, false);
                let waits = tokio::spawn(async move { client.post(CHAT, &body).await });
                let running = up.wait_for(|t| t.running == 1, SOON).await;
                running.expect("running");
                waits.abort();
                let told = up.wait_for(|t| t.running == 0, CANCEL).await;
                told.unwrap_or_else(|t| panic!("hard {hard}, TLS {}: {t:?}", pair.is_some()));
            }
        }
        gate.settled_with(&up, 0).await;
    }
}
