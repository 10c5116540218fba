//! The words a script is written in.

use serde::{Deserialize, Serialize};

/// What happens to a new connection.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Accept {
    /// Serve it.
    #[default]
    Serve,
    /// Close it at once (FIN).
    Close,
    /// Reset it at once.
    Rst,
    /// Keep it open and never read.
    Hang,
    /// Close the listener: connections are refused from then on.
    Refuse,
}

/// How much of the request is read before the answer.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Read {
    /// All of it.
    #[default]
    All,
    /// Only the head: the answer comes while the body is unread, and the
    /// connection is closed after it (default script or `x-rig` only). As
    /// nothing is read, a peer is seen to leave by RST only.
    Head,
    /// Only the head at first; the body is read while the answer goes out.
    HeadThenBody,
}

/// What becomes of a connection that is kept.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Next {
    /// The next request is served.
    #[default]
    Serve,
    /// Reset when the first byte of the next request comes, unread.
    Rst,
    /// Closed when the first byte of the next request has been read.
    Close,
}

/// What `Expect: 100-continue` gets.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Expect {
    /// `100 Continue` at once.
    #[default]
    Continue,
    /// Nothing: the client has to go on by itself.
    Ignore,
    /// `417` and close.
    Refuse,
}

/// One interim answer.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Interim {
    /// 100, 102, 103.
    pub status: u16,
    /// Its headers.
    #[serde(default)]
    pub headers: Vec<(String, String)>,
    /// Pause after it.
    #[serde(default)]
    pub pause_ms: u64,
}

/// What the body is.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum Body {
    /// By route and the request's `stream`.
    #[default]
    Auto,
    /// `/v1/chat/completions`, streamed.
    ChatStream,
    /// `/v1/chat/completions`, in one piece.
    Chat,
    /// `/v1/completions`, streamed.
    CompletionStream,
    /// `/v1/completions`, in one piece.
    Completion,
    /// `/v1/messages`, streamed.
    AnthropicStream,
    /// `/v1/messages`, in one piece.
    Anthropic,
    /// `/v1/responses`, streamed.
    ResponsesStream,
    /// `/v1/responses`, in one piece.
    Responses,
    /// `/v1/embeddings`.
    Embeddings,
    /// `/v1/models`.
    Models,
    /// `/v1/messages/count_tokens`.
    CountTokens,
    /// Method, path, headers and body length as received.
    Echo,
    /// The dialect's error.
    Error,
    /// A proxy's HTML page.
    Html,
    /// No body bytes.
    Empty,
    /// One `data:` line that never ends.
    EndlessLine,
    /// These bytes, framed as [`framing`](super::Script::framing) says.
    Pieces(Vec<Piece>),
    /// These bytes are the whole answer, head and framing included.
    Wire(Vec<Piece>),
}

/// Some bytes and a pause after them.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct Piece {
    /// As text.
    pub text: Option<String>,
    /// As base64.
    pub b64: Option<String>,
    /// Written so many times.
    pub times: Option<u64>,
    /// Pause after each.
    pub pause_ms: u64,
    /// Each counts as this many tokens.
    pub tokens: u64,
}

impl Piece {
    /// A piece of text without a pause.
    #[must_use]
    pub fn text(text: impl Into<String>) -> Self {
        Self {
            text: Some(text.into()),
            ..Self::default()
        }
    }

    pub(crate) fn bytes(&self) -> Result<Vec<u8>, String> {
        use base64::Engine as _;
        match (&self.text, &self.b64) {
            (Some(text), None) => Ok(text.clone().into_bytes()),
            (None, Some(b64)) => base64::engine::general_purpose::STANDARD
                .decode(b64)
                .map_err(|e| format!("rig: piece is not base64: {e}")),
            (None, None) => Ok(Vec::new()),
            (Some(_), Some(_)) => Err("rig: a piece is either text or b64".to_owned()),
        }
    }
}

/// Usage on the stream.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Usage {
    /// As the request's `stream_options` say; always where the dialect does, and in a whole answer.
    #[default]
    Auto,
    /// Always.
    Yes,
    /// Never.
    No,
    /// On every chunk.
    Continuous,
}

