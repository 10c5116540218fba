//! One event in, what it means out. Peeks at the few fields the gateway acts on.

use crate::Dialect;
use crate::json::{Cursor, Fault, Kind};
use crate::pattern::{Means, Pattern, Values};
use crate::sse::Block;
use crate::stream::{Facts, StreamError, Terminal};
use crate::text::{clip, decode};
use crate::usage::{RawUsage, read_usage};
use crate::watch::Watch;

/// Error texts longer than this are clipped in the facts (never in the bytes).
const MESSAGE_LIMIT: usize = 1024;

/// Reads events of one stream in order.
// In this order: see `StreamScanner`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Inspector {
    /// Of the last event that says only that there is a text.
    pattern: Pattern,
    /// The highest `sequence_number` of a Responses stream.
    sequence: Option<u64>,
    dialect: Dialect,
    /// No event block has been read yet.
    first: bool,
    content_seen: bool,
    /// Anthropic reports usage in two places; the sum of both is the state.
    usage: RawUsage,
}

impl Inspector {
    pub(crate) fn new(dialect: Dialect) -> Self {
        Self {
            pattern: Pattern::default(),
            sequence: None,
            dialect,
            first: true,
            content_seen: false,
            usage: RawUsage::NONE,
        }
    }

    pub(crate) fn next_sequence(&self) -> Option<u64> {
        self.sequence.map(|n| n.saturating_add(1))
    }

    /// The length of the event that starts here, if it is no longer than `most`, as others before it, and known without being read to be
    /// [`Facts::TEXT`].
    #[inline]
    pub(crate) fn another_text(&mut self, bytes: &[u8], most: usize) -> Option<usize> {
        let alike = self.pattern.find(bytes).filter(|alike| alike.len <= most)?;
        if self.dialect == Dialect::Responses {
            self.sequence = self.sequence.max(alike.sequence);
        }
        Some(alike.len)
    }

    /// The facts of one whole event, its blank line included or not. `one_line`: it is known to be a single line.
    pub(crate) fn event(&mut self, bytes: &[u8], one_line: bool) -> Facts {
        let first = std::mem::replace(&mut self.first, false);
        let block = Block::read(bytes, first, one_line);
        let Some(data) = block.data.as_deref().map(<[u8]>::trim_ascii) else {
            return Facts::default();
        };
        if data.is_empty() || block.name == b"ping" {
            return Facts::default();
        }
        if data == b"[DONE]" && self.dialect != Dialect::Anthropic {
            return Facts {
                events: 1,
                terminal: Some(Terminal::Done),
                ..Facts::default()
            };
        }
        let mut cursor = Cursor::new(data);
        let mut seen = Seen::default();
        match seen.read(&mut cursor) {
            Ok(()) => {
                let mut facts = self.judge(block.name, &seen);
                facts.malformed = u32::from(cursor.odd);
                if facts == Facts::TEXT && !first {
                    self.keep(bytes, data, seen.values);
                }
                facts
            }
            Err(_) if block.name == b"error" => Facts {
                events: 1,
                error: Some(Box::new(StreamError {
                    message: clip(&String::from_utf8_lossy(data), MESSAGE_LIMIT).to_owned(),
                    kind: None,
                    code: None,
                    native: self.dialect == Dialect::Anthropic,
                })),
                ..Facts::default()
            },
            Err(_) => Facts {
                events: 1,
                malformed: 1,
                ..Facts::default()
            },
        }
    }

    /// Keeps an event for [`another_text`](Self::another_text). `data`, in which the values stand, is a part of it, unless it came in several
    /// lines.
    fn keep(&mut self, event: &[u8], data: &[u8], values: Values) {
        let at = data.as_ptr().addr().checked_sub(event.as_ptr().addr());
        if let Some(at) = at.filter(|at| at + data.len() <= event.len()) {
            self.pattern.keep(event, values.moved(at));
        }
    }

