//! The socket of one upstream connection.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use hyper::rt::ReadBufCursor;
use hyper_util::rt::TokioIo;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio_rustls::client::TlsStream;

use prometheus_client::metrics::gauge::Gauge;

/// A TCP connection that is reset when it is dropped.
///
/// A close by FIN would leave our side in TIME_WAIT: a storm of cancelled calls would use up the ports. A reset also tells the server at
/// once, even while it is writing. Nothing is lost by it: an exchange is only dropped when its answer is complete or not wanted.
#[derive(Debug)]
pub struct Socket {
    tcp: TcpStream,
    open: Gauge,
    _permit: OwnedSemaphorePermit,
}

impl Socket {
    pub fn new(tcp: TcpStream, open: Gauge, permit: OwnedSemaphorePermit) -> Self {
        open.inc();
        Self {
            tcp,
            open,
            _permit: permit,
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
        Pin::new(&mut self.tcp).poll_read(cx, buf)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tcp).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tcp).poll_write_vectored(cx, bufs)
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

/// Plain or TLS, for hyper.
#[derive(Debug)]
pub enum UpstreamIo {
    Plain(TokioIo<Socket>),
    Tls(Box<TokioIo<TlsStream<Socket>>>),
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

impl hyper::rt::Read for UpstreamIo {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self, io => ready!(io.poll_read(cx, buf)))?;
        Poll::Ready(Ok(()))
    }
}

impl hyper::rt::Write for UpstreamIo {
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
