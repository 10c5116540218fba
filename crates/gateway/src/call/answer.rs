//! From the response head to the first byte downstream: what came, what the client gets, and whether there is still a way back.
//!
//! The head is held back until the first event is there (streams) or the body is complete (short answers), for at most [`COMMIT_HOLD`]: until
//! then a failure can still have its true status. After that the 200 stands, and a later failure is told inside the stream.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{
    CACHE_CONTROL, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderName,
    HeaderValue, TRANSFER_ENCODING,
};
use http::{StatusCode, response};
use tidegate_wire::{Form, Piece, StreamScanner, Wrapped, answer_facts, wrap_error};
use tokio::time::Instant;

use super::aftermath::{self, Running};
use super::attempt::Exchange;
use super::body::OutBody;
use super::deadline::{Patience, Tier};
use super::downstream::{Downstream, Reader};
use super::outcome::{Outcome, Phase, Rejection, WaitEnd, WorkEnd};
use super::relay::{Relay, Unstarted};
use super::settle::Record;
use super::source::Source;
use super::wish::Wish;
use super::{Generation, Held, ModelIn, RouteFacts, Step, Worker, assembled, headers};
use crate::upstream::Upstream;

/// How long a head waits for the body that proves it. Long enough for a server that fails right after its head, short enough that
/// no balancer or person notices.
pub const COMMIT_HOLD: Duration = Duration::from_millis(250);
/// A body that is complete by then and no longer than this is handed on in one piece.
const WHOLE_BYTES: usize = 256 * 1024;
/// Longest that an error's body may take; its status is already known and matters more.
const ERROR_BODY_TIME: Duration = Duration::from_secs(5);

/// Said in place of an error that cannot be read.
static UNREADABLE: Bytes = Bytes::from_static(
    b"the model server's error came compressed, which was not asked for; its words are in its own log",
);

const X_ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");
/// On an answer that took more than one attempt: how many.
const ATTEMPTS: HeaderName = HeaderName::from_static("x-tidegate-attempts");

/// Status and fields that go downstream; framing is added by hyper.
#[derive(Clone, Debug)]
pub struct Head {
    pub status: StatusCode,
    pub headers: HeaderMap,
}

/// What the front sends.
#[derive(Debug)]
pub struct Answer {
    pub head: Head,
    pub body: OutBody,
}

/// What the way from head to commit acts on.
#[derive(Debug)]
pub struct Commit<'a> {
    pub worker: &'a Arc<Worker>,
    pub generation: &'a Arc<Generation>,
    pub upstream: &'a Arc<Upstream>,
    pub patience: &'a Patience,
    pub route: RouteFacts,
    pub wish: Wish,
    pub downstream: Arc<Downstream>,
    pub reader: Arc<Reader>,
}

/// Decides how the answer goes on. On an error everything that was held has been given back.
pub(super) async fn begin(
    commit: Commit<'_>,
    exchange: Exchange,
    held: Held,
    record: &mut Record,
) -> Result<Step, Rejection> {
    let Exchange {
        head,
        body,
        in_flight,
        keep_idle,
        ..
    } = exchange;
    record.head();
    let mut running = Running::new(body, held, in_flight, keep_idle, &commit);
    running.is_error = !head.status.is_success();
    let begun = if is_framed_twice(&head.headers) {
        Err(Rejection::UnexpectedContent {
            what: "an answer whose length can be read in two ways",
        })
    } else if head.status.is_success() {
        success(&commit, &head, &mut running, record).await
    } else {
        refused(&commit, &head, &mut running, record).await
    };
    record.left(running.attendance());
    match begun {
        Ok(Begun::Whole(head, bytes)) => {
            record.status(head.status.as_u16());
            record.sent_downstream(bytes.len());
            record.outcome(Outcome::Ok, None);
            let writer = running.attendance_mut().take_writer();
            running.ended(WorkEnd::Complete, record);
            record.wait_ended(WaitEnd::Answered);
            record.phase(Phase::Done);
            Ok(Step::Answered(Box::new(head), bytes, writer))
        }
        Ok(Begun::Flowing(head, source)) => {
            record.status(head.status.as_u16());
            record.phase(if record.has_first_byte() {
                Phase::Streaming
            } else {
                Phase::WaitingFirstEvent
            });
            let relay = Unstarted::new(&commit, running, source);
            Ok(Step::Relaying(Box::new(head), Box::new(relay)))
        }
        Err(rejection) => {
            aftermath::gave_up(running, &rejection, record);
            Err(rejection)
        }
    }
}

