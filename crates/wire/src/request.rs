//! The few request fields the gateway acts on, and edits that leave every other byte alone.

use crate::Dialect;
use crate::json::{Cursor, Fault, Kind};
use crate::text::{self, quote};
use bytes::Bytes;
use std::fmt;
use std::ops::Range;

/// What a request body asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peek {
    /// `model`.
    pub model: Option<String>,
    /// `stream`, false if absent.
    pub stream: bool,
    /// `stream_options.include_usage` (OpenAI).
    pub include_usage: Option<bool>,
    /// `background` (Responses), false if absent.
    pub background: bool,
    /// The bound on output tokens, under whichever name the dialect has for it.
    pub max_tokens: Option<u64>,
    /// A field that a stream cannot honour: asked for in one piece, the answer must be asked for in one piece upstream, too.
    pub one_piece: Option<&'static str>,
    spans: Spans,
}

/// Where in the body the edits go.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Spans {
    /// Just behind the `{` of the body, and whether no member follows.
    top: usize,
    top_empty: bool,
    model: Option<Range<usize>>,
    stream: Option<Range<usize>>,
    options: Options,
    /// `stream_options` is a word of this dialect.
    has_options: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum Options {
    #[default]
    Absent,
    Null(Range<usize>),
    Object {
        open: usize,
        empty: bool,
        include_usage: Option<Range<usize>>,
    },
}

/// A request body the gateway will not send on, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeekError {
    /// What is wrong, ready to be shown to the caller.
    pub what: String,
    /// The field it is about, if one.
    pub param: Option<&'static str>,
    /// Bytes from the start of the body.
    pub offset: usize,
    /// Counted from 1.
    pub line: usize,
    /// In bytes, counted from 1.
    pub column: usize,
}

impl fmt::Display for PeekError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            what,
            offset,
            line,
            column,
            ..
        } = self;
        write!(f, "{what} (line {line}, column {column}, byte {offset})")
    }
}

impl std::error::Error for PeekError {}

/// A refusal before its place is turned into line and column.
#[derive(Debug)]
struct Refusal {
    at: usize,
    what: String,
    param: Option<&'static str>,
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Self {
        Self {
            at: fault.at,
            what: format!("the request body {}", fault.what),
            param: None,
        }
    }
}

impl Refusal {
    fn field(at: usize, param: &'static str, must: &str) -> Self {
        Self {
            at,
            what: format!("`{param}` {must}"),
            param: Some(param),
        }
    }

    fn place(self, body: &[u8]) -> PeekError {
        let before = body.get(..self.at).unwrap_or(body);
        let line_start = memchr::memrchr(b'\n', before).map_or(0, |at| at + 1);
        PeekError {
            what: self.what,
            param: self.param,
            offset: self.at,
            line: memchr::memchr_iter(b'\n', before).count() + 1,
            column: before.len() - line_start + 1,
        }
    }
}

/// Reads a request body: all of it is checked to be one JSON object in UTF-8, and nothing of it is decoded but
/// the fields of [`Peek`].
///
/// # Errors
/// If it is not such an object, is nested too deep, or one of those fields comes twice or has the wrong type.
pub fn peek(body: &Bytes, dialect: Dialect) -> Result<Peek, PeekError> {
    read(body, dialect).map_err(|refusal| refusal.place(body))
}

fn read(body: &[u8], dialect: Dialect) -> Result<Peek, Refusal> {
    // Most bodies are ASCII, which is seen in larger steps than characters.
    if !body.is_ascii()
        && let Err(error) = std::str::from_utf8(body)
    {
        let what = "the request body is not UTF-8; encode it as UTF-8".to_owned();
        return Err(Refusal {
            at: error.valid_up_to(),
            what,
            param: None,
        });
    }
    let mut cursor = Cursor::new(body);
    if cursor.peek() != Some(b'{') {
        let what = if cursor.peek().is_none() {
            "the request body is empty; send a JSON object"
        } else {
            "the request body is not a JSON object; send one"
        };
        return Err(Refusal {
            at: cursor.pos(),
            what: what.to_owned(),
            param: None,
        });
    }
    let mut reader = Reader::new(dialect);
    reader.spans.top = cursor.pos() + 1;
    reader.spans.top_empty = true;
    cursor.object(|c, key| {
        reader.spans.top_empty = false;
        reader.member(c, key)
    })?;
    cursor.end()?;
    Ok(reader.done())
}

