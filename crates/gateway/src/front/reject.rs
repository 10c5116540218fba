//! The one place that writes error responses.
//!
//! Each rejection has a status that SDKs act on rightly (400–422 are final; 408, 429 and 5xx are tried again), words that say what to do, and
//! where trying again makes sense a `retry-after` between 1 and 60 s. `x-tidegate-started` says whether work may have begun upstream, so that
//! a caller knows whether a retry can double it.

use std::borrow::Cow;
use std::time::Duration;

use http::StatusCode;
use tidegate_wire::{Dialect, ErrorText, StreamError, error_body};

use crate::call::Rejection;
use crate::call::answer::Answer;
use crate::call::deadline::Tier;
use crate::call::outcome::ConnectFailure;
use crate::fields::Field;

/// Status and the dialects' words for it.
struct Sort {
    status: StatusCode,
    /// OpenAI's `type`.
    kind: &'static str,
    /// Anthropic's `type`.
    anthropic_kind: &'static str,
}

const INVALID: &str = "invalid_request_error";

#[expect(clippy::too_many_lines, reason = "one arm per sort, nothing else")]
fn sort(rejection: &Rejection) -> Sort {
    let (status, kind, anthropic_kind) = match rejection {
        Rejection::MalformedBody(_)
        | Rejection::BodyBroken
        | Rejection::BadPath(_)
        | Rejection::BadHost => (StatusCode::BAD_REQUEST, INVALID, INVALID),
        Rejection::BodyTooLarge { .. } => {
            (StatusCode::PAYLOAD_TOO_LARGE, INVALID, "request_too_large")
        }
        Rejection::BadCallId => (StatusCode::BAD_REQUEST, INVALID, INVALID),
        // Not one of those that SDKs try again: it would begin anew what somebody has ended.
        Rejection::Stopped(_) => (StatusCode::GONE, "call_stopped", "api_error"),
        Rejection::NothingToResume => (StatusCode::GONE, INVALID, INVALID),
        Rejection::TakenOver => (StatusCode::CONFLICT, INVALID, INVALID),
        Rejection::UnknownModel(_)
        | Rejection::NotFound
        | Rejection::DoubledPath
        | Rejection::NoSuchCall => (StatusCode::NOT_FOUND, INVALID, "not_found_error"),
        Rejection::MethodNotAllowed { .. } => (StatusCode::METHOD_NOT_ALLOWED, INVALID, INVALID),
        Rejection::WebSocket => (StatusCode::NOT_IMPLEMENTED, INVALID, INVALID),
        Rejection::KeyMissing | Rejection::KeyUnknown => (
            StatusCode::UNAUTHORIZED,
            "authentication_error",
            "authentication_error",
        ),
        Rejection::OriginNotAllowed | Rejection::HostNotAllowed => (
            StatusCode::FORBIDDEN,
            "permission_error",
            "permission_error",
        ),
        Rejection::QueueFull { .. }
        | Rejection::QueueTimeout { .. }
        | Rejection::LeftoverFull { .. }
        | Rejection::ShareFull { .. }
        | Rejection::BodiesFull
        | Rejection::AnswersFull
        | Rejection::Connect(ConnectFailure::OutOfSockets) => (
            StatusCode::SERVICE_UNAVAILABLE,
            "overloaded_error",
            "overloaded_error",
        ),
        Rejection::Closed | Rejection::Draining | Rejection::ConnectionOver => (
            StatusCode::SERVICE_UNAVAILABLE,
            "service_unavailable",
            "overloaded_error",
        ),
        Rejection::Timeout(Tier::RequestHead | Tier::RequestBody) => (
            StatusCode::REQUEST_TIMEOUT,
            "timeout_error",
            "timeout_error",
        ),
        Rejection::Timeout(_) => (
            StatusCode::GATEWAY_TIMEOUT,
            "timeout_error",
            "timeout_error",
        ),
        Rejection::UpstreamFailed(error) => return failed(error),
        Rejection::Connect(_)
        | Rejection::Broken
        | Rejection::Truncated
        | Rejection::AnswerTooLarge { .. }
        | Rejection::UnexpectedContent { .. } => {
            (StatusCode::BAD_GATEWAY, "upstream_error", "api_error")
        }
        // Nobody reads this one; the number is the field's custom.
        Rejection::Gone => (
            StatusCode::from_u16(499).unwrap_or(StatusCode::BAD_REQUEST),
            INVALID,
            INVALID,
        ),
        Rejection::Internal => (
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal_error",
            "api_error",
        ),
    };
    Sort {
        status,
        kind,
        anthropic_kind,
    }
}

