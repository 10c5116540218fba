//! The one record of a call: when and why its wait ended, when and why its work ended. Written exactly once.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::{HeaderMap, Method};
use tidegate_wire::{Facts, Peek};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::attendance::Attendance;
use super::contract::Bound;
use super::outcome::{EndKnown, Outcome, Phase, Rejection, WaitEnd, WorkEnd};
use super::retried::{Mark, Retried};
use super::table::{By, Entry, Listed, State};
use super::upload::Upload;
use super::{Generation, RouteFacts, aftermath};
use crate::auth::Principal;
use crate::telemetry::access_log::{AccessLog, Line, Times};
use crate::telemetry::journal::Place;
use crate::telemetry::metrics::{Metrics, TierLabels, UpstreamLabel, UpstreamMetrics};
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

/// Collects what happens to a call; settled once, at the latest when it is dropped.
#[derive(Debug)]
pub struct Record {
    metrics: Arc<Metrics>,
    /// The upstream's own families, once the call is routed.
    upstream: Option<Arc<UpstreamMetrics>>,
    log: AccessLog,
    /// Its record in the journal, until its line is written.
    place: Option<Place>,
    /// Its place among the calls in flight, until its slot is given back.
    listed: Option<Listed>,
    began: Instant,
    began_at: SystemTime,
    who: Who,
    phase: Phase,
    phase_since: Instant,
    /// Why, when, and in which phase.
    wait: Option<(WaitEnd, Duration, Phase)>,
    work: Option<(WorkEnd, Duration)>,
    worked: bool,
    overrun: Option<Bound>,
    outcome: Option<Ending>,
    likely: Option<Ending>,
    pub meter: Meter,
    times: Times,
    model: Option<String>,
    stream: bool,
    endpoint: Option<Arc<str>>,
    status: Option<u16>,
    attempts: u32,
    request_bytes: u64,
    response_bytes: u64,
    /// How long the slot is kept after the exchange.
    kept: Duration,
    /// How it is known that the work has ended, where that is not plain.
    known: Option<EndKnown>,
    /// Who keeps the slot until the server shows that the work has ended: it settles the record.
    keeper: Option<oneshot::Sender<Box<Self>>>,
    retried: Retried,
    /// What its retry would be known by.
    mark: Option<Mark>,
    /// The abandoned call that this one tries again.
    retry_of: Option<Arc<str>>,
    /// The call whose answer this one is given.
    attached_to: Option<Arc<str>>,
    /// The last waiter has left, and a retry may still take the call up.
    away: Option<Away>,
    /// In which phase that happened first.
    left_in: Option<Phase>,
    /// Retries that did.
    attaches: u32,
    /// What its model is called in the configuration, and what that costs.
    generation: Option<Arc<Generation>>,
    settled: bool,
}

