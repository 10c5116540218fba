//! One HTTP/1.1 connection to a model server, polled by the task that waits for the answer.
//!
//! There is no connection task and no channel: a call to [`Http1::poll_data`] reads the socket, takes the framing off and returns the bytes, as
//! slices of what was read. So a slow reader slows exactly its own connection, an idle stream holds no memory for it, and dropping the value closes
//! the socket there and then. Heads and chunk sizes are parsed by `httparse`; what is ours is the order of reads and writes and the rule for
//! when a connection can carry another call. Why not hyper's client: `docs/decisions/0010`.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{Method, StatusCode};
use tokio_util::io::poll_read_buf;

use super::EndpointState;
use super::exchange::{Failure, RequestBody, SendError};
use super::socket::{Traffic, UpstreamIo};
use crate::fields::UpstreamHead;
use crate::warm;

mod decode;
mod encode;
mod head;
#[cfg(test)]
mod proof_tests;
#[cfg(test)]
mod tests;

pub use decode::{Chunk, Decoded, Decoder};
use encode::OutgoingRequest;
pub use encode::SentHead;

/// The first read of a connection, and the least, into the [thread's memory](warm): an event of a token fits.
const READ_MIN: usize = 2 * 1024;
/// Longest response head.
const HEAD_MAX: usize = 64 * 1024;
/// How long a server that says 408 to a request it may not have seen has for its FIN.
const UNASKED_WAIT: Duration = Duration::from_millis(100);
/// Interim (1xx) answers before the real one.
const INTERIM_MAX: usize = 16;

/// A connection, idle or in use by one exchange.
// In this order: see `call::relay::Relay`.
#[repr(C)]
pub struct Http1 {
    /// Read and not yet understood.
    unread: BytesMut,
    incoming: Incoming,
    /// Size of the next read; grows with a fast answer, up to `read_max`.
    read_next: usize,
    read_max: usize,
    io: UpstreamIo,
    outgoing: OutgoingRequest,
    traffic: Arc<Traffic>,
    /// The server allows another call after this one.
    keeps: bool,
    /// It has carried an answer before.
    pub reused: bool,
    pub endpoint: Arc<EndpointState>,
}

/// How far the answer is.
#[derive(Debug)]
enum Incoming {
    /// None is due.
    Nothing,
    Head {
        to_head_request: bool,
        interim: usize,
    },
    Body(Decoder),
    Complete,
}

impl fmt::Debug for Http1 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http1")
            .field("endpoint", &self.endpoint.authority)
            .field("reused", &self.reused)
            .field("incoming", &self.incoming)
            .finish_non_exhaustive()
    }
}

impl Http1 {
    pub fn new(io: UpstreamIo, endpoint: Arc<EndpointState>, buffer_bytes: usize) -> Self {
        Self {
            traffic: Arc::clone(io.traffic()),
            unread: BytesMut::new(),
            incoming: Incoming::Nothing,
            read_next: READ_MIN,
            read_max: buffer_bytes.max(READ_MIN),
            io,
            outgoing: OutgoingRequest::done(),
            keeps: true,
            reused: false,
            endpoint,
        }
    }

    /// Whether an idle connection can still take a request, as far as can be known without sending one: it is open, and nothing has come on it
    /// that was not asked for.
    pub fn is_usable(&mut self) -> bool {
        matches!(self.incoming, Incoming::Nothing) && self.unread.is_empty() && self.io.is_quiet()
    }

    /// Whether the server's machine still answers. Asked of an idle connection some times a second.
    pub fn is_there(&mut self) -> bool {
        self.io.is_there()
    }

    /// It is idle no more: a call is put on it.
    pub fn take(&mut self) -> bool {
        self.io.unwatch()
    }

    /// Sends the request and waits for the head of its answer. Interim answers are skipped. The answer may come before the request is sent
    /// completely; the rest is then sent while the body is read.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the connection in the middle of a request: drop the connection too.
    pub async fn send(
        &mut self,
        head: SentHead<'_>,
        body: RequestBody,
    ) -> Result<Box<UpstreamHead>, SendError> {
        let mark = self.traffic.written();
        let to_head_request = *head.method == Method::HEAD;
        self.outgoing = OutgoingRequest::new(head, body);
        self.incoming = Incoming::Head {
            to_head_request,
            interim: 0,
        };
        let sent = poll_fn(|cx| self.poll_head(cx)).await;
        if let Ok(head) = &sent
            && self.reused
            && self.is_unasked(head.status, mark).await
        {
            return Err(SendError {
                error: Failure::Malformed("an answer that nobody asked for"),
                unsent: true,
            });
        }
        sent.map_err(|error| SendError {
            unsent: self.traffic.nothing_accepted_since(mark),
            error,
        })
    }

    /// Whether the answer was on its way before the request was: the server, tired of waiting, says 408 and closes. If the request had reached
    /// it, what it says is the answer. Its FIN, which proves one or the other, can be a little later than its words.
    async fn is_unasked(&mut self, status: StatusCode, mark: u64) -> bool {
        if status == StatusCode::REQUEST_TIMEOUT && !self.keeps {
            let end = poll_fn(|cx| {
                while self.unread.len() < HEAD_MAX {
                    if matches!(ready!(self.poll_read(cx)), Ok(0) | Err(_)) {
                        break;
                    }
                }
                Poll::Ready(())
            });
            // Without an end there is no proof, and the answer stands.
            let _ = tokio::time::timeout(UNASKED_WAIT, end).await;
        }
        self.traffic.nothing_accepted_since(mark)
    }

    fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<Result<Box<UpstreamHead>, Failure>> {
        // A write that fails is no answer yet: the server may have refused the request early and said why.
        let failed = self.outgoing.poll(&mut self.io, cx)?;
        loop {
            if let Some(head) = self.parse_head()? {
                return Poll::Ready(Ok(head));
            }
            match ready!(self.poll_read(cx)) {
                Ok(0) => return Poll::Ready(Err(failed.map_or(Failure::Closed, Failure::Io))),
                Ok(_) => {}
                Err(error) => return Poll::Ready(Err(Failure::Io(failed.unwrap_or(error)))),
            }
        }
    }

    /// The final head, if all of it is here. Boxed: it goes through many hands.
    fn parse_head(&mut self) -> Result<Option<Box<UpstreamHead>>, Failure> {
        let Incoming::Head {
            to_head_request,
            interim,
        } = &mut self.incoming
        else {
            return Err(Failure::Malformed("an answer that nobody asked for"));
        };
        loop {
            let Some(head) = head::parse(&mut self.unread)? else {
                if self.unread.len() > HEAD_MAX {
                    return Err(Failure::Malformed("the head is too long"));
                }
                return Ok(None);
            };
            let status = head.status;
            if status == StatusCode::SWITCHING_PROTOCOLS {
                return Err(Failure::Malformed("another protocol"));
            }
            if status.is_informational() {
                *interim += 1;
                if *interim > INTERIM_MAX {
                    return Err(Failure::Malformed("too many interim answers"));
                }
                continue;
            }
            let decoder = Decoder::new(&head, *to_head_request)?;
            self.keeps = head::keeps(&head) && !decoder.ends_with_connection();
            self.incoming = if decoder.is_done() {
                Incoming::Complete
            } else {
                Incoming::Body(decoder)
            };
            return Ok(Some(Box::new(head)));
        }
    }

    /// The next bytes of the body. `None`: it was complete.
    pub fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Failure>>> {
        // What is left of the request goes on; if it cannot, the answer decides, and the connection is not used again.
        if !self.outgoing.is_done() && self.outgoing.poll(&mut self.io, cx).is_err() {
            self.keeps = false;
        }
        loop {
            let Incoming::Body(decoder) = &mut self.incoming else {
                return Poll::Ready(None);
            };
            match decoder.decode(&mut self.unread) {
                Ok(Decoded::Data(bytes)) => {
                    if decoder.is_done() {
                        self.incoming = Incoming::Complete;
                    }
                    return Poll::Ready(Some(Ok(bytes)));
                }
                Ok(Decoded::End) => {
                    self.incoming = Incoming::Complete;
                    return Poll::Ready(None);
                }
                Ok(Decoded::More) => {}
                Err(why) => return Poll::Ready(Some(Err(self.broken(why)))),
            }
            let to_the_end = decoder.ends_with_connection();
            match ready!(self.poll_read(cx)) {
                Ok(0) if to_the_end => self.incoming = Incoming::Complete,
                Ok(0) => return Poll::Ready(Some(Err(self.broken(Failure::Closed)))),
                Ok(_) => {}
                Err(error) => return Poll::Ready(Some(Err(self.broken(Failure::Io(error))))),
            }
        }
    }

    /// The answer cannot go on.
    fn broken(&mut self, why: Failure) -> Failure {
        self.keeps = false;
        why
    }

    /// The bytes of the body that the head announced and that have not come yet.
    pub fn left(&self) -> Option<u64> {
        match &self.incoming {
            Incoming::Body(decoder) => decoder.left(),
            Incoming::Complete => Some(0),
            Incoming::Nothing | Incoming::Head { .. } => None,
        }
    }

    pub fn is_complete(&self) -> bool {
        matches!(self.incoming, Incoming::Complete)
    }

    /// Makes the connection ready for another call, if it can carry one.
    pub fn finish(&mut self) -> bool {
        if !self.is_complete() || !self.keeps || !self.outgoing.is_done() {
            return false;
        }
        self.incoming = Incoming::Nothing;
        self.reused = true;
        self.read_next = READ_MIN;
        if self.unread.is_empty() {
            // An idle connection holds no buffer.
            warm::was_read(std::mem::take(&mut self.unread));
        }
        self.is_usable()
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if self.unread.capacity() == 0 && self.read_next == READ_MIN {
            self.unread = warm::to_read();
        } else if self.unread.capacity() - self.unread.len() < READ_MIN / 2 {
            self.unread.reserve(self.read_next);
        }
        let room = self.unread.capacity() - self.unread.len();
        let read = poll_read_buf(Pin::new(&mut self.io), cx, &mut self.unread);
        if self.unread.is_empty() {
            // Nothing came, and it may be long until something does.
            warm::was_read(std::mem::take(&mut self.unread));
        }
        let read = ready!(read)?;
        if read >= room {
            self.read_next = (self.read_next * 2).min(self.read_max);
        } else if read < self.read_next / 4 {
            self.read_next = (self.read_next / 2).max(READ_MIN);
        }
        Poll::Ready(Ok(read))
    }
}