/// Two servers on the way may disagree where such an answer ends (RFC 9112 §6.3).
fn is_framed_twice(headers: &HeaderMap) -> bool {
    headers.contains_key(TRANSFER_ENCODING) && headers.contains_key(CONTENT_LENGTH)
}

enum Begun {
    Whole(Head, Bytes),
    Flowing(Head, Source),
}

async fn success(
    commit: &Commit<'_>,
    head: &response::Parts,
    running: &mut Running,
    record: &mut Record,
) -> Result<Begun, Rejection> {
    record.phase(Phase::WaitingFirstEvent);
    let kind = content_kind(&head.headers);
    let encoded = is_encoded(&head.headers);
    if kind == ContentKind::Html && commit.route.model == ModelIn::Body {
        record.outcome(Outcome::UnexpectedContentType, Some("html"));
        return Err(Rejection::UnexpectedContent {
            what: "an HTML page",
        });
    }
    let events = kind == ContentKind::Events || (commit.wish.stream && kind != ContentKind::Html);
    if encoded || !events || is_head_only(head) {
        return plain(commit, head, running, record).await;
    }
    if let Some(form) = commit.wish.assemble {
        let bytes = assembled::gather(commit, form, running, record).await?;
        let mut out = out_head(commit, head, record);
        whole_answer_headers(&mut out.headers, form);
        return Ok(Begun::Whole(out, bytes));
    }
    stream(commit, head, kind, running, record).await
}

/// An answer that is passed on as bytes.
async fn plain(
    commit: &Commit<'_>,
    head: &response::Parts,
    running: &mut Running,
    record: &mut Record,
) -> Result<Begun, Rejection> {
    let mut gathered = Vec::new();
    let gathering = gather(commit, running, record, WHOLE_BYTES, &mut gathered).await?;
    let out = out_head(commit, head, record);
    if !gathering.complete {
        record.outcome_if_plain(commit.wish.stream);
        return Ok(Begun::Flowing(
            out,
            Source::plain(gathered, running.exact_length(), is_json(&head.headers)),
        ));
    }
    let bytes = join(gathered);
    if ends_with_connection(head) && is_json(&head.headers) && !is_whole_json(&bytes) {
        return Err(Rejection::Truncated);
    }
    let facts = answer_facts(commit.route.dialect, &bytes);
    if let Some(usage) = &facts.usage {
        record.meter.report(usage);
    }
    if facts.is_error {
        record.outcome(Outcome::UpstreamError, Some("error_in_200"));
        return Ok(Begun::Whole(out, commit.upstream.mask.hide(bytes)));
    }
    Ok(Begun::Whole(out, bytes))
}

/// An answer that is a stream of events, or ought to be one.
async fn stream(
    commit: &Commit<'_>,
    head: &response::Parts,
    kind: ContentKind,
    running: &mut Running,
    record: &mut Record,
) -> Result<Begun, Rejection> {
    let mut scanner = StreamScanner::new(
        commit.route.dialect,
        commit.generation.config.limits.event_bytes,
    );
    let first_event = commit.upstream.settings.timeouts.first_event;
    let hold = Instant::now() + COMMIT_HOLD;
    let mut first: Option<Piece> = None;
    let mut seen_any = false;
    while first.is_none() {
        let sniffed = kind == ContentKind::Events || seen_any;
        let (limit, held) = match hold.checked_duration_since(Instant::now()) {
            // Before the first byte of a mislabelled body nothing is known about it: the hold does not end there.
            Some(left) if sniffed => (left.min(first_event), left < first_event),
            None if sniffed => break,
            _ => (first_event, false),
        };
        let frame = match running
            .next(commit.patience, Tier::FirstEvent, limit, record)
            .await
        {
            Err(Rejection::Timeout(Tier::FirstEvent)) if held => break,
            other => other?,
        };
        let data = match frame {
            Some(Ok(data)) => data,
            Some(Err(_)) => return Err(Rejection::Truncated),
            None => {
                first = scanner.finish();
                break;
            }
        };
        record.first_byte();
        if !seen_any && kind != ContentKind::Events && !looks_like_events(&data) {
            record.outcome(Outcome::UnexpectedContentType, Some("not_a_stream"));
            return Err(Rejection::UnexpectedContent {
                what: "something else than the event stream that was asked for",
            });
        }
        seen_any = true;
        scanner.push(data);
        first = scanner.pop();
    }
    if first.is_none() && running.is_complete() {
        return Err(Rejection::Truncated);
    }
    let mut out = out_head(commit, head, record);
    event_stream_headers(&mut out.headers);
    Ok(Begun::Flowing(
        out,
        Source::events(scanner, first, commit.wish.strip_usage),
    ))
}