/// The outcome and its reason.
type Ending = (Outcome, Option<&'static str>);

/// What is known of a call from its beginning.
#[derive(Debug)]
struct Who {
    id: Arc<str>,
    route: RouteFacts,
    principal: Principal,
    peer: SocketAddr,
    method: Method,
    path: String,
    client_retry: Option<u32>,
    generation: u64,
}

impl Record {
    /// The call ended with an error of ours.
    pub fn refused(&mut self, rejection: &Rejection, status: u16) {
        if !matches!(rejection, Rejection::Gone) {
            self.status(status);
        }
        aftermath::note(rejection, self);
    }

    pub fn id(&self) -> &Arc<str> {
        &self.who.id
    }

    /// Stands for the key in the limiter.
    pub fn flow(&self) -> u64 {
        self.who.principal.flow()
    }

    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// The call goes on to `phase`; the time in the one before is counted.
    pub fn phase(&mut self, phase: Phase) {
        let now = Instant::now();
        if let Some(upstream) = &self.upstream {
            upstream
                .phase(self.phase.name())
                .observe(now.duration_since(self.phase_since).as_secs_f64());
        }
        self.phase = phase;
        self.phase_since = now;
        if phase == Phase::Queued {
            self.times.queued_ms = Some(now.duration_since(self.began));
        }
        if let Some(listed) = &self.listed {
            listed.entry().phase(phase);
        }
    }

    /// The call as it can be seen and ended from outside.
    pub fn entry(&self) -> Option<&Arc<Entry>> {
        self.listed.as_ref().map(Listed::entry)
    }

    /// The place in the table goes with what is left of the call.
    pub fn hand_over_place(&mut self) -> Option<Listed> {
        self.listed.take()
    }

    /// The operator wants all of it to end.
    pub fn is_killed(&self) -> bool {
        let stopped = self.entry().and_then(|entry| entry.stopped());
        stopped == Some(By::Operator)
    }

    /// Looks at what came.
    pub fn see(&mut self, facts: &Facts) {
        self.meter.see(facts);
        self.show_tokens();
    }

    pub fn show_tokens(&self) {
        if let Some(entry) = self.entry() {
            entry.tokens(self.meter.deltas());
        }
    }

    /// The request is here: what its retry would be known by is, too, and whether it is one itself.
    ///
    /// # Errors
    ///
    /// [`Rejection::Internal`], if reading a long body failed.
    pub async fn received(
        &mut self,
        headers: &HeaderMap,
        upload: &Upload,
    ) -> Result<(), Rejection> {
        self.request_bytes = upload.len();
        self.times.received_ms = Some(self.elapsed());
        let who = &self.who;
        self.mark = Mark::of(headers, &who.principal, &who.path, upload).await?;
        self.retry_of = self.mark.and_then(|mark| self.retried.first(mark));
        Ok(())
    }

    /// The endpoint that was tried last, by its name.
    pub fn endpoint(&self) -> Option<&Arc<str>> {
        self.endpoint.as_ref()
    }

    pub fn generation(&self) -> Option<&Arc<Generation>> {
        self.generation.as_ref()
    }

    /// When the first token came.
    pub fn first_token_at(&self) -> Option<Instant> {
        Some(self.began + self.times.first_token_ms?)
    }

    pub fn routed(&mut self, target: &Target<'_>, peek: Option<&Peek>) {
        self.upstream = Some(Arc::clone(&target.upstream.families));
        if let Some(entry) = self.entry() {
            entry.learn(|facts| {
                let model = peek.and_then(|peek| peek.model.as_deref());
                facts.model = model.map(|model| shown(model).into());
                facts.upstream = Some(Arc::clone(&target.upstream.name));
                facts.contract = target.upstream.settings.abandon.contract.name();
            });
        }
        if let Some(peek) = peek {
            self.model = peek.model.as_deref().map(|m| shown(m).to_owned());
            self.stream = peek.stream;
        }
        self.note();
    }

    /// The one fact needed when somebody asks for a model that is not here.
    pub fn refused_model(&mut self, why: &Rejection) {
        if let Rejection::UnknownModel(model) = why {
            self.model = Some(shown(model).to_owned());
        }
    }

    pub fn admitted(&mut self) {
        self.times.admitted_ms = Some(self.elapsed());
    }

    /// Connections that were tried so far.
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// One more connection is tried; from here on there may be work upstream.
    pub fn attempt(&mut self, endpoint: &Arc<str>) {
        self.attempts += 1;
        self.endpoint = Some(Arc::clone(endpoint));
        if let Some(entry) = self.entry() {
            entry.learn(|facts| facts.endpoint = Some(Arc::clone(endpoint)));
        }
    }

    /// The request goes out, now that [`Phase::WaitingHead`] has begun.
    pub fn sent(&mut self) {
        self.worked = true;
        self.note();
        self.times.sent_ms = Some(self.phase_since.duration_since(self.began));
    }

    pub fn head(&mut self) {
        self.times.head_ms = Some(self.elapsed());
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
            if let Some(entry) = self.entry() {
                entry.first_token(elapsed);
            }
            if let Some(upstream) = &self.upstream {
                upstream.ttft_seconds.observe(elapsed.as_secs_f64());
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
        self.wait_ended_after(why, self.elapsed());
    }

    fn wait_ended_after(&mut self, why: WaitEnd, after: Duration) {
        if self.wait.is_none() {
            self.meter.left();
            if let (WaitEnd::Left | WaitEnd::Stalled, Some(entry)) = (why, self.entry()) {
                entry.left(after);
                entry.state(State::Abandoned);
            }
            self.wait = Some((why, after, self.phase));
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

    /// The upstream's work is over, as far as the upstream's contract lets us know.
    pub fn work_ended(&mut self, why: WorkEnd) {
        let elapsed = self.elapsed();
        let why = if self.worked { why } else { WorkEnd::None };
        self.work.get_or_insert((why, elapsed));
        if let Some(entry) = self.entry() {
            entry.listens(false);
        }
    }

    pub fn timed_out(&self, tier: super::deadline::Tier) {
        let labels = TierLabels {
            upstream: self.upstream_name(),
            tier: tier.name(),
        };
        self.metrics.timeouts.get_or_create(&labels).inc();
    }

    pub fn malformed(&self, events: u32) {
        if events > 0 {
            let labels = UpstreamLabel {
                upstream: self.upstream_name(),
            };
            self.metrics
                .malformed_events
                .get_or_create(&labels)
                .inc_by(u64::from(events));
        }
    }

    pub fn upstream_name(&self) -> Arc<str> {
        self.upstream
            .as_ref()
            .map_or_else(|| "".into(), |u| Arc::clone(&u.name))
    }

    /// Writes the record; later calls change nothing. Where the slot is kept until the server shows that the work has ended, it is written
    /// then.
    pub fn settle(&mut self) {
        if self.settled || self.hand_on() {
            return;
        }
        self.settled = true;
        let ((outcome, reason), (wait, waited, phase)) = self.ends();
        let work = match self.work {
            Some((why, at)) if why != WorkEnd::None => Some((why, at)),
            _ => self.worked.then(|| (WorkEnd::Failed, self.elapsed())),
        };
        if self.phase != Phase::Done {
            // The phase it ended in counts like those it passed through.
            self.phase(self.phase);
        }
        let used = self.meter.settle();
        self.count(outcome, (wait, phase), waited, &used);
        let left = matches!(wait, WaitEnd::Left | WaitEnd::Stalled);
        let waste = work.filter(|_| left).map(|(work, ended)| {
            let waste = self.waste(work, (waited, ended), &used);
            self.count_waste(&waste);
            waste
        });
        self.mark_abandoned();
        if !self.log.is_on() {
            return;
        }
        let who = &self.who;
        let line = Line {
            time: self.began_at,
            id: &who.id,
            principal: who.principal.name(),
            peer: who.peer,
            method: who.method.as_str(),
            path: &who.path,
            dialect: super::dialect_name(who.route.dialect),
            model: self.model.as_deref(),
            stream: self.stream,
            upstream: self.upstream.as_ref().map(|u| &*u.name),
            endpoint: self.endpoint.as_deref(),
            status: self.status,
            outcome: outcome.name(),
            reason,
            phase: phase.name(),
            wait_end: wait.name(),
            wait_ended_ms: waited,
            work_end: work.map_or(WorkEnd::None, |(why, _)| why).name(),
            work_ended_ms: work.map(|(_, at)| at),
            end_known: self.end_known(work.map(|(why, _)| why)),
            overrun: self.overrun.map(Bound::name),
            slot_kept_ms: (!self.kept.is_zero()).then_some(self.kept),
            wasted_tokens: waste.and_then(|(waste, _)| waste.tokens),
            waste: waste.map(|(waste, _)| waste.known.name()),
            wasted_ms: waste.map(|(waste, _)| waste.time),
            wasted_money: waste.and_then(|(_, money)| money),
            retry_of: self.retry_of.as_deref(),
            attached_to: self.attached_to.as_deref(),
            attaches: (self.attaches > 0).then_some(self.attaches),
            settled_ms: self.elapsed(),
            times: self.times,
            attempts: self.attempts,
            client_retry: who.client_retry,
            request_bytes: self.request_bytes,
            response_bytes: self.handed_bytes(),
            events: self.meter.events(),
            input_tokens: used.usage.input,
            output_tokens: used.usage.output,
            usage: used.source.as_str(),
            generation: who.generation,
        };
        self.log.write(&line, self.place.take());
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.settle();
    }
}
