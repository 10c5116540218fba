//! The one record of a call: when and why its wait ended, when and why its work ended. Written exactly once.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::Method;
use tidegate_wire::{Facts, Peek};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::attendance::Attendance;
use super::contract::Bound;
use super::entry::{Entry, WorkState};
use super::outcome::{EndKnown, EndedWait, EndedWork, Outcome, Phase, Rejection, WaitEnd, WorkEnd};
use super::retried::{Mark, Retried};
use super::stop::By;
use super::table::{Listed, Table};
use super::upload::Upload;
use super::{Generation, Id, aftermath};
use crate::fields::Fields;
use crate::telemetry::access_log::{AccessLog, Line, Times, Word};
use crate::telemetry::journal::JournalPlace;
use crate::telemetry::metrics::{Metrics, TierLabels, UpstreamLabel, UpstreamMetrics};
use crate::upstream::EndpointState;
use crate::upstream::route::Target;
use crate::usage::Meter;

mod attaching;
mod begin;
mod books;
mod kept;
pub mod lost;

use attaching::Away;
pub use begin::Edge;
use begin::shown;

/// Where every call is written down.
#[derive(Clone, Debug)]
pub struct Books {
    metrics: Arc<Metrics>,
    log: AccessLog,
    /// The calls in flight.
    pub(super) table: Table,
    /// Abandoned calls, to know their retries by.
    retried: Retried,
}

impl Books {
    pub fn new(metrics: &Arc<Metrics>, log: AccessLog, table: Table) -> Self {
        Self {
            metrics: Arc::clone(metrics),
            log,
            table,
            retried: Retried::default(),
        }
    }
}

/// Collects what happens to a call; settled once, at the latest when it is dropped.
// In this order: what each chunk of a stream touches is one line of the cache.
#[repr(C)]
#[derive(Debug)]
pub struct Record {
    standing: Standing,
    response_bytes: u64,
    pub meter: Meter,
    /// Its record in the journal, until its line is written.
    place: Option<JournalPlace>,
    began: Instant,
    began_at: SystemTime,
    who: Who,
    phase: Phase,
    /// After the beginning.
    phase_since: Duration,
    wait: Option<EndedWait>,
    work: Option<EndedWork>,
    worked: bool,
    overrun: Option<Bound>,
    outcome: Option<Ending>,
    likely: Option<Ending>,
    times: Times,
    stream: bool,
    status: Option<u16>,
    attempts: u32,
    request_bytes: u64,
    /// What went upstream asked for a stream.
    asked_stream: bool,
    /// How long the slot is kept after the exchange.
    kept: Duration,
    /// How it is known that the work has ended, where that is not plain.
    known: Option<EndKnown>,
    /// Who keeps the slot until the server shows that the work has ended: it settles the record.
    keeper: Option<oneshot::Sender<Box<Self>>>,
    /// What its retry would be known by.
    mark: Option<Mark>,
    /// The abandoned call that this one tries again.
    retry_of: Option<Id>,
    /// The call whose answer this one is given.
    attached_to: Option<Id>,
    /// The last waiter has left, and a retry may still take the call up.
    away: Option<Away>,
    /// In which phase that happened first.
    left_in: Option<Phase>,
    /// Retries that did.
    attaches: u32,
    settled: bool,
}

