//! The socket of one upstream connection.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::coop;
use tokio::time::{Interval, MissedTickBehavior, interval};
use tokio_rustls::client::TlsStream;

use prometheus_client::metrics::gauge::Gauge;

use super::acknowledged::{acknowledged, silence};
use super::connect::PROBE_AGAIN;

/// A connection that a call may be put on is probed this often.
const WATCHED_EVERY: Duration = Duration::from_secs(1);
/// One whose other end was not heard of for this long is none that a call is put on: a probe and its repetition have gone unanswered, or
/// bytes that were sent have.
pub(super) const LOST: Duration = Duration::from_secs(3);

/// Probes of a connection that has been silent for `time`.
pub(super) fn probes(time: Duration, again: Duration) -> TcpKeepalive {
    TcpKeepalive::new()
        .with_time(time)
        .with_interval(again)
        .with_retries(3)
}

/// What went out on a connection and how the peer ended it, shared by its socket and the exchange on it.
#[derive(Debug, Default)]
pub struct Traffic {
    written: AtomicU64,
    end: OnceLock<PeerEnd>,
    lost: AtomicBool,
}

/// The first that was heard of a connection's end.
#[derive(Debug)]
enum PeerEnd {
    /// The peer closed in order (FIN) after it had acknowledged this many of our bytes.
    Closed { acknowledged: u64 },
    /// A reset, or anything else.
    Broken,
}

impl Traffic {
    /// Bytes that our own kernel took.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// On a connection that is watched: nothing has been heard of the other end for [`LOST`]. It may come back.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Proof that no server can have read anything that was written after `mark`.
    ///
    /// Either our kernel took none of it, or the peer closed the connection before its kernel had any of it: a FIN acknowledges all that was
    /// there when it was sent, and a server that has closed a connection reads no more from it. This is the race of a request with the
    /// server's idle limit.
    ///
    /// A reset alone proves nothing, however little was acknowledged: acknowledgements are delayed by up to 40 ms and more, so that a server
    /// that read the request, began to work and then reset the connection looks the same.
    pub fn nothing_accepted_since(&self, mark: u64) -> bool {
        self.written() == mark
            || matches!(self.end.get(), Some(PeerEnd::Closed { acknowledged }) if *acknowledged <= mark)
    }
}

/// A TCP connection that is reset when it is dropped.
///
/// A close by FIN would leave our side in TIME_WAIT: a storm of cancelled calls would use up the ports. A reset also tells the server at
/// once, even while it is writing. Nothing is lost by it: an exchange is only dropped when its answer is complete or not wanted.
// In this order: see `call::relay::Relay`.
#[repr(C)]
#[derive(Debug)]
pub struct Socket {
    tcp: TcpStream,
    watch: Option<Watch>,
    traffic: Arc<Traffic>,
    open: Gauge,
    _permit: OwnedSemaphorePermit,
}

/// What a watched connection has to be given back, and the clock of one that carries calls.
#[derive(Debug)]
struct Watch {
    keep_alive: Duration,
    clock: Option<Pin<Box<Interval>>>,
}

impl Socket {
    pub fn new(tcp: TcpStream, open: Gauge, permit: OwnedSemaphorePermit) -> Self {
        open.inc();
        Self {
            tcp,
            traffic: Arc::default(),
            open,
            watch: None,
            _permit: permit,
        }
    }

    pub fn traffic(&self) -> &Arc<Traffic> {
        &self.traffic
    }

    /// Has the kernel ask the other machine each second whether it is there, from now on.
    fn watch(&mut self, clock: Option<Pin<Box<Interval>>>) -> io::Result<()> {
        let socket = SockRef::from(&self.tcp);
        let keep_alive = socket.tcp_keepalive_time()?;
        socket.set_tcp_keepalive(&probes(WATCHED_EVERY, WATCHED_EVERY))?;
        self.watch = Some(Watch { keep_alive, clock });
        Ok(())
    }

    /// Whether the other end of an idle connection was heard of lately; it is watched from the first look on.
    fn is_there(&mut self) -> bool {
        if self.watch.is_none() {
            return self.watch(None).is_ok();
        }
        silence(&self.tcp).is_ok_and(|silence| silence < LOST)
    }

    /// A call has it: its silence is the server's, and has the limits of the configuration.
    fn unwatch(&mut self) -> bool {
        let Some(watch) = self.watch.take() else {
            return true;
        };
        let probes = probes(watch.keep_alive, PROBE_AGAIN);
        SockRef::from(&self.tcp).set_tcp_keepalive(&probes).is_ok()
    }

    /// Looks each second, while calls are on it, how long the other end has been silent.
    fn look(&mut self, cx: &mut Context<'_>) {
        let Some(clock) = self.watch.as_mut().and_then(|w| w.clock.as_mut()) else {
            return;
        };
        let mut due = false;
        while clock.poll_tick(cx).is_ready() {
            due = true;
        }
        if due {
            let lost = silence(&self.tcp).is_ok_and(|silence| silence >= LOST);
            self.traffic.lost.store(lost, Ordering::Relaxed);
        }
    }

    /// Keeps the first sign of an end: the kernel reports it once and says something vaguer afterwards.
    fn heard(&self, end: Result<(), &io::Error>) {
        self.traffic.end.get_or_init(|| match end {
            // A write to a connection that was reset after its FIN is a broken pipe; without a FIN it is a reset.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => PeerEnd::Broken,
            Ok(()) | Err(_) => match acknowledged(&self.tcp) {
                Ok(acknowledged) => PeerEnd::Closed { acknowledged },
                Err(_) => PeerEnd::Broken,
            },
        });
    }

