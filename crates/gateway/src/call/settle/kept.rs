//! The record of a call whose slot is kept: until when, and how it is known that the work has ended.

use std::sync::Arc;
use std::time::Duration;

use http::Method;
use tokio::sync::oneshot;

use super::{Record, Who};
use crate::auth::Principal;
use crate::call::outcome::{EndKnown, WaitEnd, WorkEnd};
use crate::telemetry::access_log::AccessLog;

impl Record {
    /// The slot is kept for so long after the exchange.
    pub fn keeps(&mut self, kept: Duration) {
        self.kept = kept;
    }

    /// It is known how and when the work ended: the slot was kept for so long.
    pub fn known(&mut self, known: EndKnown, kept: Duration) {
        self.known = Some(known);
        self.kept = kept;
    }

    /// The record goes, when all else is known, to whoever keeps the slot until the work has ended.
    pub fn wait_for(&mut self, keeper: oneshot::Sender<Box<Self>>) {
        self.known = Some(EndKnown::Unknown);
        self.keeper = Some(keeper);
    }

    /// Goes to whoever keeps the slot, if anybody does.
    pub(super) fn hand_on(&mut self) -> bool {
        let Some(keeper) = self.keeper.take() else {
            return false;
        };
        self.mark_abandoned();
        let spent = self.spent();
        let record = Box::new(std::mem::replace(self, spent));
        // Without a keeper the record comes back, and is settled by its drop.
        let _ = keeper.send(record);
        true
    }

    pub(super) fn end_known(&self, work: Option<WorkEnd>) -> Option<&'static str> {
        let plain = match work? {
            WorkEnd::None => return None,
            WorkEnd::Cancelled if self.is_killed() => EndKnown::Killed,
            WorkEnd::Cancelled => EndKnown::Settled,
            WorkEnd::Failed if !self.kept.is_zero() => EndKnown::Settled,
            WorkEnd::Complete | WorkEnd::Failed => EndKnown::Seen,
            WorkEnd::Unknown => EndKnown::Unknown,
        };
        Some(self.known.unwrap_or(plain).name())
    }

    /// Its retry will be known.
    pub(super) fn mark_abandoned(&mut self) {
        let (_, (wait, ..)) = self.ends();
        let left = matches!(wait, WaitEnd::Left | WaitEnd::Stalled);
        if let (true, Some(mark), None) = (left, self.mark, &self.attached_to) {
            self.mark = None;
            self.retried.abandoned(mark, &self.who.id);
        }
    }

    /// What stays behind of a record that goes on: it is not written.
    fn spent(&self) -> Self {
        let who = Who {
            id: Arc::clone(&self.who.id),
            principal: Principal::default(),
            method: Method::GET,
            path: String::new(),
            ..self.who
        };
        let mut spent = Self::with((&self.metrics, &self.retried), AccessLog::off(), who);
        spent.settled = true;
        spent
    }
}
