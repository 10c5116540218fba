//! The socket of one client connection, and what can be learned from watching its reads and writes.

use std::fmt;
use std::io;
use std::net::TcpStream as StdStream;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use hyper::rt::ReadBufCursor;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};
use tokio_rustls::server::TlsStream;

use super::malformed;
use crate::call::downstream::Downstream;
use crate::upstream::socket::poll_write_pieces;

/// After our last word an unread upload is read on for this long and this much, so that the client gets to see that word: closing a socket
/// with unread input sends a reset, which discards what the client has not read yet.
const LINGER_TIME: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 1024 * 1024;
/// Pipelined bytes that are held for later while a request is being answered. Whoever sends more is cut off: no client of models does.
const AHEAD_BYTES: usize = 64 * 1024;

/// Shared between the socket (owned by hyper) and the guard that watches it.
#[derive(Debug, Default)]
pub struct IoState {
    reads: AtomicU64,
    writes: AtomicU64,
    blocked: AtomicBool,
    flooded: AtomicBool,
}

impl IoState {
    /// How often something was read.
    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    /// How often something was written.
    pub fn writes(&self) -> u64 {
        self.writes.load(Ordering::Relaxed)
    }

    /// More was sent behind a request than is kept until its answer is complete.
    pub fn is_flooded(&self) -> bool {
        self.flooded.load(Ordering::Relaxed)
    }

    /// Bytes wait that the kernel does not take.
    pub fn is_blocked(&self) -> bool {
        self.blocked.load(Ordering::Relaxed)
    }
}

/// A TCP stream that notes what the kernel takes. It stands below TLS, whose own buffer takes a write also when the client reads nothing.
#[derive(Debug)]
pub struct Tcp {
    stream: TcpStream,
    state: Arc<IoState>,
}

/// Plain or TLS.
#[derive(Debug)]
pub enum Transport {
    Plain(Tcp),
    Tls(Box<TlsStream<Tcp>>),
}

/// A client's socket.
#[derive(Debug)]
pub struct DownstreamIo {
    transport: Transport,
    /// Read already: to tell the protocols apart, or ahead of hyper.
    prefix: BytesMut,
    ahead: ReadAhead,
    own_words: OwnWords,
    state: Arc<IoState>,
    downstream: Arc<Downstream>,
    linger: Option<Linger>,
}

/// hyper stops reading when a client has sent more than the request that is being answered; the client's end would not be seen then. So the
/// socket is read on beside it, within a bound.
#[derive(Debug)]
struct ReadAhead {
    /// FIN means that the client has left.
    wanted: bool,
    /// hyper waits for the socket itself, since the last flush.
    hyper_waits: bool,
    /// Watches for the end while the bound holds us back from reading on to it.
    end: Option<End>,
}

/// hyper answers a head that it cannot read by itself, with a bare status. That is what it writes when no request has come since everything
/// was written; it is given words.
#[derive(Debug, Default)]
struct OwnWords {
    wanted: bool,
    /// Requests that had come when the last answer was written to its end.
    at_rest: u64,
    left: Option<Bytes>,
}

#[derive(Debug)]
struct Linger {
    sleep: Pin<Box<Sleep>>,
    left: usize,
}

impl DownstreamIo {
    pub fn new(
        transport: Transport,
        prefix: BytesMut,
        state: Arc<IoState>,
        downstream: Arc<Downstream>,
    ) -> Self {
        Self {
            transport,
            prefix,
            ahead: ReadAhead {
                wanted: false,
                hyper_waits: false,
                end: None,
            },
            own_words: OwnWords {
                wanted: !downstream.http2,
                ..OwnWords::default()
            },
            state,
            downstream,
            linger: None,
        }
    }

    /// Notices the end of a client that has sent more than it is owed an answer for.
    #[must_use]
    pub fn reading_ahead(mut self) -> Self {
        self.ahead.wanted = true;
        self
    }

    /// Writes our own words in place of what hyper has to say by itself; `false` if what it says is ours.
    fn poll_own_words(
        &mut self,
        cx: &mut Context<'_>,
        bare: Option<&[u8]>,
    ) -> Poll<io::Result<bool>> {
        let own = &mut self.own_words;
        if !own.wanted || own.at_rest != self.downstream.entered() {
            return Poll::Ready(Ok(false));
        }
        let left = own
            .left
            .get_or_insert_with(|| malformed::answer(bare.unwrap_or_default()));
        while left.has_remaining() {
            let written = ready!(self.transport.poll_write(cx, left))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            left.advance(written);
        }
        own.wanted = false;
        Poll::Ready(Ok(true))
    }

