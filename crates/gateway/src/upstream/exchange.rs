//! One request and its answer on one connection.
//!
//! HTTP/1: the exchange owns its connection and polls it itself, in the task that waits for the answer; see [`http1`](super::http1). HTTP/2: connections are shared and driven by a task of their own; dropping the exchange resets its stream (RST_STREAM CANCEL).

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame};
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};

use super::http1::Http1;
use super::pool::{STREAMS_PER_CONNECTION, StreamPlace};
use super::preface::Preface;
use super::socket::{Traffic, UpstreamIo};
use super::upload::{Streamed, UploadError};

/// What is sent upstream: whole, or as it comes from the client.
#[derive(Debug)]
pub enum RequestBody {
    Whole(Option<Bytes>),
    Streamed(Streamed),
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = UploadError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, UploadError>>> {
        match &mut *self {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|b| Ok(Frame::data(b)))),
            Self::Streamed(body) => body.poll_data(cx).map_ok(Frame::data),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(bytes) => bytes.is_none(),
            Self::Streamed(body) => body.is_done(),
        }
    }

    fn size_hint(&self) -> http_body::SizeHint {
        match self {
            Self::Whole(bytes) => {
                http_body::SizeHint::with_exact(bytes.as_ref().map_or(0, |b| b.len() as u64))
            }
            Self::Streamed(body) => {
                let left = body.left();
                left.map_or_else(
                    http_body::SizeHint::default,
                    http_body::SizeHint::with_exact,
                )
            }
        }
    }
}

/// Why an exchange ended before its answer was complete.
#[derive(Debug)]
pub enum Failure {
    /// The connection failed.
    Io(io::Error),
    /// The server hung up.
    Closed,
    /// The answer is not HTTP.
    Malformed(&'static str),
    /// The client's own body did not come to its end.
    Request(UploadError),
    Http2(hyper::Error),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => error.fmt(f),
            Self::Closed => f.write_str("the server hung up"),
            Self::Malformed(what) => write!(f, "the server's answer is malformed: {what}"),
            Self::Request(error) => error.fmt(f),
            Self::Http2(error) => error.fmt(f),
        }
    }
}

impl Failure {
    /// It is the client's body that failed, not the server.
    pub fn upload(&self) -> Option<UploadError> {
        match self {
            Self::Request(error) => Some(*error),
            Self::Http2(error) => std::error::Error::source(error)
                .and_then(|e| e.downcast_ref())
                .copied(),
            Self::Io(_) | Self::Closed | Self::Malformed(_) => None,
        }
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(error) => error.source(),
            Self::Http2(error) => error.source(),
            Self::Closed | Self::Malformed(_) | Self::Request(_) => None,
        }
    }
}

/// A request that got no answer.
#[derive(Debug)]
pub struct SendError {
    pub error: Failure,
    /// Proof that no server can have read any of the request: it may be sent again without running twice.
    pub unsent: bool,
}

/// The windows of a stream and of the connection: so large that streams whose readers have stopped, be they all but one, do not use up the
/// credit of the last.
fn windows(buffer_bytes: usize) -> (u32, u32) {
    const WINDOW_MAX: u32 = u32::MAX >> 1;
    const SHARES: u32 = STREAMS_PER_CONNECTION as u32 + 1;
    let stream = u32::try_from(buffer_bytes).unwrap_or(u32::MAX);
    let stream = stream.clamp(65_535, WINDOW_MAX / SHARES);
    (stream, stream * SHARES)
}

/// A handle to a shared HTTP/2 connection.
#[derive(Clone)]
pub struct Http2 {
    pub(super) sender: http2::SendRequest<RequestBody>,
    streams_max: Arc<AtomicUsize>,
    traffic: Arc<Traffic>,
}

impl fmt::Debug for Http2 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http2").finish_non_exhaustive()
    }
}

