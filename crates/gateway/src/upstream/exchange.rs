//! One request and its answer on one connection.
//!
//! HTTP/1: the exchange owns its connection and polls it itself, in the task that waits for the answer. There is no connection task, so no
//! chunk is handed from task to task, a slow reader slows exactly its own connection, and dropping the exchange closes the socket there and
//! then. HTTP/2: connections are shared and driven by a task of their own; dropping the exchange resets its stream (RST_STREAM CANCEL).

use std::fmt;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioTimer};

use super::EndpointState;
use super::pool::StreamPlace;
use super::quiet::Quiet;
use super::socket::{Traffic, UpstreamIo};

/// What is sent upstream: whole, or as it comes from the client.
#[derive(Debug)]
pub enum RequestBody {
    Whole(Option<Bytes>),
    Streamed(Incoming),
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match &mut *self {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|b| Ok(Frame::data(b)))),
            Self::Streamed(body) => Pin::new(body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(bytes) => bytes.is_none(),
            Self::Streamed(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> http_body::SizeHint {
        match self {
            Self::Whole(bytes) => {
                http_body::SizeHint::with_exact(bytes.as_ref().map_or(0, |b| b.len() as u64))
            }
            Self::Streamed(body) => body.size_hint(),
        }
    }
}

/// An HTTP/1 connection, idle or in use by one exchange.
pub struct Http1 {
    conn: Conn,
    sender: http1::SendRequest<RequestBody>,
    traffic: Arc<Traffic>,
    ended: bool,
    quiet: Quiet,
    /// It has carried an answer before.
    pub reused: bool,
    pub endpoint: Arc<EndpointState>,
}

impl fmt::Debug for Http1 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http1")
            .field("endpoint", &self.endpoint.authority)
            .field("reused", &self.reused)
            .finish_non_exhaustive()
    }
}

/// A request that got no answer.
#[derive(Debug)]
pub struct SendError {
    pub error: hyper::Error,
    /// Proof that no server can have read any of the request: it may be sent again without running twice.
    pub unsent: bool,
}

impl Http1 {
    /// No round trip: HTTP/1 has no handshake.
    pub async fn new(
        io: UpstreamIo,
        endpoint: Arc<EndpointState>,
        buffer_bytes: usize,
    ) -> Result<Self, hyper::Error> {
        let traffic = Arc::clone(io.traffic());
        let (sender, conn) = http1::Builder::new()
            .max_buf_size(buffer_bytes.max(8192))
            .handshake(io)
            .await?;
        Ok(Self {
            conn,
            sender,
            traffic,
            ended: false,
            quiet: Quiet::new(),
            reused: false,
            endpoint,
        })
    }

    /// Whether an idle connection can still take a request, as far as can be known without sending one.
    pub fn is_usable(&mut self) -> bool {
        let mut cx = Context::from_waker(Waker::noop());
        poll_conn(&mut self.conn, &mut self.ended, &mut cx);
        !self.ended && matches!(self.sender.poll_ready(&mut cx), Poll::Ready(Ok(())))
    }

    /// # Cancel safety
    ///
    /// Dropping the future leaves the connection in the middle of a request: drop the connection too.
    pub async fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> Result<Response<Incoming>, SendError> {
        let before = self.traffic.written();
        let answer = self.sender.try_send_request(request);
        let mut answer = pin!(answer);
        let Self {
            conn, ended, quiet, ..
        } = self;
        let result = poll_fn(|cx| {
            quiet.poll(cx, |cx| {
                poll_conn(conn, ended, cx);
                answer.as_mut().poll(cx)
            })
        })
        .await;
        result.map_err(|mut failed| SendError {
            unsent: failed.take_message().is_some() || self.traffic.nothing_accepted_since(before),
            error: failed.into_error(),
        })
    }

    fn poll_body(
        &mut self,
        body: &mut Incoming,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Self {
            conn, ended, quiet, ..
        } = self;
        quiet.poll(cx, |cx| {
            if let ready @ Poll::Ready(_) = Pin::new(&mut *body).poll_frame(cx) {
                return ready;
            }
            poll_conn(conn, ended, cx);
            Pin::new(&mut *body).poll_frame(cx)
        })
    }
}