/// A field that the gateway acts on.
#[derive(Debug, Clone, Copy)]
enum Field {
    Model,
    Stream,
    Background,
    /// By its name in this dialect.
    MaxTokens(&'static str),
    /// OpenAI's older name, and Anthropic's only one; the newer one wins.
    OlderMaxTokens,
    Options,
}

impl Field {
    /// The field of this dialect that a key of the body names.
    fn of(dialect: Dialect, key: &[u8]) -> Option<Self> {
        if key == b"model" {
            return Some(Self::Model);
        }
        if key == b"stream" {
            return Some(Self::Stream);
        }
        match dialect {
            Dialect::OpenAi if key == b"max_tokens" => Some(Self::OlderMaxTokens),
            Dialect::OpenAi if key == b"max_completion_tokens" => {
                Some(Self::MaxTokens("max_completion_tokens"))
            }
            Dialect::OpenAi if key == b"stream_options" => Some(Self::Options),
            Dialect::Responses if key == b"background" => Some(Self::Background),
            Dialect::Responses if key == b"max_output_tokens" => {
                Some(Self::MaxTokens("max_output_tokens"))
            }
            Dialect::Anthropic if key == b"max_tokens" => Some(Self::OlderMaxTokens),
            _ => None,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Stream => "stream",
            Self::Background => "background",
            Self::MaxTokens(name) => name,
            Self::OlderMaxTokens => "max_tokens",
            Self::Options => "stream_options",
        }
    }

    /// Its bit among the fields seen.
    const fn bit(self) -> u8 {
        1 << match self {
            Self::Model => 0,
            Self::Stream => 1,
            Self::Background => 2,
            Self::MaxTokens(_) => 3,
            Self::OlderMaxTokens => 4,
            Self::Options => 5,
        }
    }
}

/// The field within [`Field::Options`], and its bit.
const INCLUDE_USAGE: (&str, u8) = ("stream_options.include_usage", 1 << 6);

/// What servers refuse in a stream, or answer otherwise in one, beside `stream_options`. `best_of` picks among finished answers; an echo comes
/// with log-probabilities of the prompt that a stream leaves out; sound is encoded as a whole; `stream_options` without `stream` is an error
/// that the server words.
const ONE_PIECE: [&str; 6] = [
    "best_of",
    "echo",
    "prompt_logprobs",
    "use_beam_search",
    "audio",
    "modalities",
];

#[derive(Debug)]
struct Reader {
    dialect: Dialect,
    model: Option<String>,
    stream: Option<bool>,
    include_usage: Option<bool>,
    background: Option<bool>,
    max_tokens: Option<u64>,
    older_max_tokens: Option<u64>,
    one_piece: Option<&'static str>,
    /// The bits of fields seen.
    seen: u8,
    spans: Spans,
}

impl Reader {
    fn new(dialect: Dialect) -> Self {
        Self {
            dialect,
            model: None,
            stream: None,
            include_usage: None,
            background: None,
            max_tokens: None,
            older_max_tokens: None,
            one_piece: None,
            seen: 0,
            spans: Spans {
                has_options: dialect == Dialect::OpenAi,
                ..Spans::default()
            },
        }
    }

    fn done(self) -> Peek {
        Peek {
            model: self.model,
            stream: self.stream.unwrap_or(false),
            include_usage: self.include_usage,
            background: self.background.unwrap_or(false),
            max_tokens: self.max_tokens.or(self.older_max_tokens),
            one_piece: self.one_piece,
            spans: self.spans,
        }
    }

