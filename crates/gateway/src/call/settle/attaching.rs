//! What the record of a call says of retries that take it up, and that of such a retry.

use std::time::Duration;

use tokio::time::Instant;

use super::{Ending, Record};
use crate::call::entry::Entry;
use crate::call::outcome::{EndedWait, Outcome, Phase, WaitEnd};
use crate::call::retried::Mark;

/// Nobody waits, for now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Away {
    /// After the beginning.
    since: Duration,
    phase: Phase,
    how: WaitEnd,
    /// Bytes of the answer that were handed on before.
    handed: u64,
}

impl Record {
    /// Nobody waits since `at`, but a retry may still come.
    pub fn away(&mut self, at: Instant, how: WaitEnd) {
        let since = at.duration_since(self.began);
        if self.away.is_none_or(|away| away.since != since) {
            self.meter.back();
            self.meter.left();
            self.left_in.get_or_insert(self.phase);
            self.away = Some(Away {
                since,
                phase: self.phase,
                how,
                handed: self.response_bytes,
            });
        }
    }

    /// A retry has taken the call up: nobody has left.
    pub fn back(&mut self) {
        if self.away.take().is_some() {
            self.meter.back();
        }
    }

    /// How it all ended, and how the wait did. If nobody came back it is of no interest how the answer ended.
    pub(super) fn ends(&self) -> (Ending, EndedWait) {
        let Some(away) = self.away else {
            let unknown = || EndedWait {
                why: WaitEnd::Failed,
                after: self.elapsed(),
                phase: self.phase,
            };
            let dropped = (Outcome::Internal, Some("dropped"));
            return (
                self.outcome.unwrap_or(dropped),
                self.wait.unwrap_or_else(unknown),
            );
        };
        let outcome = match away.how {
            WaitEnd::Stalled => Outcome::ClientStalled,
            _ => Outcome::ClientClosed,
        };
        let wait = EndedWait {
            why: away.how,
            after: away.since,
            phase: away.phase,
        };
        ((outcome, None), wait)
    }

    /// Bytes of the answer that somebody was there for.
    pub(super) fn handed_bytes(&self) -> u64 {
        self.away.map_or(self.response_bytes, |away| away.handed)
    }

    /// Nobody waits; true if that is new.
    pub fn away_now(&mut self) -> bool {
        let new = self.away.is_none();
        if new {
            self.away(Instant::now(), WaitEnd::Left);
        }
        new
    }

    /// Since when nobody waits.
    pub fn away_since(&self) -> Option<Instant> {
        self.away.map(|away| self.began + away.since)
    }

    /// So many retries have taken the call up.
    pub fn taken_up(&mut self, times: u64) {
        self.attaches = u32::try_from(times).unwrap_or(u32::MAX);
    }

    /// This call is to be given the answer of that one.
    pub fn attaches(&mut self, to: &Entry) {
        self.attached_to = Some(to.id);
        if let Some(entry) = self.listed_entry() {
            entry.attaches_to(self.attached_to);
        }
    }

    /// It was over; this is a call of its own.
    pub fn attaches_no_more(&mut self) {
        self.retry_of = self.attached_to.take().or(self.retry_of.take());
        if let Some(entry) = self.listed_entry() {
            entry.attaches_to(None);
        }
    }

    /// What a retry would be known by.
    pub fn mark(&self) -> Option<Mark> {
        self.mark
    }

    pub fn principal(&self) -> &str {
        self.entry().principal.name()
    }
}