impl Http2 {
    /// Opens the connection and waits until the server has said its settings: what says none is no HTTP/2 server, and nothing of a call was
    /// sent to it. `spawn` runs the driver until the connection ends.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future closes the connection.
    pub async fn new(
        mut io: UpstreamIo,
        buffer_bytes: usize,
        spawn: impl FnOnce(Pin<Box<dyn Future<Output = ()> + Send>>),
    ) -> io::Result<Self> {
        let (stream_window, connection_window) = windows(buffer_bytes);
        io.watch_in_use()?;
        let traffic = Arc::clone(io.traffic());
        let (io, settings) = Preface::new(io);
        let (sender, mut conn) = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            // Until the server has said how many it allows.
            .initial_max_send_streams(1)
            .initial_stream_window_size(stream_window)
            .initial_connection_window_size(connection_window)
            // A connection that died without FIN is noticed here, and only while something waits on it.
            .keep_alive_interval(std::time::Duration::from_secs(10))
            .keep_alive_timeout(std::time::Duration::from_secs(10))
            .keep_alive_while_idle(false)
            .handshake(TokioIo::new(io))
            .await
            .map_err(io::Error::other)?;
        let streams_max = Arc::new(AtomicUsize::new(1));
        let told = Arc::clone(&streams_max);
        spawn(Box::pin(async move {
            let end = poll_fn(|cx| {
                let polled = Pin::new(&mut conn).poll(cx);
                told.store(conn.current_max_send_streams(), Ordering::Relaxed);
                polled
            });
            if let Err(error) = end.await {
                tracing::debug!(%error, "http/2 upstream connection ended");
            }
        }));
        settings
            .await
            .map_err(|_| io::Error::other("the server does not speak HTTP/2"))?;
        Ok(Self {
            sender,
            streams_max,
            traffic,
        })
    }

    /// The server's machine has not been heard of for some seconds. It may come back.
    pub(super) fn is_lost(&self) -> bool {
        self.traffic.is_lost()
    }

    /// How many streams the server allows at once; more would wait inside the connection, unseen.
    pub(super) fn streams_max(&self) -> usize {
        self.streams_max.load(Ordering::Relaxed)
    }

    pub async fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> Result<Response<Incoming>, SendError> {
        let ready = poll_fn(|cx| self.sender.poll_ready(cx)).await;
        if let Err(error) = ready {
            return Err(SendError {
                error: Failure::Http2(error),
                unsent: true,
            });
        }
        self.sender
            .try_send_request(request)
            .await
            .map_err(|mut failed| SendError {
                unsent: failed.take_message().is_some() || was_refused(failed.error()),
                error: Failure::Http2(failed.into_error()),
            })
    }
}

/// The server says of the stream that it did nothing with it (RFC 9113 §8.7).
fn was_refused(error: &hyper::Error) -> bool {
    let source = std::error::Error::source(error).and_then(|e| e.downcast_ref::<h2::Error>());
    source.is_some_and(|e| e.is_remote() && e.reason() == Some(h2::Reason::REFUSED_STREAM))
}

/// The answer's body together with the connection it comes on. Dropping it ends the exchange at once.
#[derive(Debug)]
pub enum UpstreamBody {
    Http1(Box<Http1>),
    Http2(Box<Stream>),
}

/// An answer on a shared connection.
#[derive(Debug)]
pub struct Stream {
    pub body: Incoming,
    pub place: StreamPlace,
}

type Polled = Poll<Option<Result<Bytes, Failure>>>;

impl UpstreamBody {
    /// The next bytes; trailers are dropped.
    pub fn poll_data(&mut self, cx: &mut Context<'_>) -> Polled {
        let body = match self {
            Self::Http1(conn) => return conn.poll_data(cx),
            Self::Http2(stream) => &mut stream.body,
        };
        loop {
            let frame = match ready!(Pin::new(&mut *body).poll_frame(cx)) {
                Some(Ok(frame)) => frame,
                Some(Err(error)) => return Poll::Ready(Some(Err(Failure::Http2(error)))),
                None => return Poll::Ready(None),
            };
            if let Ok(data) = frame.into_data() {
                return Poll::Ready(Some(Ok(data)));
            }
        }
    }

    /// # Cancel safety
    ///
    /// Nothing is lost: unread bytes stay.
    pub async fn data(&mut self) -> Option<Result<Bytes, Failure>> {
        poll_fn(|cx| self.poll_data(cx)).await
    }

    /// The bytes that the server announced and that have not come yet, if it announced them.
    pub fn exact_length(&self) -> Option<u64> {
        match self {
            Self::Http1(conn) => conn.left(),
            Self::Http2(stream) => stream.body.size_hint().exact(),
        }
    }

    pub fn is_complete(&self) -> bool {
        match self {
            Self::Http1(conn) => conn.is_complete(),
            Self::Http2(stream) => stream.body.is_end_stream(),
        }
    }

    /// The connection, if the answer was read to its end and it can carry another.
    pub fn into_idle(self) -> Option<Box<Http1>> {
        match self {
            Self::Http1(mut conn) => conn.finish().then_some(conn),
            Self::Http2(_) => None,
        }
    }
}