    fn member(&mut self, c: &mut Cursor<'_>, key: &[u8]) -> Result<(), Refusal> {
        match Field::of(self.dialect, key) {
            Some(field) => self.field(c, field),
            None if key.contains(&b'\\') => {
                let key = text::key(key);
                match Field::of(self.dialect, &key) {
                    Some(field) => self.field(c, field),
                    None => self.other(c, &key),
                }
            }
            None => self.other(c, key),
        }
    }

    fn field(&mut self, c: &mut Cursor<'_>, field: Field) -> Result<(), Refusal> {
        // An empty object is said, too.
        if matches!(field, Field::Options) && c.kind()? != Kind::Null {
            self.one_piece = Some(field.name());
        }
        c.peek();
        let start = c.pos();
        self.once(field.name(), field.bit(), start)?;
        match field {
            Field::Model => self.model(c)?,
            Field::Stream => {
                self.stream = flag(c, field.name())?;
                self.spans.stream = Some(start..c.pos());
            }
            Field::Background => self.background = flag(c, field.name())?,
            Field::MaxTokens(name) => self.max_tokens = count(c, name)?,
            Field::OlderMaxTokens => self.older_max_tokens = count(c, field.name())?,
            Field::Options => self.options(c)?,
        }
        Ok(())
    }

    /// Takes note of a field that needs an answer in one piece, if it says so.
    fn other(&mut self, c: &mut Cursor<'_>, key: &[u8]) -> Result<(), Refusal> {
        let word = ONE_PIECE.iter().find(|word| key == word.as_bytes());
        let Some(word) = word.filter(|_| self.dialect == Dialect::OpenAi) else {
            return Ok(c.skip()?);
        };
        let harmless = match *word {
            "best_of" => c.whole_number()?.is_none_or(|n| n <= 1),
            "modalities" => c.value()?.windows(5).all(|word| word != b"audio"),
            "prompt_logprobs" => c.value()? == b"null",
            _ => !c.truthy()?,
        };
        if !harmless {
            self.one_piece = Some(word);
        }
        Ok(())
    }

    fn once(&mut self, name: &'static str, bit: u8, at: usize) -> Result<(), Refusal> {
        if self.seen & bit != 0 {
            return Err(Refusal::field(at, name, "comes twice; send it once"));
        }
        self.seen |= bit;
        Ok(())
    }

    fn model(&mut self, c: &mut Cursor<'_>) -> Result<(), Refusal> {
        let (kind, start) = (c.kind()?, c.pos());
        let raw = c.value()?;
        self.spans.model = Some(start..c.pos());
        match kind {
            Kind::Null => Ok(()),
            Kind::String if !raw.contains(&b'\\') => {
                let [_, text @ .., _] = raw else {
                    return Ok(());
                };
                self.model = std::str::from_utf8(text).ok().map(str::to_owned);
                Ok(())
            }
            Kind::String => {
                let text = serde_json::from_slice::<String>(raw).map_err(|_| {
                    Refusal::field(
                        start,
                        "model",
                        "has an escape that is no character; send plain text",
                    )
                })?;
                self.model = Some(text);
                Ok(())
            }
            _ => Err(Refusal::field(start, "model", "must be a string")),
        }
    }

