//! One client connection: TLS, HTTP/1 or HTTP/2, requests to the front, the end.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::BytesMut;
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::TokioTimer;
use socket2::SockRef;
use tokio::io::ReadBuf;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_util::task::TaskTracker;

use super::guard::{Drainable, End, Guard, Limits};
use super::socket::{DownstreamIo, IoState, Tcp, Transport};
use crate::call::body::OutBody;
use crate::call::downstream::{Answers, Downstream, Reader};
use crate::config::HalfClose;
use crate::signal::Signal;
use crate::telemetry::metrics::{Metrics, ReasonLabel};
use crate::upstream::connect::TcpOptions;

/// How a client that speaks HTTP/2 without TLS begins (RFC 9113 §3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// What the kernel may hold for one client. Bounds how far an answer can run ahead of its reader; autotuning would go to 4 MiB.
const SEND_BUFFER: usize = 256 * 1024;
/// Streams that one client may have open on one connection.
const STREAMS_MAX: u32 = 256;
/// Resets of streams not yet accepted; more is an attack (rapid reset), and the connection is closed.
const PENDING_RESETS_MAX: usize = 20;

/// What all connections of a worker share.
#[derive(Debug)]
pub struct Settings {
    pub limits: Limits,
    pub tls_handshake: Duration,
    pub half_close: HalfClose,
    pub head_bytes: usize,
    pub buffer_bytes: usize,
    pub tcp: TcpOptions,
    pub tls: Option<watch::Receiver<Arc<rustls::ServerConfig>>>,
    pub drain: Signal,
    pub metrics: Arc<Metrics>,
    pub tasks: TaskTracker,
}

/// Serves the connection to its end.
pub async fn serve(tcp: TcpStream, peer: SocketAddr, settings: Arc<Settings>, front: impl Answers) {
    let state = Arc::new(IoState::default());
    let opened = tokio::select! {
        biased;
        opened = open(tcp, &state, &settings) => opened,
        // It has asked for nothing yet.
        () = settings.drain.raised() => Err(OpenError::Draining),
    };
    let end = match opened {
        Ok(Opened {
            transport,
            prefix,
            http2,
        }) => {
            let downstream = Arc::new(Downstream::new(peer, http2));
            let mut io = DownstreamIo::new(
                transport,
                prefix,
                Arc::clone(&state),
                Arc::clone(&downstream),
            );
            if settings.half_close == HalfClose::Gone && !http2 {
                io = io.reading_ahead();
            }
            if http2 {
                serve_http2(io, state, downstream, &settings, front).await
            } else {
                serve_http1(io, state, downstream, &settings, front).await
            }
        }
        Err(error) => {
            tracing::debug!(?error, %peer, "connection was not opened");
            match error {
                OpenError::Tls => End::Tls,
                OpenError::Head => End::RequestHead,
                OpenError::Draining | OpenError::Io(_) => End::Closed,
            }
        }
    };
    settings
        .metrics
        .connections_ended
        .get_or_create(&ReasonLabel { reason: end.name() })
        .inc();
}

struct Opened {
    transport: Transport,
    prefix: BytesMut,
    http2: bool,
}

/// Why a connection came to no request.
#[derive(Debug)]
enum OpenError {
    /// The TLS handshake took too long.
    Tls,
    /// The first bytes took too long.
    Head,
    Draining,
    #[expect(dead_code, reason = "shown by Debug in the log")]
    Io(io::Error),
}

impl From<io::Error> for OpenError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

async fn open(
    tcp: TcpStream,
    state: &Arc<IoState>,
    settings: &Settings,
) -> Result<Opened, OpenError> {
    settings.tcp.apply(&tcp)?;
    SockRef::from(&tcp).set_send_buffer_size(SEND_BUFFER)?;
    let tcp = Tcp::new(tcp, Arc::clone(state));
    if let Some(tls) = &settings.tls {
        let config = Arc::clone(&tls.borrow());
        let shake = TlsAcceptor::from(config).accept(tcp);
        let stream = tokio::time::timeout(settings.tls_handshake, shake)
            .await
            .map_err(|_| OpenError::Tls)??;
        let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        return Ok(Opened {
            transport: Transport::Tls(Box::new(stream)),
            prefix: BytesMut::new(),
            http2,
        });
    }
    let mut transport = Transport::Plain(tcp);
    let (prefix, http2) = tokio::time::timeout(settings.limits.request_head, sniff(&mut transport))
        .await
        .map_err(|_| OpenError::Head)??;
    Ok(Opened {
        transport,
        prefix,
        http2,
    })
}

/// Reads until the bytes cannot be HTTP/2's preface any more, or are.
async fn sniff(transport: &mut Transport) -> io::Result<(BytesMut, bool)> {
    let mut read = BytesMut::with_capacity(1024);
    loop {
        let common = read.len().min(PREFACE.len());
        if read.get(..common) != PREFACE.get(..common) {
            return Ok((read, false));
        }
        if common == PREFACE.len() {
            return Ok((read, true));
        }
        let mut space = [0; 1024];
        let n = std::future::poll_fn(|cx| {
            let mut buf = ReadBuf::new(&mut space);
            transport
                .poll_read(cx, &mut buf)
                .map_ok(|()| buf.filled().len())
        })
        .await?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        read.extend_from_slice(space.get(..n).unwrap_or_default());
    }
}

