//! An answer that was asked for as a stream and goes on in one piece.
//!
//! Nothing is handed on before all of it is here, so every failure has its true status. The client is watched all the while: when it leaves,
//! the exchange ends as that of a stream does. Its bytes are counted from the first that is gathered on; [`answer`](super::answer) has them counted
//! until the last has left for the client.

use bytes::Bytes;
use tidegate_wire::{AssembleError, Assembler, Facts, Form, answer_facts};
use tokio::time::{Duration, Instant};

use super::aftermath::Running;
use super::answer::Commit;
use super::budget::Lease;
use super::deadline::Tier;
use super::outcome::{Outcome, Phase, Rejection};
use super::settle::Record;
use crate::upstream::mask::Mask;

/// Reads the stream to its end and gives the whole answer, for whose bytes `lease` has room.
///
/// # Errors
///
/// [`Rejection::UpstreamFailed`], [`Rejection::Truncated`], [`Rejection::AnswerTooLarge`], [`Rejection::AnswersFull`],
/// [`Rejection::UnexpectedContent`], and those of [`Patience::within`](super::deadline::Patience::within).
pub(super) async fn gather(
    commit: &Commit<'_>,
    form: Form,
    running: &mut Running,
    (record, lease): (&mut Record, &mut Lease<'_>),
) -> Result<Bytes, Rejection> {
    let dialect = commit.route.dialect;
    let limits = &commit.generation.config.limits;
    let mut assembler = Assembler::new(dialect, form, limits.assembled_bytes);
    let mut count = |bytes| match lease.set(bytes, limits.answers_total_bytes) {
        true => Ok(()),
        false => Err(Rejection::AnswersFull),
    };
    let mut clock = Clock::new();
    let rejection = |error| rejection(error, &commit.upstream.mask);
    while !assembler.is_done() {
        let (tier, left) = clock.next(commit)?;
        let data = match running.next(commit.patience, tier, left, record).await? {
            Some(Ok(data)) => data,
            Some(Err(_)) => return Err(Rejection::Truncated),
            None => break,
        };
        if !record.has_first_byte() {
            record.first_byte();
            record.phase(Phase::Streaming);
        }
        assembler.push(data);
        while let Some(facts) = assembler.take().map_err(&rejection)? {
            clock.saw(&facts);
            record.see(&facts);
            record.malformed(facts.malformed);
            if facts.content {
                record.first_token();
            }
        }
        count(assembler.held_bytes())?;
        if running.is_past_bound(record.meter.since_left()) {
            return Err(Rejection::Gone);
        }
    }
    let whole = assembler.finish().map_err(&rejection)?;
    if answer_facts(dialect, &whole).is_error {
        record.outcome(Outcome::UpstreamError, Some("error_in_200"));
        return Ok(commit.upstream.mask.hide(whole));
    }
    count(whole.len())?;
    Ok(whole)
}

/// Since when nothing meaningful has come.
struct Clock {
    event: Instant,
    seen: bool,
}

impl Clock {
    fn new() -> Self {
        Self {
            event: Instant::now(),
            seen: false,
        }
    }

    fn saw(&mut self, facts: &Facts) {
        if facts.events > 0 {
            self.event = Instant::now();
            self.seen = true;
        }
    }

    /// The wait that runs out first. One that has run out already is an error, also while comments come without a pause.
    fn next(&self, commit: &Commit<'_>) -> Result<(Tier, Duration), Rejection> {
        let now = Instant::now();
        let timeouts = &commit.upstream.settings.timeouts;
        if commit.patience.cut().is_raised() {
            return Err(Rejection::Draining);
        }
        if commit.patience.total.is_some_and(|total| total <= now) {
            return Err(Rejection::Timeout(Tier::Total));
        }
        let (tier, limit) = if self.seen {
            (Tier::Idle, timeouts.idle)
        } else {
            (Tier::FirstEvent, timeouts.first_event)
        };
        let left = (self.event + limit).saturating_duration_since(now);
        if left.is_zero() {
            return Err(Rejection::Timeout(tier));
        }
        Ok(if self.seen && timeouts.silence < left {
            (Tier::Silence, timeouts.silence)
        } else {
            (tier, left)
        })
    }
}

fn rejection(error: AssembleError, mask: &Mask) -> Rejection {
    match error {
        AssembleError::TooLarge { limit } => Rejection::AnswerTooLarge { limit },
        AssembleError::Truncated => Rejection::Truncated,
        AssembleError::Malformed(what) => Rejection::UnexpectedContent { what },
        AssembleError::Failed(mut error) => {
            error.message = mask.hide_text(error.message);
            Rejection::UpstreamFailed(Box::new(error))
        }
    }
}
