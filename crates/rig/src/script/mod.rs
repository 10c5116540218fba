//! What the fake upstream does with one request.
//!
//! A default [`Script`] is given at start; a request changes single fields of
//! it with a top-level `"rig": {…}` object in its JSON body, or with the header
//! `x-rig: {…}` where the body is not JSON. An unknown field is answered with
//! `400`, so that a misspelt fault never passes as a healthy answer.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

mod fault;
mod words;

pub use fault::Fault;
pub use words::{
    Accept, Body, Compress, End, ErrorShape, Expect, Framing, Interim, LineEnd, Next, OnClose,
    Pages, Piece, Read, Segment, Stall, StallAt, Usage,
};

/// Everything the fake upstream can be told to do. All fields have defaults;
/// the default script is a healthy server that answers by route.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct Script {
    /// Test id: attempts are counted per id.
    pub id: Option<String>,
    /// Name of this upstream, for [`Script::per_upstream`].
    pub name: Option<String>,
    /// Use the default script even if the request brings one.
    pub ignore_requests: bool,
    /// Further changes by the number of the attempt (the last one repeats).
    pub attempts: Vec<serde_json::Map<String, serde_json::Value>>,
    /// Further changes by the upstream's name.
    pub per_upstream: BTreeMap<String, serde_json::Map<String, serde_json::Value>>,

    /// What happens to a new connection (default script only).
    pub accept: Accept,
    /// How much of the request is read before the answer.
    pub read: Read,
    /// What `Expect: 100-continue` gets (default script or `x-rig` only).
    pub expect: Expect,
    /// Interim (1xx) answers before the head.
    pub interim: Vec<Interim>,
    /// Pause between the end of the request and the head.
    pub delay_ms: u64,

    /// Status; default 200. From 400 up, `body: auto` is the dialect's error.
    pub status: u16,
    /// Headers set (replacing the default of the same name) on the answer.
    pub headers: Vec<(String, String)>,
    /// Default headers left out.
    pub without_headers: Vec<String>,
    /// `Retry-After`, as text.
    pub retry_after: Option<String>,
    /// Message of an error answer or error event.
    pub message: String,
    /// Refuse with `capacity_status` above this many running calls.
    pub capacity: Option<u64>,
    /// Status of a refusal by `capacity`.
    pub capacity_status: u16,
    /// Work on at most this many calls at a time; others wait, unanswered.
    pub slots: Option<u32>,

    /// What the body is.
    pub body: Body,
    /// Tokens generated; default `max_tokens` of the request, else 16.
    pub tokens: Option<u64>,
    /// Time between tokens.
    pub pace_ms: f64,
    /// Pause between head and first event.
    pub first_ms: u64,
    /// Text of each token instead of readable words.
    pub token_text: Option<String>,
    /// Least size of each token's event: the text is padded.
    pub event_bytes: usize,
    /// Tokens of reasoning before the content.
    pub reasoning_tokens: u64,
    /// Tool calls instead of text (chat and messages).
    pub tool_calls: u32,
    /// Usage on the stream.
    pub usage: Usage,
    /// Prompt tokens reported.
    pub prompt_tokens: u64,
    /// First chunk with only a role (chat).
    pub role_chunk: bool,
    /// Send the terminal sentinel (`[DONE]`, `message_stop`).
    pub done: bool,
    /// `finish_reason`; default `stop`, `length` or `tool_calls` as it fits.
    pub finish_reason: Option<String>,
    /// Each token's event carries `"stamp": <ns>` ([`crate::clock`]).
    pub stamp: bool,
    /// An error event after n tokens.
    pub error_at: Option<u64>,
    /// Shape of that error event.
    pub error_shape: ErrorShape,

    /// Comment written before every event.
    pub comment: Option<String>,
    /// Comment written each so many ms of silence after the head.
    pub heartbeat_ms: Option<u64>,
    /// The heartbeat's bytes.
    pub heartbeat: String,
    /// Line ends of events.
    pub line_end: LineEnd,
    /// Line ends after the last event: 2, 1 or 0.
    pub final_newlines: u8,
    /// `data:x` instead of `data: x`.
    pub no_space: bool,
    /// A byte order mark first.
    pub bom: bool,

    /// How the end of the body is marked.
    pub framing: Framing,
    /// How the bytes are cut into writes.
    pub segment: Segment,
    /// Pause between the pieces of one event.
    pub segment_pause_us: u64,
    /// A chunk extension on each chunk.
    pub chunk_extension: bool,
    /// Trailers after the last chunk.
    pub trailers: Vec<(String, String)>,
    /// Compress (flushed per event).
    pub compress: Compress,

    /// A stall on the way.
    pub stall: Option<Stall>,
    /// How it ends.
    pub end: End,
    /// The end comes after this many events, not after all.
    pub end_at: Option<u64>,
    /// The end comes in the middle of an event (half of it is written).
    pub end_mid_event: bool,
    /// Pause before the end (after the last event).
    pub end_delay_ms: u64,
    /// `connection: close` on the answer, closed after it.
    pub close: bool,
    /// What becomes of the connection after the answer, if it is kept.
    pub next: Next,
    /// Idle connections: time until closed.
    pub idle_close_ms: Option<u64>,
    /// Idle connections: time until an unsolicited 408 (then closed).
    pub idle_408_ms: Option<u64>,
    /// `keep-alive: timeout=n` on each answer.
    pub keep_alive_s: Option<u64>,
    /// Small send buffer, so that a slow reader is felt early.
    pub send_buffer: Option<usize>,

    /// What a close by the peer does to the work.
    pub on_close: OnClose,
    /// The same for answers in one piece, where it differs.
    pub on_close_plain: Option<OnClose>,
    /// Status pages (default script only).
    pub pages: Pages,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            id: None,
            name: None,
            ignore_requests: false,
            attempts: Vec::new(),
            per_upstream: BTreeMap::new(),
            accept: Accept::Serve,
            read: Read::All,
            expect: Expect::Continue,
            interim: Vec::new(),
            delay_ms: 0,
            status: 200,
            headers: Vec::new(),
            without_headers: Vec::new(),
            retry_after: None,
            message: "scripted failure".to_owned(),
            capacity: None,
            capacity_status: 503,
            slots: None,
            body: Body::Auto,
            tokens: None,
            pace_ms: 0.0,
            first_ms: 0,
            token_text: None,
            event_bytes: 0,
            reasoning_tokens: 0,
            tool_calls: 0,
            usage: Usage::Auto,
            prompt_tokens: 22,
            role_chunk: true,
            done: true,
            finish_reason: None,
            stamp: false,
            error_at: None,
            error_shape: ErrorShape::Dialect,
            comment: None,
            heartbeat_ms: None,
            heartbeat: ": keep-alive\n\n".to_owned(),
            line_end: LineEnd::Lf,
            final_newlines: 2,
            no_space: false,
            bom: false,
            framing: Framing::Auto,
            segment: Segment::Event,
            segment_pause_us: 0,
            chunk_extension: false,
            trailers: Vec::new(),
            compress: Compress::No,
            stall: None,
            end: End::Clean,
            end_at: None,
            end_mid_event: false,
            end_delay_ms: 0,
            close: false,
            next: Next::Serve,
            idle_close_ms: None,
            idle_408_ms: None,
            keep_alive_s: None,
            send_buffer: None,
            on_close: OnClose::Stop,
            on_close_plain: None,
            pages: Pages::None,
        }
    }
}

impl Script {
    /// Reads a script from JSON text.
    pub fn from_json(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// This script with the fields of `change` put over it.
    pub fn changed(
        &self,
        change: serde_json::Map<String, serde_json::Value>,
    ) -> Result<Self, serde_json::Error> {
        let mut base = serde_json::to_value(self)?;
        if let Some(fields) = base.as_object_mut() {
            fields.extend(change);
        }
        serde_json::from_value(base)
    }

    /// This script as seen by attempt number `attempt` (from 1) at upstream `name`.
    pub(crate) fn resolved(
        self,
        attempt: u32,
        name: Option<&str>,
    ) -> Result<Self, serde_json::Error> {
        let named = name.and_then(|n| self.per_upstream.get(n)).cloned();
        let script = match named {
            Some(change) => self.changed(change)?,
            None => self,
        };
        let index = (attempt.max(1) as usize - 1).min(script.attempts.len().saturating_sub(1));
        match script.attempts.get(index).cloned() {
            Some(change) => script.changed(change),
            None => Ok(script),
        }
    }
}
