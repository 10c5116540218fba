//! One client connection: TLS, HTTP/1 or HTTP/2, requests to the front, the end. HTTP/1 is [ours](super::http1), HTTP/2 hyper's.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::BytesMut;
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, Sleep};
use tokio_rustls::TlsAcceptor;
use tokio_util::task::TaskTracker;

use super::guard::{ConnectionEnd, Drainable, Guard, Guarded, Limits};
use super::http1::{self, Bad, Connection, Rules};
use super::malformed;
use super::socket::{DownstreamIo, IoState, Tcp, Transport};
use super::tail::{Held, Sent};
use crate::call::body::OutBody;
use crate::call::downstream::{Answers, Downstream, Reader};
use crate::config::HalfClose;
use crate::signal::Signal;
use crate::telemetry::metrics::{Metrics, ReasonLabel};

/// How a client that speaks HTTP/2 without TLS begins (RFC 9113 §3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
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
            since,
        }) => {
            let downstream = Arc::new(Downstream::new(peer, http2, settings.tasks.clone()));
            let (io_state, io_downstream) = (Arc::clone(&state), Arc::clone(&downstream));
            let io = DownstreamIo::new(transport, prefix, io_state, io_downstream);
            let guarded = Guarded {
                io: state,
                downstream,
                since,
            };
            if http2 {
                over_http2(TokioIo::new(io), guarded, &settings, front).await
            } else {
                over_http1(io, guarded, &settings, front).await
            }
        }
        Err(error) => {
            tracing::debug!(?error, %peer, "connection was not opened");
            match error {
                OpenError::Tls => ConnectionEnd::Tls,
                OpenError::Head => ConnectionEnd::RequestHead,
                OpenError::Plain(tcp) => {
                    tell_to_use_tls(tcp, peer, &settings).await;
                    ConnectionEnd::PlainHttp
                }
                OpenError::Draining | OpenError::Io(_) => ConnectionEnd::Closed,
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
    /// Its first request is awaited.
    since: Instant,
}

/// Why a connection came to no request.
#[derive(Debug)]
enum OpenError {
    /// The TLS handshake took too long.
    Tls,
    /// The first bytes took too long.
    Head,
    Draining,
    /// HTTP in clear text where TLS is spoken.
    Plain(TcpStream),
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
    if let Some(tls) = &settings.tls {
        let config = Arc::clone(&tls.borrow());
        let shake = async {
            if speaks_plain_http(&tcp).await? {
                return Err(OpenError::Plain(tcp));
            }
            let tcp = Tcp::new(tcp, Arc::clone(state));
            Ok(TlsAcceptor::from(config).accept(tcp).await?)
        };
        let stream = tokio::time::timeout(settings.tls_handshake, shake)
            .await
            .map_err(|_| OpenError::Tls)??;
        let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        return Ok(Opened {
            transport: Transport::Tls(Box::new(stream)),
            prefix: BytesMut::new(),
            http2,
            since: Instant::now(),
        });
    }
    let mut transport = Transport::Plain(Tcp::new(tcp, Arc::clone(state)));
    let since = Instant::now();
    let until = since + settings.limits.request_head;
    let (prefix, http2) = tokio::time::timeout_at(until, sniff(&mut transport))
        .await
        .map_err(|_| OpenError::Head)??;
    Ok(Opened {
        transport,
        prefix,
        http2,
        since,
    })
}

/// A method begins with a letter, and a TLS record with its kind, which is none (RFC 8446 §5.1).
async fn speaks_plain_http(tcp: &TcpStream) -> io::Result<bool> {
    let mut first = [0];
    Ok(tcp.peek(&mut first).await? > 0 && first[0].is_ascii_alphabetic())
}

/// The first thing that everybody gets wrong. Nothing of what the client sent is looked at.
async fn tell_to_use_tls(tcp: TcpStream, peer: SocketAddr, settings: &Settings) {
    tracing::debug!(%peer, "plain HTTP was sent to the TLS port");
    let state = Arc::new(IoState::default());
    let transport = Transport::Plain(Tcp::new(tcp, Arc::clone(&state)));
    let downstream = Arc::new(Downstream::new(peer, false, settings.tasks.clone()));
    let mut io = DownstreamIo::new(transport, BytesMut::new(), state, downstream);
    let answer = http1::now(|date| malformed::answer(Bad::NoTls, date));
    // It fits into a socket that nothing was written to, and what the client still sends is read for a bounded time.
    if io.write_all(answer.as_bytes()).await.is_ok() {
        let _ = io.shutdown().await;
    }
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

fn over_http1<F: Answers>(
    io: DownstreamIo,
    guarded: Guarded,
    settings: &Settings,
    front: F,
) -> Guard<Connection<F>> {
    let rules = Rules {
        head_bytes: settings.head_bytes,
        half_close: settings.half_close,
    };
    let conn = Connection::new(io, Arc::clone(&guarded.downstream), front, rules);
    let drain = settings.drain.watch();
    Guard::new(conn, guarded, settings.limits, drain)
}

fn over_http2(
    io: TokioIo<DownstreamIo>,
    guarded: Guarded,
    settings: &Settings,
    front: impl Answers,
) -> Guard<impl Drainable> {
    let at = Arc::clone(&guarded.downstream);
    let streams = Streams {
        tasks: settings.tasks.clone(),
        stall: settings.limits.write,
        next: Arc::default(),
    };
    let next = Arc::clone(&streams.next);
    let service = service_fn(move |request: http::Request<Incoming>| {
        let (reader, held) = Reading::default();
        // hyper spawns the stream right after this call: the executor below takes them.
        let both = (Arc::clone(&reader), Arc::clone(&held));
        *next.lock().unwrap_or_else(PoisonError::into_inner) = Some(both);
        let answer = front.answer(request.into(), at.enter(Some(reader)));
        async move {
            let answer = http::Response::<OutBody>::from(answer.await);
            Ok::<_, std::convert::Infallible>(answer.map(|body| Sent::new(body, held)))
        }
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
    let drain = settings.drain.watch();
    Guard::new(conn, guarded, settings.limits, drain)
}

impl<S> Drainable for http2::Connection<TokioIo<DownstreamIo>, S, Streams>
where
    S: hyper::service::HttpService<Incoming, ResBody = Sent>,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    S::Future: Send + 'static,
    Self: Future<Output = Result<(), hyper::Error>>,
    Streams: hyper::rt::bounds::Http2ServerConnExec<S::Future, Sent>,
{
    type Error = hyper::Error;

    fn begin_drain(self: Pin<&mut Self>) {
        self.graceful_shutdown();
    }
}

/// Who reads an answer, and what of it has not been sent.
type Reading = (Arc<Reader>, Arc<Held>);

/// Runs the streams of one HTTP/2 connection, each under a limit for readers that stop.
#[derive(Clone, Debug)]
struct Streams {
    tasks: TaskTracker,
    stall: Duration,
    next: Arc<Mutex<Option<Reading>>>,
}

impl<F> Executor<F> for Streams
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, stream: F) {
        let (reader, held) = self
            .next
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
            .unwrap_or_default();
        self.tasks.spawn(Watched {
            stream: Some(Box::pin(stream)),
            reader,
            held,
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
    held: Arc<Held>,
    stall: Duration,
    timer: Option<Pin<Box<Sleep>>>,
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
        let Some(since) = this.held.since() else {
            return Poll::Pending;
        };
        if !this.reader.is_ended() {
            let until = since + this.stall;
            let timer = this
                .timer
                .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
            // Set once, and not anew for each piece that moves: it looks again when it is over too early.
            while timer.as_mut().poll(cx).is_ready() {
                if until <= Instant::now() {
                    this.reader.set_stalled();
                    this.stream = None;
                    return Poll::Ready(());
                }
                timer.as_mut().reset(until);
            }
            return Poll::Pending;
        }
        this.stream = None;
        Poll::Ready(())
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;
    use crate::call::answer::Answer;
    use crate::call::downstream::{Client, Request};
    use crate::call::handover::Handover;

    /// Is asked for nothing.
    #[derive(Clone)]
    struct Idle;

    impl Answers for Idle {
        fn answer(&self, request: Request, _: Client) -> Handover<Answer> {
            panic!("no request was sent: {request:?}");
        }
    }

    /// It is one wait, in whichever of the two versions it ends.
    #[tokio::test(start_paused = true)]
    async fn the_head_has_its_time_once_however_its_version_is_found_out() {
        let (head, far) = (Duration::from_secs(10), Duration::from_secs(600));
        for (first, rest) in [
            (&PREFACE[..8], &b""[..]),
            (&PREFACE[..8], &PREFACE[8..]),
            (&PREFACE[..8], b"TP/1.1\r\nHost: x\r\n"),
            (&PREFACE[..1], b"OST / HTTP/1.1\r\n"),
        ] {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let at = listener.local_addr().expect("an address");
            let (client, accepted) = tokio::join!(TcpStream::connect(at), listener.accept());
            let (mut client, (tcp, peer)) = (client.expect("in"), accepted.expect("in"));
            let settings = Settings {
                limits: Limits {
                    request_head: head,
                    keep_alive: far,
                    write: far,
                },
                tls_handshake: far,
                half_close: HalfClose::Gone,
                head_bytes: 64 * 1024,
                buffer_bytes: 64 * 1024,
                tls: None,
                drain: Signal::default(),
                metrics: Arc::new(Metrics::new()),
                tasks: TaskTracker::new(),
            };
            let begun = Instant::now();
            let sends = async {
                client.write_all(first).await.expect("sent");
                tokio::time::sleep(head * 3 / 4).await;
                client.write_all(rest).await.expect("sent");
                // HTTP/2 has a word of its own.
                let mut read = Vec::new();
                client.read_to_end(&mut read).await.expect("ended");
                begun.elapsed()
            };
            let serves = serve(tcp, peer, Arc::new(settings), Idle);
            let ((), took) = tokio::join!(serves, sends);
            let over = took.saturating_sub(head);
            // A client that spoke HTTP/2 is told first.
            assert!(took >= head && over < head / 5, "{rest:?}: {took:?}");
        }
    }
}
