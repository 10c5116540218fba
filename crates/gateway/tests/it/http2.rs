//! HTTP/2 on either side, and every pairing of the two versions.

use std::time::Duration;

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{Reason, RecvStream};
use http::Request;
use serde_json::{Value, json};
use tidegate::config::{Config, HttpVersion};
use tidegate_rig::{Closed, FakeUpstream, H2Front, H2Options, Script};
use tokio::net::TcpStream;
use tokio::task::AbortHandle;

use crate::support::{
    CHAT, Gate, LOCALHOST, MESSAGES, SOON, endpoint, gateway, gateway_at, only, slots, stream,
    upstream, whole,
};

/// A client connection with prior knowledge, without TLS.
pub(crate) struct Client {
    send: SendRequest<Bytes>,
    driver: AbortHandle,
}

impl Drop for Client {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Client {
    pub(crate) async fn connect(gate: &Gate) -> Self {
        let tcp = TcpStream::connect(gate.addr()).await.expect("accepted");
        Self::over(tcp).await
    }

    pub(crate) async fn over(
        io: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    ) -> Self {
        Self::with_window(io, 65_535).await
    }

    /// Each of its streams may be sent so many bytes before it is read.
    pub(crate) async fn with_window(
        io: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
        window: u32,
    ) -> Self {
        let (send, connection) = h2::client::Builder::new()
            .initial_window_size(window)
            // One unread stream must not use up the credit of the others: that would be the client's own doing.
            .initial_connection_window_size(1 << 20)
            .handshake(io)
            .await
            .expect("HTTP/2");
        let driver = tokio::spawn(async move {
            // How it ends is seen on its streams.
            let _ = connection.await;
        });
        Self {
            send,
            driver: driver.abort_handle(),
        }
    }

    async fn begin(&mut self, method: &str, path: &str, body: &str) -> ResponseFuture {
        let request = Request::builder()
            .method(method)
            .uri(format!("http://localhost{path}"))
            .header("content-type", "application/json")
            .body(())
            .expect("a request");
        self.send = self.send.clone().ready().await.expect("room");
        let (response, mut sending) = self
            .send
            .send_request(request, body.is_empty())
            .expect("sent");
        if !body.is_empty() {
            sending
                .send_data(Bytes::copy_from_slice(body.as_bytes()), true)
                .expect("sent");
        }
        response
    }

    pub(crate) async fn post(&mut self, path: &str, body: &Value) -> (u16, RecvStream) {
        let response = self.begin("POST", path, &body.to_string()).await;
        let response = within(response).await.expect("a head");
        (response.status().as_u16(), response.into_body())
    }
}

async fn within<T>(wait: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, wait).await.expect("in time")
}

/// The rest of a body and how it ended.
async fn rest(mut body: RecvStream) -> (Vec<u8>, Result<(), h2::Error>) {
    let mut read = Vec::new();
    while let Some(data) = within(body.data()).await {
        match data {
            Ok(data) => {
                body.flow_control()
                    .release_capacity(data.len())
                    .expect("released");
                read.extend_from_slice(&data);
            }
            Err(error) => return (read, Err(error)),
        }
    }
    (read, Ok(()))
}

async fn front(up: &FakeUpstream, options: H2Options) -> H2Front {
    H2Front::start(LOCALHOST, up.addr(), options)
        .await
        .expect("a port")
}

fn over_http2(config: &mut Config) {
    only(config).pool.http = HttpVersion::Http2;
}

#[tokio::test]
async fn streams_and_answers_pass_over_one_connection() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut client = Client::connect(&gate).await;
    for _ in 0..3 {
        for path in [CHAT, MESSAGES] {
            let (status, body) = client.post(path, &stream(json!({"tokens": 5}))).await;
            assert_eq!(status, 200);
            let (body, end) = rest(body).await;
            assert!(end.is_ok());
            let text = String::from_utf8(body).expect("text");
            assert!(text.contains("[DONE]") || text.contains("message_stop"));
            let (status, body) = client.post(path, &whole(json!({}))).await;
            assert_eq!(status, 200);
            serde_json::from_slice::<Value>(&rest(body).await.0).expect("JSON");
        }
    }
    gate.settled(&up).await;
}

/// A reset of the stream is a client that leaves, in each phase; the connection and the other streams stay.
#[tokio::test]
async fn a_reset_stream_is_a_client_that_left() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| only(c).slots = slots(2));
    let mut client = Client::connect(&gate).await;
    let endless = stream(json!({"end": "never", "pace_ms": 5}));
    let (_, mut stays) = client.post(CHAT, &endless).await;
    let silent = client
        .begin(
            "POST",
            CHAT,
            &stream(json!({"stall": {"at": "head"}})).to_string(),
        )
        .await;
    up.wait_for(|t| t.running == 2, SOON)
        .await
        .expect("both run");
    let queued = client.begin("POST", CHAT, &endless.to_string()).await;
    gate.eventually("it waits", |g| g.metric("queued", &[]) == 1.0)
        .await;
    drop(queued);
    gate.eventually("it has left the queue", |g| g.metric("queued", &[]) == 0.0)
        .await;
    drop(silent);
    up.wait_for(|t| t.running == 1 && t.ended_peer_rst == 1, SOON)
        .await
        .expect("cancelled before its head");
    let (_, streaming) = client.post(CHAT, &endless).await;
    drop(streaming);
    up.wait_for(|t| t.running == 1 && t.ended_peer_rst == 2, SOON)
        .await
        .expect("cancelled in mid-stream");
    within(stays.data())
        .await
        .expect("more")
        .expect("it goes on");
    drop(stays);
    gate.settled(&up).await;
    assert_eq!(up.truth().calls_begun, 3, "the queued one never got there");
}

