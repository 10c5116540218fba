//! The same over HTTP/2: a stream that is reset is a client that left, and its neighbours do not notice.

use std::error::Error as _;
use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, Version};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tidegate::front::route::KNOWN;
use tidegate_rig::{Event, Script};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::attach::{answer, graced, named, post};
use crate::support::{CANCEL, CHAT, Gate, SOON, gateway, only, slots, stream, upstream, whole};

pub(crate) struct Client {
    sender: SendRequest<Full<Bytes>>,
    socket: std::net::TcpStream,
}

impl Client {
    async fn connect(gate: &Gate) -> Self {
        Self::connect_to(gate.addr()).await
    }

    pub(crate) async fn connect_to(address: std::net::SocketAddr) -> Self {
        let socket = std::net::TcpStream::connect(address).expect("connect");
        let own = socket.try_clone().expect("a second handle");
        own.set_nonblocking(true).expect("an option");
        let tcp = TcpStream::from_std(own).expect("a runtime");
        let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(tcp))
            .await
            .expect("a preface");
        tokio::spawn(connection);
        Self { sender, socket }
    }

    pub(crate) fn post(
        &mut self,
        path: &str,
        body: &Value,
    ) -> impl Future<Output = hyper::Result<Response<Incoming>>> + use<> {
        self.post_named(path, "", body)
    }

    /// With this idempotency key.
    fn post_named(
        &mut self,
        path: &str,
        key: &str,
        body: &Value,
    ) -> impl Future<Output = hyper::Result<Response<Incoming>>> + use<> {
        let request = Request::post(format!("http://localhost{path}"))
            .version(Version::HTTP_2)
            .header("content-type", "application/json")
            .header("idempotency-key", key)
            .body(Full::from(body.to_string()))
            .expect("a request");
        self.sender.send_request(request)
    }
}

async fn some_bytes(response: &mut Response<Incoming>) -> Bytes {
    let frame = tokio::time::timeout(SOON, response.body_mut().frame());
    let frame = frame
        .await
        .expect("in time")
        .expect("a frame")
        .expect("bytes");
    frame.into_data().expect("data")
}

#[tokio::test]
async fn a_reset_stream_takes_its_work_along_and_no_other() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut client = Client::connect(&gate).await;
    let mut neighbour = client
        .post(CHAT, &stream(json!({"end": "never", "pace_ms": 5.0})))
        .await
        .expect("head");
    let kind = json!([["content-type", "application/json"]]);
    let mut n = 1;
    for known in &KNOWN {
        let silent = json!({"stall": {"at": "head"}});
        let error = json!({"status": 500, "headers": kind, "body": {"pieces": [{"text": "{\"error\"", "pause_ms": 3_600_000}]}});
        let flowing = json!({"headers": kind, "body": {"pieces": [{"text": "word ", "times": 1_000_000, "pause_ms": 5}]}});
        let events = json!({"body": {"pieces": [{"text": "data: {\"choices\":[]}\n\n", "times": 1_000_000, "pause_ms": 5}]}});
        // An error's body is awaited for seconds before its head goes on: once to the end of that, else within it.
        let awaited = known.path == CHAT;
        for (body, answered) in [
            (stream(silent.clone()), false),
            (whole(silent), false),
            (stream(error.clone()), awaited),
            (whole(error), false),
            (stream(events), true),
            (whole(flowing), true),
        ] {
            let waiting = client.post(known.path, &body);
            n += 1;
            up.wait_for(|t| t.calls_begun == n && t.running == 2, SOON)
                .await
                .expect("running");
            if answered {
                let mut response = waiting.await.expect("head");
                some_bytes(&mut response).await;
                drop(response);
            } else {
                let waiting = tokio::spawn(waiting);
                let seen = |c: &tidegate_rig::CallTruth| c.id == n && c.body_ns.is_some();
                up.wait_for_call(seen, SOON).await.expect("sent");
                waiting.abort();
            }
            let told = up.wait_for(|t| t.running == 1, CANCEL).await;
            told.unwrap_or_else(|t| panic!("{} {body}: not told: {t:?}", known.path));
        }
    }
    some_bytes(&mut neighbour).await;
    drop(neighbour);
    gate.settled_with(&up, 0).await;
    let lines = gate.stop();
    assert_eq!(lines.len() as u64, n);
    for line in lines {
        assert_eq!(
            (&line["outcome"], &line["wait_end"]),
            (&json!("client_closed"), &json!("left")),
            "{line}"
        );
    }
}

#[tokio::test]
async fn a_stream_reset_in_the_queue_never_touches_the_upstream() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| only(c).slots = slots(1));
    let mut client = Client::connect(&gate).await;
    let held = tokio::spawn(client.post(CHAT, &stream(json!({"stall": {"at": "head"}}))));
    up.wait_for(|t| t.running == 1, SOON)
        .await
        .expect("running");
    let waiting: Vec<_> = (0..20)
        .map(|_| tokio::spawn(client.post(CHAT, &stream(json!({})))))
        .collect();
    gate.eventually("all wait", |g| g.metric("queued", &[]) == 20.0)
        .await;
    waiting.iter().for_each(JoinHandle::abort);
    gate.eventually("none waits", |g| g.metric("queued", &[]) == 0.0)
        .await;
    held.abort();
    gate.settled_with(&up, 0).await;
    assert_eq!(up.truth().calls_begun, 1);
    let queued = gate
        .stop()
        .into_iter()
        .filter(|l| l["phase"] == "queued" && l["attempts"] == 0);
    assert_eq!(queued.count(), 20);
}