/// Any status but success: the upstream's own words, in a shape that the client's SDK can read.
async fn refused(
    commit: &Commit<'_>,
    head: &response::Parts,
    running: &mut Running,
    record: &mut Record,
) -> Result<Begun, Rejection> {
    if head.status.is_redirection() && head.status != StatusCode::NOT_MODIFIED {
        return Err(Rejection::UnexpectedContent {
            what: "a redirect, which the gateway does not follow",
        });
    }
    record.outcome_if_awaited(Outcome::UpstreamError, status_class(head.status));
    let limit = commit.generation.config.limits.error_body_bytes;
    let mut gathered = Vec::new();
    // Later than the hold inside: what has begun goes on; only a body without a byte is given up here.
    let gathering = tokio::time::timeout(
        ERROR_BODY_TIME + COMMIT_HOLD,
        gather(commit, running, record, limit, &mut gathered),
    )
    .await;
    let complete = match gathering {
        Ok(Ok(gathering)) => gathering.complete || gathering.broken,
        Ok(Err(rejection @ (Rejection::Gone | Rejection::Draining))) => return Err(rejection),
        Ok(Err(_)) | Err(_) => true,
    };
    let mut out = out_head(commit, head, record);
    // In one piece: a key may lie across two.
    let mask = &commit.upstream.mask;
    let bytes = mask.hide(join(gathered));
    if is_encoded(&head.headers) && !mask.is_empty() {
        // Nobody asked for that, and whether the key is in it cannot be seen.
        out.headers.remove(CONTENT_ENCODING);
        return Ok(in_our_words(commit, out, None, &UNREADABLE));
    }
    if !complete {
        return Ok(Begun::Flowing(
            out,
            Source::plain(vec![bytes], running.exact_length(), is_json(&head.headers)),
        ));
    }
    let content_type = head.headers.get(CONTENT_TYPE).and_then(|v| v.to_str().ok());
    if head.headers.contains_key(CONTENT_ENCODING) || head.status == StatusCode::NOT_MODIFIED {
        return Ok(Begun::Whole(out, bytes));
    }
    Ok(in_our_words(commit, out, content_type, &bytes))
}

/// An error in the dialect's shape, if it is not in that already.
fn in_our_words(
    commit: &Commit<'_>,
    mut out: Head,
    content_type: Option<&str>,
    bytes: &Bytes,
) -> Begun {
    let status = out.status.as_u16();
    match wrap_error(commit.route.dialect, status, content_type, bytes) {
        Wrapped::AsIs => Begun::Whole(out, bytes.clone()),
        Wrapped::Replaced(bytes) => {
            let json = HeaderValue::from_static("application/json");
            out.headers.insert(CONTENT_TYPE, json);
            Begun::Whole(out, bytes)
        }
    }
}

struct Gathering {
    complete: bool,
    /// Cut by an error; what came before it is there.
    broken: bool,
}

/// Reads until the body is complete, too long, or not there in time. Success bodies that break are an error; see `refused` for the others.
async fn gather(
    commit: &Commit<'_>,
    running: &mut Running,
    record: &mut Record,
    limit: usize,
    gathered: &mut Vec<Bytes>,
) -> Result<Gathering, Rejection> {
    let silence = commit.upstream.settings.timeouts.silence;
    // An error's shape matters more than its first byte.
    let hold = if running.is_error {
        ERROR_BODY_TIME
    } else {
        COMMIT_HOLD
    };
    let hold = Instant::now() + hold;
    let mut length = 0;
    loop {
        // The first byte may take its time: nothing has been promised yet, and a status is worth more than an early head.
        let (limit_now, held) = if gathered.is_empty() {
            (silence, false)
        } else if running.is_complete() {
            return Ok(Gathering {
                complete: true,
                broken: false,
            });
        } else {
            let left = hold.saturating_duration_since(Instant::now());
            (left.min(silence), left < silence)
        };
        let frame = match running
            .next(commit.patience, Tier::Silence, limit_now, record)
            .await
        {
            Err(Rejection::Timeout(Tier::Silence)) if held => {
                return Ok(Gathering {
                    complete: false,
                    broken: false,
                });
            }
            other => other?,
        };
        match frame {
            None => {
                return Ok(Gathering {
                    complete: true,
                    broken: false,
                });
            }
            Some(Ok(data)) => {
                record.first_byte();
                length += data.len();
                gathered.push(data);
            }
            Some(Err(_)) if running.is_error => {
                return Ok(Gathering {
                    complete: false,
                    broken: true,
                });
            }
            Some(Err(_)) => return Err(Rejection::Truncated),
        }
        if length > limit {
            return Ok(Gathering {
                complete: false,
                broken: false,
            });
        }
    }
}

