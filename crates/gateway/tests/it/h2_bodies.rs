//! Clients that leave in the midst of a request's body over HTTP/2: as over HTTP/1, whatever the way, and nothing is begun for them.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{Reason, SendStream};
use http::Request;
use serde_json::json;
use socket2::SockRef;
use tidegate::config::HttpVersion;
use tidegate::front::route::KNOWN;
use tidegate_rig::{H2Front, H2Options, Script};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::support::{CHAT, Gate, LOCALHOST, SOON, gateway, gateway_at, only, slots, upstream};
use crate::tls::{Pair, over, pair, serve_tls};

const PART: &[u8] = br#"{"model":"tiny","messages":[]}"#;

/// How a client leaves.
#[derive(Clone, Copy, Debug)]
enum Way {
    Stream(Reason),
    /// All that it still sends is a FIN.
    Fin,
    Reset,
    /// It says so to the server, as an orderly one does, and then sends a FIN.
    GoAway,
}

const WAYS: [Way; 7] = [
    Way::Stream(Reason::NO_ERROR),
    Way::Stream(Reason::CANCEL),
    Way::Stream(Reason::INTERNAL_ERROR),
    Way::Stream(Reason::REFUSED_STREAM),
    Way::Fin,
    Way::Reset,
    Way::GoAway,
];

/// A request whose body has begun.
struct Sending {
    send: SendRequest<Bytes>,
    body: SendStream<Bytes>,
    response: ResponseFuture,
    connection: JoinHandle<()>,
    socket: std::net::TcpStream,
}

impl Sending {
    async fn begin(address: SocketAddr, tls: Option<&Pair>, request: Request<()>) -> Self {
        let socket = std::net::TcpStream::connect(address).expect("accepted");
        let own = socket.try_clone().expect("a second handle");
        own.set_nodelay(true).expect("an option");
        own.set_nonblocking(true).expect("an option");
        let tcp = TcpStream::from_std(own).expect("a runtime");
        let (send, connection) = match tls {
            Some(pair) => driven(over(tcp, &pair.cert, "h2").await.expect("a handshake")).await,
            None => driven(tcp).await,
        };
        let mut send = send.ready().await.expect("room");
        let (response, mut body) = send.send_request(request, false).expect("sent");
        body.send_data(Bytes::from_static(PART), false)
            .expect("sent");
        Self {
            send,
            body,
            response,
            connection,
            socket,
        }
    }

    fn peer(&self) -> String {
        self.socket.local_addr().expect("connected").to_string()
    }

    async fn leave(mut self, way: Way) {
        match way {
            Way::Stream(reason) => {
                self.body.send_reset(reason);
                drop((self.response, self.body));
                // Until this has an answer the connection is there, and the reset was read.
                let next = Request::get("http://localhost/nothing")
                    .body(())
                    .expect("a request");
                self.send = self.send.ready().await.expect("room");
                let (answer, _) = self.send.send_request(next, true).expect("sent");
                tokio::time::timeout(SOON, answer)
                    .await
                    .expect("in time")
                    .expect("the connection is whole");
            }
            Way::Fin => {
                self.socket
                    .shutdown(std::net::Shutdown::Write)
                    .expect("a FIN");
            }
            Way::Reset => {
                SockRef::from(&self.socket)
                    .set_linger(Some(Duration::ZERO))
                    .expect("an option");
            }
            // The connection says it when nobody can use it any more.
            Way::GoAway => {
                drop((self.response, self.body, self.send));
                let _ = tokio::time::timeout(SOON, self.connection)
                    .await
                    .expect("in time");
                return;
            }
        }
        self.connection.abort();
        let _ = self.connection.await;
    }
}

async fn driven<T>(io: T) -> (SendRequest<Bytes>, JoinHandle<()>)
where
    T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let (send, connection) = h2::client::handshake(io).await.expect("HTTP/2");
    let driver = tokio::spawn(async move {
        let _ = connection.await;
    });
    (send, driver)
}

fn request(path: &str, kind: &str, length: Option<u64>) -> Request<()> {
    let mut request = Request::post(format!("http://localhost{path}")).header("content-type", kind);
    if let Some(length) = length {
        request = request.header("content-length", length);
    }
    request.body(()).expect("a request")
}

