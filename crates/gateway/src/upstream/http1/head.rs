//! A response head: from bytes to parts.

use std::mem::MaybeUninit;

use bytes::BytesMut;
use http::header::{CONNECTION, HeaderMap, HeaderName, HeaderValue};
use http::{Response, Version, response};

use crate::upstream::exchange::Failure;

/// Most header fields of a response.
const FIELDS_MAX: usize = 128;

/// A head, and whether the server leaves the connection open after it.
#[derive(Debug)]
pub(super) struct Head {
    pub(super) parts: response::Parts,
    pub(super) keeps: bool,
}

/// Takes one whole head off the front of `unread`; `None` if it is not all there.
pub(super) fn parse(unread: &mut BytesMut) -> Result<Option<Head>, Failure> {
    if unread.is_empty() {
        return Ok(None);
    }
    // Uninitialised: 4 KiB would be cleared for each head otherwise.
    let mut fields = [const { MaybeUninit::uninit() }; FIELDS_MAX];
    let mut parsed = httparse::Response::new(&mut []);
    let rules = httparse::ParserConfig::default();
    let end = match rules.parse_response_with_uninit_headers(&mut parsed, unread, &mut fields) {
        Ok(httparse::Status::Complete(end)) => end,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(_) => return Err(Failure::Malformed("the head is no HTTP/1.1")),
    };
    let code = parsed.code.unwrap_or_default();
    let status = code
        .try_into()
        .map_err(|_| Failure::Malformed("the status"))?;
    let version = if parsed.version == Some(1) {
        Version::HTTP_11
    } else {
        Version::HTTP_10
    };
    let mut headers = HeaderMap::with_capacity(parsed.headers.len());
    for field in parsed.headers.iter() {
        let name = HeaderName::from_bytes(field.name.as_bytes())
            .map_err(|_| Failure::Malformed("a field's name"))?;
        let value = HeaderValue::from_bytes(field.value)
            .map_err(|_| Failure::Malformed("a field's value"))?;
        headers.append(name, value);
    }
    let _ = unread.split_to(end);
    let keeps = keeps(version, &headers);
    let (mut parts, ()) = Response::new(()).into_parts();
    (parts.status, parts.version, parts.headers) = (status, version, headers);
    Ok(Some(Head { parts, keeps }))
}

/// RFC 9112 §9.3: HTTP/1.1 stays open unless told otherwise, HTTP/1.0 the other way round.
fn keeps(version: Version, headers: &HeaderMap) -> bool {
    let says = |word: &[u8]| {
        let mut values = headers.get_all(CONNECTION).iter();
        values.any(|value| {
            value
                .as_bytes()
                .split(|b| *b == b',')
                .any(|part| part.trim_ascii().eq_ignore_ascii_case(word))
        })
    };
    if version == Version::HTTP_11 {
        !says(b"close")
    } else {
        says(b"keep-alive")
    }
}
