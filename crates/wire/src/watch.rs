//! Watches an event too long to be held, as it passes, in bounded memory.
//!
//! The last event of a Responses stream repeats the whole answer and carries usage and the end: it must be
//! understood at any length. So a push parser follows the JSON text byte by byte, keeps track of the keys on the
//! two outer levels, and keeps the few short values the gateway acts on.

use crate::inspect::{Seen, read_error};
use crate::json::Cursor;
use crate::sse::BOM;
use crate::stream::StreamError;
use crate::text::clip;
use crate::usage::read_usage;
use memchr::memchr2;

/// Kept of a value. A usage object is far smaller, an error's text is clipped.
const VALUE_LIMIT: usize = 8 * 1024;
/// Kept of a key, an event name, or a field name: longer than every known word.
const WORD_LIMIT: usize = 64;

/// Follows one event.
#[derive(Debug)]
pub(crate) struct Watch {
    /// The event opens the stream: a byte order mark may come first.
    first: bool,
    field: Field,
    /// The line so far, while its field is not known.
    start: Vec<u8>,
    name: Vec<u8>,
    json: Paths,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    Unknown,
    /// A value whose first space, if any, is not part of it.
    DataStart,
    NameStart,
    Data,
    Name,
    Other,
}

impl Watch {
    pub(crate) fn new(first: bool) -> Self {
        Self {
            first,
            field: Field::Unknown,
            start: Vec::new(),
            name: Vec::new(),
            json: Paths::default(),
        }
    }

    /// The next bytes of the event.
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while let Some(end) = memchr2(b'\n', b'\r', rest) {
            let (line, tail) = rest.split_at_checked(end).unwrap_or((rest, &[]));
            self.part(line);
            self.field = Field::Unknown;
            self.first &= self.start.is_empty();
            self.start.clear();
            rest = tail.get(1..).unwrap_or_default();
        }
        self.part(rest);
    }

    /// Some more of a line.
    fn part(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        if self.field == Field::Unknown {
            let colon = memchr::memchr(b':', rest);
            let len = colon.map_or(rest.len(), |at| at + 1);
            let (name, tail) = rest.split_at_checked(len).unwrap_or((rest, &[]));
            keep(&mut self.start, name, WORD_LIMIT);
            if colon.is_none() {
                return;
            }
            let name = match self.start.strip_prefix(BOM) {
                Some(after) if self.first => after,
                _ => self.start.as_slice(),
            };
            self.field = match name {
                b"data:" => Field::DataStart,
                b"event:" => Field::NameStart,
                _ => Field::Other,
            };
            rest = tail;
        }
        if let (Some(first), Field::DataStart | Field::NameStart) = (rest.first(), self.field) {
            if *first == b' ' {
                rest = rest.get(1..).unwrap_or_default();
            }
            if self.field == Field::DataStart {
                self.field = Field::Data;
            } else {
                self.field = Field::Name;
                self.name.clear();
            }
        }
        match self.field {
            Field::Data => self.json.feed(rest),
            Field::Name => keep(&mut self.name, rest, WORD_LIMIT),
            _ => {}
        }
    }

    /// The `event:` name.
    pub(crate) fn name(&self) -> &[u8] {
        &self.name
    }

    /// What was kept, in the form a whole event is read into.
    pub(crate) fn seen(&self) -> Seen<'_> {
        let json = &self.json;
        let usage = |value: &Kept| read_usage(&mut Cursor::new(&value.bytes)).ok().flatten();
        Seen {
            kind: json
                .kind
                .bytes
                .strip_prefix(b"\"")
                .and_then(|kind| kind.strip_suffix(b"\"")),
            choice_deltas: u32::from(json.choices),
            delta: json.delta,
            block: json.block,
            usage: usage(&json.usage),
            inner_usage: usage(&json.inner_usage),
            error: json.error.error(),
            inner_error: json.inner_error.error(),
            ..Seen::default()
        }
    }
}

fn keep(into: &mut Vec<u8>, bytes: &[u8], limit: usize) {
    let room = limit.saturating_sub(into.len()).min(bytes.len());
    into.extend_from_slice(bytes.get(..room).unwrap_or_default());
}

/// A short value's JSON text.
#[derive(Debug, Default)]
struct Kept {
    bytes: Vec<u8>,
}

impl Kept {
    /// The error it is. One too long to keep whole is an error all the same.
    fn error(&self) -> Option<Box<StreamError>> {
        if self.bytes.is_empty() {
            return None;
        }
        read_error(&mut Cursor::new(&self.bytes)).unwrap_or_else(|_| {
            let text = String::from_utf8_lossy(&self.bytes);
            Some(Box::new(StreamError {
                message: clip(&text, 1024).to_owned(),
                kind: None,
                code: None,
                native: true,
            }))
        })
    }
}

