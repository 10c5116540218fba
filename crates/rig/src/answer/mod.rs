//! What model servers say: the payloads of each dialect.
//!
//! Bytes look like those of vLLM, so that real client libraries accept them.

mod ask;
mod chat;
mod messages;
mod plain;
mod responses;

use std::io::Write as _;

pub(crate) use ask::{Ask, Route};
pub(crate) use plain::{echo, error_body, html, whole};

use crate::clock::now_secs;
use crate::script::{Body, ErrorShape, Script, Usage};

/// What is said where no text is given: readable, so that a person who looks
/// on sees at once where something is missing. Words of about four letters.
const WORDS: [&str; 32] = [
    "the", "river", "runs", "past", "a", "mill", "whose", "wheel", "turns", "all", "day", "and",
    "grinds", "the", "corn", "that", "boats", "bring", "down", "from", "farms", "on", "either",
    "bank", "until", "the", "water", "falls", "in", "late", "summer", "then",
];

/// The dialects that stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    Chat,
    Completion,
    Messages,
    Responses,
}

/// One generation: what is said, event by event.
#[derive(Debug)]
pub(crate) struct Talk<'a> {
    pub(crate) dialect: Dialect,
    pub(crate) script: &'a Script,
    /// Hexadecimal part of all ids.
    pub(crate) id: u64,
    pub(crate) created: u64,
    /// Model as a JSON string, quotes included.
    pub(crate) model: String,
    pub(crate) usage: Usage,
    /// Tokens of text planned (reasoning and tool calls come on top).
    pub(crate) tokens: u64,
    /// Whether `tokens` is the request's limit.
    pub(crate) limited: bool,
}

impl<'a> Talk<'a> {
    pub(crate) fn new(dialect: Dialect, ask: &Ask, script: &'a Script, id: u64) -> Self {
        let tokens = match (script.tokens, script.tool_calls) {
            (Some(n), _) => n,
            (None, 0) => ask.max_tokens.unwrap_or(16),
            (None, _) => 0,
        };
        let usage = match script.usage {
            Usage::Auto if ask.continuous_usage => Usage::Continuous,
            Usage::Auto if ask.include_usage || !dialect.openai_stream() => Usage::Yes,
            Usage::Auto => Usage::No,
            fixed => fixed,
        };
        Self {
            dialect,
            script,
            id: id.wrapping_mul(0x9e37_79b9_7f4a_7c15),
            created: now_secs(),
            model: quoted(&ask.model),
            usage,
            tokens,
            limited: ask.max_tokens.is_some_and(|max| tokens >= max),
        }
    }

    /// Steps of generation: reasoning, three per tool call, text.
    pub(crate) fn steps(&self) -> u64 {
        self.script.reasoning_tokens + u64::from(self.script.tool_calls) * 3 + self.tokens
    }

    /// Events before the first token.
    pub(crate) fn prelude(&self) -> Vec<Vec<u8>> {
        match self.dialect {
            Dialect::Chat => chat::prelude(self),
            Dialect::Completion => Vec::new(),
            Dialect::Messages => messages::prelude(self),
            Dialect::Responses => responses::prelude(self),
        }
    }

    /// Appends the event of step `n` (from 0).
    pub(crate) fn step(&self, n: u64, last: bool, stamp: Option<u64>, out: &mut Vec<u8>) {
        let start = out.len();
        let tail = Tail { last, stamp };
        match self.dialect {
            Dialect::Chat => chat::step(self, n, tail, out),
            Dialect::Completion => chat::completion_step(self, n, tail, out),
            Dialect::Messages => messages::step(self, n, tail, out),
            Dialect::Responses => responses::step(self, n, tail, out),
        }
        debug_assert!(out.len() > start);
    }

    /// Events after `steps` steps, the terminal one last.
    pub(crate) fn postlude(&self, steps: u64) -> Vec<Vec<u8>> {
        match self.dialect {
            Dialect::Chat | Dialect::Completion => chat::postlude(self, steps),
            Dialect::Messages => messages::postlude(self, steps),
            Dialect::Responses => responses::postlude(self, steps),
        }
    }

