//! A response body: from framed bytes to bytes (RFC 9112 §6 and §7).

use bytes::{Buf as _, Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, HeaderMap, TRANSFER_ENCODING};
use http::{StatusCode, Version};

use super::head::Head;
use crate::upstream::exchange::Failure;

/// Longest line with a chunk's size and extensions, and longest trailer section.
const LINE_MAX: usize = 16 * 1024;

/// What is not longer is copied out of the read buffer. A slice of it would make the buffer shared: a count in memory of its own that is
/// cold for each event of each stream, and a new buffer once the old one is read to its end. A token's event is far shorter.
const COPIED_MAX: usize = 1024;

/// Where in the framing we are.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Decoder {
    Length(u64),
    Chunked(Chunk),
    /// Until the server closes.
    Connection,
    Done,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Chunk {
    Size,
    Data(u64),
    /// The line end behind a chunk's data.
    DataEnd,
    Trailers,
}

/// What a look at the unread bytes gave.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Decoded {
    Data(Bytes),
    /// More must be read first.
    More,
    End,
}

impl Decoder {
    /// The framing that the head announces.
    pub(super) fn new(head: &Head, to_head_request: bool) -> Result<Self, Failure> {
        let parts = &head.parts;
        let no_content = parts.status == StatusCode::NO_CONTENT;
        if to_head_request || no_content || parts.status == StatusCode::NOT_MODIFIED {
            return Ok(Self::Done);
        }
        if parts.headers.contains_key(TRANSFER_ENCODING) {
            // With a length beside it the answer is refused by whoever sees the fields.
            return match chunked(&parts.headers) && parts.version == Version::HTTP_11 {
                true => Ok(Self::Chunked(Chunk::Size)),
                false => Err(Failure::Malformed("an unknown transfer encoding")),
            };
        }
        match length(&parts.headers)? {
            Some(0) => Ok(Self::Done),
            Some(length) => Ok(Self::Length(length)),
            None => Ok(Self::Connection),
        }
    }

    pub(super) fn is_done(&self) -> bool {
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
            Self::Chunked(_) | Self::Connection => None,
        }
    }

    /// Takes the next bytes of the body off the front of `unread`.
    pub(super) fn decode(&mut self, unread: &mut BytesMut) -> Result<Decoded, Failure> {
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
                Self::Chunked(Chunk::Data(left)) => {
                    let bytes = take(unread, left);
                    if *left == 0 {
                        *self = Self::Chunked(Chunk::DataEnd);
                    }
                    return Ok(Decoded::Data(bytes));
                }
                Self::Chunked(chunk) => match between_data(chunk, unread)? {
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
fn between_data(chunk: &Chunk, unread: &mut BytesMut) -> Result<Option<Between>, Failure> {
    match chunk {
        Chunk::Size => match httparse::parse_chunk_size(unread) {
            Ok(httparse::Status::Complete((line, 0))) => {
                unread.advance(line);
                Ok(Some(Between::Next(Chunk::Trailers)))
            }
            Ok(httparse::Status::Complete((line, size))) => {
                unread.advance(line);
                Ok(Some(Between::Next(Chunk::Data(size))))
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
        Chunk::Trailers => trailers(unread),
    }
}

/// Trailers are read and dropped: no client of these APIs looks at them.
fn trailers(unread: &mut BytesMut) -> Result<Option<Between>, Failure> {
    loop {
        match memchr::memmem::find(unread, b"\r\n") {
            Some(0) => {
                unread.advance(2);
                return Ok(Some(Between::End));
            }
            Some(line) => {
                unread.advance(line + 2);
            }
            None if unread.len() <= LINE_MAX => return Ok(None),
            None => return Err(Failure::Malformed("the trailers are too long")),
        }
    }
}

/// Exactly one coding, `chunked`: no other was asked for.
fn chunked(headers: &HeaderMap) -> bool {
    let mut values = headers.get_all(TRANSFER_ENCODING).iter();
    let first = values
        .next()
        .is_some_and(|v| v.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked"));
    first && values.next().is_none()
}

/// Digits only, and the same in every field.
fn length(headers: &HeaderMap) -> Result<Option<u64>, Failure> {
    let mut known = None;
    for value in headers.get_all(CONTENT_LENGTH) {
        let digits = value
            .to_str()
            .ok()
            .filter(|v| !v.is_empty() && v.bytes().all(|b| b.is_ascii_digit()));
        let length: u64 = digits
            .and_then(|v| v.parse().ok())
            .ok_or(Failure::Malformed("the content length"))?;
        if known.is_some_and(|known| known != length) {
            return Err(Failure::Malformed("two different content lengths"));
        }
        known = Some(length);
    }
    Ok(known)
}