    /// No event has been read yet: a byte order mark may come.
    pub(crate) const fn first(&self) -> bool {
        self.first
    }

    /// The facts of an event that was too long to be held, as far as they could be watched.
    pub(crate) fn watched(&mut self, watch: &Watch) -> Facts {
        self.first = false;
        self.judge(watch.name(), &watch.seen())
    }

    fn judge(&mut self, name: &[u8], seen: &Seen<'_>) -> Facts {
        let kind = seen.kind.unwrap_or(name);
        if matches!(
            (self.dialect, kind),
            (Dialect::Anthropic, b"ping") | (Dialect::Responses, b"keepalive")
        ) {
            return Facts::default();
        }
        let mut facts = Facts {
            events: 1,
            ..Facts::default()
        };
        match self.dialect {
            Dialect::OpenAi => Self::open_ai(kind, seen, &mut facts),
            Dialect::Responses => self.responses(kind, seen, &mut facts),
            Dialect::Anthropic => self.anthropic(kind, seen, &mut facts),
        }
        self.error(name, kind, seen, &mut facts);
        if facts.error.is_some() {
            facts.deltas = 0;
            facts.finished = false;
            facts.usage_only = false;
        }
        facts.content = facts.deltas > 0 && !self.content_seen;
        self.content_seen |= facts.content;
        facts
    }

    fn open_ai(kind: &[u8], seen: &Seen<'_>, facts: &mut Facts) {
        facts.deltas = seen.choice_deltas + u32::from(seen.delta);
        facts.finished = seen.choice_finished
            || matches!(
                kind,
                b"transcript.text.done"
                    | b"speech.audio.done"
                    | b"image_generation.completed"
                    | b"image_edit.completed"
            );
        facts.usage = seen.usage.and_then(|raw| raw.normal(Dialect::OpenAi));
        facts.usage_only = seen.choices_empty && seen.usage.is_some();
    }

    fn responses(&mut self, kind: &[u8], seen: &Seen<'_>, facts: &mut Facts) {
        facts.deltas = u32::from(seen.delta && kind.ends_with(b".delta"));
        facts.usage = seen
            .inner_usage
            .and_then(|raw| raw.normal(Dialect::Responses));
        facts.terminal = responses_terminal(kind);
        facts.finished = facts.terminal == Some(Terminal::Done);
        self.sequence = self.sequence.max(seen.sequence);
    }

    fn anthropic(&mut self, kind: &[u8], seen: &Seen<'_>, facts: &mut Facts) {
        let reported = match kind {
            b"content_block_delta" => {
                facts.deltas = u32::from(seen.delta);
                None
            }
            b"content_block_start" => {
                facts.deltas = u32::from(seen.block);
                None
            }
            b"message_start" => seen.inner_usage,
            b"message_delta" => {
                facts.finished = seen.stop;
                seen.usage
            }
            b"message_stop" => {
                facts.terminal = Some(Terminal::Done);
                None
            }
            _ => None,
        };
        if let Some(reported) = reported {
            self.usage.merge(&reported);
            facts.usage = self.usage.normal(Dialect::Anthropic);
        }
    }

    fn error(&self, name: &[u8], kind: &[u8], seen: &Seen<'_>, facts: &mut Facts) {
        let named = name == b"error" || (kind == b"error" && self.dialect != Dialect::OpenAi);
        let found = match &seen.error {
            Some(error) => Some(error.clone()),
            None if named || seen.object_error => Some(Box::new(StreamError {
                message: text(seen.message),
                kind: seen.kind.map(|kind| text(Some(kind))),
                code: seen.code.clone(),
                native: false,
            })),
            None if facts.terminal == Some(Terminal::Failed) => seen.inner_error.clone(),
            None => None,
        };
        facts.error = found.map(|mut error| {
            error.native = match self.dialect {
                Dialect::OpenAi => seen.error.is_some(),
                Dialect::Responses => {
                    seen.error.is_some() || kind == b"error" || facts.terminal.is_some()
                }
                Dialect::Anthropic => name == b"error",
            };
            error
        });
    }
}

