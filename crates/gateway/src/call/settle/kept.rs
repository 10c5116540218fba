//! The record of a call whose slot is kept: until when, and how it is known that the work has ended.

use std::sync::Arc;
use std::time::Duration;

use http::Method;
use tokio::sync::oneshot;

use super::{Record, Standing, Who};
use crate::call::contract;
use crate::call::outcome::{EndKnown, WorkEnd};
use crate::call::wish::Wish;
use crate::config;

impl Record {
    /// What goes upstream asks for a stream, or for an answer in one piece.
    pub fn asks(&mut self, wish: Wish) -> Wish {
        self.asked_stream = wish.events();
        wish
    }

    /// How long the contract keeps the slot once the exchange is closed.
    pub fn kept_by_contract(&self, upstream: &config::Upstream) -> Duration {
        contract::kept(upstream, self.asked_stream)
    }

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

    /// How long the server can have run on behind its exchange, as far as anything is known of that.
    pub(super) fn unseen(&self, work: WorkEnd) -> Option<Duration> {
        let shown = !matches!(self.known, None | Some(EndKnown::Settled));
        match (work, self.entry().upstream()) {
            (WorkEnd::Cancelled, Some(upstream)) if !shown => {
                contract::unseen(&upstream.settings, self.asked_stream, self.kept)
            }
            _ => Some(self.kept),
        }
    }

    pub(super) fn end_known(&self, work: Option<WorkEnd>) -> Option<&'static str> {
        let plain = match work? {
            WorkEnd::None => return None,
            WorkEnd::Cancelled if self.is_killed() => EndKnown::Killed,
            WorkEnd::Cancelled if self.unseen(WorkEnd::Cancelled).is_none() => EndKnown::Assumed,
            WorkEnd::Cancelled => EndKnown::Settled,
            WorkEnd::Failed if !self.kept.is_zero() => EndKnown::Settled,
            WorkEnd::Complete | WorkEnd::Failed => EndKnown::Seen,
            WorkEnd::Unknown => EndKnown::Unknown,
        };
        Some(self.known.unwrap_or(plain).name())
    }

    /// Its retry will be known.
    pub(super) fn mark_abandoned(&mut self) {
        let (_, wait) = self.ends();
        if let (true, Some(mark), None) = (wait.is_left(), self.mark, &self.attached_to) {
            self.mark = None;
            self.books().retried.abandoned(mark, self.id());
        }
    }

    /// What stays behind of a record that goes on: it is not written.
    fn spent(&self) -> Self {
        let who = Who {
            method: Method::GET,
            path: String::new(),
            ..self.who
        };
        let mut spent = Self::with(Standing::Apart(Arc::clone(self.entry())), who);
        spent.settled = true;
        spent
    }
}