    fn wrote(&self, polled: &Poll<io::Result<usize>>) {
        match polled {
            Poll::Ready(Ok(bytes)) => {
                self.traffic
                    .written
                    .fetch_add(*bytes as u64, Ordering::Relaxed);
            }
            Poll::Ready(Err(error)) => self.heard(Err(error)),
            Poll::Pending => {}
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Fails only on a socket that is gone already.
        let _ = SockRef::from(&self.tcp).set_linger(Some(Duration::ZERO));
        self.open.dec();
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.tcp).poll_read(cx, buf);
        if self.watch.is_some() {
            self.look(cx);
        }
        match &polled {
            Poll::Ready(Ok(())) if buf.filled().len() == before && buf.remaining() > 0 => {
                self.heard(Ok(()));
            }
            Poll::Ready(Err(error)) => self.heard(Err(error)),
            Poll::Ready(Ok(())) | Poll::Pending => {}
        }
        polled
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.tcp).poll_write(cx, buf);
        self.wrote(&polled);
        polled
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = poll_write_pieces(&mut self.tcp, cx, bufs);
        self.wrote(&polled);
        polled
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(cx)
    }

    /// Does nothing: the drop that follows resets the connection.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Writes several pieces at once. Small ones are joined and sent as one: copying them costs less than what the kernel takes for a vector
/// (measured: 0.1 µs a write, of 2).
pub fn poll_write_pieces(
    tcp: &mut TcpStream,
    cx: &mut Context<'_>,
    pieces: &[IoSlice<'_>],
) -> Poll<io::Result<usize>> {
    const JOINED_MAX: usize = 1024;
    let length: usize = pieces.iter().map(|piece| piece.len()).sum();
    if length > JOINED_MAX {
        return Pin::new(tcp).poll_write_vectored(cx, pieces);
    }
    let mut joined = [0; JOINED_MAX];
    let mut free = &mut joined[..];
    for piece in pieces {
        let (here, rest) = free.split_at_mut(piece.len());
        here.copy_from_slice(piece);
        free = rest;
    }
    Pin::new(tcp).poll_write(cx, &joined[..length])
}

/// Plain or TLS.
#[derive(Debug)]
pub enum UpstreamIo {
    Plain(Socket),
    Tls(Box<TlsStream<Socket>>),
}

impl UpstreamIo {
    fn socket(&mut self) -> &mut Socket {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(tls) => tls.get_mut().0,
        }
    }

    /// See [`Traffic::is_lost`]: the connection is looked after for as long as it is read from.
    pub fn watch_in_use(&mut self) -> io::Result<()> {
        let mut clock = interval(WATCHED_EVERY);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.socket().watch(Some(Box::pin(clock)))
    }

    /// Nothing can be read: no bytes, no end, no error.
    pub fn is_quiet(&mut self) -> bool {
        let io = match self {
            // What the runtime has not been told of is asked without its task, its budget and its lock.
            Self::Plain(socket) => return would_block(&socket.tcp.try_read(&mut [0])),
            Self::Tls(io) => io,
        };
        let mut byte = [0];
        let mut byte = ReadBuf::new(&mut byte);
        // Without a task's budget: one that is used up would make the read look as if nothing had come.
        let mut look =
            coop::unconstrained(poll_fn(|cx| Pin::new(&mut **io).poll_read(cx, &mut byte)));
        let mut cx = Context::from_waker(Waker::noop());
        Pin::new(&mut look).poll(&mut cx).is_pending()
    }

    /// Whether the other end of an idle connection is there, as far as its machine has answered probes. Asked some times a second.
    pub fn is_there(&mut self) -> bool {
        self.socket().is_there()
    }

    /// The connection is idle no more.
    pub fn unwatch(&mut self) -> bool {
        self.socket().unwatch()
    }

    pub fn traffic(&self) -> &Arc<Traffic> {
        match self {
            Self::Plain(socket) => socket.traffic(),
            Self::Tls(tls) => tls.get_ref().0.traffic(),
        }
    }
}

fn would_block(read: &io::Result<usize>) -> bool {
    matches!(read, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

macro_rules! either {
    ($self:expr, $io:ident => $call:expr) => {
        match $self.get_mut() {
            UpstreamIo::Plain($io) => {
                let $io = Pin::new($io);
                $call
            }
            UpstreamIo::Tls($io) => {
                let $io = Pin::new(&mut **$io);
                $call
            }
        }
    };
}

impl AsyncRead for UpstreamIo {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self, io => io.poll_read(cx, buf))
    }
}

impl AsyncWrite for UpstreamIo {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        either!(self, io => io.poll_write(cx, buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, io => io.poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(io) => io.is_write_vectored(),
            Self::Tls(io) => io.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, io => io.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, io => io.poll_shutdown(cx))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn pieces_of_any_size_go_out_in_order() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let at = listener.local_addr().expect("an address");
        let mut ours = TcpStream::connect(at).await.expect("connected");
        let (mut theirs, _) = listener.accept().await.expect("accepted");
        for middle in [0, 1, 1020, 1021, 3000] {
            let middle = vec![b'm'; middle];
            let pieces = [
                IoSlice::new(b"a"),
                IoSlice::new(&middle),
                IoSlice::new(b"zz"),
            ];
            let write = std::future::poll_fn(|cx| poll_write_pieces(&mut ours, cx, &pieces));
            let written = write.await.expect("written");
            assert_eq!(written, middle.len() + 3);
            let mut read = vec![0; written];
            theirs.read_exact(&mut read).await.expect("read");
            assert_eq!(read, [&b"a"[..], &middle, b"zz"].concat());
        }
    }
}
