//! HTTP/2 in front of a fake upstream.
//!
//! Each stream becomes a request of its own on a fresh HTTP/1.1 connection to
//! the fake upstream, so that all scripts and all books hold for HTTP/2 too: a
//! broken body becomes `RST_STREAM`, a `RST_STREAM` from the peer becomes a
//! reset that the fake upstream sees.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use h2::server::{self, SendResponse};
use h2::{Reason, RecvStream, SendStream};
use socket2::SockRef;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};

use crate::http1::{BodyDecoder, Framed, Head};

/// What an HTTP/2 server does as a whole connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct H2Options {
    /// `SETTINGS_MAX_CONCURRENT_STREAMS`.
    pub max_streams: Option<u32>,
    /// Initial window of each stream.
    pub window: Option<u32>,
    /// GOAWAY after this many streams of a connection.
    pub goaway_after: Option<u64>,
    /// REFUSED_STREAM for every stream after this many of a connection.
    pub refuse_after: Option<u64>,
}

/// Counts of an HTTP/2 front.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct H2Truth {
    /// Connections accepted.
    pub connections_accepted: u64,
    /// Connections open.
    pub connections_open: u64,
    /// Streams begun.
    pub streams_begun: u64,
    /// Streams running.
    pub streams_running: u64,
    /// Streams the peer reset.
    pub streams_reset: u64,
}

#[derive(Debug, Default)]
struct Counts {
    accepted: AtomicU64,
    open: AtomicU64,
    begun: AtomicU64,
    running: AtomicU64,
    reset: AtomicU64,
    changed: Notify,
}

impl Counts {
    fn add(&self, counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::SeqCst);
        self.changed.notify_waiters();
    }

    fn sub(&self, counter: &AtomicU64) {
        counter.fetch_sub(1, Ordering::SeqCst);
        self.changed.notify_waiters();
    }

    fn truth(&self) -> H2Truth {
        let get = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
        H2Truth {
            connections_accepted: get(&self.accepted),
            connections_open: get(&self.open),
            streams_begun: get(&self.begun),
            streams_running: get(&self.running),
            streams_reset: get(&self.reset),
        }
    }
}

/// Counts one thing for as long as it lives.
struct Alive<'a>(&'a Counts, &'a AtomicU64);

impl<'a> Alive<'a> {
    fn new(counts: &'a Counts, counter: &'a AtomicU64) -> Self {
        counts.add(counter);
        Self(counts, counter)
    }
}

impl Drop for Alive<'_> {
    fn drop(&mut self) {
        self.0.sub(self.1);
    }
}

/// An HTTP/2 server (prior knowledge, no TLS) in front of a fake upstream.
#[derive(Debug)]
pub struct H2Front {
    addr: SocketAddr,
    counts: Arc<Counts>,
    task: AbortHandle,
}

impl H2Front {
    /// Listens on `listen` and serves what the fake upstream at `upstream` says.
    pub async fn start(
        listen: SocketAddr,
        upstream: SocketAddr,
        options: H2Options,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(listen).await?;
        let addr = listener.local_addr()?;
        let counts = Arc::new(Counts::default());
        let shared = counts.clone();
        let serve = async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                while connections.try_join_next().is_some() {}
                connections.spawn(connection(stream, upstream, options, shared.clone()));
            }
        };
        let task = tokio::spawn(serve).abort_handle();
        Ok(Self { addr, counts, task })
    }

    /// Where it listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The counts, now.
    #[must_use]
    pub fn truth(&self) -> H2Truth {
        self.counts.truth()
    }

    /// Waits for the counts to satisfy `what`; the counts at the end of
    /// `within` if they never did.
    pub async fn wait_for(
        &self,
        what: impl Fn(&H2Truth) -> bool,
        within: Duration,
    ) -> Result<H2Truth, H2Truth> {
        let look = async {
            loop {
                let changed = self.counts.changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                let truth = self.truth();
                if what(&truth) {
                    return truth;
                }
                changed.await;
            }
        };
        let found = tokio::time::timeout(within, look).await;
        found.map_err(|_| self.truth())
    }
}

