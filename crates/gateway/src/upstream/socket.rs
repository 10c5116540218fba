//! The socket of one upstream connection.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio_rustls::client::TlsStream;

use prometheus_client::metrics::gauge::Gauge;

use super::acknowledged::acknowledged;

/// What went out on a connection and how the peer ended it, shared by its socket and the exchange on it.
#[derive(Debug, Default)]
pub struct Traffic {
    written: AtomicU64,
    end: OnceLock<End>,
}

/// The first that was heard of a connection's end.
#[derive(Debug)]
enum End {
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
            || matches!(self.end.get(), Some(End::Closed { acknowledged }) if *acknowledged <= mark)
    }
}

/// A TCP connection that is reset when it is dropped.
///
/// A close by FIN would leave our side in TIME_WAIT: a storm of cancelled calls would use up the ports. A reset also tells the server at
/// once, even while it is writing. Nothing is lost by it: an exchange is only dropped when its answer is complete or not wanted.
#[derive(Debug)]
pub struct Socket {
    tcp: TcpStream,
    traffic: Arc<Traffic>,
    open: Gauge,
    _permit: OwnedSemaphorePermit,
}

impl Socket {
    pub fn new(tcp: TcpStream, open: Gauge, permit: OwnedSemaphorePermit) -> Self {
        open.inc();
        Self {
            tcp,
            traffic: Arc::default(),
            open,
            _permit: permit,
        }
    }

    pub fn traffic(&self) -> &Arc<Traffic> {
        &self.traffic
    }

    /// Keeps the first sign of an end: the kernel reports it once and says something vaguer afterwards.
    fn heard(&self, end: Result<(), &io::Error>) {
        self.traffic.end.get_or_init(|| match end {
            // A write to a connection that was reset after its FIN is a broken pipe; without a FIN it is a reset.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => End::Broken,
            Ok(()) | Err(_) => match acknowledged(&self.tcp) {
                Ok(acknowledged) => End::Closed { acknowledged },
                Err(_) => End::Broken,
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
        let _ = SockRef::from(&self.tcp).set_linger(Some(std::time::Duration::ZERO));
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
    pub fn traffic(&self) -> &Arc<Traffic> {
        match self {
            Self::Plain(socket) => socket.traffic(),
            Self::Tls(tls) => tls.get_ref().0.traffic(),
        }
    }
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