/// The outcome and its reason.
type Ending = (Outcome, Option<&'static str>);

/// The call, and whether others see it.
#[derive(Debug)]
enum Standing {
    /// It has its place among the calls in flight, until its slot is given back.
    Listed(Listed),
    /// It has none, or none any more.
    Apart(Arc<Entry>),
}

/// What is known of a call from its beginning, and nobody else's concern.
#[derive(Debug)]
struct Who {
    peer: SocketAddr,
    method: Method,
    path: String,
    client_retry: Option<u32>,
}

impl Standing {
    fn entry(&self) -> &Arc<Entry> {
        match self {
            Self::Listed(listed) => listed.entry(),
            Self::Apart(entry) => entry,
        }
    }
}

impl Record {
    /// The call ended with an error of ours.
    pub fn refused(&mut self, rejection: &Rejection, status: u16) {
        if !matches!(rejection, Rejection::Gone) {
            self.status(status);
        }
        aftermath::note(rejection, self);
    }

    /// The call and its facts.
    fn entry(&self) -> &Arc<Entry> {
        self.standing.entry()
    }

    fn books(&self) -> &Books {
        &self.entry().books
    }

    /// The upstream's own families, once the call is routed.
    fn families(&self) -> Option<&UpstreamMetrics> {
        self.entry().upstream().map(|upstream| &*upstream.families)
    }

    pub fn id(&self) -> Id {
        self.entry().id
    }

    /// Stands for the key in the limiter.
    pub fn flow(&self) -> u64 {
        self.entry().principal.flow()
    }

    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// The call goes on to `phase`; the time in the one before is counted.
    pub fn phase(&mut self, phase: Phase) {
        self.phase_after(phase, self.elapsed());
    }

    /// As [`phase`](Self::phase), with the moment of what led to it.
    pub fn phase_from(&mut self, phase: Phase, now: Instant) {
        self.phase_after(phase, now.duration_since(self.began));
    }

    fn phase_after(&mut self, phase: Phase, after: Duration) {
        if let Some(upstream) = self.families() {
            let time = after.saturating_sub(self.phase_since);
            upstream.phase(self.phase as u8, time);
        }
        self.phase = phase;
        self.phase_since = after;
        if phase == Phase::Queued {
            self.times.queued_ms.get_or_insert(after);
        }
        if let Some(entry) = self.listed_entry() {
            entry.phase(phase);
        }
    }

    /// The same as [`entry`](Self::entry), as long as the call's place in the table is this record's: until then it is the record that says
    /// how far the call is, and that heeds whoever ends it. `None` once the place has gone to whoever keeps the slot, and for what never had
    /// one.
    pub fn listed_entry(&self) -> Option<&Arc<Entry>> {
        match &self.standing {
            Standing::Listed(listed) => Some(listed.entry()),
            Standing::Apart(_) => None,
        }
    }

    /// The place in the table goes with what is left of the call.
    pub fn hand_over_place(&mut self) -> Option<Listed> {
        let apart = Standing::Apart(Arc::clone(self.entry()));
        match std::mem::replace(&mut self.standing, apart) {
            Standing::Listed(listed) => Some(listed),
            Standing::Apart(_) => None,
        }
    }

    /// The operator wants all of it to end.
    pub fn is_killed(&self) -> bool {
        let stopped = self.listed_entry().and_then(|entry| entry.stopped());
        stopped == Some(By::Operator)
    }

    /// Looks at what came.
    pub fn see(&mut self, facts: &Facts) {
        self.meter.see(facts);
        self.show_tokens();
    }

    pub fn show_tokens(&self) {
        if let Some(entry) = self.listed_entry() {
            entry.tokens(self.meter.deltas());
        }
    }

    /// The request is here: what its retry would be known by is, too, and whether it is one itself.
    ///
    /// # Errors
    ///
    /// [`Rejection::Internal`], if reading a long body failed.
    pub async fn received(&mut self, fields: &Fields, upload: &Upload) -> Result<(), Rejection> {
        self.request_bytes = upload.len();
        self.times.received_ms = Some(self.elapsed());
        self.mark = Mark::of(fields, &self.entry().principal, &self.who.path, upload).await?;
        self.retry_of = self.mark.and_then(|mark| self.books().retried.first(mark));
        Ok(())
    }

    /// The endpoint that was tried last.
    pub fn endpoint(&self) -> Option<&Arc<EndpointState>> {
        self.entry().endpoint()
    }

    pub fn generation(&self) -> &Arc<Generation> {
        &self.entry().generation
    }

    /// When the first token came.
    pub fn first_token_at(&self) -> Option<Instant> {
        Some(self.began + self.times.first_token_ms?)
    }

    pub fn routed(&mut self, target: &Target<'_>, peek: Option<&Peek>) {
        if let Some(peek) = peek {
            if let Some(model) = &peek.model {
                self.entry().asks_for(shown(model));
            }
            self.stream = peek.stream;
        }
        self.entry().goes_to(target);
        self.note();
    }

    /// The one fact needed when somebody asks for a model that is not here.
    pub fn refused_model(&mut self, why: &Rejection) {
        if let Rejection::UnknownModel(model) = why {
            self.entry().asks_for(shown(model));
        }
    }

    /// It has its slot, after so long in the queue: at once, if it never stood there.
    pub fn admitted(&mut self, queued_for: Duration) {
        let at_once = self.times.queued_ms.filter(|_| queued_for.is_zero());
        self.times.admitted_ms = Some(at_once.unwrap_or_else(|| self.elapsed()));
    }

    /// Connections that were tried so far.
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// One more connection is tried; from here on there may be work upstream.
    pub fn attempt(&mut self, endpoint: &Arc<EndpointState>) {
        self.attempts += 1;
        self.entry().tries(endpoint);
    }

    /// The request goes out, now that [`Phase::WaitingHead`] has begun.
    pub fn sent(&mut self) {
        self.worked = true;
        self.note();
        self.times.sent_ms = Some(self.phase_since);
    }

    /// The head of the answer is here, since the moment that is returned.
    pub fn head(&mut self) -> Instant {
        let now = Instant::now();
        self.times.head_ms = Some(now.duration_since(self.began));
        now
    }

    pub fn first_byte(&mut self) {
        if self.times.first_byte_ms.is_none() {
            self.times.first_byte_ms = Some(self.elapsed());
        }
    }

    pub fn first_token(&mut self) {
        if self.times.first_token_ms.is_none() {
            let elapsed = self.elapsed();
            self.times.first_token_ms = Some(elapsed);
            if let Some(entry) = self.listed_entry() {
                entry.first_token(elapsed);
            }
            if let Some(upstream) = self.families() {
                upstream.ttft_seconds.observe(elapsed);
            }
        }
    }

    /// A stream was asked for and something else came, too long to look at before it was passed on.
    pub fn outcome_if_plain(&mut self, stream: bool) {
        if stream {
            self.outcome(Outcome::UnexpectedContentType, Some("not_a_stream"));
        }
    }

    /// Why the wait ended is known.
    pub fn has_ended(&self) -> bool {
        self.wait.is_some()
    }

    /// Something was sent upstream.
    pub fn has_worked(&self) -> bool {
        self.worked
    }

    /// Work may have begun upstream: its own, or that of the call whose answer it waits for.
    pub fn may_have_run(&self) -> bool {
        self.worked || self.attached_to.is_some()
    }

    pub fn has_first_byte(&self) -> bool {
        self.times.first_byte_ms.is_some()
    }

    pub fn status(&mut self, status: u16) {
        self.status = Some(status);
    }

    pub fn sent_downstream(&mut self, bytes: usize) {
        self.response_bytes += bytes as u64;
    }

    /// The first word on the outcome stands.
    pub fn outcome(&mut self, outcome: Outcome, reason: Option<&'static str>) {
        let left = matches!(outcome, Outcome::ClientClosed | Outcome::ClientStalled);
        let likely = self.likely.filter(|_| !left);
        self.outcome
            .get_or_insert(likely.unwrap_or((outcome, reason)));
    }

    /// What the outcome is, however the answer ends, unless the client leaves before it does.
    pub fn outcome_if_awaited(&mut self, outcome: Outcome, reason: &'static str) {
        self.likely.get_or_insert((outcome, Some(reason)));
    }

    /// What is known of a client that may have left while its call went on.
    pub fn left(&mut self, attendance: &Attendance) {
        self.taken_up(attendance.taken_up());
        match attendance.left_at() {
            Some(at) if attendance.is_orphan() => self.away(at, WaitEnd::Left),
            Some(at) => {
                self.outcome(Outcome::ClientClosed, None);
                self.wait_ended_after(WaitEnd::Left, at.duration_since(self.began));
            }
            None if attendance.is_orphan() => self.back(),
            None => {}
        }
        self.overrun = self.overrun.or(attendance.overrun());
    }

    pub fn wait_ended(&mut self, why: WaitEnd) {
        if self.wait.is_none() {
            self.wait_ended_after(why, self.elapsed());
        }
    }

    /// The answer is here, all of it, and the client has it: everything ends at once.
    pub fn answered(&mut self) {
        let after = self.elapsed();
        self.work_ended_after(WorkEnd::Complete, after);
        self.phase_after(Phase::Done, after);
        self.wait_ended_after(WaitEnd::Answered, after);
    }

    fn wait_ended_after(&mut self, why: WaitEnd, after: Duration) {
        if self.wait.is_none() {
            self.meter.left();
            if let (WaitEnd::Left | WaitEnd::Stalled, Some(entry)) = (why, self.listed_entry()) {
                entry.left(after);
                entry.state(WorkState::Abandoned);
            }
            self.wait = Some(EndedWait {
                why,
                after,
                phase: self.phase,
            });
        }
    }

    /// Ended from outside, in the middle of its answer. A client that ends its own call has left, and said so.
    pub fn stopped(&mut self, by: By) {
        self.outcome(Outcome::Stopped, Some(by.reason()));
        self.wait_ended(match by {
            By::Client => WaitEnd::Left,
            By::Operator => WaitEnd::Failed,
        });
    }

    /// The upstream's work is over, as far as the upstream's contract lets us know; since the moment that is returned.
    pub fn work_ended(&mut self, why: WorkEnd) -> Instant {
        let after = match self.work {
            Some(work) => work.after,
            None => self.elapsed(),
        };
        self.work_ended_after(why, after);
        self.began + after
    }

    fn work_ended_after(&mut self, why: WorkEnd, after: Duration) {
        let why = if self.worked { why } else { WorkEnd::None };
        self.work.get_or_insert(EndedWork { why, after });
        if let Some(entry) = self.listed_entry() {
            entry.listens(false);
        }
    }

    pub fn timed_out(&self, tier: super::deadline::Tier) {
        let labels = TierLabels {
            upstream: self.upstream_name(),
            tier: tier.name(),
        };
        self.books().metrics.timeouts.get_or_create(&labels).inc();
    }

    pub fn malformed(&self, events: u32) {
        if events > 0 {
            let labels = UpstreamLabel {
                upstream: self.upstream_name(),
            };
            self.books()
                .metrics
                .malformed_events
                .get_or_create(&labels)
                .inc_by(u64::from(events));
        }
    }

    pub fn upstream_name(&self) -> Arc<str> {
        self.entry()
            .upstream()
            .map_or_else(|| "".into(), |at| Arc::clone(&at.name))
    }

    /// Writes the record; later calls change nothing. Where the slot is kept until the server shows that the work has ended, it is written
    /// then.
    pub fn settle(&mut self) {
        if !self.settled {
            self.settle_after(self.elapsed());
        }
    }

    /// As [`settle`](Self::settle), of a call that has just been done.
    pub fn settle_done(&mut self) {
        self.settle_after(self.phase_since);
    }

    /// `None`: nothing was sent upstream. Work of whose end nothing was heard has failed by the time the record is `settled`.
    fn ended_work(&self, settled: Duration) -> Option<EndedWork> {
        let failed = EndedWork {
            why: WorkEnd::Failed,
            after: settled,
        };
        match self.work {
            Some(work) if work.why != WorkEnd::None => Some(work),
            _ => self.worked.then_some(failed),
        }
    }

    fn settle_after(&mut self, settled: Duration) {
        if self.settled || self.hand_on() {
            return;
        }
        self.settled = true;
        let ((outcome, reason), wait) = self.ends();
        let work = self.ended_work(settled);
        if self.phase != Phase::Done {
            // The phase it ended in counts like those it passed through.
            self.phase_after(self.phase, settled);
        }
        let used = self.meter.settle();
        self.count(outcome, wait, &used);
        let waste = work.filter(|_| wait.is_left()).map(|work| {
            let waste = self.waste(wait, work, &used);
            self.count_waste(&waste);
            waste
        });
        self.mark_abandoned();
        if !self.books().log.is_on() {
            return;
        }
        let place = self.place.take();
        let (who, call) = (&self.who, self.entry());
        let line = Line {
            time: self.began_at,
            id: Word(call.id.text()),
            principal: Word(call.principal.name()),
            peer: who.peer,
            method: Word(who.method.as_str()),
            path: &who.path,
            dialect: Word(super::dialect_name(call.route.dialect)),
            model: call.model(),
            stream: self.stream,
            upstream: call.upstream().map(|at| Word(&at.name)),
            endpoint: call.endpoint().map(|at| &*at.authority),
            status: self.status,
            outcome: Word(outcome.name()),
            reason: reason.map(Word),
            phase: Word(wait.phase.name()),
            wait_end: Word(wait.why.name()),
            wait_ended_ms: wait.after,
            work_end: Word(work.map_or(WorkEnd::None, |work| work.why).name()),
            work_ended_ms: work.map(|work| work.after),
            end_known: self.end_known(work.map(|work| work.why)).map(Word),
            overrun: self.overrun.map(|bound| Word(bound.name())),
            slot_kept_ms: (!self.kept.is_zero()).then_some(self.kept),
            wasted_tokens: waste.and_then(|(waste, _)| waste.tokens),
            waste: waste.map(|(waste, _)| Word(waste.known.name())),
            wasted_ms: waste.map(|(waste, _)| waste.time),
            wasted_money: waste.and_then(|(_, money)| money),
            retry_of: self.retry_of.as_ref().map(|id| Word(id.text())),
            attached_to: self.attached_to.as_ref().map(|id| Word(id.text())),
            attaches: (self.attaches > 0).then_some(self.attaches),
            settled_ms: settled,
            times: self.times,
            attempts: self.attempts,
            client_retry: who.client_retry,
            request_bytes: self.request_bytes,
            response_bytes: self.handed_bytes(),
            events: self.meter.events(),
            input_tokens: used.usage.input,
            output_tokens: used.usage.output,
            usage: Word(used.source.as_str()),
            generation: call.generation.number,
        };
        call.books.log.write(&line, place);
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.settle();
    }
}