/// The status that a server would have answered with, had its error come before its stream. Where it does not say, it failed.
fn failed(error: &StreamError) -> Sort {
    let code = error.code.as_deref().and_then(|code| code.parse().ok());
    let told = code
        .and_then(|code| StatusCode::from_u16(code).ok())
        .filter(|status| status.is_client_error() || status.is_server_error());
    let (status, kind, anthropic_kind) = match (error.kind.as_deref(), told) {
        (Some("rate_limit_error" | "rate_limit_exceeded"), _)
        | (_, Some(StatusCode::TOO_MANY_REQUESTS)) => (
            StatusCode::TOO_MANY_REQUESTS,
            "rate_limit_error",
            "rate_limit_error",
        ),
        (Some("overloaded_error"), _) => (
            StatusCode::SERVICE_UNAVAILABLE,
            "overloaded_error",
            "overloaded_error",
        ),
        (Some(INVALID), None) => (StatusCode::BAD_REQUEST, INVALID, INVALID),
        (_, Some(status)) if status.is_client_error() => (status, INVALID, INVALID),
        (_, Some(status)) => (status, "upstream_error", "api_error"),
        (_, None) => (StatusCode::BAD_GATEWAY, "upstream_error", "api_error"),
    };
    Sort {
        status,
        kind,
        anthropic_kind,
    }
}

fn message(rejection: &Rejection) -> Cow<'static, str> {
    match rejection {
        Rejection::MalformedBody(error) => {
            let why = error.to_string();
            let whole = why.starts_with("the request body");
            if whole { why } else { format!("the request body cannot be used: {why}") }.into()
        }
        Rejection::BodyTooLarge { limit } => format!("the request body is larger than {limit} bytes; send less, or raise limits.request_body").into(),
        Rejection::BodyBroken => "the request body broke off or is not framed properly".into(),
        Rejection::BadPath(why) => format!("the path cannot be used: {why}").into(),
        Rejection::WebSocket => "WebSockets (the Realtime API) are not passed on: use a route that streams over HTTP, /v1/responses or /v1/chat/completions, or connect to the model server itself".into(),
        Rejection::BadHost => "HTTP/1.1 needs exactly one Host field".into(),
        Rejection::HostNotAllowed => "without client keys only requests to localhost or a loopback address are served, not to this Host; add [[keys]], or say server.allow_unauthenticated = true, or list the page's origin in cors.origins".into(),
        Rejection::UnknownModel(model) => format!("the model `{model}` does not exist here; GET /v1/models lists those that do").into(),
        Rejection::NotFound => "there is nothing at this path; the base URL of an OpenAI client ends in /v1, that of an Anthropic client does not; health and metrics are on the admin port".into(),
        Rejection::DoubledPath => "a part of this path stands there twice, so the client's base URL is too long: take `/v1` off it for an Anthropic client; for an OpenAI client let it end in /v1, without a route behind it".into(),
        Rejection::MethodNotAllowed { allow } => format!("this path takes {allow}").into(),
        Rejection::KeyMissing => "no API key was sent; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`".into(),
        Rejection::KeyUnknown => "the API key is not valid here".into(),
        Rejection::OriginNotAllowed => "pages of this origin may not use the gateway; list it in cors.origins, or use client keys".into(),
        Rejection::QueueFull { .. } => "all slots are taken and the queue is full; try again later".into(),
        Rejection::QueueTimeout { leftovers: true, .. } => "no slot became free in time: calls whose clients have gone hold them all; nothing was started; try again later".into(),
        Rejection::QueueTimeout { .. } => "no slot became free in time; nothing was started; try again later".into(),
        Rejection::LeftoverFull { .. } => "abandoned calls hold the slots; try again later".into(),
        Rejection::ShareFull { .. } => "calls of this key hold as many slots or places as one key may, abandoned ones among them; try again later".into(),
        Rejection::BodiesFull => "too many request bytes are in memory already; try again later".into(),
        Rejection::AnswersFull => "too many bytes of answers are in memory already, waiting for clients that read slowly; try again later, or ask with `\"stream\": true`".into(),
        Rejection::Closed | Rejection::Draining => "the gateway is shutting down; try again, another one will answer".into(),
        Rejection::ConnectionOver => "the gateway has ended this connection (GOAWAY); send the request again, on another".into(),
        Rejection::Timeout(tier) => tier.message().into(),
        Rejection::Connect(ConnectFailure::Refused) => "the model server refuses connections; nothing was started".into(),
        Rejection::Connect(ConnectFailure::Lookup) => "the model server's name cannot be resolved; nothing was started".into(),
        Rejection::Connect(ConnectFailure::OutOfSockets) => "the gateway has no descriptor or port left for one more connection; nothing was started; try again later".into(),
        Rejection::Connect(ConnectFailure::Unreachable) => "the model server cannot be reached; nothing was started".into(),
        Rejection::Connect(ConnectFailure::Tls) => "the TLS handshake with the model server failed; nothing was started".into(),
        Rejection::Broken => "the connection to the model server broke before it answered; the request may have run".into(),
        Rejection::Truncated => "the model server's answer broke off".into(),
        Rejection::UpstreamFailed(error) => format!("the model server failed in the middle of its answer: {}", error.message).into(),
        Rejection::AnswerTooLarge { limit } => format!("the model server's answer is longer than {limit} bytes; ask with `\"stream\": true`, or raise limits.assembled").into(),
        Rejection::UnexpectedContent { what } => format!("the model server sent {what}").into(),
        Rejection::Stopped(by) => by.message().into(),
        Rejection::BadCallId => "x-tidegate-call cannot be used: send one, of 1 to 64 letters, digits and - _ . :".into(),
        Rejection::NoSuchCall => "no call of this key with this id is running".into(),
        Rejection::NothingToResume => "there is no call to resume: it is over, its time for that is up, or this request is not the same (key, Idempotency-Key, path and body); send it without x-tidegate-resume to begin a new one".into(),
        Rejection::TakenOver => "a newer retry of this request has its answer".into(),
        Rejection::Gone => "the client has gone".into(),
        Rejection::Internal => "the gateway failed; this is a defect, please report it with the request id".into(),
    }
}

