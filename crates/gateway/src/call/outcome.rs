//! How a call can end. Closed sets: each call is in exactly one outcome.

use std::time::Duration;

use tidegate_wire::{PeekError, StreamError};

use super::deadline::Tier;
use super::stop::By;
use crate::admission::Shed;

/// What a call was doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    Accepted,
    Body,
    Queued,
    Pool,
    Connecting,
    WaitingHead,
    WaitingFirstEvent,
    Streaming,
    Done,
}

impl Phase {
    const ALL: [Self; 9] = [
        Self::Accepted,
        Self::Body,
        Self::Queued,
        Self::Pool,
        Self::Connecting,
        Self::WaitingHead,
        Self::WaitingFirstEvent,
        Self::Streaming,
        Self::Done,
    ];

    /// Of its number.
    pub fn of(number: u8) -> Self {
        let known = Self::ALL.get(usize::from(number));
        known.copied().unwrap_or(Self::Done)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::Body => "body",
            Self::Queued => "queued",
            Self::Pool => "pool",
            Self::Connecting => "connecting",
            Self::WaitingHead => "waiting_head",
            Self::WaitingFirstEvent => "waiting_first_event",
            Self::Streaming => "streaming",
            Self::Done => "done",
        }
    }
}

/// The one outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The answer was complete.
    Ok,
    /// The upstream answered with an error status, or with an error inside its stream.
    UpstreamError,
    /// The upstream's answer was cut.
    UpstreamTruncated,
    /// The upstream could not be reached, or broke before its answer began.
    UpstreamFailed,
    /// The answer was not what was asked for (JSON for a stream, HTML, …).
    UnexpectedContentType,
    /// The client left.
    ClientClosed,
    /// The client stopped reading.
    ClientStalled,
    /// A tier's limit was reached.
    TimedOut,
    /// The gateway refused the call.
    Refused,
    /// Ended from outside: by the operator, or by the client with the call's id.
    Stopped,
    /// A retry that was given the answer of the call it tries again.
    Attached,
    /// The gateway shut down.
    Drained,
    /// A defect of ours.
    Internal,
    /// The process that had the call was killed; what became of it is not known.
    Lost,
}

impl Outcome {
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::UpstreamError => "upstream_error",
            Self::UpstreamTruncated => "upstream_truncated",
            Self::UpstreamFailed => "upstream_failed",
            Self::UnexpectedContentType => "unexpected_content_type",
            Self::ClientClosed => "client_closed",
            Self::ClientStalled => "client_stalled",
            Self::TimedOut => "timeout",
            Self::Refused => "refused",
            Self::Stopped => "stopped",
            Self::Attached => "attached",
            Self::Drained => "drained",
            Self::Internal => "internal",
            Self::Lost => "lost",
        }
    }
}

/// Why the wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitEnd {
    /// The client has its answer, or the error that was one.
    Answered,
    Left,
    Stalled,
    /// The answer was cut off with an error.
    Failed,
    /// The gateway was killed.
    Unknown,
}

impl WaitEnd {
    pub fn name(self) -> &'static str {
        match self {
            Self::Answered => "answered",
            Self::Left => "left",
            Self::Stalled => "stalled",
            Self::Failed => "failed",
            Self::Unknown => "unknown",
        }
    }
}

/// Why the upstream's work ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkEnd {
    /// It never began.
    None,
    /// The server finished it.
    Complete,
    /// We closed the exchange; the server is held to have stopped after the upstream's `settle` time.
    Cancelled,
    /// The server or the connection failed.
    Failed,
    /// The gateway was killed.
    Unknown,
}

/// How a wait ended.
#[derive(Clone, Copy, Debug)]
pub struct EndedWait {
    pub why: WaitEnd,
    /// After the beginning.
    pub after: Duration,
    /// The call was in it.
    pub phase: Phase,
}

/// How work ended.
#[derive(Clone, Copy, Debug)]
pub struct EndedWork {
    pub why: WorkEnd,
    /// After the beginning.
    pub after: Duration,
}

impl WorkEnd {
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Complete => "complete",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
            Self::Unknown => "unknown",
        }
    }
}

/// How it is known that the upstream's work has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndKnown {
    /// The answer came to its end, or the server failed.
    Seen,
    /// The exchange was closed, and the time of the contract is over.
    Settled,
    /// The exchange was closed, and nothing is known of how this server stops.
    Assumed,
    /// The server's own count showed it before that.
    Confirmed,
    /// The server's own count showed it after that, and until then that it ran on.
    Late,
    /// The server still showed it at the end of `confirm_within`.
    GivenUp,
    /// The operator took the slot back, whatever the server does.
    Killed,
    /// The gateway ended before it was known.
    Unknown,
}

impl EndKnown {
    pub fn name(self) -> &'static str {
        match self {
            Self::Seen => "seen",
            Self::Settled => "settled",
            Self::Assumed => "assumed",
            Self::Confirmed => "confirmed",
            Self::Late => "late",
            Self::GivenUp => "given_up",
            Self::Killed => "killed",
            Self::Unknown => "unknown",
        }
    }
}

/// Why a connection to an endpoint could not be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectFailure {
    Refused,
    Lookup,
    Unreachable,
    Tls,
    /// Of this machine: no descriptor, port or memory for one more. The endpoint has no part in it.
    OutOfSockets,
}

impl ConnectFailure {
    pub fn name(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Lookup => "lookup",
            Self::Unreachable => "unreachable",
            Self::Tls => "tls",
            Self::OutOfSockets => "out_of_sockets",
        }
    }
}

