//! A client of either version of HTTP, one request at a time.

use std::net::{Shutdown, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::Request;
use serde_json::Value;
use socket2::SockRef;
use tidegate_rig::{Closed, Event, RawClient, ResponseHead, own_address};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinHandle;

use super::stage::{Http, Way, shut};
use crate::support::SOON;

/// A body, from its beginning, and whether it may be taken for whole.
#[derive(Debug)]
pub(crate) struct Rest {
    pub(crate) body: Vec<u8>,
    pub(crate) whole: bool,
}

impl Rest {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {}", self.text()))
    }

    pub(crate) fn events(&self) -> Vec<Event> {
        Event::all(&self.body)
    }
}

/// A connection, and the request that is under way on it.
pub(crate) enum Caller {
    One(RawClient),
    Two(Two),
}

/// An HTTP/2 connection with prior knowledge, and its latest stream.
pub(crate) struct Two {
    send: SendRequest<Bytes>,
    driver: JoinHandle<()>,
    socket: std::net::TcpStream,
    sending: Option<SendStream<Bytes>>,
    response: Option<ResponseFuture>,
    body: Option<RecvStream>,
    got: Vec<u8>,
    taken: usize,
    end: Option<bool>,
}

async fn within<T>(wait: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, wait).await.expect("in time")
}

impl Two {
    async fn connect(addr: SocketAddr) -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        // In a network of its own there are addresses enough.
        if let Some(own) = own_address(addr) {
            socket.bind(own).expect("a port");
        }
        let tcp = within(socket.connect(addr)).await.expect("accepted");
        let socket = tcp.into_std().expect("a socket");
        let own = socket.try_clone().expect("a second handle");
        let tcp = TcpStream::from_std(own).expect("a runtime");
        tcp.set_nodelay(true).expect("an option");
        let (send, connection) = within(
            h2::client::Builder::new()
                // What is not read is the test's own doing.
                .data_frame_budget(1 << 30)
                .handshake(tcp),
        )
        .await
        .expect("HTTP/2");
        let driver = tokio::spawn(async move {
            // How it ends is seen on its streams.
            let _ = connection.await;
        });
        Self {
            send,
            driver,
            socket,
            sending: None,
            response: None,
            body: None,
            got: Vec::new(),
            taken: 0,
            end: None,
        }
    }

    async fn begin(&mut self, method: &str, path: &str, fields: &[(&str, &str)], empty: bool) {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("http://localhost{path}"));
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        self.send = within(self.send.clone().ready()).await.expect("room");
        let request = request.body(()).expect("a request");
        let (response, sending) = self.send.send_request(request, empty).expect("sent");
        (self.response, self.sending, self.body) = (Some(response), Some(sending), None);
        (self.got, self.taken, self.end) = (Vec::new(), 0, None);
    }

    fn body(&mut self, part: &[u8], last: bool) -> bool {
        let sending = self.sending.as_mut().expect("a request was begun");
        sending
            .send_data(Bytes::copy_from_slice(part), last)
            .is_ok()
    }

    async fn head(&mut self) -> ResponseHead {
        let response = self.response.take().expect("a request was begun");
        let (head, body) = within(response).await.expect("a head").into_parts();
        self.body = Some(body);
        let text = |v: &http::HeaderValue| String::from_utf8_lossy(v.as_bytes()).into_owned();
        ResponseHead {
            version: "HTTP/2".to_owned(),
            status: head.status.as_u16(),
            headers: head
                .headers
                .iter()
                .map(|(n, v)| (n.to_string(), text(v)))
                .collect(),
        }
    }

    /// Reads on; whether there may be more.
    async fn more(&mut self) -> bool {
        let body = self.body.as_mut().expect("the head was read");
        match within(body.data()).await {
            Some(Ok(data)) => {
                // Fails only if the stream is over, and then the next read says how.
                let _ = body.flow_control().release_capacity(data.len());
                self.got.extend_from_slice(&data);
            }
            Some(Err(_)) => self.end = Some(false),
            None => self.end = Some(true),
        }
        self.end.is_none()
    }

    async fn leave(mut self, way: Way) -> Option<Self> {
        match way {
            Way::HalfClose => {
                shut(&self.socket, Shutdown::Write);
                return Some(self);
            }
            Way::Stream => {
                self.sending
                    .as_mut()
                    .expect("begun")
                    .send_reset(h2::Reason::CANCEL);
                return Some(self);
            }
            Way::Fin => shut(&self.socket, Shutdown::Both),
            Way::Rst => {
                let linger = SockRef::from(&self.socket).set_linger(Some(Duration::ZERO));
                linger.expect("an option");
            }
        }
        self.driver.abort();
        // An abort is an error of the join.
        let _ = self.driver.await;
        None
    }
}

impl Caller {
    pub(crate) async fn connect(version: Http, addr: SocketAddr) -> Self {
        match version {
            Http::One => {
                let mut client = RawClient::connect(addr).await.expect("accepted");
                client.set_limit(SOON);
                Self::One(client)
            }
            Http::Two => Self::Two(Two::connect(addr).await),
        }
    }

