//! From the response head to the first byte downstream: what came, what the client gets, and whether there is still a way back.
//!
//! The head is held back until the first event is there (streams) or the body is complete (short answers), for at most [`COMMIT_HOLD`]: until
//! then a failure can still have its true status. After that the 200 stands, and a later failure is told inside the stream.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{Response, StatusCode};
use tidegate_wire::{Form, Piece, StreamScanner, Wrapped, answer_facts, wrap_error};
use tokio::time::Instant;

use super::aftermath::{self, Running};
use super::body::OutBody;
use super::budget::Lease;
use super::deadline::{Patience, Tier};
use super::downstream::{Downstream, Reader};
use super::outcome::{Outcome, Phase, Rejection, WorkEnd};
use super::relay::{Relay, UnstartedRelay};
use super::settle::Record;
use super::source::Source;
use super::wish::Wish;
use super::{Generation, ModelIn, RouteFacts, Step, Worker, assembled};
use crate::fields::{ContentKind, Field, Fields, UpstreamHead};
use crate::upstream::Upstream;

/// How long a head waits for the body that proves it. Long enough for a server that fails right after its head, short enough that
/// no balancer or person notices.
pub const COMMIT_HOLD: Duration = Duration::from_millis(250);
/// A body that is complete by then and no longer than this is handed on in one piece.
const WHOLE_BYTES: usize = 256 * 1024;
/// So much of an answer that keeps its slot is handed on at a time.
const PIECE_BYTES: usize = 16 * 1024;
/// Longest that an error's body may take; its status is already known and matters more.
const ERROR_BODY_TIME: Duration = Duration::from_secs(5);

/// Said in place of an error that cannot be read.
static UNREADABLE: Bytes = Bytes::from_static(
    b"the model server's error came compressed, which was not asked for; its words are in its own log",
);

/// Status and fields that go downstream; framing is added by the connection.
#[derive(Clone, Debug)]
pub struct AnswerHead {
    pub status: StatusCode,
    pub fields: Fields,
}

/// What the front sends.
#[derive(Debug)]
pub struct Answer {
    pub head: AnswerHead,
    pub body: OutBody,
}

/// What the way from head to commit acts on.
#[derive(Debug)]
pub struct Commit<'a> {
    /// When the head was here.
    pub came: Instant,
    pub worker: &'a Arc<Worker>,
    pub generation: &'a Arc<Generation>,
    pub upstream: &'a Arc<Upstream>,
    pub patience: &'a Patience<'a>,
    pub route: RouteFacts,
    pub wish: Wish,
    pub downstream: &'a Arc<Downstream>,
    pub reader: &'a Arc<Reader>,
}

/// Decides how the answer goes on. On an error everything that was held has been given back.
pub(super) async fn begin(
    commit: &Commit<'_>,
    head: &mut UpstreamHead,
    mut running: Box<Running>,
    record: &mut Record,
) -> Result<Step, Rejection> {
    commit.upstream.notice(&head.fields);
    let mut lease = commit.worker.caller.answers.lease();
    let begun = if head.told.is_framed_twice() {
        Err(Rejection::UnexpectedContent {
            what: "an answer whose length can be read in two ways",
        })
    } else if head.status.is_success() {
        success(commit, head, &mut running, (record, &mut lease)).await
    } else {
        // Boxed: rare, and a large part of the call's future otherwise.
        Box::pin(refused(commit, head, &mut running, record)).await
    };
    record.left(running.attendance());
    match begun.and_then(|begun| stay(begun, lease, commit, (&running, record))) {
        Ok(Begun::Whole(head, bytes)) => {
            record.status(head.status.as_u16());
            record.sent_downstream(bytes.len());
            record.outcome(Outcome::Ok, None);
            record.answered();
            let writer = running.attendance_mut().take_writer();
            running.ended(WorkEnd::Complete, record);
            Ok(Step::Answered(head, bytes, writer))
        }
        Ok(Begun::Flowing(head, source)) => {
            record.status(head.status.as_u16());
            record.phase(if record.has_first_byte() {
                Phase::Streaming
            } else {
                Phase::WaitingFirstEvent
            });
            let relay = UnstartedRelay::new(commit, running, source);
            Ok(Step::Relaying(head, Box::new(relay)))
        }
        Err(rejection) => {
            aftermath::gave_up(running, &rejection, record);
            Err(rejection)
        }
    }
}

