//! The socket of one client connection, and what can be learned from watching its reads and writes.

use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::net::TcpStream as StdStream;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::task::coop;
use tokio::time::{Instant, Sleep};
use tokio_rustls::server::TlsStream;

use crate::call::downstream::{Downstream, Tally};
use crate::config::HalfClose;
use crate::upstream::socket::poll_write_pieces;

/// After our last word an unread upload is read on for this long and this much, so that the client gets to see that word: closing a socket
/// with unread input sends a reset, which discards what the client has not read yet. As much as the kernels of both sides may hold already
/// (`tcp_rmem` was seen at 32 MiB): of an upload that its client has sent, none must be left.
const LINGER_TIME: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 64 * 1024 * 1024;

/// Shared between the socket (owned by its connection) and the guard that watches it.
#[derive(Debug, Default)]
pub struct IoState {
    reads: Tally,
    writes: Tally,
    blocked: AtomicBool,
    flooded: AtomicBool,
}

impl IoState {
    /// How often something was read.
    pub fn reads(&self) -> u64 {
        self.reads.get()
    }

    /// How often something was written.
    pub fn writes(&self) -> u64 {
        self.writes.get()
    }

    /// There is something new to read: from the socket, or from what was read already.
    pub fn has_read(&self) {
        self.reads.raise();
    }

    pub fn set_flooded(&self) {
        self.flooded.store(true, Ordering::Relaxed);
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
    /// The stream was asked for bytes and had none: it will wake `task`.
    waits: bool,
    task: Waker,
}

/// Plain or TLS.
#[derive(Debug)]
pub enum Transport {
    Plain(Tcp),
    Tls(Box<TlsStream<Tcp>>),
}

/// A client's socket.
// In this order: see `call::relay::Relay`.
#[repr(C)]
#[derive(Debug)]
pub struct DownstreamIo {
    transport: Transport,
    state: Arc<IoState>,
    downstream: Arc<Downstream>,
    /// Read already, to tell the protocols apart.
    prefix: BytesMut,
    linger: Option<Linger>,
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
            state,
            downstream,
            linger: None,
        }
    }

    pub fn state(&self) -> &IoState {
        &self.state
    }

    /// Sees the client leave without reading what comes before that.
    pub fn watch_end(&self, fin_means: HalfClose) -> io::Result<EndWatch> {
        EndWatch::new(self.transport.tcp(), fin_means)
    }
}

impl AsyncRead for DownstreamIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.prefix.has_remaining() {
            let n = this.prefix.len().min(buf.remaining());
            buf.put_slice(&this.prefix.split_to(n));
        } else {
            ready!(this.transport.poll_read(cx, buf))?;
        }
        this.state.has_read();
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for DownstreamIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.transport.poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.transport.poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.transport.poll_flush(cx))?;
        self.downstream.flushed();
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
        let mut space = [MaybeUninit::uninit(); 16 * 1024];
        while linger.left > 0 && linger.sleep.as_mut().poll(cx).is_pending() {
            let mut buf = ReadBuf::uninit(&mut space);
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

/// The other side's reset, and its FIN where that means that it has left, behind bytes that are still unread or behind its FIN: the kernel
/// tells of it all the same (EPOLLERR, EPOLLRDHUP). On a descriptor of its own, since the socket's readiness says no more than that there is
/// something to read.
pub struct EndWatch(Pin<Box<dyn Future<Output = ()> + Send>>);

impl EndWatch {
    fn new(tcp: &TcpStream, fin_means: HalfClose) -> io::Result<Self> {
        let interest = match fin_means {
            // Of what tokio can be asked to wait for, these hold the end and do not hold readability.
            HalfClose::Gone => Interest::PRIORITY | Interest::ERROR,
            HalfClose::Serve => Interest::ERROR,
        };
        let again = StdStream::from(tcp.as_fd().try_clone_to_owned()?);
        let again = TcpStream::from_std(again)?;
        Ok(Self(Box::pin(async move {
            // A failed reactor is an end too.
            let _ = again.ready(interest).await;
        })))
    }

    pub fn poll_came(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.0.as_mut().poll(cx)
    }
}

impl fmt::Debug for EndWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("EndWatch").finish_non_exhaustive()
    }
}

