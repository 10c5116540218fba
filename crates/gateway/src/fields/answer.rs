//! The head of an answer: the fields that cross, and what the others say.

use http::{StatusCode, Version};

use super::list::FieldLine;
use super::{Field, Fields, HOP_BY_HOP, PRIVATE_ANSWER, Set, words};

const WITHHELD: Set = HOP_BY_HOP.and(PRIVATE_ANSWER);

/// The head of an upstream's answer, as the call sees it.
#[derive(Debug)]
pub struct UpstreamHead {
    pub status: StatusCode,
    pub version: Version,
    /// As they go downstream: without framing, without what is between us and the server.
    pub fields: Fields,
    pub told: Told,
}

/// What an answer's fields tell the gateway. Where a field may come once and comes more often, the first counts.
#[derive(Clone, Copy, Debug)]
pub struct Told {
    seen: Set,
    pub coding: Coding,
    pub length: Length,
    pub kind: ContentKind,
    pub is_json: bool,
    /// Its body is compressed or the like.
    pub is_encoded: bool,
    /// `Connection: close`.
    pub closes: bool,
    /// `Connection: keep-alive`.
    pub stays: bool,
    /// `Keep-Alive: timeout=N`, in seconds.
    pub keep_alive: Option<u64>,
}

/// `Transfer-Encoding`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    None,
    Chunked,
    /// Another, or more than one: none was asked for.
    Unknown,
}

/// `Content-Length`: digits only, and the same in every field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    Unsaid,
    Is(u64),
    Malformed,
    /// Two that differ.
    Unclear,
}

/// `Content-Type`, as far as it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentKind {
    Events,
    Html,
    Other,
}

impl ContentKind {
    fn of(essence: &[u8]) -> Self {
        let is = |kind: &[u8]| essence.eq_ignore_ascii_case(kind);
        if is(b"text/event-stream") {
            Self::Events
        } else if is(b"text/html") || is(b"application/xhtml+xml") {
            Self::Html
        } else {
            Self::Other
        }
    }
}

impl Told {
    fn nothing() -> Self {
        Self {
            seen: Set::default(),
            coding: Coding::None,
            length: Length::Unsaid,
            kind: ContentKind::Other,
            is_json: false,
            is_encoded: false,
            closes: false,
            stays: false,
            keep_alive: None,
        }
    }

    /// It says how its body ends.
    pub fn is_framed(&self) -> bool {
        self.coding != Coding::None || self.length != Length::Unsaid
    }

    /// Two servers on the way may disagree where such an answer ends (RFC 9112 §6.3).
    pub fn is_framed_twice(&self) -> bool {
        self.coding != Coding::None && self.length != Length::Unsaid
    }

    /// There is a `Content-Encoding`, be it `identity`.
    pub fn names_encoding(&self) -> bool {
        self.seen.has(Field::ContentEncoding)
    }
}

/// A head whose fields are being read, each once.
#[derive(Debug)]
pub struct Reading<'a> {
    fields: Fields,
    told: Told,
    /// What `Connection` names, beside what never crosses.
    named: Vec<&'a [u8]>,
}

impl<'a> Reading<'a> {
    /// For so many fields, in so many bytes.
    pub fn new(fields: usize, bytes: usize) -> Self {
        Self {
            fields: Fields::with_capacity(fields, bytes),
            told: Told::nothing(),
            named: Vec::new(),
        }
    }

    /// The next field, as a parser has let it through.
    pub fn field(&mut self, name: &[u8], value: &'a [u8]) {
        let field = Field::of(name);
        if let Some(field) = field {
            self.note(field, value);
            if WITHHELD.has(field) {
                return;
            }
        }
        self.fields.read(field, name, value);
    }

    fn note(&mut self, field: Field, text: &'a [u8]) {
        let told = &mut self.told;
        let again = told.seen.has(field);
        told.seen.insert(field);
        match field {
            Field::ContentLength => told.length = length(told.length, text),
            Field::TransferEncoding if again => told.coding = Coding::Unknown,
            Field::TransferEncoding => told.coding = coding(text),
            Field::Connection => self.connection(text),
            Field::KeepAlive if !again => told.keep_alive = timeout(text),
            Field::ContentType if !again => {
                let essence = text.split(|b| *b == b';').next();
                let essence = essence.unwrap_or_default().trim_ascii();
                told.is_json = essence.eq_ignore_ascii_case(b"application/json") || has_json(text);
                told.kind = ContentKind::of(essence);
            }
            Field::ContentEncoding if !again => {
                told.is_encoded = !text.eq_ignore_ascii_case(b"identity");
            }
            _ => {}
        }
    }

    fn connection(&mut self, text: &'a [u8]) {
        for word in words(text) {
            if word.eq_ignore_ascii_case(b"close") {
                self.told.closes = true;
            } else if word.eq_ignore_ascii_case(b"keep-alive") {
                self.told.stays = true;
            } else {
                self.named.push(word);
            }
        }
    }

    pub fn end(mut self, status: StatusCode, version: Version) -> UpstreamHead {
        if !self.named.is_empty() {
            let named = |line: &FieldLine<'_>| self.named.iter().any(|word| line.is_named(word));
            self.fields.retain(|line| !named(line));
        }
        UpstreamHead {
            status,
            version,
            fields: self.fields,
            told: self.told,
        }
    }
}

impl UpstreamHead {
    /// Of an answer whose framing is not in its fields (HTTP/2).
    pub fn of(parts: &http::response::Parts) -> Self {
        let mut reading = Reading::new(parts.headers.len(), 0);
        for (name, value) in &parts.headers {
            reading.field(name.as_str().as_bytes(), value.as_bytes());
        }
        reading.end(parts.status, parts.version)
    }
}