enum Begun {
    Whole(AnswerHead, Bytes),
    Flowing(AnswerHead, Source),
}

/// Where an answer stays that is here in one piece and may be read slowly. Its slot is free at once, and its bytes are counted until its client
/// has them; if there is no room for that, it keeps its slot and goes on as an answer does that is still coming, which bounds it as well.
fn stay(
    begun: Begun,
    mut lease: Lease<'_>,
    commit: &Commit<'_>,
    (running, record): (&Running, &mut Record),
) -> Result<Begun, Rejection> {
    let Begun::Whole(head, bytes) = begun else {
        return Ok(begun);
    };
    let max = commit.generation.config.limits.answers_total_bytes;
    if bytes.is_empty() || lease.set(bytes.len(), max) {
        return Ok(Begun::Whole(head, lease.around(bytes)));
    }
    if !running.is_complete() {
        return Err(Rejection::AnswersFull); // an error's body that broke off
    }
    record.work_ended(WorkEnd::Complete);
    // Each piece is let go by itself.
    let pieces = bytes.chunks(PIECE_BYTES).map(Bytes::copy_from_slice);
    let source = Source::plain(pieces.collect(), Some(0), false);
    Ok(Begun::Flowing(head, source))
}

async fn success(
    commit: &Commit<'_>,
    head: &mut UpstreamHead,
    running: &mut Running,
    (record, lease): (&mut Record, &mut Lease<'_>),
) -> Result<Begun, Rejection> {
    record.phase_from(Phase::WaitingFirstEvent, commit.came);
    let kind = head.told.kind;
    if kind == ContentKind::Html && commit.route.model == ModelIn::Body {
        record.outcome(Outcome::UnexpectedContentType, Some("html"));
        return Err(Rejection::UnexpectedContent {
            what: "an HTML page",
        });
    }
    let events = kind == ContentKind::Events || (commit.wish.stream && kind != ContentKind::Html);
    if head.told.is_encoded || !events || is_head_only(head) {
        return plain(commit, head, running, record).await;
    }
    if let Some(form) = commit.wish.assemble {
        let bytes = Box::pin(assembled::gather(commit, form, running, (record, lease))).await?;
        let mut out = out_head(commit, head, record);
        whole_answer_fields(&mut out.fields, form);
        return Ok(Begun::Whole(out, bytes));
    }
    Box::pin(stream(commit, head, kind, running, record)).await
}

/// An answer that is passed on as bytes.
async fn plain(
    commit: &Commit<'_>,
    head: &mut UpstreamHead,
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
            Source::plain(gathered, running.exact_length(), head.told.is_json),
        ));
    }
    let bytes = join(gathered);
    if ends_with_connection(head) && head.told.is_json && !is_whole_json(&bytes) {
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
    head: &mut UpstreamHead,
    kind: ContentKind,
    running: &mut Running,
    record: &mut Record,
) -> Result<Begun, Rejection> {
    let mut scanner = StreamScanner::new(
        commit.route.dialect,
        commit.generation.config.limits.event_bytes,
    );
    let first_event = commit.upstream.settings.timeouts.first_event;
    let hold = commit.came + COMMIT_HOLD;
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
    event_stream_fields(&mut out.fields, kind);
    Ok(Begun::Flowing(
        out,
        Source::events(scanner, first, commit.wish.strip_usage),
    ))
}