impl Drop for DownstreamIo {
    fn drop(&mut self) {
        if self.downstream.must_reset() {
            // If that fails the client sees an end instead of a break: nothing else can be done.
            let _ = SockRef::from(self.transport.tcp()).set_linger(Some(Duration::ZERO));
        } else if !self.state.is_blocked() && !self.downstream.is_cut_unseen() {
            self.transport.say_goodbye();
        }
    }
}

impl Tcp {
    /// For a task on the thread that watches `stream`: see [`is_waiting`](Self::is_waiting).
    pub fn new(stream: TcpStream, state: Arc<IoState>) -> Self {
        debug_assert!(
            Handle::try_current()
                .is_ok_and(|here| here.runtime_flavor() == RuntimeFlavor::CurrentThread)
        );
        Self {
            stream,
            state,
            waits: false,
            task: Waker::noop().clone(),
        }
    }

    /// There is nothing new to read, and whoever asks is woken when there is: no need to go to the stream and its lock for each chunk of an
    /// answer. That something is there and that the task is woken is one step for it only on the thread that sees to both.
    fn is_waiting(&self, cx: &Context<'_>) -> bool {
        let nothing = || self.stream.try_io(Interest::READABLE, || Ok(())).is_err();
        self.waits && self.task.will_wake(cx.waker()) && nothing()
    }

    fn wrote(&self, polled: &Poll<io::Result<usize>>) {
        self.state
            .blocked
            .store(polled.is_pending(), Ordering::Relaxed);
        if polled.is_ready() {
            self.state.writes.raise();
        }
    }
}

impl AsyncRead for Tcp {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.is_waiting(cx) {
            return Poll::Pending;
        }
        let polled = Pin::new(&mut this.stream).poll_read(cx, buf);
        // Whoever has no budget left is to come again, and the stream does not know of it.
        this.waits = polled.is_pending() && coop::has_budget_remaining();
        if this.waits {
            this.task.clone_from(cx.waker());
        }
        polled
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

    /// Tells a TLS client that this is the end and nothing was cut (RFC 8446 §6.1), if that was not done. Waits for nothing: what the kernel
    /// does not take at once is not sent.
    fn say_goodbye(&mut self) {
        let Self::Tls(tls) = self else {
            return;
        };
        let (tcp, session) = tls.get_mut();
        session.send_close_notify();
        let tcp = &mut AtOnce(&tcp.stream);
        while session.wants_write() && session.write_tls(tcp).is_ok_and(|n| n > 0) {}
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

/// What the kernel takes without a wait.
struct AtOnce<'a>(&'a TcpStream);

impl io::Write for AtOnce<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::{PrivateKeyDer, ServerName};
    use tokio::net::{TcpListener, TcpSocket};
    use tokio_rustls::{TlsAcceptor, TlsConnector};
    use tokio_util::task::TaskTracker;

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

    /// What a poll for bytes gives.
    fn poll_bytes(tcp: &mut Tcp, cx: &mut Context<'_>) -> Poll<Vec<u8>> {
        let mut space = [0; 64];
        let mut read = ReadBuf::new(&mut space);
        let polled = Pin::new(tcp).poll_read(cx, &mut read);
        polled.map(|done| done.map(|()| read.filled().to_vec()).expect("read"))
    }