    /// Reads what hyper leaves unread while a request is being answered.
    fn poll_ahead(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let mut space = [0; 4096];
        while self.prefix.len() < AHEAD_BYTES {
            let mut buf = ReadBuf::new(&mut space);
            let Poll::Ready(read) = self.transport.poll_read(cx, &mut buf) else {
                return Ok(());
            };
            read?;
            if buf.filled().is_empty() {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            self.prefix.extend_from_slice(buf.filled());
        }
        // Behind a whole request that is no upload but a flood: to see the end of it, all of it would have to be kept.
        if self.downstream.received().is_whole() {
            self.state.flooded.store(true, Ordering::Relaxed);
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        let end = match &mut self.ahead.end {
            Some(end) => end,
            none => none.insert(End::new(self.transport.tcp())?),
        };
        if end.poll_came(cx).is_ready() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        Ok(())
    }
}

/// The other side's FIN or reset, behind bytes that are still unread: the kernel tells of it all the same (EPOLLRDHUP, EPOLLERR). On a
/// descriptor of its own, since the socket's readiness says no more than that there is something to read.
struct End(Pin<Box<dyn Future<Output = ()> + Send>>);

impl End {
    fn new(tcp: &TcpStream) -> io::Result<Self> {
        let again = StdStream::from(tcp.as_fd().try_clone_to_owned()?);
        let again = TcpStream::from_std(again)?;
        Ok(Self(Box::pin(async move {
            // Of what tokio can be asked to wait for, these hold the end and do not hold readability. A failed reactor is an end too.
            let _ = again.ready(Interest::PRIORITY | Interest::ERROR).await;
        })))
    }

    fn poll_came(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.0.as_mut().poll(cx)
    }
}

impl fmt::Debug for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("End").finish_non_exhaustive()
    }
}

impl Drop for DownstreamIo {
    fn drop(&mut self) {
        if self.downstream.must_reset() {
            // If that fails the client sees an end instead of a break: nothing else can be done.
            let _ = SockRef::from(self.transport.tcp()).set_linger(Some(Duration::ZERO));
        }
    }
}

impl Tcp {
    pub fn new(stream: TcpStream, state: Arc<IoState>) -> Self {
        Self { stream, state }
    }

    fn wrote(&self, polled: &Poll<io::Result<usize>>) {
        self.state
            .blocked
            .store(polled.is_pending(), Ordering::Relaxed);
        if polled.is_ready() {
            self.state.writes.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl AsyncRead for Tcp {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Tcp {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.wrote(&polled);
        polled
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = poll_write_pieces(&mut self.stream, cx, bufs);
        self.wrote(&polled);
        polled
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl Transport {
    fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(tcp) => &tcp.stream,
            Self::Tls(tls) => &tls.get_ref().0.stream,
        }
    }

    pub fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self {
            Self::Plain(tcp) => Pin::new(tcp).poll_read(cx, buf),
            Self::Tls(tls) => Pin::new(tls).poll_read(cx, buf),
        }
    }

    fn poll_write(&mut self, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self {
            Self::Plain(tcp) => Pin::new(tcp).poll_write(cx, buf),
            Self::Tls(tls) => Pin::new(tls).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        &mut self,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self {
            Self::Plain(tcp) => Pin::new(tcp).poll_write_vectored(cx, bufs),
            Self::Tls(tls) => Pin::new(tls).poll_write_vectored(cx, bufs),
        }
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Plain(tcp) => Pin::new(tcp).poll_flush(cx),
            Self::Tls(tls) => Pin::new(tls).poll_flush(cx),
        }
    }

    fn poll_shutdown(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Plain(tcp) => Pin::new(tcp).poll_shutdown(cx),
            Self::Tls(tls) => Pin::new(tls).poll_shutdown(cx),
        }
    }
}

impl hyper::rt::Read for DownstreamIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        if self.prefix.has_remaining() {
            self.ahead.end = None;
            let n = self.prefix.len().min(buf.remaining());
            buf.put_slice(&self.prefix.split_to(n));
            self.state.reads.fetch_add(1, Ordering::Relaxed);
            return Poll::Ready(Ok(()));
        }
        // hyper-util's adapter writes straight into hyper's buffer; a fresh one per poll costs nothing.
        let state = Arc::clone(&self.state);
        let mut adapter = hyper_util::rt::TokioIo::new(Reading(&mut self.transport));
        let polled = Pin::new(&mut adapter).poll_read(cx, buf);
        self.ahead.hyper_waits = polled.is_pending();
        ready!(polled)?;
        state.reads.fetch_add(1, Ordering::Relaxed);
        Poll::Ready(Ok(()))
    }
}

/// Lets the transport be borrowed as an `AsyncRead`.
struct Reading<'a>(&'a mut Transport);

impl AsyncRead for Reading<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.0.poll_read(cx, buf)
    }
}

