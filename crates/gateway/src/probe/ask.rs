//! One call to the server under test, on a connection of its own that is closed by dropping it.

use std::fmt;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST, HeaderMap, HeaderValue};
use http::{Method, Request, response};
use http_body::Body as _;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use serde_json::Value;
use tidegate_wire::{Facts, StreamScanner};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;

use super::route::Route;
use crate::config::{Endpoint, Secret};

/// Connecting and the TLS handshake together.
const CONNECT: Duration = Duration::from_secs(10);
/// Longest wait for a head or for more of a body, where the step has no limit of its own.
pub(super) const PATIENCE: Duration = Duration::from_secs(120);
/// Longest wait for a page that needs no model.
const PAGE: Duration = Duration::from_secs(20);
/// Longest body that is read whole.
const BODY_MAX: usize = 8 * 1024 * 1024;
const EVENT_BYTES: usize = 256 * 1024;

/// Where the calls go.
#[derive(Clone)]
pub(super) struct Server {
    pub(super) endpoint: Endpoint,
    pub(super) key: Option<Secret>,
    pub(super) tls: Option<TlsConnector>,
    pub(super) model: String,
    pub(super) route: Route,
    pub(super) dress: Dress,
}

/// Fields that not every server takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dress {
    /// Generate up to `max_tokens`, whatever the model thinks.
    pub(super) ignore_eos: bool,
    /// The bound's name.
    pub(super) bound: &'static str,
}

/// One call.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) stream: bool,
    pub(super) tokens: u32,
    pub(super) prompt: String,
    /// Ask for usage, as far as possible on every event.
    pub(super) usage: bool,
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Trouble {
    Lookup(String),
    Refused,
    Connect(String),
    Tls(String),
    /// This long, and nothing.
    Silent(Duration),
    /// The server closed, or said what is not HTTP.
    Broken(String),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lookup(why) => write!(f, "its name cannot be resolved: {why}"),
            Self::Refused => f.write_str("nothing listens there: the connection was refused"),
            Self::Connect(why) => write!(f, "it cannot be connected to: {why}"),
            Self::Tls(why) => write!(f, "the TLS handshake failed: {why}"),
            Self::Silent(time) => write!(f, "it did not answer within {} s", time.as_secs()),
            Self::Broken(why) => write!(f, "what it answers is not HTTP, or it hung up: {why}"),
        }
    }
}

type Connection = Pin<Box<dyn Future<Output = hyper::Result<()>> + Send>>;

/// A connection, with the call that is on it.
pub(super) struct Exchange {
    conn: Connection,
    conn_over: bool,
    sender: SendRequest<Full<Bytes>>,
    body: Option<Incoming>,
    scanner: StreamScanner,
    /// When the request was handed on.
    pub(super) sent: Instant,
    /// Content, reasoning and tool deltas seen.
    pub(super) deltas: u32,
}

/// A whole answer.
#[derive(Debug)]
pub(super) struct Whole {
    pub(super) head: response::Parts,
    pub(super) body: Bytes,
}

impl Server {
    /// Opens a connection.
    pub(super) async fn open(&self) -> Result<Exchange, Trouble> {
        timeout(CONNECT, self.connect())
            .await
            .unwrap_or(Err(Trouble::Silent(CONNECT)))
    }

    async fn connect(&self) -> Result<Exchange, Trouble> {
        let host = self.endpoint.host.as_str();
        let addresses = tokio::net::lookup_host((host, self.endpoint.port))
            .await
            .map_err(|error| Trouble::Lookup(error.to_string()))?;
        let mut tcp = Err(Trouble::Lookup("it has no address".to_owned()));
        for address in addresses {
            tcp = TcpStream::connect(address).await.map_err(|error| {
                if error.kind() == std::io::ErrorKind::ConnectionRefused {
                    Trouble::Refused
                } else {
                    Trouble::Connect(error.to_string())
                }
            });
            if tcp.is_ok() {
                break;
            }
        }
        let tcp = tcp?;
        let _ = tcp.set_nodelay(true);
        let Some(tls) = &self.tls else {
            return self.exchange(TokioIo::new(tcp)).await;
        };
        let name = ServerName::try_from(host.to_owned())
            .map_err(|error| Trouble::Tls(error.to_string()))?;
        let tls = tls.connect(name, tcp).await;
        self.exchange(TokioIo::new(
            tls.map_err(|error| Trouble::Tls(error.to_string()))?,
        ))
        .await
    }

