//! Upstream error bodies that a dialect's clients could not read are put into its shape, their text kept.

use crate::Dialect;
use crate::envelope::{ErrorText, body_with_code};
use crate::json::{Cursor, Fault, Kind};
use crate::text::{clip, decode};
use bytes::Bytes;

/// No more than this much of an upstream's error text is kept.
const TEXT_LIMIT: usize = 16 * 1024;
/// Nor of its `type`, `param` and `code`.
const WORD_LIMIT: usize = 256;

/// An upstream's error body, made readable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wrapped {
    /// The dialect's clients understand it as it is.
    AsIs,
    /// Send this JSON in its place.
    Replaced(Bytes),
}

/// Decides how an upstream's error body goes to the client.
#[must_use]
pub fn wrap_error(
    dialect: Dialect,
    status: u16,
    content_type: Option<&str>,
    body: &[u8],
) -> Wrapped {
    let mut found = Found::default();
    let is_json = found.read(body).is_ok();
    if is_json && found.understood(dialect) {
        return Wrapped::AsIs;
    }
    let plain;
    let message = match &found.message {
        Some(message) if is_json && !message.is_empty() => message.as_str(),
        _ => {
            plain = plain_text(status, content_type, body);
            plain.as_str()
        }
    };
    let (openai, anthropic) = kinds(status);
    let given = found
        .kind
        .as_deref()
        .filter(|kind| is_json && *kind != "error");
    let text = ErrorText {
        message: clip(message, TEXT_LIMIT),
        kind: given.unwrap_or(openai),
        code: None,
        param: found.param.as_deref().filter(|_| is_json),
        anthropic_kind: given
            .filter(|kind| ANTHROPIC_KINDS.contains(kind))
            .unwrap_or(anthropic),
        request_id: None,
    };
    let code = found.code.as_deref().filter(|_| is_json).unwrap_or("null");
    Wrapped::Replaced(Bytes::from(body_with_code(dialect, &text, code)))
}

const ANTHROPIC_KINDS: [&str; 10] = [
    "invalid_request_error",
    "authentication_error",
    "billing_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "api_error",
    "overloaded_error",
];

/// The `type` for a status, OpenAI's and Anthropic's.
const fn kinds(status: u16) -> (&'static str, &'static str) {
    match status {
        401 => ("authentication_error", "authentication_error"),
        402 => ("insufficient_quota", "billing_error"),
        403 => ("permission_error", "permission_error"),
        404 => ("not_found_error", "not_found_error"),
        413 => ("invalid_request_error", "request_too_large"),
        429 => ("rate_limit_error", "rate_limit_error"),
        408 | 504 => ("timeout_error", "timeout_error"),
        503 | 529 => ("server_error", "overloaded_error"),
        400..=499 => ("invalid_request_error", "invalid_request_error"),
        _ => ("server_error", "api_error"),
    }
}

/// A body that is no error object: its text, or what can be said of it.
fn plain_text(status: u16, content_type: Option<&str>, body: &[u8]) -> String {
    let shown = body.get(..TEXT_LIMIT).unwrap_or(body);
    let text = String::from_utf8_lossy(shown);
    let cut_char = if shown.len() < body.len() {
        char::REPLACEMENT_CHARACTER
    } else {
        ' '
    };
    let text = text.trim_end_matches(cut_char).trim();
    if text.is_empty() {
        return format!("the upstream answered {status} with an empty body");
    }
    let broken = text
        .chars()
        .filter(|c| *c == char::REPLACEMENT_CHARACTER || *c == '\0')
        .count();
    if broken * 8 > text.chars().count() {
        let label =
            content_type.map_or_else(String::new, |label| format!(" of {}", clip(label, 128)));
        return format!(
            "the upstream answered {status} with {} bytes{label} that are not text",
            body.len()
        );
    }
    text.to_owned()
}

/// The parts of an upstream's JSON error, wherever they stand.
#[derive(Debug, Default)]
struct Found {
    /// `error` is an object with a `message` string.
    native: bool,
    message: Option<String>,
    kind: Option<String>,
    /// As JSON text: a string, a number, or absent.
    code: Option<String>,
    param: Option<String>,
    top_kind: Option<String>,
}

impl Found {
    fn understood(&self, dialect: Dialect) -> bool {
        self.native
            && match dialect {
                Dialect::OpenAi | Dialect::Responses => true,
                Dialect::Anthropic => self.top_kind.as_deref() == Some("error"),
            }
    }

    fn read(&mut self, body: &[u8]) -> Result<(), Fault> {
        let mut c = Cursor::new(body);
        match c.kind()? {
            Kind::Object => c.object(|c, key| self.member(c, key))?,
            // Some clouds answer with a list of one.
            Kind::Array => {
                let mut first = true;
                c.array(|c| {
                    if std::mem::take(&mut first) && c.kind()? == Kind::Object {
                        return c.object(|c, key| self.member(c, key));
                    }
                    c.skip()
                })?;
                self.native = false;
            }
            Kind::String => self.message = Some(decode(c.string()?)),
            _ => c.skip()?,
        }
        c.end()
    }

    fn member(&mut self, c: &mut Cursor<'_>, key: &[u8]) -> Result<(), Fault> {
        match key {
            b"error" if c.kind()? == Kind::Object => {
                let mut inner = Self::default();
                let whole = c.clone().value()?;
                c.object(|c, key| inner.leaf(c, key))?;
                self.native = inner
                    .message
                    .as_ref()
                    .is_some_and(|message| !message.is_empty());
                let shown = || String::from_utf8_lossy(whole).into_owned();
                self.message = Some(
                    inner
                        .message
                        .filter(|m| !m.is_empty())
                        .unwrap_or_else(shown),
                );
                self.kind = inner.kind.or(self.kind.take());
                self.code = inner.code.or(self.code.take());
                self.param = inner.param.or(self.param.take());
                Ok(())
            }
            b"error" | b"detail" | b"msg" if self.message.is_none() => self.said(c),
            b"type" => {
                self.top_kind = word(c)?;
                self.kind = self.kind.take().or_else(|| self.top_kind.clone());
                Ok(())
            }
            _ => self.leaf(c, key),
        }
    }

    fn leaf(&mut self, c: &mut Cursor<'_>, key: &[u8]) -> Result<(), Fault> {
        match key {
            b"message" if self.message.is_none() => self.message = string(c)?,
            b"type" => self.kind = word(c)?,
            b"param" => self.param = word(c)?,
            b"code" if matches!(c.kind()?, Kind::String | Kind::Number) => {
                let code = c.value()?;
                self.code =
                    (code.len() <= WORD_LIMIT).then(|| String::from_utf8_lossy(code).into_owned());
            }
            _ => c.skip()?,
        }
        Ok(())
    }

    /// A string is the message; a structure's own text is the next best.
    fn said(&mut self, c: &mut Cursor<'_>) -> Result<(), Fault> {
        match c.kind()? {
            Kind::String => self.message = string(c)?,
            Kind::Null => c.skip()?,
            _ => self.message = Some(String::from_utf8_lossy(c.value()?).into_owned()),
        }
        Ok(())
    }
}

fn word(c: &mut Cursor<'_>) -> Result<Option<String>, Fault> {
    Ok(string(c)?.map(|text| clip(&text, WORD_LIMIT).to_owned()))
}

fn string(c: &mut Cursor<'_>) -> Result<Option<String>, Fault> {
    Ok(c.string_or_skip()?.map(decode))
}