/// A broken answer is a reset stream with INTERNAL_ERROR after the error event, never an ended one.
#[tokio::test]
async fn a_broken_answer_is_a_reset_stream() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut client = Client::connect(&gate).await;
    for end in ["rst", "fin"] {
        let (status, body) = client
            .post(CHAT, &stream(json!({"end": end, "end_at": 3})))
            .await;
        assert_eq!(status, 200);
        let (body, broken) = rest(body).await;
        assert_eq!(
            broken.expect_err("no clean end").reason(),
            Some(Reason::INTERNAL_ERROR)
        );
        assert!(String::from_utf8_lossy(&body).contains("\"error\""));
    }
    assert_eq!(
        client.post(CHAT, &whole(json!({}))).await.0,
        200,
        "the connection is whole"
    );
}

/// One stream that is not read is cut at its limit; the others on the connection do not feel it.
#[tokio::test]
async fn c107_a_stream_that_is_not_read_is_cut_alone() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| only(c).timeouts.write = Duration::from_millis(700));
    let mut client = Client::connect(&gate).await;
    let (_, unread) = client
        .post(CHAT, &stream(json!({"end": "never", "event_bytes": 1000})))
        .await;
    let mut served = 0;
    while up.truth().ended_peer_rst == 0 {
        let (status, body) = client.post(CHAT, &whole(json!({}))).await;
        assert_eq!(status, 200);
        assert!(rest(body).await.1.is_ok());
        served += 1;
    }
    assert!(served > 3, "{served}");
    gate.eventually("it is counted", |g| {
        g.metric("timeouts_total", &[("tier", "write")]) == 1.0
    })
    .await;
    // At the end of the call, a moment later.
    gate.eventually("and so is its call", |g| {
        g.metric("calls_total", &[("outcome", "client_stalled")]) == 1.0
    })
    .await;
    drop(unread);
    gate.settled(&up).await;
}

/// Streams that are begun and reset at once, faster than they can be served, end the connection.
#[tokio::test]
async fn rapid_resets_end_the_connection() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| only(c).slots = slots(4));
    let mut client = Client::connect(&gate).await;
    let body = stream(json!({"stall": {"at": "head"}})).to_string();
    let flood = async {
        for _ in 0..20_000 {
            let Ok(ready) = client.send.clone().ready().await else {
                return;
            };
            client.send = ready;
            let request = Request::post(format!("http://localhost{CHAT}"))
                .body(())
                .expect("a request");
            let Ok((_, mut sending)) = client.send.send_request(request, false) else {
                return;
            };
            let _ = sending.send_data(Bytes::copy_from_slice(body.as_bytes()), false);
            sending.send_reset(Reason::CANCEL);
            tokio::task::yield_now().await;
        }
    };
    within(flood).await;
    gate.settled(&up).await;
    let mut other = gate.post(CHAT, &whole(json!({}))).await;
    assert_eq!(
        other.final_head().await.expect("head").status,
        200,
        "others are served"
    );
}

/// A preface and nothing more is held to the limit of a request head.
#[tokio::test]
async fn c118_a_connection_with_only_a_preface_is_closed() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).timeouts.request_head = Duration::from_millis(300)
    });
    let mut client = gate.client().await;
    client
        .send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        .await
        .expect("sent");
    assert_ne!(client.closed(SOON).await, Closed::Open);
    gate.eventually("counted", |g| {
        g.metric("connections_ended_total", &[("reason", "request_head")]) == 1.0
    })
    .await;
}

/// Fewer streams on a connection than calls: more connections are opened, and nobody waits for nothing.
#[tokio::test]
async fn more_connections_when_the_upstreams_streams_run_out() {
    let up = upstream(Script::default()).await;
    let h2 = front(
        &up,
        H2Options {
            max_streams: Some(4),
            ..H2Options::default()
        },
    )
    .await;
    let gate = gateway_at(h2.addr(), |c| {
        over_http2(c);
        c.server.workers = slots(1);
    });
    let mut clients = Vec::new();
    for _ in 0..10 {
        let mut client = gate
            .post(CHAT, &stream(json!({"end": "never", "pace_ms": 10})))
            .await;
        assert_eq!(client.final_head().await.expect("head").status, 200);
        client.events(1).await.expect("it runs");
        clients.push(client);
    }
    let truth = h2.truth();
    assert_eq!(truth.streams_running, 10);
    assert!(truth.connections_open >= 3, "{truth:?}");
    drop(clients);
    h2.wait_for(|t| t.streams_running == 0, SOON)
        .await
        .expect("each is reset");
}