    /// An error event in mid-stream.
    pub(crate) fn error_event(&self) -> Vec<u8> {
        let message = quoted(&self.script.message);
        let text = match (self.script.error_shape, self.dialect) {
            (ErrorShape::Dialect, Dialect::Messages) => format!(
                "event: error\ndata: {{\"type\":\"error\",\"error\":{{\"type\":\"overloaded_error\",\"message\":{message}}}}}\n\n"
            ),
            (ErrorShape::Dialect, Dialect::Responses) => format!(
                "event: error\ndata: {{\"type\":\"error\",\"code\":\"server_error\",\"message\":{message},\"param\":null,\"sequence_number\":999}}\n\n"
            ),
            (ErrorShape::Dialect | ErrorShape::Data, _) => format!(
                "data: {{\"error\":{{\"message\":{message},\"type\":\"server_error\",\"param\":null,\"code\":502}}}}\n\n"
            ),
            (ErrorShape::DataText, _) => format!("data: {{\"error\":{message}}}\n\n"),
            (ErrorShape::Event, _) => format!(
                "event: error\ndata: {{\"error\":{{\"message\":{message},\"type\":\"server_error\",\"param\":null,\"code\":null}}}}\n\n"
            ),
            (ErrorShape::EventText, _) => {
                format!("event: error\ndata: {}\n\n", self.script.message)
            }
            (ErrorShape::Choices, _) => format!(
                "data: {{\"id\":\"chatcmpl-{:016x}\",\"object\":\"chat.completion.chunk\",\"created\":{},\"model\":{},\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"\"}},\"finish_reason\":\"error\"}}],\"error\":{{\"code\":502,\"message\":{message}}}}}\n\n",
                self.id, self.created, self.model
            ),
            (ErrorShape::Garbage, _) => "data: {\"id\": \"x\", \n\n".to_owned(),
        };
        text.into_bytes()
    }

    /// Text of step `n`, as the inside of a JSON string.
    pub(crate) fn push_text(&self, n: u64, out: &mut Vec<u8>) {
        let start = out.len();
        if let Some(text) = &self.script.token_text {
            let quoted = quoted(text);
            out.extend_from_slice(&quoted.as_bytes()[1..quoted.len() - 1]);
        } else {
            let length = WORDS.len() as u64;
            out.push(b' ');
            // The remainder is below the length of the list.
            out.extend_from_slice(WORDS[(n % length) as usize].as_bytes());
        }
        let missing = self.script.event_bytes.saturating_sub(out.len() - start);
        out.resize(out.len() + missing, b'x');
    }

    /// All text of steps `from..to`, as the inside of a JSON string.
    pub(crate) fn text(&self, from: u64, to: u64) -> String {
        let mut out = Vec::new();
        for n in from..to {
            self.push_text(n, &mut out);
        }
        String::from_utf8(out).unwrap_or_default()
    }

    /// First step that is text.
    pub(crate) fn first_text(&self) -> u64 {
        self.script.reasoning_tokens + u64::from(self.script.tool_calls) * 3
    }

    pub(crate) fn finish(
        &self,
        tool: &'static str,
        length: &'static str,
        stop: &'static str,
    ) -> String {
        match &self.script.finish_reason {
            Some(reason) => reason.clone(),
            None if self.script.tool_calls > 0 => tool.to_owned(),
            None if self.limited => length.to_owned(),
            None => stop.to_owned(),
        }
    }

    pub(crate) fn shows_usage(&self) -> bool {
        self.usage != Usage::No
    }
}

impl Dialect {
    fn openai_stream(self) -> bool {
        matches!(self, Self::Chat | Self::Completion)
    }
}

/// What a step's event carries besides its text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tail {
    pub(crate) last: bool,
    pub(crate) stamp: Option<u64>,
}

impl Tail {
    /// Appends `,"stamp":n` if asked.
    pub(crate) fn push_stamp(self, out: &mut Vec<u8>) {
        if let Some(ns) = self.stamp {
            push(out, format_args!(",\"stamp\":{ns}"));
        }
    }
}

/// Appends formatted text; a `Vec` never refuses.
pub(crate) fn push(out: &mut Vec<u8>, text: std::fmt::Arguments<'_>) {
    out.write_fmt(text).expect("a Vec takes any text");
}

/// A JSON string, quotes included.
pub(crate) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// The dialect of a streamed body, if it is one.
pub(crate) fn streamed(body: &Body, ask: &Ask) -> Option<Dialect> {
    match body {
        Body::ChatStream => Some(Dialect::Chat),
        Body::CompletionStream => Some(Dialect::Completion),
        Body::AnthropicStream => Some(Dialect::Messages),
        Body::ResponsesStream => Some(Dialect::Responses),
        Body::Auto if ask.stream => ask.route.dialect(),
        _ => None,
    }
}