/// Any status but success: the upstream's own words, in a shape that the client's SDK can read.
async fn refused(
    commit: &Commit<'_>,
    head: &mut UpstreamHead,
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
    if head.told.is_encoded && !mask.is_empty() {
        // Nobody asked for that, and whether the key is in it cannot be seen.
        out.fields.remove(Field::ContentEncoding);
        out.fields.remove(Field::ContentType);
        return Ok(in_our_words(commit, out, &UNREADABLE));
    }
    if !complete {
        return Ok(Begun::Flowing(
            out,
            Source::plain(vec![bytes], running.exact_length(), head.told.is_json),
        ));
    }
    if head.told.names_encoding() || head.status == StatusCode::NOT_MODIFIED {
        return Ok(Begun::Whole(out, bytes));
    }
    Ok(in_our_words(commit, out, &bytes))
}

/// An error in the dialect's shape, if it is not in that already.
fn in_our_words(commit: &Commit<'_>, mut out: AnswerHead, bytes: &Bytes) -> Begun {
    let status = out.status.as_u16();
    let content_type = out.fields.get(Field::ContentType);
    let content_type = content_type.and_then(|v| str::from_utf8(v).ok());
    match wrap_error(commit.route.dialect, status, content_type, bytes) {
        Wrapped::AsIs => Begun::Whole(out, bytes.clone()),
        Wrapped::Replaced(bytes) => {
            out.fields.insert(Field::ContentType, "application/json");
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
    let hold = commit.came + hold;
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

/// HTTP says nothing of where such a body ends: a server that died looks like one that is done.
fn ends_with_connection(head: &UpstreamHead) -> bool {
    !head.told.is_framed() && head.version < http::Version::HTTP_2
}

fn is_whole_json(bytes: &[u8]) -> bool {
    serde_json::from_slice::<serde::de::IgnoredAny>(bytes).is_ok()
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

/// Takes the fields out of `head`.
fn out_head(commit: &Commit<'_>, head: &mut UpstreamHead, record: &Record) -> AnswerHead {
    let mut fields = std::mem::take(&mut head.fields);
    commit.upstream.mask.hide_in(&mut fields);
    if record.attempts() > 1 {
        // On an answer that took more than one attempt: how many.
        fields.insert(Field::XTidegateAttempts, record.attempts().to_string());
    }
    AnswerHead {
        status: head.status,
        fields,
    }
}

/// What keeps proxies on the way from holding events back. The upstream's own wishes are kept where they say the same.
fn event_stream_fields(fields: &mut Fields, kind: ContentKind) {
    if kind != ContentKind::Events || !fields.has(Field::ContentType) {
        fields.insert(Field::ContentType, "text/event-stream");
    }
    let uncached = fields.get(Field::CacheControl).is_some_and(|v| {
        str::from_utf8(v).is_ok_and(|v| v.contains("no-cache") || v.contains("no-store"))
    });
    if !uncached {
        fields.insert(Field::CacheControl, "no-cache");
    }
    fields.insert(Field::XAccelBuffering, "no");
}

/// What a stream's head says and a whole answer's does not.
fn whole_answer_fields(fields: &mut Fields, form: Form) {
    fields.insert(Field::ContentType, form.content_type());
    fields.remove(Field::CacheControl);
    fields.remove(Field::XAccelBuffering);
}

/// 204 and the like have no body to look at.
fn is_head_only(head: &UpstreamHead) -> bool {
    head.status == StatusCode::NO_CONTENT || head.status == StatusCode::RESET_CONTENT
}

impl Answer {
    /// Made here.
    pub fn json(status: StatusCode, body: Bytes) -> Self {
        let mut fields = Fields::default();
        fields.append(Field::ContentType, "application/json");
        Self::whole(AnswerHead { status, fields }, body)
    }

    pub fn whole(head: AnswerHead, bytes: Bytes) -> Self {
        Self {
            head,
            body: OutBody::whole(bytes),
        }
    }

    pub fn relaying(head: AnswerHead, relay: Relay) -> Self {
        Self {
            head,
            body: OutBody::relay(Box::new(relay)),
        }
    }
}

/// For HTTP/2.
impl From<Answer> for Response<OutBody> {
    fn from(answer: Answer) -> Self {
        let mut response = Self::new(answer.body);
        *response.status_mut() = answer.head.status;
        *response.headers_mut() = answer.head.fields.to_map();
        response
    }
}
