//! What a non-streaming JSON answer says.

use crate::json::{Cursor, Fault};
use crate::usage::{RawUsage, read_usage};
use crate::{Dialect, Usage};

/// What was found in an answer's body.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AnswerFacts {
    /// What the upstream reports.
    pub usage: Option<Usage>,
    /// The body is an error, whatever the status says.
    pub is_error: bool,
    /// The answer says of itself that it is complete.
    pub finished: bool,
}

/// Reads a whole answer body. One that is not JSON gives no facts.
#[must_use]
pub fn answer_facts(dialect: Dialect, body: &[u8]) -> AnswerFacts {
    let mut cursor = Cursor::new(body);
    let mut answer = Answer::default();
    let read = cursor
        .object(|c, key| answer.member(c, key))
        .and_then(|()| cursor.end());
    if read.is_err() {
        return AnswerFacts::default();
    }
    let is_error = answer.error
        || answer.object == Some(b"error")
        || (dialect == Dialect::Anthropic && answer.kind == Some(b"error"))
        || (dialect == Dialect::Responses && answer.status == Some(b"failed"));
    let done = match dialect {
        Dialect::OpenAi => answer.finish || !answer.choices,
        Dialect::Responses => matches!(answer.status, Some(b"completed" | b"incomplete")),
        Dialect::Anthropic => answer.stop,
    };
    AnswerFacts {
        usage: answer.usage.and_then(|raw| raw.normal(dialect)),
        is_error,
        finished: done && !is_error,
    }
}

#[derive(Debug, Default)]
struct Answer<'a> {
    usage: Option<RawUsage>,
    error: bool,
    object: Option<&'a [u8]>,
    kind: Option<&'a [u8]>,
    status: Option<&'a [u8]>,
    choices: bool,
    finish: bool,
    stop: bool,
}

impl<'a> Answer<'a> {
    fn member(&mut self, c: &mut Cursor<'a>, key: &[u8]) -> Result<(), Fault> {
        if key == b"usage" {
            self.usage = read_usage(c)?;
        } else if key == b"error" {
            self.error = c.truthy()?;
        } else if key == b"object" {
            self.object = c.string_or_skip()?;
        } else if key == b"type" {
            self.kind = c.string_or_skip()?;
        } else if key == b"status" {
            self.status = c.string_or_skip()?;
        } else if key == b"stop_reason" {
            self.stop = c.string_or_skip()?.is_some();
        } else if key == b"choices" {
            self.choices = true;
            c.array_or_skip(|c| self.choice(c))?;
        } else {
            c.skip()?;
        }
        Ok(())
    }

    fn choice(&mut self, c: &mut Cursor<'a>) -> Result<(), Fault> {
        c.object_or_skip(|c, key| {
            if key == b"finish_reason" {
                self.finish |= c.string_or_skip()?.is_some();
                return Ok(());
            }
            c.skip()
        })
        .map(|_| ())
    }
}
