//! What an LLM gateway must know of the bytes it carries: event streams, request bodies, token usage, error
//! shapes, model lists. Sans-IO: bytes in, facts out. No socket, no clock, no task.
//!
//! The bytes of a stream are never changed here; the scanner only cuts them where an event ends and tells what it
//! saw. Request edits are splices. What cannot be read is passed on and counted, never a panic.
//!
//! ```
//! use bytes::Bytes;
//! use tidegate_wire::{Dialect, StreamScanner, Terminal};
//!
//! let mut scanner = StreamScanner::new(Dialect::OpenAi, 64 * 1024);
//! scanner.push(Bytes::from_static(b"data: {\"choices\":[{\"delta\":{\"content\":\"Hi\"}}]}\n\ndata: [DO"));
//! let first = scanner.pop().expect("one event is complete");
//! assert!(first.facts.content && scanner.at_boundary());
//! assert!(scanner.pop().is_none(), "the rest needs more bytes");
//! scanner.push(Bytes::from_static(b"NE]\n\n"));
//! let last = scanner.pop().expect("and now it has them");
//! assert_eq!(last.facts.terminal, Some(Terminal::Done));
//! ```

#![forbid(unsafe_code)]
#![warn(missing_docs)]
#![cfg_attr(
    not(test),
    deny(
        clippy::indexing_slicing,
        clippy::string_slice,
        clippy::panic,
        clippy::expect_used,
        clippy::unreachable
    )
)]

mod answer;
mod assemble;
mod envelope;
mod inspect;
mod json;
mod models;
mod pattern;
mod request;
mod shown;
mod sse;
mod stream;
mod text;
mod usage;
mod watch;
mod wrap;

pub use answer::{AnswerFacts, answer_facts};
pub use assemble::{AssembleError, Assembler, Form};
pub use envelope::{ErrorText, error_body, error_event};
pub use models::{
    ModelEntry, ModelsError, anthropic_model_body, anthropic_models_body, model_body, models_body,
    parse_models,
};
pub use request::{Edit, Peek, PeekError, peek, splice};
pub use shown::{ShownError, llama_in_hand, vllm_in_hand};
pub use stream::{Facts, Piece, StreamError, StreamScanner, Terminal};
pub use usage::{Usage, UsageSource};
pub use wrap::{Wrapped, wrap_error};

/// Whose event and error shapes a request speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// Chat, completions, embeddings, and everything else under `/v1`.
    OpenAi,
    /// `/v1/responses`.
    Responses,
    /// `/v1/messages`.
    Anthropic,
}