impl hyper::rt::Write for DownstreamIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.poll_own_words(cx, Some(buf)) {
            Poll::Ready(Ok(false)) => self.transport.poll_write(cx, buf),
            own => own.map_ok(|_| buf.len()),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.poll_own_words(cx, bufs.first().map(|buf| &**buf)) {
            Poll::Ready(Ok(false)) => self.transport.poll_write_vectored(cx, bufs),
            own => own.map_ok(|_| bufs.iter().map(|buf| buf.len()).sum()),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let hyper_waits = std::mem::take(&mut this.ahead.hyper_waits);
        if this.downstream.active() == 0 {
            this.own_words.at_rest = this.downstream.entered();
        } else if this.ahead.wanted && !hyper_waits {
            this.poll_ahead(cx)?;
        }
        ready!(this.transport.poll_flush(cx))?;
        this.downstream.flushed();
        Poll::Ready(Ok(()))
    }

    /// Says goodbye, then reads on for a moment.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.linger.is_none() {
            ready!(this.transport.poll_shutdown(cx))?;
            let sleep = Box::pin(tokio::time::sleep_until(Instant::now() + LINGER_TIME));
            this.linger = Some(Linger {
                sleep,
                left: LINGER_BYTES,
            });
        }
        let Some(linger) = &mut this.linger else {
            return Poll::Ready(Ok(()));
        };
        let mut space = [0; 4096];
        while linger.left > 0 && linger.sleep.as_mut().poll(cx).is_pending() {
            let mut buf = ReadBuf::new(&mut space);
            ready!(this.transport.poll_read(cx, &mut buf))?;
            let read = buf.filled().len();
            if read == 0 {
                break;
            }
            linger.left = linger.left.saturating_sub(read);
        }
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::{PrivateKeyDer, ServerName};
    use tokio::net::{TcpListener, TcpSocket};
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    use super::*;

    async fn sockets() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.set_recv_buffer_size(4096).expect("set");
        let at = listener.local_addr().expect("an address");
        let client = socket.connect(at).await.expect("connected");
        let (server, _) = listener.accept().await.expect("accepted");
        let small = SockRef::from(&server).set_send_buffer_size(4096);
        small.expect("set");
        (server, client)
    }

    fn tls() -> (TlsAcceptor, TlsConnector) {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]);
        let made = made.expect("a certificate");
        let key = PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
        let mut roots = rustls::RootCertStore::empty();
        roots.add(made.cert.der().clone()).expect("a root");
        let ring = Arc::new(rustls::crypto::ring::default_provider());
        let server = rustls::ServerConfig::builder_with_provider(Arc::clone(&ring))
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .expect("usable");
        let client = rustls::ClientConfig::builder_with_provider(ring)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(roots)
            .with_no_client_auth();
        (Arc::new(server).into(), Arc::new(client).into())
    }

    /// Its bytes stay unread; its end is seen behind them, and not before it comes.
    #[tokio::test]
    async fn an_end_is_seen_behind_unread_bytes() {
        for by_reset in [false, true] {
            let (server, mut client) = sockets().await;
            let mut end = End::new(&server).expect("watched");
            let sent = tokio::io::AsyncWriteExt::write_all(&mut client, &[b'x'; 20_000]);
            sent.await.expect("sent");
            server.readable().await.expect("there");
            let mut cx = Context::from_waker(std::task::Waker::noop());
            assert!(end.poll_came(&mut cx).is_pending(), "bytes are no end");
            if by_reset {
                let hard = SockRef::from(&client).set_linger(Some(Duration::ZERO));
                hard.expect("set");
            }
            drop(client);
            let seen = std::future::poll_fn(|cx| end.poll_came(cx));
            let seen = tokio::time::timeout(Duration::from_secs(10), seen).await;
            seen.expect("seen");
        }
    }

    /// One write fits into the buffer of rustls, and nothing more is ever written.
    #[tokio::test]
    async fn a_tls_client_that_reads_nothing_is_blocked() {
        let (server, client) = sockets().await;
        let state = Arc::new(IoState::default());
        let (acceptor, connector) = tls();
        let name = ServerName::try_from("localhost").expect("a name");
        let (served, connected) = tokio::join!(
            acceptor.accept(Tcp::new(server, Arc::clone(&state))),
            connector.connect(name, client)
        );
        let mut transport = Transport::Tls(Box::new(served.expect("shaken")));
        let mut connected = connected.expect("shaken");
        let mut cx = Context::from_waker(std::task::Waker::noop());
        let mut written = 0;
        while !state.is_blocked() {
            assert!(written < 4_000_000, "never blocked");
            let polled = transport.poll_write(&mut cx, &[b'x'; 16_384]);
            let Poll::Ready(Ok(n)) = polled else {
                panic!("its own buffer takes more: {polled:?}");
            };
            written += n;
            let _ = transport.poll_flush(&mut cx);
        }
        let writes = state.writes();
        let reads = async {
            let mut left = vec![0; written];
            tokio::io::AsyncReadExt::read_exact(&mut connected, &mut left).await
        };
        let flushes = std::future::poll_fn(|cx| transport.poll_flush(cx));
        let (read, flushed) = tokio::join!(reads, flushes);
        read.expect("read");
        flushed.expect("flushed");
        assert!(!state.is_blocked() && state.writes() > writes);
    }
}