/// What was tried last reached no server, and what was tried before it provably neither.
fn reached_nobody(rejection: &Rejection) -> bool {
    matches!(
        rejection,
        Rejection::Connect(_) | Rejection::Timeout(Tier::Pool | Tier::Connect | Tier::Tls)
    )
}

fn retry_after(rejection: &Rejection) -> Option<Duration> {
    match rejection {
        Rejection::QueueFull { retry_after }
        | Rejection::QueueTimeout { retry_after, .. }
        | Rejection::LeftoverFull { retry_after }
        | Rejection::ShareFull { retry_after } => Some(*retry_after),
        Rejection::Closed
        | Rejection::Draining
        | Rejection::ConnectionOver
        | Rejection::BodiesFull
        | Rejection::AnswersFull => Some(Duration::from_secs(1)),
        Rejection::Connect(_) | Rejection::Timeout(Tier::Connect | Tier::Tls | Tier::Pool) => {
            Some(Duration::from_secs(2))
        }
        _ => None,
    }
}

/// The response, in the words of `dialect`. `may_have_run`: something of the request was sent upstream, by itself or by the call that it
/// tries again.
pub fn respond(rejection: &Rejection, dialect: Dialect, id: &str, may_have_run: bool) -> Answer {
    let Sort {
        status,
        kind,
        anthropic_kind,
    } = sort(rejection);
    let code = match rejection {
        Rejection::UnknownModel(_) => "model_not_found",
        Rejection::KeyMissing | Rejection::KeyUnknown => "invalid_api_key",
        other => other.reason(),
    };
    let param = match rejection {
        Rejection::UnknownModel(_) => Some("model"),
        Rejection::MalformedBody(error) => error.param,
        _ => None,
    };
    let message = message(rejection);
    let text = ErrorText {
        message: &message,
        kind,
        code: Some(code),
        param,
        anthropic_kind,
        request_id: Some(id),
    };
    let mut answer = Answer::json(status, error_body(dialect, &text));
    let fields = &mut answer.head.fields;
    let started = may_have_run && !reached_nobody(rejection);
    fields.append(Field::XTidegateStarted, started.to_string());
    if let Some(wait) = retry_after(rejection) {
        let seconds = wait.as_secs_f64().ceil().clamp(1.0, 60.0) as u64;
        fields.append(Field::RetryAfter, seconds.to_string());
    }
    let again = [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS];
    let comes_again = matches!(
        rejection,
        Rejection::AnswerTooLarge { .. } | Rejection::WebSocket
    );
    if comes_again || (status.is_client_error() && !again.contains(&status)) {
        fields.append(Field::XShouldRetry, "false");
    }
    if let Rejection::MethodNotAllowed { allow } = rejection {
        fields.append(Field::Allow, allow);
    }
    if closes(rejection) {
        fields.append(Field::Connection, "close");
    }
    answer
}

/// After these the connection's input is not at the beginning of a request.
fn closes(rejection: &Rejection) -> bool {
    matches!(
        rejection,
        Rejection::BodyTooLarge { .. }
            | Rejection::BodyBroken
            | Rejection::BadHost
            | Rejection::Timeout(Tier::RequestBody)
            | Rejection::Draining
            | Rejection::Closed
    )
}
