//! What a client is told whose request head cannot be read: there is no request yet, so no route and no dialect either.

use super::http1::Bad;
use crate::call::Id;

/// The whole answer. Its body is one that both SDK families read.
pub(super) fn answer(bad: Bad, date: &str) -> String {
    let (line, code, message) = match bad {
        Bad::TooLarge => (
            "431 Request Header Fields Too Large",
            "request_head_too_large",
            "the request line and header fields are larger than limits.request_head, or too many",
        ),
        Bad::TargetTooLong => (
            "414 URI Too Long",
            "uri_too_long",
            "the request target is too long",
        ),
        Bad::NoTls => (
            "400 Bad Request",
            "tls_required",
            "plain HTTP was sent to a port that speaks TLS; use https:// in the base URL",
        ),
        Bad::ManyWords => (
            "400 Bad Request",
            "connection_too_long",
            "the Connection fields name more than 64 things; send fewer",
        ),
        Bad::Malformed => (
            "400 Bad Request",
            "malformed_http",
            "the request is not well-formed HTTP, or its length can be read in two ways",
        ),
    };
    let body = format!(
        r#"{{"type":"error","error":{{"message":"{message}","type":"invalid_request_error","param":null,"code":"{code}"}}}}"#
    );
    let id = Id::new();
    let head = format!(
        "HTTP/1.1 {line}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\nx-should-retry: false\r\nx-request-id: {}\r\ndate: {date}\r\n\r\n",
        body.len(),
        id.text()
    );
    head + &body
}