    /// A request to a path below the base path, or at the root of the host.
    pub(super) fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Request<Full<Bytes>> {
        let base = if path.starts_with("/v1/") {
            self.endpoint.base_path.as_str()
        } else {
            ""
        };
        let bytes = body
            .map(|body| Bytes::from(body.to_string()))
            .unwrap_or_default();
        let mut request = Request::new(Full::new(bytes));
        *request.method_mut() = method;
        if let Ok(uri) = format!("{base}{path}").parse() {
            *request.uri_mut() = uri;
        }
        let headers = request.headers_mut();
        if let Ok(host) = HeaderValue::try_from(authority(&self.endpoint)) {
            headers.insert(HOST, host);
        }
        if body.is_some() {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        let host = self.endpoint.host.as_str();
        self.route.head(host, self.key.as_ref(), headers);
        request
    }

    /// GET, the whole of it.
    pub(super) async fn get(&self, path: &str) -> Result<Whole, Trouble> {
        let mut exchange = self.open().await?;
        let head = exchange
            .send(self.request(Method::GET, path, None), PAGE)
            .await?;
        let body = exchange.rest(PAGE).await?;
        Ok(Whole { head, body })
    }

    /// Sends a call; its head is not awaited.
    pub(super) async fn begin(&self, call: &Call) -> Result<Begun, Trouble> {
        let exchange = self.open().await?;
        let body = self.route.body(&self.model, self.dress, call);
        let request = self.request(Method::POST, self.route.path(), Some(&body));
        Ok(Begun { exchange, request })
    }

    /// A call that was taken, and when it was sent.
    pub(super) async fn taken(
        &self,
        call: &Call,
        within: Duration,
    ) -> Result<(Exchange, Instant), String> {
        let begun = self.begin(call).await.map_err(|t| t.to_string())?;
        let sent = Instant::now();
        let (mut exchange, head) = begun.head(within).await.map_err(|t| t.to_string())?;
        if head.status.is_success() {
            return Ok((exchange, sent));
        }
        let body = exchange.rest(PATIENCE).await.unwrap_or_default();
        let status = head.status.as_u16();
        Err(format!("answered {status}: {}", said(&body)))
    }

    /// Time to the first token of this stream; to its end, if it has none with a text: some tokens have none.
    pub(super) async fn first_token(
        &self,
        call: &Call,
        within: Duration,
    ) -> Result<Duration, String> {
        let (mut exchange, sent) = self.taken(call, within).await?;
        let left = within.saturating_sub(sent.elapsed());
        exchange.deltas(1, left).await.map_err(|t| t.to_string())?;
        Ok(sent.elapsed())
    }

    async fn exchange<I>(&self, io: TokioIo<I>) -> Result<Exchange, Trouble>
    where
        I: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, conn) = handshake(io).await.map_err(|error| broken(&error))?;
        Ok(Exchange {
            conn: Box::pin(conn),
            conn_over: false,
            sender,
            body: None,
            scanner: StreamScanner::new(self.route.dialect(), EVENT_BYTES),
            sent: Instant::now(),
            deltas: 0,
        })
    }
}