    pub(crate) fn peer(&self) -> SocketAddr {
        match self {
            Self::One(client) => client.local_addr(),
            Self::Two(two) => two.socket.local_addr(),
        }
        .expect("an address")
    }

    pub(crate) async fn post(&mut self, path: &str, body: &Value) {
        self.request("POST", path, &[], body.to_string().as_bytes())
            .await;
    }

    pub(crate) async fn request(
        &mut self,
        method: &str,
        path: &str,
        fields: &[(&str, &str)],
        body: &[u8],
    ) {
        match self {
            Self::One(client) => client
                .request(method, path, fields, body)
                .await
                .expect("sent"),
            Self::Two(two) => {
                let mut all = fields.to_vec();
                if !body.is_empty() {
                    all.push(("content-type", "application/json"));
                }
                two.begin(method, path, &all, body.is_empty()).await;
                assert!(body.is_empty() || two.body(body, true), "sent");
            }
        }
    }

    /// Posts a head for a body of so many bytes; [`Caller::part`] sends them.
    pub(crate) async fn announce(&mut self, path: &str, length: usize) {
        self.announce_with(path, length, &[]).await;
    }

    /// The same with further fields.
    pub(crate) async fn announce_with(
        &mut self,
        path: &str,
        length: usize,
        fields: &[(&str, &str)],
    ) {
        let length = length.to_string();
        let own = [
            ("content-type", "application/json"),
            ("content-length", &length),
        ];
        let fields = [&own, fields].concat();
        match self {
            Self::One(client) => {
                let lines = fields.iter().map(|(n, v)| format!("{n}: {v}\r\n"));
                let lines: String = lines.collect();
                let head = format!("POST {path} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n");
                client.send(head).await.expect("sent");
            }
            Self::Two(two) => two.begin("POST", path, &fields, false).await,
        }
    }

    /// Sends a part of the body; whether it could be sent.
    pub(crate) async fn part(&mut self, part: &[u8], last: bool) -> bool {
        match self {
            Self::One(client) => client.send(part).await.is_ok(),
            Self::Two(two) => two.body(part, last),
        }
    }

    pub(crate) async fn head(&mut self) -> ResponseHead {
        match self {
            Self::One(client) => client.final_head().await.expect("head"),
            Self::Two(two) => two.head().await,
        }
    }

    /// The head, which has to say 200.
    pub(crate) async fn accepted(&mut self) -> ResponseHead {
        let head = self.head().await;
        assert_eq!(head.status, 200, "{head:?}");
        head
    }

    /// Reads until the body holds so many bytes or ends.
    pub(crate) async fn bytes(&mut self, n: usize) -> usize {
        match self {
            Self::One(client) => client.body_bytes(n).await.expect("bytes"),
            Self::Two(two) => {
                while two.got.len() < n && two.more().await {}
                two.got.len()
            }
        }
    }

    /// Reads so many further events; fewer if the body ends before.
    pub(crate) async fn events(&mut self, n: usize) -> Vec<Event> {
        let two = match self {
            Self::One(client) => return client.events(n).await.expect("events"),
            Self::Two(two) => two,
        };
        let mut events = Vec::new();
        while events.len() < n {
            if let Some((event, used)) = Event::parse(&two.got[two.taken..]) {
                two.taken += used;
                events.extend(event);
            } else if !two.more().await && Event::parse(&two.got[two.taken..]).is_none() {
                break;
            }
        }
        events
    }

    /// Reads to the end.
    pub(crate) async fn rest(&mut self) -> Rest {
        match self {
            Self::One(client) => {
                let (body, end) = client.rest().await.expect("body");
                let whole = end.looks_whole();
                Rest { body, whole }
            }
            Self::Two(two) => {
                while two.end.is_none() {
                    two.more().await;
                }
                let (body, whole) = (two.got.clone(), two.end == Some(true));
                Rest { body, whole }
            }
        }
    }

    /// The whole answer.
    pub(crate) async fn answer(&mut self) -> (ResponseHead, Rest) {
        let head = self.head().await;
        (head, self.rest().await)
    }

    /// The end of an answer that has no body; whether it has none.
    pub(crate) async fn nothing(&mut self) -> bool {
        match self {
            Self::One(client) => {
                client.expect_no_body();
                true
            }
            Self::Two(_) => self.rest().await.body.is_empty(),
        }
    }

    /// Whether a further request could be sent on its connection.
    pub(crate) async fn takes_more(&mut self) -> bool {
        match self {
            Self::One(client) => client.closed(SOON).await == Closed::Open,
            Self::Two(two) => within(two.send.clone().ready()).await.is_ok(),
        }
    }

    /// Leaves; what is left of it must be kept until the call has ended.
    pub(crate) async fn leave(self, way: Way) -> Option<Self> {
        match self {
            Self::Two(two) => two.leave(way).await.map(Self::Two),
            Self::One(mut client) => {
                match way {
                    Way::Fin => client.leave_fin(),
                    Way::Rst => client.leave_rst().expect("a reset"),
                    Way::HalfClose => {
                        client.half_close().await.expect("a FIN");
                        return Some(Self::One(client));
                    }
                    Way::Stream => panic!("HTTP/1.1 has no streams"),
                }
                None
            }
        }
    }
}
