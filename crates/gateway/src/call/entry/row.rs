//! What others are shown of a call.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::{Entry, WorkState};
use crate::call::Id;
use crate::call::outcome::Phase;

/// What [`Table::list`](crate::call::table::Table::list) shows of one call.
#[derive(Clone, Debug)]
pub struct Row {
    pub id: Id,
    pub own_id: Option<Arc<str>>,
    pub key: String,
    pub route: &'static str,
    pub model: Option<String>,
    pub upstream: Option<Arc<str>>,
    pub endpoint: Option<Arc<str>>,
    /// The upstream's contract for calls whose client has left.
    pub contract: &'static str,
    pub attached_to: Option<Id>,
    pub phase: &'static str,
    pub state: WorkState,
    pub age: Duration,
    /// Since the client left.
    pub left: Option<Duration>,
    /// It waits for its client's retry.
    pub attachable: bool,
    pub tokens: u64,
}

impl Entry {
    /// As it is now.
    pub fn row(&self) -> Row {
        let age = self.began.elapsed();
        let left = match self.left_ms.load(Ordering::Relaxed) {
            0 => None,
            at => Some(age.saturating_sub(Duration::from_millis(at))),
        };
        let upstream = self.upstream();
        let attached_to = self.attached_to.lock();
        Row {
            id: self.id,
            own_id: self.own_id.clone(),
            key: self.principal.name().to_owned(),
            route: self.route.name,
            model: self.model().map(str::to_owned),
            upstream: upstream.map(|at| Arc::clone(&at.name)),
            endpoint: self.endpoint().map(|at| Arc::clone(&at.authority)),
            contract: upstream.map_or("", |at| at.settings.abandon.contract.name()),
            attached_to: *attached_to.unwrap_or_else(PoisonError::into_inner),
            phase: Phase::of(self.phase.load(Ordering::Relaxed)).name(),
            state: match self.state.load(Ordering::Relaxed) {
                0 => WorkState::Attended,
                1 => WorkState::Abandoned,
                2 => WorkState::Lingering,
                3 => WorkState::Overdue,
                _ => WorkState::Kept,
            },
            age,
            left,
            attachable: self.is_attachable(),
            tokens: self.tokens.load(Ordering::Relaxed),
        }
    }
}
