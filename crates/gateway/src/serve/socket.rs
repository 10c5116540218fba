//! The socket of one client connection, and what can be learned from watching its reads and writes.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use hyper::rt::ReadBufCursor;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};
use tokio_rustls::server::TlsStream;

use super::malformed;
use crate::call::downstream::Downstream;

/// After our last word an unread upload is read on for this long and this much, so that the client gets to see that word: closing a socket
/// with unread input sends a reset, which discards what the client has not read yet.
const LINGER_TIME: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 1024 * 1024;
/// Pipelined bytes that are held for later while a request is being answered.
const AHEAD_BYTES: usize = 64 * 1024;

/// Shared between the socket (owned by hyper) and the guard that watches it.
#[derive(Debug, Default)]
pub struct IoState {
    reads: AtomicU64,
    writes: AtomicU64,
    blocked: AtomicBool,
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

    /// Bytes wait that the kernel does not take.
    pub fn is_blocked(&self) -> bool {
        self.blocked.load(Ordering::Relaxed)
    }
}

/// Plain or TLS.
#[derive(Debug)]
pub enum Transport {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// A client's socket.
#[derive(Debug)]
pub struct DownstreamIo {
    transport: Transport,
    /// Read already: to tell the protocols apart, or ahead of hyper.
    prefix: Bytes,
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
        prefix: Bytes,
        state: Arc<IoState>,
        downstream: Arc<Downstream>,
    ) -> Self {
        Self {
            transport,
            prefix,
            ahead: ReadAhead {
                wanted: false,
                hyper_waits: false,
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
            self.prefix = [&self.prefix[..], buf.filled()].concat().into();
        }
        Ok(())
    }

    fn wrote(&self, polled: &Poll<io::Result<usize>>) {
        match polled {
            Poll::Pending => self.state.blocked.store(true, Ordering::Relaxed),
            Poll::Ready(_) => {
                self.state.blocked.store(false, Ordering::Relaxed);
                self.state.writes.fetch_add(1, Ordering::Relaxed);
            }
        }
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

impl Transport {
    fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(tcp) => tcp,
            Self::Tls(tls) => tls.get_ref().0,
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
        let polled = match self.poll_own_words(cx, Some(buf)) {
            Poll::Ready(Ok(false)) => self.transport.poll_write(cx, buf),
            own => own.map_ok(|_| buf.len()),
        };
        self.wrote(&polled);
        polled
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = match self.poll_own_words(cx, bufs.first().map(|buf| &**buf)) {
            Poll::Ready(Ok(false)) => self.transport.poll_write_vectored(cx, bufs),
            own => own.map_ok(|_| bufs.iter().map(|buf| buf.len()).sum()),
        };
        self.wrote(&polled);
        polled
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