/// What a Responses event of this type ends, if anything.
pub(crate) fn responses_terminal(kind: &[u8]) -> Option<Terminal> {
    match kind {
        b"response.completed" | b"response.incomplete" => Some(Terminal::Done),
        b"response.failed" | b"response.cancelled" => Some(Terminal::Failed),
        _ => None,
    }
}

fn text(raw: Option<&[u8]>) -> String {
    clip(&decode(raw.unwrap_or_default()), MESSAGE_LIMIT).to_owned()
}

/// A field of a choice's `delta` that is an answer's text, or stands for it.
fn says_something(key: &[u8]) -> bool {
    key == b"content"
        || key == b"reasoning"
        || key == b"reasoning_content"
        || key == b"tool_calls"
        || key == b"refusal"
        || key == b"function_call"
        || key == b"audio"
        || key == b"reasoning_details"
        || key == b"thinking"
}

/// The fields of an event's JSON that some dialect acts on.
#[derive(Debug, Default)]
pub(crate) struct Seen<'a> {
    pub(crate) kind: Option<&'a [u8]>,
    pub(crate) choices_empty: bool,
    pub(crate) choice_deltas: u32,
    pub(crate) choice_finished: bool,
    /// A top-level `delta` that says something.
    pub(crate) delta: bool,
    pub(crate) stop: bool,
    /// A `content_block` that says something.
    pub(crate) block: bool,
    pub(crate) usage: Option<RawUsage>,
    /// `message.usage` or `response.usage`.
    pub(crate) inner_usage: Option<RawUsage>,
    pub(crate) error: Option<Box<StreamError>>,
    /// `response.error`.
    pub(crate) inner_error: Option<Box<StreamError>>,
    /// `"object":"error"`, an error shape of early servers.
    pub(crate) object_error: bool,
    pub(crate) message: Option<&'a [u8]>,
    pub(crate) code: Option<String>,
    pub(crate) sequence: Option<u64>,
    /// Those of which nothing is asked but whether they say something, or not even that.
    pub(crate) values: Values,
}

impl<'a> Seen<'a> {
    /// Steps over a value and tells whether it says something.
    #[inline]
    fn says(&mut self, c: &mut Cursor<'a>) -> Result<bool, Fault> {
        let string = c.peek() == Some(b'"');
        let start = c.pos();
        let says = c.truthy()?;
        if says && string {
            self.values.note(start, c.pos(), Means::Text);
        }
        Ok(says)
    }

    fn read(&mut self, cursor: &mut Cursor<'a>) -> Result<(), Fault> {
        cursor.object(|c, key| self.member(c, key))?;
        cursor.end()
    }

    fn member(&mut self, c: &mut Cursor<'a>, key: &'a [u8]) -> Result<(), Fault> {
        if key == b"choices" {
            let mut any = false;
            let listed = c.array_or_skip(|c| {
                any = true;
                self.choice(c)
            })?;
            self.choices_empty = listed && !any;
        } else if key == b"usage" {
            self.usage = read_usage(c)?;
        } else if key == b"error" {
            self.error = read_error(c)?;
        } else if key == b"type" {
            self.kind = c.string_or_skip()?;
        } else if key == b"object" {
            self.object_error = c.string_or_skip()? == Some(b"error");
        } else if key == b"delta" {
            self.delta(c)?;
        } else if key == b"content_block" {
            self.content_block(c)?;
        } else if key == b"message" || key == b"response" {
            self.inner(c, key)?;
        } else if key == b"code" {
            self.code = scalar(c)?;
        } else if key == b"sequence_number" {
            c.peek();
            let start = c.pos();
            self.sequence = c.whole_number()?;
            self.values.note(start, c.pos(), Means::Sequence);
        } else {
            c.peek();
            let start = c.pos();
            c.skip()?;
            self.values.note(start, c.pos(), Means::Nothing);
        }
        Ok(())
    }