async fn serve_http1(
    io: DownstreamIo,
    state: Arc<IoState>,
    downstream: Arc<Downstream>,
    settings: &Settings,
    front: impl Answers,
) -> End {
    let at = Arc::clone(&downstream);
    let service = service_fn(move |request: http::Request<Incoming>| {
        if request.version() == http::Version::HTTP_10 {
            at.ends_by_close();
        }
        let answer = front.answer(request, &at, Arc::clone(at.reader()));
        async move { Ok::<_, std::convert::Infallible>(answer.await) }
    });
    let conn = http1::Builder::new()
        .half_close(settings.half_close == HalfClose::Serve)
        .max_buf_size(settings.head_bytes.max(8192))
        .serve_connection(io, service);
    Guard::new(
        conn,
        state,
        downstream,
        settings.limits,
        settings.drain.watch(),
    )
    .await
}

async fn serve_http2(
    io: DownstreamIo,
    state: Arc<IoState>,
    downstream: Arc<Downstream>,
    settings: &Settings,
    front: impl Answers,
) -> End {
    let at = Arc::clone(&downstream);
    let streams = Streams {
        tasks: settings.tasks.clone(),
        stall: settings.limits.write,
        next: Arc::default(),
    };
    let next = Arc::clone(&streams.next);
    let service = service_fn(move |request| {
        let reader = Arc::new(Reader::default());
        // hyper spawns the stream right after this call: the executor below takes the reader.
        *next.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&reader));
        let answer = front.answer(request, &at, reader);
        async move { Ok::<_, std::convert::Infallible>(answer.await) }
    });
    let conn = http2::Builder::new(streams)
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_MAX)
        .max_pending_accept_reset_streams(PENDING_RESETS_MAX)
        .max_header_list_size(u32::try_from(settings.head_bytes).unwrap_or(u32::MAX))
        .max_send_buf_size(settings.buffer_bytes)
        .keep_alive_interval(Duration::from_secs(20))
        .keep_alive_timeout(Duration::from_secs(10))
        .serve_connection(io, service);
    Guard::new(
        conn,
        state,
        downstream,
        settings.limits,
        settings.drain.watch(),
    )
    .await
}

impl<S, E> Drainable for http1::Connection<DownstreamIo, S>
where
    S: hyper::service::HttpService<Incoming, ResBody = OutBody, Error = E>,
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
    Self: Future<Output = Result<(), hyper::Error>>,
{
    fn begin_drain(self: Pin<&mut Self>) {
        self.graceful_shutdown();
    }
}

impl<S> Drainable for http2::Connection<DownstreamIo, S, Streams>
where
    S: hyper::service::HttpService<Incoming, ResBody = OutBody>,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    S::Future: Send + 'static,
    Self: Future<Output = Result<(), hyper::Error>>,
    Streams: hyper::rt::bounds::Http2ServerConnExec<S::Future, OutBody>,
{
    fn begin_drain(self: Pin<&mut Self>) {
        self.graceful_shutdown();
    }
}

/// Runs the streams of one HTTP/2 connection, each under a limit for readers that stop.
#[derive(Clone, Debug)]
struct Streams {
    tasks: TaskTracker,
    stall: Duration,
    next: Arc<Mutex<Option<Arc<Reader>>>>,
}

impl<F> Executor<F> for Streams
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, stream: F) {
        let reader = self
            .next
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
            .unwrap_or_default();
        self.tasks.spawn(Watched {
            stream: Some(Box::pin(stream)),
            reader,
            stall: self.stall,
            timer: None,
        });
    }
}

/// A stream that is dropped (which resets it) when its reader has taken nothing for too long. hyper does not poll a body whose
/// flow-control window is closed, so no timer inside the body could tell.
struct Watched<F> {
    stream: Option<Pin<Box<F>>>,
    reader: Arc<Reader>,
    stall: Duration,
    timer: Option<Timer>,
}

struct Timer {
    sleep: Pin<Box<tokio::time::Sleep>>,
    handed: u64,
}

impl<F: Future> Future for Watched<F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let Some(stream) = &mut this.stream else {
            return Poll::Ready(());
        };
        if stream.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        let Some(handed) = this.reader.behind() else {
            return Poll::Pending;
        };
        if this.reader.is_ended() {
            this.stream = None;
            return Poll::Ready(());
        }
        let timer = this.timer.get_or_insert_with(|| Timer {
            sleep: Box::pin(tokio::time::sleep(this.stall)),
            handed,
        });
        if timer.handed != handed {
            timer.handed = handed;
            timer.sleep.as_mut().reset(Instant::now() + this.stall);
        }
        if timer.sleep.as_mut().poll(cx).is_ready() {
            this.reader.set_stalled();
            this.stream = None;
            return Poll::Ready(());
        }
        Poll::Pending
    }
}
