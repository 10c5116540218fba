//! A response head: from bytes to parts.

use std::mem::MaybeUninit;

use bytes::{Buf as _, BytesMut};
use http::Version;

use crate::fields::{Reading, UpstreamHead};
use crate::upstream::exchange::Failure;

/// Most header fields of a response.
const FIELDS_MAX: usize = 128;

/// Takes one whole head off the front of `unread`; `None` if it is not all there.
pub(super) fn parse(unread: &mut BytesMut) -> Result<Option<UpstreamHead>, Failure> {
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
    let mut reading = Reading::new(parsed.headers.len(), end);
    for field in parsed.headers.iter() {
        reading.field(field.name.as_bytes(), field.value);
    }
    let head = reading.end(status, version);
    unread.advance(end);
    Ok(Some(head))
}

/// Whether the server leaves the connection open after this answer. RFC 9112 §9.3: HTTP/1.1 stays open unless told otherwise, HTTP/1.0 the
/// other way round.
pub(super) fn keeps(head: &UpstreamHead) -> bool {
    if head.version == Version::HTTP_11 {
        !head.told.closes
    } else {
        head.told.stays
    }
}