    fn choice(&mut self, c: &mut Cursor<'a>) -> Result<(), Fault> {
        let mut says = false;
        c.object_or_skip(|c, key| {
            if key == b"delta" {
                c.object_or_skip(|c, key| {
                    if says_something(key) {
                        says |= self.says(c)?;
                        return Ok(());
                    }
                    c.skip()
                })?;
            } else if key == b"text" {
                says |= self.says(c)?;
            } else if key == b"finish_reason" {
                self.choice_finished |=
                    c.string_or_skip()?.is_some_and(|reason| reason != b"error");
            } else {
                c.skip()?;
            }
            Ok(())
        })?;
        self.choice_deltas += u32::from(says);
        Ok(())
    }

    fn delta(&mut self, c: &mut Cursor<'a>) -> Result<(), Fault> {
        if c.kind()? == Kind::String {
            self.delta = self.says(c)?;
            return Ok(());
        }
        c.object_or_skip(|c, key| {
            match key {
                b"text" | b"thinking" | b"partial_json" => self.delta |= self.says(c)?,
                b"stop_reason" => self.stop = c.string_or_skip()?.is_some(),
                _ => c.skip()?,
            }
            Ok(())
        })
        .map(|_| ())
    }

    fn content_block(&mut self, c: &mut Cursor<'a>) -> Result<(), Fault> {
        c.object_or_skip(|c, key| {
            match key {
                b"type" => {
                    self.block |= c
                        .string_or_skip()?
                        .is_some_and(|kind| kind.ends_with(b"tool_use"))
                }
                b"text" | b"thinking" => self.block |= c.truthy()?,
                _ => c.skip()?,
            }
            Ok(())
        })
        .map(|_| ())
    }

    /// The value of `message` or `response`.
    fn inner(&mut self, c: &mut Cursor<'a>, key: &[u8]) -> Result<(), Fault> {
        if c.kind()? != Kind::Object {
            let text = c.string_or_skip()?;
            if key == b"message" {
                self.message = text;
            }
            return Ok(());
        }
        c.object(|c, key| {
            match key {
                b"usage" => self.inner_usage = read_usage(c)?,
                b"error" => self.inner_error = read_error(c)?,
                _ => c.skip()?,
            }
            Ok(())
        })
    }
}

/// The value under an `error` key, if it says something.
pub(crate) fn read_error(c: &mut Cursor<'_>) -> Result<Option<Box<StreamError>>, Fault> {
    let kind = c.kind()?;
    let mut ahead = Cursor::new(c.value()?);
    if !Cursor::truthy(&mut ahead.clone())? {
        return Ok(None);
    }
    let whole = ahead.clone().value()?;
    let mut error = StreamError {
        message: String::new(),
        kind: None,
        code: None,
        native: true,
    };
    match kind {
        Kind::String => error.message = text(Some(ahead.string()?)),
        Kind::Object => ahead.object(|c, key| {
            match key {
                b"message" => error.message = text(c.string_or_skip()?),
                b"type" => error.kind = scalar(c)?,
                b"code" => error.code = scalar(c)?,
                _ => c.skip()?,
            }
            Ok::<(), Fault>(())
        })?,
        _ => {}
    }
    if error.message.is_empty() {
        error.message = clip(&String::from_utf8_lossy(whole), MESSAGE_LIMIT).to_owned();
    }
    Ok(Some(Box::new(error)))
}

/// A string or number as text.
fn scalar(c: &mut Cursor<'_>) -> Result<Option<String>, Fault> {
    Ok(match c.kind()? {
        Kind::String => Some(text(Some(c.string()?))),
        Kind::Number => Some(String::from_utf8_lossy(c.value()?).into_owned()),
        _ => {
            c.skip()?;
            None
        }
    })
}
