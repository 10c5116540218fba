//! A request's head: from bytes to a request, and how its body is framed (RFC 9112 §2, §3 and §6).

use std::mem::MaybeUninit;

use bytes::{Buf as _, BytesMut};
use http::{Method, Uri, Version};

use crate::fields::{Field, Fields, words};

/// Most header fields of a request.
const FIELDS_MAX: usize = 100;
/// Most words of all `Connection` fields: each is compared with each field's name.
const WORDS_MAX: usize = 64;
/// Longest request target: what `http::Uri` holds.
const TARGET_MAX: usize = 65_534;

/// A request without its body.
#[derive(Debug)]
pub struct RequestHead {
    pub method: Method,
    pub target: Uri,
    pub version: Version,
    pub fields: Fields,
    /// `None`: in chunks.
    pub length: Option<u64>,
    /// The client waits for a word before it sends the body (RFC 9110 §10.1.1).
    pub expects: bool,
    /// The client means to go on with the connection after this request.
    pub keeps: bool,
}

/// Why there is no request in the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bad {
    /// Not HTTP/1, or framed in a way that can be read in two ways.
    Malformed,
    /// More bytes or more fields than are taken.
    TooLarge,
    TargetTooLong,
    /// Clear text, where TLS is spoken.
    NoTls,
    /// `Connection` names more than [`WORDS_MAX`].
    ManyWords,
}

/// Takes one whole head off the front of `unread`; `None` if it is not all there. `looked` is how many of the bytes were there at the last
/// look: without a blank line behind them there is nothing to see, and a head that comes byte by byte is not parsed as often.
pub fn parse(
    unread: &mut BytesMut,
    looked: &mut usize,
    max: usize,
) -> Result<Option<RequestHead>, Bad> {
    skip_line_ends(unread, looked);
    let before = std::mem::replace(looked, unread.len());
    if unread.is_empty() || (before > 0 && !has_blank_line(unread, before)) {
        return within(unread.len(), max).map(|()| None);
    }
    // Uninitialised: 3 KiB would be cleared for each head otherwise.
    let mut fields = [const { MaybeUninit::uninit() }; FIELDS_MAX];
    let mut parsed = httparse::Request::new(&mut []);
    let rules = httparse::ParserConfig::default();
    let end = match rules.parse_request_with_uninit_headers(&mut parsed, unread, &mut fields) {
        Ok(httparse::Status::Complete(end)) => end,
        Ok(httparse::Status::Partial) => return within(unread.len(), max).map(|()| None),
        Err(httparse::Error::TooManyHeaders) => return Err(Bad::TooLarge),
        Err(_) => return Err(Bad::Malformed),
    };
    within(end, max)?;
    let target = parsed.path.unwrap_or_default();
    if target.len() > TARGET_MAX {
        return Err(Bad::TargetTooLong);
    }
    let target = Uri::try_from(target).map_err(|_| Bad::Malformed)?;
    let method = parsed.method.unwrap_or_default();
    let method = Method::from_bytes(method.as_bytes()).map_err(|_| Bad::Malformed)?;
    let version = match parsed.version {
        Some(1) => Version::HTTP_11,
        _ => Version::HTTP_10,
    };
    let mut framing = RequestFraming::default();
    let mut fields = Fields::with_capacity(parsed.headers.len(), end);
    for read in parsed.headers.iter() {
        let name = read.name.as_bytes();
        let field = Field::of(name);
        if framing.see(field, read.value, version)? {
            fields.read(field, name, read.value);
        }
    }
    unread.advance(end);
    *looked = 0;
    Ok(Some(RequestHead {
        method,
        target,
        version,
        fields,
        length: framing.body()?,
        expects: framing.expects,
        keeps: match version {
            Version::HTTP_11 => !framing.close,
            _ => framing.keep_alive && !framing.close,
        },
    }))
}

/// Line ends before a request are none of it (RFC 9112 §2.2). Kept, they would be looked at again with each byte that comes, and a connection
/// that holds nothing else would not be at rest.
fn skip_line_ends(unread: &mut BytesMut, looked: &mut usize) {
    while let Some(end) = [b"\r\n".as_slice(), b"\n"]
        .into_iter()
        .find(|end| unread.starts_with(end))
    {
        unread.advance(end.len());
        *looked = looked.saturating_sub(end.len());
    }
}

const fn within(bytes: usize, max: usize) -> Result<(), Bad> {
    if bytes > max {
        return Err(Bad::TooLarge);
    }
    Ok(())
}

/// Whether an empty line ends in what came behind the first `before` bytes.
fn has_blank_line(unread: &[u8], before: usize) -> bool {
    let fresh = unread.get(before.saturating_sub(3)..).unwrap_or_default();
    let ends = |n: usize| {
        let rest = fresh.get(n + 1..).unwrap_or_default();
        rest.starts_with(b"\n") || rest.starts_with(b"\r\n")
    };
    memchr::memchr_iter(b'\n', fresh).any(ends)
}

/// What the fields say of the request as a message. A body that could be measured in two ways is refused (RFC 9112 §6.1, §11.2).
#[derive(Default)]
struct RequestFraming {
    length: Option<u64>,
    chunked: bool,
    expects: bool,
    close: bool,
    keep_alive: bool,
    /// Of `Connection`.
    words: usize,
}

impl RequestFraming {
    /// False: the field says nothing that another has not said.
    fn see(&mut self, field: Option<Field>, value: &[u8], version: Version) -> Result<bool, Bad> {
        match field {
            Some(Field::ContentLength) => {
                let plain = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
                let length = str::from_utf8(value).ok().filter(|_| plain);
                let length = length.and_then(|v| v.parse().ok()).ok_or(Bad::Malformed)?;
                let known = self.length.replace(length);
                if known.is_some_and(|known| known != length) {
                    return Err(Bad::Malformed);
                }
                return Ok(known.is_none());
            }
            // One coding, once: a server behind us may read anything else differently.
            Some(Field::TransferEncoding) => {
                let plain = value.eq_ignore_ascii_case(b"chunked");
                if self.chunked || !plain || version != Version::HTTP_11 {
                    return Err(Bad::Malformed);
                }
                self.chunked = true;
            }
            Some(Field::Connection) => {
                for word in words(value) {
                    self.words += 1;
                    if self.words > WORDS_MAX {
                        return Err(Bad::ManyWords);
                    }
                    self.close |= word.eq_ignore_ascii_case(b"close");
                    self.keep_alive |= word.eq_ignore_ascii_case(b"keep-alive");
                }
            }
            // A client of HTTP/1.0 does not know the word that it would get (RFC 9110 §10.1.1).
            Some(Field::Expect) if version == Version::HTTP_11 => {
                self.expects = value.eq_ignore_ascii_case(b"100-continue");
            }
            _ => {}
        }
        Ok(true)
    }

    fn body(&self) -> Result<Option<u64>, Bad> {
        match (self.chunked, self.length) {
            (true, Some(_)) => Err(Bad::Malformed),
            (true, None) => Ok(None),
            (false, length) => Ok(Some(length.unwrap_or(0))),
        }
    }
}
