//! What the client is told of an answer that cannot be completed.

use bytes::Bytes;
use tidegate_wire::{ErrorText, error_event};

use super::Relay;
use crate::call::Id;
use crate::call::outcome::Outcome;

impl Relay {
    pub(super) fn error_event(
        &self,
        outcome: Outcome,
        reason: &str,
        message: &str,
        sequence: Option<u64>,
    ) -> Bytes {
        let id = self.record.as_ref().map(|record| record.id());
        let (kind, anthropic_kind) = match outcome {
            Outcome::TimedOut => ("timeout_error", "timeout_error"),
            Outcome::Stopped => ("call_stopped", "api_error"),
            Outcome::Drained => ("service_unavailable", "overloaded_error"),
            _ => ("upstream_error", "api_error"),
        };
        let text = ErrorText {
            message,
            kind,
            code: Some(reason),
            param: None,
            anthropic_kind,
            request_id: id.as_ref().map(Id::text),
        };
        error_event(self.dialect, &text, sequence)
    }
}