fn join(mut frames: Vec<Bytes>) -> Bytes {
    if frames.len() <= 1 {
        return frames.pop().unwrap_or_default();
    }
    let mut joined = BytesMut::with_capacity(frames.iter().map(Bytes::len).sum());
    frames
        .iter()
        .for_each(|frame| joined.extend_from_slice(frame));
    joined.freeze()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ContentKind {
    Events,
    Html,
    Other,
}

fn content_kind(headers: &HeaderMap) -> ContentKind {
    let value = headers
        .get(CONTENT_TYPE)
        .map(|v| v.as_bytes().to_ascii_lowercase())
        .unwrap_or_default();
    let essence = value
        .split(|b| *b == b';')
        .next()
        .unwrap_or_default()
        .trim_ascii();
    match essence {
        b"text/event-stream" => ContentKind::Events,
        b"text/html" | b"application/xhtml+xml" => ContentKind::Html,
        _ => ContentKind::Other,
    }
}

/// HTTP says nothing of where such a body ends: a server that died looks like one that is done.
fn ends_with_connection(head: &response::Parts) -> bool {
    let framed =
        head.headers.contains_key(CONTENT_LENGTH) || head.headers.contains_key(TRANSFER_ENCODING);
    !framed && head.version < http::Version::HTTP_2
}

fn is_encoded(headers: &HeaderMap) -> bool {
    let encoding = headers.get(CONTENT_ENCODING);
    encoding.is_some_and(|v| !v.as_bytes().eq_ignore_ascii_case(b"identity"))
}

fn is_whole_json(bytes: &[u8]) -> bool {
    serde_json::from_slice::<serde::de::IgnoredAny>(bytes).is_ok()
}

fn is_json(headers: &HeaderMap) -> bool {
    let value = headers
        .get(CONTENT_TYPE)
        .map(|v| v.as_bytes().to_ascii_lowercase());
    value.is_some_and(|v| memchr::memmem::find(&v, b"json").is_some())
}

/// A mislabelled stream still begins like one: with a field name, a comment or an empty line.
fn looks_like_events(start: &[u8]) -> bool {
    let start = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(start);
    [&b"data"[..], b"event", b"id:", b"retry", b":", b"\n", b"\r"]
        .iter()
        .any(|field| {
            let common = field.len().min(start.len());
            common > 0 && start.get(..common) == field.get(..common)
        })
}

fn status_class(status: StatusCode) -> &'static str {
    match status.as_u16() {
        429 => "status_429",
        400..=499 => "status_4xx",
        500..=599 => "status_5xx",
        _ => "status_other",
    }
}

fn out_head(commit: &Commit<'_>, head: &response::Parts, record: &Record) -> Head {
    let mut headers = headers::to_downstream(&head.headers);
    commit.upstream.mask.hide_in(&mut headers);
    if record.attempts() > 1 {
        headers.insert(ATTEMPTS, HeaderValue::from(record.attempts()));
    }
    Head {
        status: head.status,
        headers,
    }
}

/// What keeps proxies on the way from holding events back. The upstream's own wishes are kept where they say the same.
fn event_stream_headers(headers: &mut HeaderMap) {
    if content_kind(headers) != ContentKind::Events {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    }
    let uncached = headers.get(CACHE_CONTROL).is_some_and(|v| {
        v.to_str()
            .is_ok_and(|v| v.contains("no-cache") || v.contains("no-store"))
    });
    if !uncached {
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    }
    headers.insert(X_ACCEL_BUFFERING, HeaderValue::from_static("no"));
}

/// What a stream's head says and a whole answer's does not.
fn whole_answer_headers(headers: &mut HeaderMap, form: Form) {
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(form.content_type()));
    headers.remove(CACHE_CONTROL);
    headers.remove(X_ACCEL_BUFFERING);
}

/// 204 and the like have no body to look at.
fn is_head_only(head: &response::Parts) -> bool {
    head.status == StatusCode::NO_CONTENT || head.status == StatusCode::RESET_CONTENT
}

impl Answer {
    pub fn whole(head: Head, bytes: Bytes) -> Self {
        Self {
            head,
            body: OutBody::whole(bytes),
        }
    }

    pub fn relaying(head: Head, relay: Relay) -> Self {
        Self {
            head,
            body: OutBody::relay(Box::new(relay)),
        }
    }
}