fn length(known: Length, text: &[u8]) -> Length {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    let told = std::str::from_utf8(text).ok().filter(|_| digits);
    match (known, told.and_then(|told| told.parse().ok())) {
        (Length::Malformed, _) | (_, None) => Length::Malformed,
        (Length::Unsaid, Some(told)) => Length::Is(told),
        (Length::Is(known), Some(told)) if known == told => Length::Is(known),
        (Length::Is(_) | Length::Unclear, Some(_)) => Length::Unclear,
    }
}

fn coding(text: &[u8]) -> Coding {
    if text.trim_ascii().eq_ignore_ascii_case(b"chunked") {
        Coding::Chunked
    } else {
        Coding::Unknown
    }
}

fn timeout(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text)
        .ok()?
        .split(',')
        .find_map(|part| part.trim().strip_prefix("timeout=")?.trim().parse().ok())
}

/// `application/problem+json` and whatever else has the word in it.
fn has_json(content_type: &[u8]) -> bool {
    content_type
        .windows(4)
        .any(|word| word.eq_ignore_ascii_case(b"json"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::list;

    fn head(fields: &[(&str, &str)]) -> UpstreamHead {
        let mut reading = Reading::new(0, 0);
        for (name, value) in fields {
            reading.field(name.as_bytes(), value.as_bytes());
        }
        reading.end(StatusCode::OK, Version::HTTP_11)
    }

    #[test]
    fn answers_keep_rate_limit_and_id_fields_and_lose_cookies() {
        let head = head(&[
            ("x-ratelimit-remaining-requests", "5"),
            ("x-request-id", "r"),
            ("retry-after-ms", "300"),
            ("set-cookie", "a=b"),
            ("location", "http://inner/"),
            ("content-length", "3"),
            ("access-control-allow-origin", "*"),
        ]);
        let crossed = list(&[
            ("x-ratelimit-remaining-requests", "5"),
            ("x-request-id", "r"),
            ("retry-after-ms", "300"),
        ]);
        assert_eq!(head.fields, crossed);
    }

    #[test]
    fn fields_named_by_connection_do_not_cross() {
        let fields = [
            ("x-secret-hop", "1"),
            ("content-type", "text/plain"),
            ("connection", "Close, X-Secret-Hop,content-type"),
            ("close", "1"),
            ("te", "trailers"),
            ("upgrade", "h2c"),
            ("x-kept", "1"),
            ("connection", "keep-alive"),
        ];
        let head = head(&fields);
        let crossed = list(&[("content-type", "text/plain"), ("x-kept", "1")]);
        assert_eq!(head.fields, crossed);
        assert!(head.told.closes && head.told.stays);
    }

    #[test]
    fn keep_alive_timeout_is_read() {
        let told = |value| head(&[("keep-alive", value)]).told.keep_alive;
        assert_eq!(told("timeout=5, max=100"), Some(5));
        assert_eq!(told("max=1"), None);
    }

    #[test]
    fn content_is_told_by_the_first_field() {
        for (value, kind, json) in [
            ("text/event-stream", ContentKind::Events, false),
            (
                "Text/Event-Stream ; charset=utf-8",
                ContentKind::Events,
                false,
            ),
            ("text/html;x", ContentKind::Html, false),
            ("application/xhtml+xml", ContentKind::Html, false),
            ("Application/JSON", ContentKind::Other, true),
            ("application/problem+Json; x", ContentKind::Other, true),
            ("text/plain", ContentKind::Other, false),
            ("", ContentKind::Other, false),
        ] {
            let told = head(&[("content-type", value), ("content-type", "text/html")]).told;
            assert_eq!((told.kind, told.is_json), (kind, json), "{value}");
        }
        for (value, encoded) in [("gzip", true), ("Identity", false)] {
            let told = head(&[("content-encoding", value), ("content-encoding", "br")]).told;
            assert!(
                told.is_encoded == encoded && told.names_encoding(),
                "{value}"
            );
        }
    }

    #[test]
    fn framing_is_read_from_all_fields() {
        for (fields, coding, length) in [
            (&[][..], Coding::None, Length::Unsaid),
            (&[("content-length", "7")][..], Coding::None, Length::Is(7)),
            (
                &[("content-length", "7"), ("content-length", "7")][..],
                Coding::None,
                Length::Is(7),
            ),
            (
                &[
                    ("content-length", "7"),
                    ("content-length", "8"),
                    ("content-length", "8"),
                ][..],
                Coding::None,
                Length::Unclear,
            ),
            (
                &[("content-length", "7"), ("content-length", "+7")][..],
                Coding::None,
                Length::Malformed,
            ),
            (
                &[("transfer-encoding", "Chunked")][..],
                Coding::Chunked,
                Length::Unsaid,
            ),
            (
                &[
                    ("transfer-encoding", "chunked"),
                    ("transfer-encoding", "chunked"),
                ][..],
                Coding::Unknown,
                Length::Unsaid,
            ),
            (
                &[
                    ("transfer-encoding", "gzip, chunked"),
                    ("content-length", "1"),
                ][..],
                Coding::Unknown,
                Length::Is(1),
            ),
        ] {
            let told = head(fields).told;
            assert_eq!((told.coding, told.length), (coding, length), "{fields:?}");
            let (coded, sized) = (coding != Coding::None, length != Length::Unsaid);
            assert_eq!(told.is_framed(), coded || sized);
            assert_eq!(told.is_framed_twice(), coded && sized);
        }
    }
}
