//! A stream put together again to the answer that the server would have sent in one piece.
//!
//! Values are moved, not understood: a string that comes in fragments is joined escape by escape, a number keeps its digits, a field
//! nobody knows is kept where it stood. Only the order of the fields, and those that a server sends in whole answers alone, come from
//! a table of what each server was seen to do ([`Form`]).

use crate::inspect::responses_terminal;
use crate::json::{Cursor, Fault};
use crate::sse::{Block, Boundaries};
use crate::{Dialect, Facts, Piece, StreamError, StreamScanner};
use bytes::Bytes;
use std::fmt;

mod chat;
mod form;
mod messages;
mod responses;
mod tree;

pub use form::Form;

use chat::Chat;
use messages::Messages;
use responses::Responses;
use tree::Room;

/// Gathers the events of one stream.
///
/// Memory is bounded by `limit` bytes for what is gathered and as much again for the event that is arriving.
#[derive(Debug)]
pub struct Assembler {
    scanner: StreamScanner,
    first: bool,
    form: Form,
    parts: Parts,
    room: Room,
    limit: usize,
    done: bool,
}

#[derive(Debug)]
enum Parts {
    Chat(Box<Chat>),
    Messages(Messages),
    Responses(Responses),
}

/// Why a stream does not become an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AssembleError {
    /// It is longer than may be gathered.
    TooLarge {
        /// The bound, in bytes.
        limit: usize,
    },
    /// It ended before its end was told.
    Truncated,
    /// An event cannot be read, or does not fit those before it.
    Malformed(&'static str),
    /// The server told of an error in mid-stream.
    Failed(StreamError),
}

impl fmt::Display for AssembleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge { limit } => write!(f, "the answer is longer than {limit} bytes"),
            Self::Truncated => f.write_str("the stream ended before the answer was complete"),
            Self::Malformed(what) => write!(f, "the stream has {what}"),
            Self::Failed(error) => write!(f, "the server failed: {}", error.message),
        }
    }
}

impl std::error::Error for AssembleError {}

impl From<Fault> for AssembleError {
    fn from(_: Fault) -> Self {
        Self::Malformed("an event that is not JSON")
    }
}

impl Assembler {
    /// For the answer to one request. `limit`: the longest answer, in bytes.
    #[must_use]
    pub fn new(dialect: Dialect, form: Form, limit: usize) -> Self {
        Self {
            scanner: StreamScanner::new(dialect, limit),
            first: true,
            form,
            parts: match dialect {
                Dialect::OpenAi => Parts::Chat(Box::default()),
                Dialect::Anthropic => Parts::Messages(Messages::default()),
                Dialect::Responses => Parts::Responses(Responses::default()),
            },
            room: Room::new(limit),
            limit,
            done: false,
        }
    }

    /// The next bytes of the stream, cut anywhere.
    pub fn push(&mut self, bytes: Bytes) {
        self.scanner.push(bytes);
    }

    /// Takes what has arrived, a run of events at a time, and tells what it says. `None`: more bytes are needed, or the stream is
    /// [done](Self::is_done).
    ///
    /// # Errors
    /// [`AssembleError`]; nothing can be made of the stream then.
    pub fn take(&mut self) -> Result<Option<Facts>, AssembleError> {
        if self.done {
            return Ok(None);
        }
        match self.scanner.pop() {
            Some(piece) => self.piece(piece, false).map(Some),
            None => Ok(None),
        }
    }

    /// The terminal event is there: nothing that follows belongs to the answer.
    #[must_use]
    pub const fn is_done(&self) -> bool {
        self.done
    }

    /// Bytes of the stream in memory: what is gathered, and the event that is arriving.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.room.taken() + self.scanner.held_bytes()
    }

    /// The stream has ended: the whole answer's JSON.
    ///
    /// # Errors
    /// [`AssembleError::Truncated`] if neither a terminal event nor the end of each choice was told.
    pub fn finish(mut self) -> Result<Bytes, AssembleError> {
        while !self.done {
            let Some(piece) = self.scanner.finish() else {
                break;
            };
            // What stands behind the last blank line counts only if it is whole.
            if self.piece(piece, true).is_err() && !self.told_its_end() {
                return Err(AssembleError::Truncated);
            }
        }
        if !self.done && !self.told_its_end() {
            return Err(AssembleError::Truncated);
        }
        let out = match self.parts {
            Parts::Chat(chat) => chat.write(self.form)?,
            Parts::Messages(messages) => messages.write(self.form)?,
            Parts::Responses(responses) => responses.write(self.form)?,
        };
        Ok(Bytes::from(out.into_boxed_slice()))
    }

    fn told_its_end(&self) -> bool {
        match &self.parts {
            Parts::Chat(chat) => chat.is_finished(),
            Parts::Messages(messages) => messages.is_finished(),
            Parts::Responses(responses) => responses.is_finished(),
        }
    }

    fn piece(&mut self, piece: Piece, ended: bool) -> Result<Facts, AssembleError> {
        let Piece { bytes, facts } = piece;
        let whole_answer = matches!(self.parts, Parts::Responses(_)) && facts.terminal.is_some();
        if let Some(error) = facts.error.clone().filter(|_| !whole_answer) {
            return Err(AssembleError::Failed(*error));
        }
        let mut boundaries = Boundaries::new();
        let mut rest: &[u8] = &bytes;
        let mut open = false;
        while !rest.is_empty() {
            let len = boundaries.next(rest).unwrap_or_else(|| {
                open = true;
                rest.len()
            });
            // The scanner holds an event until it is whole, unless it is longer than the limit.
            if open && !ended {
                return Err(AssembleError::TooLarge { limit: self.limit });
            }
            let (event, tail) = rest.split_at_checked(len).unwrap_or((rest, &[]));
            self.event(event)?;
            rest = tail;
        }
        self.done |= facts.terminal.is_some();
        Ok(facts)
    }

    fn event(&mut self, bytes: &[u8]) -> Result<(), AssembleError> {
        let block = Block::read(bytes, std::mem::replace(&mut self.first, false), false);
        let Some(data) = block.data.as_deref().map(<[u8]>::trim_ascii) else {
            return Ok(());
        };
        // llama.cpp writes `data: null` before the first token of several prompts.
        if matches!(data, b"" | b"null" | b"[DONE]") || block.name == b"ping" {
            return Ok(());
        }
        Cursor::new(data).check()?;
        let room = &mut self.room;
        match &mut self.parts {
            Parts::Chat(chat) => chat.chunk(data, self.form, room),
            Parts::Messages(messages) => messages.event(data, room),
            Parts::Responses(responses) => {
                let kind = kind_of(data)?.unwrap_or(block.name);
                match responses_terminal(kind) {
                    Some(_) => responses.ended(data, room),
                    None => Ok(()),
                }
            }
        }
    }
}

/// The `type` of an event, raw.
fn kind_of(data: &[u8]) -> Result<Option<&[u8]>, Fault> {
    let mut kind = None;
    Cursor::new(data).object(|c, key| {
        if key == b"type" {
            kind = c.string_or_skip()?;
            return Ok(());
        }
        c.skip()
    })?;
    Ok(kind)
}