type Conn = http1::Connection<UpstreamIo, RequestBody>;

/// Moves the connection on; remembers its end, after which it must not be polled.
fn poll_conn(conn: &mut Conn, ended: &mut bool, cx: &mut Context<'_>) {
    if !*ended && Pin::new(conn).poll(cx).is_ready() {
        *ended = true;
    }
}

/// A handle to a shared HTTP/2 connection.
#[derive(Clone)]
pub struct Http2 {
    pub(super) sender: http2::SendRequest<RequestBody>,
    streams_max: Arc<AtomicUsize>,
}

impl fmt::Debug for Http2 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http2").finish_non_exhaustive()
    }
}

impl Http2 {
    /// Opens the connection; `spawn` runs its driver until it ends.
    pub async fn new(
        io: UpstreamIo,
        buffer_bytes: usize,
        spawn: impl FnOnce(Pin<Box<dyn Future<Output = ()> + Send>>),
    ) -> Result<Self, hyper::Error> {
        let window = u32::try_from(buffer_bytes.max(65_535)).unwrap_or(u32::MAX >> 1);
        let (sender, mut conn) = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            // Until the server has said how many it allows.
            .initial_max_send_streams(1)
            .initial_stream_window_size(window)
            // One stream whose reader stopped must not use up the others' credit.
            .initial_connection_window_size(window.saturating_mul(64).min(u32::MAX >> 1))
            // A connection that died without FIN is noticed here, and only while something waits on it.
            .keep_alive_interval(std::time::Duration::from_secs(10))
            .keep_alive_timeout(std::time::Duration::from_secs(10))
            .keep_alive_while_idle(false)
            .handshake(io)
            .await?;
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
        Ok(Self {
            sender,
            streams_max,
        })
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
                error,
                unsent: true,
            });
        }
        self.sender
            .try_send_request(request)
            .await
            .map_err(|mut failed| SendError {
                unsent: failed.take_message().is_some() || was_refused(failed.error()),
                error: failed.into_error(),
            })
    }
}

/// The server says of the stream that it did nothing with it (RFC 9113 §8.7).
fn was_refused(error: &hyper::Error) -> bool {
    let source = std::error::Error::source(error).and_then(|e| e.downcast_ref::<h2::Error>());
    source.is_some_and(|e| e.is_remote() && e.reason() == Some(h2::Reason::REFUSED_STREAM))
}

/// What an exchange holds of its connection.
#[derive(Debug)]
pub enum Link {
    Http1(Box<Http1>),
    Http2(StreamPlace),
}

/// The answer's body together with the connection it comes on. Dropping it ends the exchange at once.
#[derive(Debug)]
pub struct UpstreamBody {
    body: Incoming,
    link: Link,
    complete: bool,
}

impl UpstreamBody {
    pub fn new(body: Incoming, link: Link) -> Self {
        Self {
            body,
            link,
            complete: false,
        }
    }

    pub fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if self.complete {
            return Poll::Ready(None);
        }
        let polled = match &mut self.link {
            Link::Http1(conn) => conn.poll_body(&mut self.body, cx),
            Link::Http2(_) => Pin::new(&mut self.body).poll_frame(cx),
        };
        if let Poll::Ready(None) = polled {
            self.complete = true;
        }
        polled
    }

    /// # Cancel safety
    ///
    /// Nothing is lost: an unread frame stays.
    pub async fn frame(&mut self) -> Option<Result<Frame<Bytes>, hyper::Error>> {
        poll_fn(|cx| self.poll_frame(cx)).await
    }

    /// The length that the server announced, if it did.
    pub fn exact_length(&self) -> Option<u64> {
        self.body.size_hint().exact()
    }

    pub fn is_complete(&self) -> bool {
        self.complete || self.body.is_end_stream()
    }

    /// The connection, if the answer was read to its end and it can carry another.
    pub fn into_idle(self) -> Option<Box<Http1>> {
        let complete = self.is_complete();
        match self.link {
            Link::Http1(mut conn) if complete => {
                drop(self.body);
                conn.reused = true;
                conn.is_usable().then_some(conn)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
#[path = "exchange_tests.rs"]
mod tests;