#[tokio::test]
async fn a_lost_connection_takes_all_its_streams_along() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut client = Client::connect(&gate).await;
    let mut streams = Vec::new();
    for _ in 0..20 {
        let body = stream(json!({"stall": {"at": {"event": 2}}}));
        streams.push(client.post(CHAT, &body).await.expect("head"));
    }
    let socket = &client.socket;
    socket.shutdown(std::net::Shutdown::Both).expect("a FIN");
    let told = up.wait_for(|t| t.running == 0, CANCEL).await;
    told.unwrap_or_else(|t| panic!("not told: {t:?}"));
    gate.settled_with(&up, 0).await;
    let lines = gate.stop();
    assert_eq!(lines.len(), 20);
    assert!(lines.iter().all(|l| l["outcome"] == "client_closed"));
}

#[tokio::test]
async fn a_cut_stream_ends_with_an_error_event_and_a_reset() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut client = Client::connect(&gate).await;
    for end in ["fin", "clean", "bad_chunk"] {
        let body = stream(json!({"end": end, "end_at": 4}));
        let mut response = client.post(CHAT, &body).await.expect("head");
        let (mut text, mut broken) = (Vec::new(), None);
        while let Some(frame) = response.body_mut().frame().await {
            match frame {
                Ok(frame) => text.extend_from_slice(&frame.into_data().expect("data")),
                Err(error) => {
                    broken = Some(error);
                    break;
                }
            }
        }
        let broken = broken.unwrap_or_else(|| panic!("{end}: a clean end"));
        let cause = broken.source().map(ToString::to_string).unwrap_or_default();
        assert!(
            cause.contains("unexpected internal error"),
            "{end}: {cause}"
        );
        let events = Event::all(&text);
        assert_eq!(events.len(), 5, "{end}");
        assert!(events[4].data.contains("\"error\""), "{end}");
    }
    let again = client
        .post(CHAT, &stream(json!({"tokens": 1})))
        .await
        .expect("head");
    let whole = again
        .into_body()
        .collect()
        .await
        .expect("the connection lives on");
    assert!(whole.to_bytes().ends_with(b"data: [DONE]\n\n"));
    gate.settled(&up).await;
}

#[tokio::test]
async fn a_stream_ends_with_its_terminal_event() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut client = Client::connect(&gate).await;
    let body = stream(json!({"tokens": 3, "end": "hang", "usage": "yes"}));
    let response = client.post(CHAT, &body).await.expect("head");
    assert_eq!(response.headers()["x-accel-buffering"], "no");
    let whole = tokio::time::timeout(Duration::from_secs(5), response.into_body().collect());
    let whole = whole.await.expect("at once").expect("whole");
    assert!(whole.to_bytes().ends_with(b"data: [DONE]\n\n"));
    gate.settled_with(&up, 0).await;
    assert_eq!(gate.stop()[0]["outcome"], "ok");
}

/// What broke off has nothing more to send, and so nothing that would be flushed: its client hears of it at once all the same, and not at the next
/// PING (20 s). A whole answer, and one that is taken up again.
#[tokio::test]
async fn a_break_long_after_the_last_byte_is_told_at_once() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| graced(c, Duration::from_secs(600)));
    let half = json!([{"text": "{\"text\":\"", "pause_ms": 2500}, {"text": "word\"}"}]);
    let body = whole(
        json!({"body": {"pieces": half}, "framing": "chunked", "end": "rst", "end_at": 1,
        "headers": [["content-type", "application/json"]]}),
    );
    let key = named("breaks");
    let mut left = Client::connect(&gate).await;
    let response = left.post_named(CHAT, &key, &body).await.expect("head");
    drop(response);
    let mut again = Client::connect(&gate).await;
    let taken_up = again.post_named(CHAT, &key, &body).await.expect("head");
    assert!(taken_up.headers().contains_key("x-tidegate-attached"));
    let mut other = Client::connect(&gate).await;
    let response = other.post(CHAT, &body).await.expect("head");
    for broken in [taken_up, response] {
        let whole = tokio::time::timeout(Duration::from_secs(10), broken.into_body().collect());
        whole.await.expect("at once").expect_err("broken off");
    }
}

/// A stream that was reset, and one that went with its connection, are taken up over another connection of either version.
#[tokio::test]
async fn a_retry_takes_up_what_a_reset_stream_left() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| graced(c, Duration::from_secs(600)));
    let body = stream(json!({"tokens": 9, "stall": {"at": {"event": 4}, "ms": 1500}}));
    for (n, whole_connection) in [(1, false), (2, true)] {
        let key = named(&format!("h2 {n}"));
        let mut client = Client::connect(&gate).await;
        let waiting = client.post_named(CHAT, &key, &body);
        let mut response = waiting.await.expect("head");
        some_bytes(&mut response).await;
        if whole_connection {
            client
                .socket
                .shutdown(std::net::Shutdown::Both)
                .expect("a cut");
        }
        drop(response);
        gate.eventually("left", |g| g.metric("abandoned", &[]) == 1.0)
            .await;
        let mut other = Client::connect(&gate).await;
        let response = other.post_named(CHAT, &key, &body).await.expect("head");
        assert!(response.headers().contains_key("x-tidegate-attached"));
        if whole_connection {
            // It leaves in its turn, and the next one comes over HTTP/1.
            drop(response);
            let mut third = post(&gate, CHAT, &key, &body).await;
            let (_, text, end) = answer(&mut third).await;
            assert!(text.contains("[DONE]") && end.looks_whole(), "{text}");
        } else {
            let all = response.into_body().collect().await.expect("a clean end");
            let text = String::from_utf8(all.to_bytes().to_vec()).expect("text");
            assert!(text.ends_with("[DONE]\n\n"), "{text}");
        }
        assert_eq!(up.truth().calls_begun, n);
        gate.settled(&up).await;
    }
}
