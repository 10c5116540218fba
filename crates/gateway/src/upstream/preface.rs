//! Waits for the first that an HTTP/2 server says: its settings (RFC 9113 §3.4). hyper does not wait, and does not tell.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;

use super::socket::UpstreamIo;

/// Length, type, flags and stream of a frame.
const FRAME_HEAD: usize = 9;
const SETTINGS: u8 = 4;

/// A connection that tells when its first frame begins and is the right one. If it is not, or the connection ends, the sender is dropped.
#[derive(Debug)]
pub(super) struct Preface {
    io: UpstreamIo,
    seen: Vec<u8>,
    settled: Option<oneshot::Sender<()>>,
}

impl Preface {
    pub(super) fn new(io: UpstreamIo) -> (Self, oneshot::Receiver<()>) {
        let (settled, settings) = oneshot::channel();
        let preface = Self {
            io,
            seen: Vec::new(),
            settled: Some(settled),
        };
        (preface, settings)
    }

    fn see(&mut self, bytes: &[u8]) {
        let missing = FRAME_HEAD - self.seen.len();
        self.seen.extend(bytes.iter().take(missing));
        if self.seen.len() < FRAME_HEAD {
            return;
        }
        let is_settings = matches!(self.seen[..], [_, _, _, SETTINGS, _, 0, 0, 0, 0]);
        if let Some(settled) = self.settled.take()
            && is_settings
        {
            // Fails if nobody waits any more.
            let _ = settled.send(());
        }
        self.seen = Vec::new();
    }
}

impl AsyncRead for Preface {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.io).poll_read(cx, buf);
        if self.settled.is_some() {
            self.see(buf.filled().get(before..).unwrap_or_default());
        }
        polled
    }
}

impl AsyncWrite for Preface {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