/// Shape of a mid-stream error event.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum ErrorShape {
    /// As the dialect writes it.
    #[default]
    Dialect,
    /// `data: {"error": {…}}`.
    Data,
    /// `data: {"error": "text"}`.
    DataText,
    /// `event: error` and a JSON object.
    Event,
    /// `event: error` and plain text.
    EventText,
    /// Error next to `choices` with `finish_reason: "error"`.
    Choices,
    /// Not JSON.
    Garbage,
}

/// Line ends of events.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum LineEnd {
    /// `\n`
    #[default]
    Lf,
    /// `\r\n`
    Crlf,
    /// `\r`
    Cr,
    /// In turn, by event.
    Mixed,
}

/// How the end of the body is marked.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Framing {
    /// Streams chunked, others with a length.
    #[default]
    Auto,
    /// Chunked.
    Chunked,
    /// `content-length`.
    Length,
    /// By the close of the connection.
    Close,
    /// HTTP/1.0, by the close of the connection.
    Http10,
    /// `content-length` and chunked at once (ambiguous).
    Both,
}

/// How the bytes are cut into writes.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Segment {
    /// One write (one chunk) per event.
    #[default]
    Event,
    /// One byte per write and chunk.
    Byte,
    /// Head and body in one write.
    Once,
    /// So many bytes per write and chunk.
    Size(usize),
    /// Cut at these positions of the body, one event per write otherwise.
    CutAt(Vec<u64>),
    /// Framed per event, but written in pieces of so many bytes: chunk-size
    /// lines are cut as well.
    Wire(usize),
    /// So many events per write and chunk.
    Events(u64),
}

/// Compression of the body.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Compress {
    /// None.
    #[default]
    No,
    /// If the request accepts gzip.
    IfAccepted,
    /// Always.
    Gzip,
}

/// A stall: silence with the socket open.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Stall {
    /// Where.
    pub at: StallAt,
    /// How long; without, for ever.
    #[serde(default)]
    pub ms: Option<u64>,
}

/// Where a stall is.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum StallAt {
    /// Before the head.
    Head,
    /// After the status line and one header line.
    HeaderLine,
    /// After so many events.
    Event(u64),
    /// In the middle of event number n.
    MidEvent(u64),
    /// After the name line (or the first line end) of event number n.
    MidLines(u64),
    /// Inside the chunk-size line of event number n.
    ChunkSize(u64),
    /// After the last event, before the terminator.
    Terminator,
}

/// How it ends.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// Properly.
    #[default]
    Clean,
    /// FIN without the terminator.
    Fin,
    /// RST.
    Rst,
    /// All events, then open for ever without the terminator.
    Hang,
    /// Tokens without end.
    Never,
    /// FIN with the declared length not reached.
    ShortLength,
    /// A chunk size that is no number.
    BadChunk,
    /// A proper end, followed by surplus bytes that look like an answer.
    Extra,
}

/// What a close by the peer does to the work.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum OnClose {
    /// It stops at once.
    #[default]
    Stop,
    /// It stops so many ms later.
    LateMs(u64),
    /// It stops after so many more tokens. One that waits for a slot still
    /// gets it.
    AfterTokens(u64),
    /// It stops with the step that is under way: the prompt's, or one token's.
    /// One that waits for a slot is forgotten at once.
    Step,
    /// The close is looked for each so many ms.
    PollMs(u64),
    /// It runs on to its planned end, the connection open all the while.
    Never,
    /// It looks like one that stops: the connection is closed at once, and
    /// [`Pages`] show nothing. It runs on to its planned end.
    Bills,
}

impl OnClose {
    /// Tokens made after the peer has left, where that ends the work.
    pub(crate) fn tokens_left(self) -> Option<u64> {
        match self {
            Self::AfterTokens(n) => Some(n),
            Self::Step => Some(0),
            _ => None,
        }
    }
}

/// Whose status pages are served beside the control paths.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Pages {
    /// Nobody's.
    #[default]
    None,
    /// vLLM's `/metrics` and `/health`.
    Vllm,
    /// llama.cpp's `/metrics`, `/slots` and `/health`.
    LlamaCpp,
}
