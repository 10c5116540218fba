//! A request: from parts to bytes on the socket.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, HOST};
use http::{HeaderMap, Method, Request};
use tokio::io::AsyncWrite;

use crate::upstream::exchange::{Failure, RequestBody};
use crate::upstream::upload::{Streamed, UploadError};

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

    pub(super) fn new(request: Request<RequestBody>) -> Self {
        let (parts, body) = request.into_parts();
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
        let target = parts.uri.path_and_query().map_or("/", |t| t.as_str());
        let head = head(&parts.method, target, &parts.headers, length);
        Self {
            head,
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

fn head(method: &Method, target: &str, headers: &HeaderMap, length: u64) -> Bytes {
    let fields: usize = headers
        .iter()
        .map(|(name, value)| name.as_str().len() + value.len() + 4)
        .sum();
    let mut head = BytesMut::with_capacity(fields + target.len() + 64);
    for part in [method.as_str(), " ", target, " HTTP/1.1\r\n"] {
        head.extend_from_slice(part.as_bytes());
    }
    let host = headers.get(HOST).into_iter().map(|value| (&HOST, value));
    let others = headers
        .iter()
        .filter(|(name, _)| *name != HOST && *name != CONTENT_LENGTH);
    for (name, value) in host.chain(others) {
        head.extend_from_slice(name.as_str().as_bytes());
        head.extend_from_slice(b": ");
        head.extend_from_slice(value.as_bytes());
        head.extend_from_slice(b"\r\n");
    }
    // A method that means something with a body says that there is none.
    if length > 0 || matches!(*method, Method::POST | Method::PUT | Method::PATCH) {
        head.extend_from_slice(format!("content-length: {length}\r\n").as_bytes());
    }
    head.extend_from_slice(b"\r\n");
    head.freeze()
}
