//! What a client is told whose request head cannot be read: there is no request yet, so no route and no dialect either.

use bytes::Bytes;

/// The whole answer, in place of the bare head that the HTTP library would send. The body is one that both SDK families read.
pub(super) fn answer(bare: &[u8]) -> Bytes {
    let status = bare.get(9..12).unwrap_or_default();
    let (line, code, message) = match status {
        b"431" => (
            "431 Request Header Fields Too Large",
            "request_head_too_large",
            "the request line and header fields are larger than limits.request_head, or too many",
        ),
        b"414" => (
            "414 URI Too Long",
            "uri_too_long",
            "the request target is too long",
        ),
        _ => (
            "400 Bad Request",
            "malformed_http",
            "the request is not well-formed HTTP, or its length can be read in two ways",
        ),
    };
    let body = format!(
        r#"{{"type":"error","error":{{"message":"{message}","type":"invalid_request_error","param":null,"code":"{code}"}}}}"#
    );
    let id = fastrand::u128(..);
    let head = format!(
        "HTTP/1.1 {line}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\nx-should-retry: false\r\nx-request-id: req_{id:032x}\r\n\r\n",
        body.len()
    );
    Bytes::from(head + &body)
}
