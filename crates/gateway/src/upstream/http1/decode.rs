//! A body: from framed bytes to bytes (RFC 9112 §6 and §7). The same for what servers send and for what clients send.

use bytes::{Buf as _, Bytes, BytesMut};
use http::header::{HeaderName, HeaderValue};
use http::{StatusCode, Version};

use crate::fields::{Coding, Length, UpstreamHead};
use crate::upstream::exchange::Failure;

/// Longest line with a chunk's size and extensions, longest trailer section, and most of both in a body beyond what its data accounts for.
const LINE_MAX: usize = 16 * 1024;
/// What a chunk's line may hold without being counted: a size and something small behind it.
const LINE_FREE: usize = 16;

/// What is not longer is copied out of the read buffer. A slice of it would make the buffer shared: a count in memory of its own that is
/// cold for each event of each stream, and a new buffer once the old one is read to its end. A token's event is far shorter.
const COPIED_MAX: usize = 1024;

/// Where in the framing we are.
#[derive(Debug, PartialEq, Eq)]
pub enum Decoder {
    Length(u64),
    Chunked(Chunk, Excess),
    /// Until the server closes.
    Connection,
    Done,
}

/// Bytes of framing so far that no data accounts for. Whoever sends little else keeps both sides busy with a body that never grows.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Excess(usize);

impl Excess {
    fn add(&mut self, line: usize, data: u64) -> Result<(), Failure> {
        let data = usize::try_from(data).unwrap_or(usize::MAX);
        let free = data.saturating_mul(2).saturating_add(LINE_FREE);
        self.0 = (self.0 + line).saturating_sub(free);
        if self.0 > LINE_MAX {
            return Err(Failure::Malformed("chunks of framing with little in them"));
        }
        Ok(())
    }
}

#[derive(Debug, PartialEq, Eq)]
pub enum Chunk {
    Size,
    Data(u64),
    /// The line end behind a chunk's data.
    DataEnd,
    Trailers,
}

/// What a look at the unread bytes gave.
#[derive(Debug, PartialEq, Eq)]
pub enum Decoded {
    Data(Bytes),
    /// More must be read first.
    More,
    End,
}

impl Decoder {
    /// A request's body of this length, or in chunks.
    pub fn of_request(length: Option<u64>) -> Self {
        match length {
            Some(0) => Self::Done,
            Some(length) => Self::Length(length),
            None => Self::chunked(),
        }
    }

    fn chunked() -> Self {
        Self::Chunked(Chunk::Size, Excess::default())
    }

    /// The framing that a response's head announces.
    pub(super) fn new(head: &UpstreamHead, to_head_request: bool) -> Result<Self, Failure> {
        let no_content = head.status == StatusCode::NO_CONTENT;
        if to_head_request || no_content || head.status == StatusCode::NOT_MODIFIED {
            return Ok(Self::Done);
        }
        // With a length beside the coding the answer is refused by whoever sees the fields.
        match (head.told.coding, head.told.length) {
            (Coding::Chunked, _) if head.version == Version::HTTP_11 => Ok(Self::chunked()),
            (Coding::Chunked | Coding::Unknown, _) => {
                Err(Failure::Malformed("an unknown transfer encoding"))
            }
            (Coding::None, Length::Unsaid) => Ok(Self::Connection),
            (Coding::None, Length::Is(0)) => Ok(Self::Done),
            (Coding::None, Length::Is(length)) => Ok(Self::Length(length)),
            (Coding::None, Length::Malformed) => Err(Failure::Malformed("the content length")),
            (Coding::None, Length::Unclear) => {
                Err(Failure::Malformed("two different content lengths"))
            }
        }
    }

    pub fn is_done(&self) -> bool {
        *self == Self::Done
    }

    pub(super) fn ends_with_connection(&self) -> bool {
        *self == Self::Connection
    }

    /// Announced and not yet decoded.
    pub(super) fn left(&self) -> Option<u64> {
        match self {
            Self::Length(left) => Some(*left),
            Self::Done => Some(0),
            Self::Chunked(..) | Self::Connection => None,
        }
    }

    /// Takes the next bytes of the body off the front of `unread`.
    pub fn decode(&mut self, unread: &mut BytesMut) -> Result<Decoded, Failure> {
        loop {
            match self {
                Self::Done => return Ok(Decoded::End),
                _ if unread.is_empty() => return Ok(Decoded::More),
                Self::Connection => return Ok(Decoded::Data(unread.split().freeze())),
                Self::Length(left) => {
                    let bytes = take(unread, left);
                    if *left == 0 {
                        *self = Self::Done;
                    }
                    return Ok(Decoded::Data(bytes));
                }
                Self::Chunked(chunk @ Chunk::Data(_), _) => {
                    let Chunk::Data(left) = chunk else { continue };
                    let bytes = take(unread, left);
                    if *left == 0 {
                        *chunk = Chunk::DataEnd;
                    }
                    return Ok(Decoded::Data(bytes));
                }
                Self::Chunked(chunk, excess) => match between_data(chunk, excess, unread)? {
                    Some(Between::Next(next)) => *chunk = next,
                    Some(Between::End) => *self = Self::Done,
                    None => return Ok(Decoded::More),
                },
            }
        }
    }
}

