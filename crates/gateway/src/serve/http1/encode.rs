//! An answer: from its parts to bytes on the socket (RFC 9112 §4, §6 and §7).

use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use bytes::{Buf, Bytes};
use http::{Method, StatusCode, Version};
use tokio::io::AsyncWrite;

use crate::call::answer::AnswerHead;
use crate::fields::{Field, Set};
use crate::warm;

/// What is not longer is copied behind what is written already, and goes out with it in one piece.
const COPIED_MAX: usize = 4 * 1024;
/// So much is collected, if more is there at once, before it is written.
const FULL: usize = 16 * 1024;
/// Room for the answer to a small call.
const ROOM: usize = 1024;

/// Fields that are the connection's own.
const CONNECTIONS: Set = Set::of(&[Field::Connection, Field::TransferEncoding]);
/// The length too, where it is told as the body is framed.
const FRAMING: Set = CONNECTIONS.and(Set::of(&[Field::ContentLength]));

/// How the end of an answer's body is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    /// There is no body, whatever the fields say.
    None,
    /// So many bytes are still to come.
    Length(u64),
    Chunked,
    /// By the connection's end.
    Close,
}

/// What the answer is to.
#[derive(Clone, Copy, Debug)]
pub(super) struct AnswerTo {
    pub(super) head: bool,
    pub(super) version: Version,
}

impl AnswerTo {
    pub(super) fn new(method: &Method, version: Version) -> Self {
        Self {
            head: *method == Method::HEAD,
            version,
        }
    }

    /// How a body of this length is framed.
    pub(super) fn framing(self, status: StatusCode, length: Option<u64>) -> Framing {
        let empty = status.is_informational()
            || status == StatusCode::NO_CONTENT
            || status == StatusCode::NOT_MODIFIED;
        match length {
            _ if self.head || empty => Framing::None,
            Some(length) => Framing::Length(length),
            None if self.version == Version::HTTP_11 => Framing::Chunked,
            None => Framing::Close,
        }
    }
}

/// Bytes on their way to the client.
#[derive(Debug, Default)]
pub(super) struct OutgoingAnswer {
    /// Written from `sent` on. The thread's own memory, and none between writes.
    joined: Vec<u8>,
    sent: usize,
    /// Follows them: a long piece of the body, as it came.
    data: Bytes,
    /// Follows that.
    tail: &'static [u8],
}

impl OutgoingAnswer {
    pub(super) fn is_empty(&self) -> bool {
        self.joined.len() == self.sent && self.data.is_empty() && self.tail.is_empty()
    }

    /// Write this first.
    pub(super) fn is_full(&self) -> bool {
        !self.data.is_empty() || !self.tail.is_empty() || self.joined.len() - self.sent >= FULL
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.joined().extend_from_slice(bytes);
    }

    /// To write behind what is there.
    fn joined(&mut self) -> &mut Vec<u8> {
        if self.joined.capacity() == 0 {
            self.joined = warm::to_write();
        }
        &mut self.joined
    }

    /// The first line and the fields. `keeps`: whether the connection goes on afterwards.
    pub(super) fn head(
        &mut self,
        head: &AnswerHead,
        framing: Framing,
        (asked, length, keeps): (AnswerTo, Option<u64>, bool),
    ) {
        let out = self.joined();
        out.reserve(ROOM);
        out.extend_from_slice(match asked.version {
            Version::HTTP_10 => b"HTTP/1.0 ",
            _ => b"HTTP/1.1 ",
        });
        out.extend_from_slice(head.status.as_str().as_bytes());
        out.push(b' ');
        // A reason must be written, as many parsers expect one.
        out.extend_from_slice(head.status.canonical_reason().unwrap_or("-").as_bytes());
        // RFC 9110 §8.6: there is nothing that a length could be of.
        let unmeasured = head.status.is_informational() || head.status == StatusCode::NO_CONTENT;
        let measured =
            framing == Framing::None && !unmeasured && head.fields.has(Field::ContentLength);
        let left_out = if measured { CONNECTIONS } else { FRAMING };
        head.fields
            .write(left_out, |lines| out.extend_from_slice(lines));
        match framing {
            Framing::Length(length) => number(out, length),
            Framing::Chunked => field(out, b"transfer-encoding", b"chunked"),
            // What a GET would have had.
            Framing::None if asked.head && !measured && !unmeasured => {
                length
                    .filter(|n| *n > 0)
                    .into_iter()
                    .for_each(|n| number(out, n));
            }
            Framing::None | Framing::Close => {}
        }
        if !keeps {
            field(out, b"connection", b"close");
        } else if asked.version == Version::HTTP_10 {
            field(out, b"connection", b"keep-alive");
        }
        if !head.fields.has(Field::Date) {
            now(|date| field(out, b"date", date.as_bytes()));
        }
        out.extend_from_slice(b"\r\n\r\n");
    }