/// A stream that was refused, or that came after a GOAWAY, was not processed: it is sent again. One that broke was.
#[tokio::test]
async fn c54_only_streams_that_were_not_processed_are_sent_again() {
    let up = upstream(Script::default()).await;
    for options in [
        H2Options {
            goaway_after: Some(3),
            ..H2Options::default()
        },
        H2Options {
            refuse_after: Some(3),
            ..H2Options::default()
        },
    ] {
        let h2 = front(&up, options).await;
        let gate = gateway_at(h2.addr(), |c| {
            over_http2(c);
            c.server.workers = slots(1);
        });
        let before = up.truth().calls_begun;
        for i in 0..12 {
            let mut client = gate.post(CHAT, &whole(json!({}))).await;
            assert_eq!(
                client.final_head().await.expect("head").status,
                200,
                "{options:?}, call {i}"
            );
        }
        assert_eq!(up.truth().calls_begun, before + 12, "each once");
    }
    let h2 = front(&up, H2Options::default()).await;
    let gate = gateway_at(h2.addr(), over_http2);
    let before = up.truth().calls_begun;
    let mut client = gate
        .post(CHAT, &whole(json!({"body": {"wire": []}, "end": "rst"})))
        .await;
    assert_eq!(client.final_head().await.expect("head").status, 502);
    assert_eq!(up.truth().calls_begun, before + 1);
}

/// A server that turns away even the first stream of a new connection gets no second new one from the same call.
#[tokio::test]
async fn a_server_that_refuses_every_stream_is_not_asked_for_ever() {
    let up = upstream(Script::default()).await;
    let refuses = H2Options {
        refuse_after: Some(0),
        ..H2Options::default()
    };
    let h2 = front(&up, refuses).await;
    let gate = gateway_at(h2.addr(), over_http2);
    for call in 1..=3 {
        let mut client = gate.post(CHAT, &whole(json!({}))).await;
        assert_eq!(client.final_head().await.expect("head").status, 502);
        assert!(h2.truth().connections_accepted <= 2 * call, "call {call}");
    }
    h2.wait_for(|t| t.connections_open == 0, SOON)
        .await
        .expect("none is kept");
    gate.settled(&up).await;
}

/// A port that takes connections and speaks no HTTP/2, or nothing, is like one that takes none: left out, and the call goes elsewhere.
#[tokio::test]
async fn an_endpoint_without_a_handshake_is_left_out() {
    let up = upstream(Script::default()).await;
    let h2 = front(&up, H2Options::default()).await;
    for silent in [false, true] {
        let listener = tokio::net::TcpListener::bind(LOCALHOST)
            .await
            .expect("a port");
        let mute = listener.local_addr().expect("an address");
        let taking = tokio::spawn(async move {
            let mut held = Vec::new();
            while let Ok((tcp, _)) = listener.accept().await {
                held.extend(silent.then_some(tcp));
            }
        });
        let gate = gateway_at(mute, |c| {
            over_http2(c);
            only(c).endpoints.push(endpoint(h2.addr()));
            only(c).timeouts.tls = Duration::from_secs(3);
            only(c).pool.eject = Duration::from_secs(60);
        });
        let before = up.truth().calls_begun;
        for _ in 0..10 {
            let mut client = gate.post(CHAT, &whole(json!({}))).await;
            assert_eq!(client.final_head().await.expect("head").status, 200);
        }
        assert_eq!(up.truth().calls_begun, before + 10);
        assert_eq!(gate.metric("endpoint_ejected", &[]), 1.0);
        taking.abort();
    }
}

/// The upstream's stream is reset when the client leaves, and its connection lives on.
#[tokio::test]
async fn a_client_that_leaves_resets_the_upstreams_stream() {
    let up = upstream(Script::default()).await;
    let h2 = front(&up, H2Options::default()).await;
    let gate = gateway_at(h2.addr(), |c| {
        over_http2(c);
        c.server.workers = slots(1);
    });
    for rig in [
        json!({"end": "never", "pace_ms": 5}),
        json!({"stall": {"at": "head"}}),
    ] {
        let before = h2.truth().streams_begun;
        let client = gate.post(CHAT, &stream(rig)).await;
        h2.wait_for(|t| t.streams_begun > before, SOON)
            .await
            .expect("begun");
        client.leave_rst().expect("left");
        h2.wait_for(|t| t.streams_running == 0, SOON)
            .await
            .expect("reset");
    }
    assert_eq!(h2.truth().connections_accepted, 1);
    let mut client = gate.post(CHAT, &whole(json!({}))).await;
    assert_eq!(client.final_head().await.expect("head").status, 200);
    assert_eq!(h2.truth().connections_accepted, 1);
}
