//! A request: from parts to bytes on the socket.

use std::fmt;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes, BytesMut};
use http::Method;
use tokio::io::AsyncWrite;

use crate::fields::Sent;
use crate::upstream::exchange::{Failure, RequestBody};
use crate::upstream::upload::{Streamed, UploadError};

/// Reserved for a head; most are shorter.
const HEAD_BYTES: usize = 1024;

/// The first line and the fields of a request as it goes upstream. Its `Host` and its length are not among the fields.
#[derive(Clone, Copy)]
pub struct SentHead<'a> {
    pub method: &'a Method,
    /// Path and query.
    pub target: &'a str,
    pub host: &'a str,
    pub fields: &'a Sent,
    /// A small body, which goes out with the head; then no other follows.
    pub body: &'a [u8],
}

/// What is still to be written of one request.
// In this order: what is looked at for each chunk of the answer stands beside what else is.
#[repr(C)]
pub(super) struct OutgoingRequest {
    flushed: bool,
    /// The head; later empty.
    head: BytesMut,
    /// The body, or the part of a streamed one that is in hand.
    data: Bytes,
    rest: Option<Rest>,
}

impl fmt::Debug for SentHead<'_> {
    /// Without what its client sent.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.method, self.host)
    }
}

impl fmt::Debug for OutgoingRequest {
    /// Without the upstream's key and the client's body.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (head, data) = (self.head.len(), self.data.len());
        write!(f, "{head} bytes of a head, {data} of a body")
    }
}

/// A body that comes from the client while it is sent.
#[derive(Debug)]
struct Rest {
    body: Streamed,
    left: u64,
}

impl OutgoingRequest {
    pub(super) fn done() -> Self {
        Self {
            head: BytesMut::new(),
            data: Bytes::new(),
            rest: None,
            flushed: true,
        }
    }

    pub(super) fn new(head: SentHead<'_>, body: RequestBody) -> Self {
        let (data, rest, length) = match body {
            RequestBody::Whole(None) => (Bytes::new(), None, head.body.len() as u64),
            RequestBody::Whole(Some(data)) => {
                let length = data.len() as u64;
                (data, None, length)
            }
            RequestBody::Streamed(body) => {
                // Streamed only if its length was announced; see `call::upload`.
                let left = body.left().unwrap_or(0);
                (Bytes::new(), Some(Rest { body, left }), left)
            }
        };
        Self {
            head: head.encode(length),
            data,
            rest,
            flushed: false,
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.flushed
    }

    /// Writes what can be written. `Ok(Some)`: writing failed, which need not be the end; `Err`: the client's body broke off.
    pub(super) fn poll(
        &mut self,
        io: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Result<Option<io::Error>, Failure> {
        while !self.flushed {
            if self.head.has_remaining() || self.data.has_remaining() {
                match self.poll_write(io, cx) {
                    Poll::Ready(Ok(0)) => return Ok(Some(io::ErrorKind::WriteZero.into())),
                    Poll::Ready(Ok(written)) => self.advance(written),
                    Poll::Ready(Err(error)) => return Ok(Some(error)),
                    Poll::Pending => return Ok(None),
                }
                continue;
            }
            if self.rest.is_some() {
                if self.poll_rest(cx)? {
                    continue;
                }
                // TLS keeps what the kernel had no room for; it is not to wait for the client's next bytes.
                return match Pin::new(&mut *io).poll_flush(cx) {
                    Poll::Ready(Err(error)) => Ok(Some(error)),
                    Poll::Ready(Ok(())) | Poll::Pending => Ok(None),
                };
            }
            match Pin::new(&mut *io).poll_flush(cx) {
                Poll::Ready(Ok(())) => self.flushed = true,
                Poll::Ready(Err(error)) => return Ok(Some(error)),
                Poll::Pending => return Ok(None),
            }
        }
        Ok(None)
    }

    fn poll_write(
        &self,
        io: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        if self.data.is_empty() {
            return Pin::new(io).poll_write(cx, &self.head);
        }
        let parts = [IoSlice::new(&self.head), IoSlice::new(&self.data)];
        Pin::new(io).poll_write_vectored(cx, &parts)
    }

    fn advance(&mut self, written: usize) {
        if let Some(rest) = &self.rest {
            rest.body.sent().mark();
        }
        let of_head = written.min(self.head.len());
        self.head.advance(of_head);
        if self.head.is_empty() {
            self.head = BytesMut::new();
        }
        self.data.advance((written - of_head).min(self.data.len()));
        if self.data.is_empty() {
            // The request's memory is given back as soon as the kernel has it.
            self.data = Bytes::new();
        }
    }

    /// Gets the next part of a streamed body. False: it is not there yet.
    fn poll_rest(&mut self, cx: &mut Context<'_>) -> Result<bool, Failure> {
        let Some(rest) = &mut self.rest else {
            return Ok(true);
        };
        match rest.body.poll_data(cx) {
            Poll::Pending => Ok(false),
            Poll::Ready(Some(Ok(data))) => {
                self.data = data;
                rest.left = rest
                    .left
                    .checked_sub(self.data.len() as u64)
                    .ok_or(Failure::Request(UploadError::Broken))?;
                Ok(true)
            }
            Poll::Ready(None) if rest.left == 0 => {
                self.rest = None;
                Ok(true)
            }
            Poll::Ready(None) => Err(Failure::Request(UploadError::Broken)),
            Poll::Ready(Some(Err(error))) => Err(Failure::Request(error)),
        }
    }
}

impl SentHead<'_> {
    fn encode(&self, length: u64) -> BytesMut {
        let mut head = BytesMut::with_capacity(HEAD_BYTES);
        for part in [self.method.as_str(), " ", self.target] {
            head.extend_from_slice(part.as_bytes());
        }
        head.extend_from_slice(b" HTTP/1.1\r\nhost: ");
        head.extend_from_slice(self.host.as_bytes());
        for line in self.fields.lines() {
            head.extend_from_slice(line.written);
        }
        // A method that means something with a body says that there is none.
        if length > 0 || matches!(*self.method, Method::POST | Method::PUT | Method::PATCH) {
            head.extend_from_slice(b"\r\ncontent-length: ");
            head.extend_from_slice(itoa::Buffer::new().format(length).as_bytes());
        }
        head.extend_from_slice(b"\r\n\r\n");
        head.extend_from_slice(self.body);
        head
    }
}