fn take(unread: &mut BytesMut, left: &mut u64) -> Bytes {
    let take = usize::try_from(*left)
        .unwrap_or(usize::MAX)
        .min(unread.len());
    *left -= take as u64;
    if take > COPIED_MAX {
        return unread.split_to(take).freeze();
    }
    let copy = Bytes::copy_from_slice(unread.get(..take).unwrap_or_default());
    unread.advance(take);
    copy
}

enum Between {
    Next(Chunk),
    End,
}

/// The framing between two chunks' data; `None` if it is not all there.
fn between_data(
    chunk: &Chunk,
    excess: &mut Excess,
    unread: &mut BytesMut,
) -> Result<Option<Between>, Failure> {
    match chunk {
        Chunk::Size => match httparse::parse_chunk_size(unread) {
            Ok(httparse::Status::Complete((line, _))) if !is_plain(unread.get(..line)) => {
                Err(Failure::Malformed("a chunk's size"))
            }
            Ok(httparse::Status::Complete((line, size))) => {
                excess.add(line, size)?;
                unread.advance(line);
                Ok(Some(Between::Next(match size {
                    0 => Chunk::Trailers,
                    _ => Chunk::Data(size),
                })))
            }
            Ok(httparse::Status::Partial) if unread.len() <= LINE_MAX => Ok(None),
            Ok(httparse::Status::Partial) | Err(_) => Err(Failure::Malformed("a chunk's size")),
        },
        Chunk::DataEnd | Chunk::Data(_) => match unread.get(..2) {
            Some(b"\r\n") => {
                unread.advance(2);
                Ok(Some(Between::Next(Chunk::Size)))
            }
            None if unread.first() == Some(&b'\r') => Ok(None),
            _ => Err(Failure::Malformed("a chunk longer than it said")),
        },
        Chunk::Trailers => trailers(excess, unread),
    }
}

/// A line that begins with a digit and ends once: a size that is missing, or an extension with a line end in it, is read in two ways.
fn is_plain(line: Option<&[u8]>) -> bool {
    let line = line.and_then(|line| line.strip_suffix(b"\r\n"));
    line.is_some_and(|line| {
        line.first().is_some_and(u8::is_ascii_hexdigit)
            && memchr::memchr2(b'\r', b'\n', line).is_none()
    })
}

/// Trailers are read and dropped: no client of these APIs looks at them. What is no field is refused: another may see the end of the body there.
fn trailers(excess: &mut Excess, unread: &mut BytesMut) -> Result<Option<Between>, Failure> {
    loop {
        match memchr::memmem::find(unread, b"\r\n") {
            Some(0) => {
                unread.advance(2);
                return Ok(Some(Between::End));
            }
            Some(line) => {
                if !is_field(unread.get(..line).unwrap_or_default()) {
                    return Err(Failure::Malformed("a trailer that is no field"));
                }
                excess.add(line + 2 + LINE_FREE, 0)?;
                unread.advance(line + 2);
            }
            None if unread.len() <= LINE_MAX => return Ok(None),
            None => return Err(Failure::Malformed("the trailers are too long")),
        }
    }
}

/// A name, a colon, and a value on the same line.
fn is_field(line: &[u8]) -> bool {
    let colon = memchr::memchr(b':', line).and_then(|at| line.split_at_checked(at));
    colon.is_some_and(|(name, value)| {
        HeaderName::from_bytes(name).is_ok() && HeaderValue::from_bytes(value).is_ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How much data there was, or that it was refused.
    fn decoded(framed: &str) -> Result<usize, Failure> {
        let (mut decoder, mut unread) = (Decoder::chunked(), BytesMut::from(framed));
        let mut data = 0;
        loop {
            match decoder.decode(&mut unread)? {
                Decoded::Data(bytes) => data += bytes.len(),
                Decoded::End => return Ok(data),
                Decoded::More => panic!("cut"),
            }
        }
    }

    #[test]
    fn framing_with_little_in_it_comes_to_an_end() {
        let of = |chunk: &str, trailer: &str| {
            decoded(&format!("{}0\r\n{}\r\n", chunk.repeat(3000), trailer))
        };
        let said = "e".repeat(40);
        let (small, large) = ("x", "x".repeat(40));
        assert_eq!(of("1\r\nx\r\n", "").expect("small chunks"), 3000);
        let large = format!("28;{said}\r\n{large}\r\n");
        assert_eq!(of(&large, "").expect("as much data"), 120_000);
        of(&format!("1;{said}\r\n{small}\r\n"), "").expect_err("extensions");
        of("", "").expect("none");
        of("", &"T: u\r\n".repeat(1000)).expect("some");
        of("", &"T: u\r\n".repeat(3000)).expect_err("trailers");
        of("", &format!("T: {}\r\n", "u".repeat(LINE_MAX))).expect_err("a long one");
    }

    /// Another server could see the end of the body, or another request, in any of these.
    #[test]
    fn a_trailer_is_a_field_on_its_line() {
        for trailer in ["T: u", "T:", "t-t: \u{e9}\t;"] {
            decoded(&format!("0\r\n{trailer}\r\n\r\n")).expect(trailer);
        }
        for trailer in [
            "\nGET / HTTP/1.1",
            "T: u\n",
            "T: u\rV: w",
            "T",
            "T : u",
            " T: u",
            "T: u\r\n v",
            ": u",
            "T: \0",
            "T: \x7f",
        ] {
            decoded(&format!("0\r\n{trailer}\r\n\r\n")).expect_err(trailer);
        }
    }
}