    /// The next piece of a body.
    pub(super) fn data(&mut self, framing: &mut Framing, data: Bytes) -> io::Result<()> {
        match framing {
            Framing::None => return Ok(()),
            _ if data.is_empty() => return Ok(()),
            Framing::Length(left) => {
                *left = left
                    .checked_sub(data.len() as u64)
                    .ok_or_else(not_as_announced)?;
                self.piece(data, b"");
            }
            Framing::Close => self.piece(data, b""),
            Framing::Chunked => {
                let mut size = [0; 18];
                self.joined().extend_from_slice(hex(data.len(), &mut size));
                self.piece(data, b"\r\n");
            }
        }
        Ok(())
    }

    fn piece(&mut self, data: Bytes, tail: &'static [u8]) {
        if data.len() <= COPIED_MAX {
            let out = self.joined();
            out.extend_from_slice(&data);
            out.extend_from_slice(tail);
        } else {
            (self.data, self.tail) = (data, tail);
        }
    }

    /// The end of a body.
    pub(super) fn end(&mut self, framing: Framing) -> io::Result<()> {
        match framing {
            Framing::Length(0) | Framing::None | Framing::Close => {}
            Framing::Length(_) => return Err(not_as_announced()),
            Framing::Chunked => self.joined_end(),
        }
        Ok(())
    }

    fn joined_end(&mut self) {
        const LAST: &[u8] = b"0\r\n\r\n";
        if self.tail.is_empty() {
            self.joined().extend_from_slice(LAST);
        } else {
            self.tail = b"\r\n0\r\n\r\n";
        }
    }

    /// Writes all of it.
    pub(super) fn poll_write(
        &mut self,
        io: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        while !self.is_empty() {
            let joined = self.joined.get(self.sent..).unwrap_or_default();
            let written = if self.data.is_empty() && self.tail.is_empty() {
                ready!(Pin::new(&mut *io).poll_write(cx, joined))?
            } else {
                let parts = [joined, &self.data, self.tail].map(IoSlice::new);
                ready!(Pin::new(&mut *io).poll_write_vectored(cx, &parts))?
            };
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.advance(written);
        }
        Poll::Ready(Ok(()))
    }

    fn advance(&mut self, written: usize) {
        let of_joined = written.min(self.joined.len() - self.sent);
        self.sent += of_joined;
        let of_data = (written - of_joined).min(self.data.len());
        self.data.advance(of_data);
        self.tail = self
            .tail
            .get(written - of_joined - of_data..)
            .unwrap_or_default();
        if self.data.is_empty() {
            // The answer's memory is given back as soon as the kernel has it.
            self.data = Bytes::new();
        }
        if self.sent == self.joined.len() {
            self.sent = 0;
            warm::was_written(std::mem::take(&mut self.joined));
        }
    }
}

/// The answer's length is told already and is not that of its body: the client is to see a break.
fn not_as_announced() -> io::Error {
    io::Error::other("an answer shorter or longer than announced")
}

fn field(out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(name);
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
}

fn number(out: &mut Vec<u8>, length: u64) {
    field(
        out,
        b"content-length",
        itoa::Buffer::new().format(length).as_bytes(),
    );
}

/// A chunk's size and its line end.
fn hex(mut size: usize, space: &mut [u8; 18]) -> &[u8] {
    let mut at = space.len() - 2;
    if let Some(end) = space.get_mut(at..) {
        end.copy_from_slice(b"\r\n");
    }
    loop {
        at -= 1;
        if let (Some(place), Some(digit)) = (space.get_mut(at), b"0123456789abcdef".get(size & 15))
        {
            *place = *digit;
        }
        size >>= 4;
        if size == 0 {
            return space.get(at..).unwrap_or_default();
        }
    }
}

/// Gives the date as fields have it; made once a second.
pub(in crate::serve) fn now<T>(use_it: impl FnOnce(&str) -> T) -> T {
    thread_local! {
        static DATE: RefCell<(u64, String)> = const { RefCell::new((0, String::new())) };
    }
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let second = since.unwrap_or(Duration::ZERO).as_secs();
    DATE.with_borrow_mut(|(of, date)| {
        if *of != second || date.is_empty() {
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(second);
            (*of, *date) = (second, httpdate::fmt_http_date(time));
        }
        use_it(date)
    })
}

/// Whether the answer itself says that the connection ends with it.
pub(super) fn says_close(head: &AnswerHead) -> bool {
    let connection = head.fields.get(Field::Connection);
    connection.is_some_and(|value| value.eq_ignore_ascii_case(b"close"))
}