    fn options(&mut self, c: &mut Cursor<'_>) -> Result<(), Refusal> {
        let (kind, start) = (c.kind()?, c.pos());
        match kind {
            Kind::Null => {
                c.skip()?;
                self.spans.options = Options::Null(start..c.pos());
            }
            Kind::Object => {
                let (mut empty, mut include_usage) = (true, None);
                c.object(|c, key| {
                    empty = false;
                    if *text::key(key) != *b"include_usage" {
                        return Ok(c.skip()?);
                    }
                    c.peek();
                    let start = c.pos();
                    let (name, bit) = INCLUDE_USAGE;
                    self.once(name, bit, start)?;
                    self.include_usage = flag(c, name)?;
                    include_usage = Some(start..c.pos());
                    Ok::<(), Refusal>(())
                })?;
                self.spans.options = Options::Object {
                    open: start + 1,
                    empty,
                    include_usage,
                };
            }
            _ => {
                return Err(Refusal::field(
                    start,
                    "stream_options",
                    "must be an object or null",
                ));
            }
        }
        Ok(())
    }
}

fn flag(c: &mut Cursor<'_>, field: &'static str) -> Result<Option<bool>, Refusal> {
    let (kind, start) = (c.kind()?, c.pos());
    let text = c.value()?;
    match kind {
        Kind::Bool => Ok(Some(text == b"true")),
        Kind::Null => Ok(None),
        _ => Err(Refusal::field(
            start,
            field,
            "must be true or false, without quotes",
        )),
    }
}

/// A number the upstream will judge; only a whole one tells us something.
fn count(c: &mut Cursor<'_>, field: &'static str) -> Result<Option<u64>, Refusal> {
    let (kind, start) = (c.kind()?, c.pos());
    match kind {
        Kind::Number | Kind::Null => Ok(c.whole_number()?),
        _ => Err(Refusal::field(start, field, "must be a number")),
    }
}

/// A change to a request body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Edit<'a> {
    /// Ask for this model.
    Model(&'a str),
    /// Ask for a stream.
    Stream,
    /// Ask for usage at the end of the stream. Does nothing in a dialect that has no such option.
    IncludeUsage,
}

/// The body with these edits. Only the edited bytes differ; with nothing to change it is the same buffer.
///
/// `peek` must be of this very body.
#[must_use]
pub fn splice(body: &Bytes, peek: &Peek, edits: &[Edit<'_>]) -> Bytes {
    let spans = &peek.spans;
    let mut changes: Vec<(Range<usize>, String)> = Vec::new();
    let mut members: Vec<String> = Vec::new();
    let model = edits.iter().rev().find_map(|edit| match edit {
        Edit::Model(name) => Some(*name),
        Edit::Stream | Edit::IncludeUsage => None,
    });
    if let Some(name) = model {
        match &spans.model {
            _ if peek.model.as_deref() == Some(name) => {}
            Some(span) => changes.push((span.clone(), quote(name))),
            None => members.push(format!("\"model\":{}", quote(name))),
        }
    }
    if edits.contains(&Edit::Stream) && !peek.stream {
        match &spans.stream {
            Some(span) => changes.push((span.clone(), "true".to_owned())),
            None => members.push("\"stream\":true".to_owned()),
        }
    }
    if edits.contains(&Edit::IncludeUsage) && spans.has_options && peek.include_usage != Some(true)
    {
        include_usage(&spans.options, &mut changes, &mut members);
    }
    if !members.is_empty() {
        let mut text = members.join(",");
        if !spans.top_empty {
            text.push(',');
        }
        changes.push((spans.top..spans.top, text));
    }
    changes.sort_by_key(|(span, _)| span.start);
    apply(body, &changes).unwrap_or_else(|| body.clone())
}

fn include_usage(
    options: &Options,
    changes: &mut Vec<(Range<usize>, String)>,
    members: &mut Vec<String>,
) {
    match options {
        Options::Absent => members.push("\"stream_options\":{\"include_usage\":true}".to_owned()),
        Options::Null(span) => changes.push((span.clone(), "{\"include_usage\":true}".to_owned())),
        Options::Object {
            include_usage: Some(span),
            ..
        } => changes.push((span.clone(), "true".to_owned())),
        Options::Object {
            open,
            empty,
            include_usage: None,
        } => {
            let comma = if *empty { "" } else { "," };
            changes.push((*open..*open, format!("\"include_usage\":true{comma}")));
        }
    }
}

/// `None` if there is nothing to do, or the spans are not of this body.
fn apply(body: &Bytes, changes: &[(Range<usize>, String)]) -> Option<Bytes> {
    if changes.is_empty() {
        return None;
    }
    let grown: usize = changes.iter().map(|(_, text)| text.len()).sum();
    let mut out = Vec::with_capacity(body.len() + grown);
    let mut at = 0;
    for (span, text) in changes {
        out.extend_from_slice(body.get(at..span.start)?);
        out.extend_from_slice(text.as_bytes());
        at = span.end;
    }
    out.extend_from_slice(body.get(at..)?);
    Some(Bytes::from(out))
}
