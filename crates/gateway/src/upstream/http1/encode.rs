//! A request: from parts to bytes on the socket.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes};
use http::header::{CONTENT_LENGTH, HOST};
use http::{HeaderMap, Method};
use tokio::io::AsyncWrite;

use crate::upstream::exchange::{Failure, RequestBody};
use crate::upstream::upload::{Streamed, UploadError};

/// A request's first line and fields. Its `Host` and its length are not among the fields.
#[derive(Clone, Copy, Debug)]
pub struct RequestHead<'a> {
    pub method: &'a Method,
    /// Path and query.
    pub target: &'a str,
    pub host: &'a str,
    pub headers: &'a HeaderMap,
}

/// What is still to be written of one request.
#[derive(Debug)]
pub(super) struct Outgoing {
    /// The head; later empty.
    head: Bytes,
    /// The body, or the part of a streamed one that is in hand.
    data: Bytes,
    rest: Option<Rest>,
    flushed: bool,
}

/// A body that comes from the client while it is sent.
#[derive(Debug)]
struct Rest {
    body: Streamed,
    left: u64,
}

impl Outgoing {
    pub(super) fn done() -> Self {
        Self {
            head: Bytes::new(),
            data: Bytes::new(),
            rest: None,
            flushed: true,
        }
    }

    pub(super) fn new(head: RequestHead<'_>, body: RequestBody) -> Self {
        let (data, rest, length) = match body {
            RequestBody::Whole(data) => {
                let data = data.unwrap_or_default();
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
            head: head.bytes(length),
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
                let parts = [IoSlice::new(&self.head), IoSlice::new(&self.data)];
                match Pin::new(&mut *io).poll_write_vectored(cx, &parts) {
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

    fn advance(&mut self, written: usize) {
        if let Some(rest) = &self.rest {
            rest.body.sent().mark();
        }
        let of_head = written.min(self.head.len());
        self.head.advance(of_head);
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

impl RequestHead<'_> {
    fn bytes(&self, length: u64) -> Bytes {
        let Self {
            method,
            target,
            host,
            headers,
        } = *self;
        let fields: usize = headers
            .iter()
            .map(|(name, value)| name.as_str().len() + value.len() + 4)
            .sum();
        let mut head = Vec::with_capacity(fields + target.len() + host.len() + 80);
        for part in [method.as_str(), " ", target, " HTTP/1.1\r\nhost: ", host] {
            head.extend_from_slice(part.as_bytes());
        }
        let others = headers
            .iter()
            .filter(|(name, _)| *name != HOST && *name != CONTENT_LENGTH);
        for (name, value) in others {
            head.extend_from_slice(b"\r\n");
            head.extend_from_slice(name.as_str().as_bytes());
            head.extend_from_slice(b": ");
            head.extend_from_slice(value.as_bytes());
        }
        // A method that means something with a body says that there is none.
        if length > 0 || matches!(*method, Method::POST | Method::PUT | Method::PATCH) {
            head.extend_from_slice(b"\r\ncontent-length: ");
            head.extend_from_slice(itoa::Buffer::new().format(length).as_bytes());
        }
        head.extend_from_slice(b"\r\n\r\n");
        head.into()
    }
}