/// Why a request got no answer from an upstream. The front turns each into its status and words.
#[derive(Clone, Debug)]
pub enum Rejection {
    // The request.
    MalformedBody(PeekError),
    BodyTooLarge {
        limit: usize,
    },
    BodyBroken,
    UnknownModel(String),
    NotFound,
    /// A part of the path stands there twice: the client's base URL is too long.
    DoubledPath,
    MethodNotAllowed {
        allow: &'static str,
    },
    BadPath(&'static str),
    /// The handshake of a WebSocket, which would be no call: nobody could see its end.
    WebSocket,
    /// No `Host`, or several.
    BadHost,
    /// Without client keys only names of this machine are served.
    HostNotAllowed,
    KeyMissing,
    KeyUnknown,
    OriginNotAllowed,
    // Load.
    QueueFull {
        retry_after: Duration,
    },
    QueueTimeout {
        retry_after: Duration,
        /// Calls whose clients have gone hold all slots.
        leftovers: bool,
    },
    LeftoverFull {
        retry_after: Duration,
    },
    ShareFull {
        retry_after: Duration,
    },
    Closed,
    BodiesFull,
    /// The answers that are put together fill their memory.
    AnswersFull,
    Draining,
    /// Begun on a connection whose client was told before that it ends.
    ConnectionOver,
    // Waiting and the upstream.
    Timeout(Tier),
    Connect(ConnectFailure),
    /// The connection broke after the request was sent and before an answer began: it may have run.
    Broken,
    /// The answer broke before its first byte was handed on.
    Truncated,
    /// The upstream told of an error inside its stream, of which nothing had been handed on.
    UpstreamFailed(Box<StreamError>),
    /// The answer was to be put together and is too long for that.
    AnswerTooLarge {
        limit: usize,
    },
    UnexpectedContent {
        what: &'static str,
    },
    /// Ended from outside.
    Stopped(By),
    BadCallId,
    NoSuchCall,
    /// A retry asked for its call, and none waits for it.
    NothingToResume,
    /// A newer retry has the answer.
    TakenOver,
    /// Nobody is there to be told.
    Gone,
    Internal,
}

impl From<Shed> for Rejection {
    fn from(shed: Shed) -> Self {
        match shed {
            Shed::QueueFull { retry_after } => Self::QueueFull { retry_after },
            Shed::LeftoverFull { retry_after } => Self::LeftoverFull { retry_after },
            Shed::ShareFull { retry_after } => Self::ShareFull { retry_after },
            Shed::Closed => Self::Closed,
        }
    }
}

impl Rejection {
    /// Bounded name for metrics and the log.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::MalformedBody(_) => "malformed_body",
            Self::BodyTooLarge { .. } => "body_too_large",
            Self::BodyBroken => "body_broken",
            Self::UnknownModel(_) => "unknown_model",
            Self::NotFound | Self::DoubledPath => "not_found",
            Self::MethodNotAllowed { .. } => "method_not_allowed",
            Self::BadPath(_) => "bad_path",
            Self::WebSocket => "websocket",
            Self::BadHost => "bad_host",
            Self::HostNotAllowed => "host_not_allowed",
            Self::KeyMissing => "key_missing",
            Self::KeyUnknown => "key_unknown",
            Self::OriginNotAllowed => "origin_not_allowed",
            Self::QueueFull { .. } => "queue_full",
            Self::QueueTimeout {
                leftovers: true, ..
            } => "leftover_queue",
            Self::QueueTimeout { .. } => "queue",
            Self::LeftoverFull { .. } => "leftover_full",
            Self::ShareFull { .. } => "share_full",
            Self::Closed => "closed",
            Self::BodiesFull => "bodies_full",
            Self::AnswersFull => "answers_full",
            Self::Draining => "draining",
            Self::ConnectionOver => "connection_over",
            Self::Timeout(tier) => tier.name(),
            Self::Connect(failure) => failure.name(),
            Self::Broken => "broken",
            Self::Truncated => "truncated",
            Self::UpstreamFailed(_) => "error_event",
            Self::AnswerTooLarge { .. } => "answer_too_large",
            Self::UnexpectedContent { .. } => "unexpected_content",
            Self::Stopped(by) => by.reason(),
            Self::BadCallId => "bad_call_id",
            Self::NoSuchCall => "no_such_call",
            Self::NothingToResume => "nothing_to_resume",
            Self::TakenOver => "taken_over",
            Self::Gone => "gone",
            Self::Internal => "internal",
        }
    }

    pub fn outcome(&self) -> Outcome {
        match self {
            Self::Timeout(_) | Self::QueueTimeout { .. } => Outcome::TimedOut,
            Self::Connect(ConnectFailure::OutOfSockets) => Outcome::Refused,
            Self::Connect(_) | Self::Broken => Outcome::UpstreamFailed,
            Self::Truncated => Outcome::UpstreamTruncated,
            Self::UpstreamFailed(_) => Outcome::UpstreamError,
            Self::UnexpectedContent { .. } => Outcome::UnexpectedContentType,
            Self::Stopped(_) => Outcome::Stopped,
            Self::Gone => Outcome::ClientClosed,
            Self::Draining => Outcome::Drained,
            Self::Internal => Outcome::Internal,
            _ => Outcome::Refused,
        }
    }
}

impl EndedWait {
    /// The client is gone, or as good as gone.
    pub fn is_left(self) -> bool {
        matches!(self.why, WaitEnd::Left | WaitEnd::Stalled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::upstream::PHASES;

    #[test]
    fn phases_are_counted_under_their_own_names() {
        assert_eq!(Phase::ALL.map(Phase::name), PHASES);
        for (number, phase) in Phase::ALL.into_iter().enumerate() {
            assert_eq!(phase as usize, number);
        }
    }
}