fn authority(endpoint: &Endpoint) -> String {
    let Endpoint { host, port, .. } = endpoint;
    if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

/// A connection and the request that is to go out on it.
pub(super) struct Begun {
    exchange: Exchange,
    request: Request<Full<Bytes>>,
}

impl Begun {
    /// Sends it and waits for the head.
    pub(super) async fn head(
        self,
        within: Duration,
    ) -> Result<(Exchange, response::Parts), Trouble> {
        let mut exchange = self.exchange;
        let head = exchange.send(self.request, within).await?;
        Ok((exchange, head))
    }

    /// Sends it and closes the connection after `time`, unless its head comes sooner: then `None`.
    pub(super) async fn left_after(self, time: Duration) -> Result<Option<()>, Trouble> {
        match self.head(time).await {
            Err(Trouble::Silent(_)) => Ok(Some(())),
            Ok(_) => Ok(None),
            Err(trouble) => Err(trouble),
        }
    }
}

impl Exchange {
    /// Sends a request and waits for the head of its answer.
    pub(super) async fn send(
        &mut self,
        request: Request<Full<Bytes>>,
        within: Duration,
    ) -> Result<response::Parts, Trouble> {
        self.sent = Instant::now();
        let Self {
            conn,
            conn_over,
            sender,
            ..
        } = self;
        let answer = drive(conn, conn_over, sender.send_request(request));
        let answer = timeout(within, answer)
            .await
            .map_err(|_| Trouble::Silent(within))?;
        let (head, body) = answer.map_err(|error| broken(&error))?.into_parts();
        self.body = Some(body);
        Ok(head)
    }

    /// More of the body. `None`: it has ended.
    pub(super) async fn data(&mut self, within: Duration) -> Result<Option<Bytes>, Trouble> {
        let Self {
            conn,
            conn_over,
            body: Some(body),
            ..
        } = self
        else {
            return Ok(None);
        };
        loop {
            let frame = poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx));
            let frame = timeout(within, drive(conn, conn_over, frame))
                .await
                .map_err(|_| Trouble::Silent(within))?;
            match frame {
                None => return Ok(None),
                Some(Err(error)) => return Err(broken(&error)),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }

    /// All that is left of the body.
    pub(super) async fn rest(&mut self, within: Duration) -> Result<Bytes, Trouble> {
        let mut all = Vec::new();
        while let Some(data) = self.data(within).await? {
            all.extend_from_slice(&data);
            if all.len() > BODY_MAX {
                return Err(Trouble::Broken("its answer does not end".to_owned()));
            }
        }
        Ok(all.into())
    }

    /// What the next piece of the stream says. `None`: it has ended.
    pub(super) async fn facts(&mut self, within: Duration) -> Result<Option<Facts>, Trouble> {
        loop {
            if let Some(piece) = self.scanner.pop() {
                self.deltas += piece.facts.deltas;
                return Ok(Some(piece.facts));
            }
            match self.data(within).await? {
                Some(data) => self.scanner.push(data),
                None => return Ok(None),
            }
        }
    }

    /// Reads until so many deltas were seen; false if the stream ended sooner.
    pub(super) async fn deltas(&mut self, wanted: u32, within: Duration) -> Result<bool, Trouble> {
        let end = Instant::now() + within;
        while self.deltas < wanted {
            let left = end.saturating_duration_since(Instant::now());
            if self.facts(left).await?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits until the server closes the idle connection; how long that took.
    pub(super) async fn closed(mut self, within: Duration) -> Option<Duration> {
        let begin = Instant::now();
        let over = timeout(within, &mut self.conn).await.is_ok();
        (over || self.conn_over).then(|| begin.elapsed())
    }
}

/// Waits for `work` while the connection does what it has to.
async fn drive<T>(conn: &mut Connection, over: &mut bool, work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    loop {
        tokio::select! {
            biased;
            done = &mut work => return done,
            _ = conn.as_mut(), if !*over => *over = true,
        }
    }
}

/// The message of an error's body, or its beginning.
pub(super) fn said(body: &[u8]) -> String {
    let json: Value = serde_json::from_slice(body).unwrap_or_default();
    let error = &json["error"];
    let places = [&error["message"], error, &json["message"], &json["detail"]];
    let text = places.iter().find_map(|place| place.as_str());
    let text = text.map_or_else(|| String::from_utf8_lossy(body).into_owned(), str::to_owned);
    let line: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.chars().take(200).collect()
}

fn broken(error: &hyper::Error) -> Trouble {
    let cause = std::error::Error::source(error);
    Trouble::Broken(cause.map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}")))
}

/// The client side of TLS, with the system's roots and the extra ones.
pub(super) fn tls(config: &rustls::ClientConfig) -> TlsConnector {
    let mut config = config.clone();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    TlsConnector::from(Arc::new(config))
}

/// `content-type`, short.
pub(super) fn kind(headers: &HeaderMap) -> String {
    let value = headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok());
    value
        .unwrap_or("no content-type")
        .chars()
        .take(60)
        .collect()
}
