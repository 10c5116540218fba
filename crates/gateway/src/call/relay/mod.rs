//! The upstream's body as the downstream's body.
//!
//! No task and no channel stand between the two: the client's connection polls the relay, the relay polls the exchange. A client that reads slowly slows its own
//! upstream and nothing else; a client that leaves drops the relay, and the drop hands what is left to the
//! [`aftermath`](super::aftermath). Bytes pass unchanged, cut only at event boundaries, so that a comment or an error can be put between
//! two events.

use std::sync::Arc;
use std::task::{Context as Task, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::Frame;
use tidegate_wire::{Dialect, Facts, Piece, Terminal, answer_facts};
use tokio::time::Instant;

use super::aftermath::Running;
use super::answer::Commit;
use super::body::Broken;
use super::clock::Clock;
use super::deadline::Tier;
use super::downstream::{Downstream, Reader};
use super::entry::Entry;
use super::outcome::{Outcome, Phase, WorkEnd};
use super::settle::Record;
use super::source::Source;
use crate::signal::Watch;
use crate::upstream::Upstream;

mod alone;
mod ends;
mod told;

use alone::Alone;

/// What a heartbeat looks like: a comment, which every client skips (measured; nothing else is safe in all of them).
pub(super) const HEARTBEAT: Bytes = Bytes::from_static(b": keep-alive\n\n");
/// HTTP/2: the reset follows the last event by this much. Clients drop what they have not handed on when the reset is already there
/// (seen with curl).
pub(super) const RESET_AFTER: Duration = Duration::from_millis(20);

/// A relay that lacks only its record.
#[derive(Debug)]
pub struct UnstartedRelay {
    running: Box<Running>,
    source: Source,
    dialect: Dialect,
    upstream: Arc<Upstream>,
    downstream: Arc<Downstream>,
    reader: Arc<Reader>,
    cut: Watch,
    total: Option<Instant>,
}

impl UnstartedRelay {
    pub fn new(commit: &Commit<'_>, running: Box<Running>, source: Source) -> Self {
        Self {
            running,
            source,
            dialect: commit.route.dialect,
            upstream: Arc::clone(commit.upstream),
            downstream: Arc::clone(commit.downstream),
            reader: Arc::clone(commit.reader),
            cut: commit.patience.cut().watch(),
            total: commit.patience.total,
        }
    }

    pub fn start(self, record: Box<Record>) -> Relay {
        let now = Instant::now();
        if let Some(entry) = record.listed_entry() {
            self.reader.reads(entry);
        }
        Relay {
            clock: Clock::new(now, self.total),
            running: Some(self.running),
            entry: record.listed_entry().cloned(),
            record: Some(record),
            upstream: self.upstream,
            cut: self.cut,
            stop_armed: false,
            flows: false,
            told: false,
            unflushed: self.downstream.flushes(),
            dialect: self.dialect,
            state: RelayState::Flowing,
            source: self.source,
            downstream: self.downstream,
            reader: self.reader,
            alone: Alone::default(),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum RelayState {
    Flowing,
    /// The error to tell, then the break.
    Telling(Bytes),
    /// What was told is on its way; the break comes when the kernel has it. `flushes`: the count before.
    Flushing {
        flushes: u64,
    },
    Done,
}

/// An answer on its way.
// In this order: what each chunk touches stands together, as a gateway of many streams finds none of it in the cache (decision 0014).
#[repr(C)]
#[derive(Debug)]
pub struct Relay {
    clock: Clock,
    /// Until the upstream's work is over.
    running: Option<Box<Running>>,
    /// Until it is settled.
    record: Option<Box<Record>>,
    /// Whether it is ended from outside.
    entry: Option<Arc<Entry>>,
    upstream: Arc<Upstream>,
    cut: Watch,
    /// Its waker is there: a relay lives in one task.
    stop_armed: bool,
    /// Something of the body has come.
    flows: bool,
    /// The upstream has told the client of an error itself: nothing is added to that.
    told: bool,
    /// The count of flushes when the last frame was handed out: as long as it is that, the frame may not be on its way.
    unflushed: u64,
    dialect: Dialect,
    state: RelayState,
    source: Source,
    downstream: Arc<Downstream>,
    reader: Arc<Reader>,
    alone: Alone,
}

type Polled = Poll<Option<Result<Frame<Bytes>, Broken>>>;

impl Relay {
    pub fn is_done(&self) -> bool {
        self.state == RelayState::Done
    }

    pub fn exact_length(&self) -> Option<u64> {
        match &self.source {
            Source::Plain { length, .. } => *length,
            Source::Events { .. } => None,
        }
    }

    pub fn poll_frame(&mut self, cx: &mut Task<'_>) -> Polled {
        let now = Instant::now();
        self.clock.polled(now);
        self.arm_stop(cx);
        loop {
            match &mut self.state {
                RelayState::Flowing => {}
                RelayState::Telling(event) => {
                    let event = std::mem::take(event);
                    if !event.is_empty() {
                        self.unflushed = self.downstream.flushes();
                    }
                    // Nothing new to tell may mean that no flush is to come.
                    self.state = RelayState::Flushing {
                        flushes: self.unflushed,
                    };
                    if !event.is_empty() {
                        return Poll::Ready(Some(Ok(Frame::data(event))));
                    }
                }
                RelayState::Flushing { flushes } => {
                    let here = !self.alone.detached; // else the one that waits sees to that
                    if here && self.downstream.flushes() == *flushes {
                        self.downstream.on_flush(cx.waker());
                        return Poll::Pending;
                    }
                    if here && self.downstream.http2 {
                        ready!(self.clock.poll_rest(cx, RESET_AFTER));
                    }
                    self.state = RelayState::Done;
                    return Poll::Ready(Some(Err(Broken)));
                }
                RelayState::Done => return Poll::Ready(None),
            }
            if let Some(tier) = self.overdue(now) {
                self.give_up(tier);
                continue;
            }
            if let Some(by) = self.entry.as_ref().and_then(|entry| entry.stopped()) {
                self.stop(by);
                continue;
            }
            if let Some(bytes) = self.next_ready(now) {
                return self.hand(bytes, now);
            }
            if self.state != RelayState::Flowing {
                continue;
            }
            match ready!(self.poll_upstream(cx, now)) {
                Step::Again => {}
                Step::Hand(bytes) => return self.hand(bytes, now),
            }
        }
    }

    /// What ends an answer even if the upstream always has more, so that it is never waited for.
    fn overdue(&self, now: Instant) -> Option<Tier> {
        let total = || self.clock.total.is_some_and(|total| total <= now);
        let drain = self.cut.is_raised().then_some(Tier::Drain);
        drain.or_else(|| total().then_some(Tier::Total))
    }

    fn hand(&mut self, bytes: Bytes, now: Instant) -> Polled {
        self.clock.sent = now;
        self.clock.handed = Some(now);
        self.unflushed = self.downstream.flushes();
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }

    /// The next bytes that are here already.
    fn next_ready(&mut self, now: Instant) -> Option<Bytes> {
        while self.state == RelayState::Flowing {
            match &mut self.source {
                Source::Plain { ready, .. } => {
                    let bytes = ready.pop_front()?;
                    self.source.observe(&bytes);
                    self.record_mut(|r| r.sent_downstream(bytes.len()));
                    if self.is_last() {
                        self.report_observed();
                        self.complete(Outcome::Ok, None);
                    }
                    return Some(bytes);
                }
                Source::Events { scanner, first, .. } => {
                    let piece = first.take().map(|first| *first).or_else(|| scanner.pop())?;
                    if let Some(bytes) = self.pass(piece, now) {
                        return Some(bytes);
                    }
                }
            }
        }
        None
    }

    /// The bytes just taken are the last of a known length. The connection drops the body with them and does not ask for its end: to take that for
    /// a client that leaves would cancel an answer that was given in full.
    fn is_last(&self) -> bool {
        let Source::Plain { ready, length, .. } = &self.source else {
            return false;
        };
        let rest = || {
            self.running
                .as_ref()
                .and_then(|running| running.exact_length())
        };
        length.is_some() && ready.is_empty() && rest() == Some(0)
    }

    /// Looks at a piece and says which of its bytes go on. `None`: none of them.
    fn pass(&mut self, piece: Piece, now: Instant) -> Option<Bytes> {
        let Piece { mut bytes, facts } = piece;
        self.see(&facts, now);
        let Source::Events {
            strip_usage,
            finished,
            ..
        } = &mut self.source
        else {
            return Some(bytes);
        };
        *finished |= facts.finished;
        if facts.usage_only && *strip_usage {
            return None; // the client did not ask for this event
        }
        self.record_mut(|r| r.sent_downstream(bytes.len()));
        let idle = self.clock.event + self.upstream.settings.timeouts.idle;
        if facts.events == 0 && self.clock.seen_event && idle <= now {
            // Comments and pings without a pause: here there is no wait that could run out.
            self.give_up(Tier::Idle);
        }
        match (facts.terminal, &facts.error) {
            (Some(Terminal::Done), _) => self.complete(Outcome::Ok, None),
            (Some(Terminal::Failed), _) => self.complete(Outcome::UpstreamError, Some("failed")),
            (None, Some(error)) => {
                // Nothing that follows an error can be trusted, an end marker least of all. If clients would take it for silence,
                // it is said again in a shape that they know.
                self.told = error.native;
                let mask = &self.upstream.mask;
                let message = mask.hide_text(error.message.clone());
                bytes = mask.hide(bytes);
                self.fail(
                    Outcome::UpstreamError,
                    "error_event",
                    &message,
                    WorkEnd::Failed,
                );
            }
            (None, None) => return Some(bytes),
        }
        Some(whole_line_end(bytes))
    }

    fn see(&mut self, facts: &Facts, now: Instant) {
        if facts.events > 0 {
            self.clock.event = now;
            self.clock.seen_event = true;
        }
        let Some(record) = &mut self.record else {
            return;
        };
        record.see(facts);
        record.malformed(facts.malformed);
        if facts.content {
            record.first_token();
        }
    }

    fn poll_upstream(&mut self, cx: &mut Task<'_>, now: Instant) -> Poll<Step> {
        let Some(running) = &mut self.running else {
            self.state = RelayState::Done;
            return Poll::Ready(Step::Again);
        };
        match running.body().poll_data(cx) {
            Poll::Ready(Some(Ok(data))) => {
                self.clock.waiting_since = None;
                if let Some(entry) = &self.entry {
                    entry.listens(false);
                }
                self.arrived(data);
                Poll::Ready(Step::Again)
            }
            Poll::Ready(None) => Poll::Ready(self.upstream_ended(now)),
            Poll::Ready(Some(Err(error))) => {
                tracing::debug!(%error, upstream = %self.upstream.name, "answer cut");
                running.broke();
                self.fail(
                    Outcome::UpstreamTruncated,
                    "transport",
                    "the model server's answer was cut off",
                    WorkEnd::Failed,
                );
                Poll::Ready(Step::Again)
            }
            Poll::Pending => {
                if let Some(entry) = &self.entry {
                    entry.listens(true);
                }
                self.poll_time(cx, now)
            }
        }
    }

    fn arrived(&mut self, data: Bytes) {
        if !std::mem::replace(&mut self.flows, true)
            && let Some(record) = &mut self.record
        {
            if !record.has_first_byte() {
                record.phase(Phase::Streaming);
            }
            record.first_byte();
        }
        match &mut self.source {
            Source::Events { scanner, .. } => scanner.push(data),
            Source::Plain { ready, .. } => ready.push_back(data),
        }
    }

    /// The body ended in HTTP's sense; whether the answer is whole is another question.
    fn upstream_ended(&mut self, now: Instant) -> Step {
        match &mut self.source {
            Source::Plain { .. } => {
                self.report_observed();
                self.complete(Outcome::Ok, None);
                Step::Again
            }
            Source::Events {
                scanner, finished, ..
            } => {
                // What is left was not sent: the client stands where it stood before.
                let between_events = scanner.at_boundary();
                let rest = scanner.finish();
                let mut whole = *finished;
                if let Some(rest) = &rest {
                    whole |= rest.facts.finished || rest.facts.terminal.is_some();
                }
                if !whole {
                    self.fail_at(
                        between_events,
                        Outcome::UpstreamTruncated,
                        (
                            "no_end_event",
                            "the model server's answer ended before it was complete",
                        ),
                        WorkEnd::Failed,
                    );
                    return Step::Again;
                }
                let bytes = rest.and_then(|rest| self.pass_rest(rest, now));
                self.complete(Outcome::Ok, None);
                bytes.map_or(Step::Again, Step::Hand)
            }
        }
    }

    /// What stood behind the last blank line of a complete answer goes on as it is, unless only we asked for it.
    fn pass_rest(&mut self, rest: Piece, now: Instant) -> Option<Bytes> {
        self.see(&rest.facts, now);
        let Source::Events { strip_usage, .. } = &self.source else {
            return None;
        };
        let ours = *strip_usage && rest.facts.usage_only;
        Some(rest.bytes).filter(|bytes| !bytes.is_empty() && !ours)
    }

    /// Nothing came. Is it time to give up, to send a sign of life, or to shut down?
    fn poll_time(&mut self, cx: &mut Task<'_>, now: Instant) -> Poll<Step> {
        self.clock.waiting_since.get_or_insert(now);
        if self.cut.poll_raised(cx) {
            self.give_up(Tier::Drain);
            return Poll::Ready(Step::Again);
        }
        loop {
            let (until, wake) = self.next_deadline(now);
            if until <= now {
                match wake {
                    Wake::Heartbeat => {
                        self.alone.beat = true;
                        return Poll::Ready(Step::Hand(HEARTBEAT));
                    }
                    Wake::Tier(tier) => {
                        self.give_up(tier);
                        return Poll::Ready(Step::Again);
                    }
                }
            }
            ready!(self.clock.poll_until(cx, until, now));
            let later = Instant::now();
            if until <= later {
                return self.poll_time(cx, later); // judged by the clock of now, not of the poll's beginning
            }
        }
    }

    fn next_deadline(&self, now: Instant) -> (Instant, Wake) {
        let timeouts = &self.upstream.settings.timeouts;
        let waiting = self.clock.waiting_since.unwrap_or(now);
        let mut next = match &self.source {
            Source::Events { .. } if !self.clock.seen_event => (
                self.clock.event + timeouts.first_event,
                Wake::Tier(Tier::FirstEvent),
            ),
            Source::Events { .. } => {
                let silence = (waiting + timeouts.silence, Wake::Tier(Tier::Silence));
                let idle = (self.clock.event + timeouts.idle, Wake::Tier(Tier::Idle));
                if idle.0 < silence.0 { idle } else { silence }
            }
            Source::Plain { .. } => (waiting + timeouts.silence, Wake::Tier(Tier::Silence)),
        };
        if let Some(total) = self.clock.total.filter(|total| *total < next.0) {
            next = (total, Wake::Tier(Tier::Total));
        }
        if let Some(beat) = self.heartbeat_at().filter(|beat| *beat < next.0) {
            next = (beat, Wake::Heartbeat);
        }
        next
    }

    fn heartbeat_at(&self) -> Option<Instant> {
        match &self.source {
            Source::Events { scanner, .. } if scanner.at_boundary() => {
                Some(self.clock.sent + self.upstream.settings.heartbeat?)
            }
            _ => None,
        }
    }

    fn report_observed(&mut self) {
        let facts = answer_facts(self.dialect, &self.source.observed());
        if let (Some(usage), Some(record)) = (facts.usage, &mut self.record) {
            record.meter.report(&usage);
        }
    }

    fn record_mut(&mut self, with: impl FnOnce(&mut Record)) {
        if let Some(record) = &mut self.record {
            with(record);
        }
    }
}

/// The body ends with its terminal event at once. If the last of its CRLFs came apart, the LF that is still on its way is put there.
fn whole_line_end(bytes: Bytes) -> Bytes {
    if bytes.ends_with(b"\r\n\r") {
        [&bytes[..], b"\n"].concat().into()
    } else {
        bytes
    }
}

enum Step {
    Again,
    Hand(Bytes),
}

#[derive(Clone, Copy)]
enum Wake {
    Heartbeat,
    Tier(Tier),
}