/// A place in the JSON text whose value is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slot {
    Kind,
    Usage,
    Error,
    InnerUsage,
    InnerError,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Text {
    #[default]
    Outside,
    Key,
    Value,
}

/// A push parser that knows where it is on the two outer levels.
#[derive(Debug, Default)]
struct Paths {
    depth: usize,
    /// Whether levels 1 and 2 are objects.
    objects: [bool; 2],
    text: Text,
    /// The last byte of a string was a backslash that escapes the next.
    escaped: bool,
    /// A string that comes now is a key of an outer level.
    key_next: bool,
    key: Vec<u8>,
    /// Level 2 is `response` or `message`.
    inner: bool,
    /// What is being kept, and the level its value belongs to.
    keeping: Option<(Slot, usize)>,
    kind: Kept,
    usage: Kept,
    error: Kept,
    inner_usage: Kept,
    inner_error: Kept,
    choices: bool,
    delta: bool,
    block: bool,
}

impl Paths {
    fn feed(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while let Some((first, tail)) = rest.split_first() {
            if self.text != Text::Outside {
                rest = self.string(rest);
                continue;
            }
            self.structure(*first);
            rest = tail;
        }
    }

    /// Takes bytes of a string, to its end if that is here.
    fn string<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        if std::mem::take(&mut self.escaped) {
            let (one, rest) = bytes.split_at_checked(1).unwrap_or_default();
            self.keep(one);
            return rest;
        }
        let stop = memchr2(b'"', b'\\', bytes);
        let len = stop.map_or(bytes.len(), |at| at + 1);
        let (taken, rest) = bytes.split_at_checked(len).unwrap_or_default();
        self.keep(taken);
        match taken.last() {
            Some(b'\\') if stop.is_some() => self.escaped = true,
            Some(b'"') if stop.is_some() => self.text = Text::Outside,
            _ => {}
        }
        rest
    }

    fn keep(&mut self, bytes: &[u8]) {
        if self.text == Text::Key {
            keep(&mut self.key, bytes, WORD_LIMIT);
        }
        if let Some((slot, _)) = self.keeping {
            keep(&mut self.slot(slot).bytes, bytes, VALUE_LIMIT);
        }
    }

    const fn slot(&mut self, slot: Slot) -> &mut Kept {
        match slot {
            Slot::Kind => &mut self.kind,
            Slot::Usage => &mut self.usage,
            Slot::Error => &mut self.error,
            Slot::InnerUsage => &mut self.inner_usage,
            Slot::InnerError => &mut self.inner_error,
        }
    }

    fn outer_object(&self) -> bool {
        self.depth
            .checked_sub(1)
            .and_then(|at| self.objects.get(at))
            == Some(&true)
    }

    fn structure(&mut self, byte: u8) {
        if let Some((_, depth)) = self.keeping {
            if depth == self.depth && matches!(byte, b',' | b'}' | b']') {
                self.keeping = None;
            } else {
                self.keep(&[byte]);
            }
        }
        match byte {
            b'{' | b'[' => {
                if let Some(object) = self.objects.get_mut(self.depth) {
                    *object = byte == b'{';
                }
                self.depth += 1;
                self.key_next = self.outer_object();
            }
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                self.key_next = false;
            }
            b',' => self.key_next = self.outer_object(),
            b'"' if self.key_next => {
                self.text = Text::Key;
                self.key_next = false;
                self.key.clear();
            }
            b'"' => self.text = Text::Value,
            b':' if self.outer_object() => self.member(),
            _ => {}
        }
    }

    /// A key of an outer level has been read; its value comes.
    fn member(&mut self) {
        let slot = match (self.depth, self.key.as_slice()) {
            (1, b"type\"") => Some(Slot::Kind),
            (1, b"usage\"") => Some(Slot::Usage),
            (1, b"error\"") => Some(Slot::Error),
            (2, b"usage\"") if self.inner => Some(Slot::InnerUsage),
            (2, b"error\"") if self.inner => Some(Slot::InnerError),
            _ => None,
        };
        if self.depth == 1 {
            self.inner = matches!(self.key.as_slice(), b"response\"" | b"message\"");
            match self.key.as_slice() {
                b"choices\"" => self.choices = true,
                b"delta\"" => self.delta = true,
                b"content_block\"" => self.block = true,
                _ => {}
            }
        }
        if let (Some(slot), None) = (slot, self.keeping) {
            self.slot(slot).bytes.clear();
            self.keeping = Some((slot, self.depth));
        }
    }
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
