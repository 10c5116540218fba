//! Error shapes, as each dialect's clients read them.

use crate::Dialect;
use crate::text::quote;
use bytes::Bytes;
use std::fmt::Write as _;

/// An error in words, before it takes a dialect's shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErrorText<'a> {
    /// What happened and what to do, for a human.
    pub message: &'a str,
    /// OpenAI's `type`.
    pub kind: &'a str,
    /// A word for programs.
    pub code: Option<&'a str>,
    /// The request field at fault.
    pub param: Option<&'a str>,
    /// Anthropic's `error.type`.
    pub anthropic_kind: &'a str,
    /// The id of the request.
    pub request_id: Option<&'a str>,
}

fn or_null(text: Option<&str>) -> String {
    text.map_or_else(|| "null".to_owned(), quote)
}

/// The JSON body of an error answer.
#[must_use]
pub fn error_body(dialect: Dialect, error: &ErrorText<'_>) -> Bytes {
    Bytes::from(body_with_code(dialect, error, &or_null(error.code)))
}

/// As [`error_body`], with `code` as JSON text: servers send it as a number, too.
pub(crate) fn body_with_code(dialect: Dialect, error: &ErrorText<'_>, code: &str) -> String {
    let message = quote(error.message);
    match dialect {
        Dialect::OpenAi | Dialect::Responses => format!(
            r#"{{"error":{{"message":{message},"type":{},"param":{},"code":{code}}}}}"#,
            quote(error.kind),
            or_null(error.param),
        ),
        Dialect::Anthropic => {
            let mut body = format!(
                r#"{{"type":"error","error":{{"type":{},"message":{message}}}"#,
                quote(error.anthropic_kind)
            );
            if let Some(id) = error.request_id {
                let _ = write!(body, r#","request_id":{}"#, quote(id));
            }
            body.push('}');
            body
        }
    }
}

/// The event that ends a stream in error. `sequence` is the next `sequence_number` of a Responses stream.
#[must_use]
pub fn error_event(dialect: Dialect, error: &ErrorText<'_>, sequence: Option<u64>) -> Bytes {
    Bytes::from(match dialect {
        Dialect::OpenAi => format!(
            "data: {}\n\n",
            body_with_code(dialect, error, &or_null(error.code))
        ),
        Dialect::Anthropic => {
            format!(
                "event: error\ndata: {}\n\n",
                body_with_code(dialect, error, &or_null(error.code))
            )
        }
        Dialect::Responses => format!(
            "event: error\ndata: {{\"type\":\"error\",\"code\":{},\"message\":{},\"param\":{},\"sequence_number\":{}}}\n\n",
            or_null(error.code),
            quote(error.message),
            or_null(error.param),
            sequence.unwrap_or(0),
        ),
    })
}