/// Every route whose body is read whole, with and without an announced length, in the clear and over TLS.
#[tokio::test]
async fn a_client_that_leaves_amid_its_body_has_left_and_its_call_is_not_begun() {
    let (up, pair) = (upstream(Script::default()).await, pair());
    let paths = KNOWN.iter().map(|known| (known.path, "application/json"));
    let paths: Vec<_> = paths
        .chain([("/v1/files", "audio/wav"), ("/v1/odd", "application/json")])
        .collect();
    for tls in [None, Some(&pair)] {
        let gate = gateway(&up, |c| {
            c.server.workers = slots(1);
            if tls.is_some() {
                serve_tls(c, &pair);
            }
        });
        // A connection that waits for the next call: nothing would hold that one up.
        let mut first =
            Sending::begin(gate.addr(), tls, request(CHAT, "application/json", None)).await;
        first.body.send_data(Bytes::new(), true).expect("sent");
        let answer = tokio::time::timeout(SOON, &mut first.response).await;
        assert_eq!(answer.expect("in time").expect("a head").status(), 200);
        let before = up.truth().calls_begun;
        let mut n = 0;
        for &(path, kind) in &paths {
            for length in [None, Some(5000)] {
                if path == "/v1/files" && length.is_some() {
                    continue;
                }
                let ways = if path == CHAT { &WAYS[..] } else { &WAYS[..2] };
                for &way in ways {
                    let at = format!("{path} {kind} {length:?} {way:?} tls {}", tls.is_some());
                    let sending =
                        Sending::begin(gate.addr(), tls, request(path, kind, length)).await;
                    let peer = sending.peer();
                    gate.eventually("it has come", |g| {
                        g.metric("request_bodies_bytes", &[]) > 0.0
                    })
                    .await;
                    sending.leave(way).await;
                    n += 1;
                    let line = || {
                        let mut lines = gate.lines().into_iter();
                        lines.find(|l| l["path"] == path && l["peer"] == *peer)
                    };
                    gate.eventually(&at, |_| line().is_some()).await;
                    let line = line().expect("a line");
                    let said = [
                        "outcome", "reason", "wait_end", "phase", "work_end", "status",
                    ]
                    .map(|k| line[k].clone());
                    assert_eq!(
                        said,
                        [
                            json!("client_closed"),
                            json!("gone"),
                            json!("left"),
                            json!("body"),
                            json!("none"),
                            json!(null)
                        ],
                        "{at}: {line}"
                    );
                }
            }
        }
        assert_eq!(up.truth().calls_begun, before);
        let left = gate.metric("disconnects_total", &[("phase", "body")]);
        assert_eq!(left, f64::from(n));
        assert_eq!(
            gate.metric("refusals_total", &[("reason", "body_broken")]),
            0.0
        );
        gate.settled(&up).await;
    }
}

/// A body that is passed on as it comes: what was begun is broken off, and no server takes it for whole.
#[tokio::test]
async fn a_client_that_leaves_amid_its_upload_breaks_it_off() {
    let up = upstream(Script::default()).await;
    let h2 = H2Front::start(LOCALHOST, up.addr(), H2Options::default())
        .await
        .expect("a port");
    for over_http2 in [false, true] {
        let at = if over_http2 { h2.addr() } else { up.addr() };
        let gate = gateway_at(at, |c| {
            c.server.workers = slots(1);
            if over_http2 {
                only(c).pool.http = HttpVersion::Http2;
            }
        });
        for (n, way) in WAYS.into_iter().enumerate() {
            let upload = request("/v1/files", "audio/wav", Some(5000));
            let sending = Sending::begin(gate.addr(), None, upload).await;
            let peer = sending.peer();
            let running = |g: &Gate| g.metric("running", &[]) == 1.0;
            gate.eventually("it is sent on", running).await;
            sending.leave(way).await;
            let line = || {
                let mut lines = gate.lines().into_iter();
                lines.find(|l| l["path"] == "/v1/files" && l["peer"] == *peer)
            };
            gate.eventually(&format!("{way:?}"), |_| line().is_some())
                .await;
            let line = line().expect("a line");
            let said = ["outcome", "reason", "wait_end", "status"].map(|k| line[k].clone());
            let left = [
                json!("client_closed"),
                json!("gone"),
                json!("left"),
                json!(null),
            ];
            assert_eq!(said, left, "{n} {way:?}: {line}");
            assert_eq!(
                gate.metric("refusals_total", &[("reason", "body_broken")]),
                0.0
            );
        }
        gate.eventually("none is left", |g| g.counted().is_empty())
            .await;
        assert_eq!(up.truth().ended_complete, 0);
    }
}

/// A body that ends before it is as long as was said is the client's fault, but it has not left.
#[tokio::test]
async fn a_body_that_is_shorter_than_announced_is_broken() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut sending = Sending::begin(
        gate.addr(),
        None,
        request(CHAT, "application/json", Some(5000)),
    )
    .await;
    sending.body.send_data(Bytes::new(), true).expect("sent");
    let answer = tokio::time::timeout(SOON, &mut sending.response).await;
    let error = answer.expect("in time").expect_err("no answer");
    assert_eq!(error.reason(), Some(Reason::PROTOCOL_ERROR));
    let line = &gate.logged(1).await[0];
    assert_eq!(line["reason"], "body_broken", "{line}");
    assert_eq!(up.truth().calls_begun, 0);
    gate.settled(&up).await;
}
