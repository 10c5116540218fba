//! How an answer under way ends: complete, given up, stopped from outside, or dropped.

use std::task::Context as Task;

use bytes::Bytes;

use super::{Relay, RelayState};
use crate::call::aftermath::{self, Running};
use crate::call::deadline::Tier;
use crate::call::outcome::{Outcome, Phase, WaitEnd, WorkEnd};
use crate::call::settle::Record;
use crate::call::source::Source;
use crate::call::stop::By;

impl Relay {
    /// The answer is complete. The connection, the slot and the record go their ways; the client gets the end.
    pub(super) fn complete(&mut self, outcome: Outcome, reason: Option<&'static str>) {
        if self.state != RelayState::Flowing {
            return;
        }
        self.state = RelayState::Done;
        let Some((mut running, mut record)) = self.take() else {
            return;
        };
        record.outcome(outcome, reason);
        record.phase(Phase::Done);
        // The end of the body is usually here already; if so the connection can be kept without further waiting.
        let mut cx = Task::from_waker(std::task::Waker::noop());
        let _ = running.body().poll_data(&mut cx);
        running.ended(WorkEnd::Complete, &mut record);
        self.wait_ended(WaitEnd::Answered, record);
    }

    /// The answer cannot be completed: tell it in-band if we stand between two events, then break off. Never a clean end.
    pub(super) fn fail(
        &mut self,
        outcome: Outcome,
        reason: &'static str,
        message: &str,
        work: WorkEnd,
    ) {
        let between_events = match &self.source {
            Source::Events { scanner, .. } => scanner.at_boundary(),
            Source::Plain { .. } => false,
        };
        self.fail_at(between_events, outcome, (reason, message), work);
    }

    pub(super) fn fail_at(
        &mut self,
        between_events: bool,
        outcome: Outcome,
        (reason, message): (&'static str, &str),
        work: WorkEnd,
    ) {
        if self.state != RelayState::Flowing {
            return;
        }
        let event = match &self.source {
            Source::Events { scanner, .. } if between_events && !self.told => {
                self.error_event(outcome, reason, message, scanner.next_sequence())
            }
            _ => Bytes::new(),
        };
        if event.is_empty() && !self.told {
            self.downstream.break_off();
        }
        self.state = RelayState::Telling(event);
        let Some((running, mut record)) = self.take() else {
            return;
        };
        if reason == By::Client.reason() {
            // It has left, and said so: the contract decides over the rest.
            let source = std::mem::replace(&mut self.source, Source::nothing());
            record.stopped(By::Client);
            aftermath::client_left(running, source, record, false);
            return;
        }
        record.outcome(outcome, Some(reason));
        if work == WorkEnd::Cancelled {
            aftermath::cancel(running, &mut record);
        } else {
            running.ended(work, &mut record);
        }
        self.wait_ended(WaitEnd::Failed, record);
    }

    pub(super) fn give_up(&mut self, tier: Tier) {
        let mut outcome = Outcome::Drained;
        if tier != Tier::Drain {
            outcome = Outcome::TimedOut;
            self.record_mut(|r| r.timed_out(tier));
        }
        self.fail(outcome, tier.name(), tier.message(), WorkEnd::Cancelled);
    }

    /// Before the first byte: a reader that stops is one that asks for no more.
    pub(super) fn arm_stop(&mut self, cx: &mut Task<'_>) {
        if !std::mem::replace(&mut self.stop_armed, true)
            && let Some(entry) = &self.entry
        {
            let _ = entry.poll_stop(cx); // what has been said already is looked at apart
        }
    }

    pub(super) fn stop(&mut self, by: By) {
        self.entry = None;
        self.no_orphan();
        self.fail(
            Outcome::Stopped,
            by.reason(),
            by.message(),
            WorkEnd::Cancelled,
        );
    }

    /// What there still was to end. From here on the answer sees to itself.
    fn take(&mut self) -> Option<(Box<Running>, Box<Record>)> {
        self.reader.has_its_end();
        self.running.take().zip(self.record.take())
    }
}

impl Drop for Relay {
    /// The client left, or its reading had to be ended. Hands over; the exchange is ended by the task that gets it.
    fn drop(&mut self) {
        if let Some((running, mut record)) = self.take() {
            let source = std::mem::replace(&mut self.source, Source::nothing());
            let stopped = self.entry.as_ref().and_then(|entry| entry.stopped());
            if let Some(by) = stopped {
                record.stopped(by);
            }
            let stalled = !self.alone.detached && stopped.is_none() && self.is_stalled();
            aftermath::client_left(running, source, record, stalled);
        }
    }
}