    /// Asks for bytes in a task of its own until it is woken with some. `first`: is done in the task before. Meanwhile `comes` happens.
    async fn woken(
        mut tcp: Tcp,
        mut first: impl FnMut(&mut Tcp, &mut Context<'_>) + Send + 'static,
        comes: impl Future<Output = ()>,
    ) -> (Tcp, Vec<u8>) {
        let task = tokio::spawn(async move {
            std::future::poll_fn(|cx| {
                first(&mut tcp, cx);
                Poll::Ready(())
            })
            .await;
            tokio::task::yield_now().await;
            let came = std::future::poll_fn(|cx| poll_bytes(&mut tcp, cx)).await;
            (tcp, came)
        });
        for _ in 0..5 {
            tokio::task::yield_now().await; // it has been asked by then
        }
        comes.await;
        let done = tokio::time::timeout(Duration::from_secs(10), task).await;
        done.expect("woken").expect("no panic")
    }

    async fn send(client: &mut TcpStream) {
        let sent = tokio::io::AsyncWriteExt::write_all(client, b"x").await;
        sent.expect("sent");
    }

    #[tokio::test]
    async fn who_asked_last_is_woken_by_bytes_and_by_the_end() {
        let (server, mut client) = sockets().await;
        let tcp = Tcp::new(server, Arc::default());
        let by_another = |tcp: &mut Tcp, _: &mut Context<'_>| {
            let mut another = Context::from_waker(Waker::noop());
            assert!(poll_bytes(tcp, &mut another).is_pending());
        };
        let spent = |tcp: &mut Tcp, cx: &mut Context<'_>| {
            while coop::has_budget_remaining() {
                let _ = std::pin::pin!(coop::consume_budget()).poll(cx);
            }
            assert!(poll_bytes(tcp, cx).is_pending());
        };
        let by_itself = |tcp: &mut Tcp, cx: &mut Context<'_>| {
            assert!(poll_bytes(tcp, cx).is_pending());
        };
        let (tcp, came) = woken(tcp, by_another, send(&mut client)).await;
        assert_eq!(came, b"x");
        let (tcp, came) = woken(tcp, spent, send(&mut client)).await;
        assert_eq!(came, b"x");
        let (tcp, came) = woken(tcp, by_itself, send(&mut client)).await;
        assert_eq!(came, b"x");
        let (_, came) = woken(tcp, by_itself, async { drop(client) }).await;
        assert_eq!(came, b"");
    }

    /// Its bytes stay unread; its end is seen behind them, and not before it comes.
    #[tokio::test]
    async fn an_end_is_seen_behind_unread_bytes() {
        for (fin_means, by_reset) in [
            (HalfClose::Gone, false),
            (HalfClose::Gone, true),
            (HalfClose::Serve, true),
        ] {
            let (server, mut client) = sockets().await;
            let mut end = EndWatch::new(&server, fin_means).expect("watched");
            let sent = tokio::io::AsyncWriteExt::write_all(&mut client, &[b'x'; 20_000]);
            sent.await.expect("sent");
            server.readable().await.expect("there");
            let mut cx = Context::from_waker(std::task::Waker::noop());
            assert!(end.poll_came(&mut cx).is_pending(), "bytes are no end");
            if fin_means == HalfClose::Serve {
                let mut fin = EndWatch::new(&server, HalfClose::Gone).expect("watched");
                let shut = SockRef::from(&client).shutdown(std::net::Shutdown::Write);
                shut.expect("a FIN");
                seen(&mut fin).await;
                assert!(end.poll_came(&mut cx).is_pending(), "a FIN is no end here");
            }
            if by_reset {
                let hard = SockRef::from(&client).set_linger(Some(Duration::ZERO));
                hard.expect("set");
            }
            drop(client);
            seen(&mut end).await;
        }
    }

    async fn seen(end: &mut EndWatch) {
        let seen = std::future::poll_fn(|cx| end.poll_came(cx));
        let seen = tokio::time::timeout(Duration::from_secs(10), seen).await;
        seen.expect("seen");
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

    /// An end is told as one, but not where it would pass for the end of an answer.
    #[tokio::test]
    async fn a_tls_client_is_told_that_this_is_the_end() {
        for (until_close, busy, told) in [
            (false, false, true),
            (false, true, true),
            (true, false, true),
            (true, true, false),
        ] {
            let (server, client) = sockets().await;
            let state = Arc::new(IoState::default());
            let (acceptor, connector) = tls();
            let name = ServerName::try_from("localhost").expect("a name");
            let peer = client.local_addr().expect("an address");
            let (served, connected) = tokio::join!(
                acceptor.accept(Tcp::new(server, Arc::clone(&state))),
                connector.connect(name, client)
            );
            let transport = Transport::Tls(Box::new(served.expect("shaken")));
            let downstream = Arc::new(Downstream::new(peer, false, TaskTracker::new()));
            let io = DownstreamIo::new(transport, BytesMut::new(), state, Arc::clone(&downstream));
            if until_close {
                downstream.ends_by_close();
            }
            let active = busy.then(|| downstream.enter(None));
            drop(io);
            drop(active);
            let mut read = Vec::new();
            let mut connected = connected.expect("shaken");
            let end = tokio::io::AsyncReadExt::read_to_end(&mut connected, &mut read).await;
            assert_eq!(end.is_ok(), told, "{until_close} {busy}: {end:?}");
        }
    }
}
