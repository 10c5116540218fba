//! The one record of a call: when and why its wait ended, when and why its work ended. Written exactly once.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::outcome::{Outcome, Phase, WaitEnd, WorkEnd};
use super::upload::Upload;
use super::{Ask, Caller};
use crate::telemetry::access_log::{AccessLog, Line};
use crate::telemetry::metrics::{
    CallLabels, Metrics, PhaseLabels, TierLabels, TokenLabels, UpstreamLabel,
};
use crate::upstream::route::Target;
use crate::usage::Meter;
use tidegate_wire::Peek;
use tidegate_wire::UsageSource;

/// Longest model name that is kept for the log, in characters.
const MODEL_CHARS: usize = 128;

/// Collects what happens to a call; settled once, at the latest when it is dropped.
#[derive(Debug)]
pub struct Record {
    metrics: Arc<Metrics>,
    log: AccessLog,
    began: Instant,
    route: &'static str,
    upstream: Arc<str>,
    id: Arc<str>,
    phase: Phase,
    phase_since: Instant,
    wait: Option<(WaitEnd, Duration)>,
    work: Option<(WorkEnd, Duration)>,
    worked: bool,
    outcome: Option<(Outcome, Option<&'static str>)>,
    pub meter: Meter,
    line: Box<Line>,
    settled: bool,
}

fn millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

impl Record {
    pub fn begin(caller: &Caller, ask: &Ask) -> Self {
        let now = Instant::now();
        let path = ask.path_and_query.split('?').next().unwrap_or_default();
        let retry = ask
            .headers
            .get("x-stainless-retry-count")
            .and_then(|v| v.to_str().ok()?.parse().ok());
        let line = Line {
            time: humantime::format_rfc3339_millis(SystemTime::now()).to_string(),
            id: ask.id.to_string(),
            principal: ask.principal.name().to_owned(),
            peer: ask.downstream.peer.to_string(),
            method: ask.method.to_string(),
            path: path.chars().take(MODEL_CHARS).collect(),
            dialect: super::dialect_name(ask.route.dialect),
            client_retry: retry,
            generation: ask.generation.number,
            ..Line::default()
        };
        Self {
            metrics: Arc::clone(&caller.metrics),
            log: caller.access_log.clone(),
            began: now,
            route: ask.route.name,
            upstream: "".into(),
            id: Arc::clone(&ask.id),
            phase: Phase::Accepted,
            phase_since: now,
            wait: None,
            work: None,
            worked: false,
            outcome: None,
            meter: Meter::default(),
            line: Box::new(line),
            settled: false,
        }
    }

    /// For an exchange that is no call: nothing is written.
    pub fn unwritten(caller: &Caller) -> Self {
        let now = Instant::now();
        Self {
            metrics: Arc::clone(&caller.metrics),
            log: AccessLog::off(),
            began: now,
            route: "",
            upstream: "".into(),
            id: "".into(),
            phase: Phase::Accepted,
            phase_since: now,
            wait: None,
            work: None,
            worked: false,
            outcome: None,
            meter: Meter::default(),
            line: Box::default(),
            settled: true,
        }
    }

    /// The call ended with an error of ours.
    pub fn refused(&mut self, rejection: &super::Rejection, status: u16) {
        if !matches!(rejection, super::Rejection::Gone) {
            self.status(status);
        }
        super::aftermath::note(rejection, self);
    }

    pub fn id(&self) -> &Arc<str> {
        &self.id
    }

    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// The call goes on to `phase`; the time in the one before is counted.
    pub fn phase(&mut self, phase: Phase) {
        let now = Instant::now();
        if !self.upstream.is_empty() && self.phase != Phase::Done {
            self.metrics
                .phase_seconds
                .get_or_create(&PhaseLabels {
                    upstream: Arc::clone(&self.upstream),
                    phase: self.phase.name(),
                })
                .observe(now.duration_since(self.phase_since).as_secs_f64());
        }
        self.phase = phase;
        self.phase_since = now;
    }

    pub fn received(&mut self, upload: &Upload) {
        self.line.request_bytes = upload.len();
    }

    pub fn routed(&mut self, target: &Target<'_>, peek: Option<&Peek>) {
        self.upstream = Arc::clone(&target.upstream.name);
        self.line.upstream = Some(self.upstream.to_string());
        if let Some(peek) = peek {
            self.line.model = peek
                .model
                .as_ref()
                .map(|m| m.chars().take(MODEL_CHARS).collect());
            self.line.stream = peek.stream;
        }
    }

    pub fn admitted(&mut self, _queued_for: Duration) {
        self.line.admitted_ms = Some(millis(self.elapsed()));
    }

    /// One more connection is tried; from here on there may be work upstream.
    pub fn attempt(&mut self, endpoint: &Arc<str>) {
        self.line.attempts += 1;
        self.line.endpoint = Some(endpoint.to_string());
    }

    pub fn sent(&mut self) {
        self.worked = true;
        self.line.sent_ms = Some(millis(self.elapsed()));
    }