impl Drop for H2Front {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Errors end the connection: they are the peer's business to notice.
async fn connection(
    stream: TcpStream,
    upstream: SocketAddr,
    options: H2Options,
    counts: Arc<Counts>,
) -> Result<(), h2::Error> {
    counts.add(&counts.accepted);
    let _open = Alive::new(&counts, &counts.open);
    // Only sharpens timing.
    let _ = stream.set_nodelay(true);
    let mut builder = server::Builder::new();
    if let Some(n) = options.max_streams {
        builder.max_concurrent_streams(n);
    }
    if let Some(n) = options.window {
        builder.initial_window_size(n);
    }
    let mut connection = builder.handshake::<_, Bytes>(stream).await?;
    let mut streams = JoinSet::new();
    let mut begun = 0;
    while let Some(accepted) = connection.accept().await {
        let (request, mut respond) = accepted?;
        begun += 1;
        if options.refuse_after.is_some_and(|most| begun > most) {
            respond.send_reset(Reason::REFUSED_STREAM);
            continue;
        }
        let counts = counts.clone();
        streams.spawn(async move {
            counts.add(&counts.begun);
            let _running = Alive::new(&counts, &counts.running);
            one(request, respond, upstream, &counts).await;
        });
        if options.goaway_after == Some(begun) {
            connection.graceful_shutdown();
        }
    }
    Ok(())
}

/// How one stream went wrong.
enum Broken {
    /// The peer reset it.
    Peer,
    /// The fake upstream broke its answer.
    Upstream,
}

impl From<h2::Error> for Broken {
    fn from(_: h2::Error) -> Self {
        Self::Peer
    }
}

impl From<io::Error> for Broken {
    fn from(_: io::Error) -> Self {
        Self::Upstream
    }
}

async fn one(
    request: http::Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    upstream: SocketAddr,
    counts: &Counts,
) {
    let Ok(mut server) = TcpStream::connect(upstream).await else {
        return respond.send_reset(Reason::REFUSED_STREAM);
    };
    let mut body = None;
    match forward(request, &mut respond, &mut body, &mut server).await {
        Ok(()) => {}
        Err(Broken::Peer) => {
            counts.add(&counts.reset);
            // The fake upstream is to see a reset, not a polite close.
            let _ = SockRef::from(&server).set_linger(Some(Duration::ZERO));
        }
        Err(Broken::Upstream) => {
            // A reset throws away what is queued; what the fake upstream has
            // said is to arrive first.
            tokio::time::sleep(Duration::from_millis(20)).await;
            match &mut body {
                Some(body) => body.send_reset(Reason::INTERNAL_ERROR),
                None => respond.send_reset(Reason::INTERNAL_ERROR),
            }
        }
    }
}

async fn forward(
    request: http::Request<RecvStream>,
    respond: &mut SendResponse<Bytes>,
    body: &mut Option<SendStream<Bytes>>,
    server: &mut TcpStream,
) -> Result<(), Broken> {
    server.set_nodelay(true)?;
    send_request(request, server).await?;
    let mut buf = Vec::new();
    let (head, used) = loop {
        match Head::parse(&buf) {
            Some((head, used)) if interim(&head) => {
                buf.drain(..used);
            }
            Some(found) => break found,
            None => read_more(server, &mut buf, |cx| respond.poll_reset(cx)).await?,
        }
    };
    buf.drain(..used);
    let framed = match head.get("content-length") {
        _ if head.has("transfer-encoding", "chunked") => Framed::Chunked,
        Some(n) => Framed::Length(n.parse().map_err(io::Error::other)?),
        None => Framed::UntilClose,
    };
    let body = body.insert(respond.send_response(response(&head)?, false)?);
    let mut decoder = BodyDecoder::new(framed);
    let mut out = Vec::new();
    loop {
        let used = decoder
            .decode(&buf, &mut out)
            .map_err(|_| Broken::Upstream)?;
        buf.drain(..used);
        if !out.is_empty() {
            send_data(body, &mut out).await?;
        }
        if decoder.done() {
            body.send_data(Bytes::new(), true)?;
            return Ok(());
        }
        match read_more(server, &mut buf, |cx| body.poll_reset(cx)).await {
            Err(Broken::Upstream) if framed == Framed::UntilClose => {
                body.send_data(Bytes::new(), true)?;
                return Ok(());
            }
            other => other?,
        }
    }
}

fn interim(head: &Head) -> bool {
    head.words().is_some_and(|(_, s, _)| s.starts_with('1'))
}

async fn send_request(
    request: http::Request<RecvStream>,
    server: &mut TcpStream,
) -> Result<(), Broken> {
    let (parts, mut body) = request.into_parts();
    let path = parts.uri.path_and_query().map_or("/", |p| p.as_str());
    let mut head = format!("{} {path} HTTP/1.1\r\n", parts.method);
    if let Some(authority) = parts.uri.authority() {
        head.push_str(&format!("host: {authority}\r\n"));
    }
    head.push_str("x-rig-http: 2\r\nconnection: close\r\n");
    let length = parts.headers.get(http::header::CONTENT_LENGTH);
    let chunked = length.is_none() && !body.is_end_stream();
    if chunked {
        head.push_str("transfer-encoding: chunked\r\n");
    }
    let mut head = head.into_bytes();
    for (name, value) in &parts.headers {
        head.extend_from_slice(name.as_str().as_bytes());
        head.extend_from_slice(b": ");
        head.extend_from_slice(value.as_bytes());
        head.extend_from_slice(b"\r\n");
    }
    head.extend_from_slice(b"\r\n");
    server.write_all(&head).await?;
    while let Some(data) = body.data().await {
        let data = data?;
        body.flow_control().release_capacity(data.len())?;
        if data.is_empty() {
            continue;
        }
        let mut out = Vec::with_capacity(data.len() + 16);
        if chunked {
            crate::http1::chunk_size(&mut out, data.len(), false);
            out.extend_from_slice(&data);
            out.extend_from_slice(b"\r\n");
        } else {
            out.extend_from_slice(&data);
        }
        server.write_all(&out).await?;
    }
    if chunked {
        server.write_all(b"0\r\n\r\n").await?;
    }
    Ok(())
}

fn response(head: &Head) -> Result<http::Response<()>, Broken> {
    const HOP: [&str; 4] = ["connection", "keep-alive", "transfer-encoding", "upgrade"];
    let status = head.words().map(|(_, s, _)| s).unwrap_or_default();
    let mut response = http::Response::builder().status(status);
    for (name, value) in &head.headers {
        if !HOP.contains(&name.to_ascii_lowercase().as_str()) {
            response = response.header(name, value);
        }
    }
    response.body(()).map_err(|_| Broken::Upstream)
}

/// Reads more from the fake upstream, or learns that the peer reset the stream.
async fn read_more(
    server: &mut TcpStream,
    buf: &mut Vec<u8>,
    mut reset: impl FnMut(&mut std::task::Context<'_>) -> std::task::Poll<Result<Reason, h2::Error>>,
) -> Result<(), Broken> {
    tokio::select! {
        read = server.read_buf(buf) => match read? {
            0 => Err(Broken::Upstream),
            _ => Ok(()),
        },
        _ = std::future::poll_fn(|cx| reset(cx)) => Err(Broken::Peer),
    }
}

async fn send_data(body: &mut SendStream<Bytes>, out: &mut Vec<u8>) -> Result<(), Broken> {
    let mut data = Bytes::from(std::mem::take(out));
    while !data.is_empty() {
        body.reserve_capacity(data.len());
        let room = std::future::poll_fn(|cx| match body.poll_reset(cx) {
            std::task::Poll::Ready(_) => std::task::Poll::Ready(None),
            std::task::Poll::Pending => body.poll_capacity(cx),
        });
        let room = room.await.ok_or(Broken::Peer)??;
        if room > 0 {
            body.send_data(data.split_to(room.min(data.len())), false)?;
        }
    }
    Ok(())
}