    pub fn head(&mut self) {
        self.line.head_ms = Some(millis(self.elapsed()));
    }

    pub fn first_byte(&mut self) {
        if self.line.first_byte_ms.is_none() {
            self.line.first_byte_ms = Some(millis(self.elapsed()));
        }
    }

    pub fn first_token(&mut self) {
        if self.line.first_token_ms.is_none() {
            let elapsed = self.elapsed();
            self.line.first_token_ms = Some(millis(elapsed));
            self.metrics
                .ttft_seconds
                .get_or_create(&UpstreamLabel {
                    upstream: Arc::clone(&self.upstream),
                })
                .observe(elapsed.as_secs_f64());
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

    pub fn has_first_byte(&self) -> bool {
        self.line.first_byte_ms.is_some()
    }

    pub fn status(&mut self, status: u16) {
        self.line.status = Some(status);
    }

    pub fn sent_downstream(&mut self, bytes: usize) {
        self.line.response_bytes += bytes as u64;
    }

    /// The first word on the outcome stands.
    pub fn outcome(&mut self, outcome: Outcome, reason: Option<&'static str>) {
        self.outcome.get_or_insert((outcome, reason));
    }

    pub fn wait_ended(&mut self, why: WaitEnd) {
        let elapsed = self.elapsed();
        self.wait.get_or_insert((why, elapsed));
    }

    /// The upstream's work is over, as far as the upstream's contract lets us know.
    pub fn work_ended(&mut self, why: WorkEnd) {
        let elapsed = self.elapsed();
        let why = if self.worked { why } else { WorkEnd::None };
        self.work.get_or_insert((why, elapsed));
    }

    pub fn timed_out(&self, tier: super::deadline::Tier) {
        let labels = TierLabels {
            upstream: Arc::clone(&self.upstream),
            tier: tier.name(),
        };
        self.metrics.timeouts.get_or_create(&labels).inc();
    }

    pub fn malformed(&self, events: u32) {
        if events > 0 {
            let labels = UpstreamLabel {
                upstream: Arc::clone(&self.upstream),
            };
            self.metrics
                .malformed_events
                .get_or_create(&labels)
                .inc_by(u64::from(events));
        }
    }

    /// Writes the record; later calls change nothing.
    pub fn settle(&mut self) {
        self.write();
    }

    fn write(&mut self) {
        if std::mem::replace(&mut self.settled, true) {
            return;
        }
        let (outcome, reason) = self.outcome.unwrap_or((Outcome::Internal, Some("dropped")));
        let (wait, waited) = self.wait.unwrap_or((WaitEnd::Failed, self.elapsed()));
        let (work, worked) = match self.work {
            Some((why, at)) if why != WorkEnd::None => (why, Some(at)),
            _ if self.worked => (WorkEnd::Failed, Some(self.elapsed())),
            _ => (WorkEnd::None, None),
        };
        self.count(outcome, wait, waited);
        let usage = self.meter.settle();
        let line = &mut self.line;
        line.outcome = outcome.name();
        line.reason = reason;
        line.phase = self.phase.name();
        line.wait_end = wait.name();
        line.wait_ended_ms = millis(waited);
        line.work_end = work.name();
        line.work_ended_ms = worked.map(millis);
        line.events = self.meter.events();
        line.input_tokens = usage.usage.input;
        line.output_tokens = usage.usage.output;
        line.usage = usage.source.as_str();
        self.log.write(&self.line);
    }

    fn count(&self, outcome: Outcome, wait: WaitEnd, waited: Duration) {
        let upstream = &self.upstream;
        let label = UpstreamLabel {
            upstream: Arc::clone(upstream),
        };
        self.metrics
            .calls
            .get_or_create(&CallLabels {
                upstream: Arc::clone(upstream),
                route: self.route,
                outcome: outcome.name(),
            })
            .inc();
        self.metrics
            .call_seconds
            .get_or_create(&label)
            .observe(waited.as_secs_f64());
        if matches!(wait, WaitEnd::Left | WaitEnd::Stalled) {
            let labels = PhaseLabels {
                upstream: Arc::clone(upstream),
                phase: self.phase.name(),
            };
            self.metrics.disconnects.get_or_create(&labels).inc();
        }
        if outcome == Outcome::Internal {
            self.metrics.panics.inc();
        }
        let settled = self.meter.settle();
        for (direction, tokens) in [
            ("input", settled.usage.input),
            ("output", settled.usage.output),
        ] {
            if let Some(tokens) = tokens {
                let source = settled.source.as_str();
                let labels = TokenLabels {
                    upstream: Arc::clone(upstream),
                    direction,
                    source,
                };
                self.metrics.tokens.get_or_create(&labels).inc_by(tokens);
            }
        }
        if settled.source == UsageSource::Unknown && self.worked {
            self.metrics.usage_unknown.get_or_create(&label).inc();
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.write();
    }
}
