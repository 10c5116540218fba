//! Whose work may still run at one endpoint, by the server's own count. Pure: what is known and the time in, whose slots are free out.
//!
//! The server shows how many calls it has in hand, not which. Of those we know to be others' (our open exchanges that certainly run there)
//! the rest is the most that can be left of abandoned work: so many slots stay taken, whichever of them it is, and the others are free.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::call::entry::{Entry, WorkState};
use crate::call::outcome::EndKnown;

/// A count that is so much older than the first token of a call, or so much younger than its end, is certain to include it, or not to: the
/// server counts and answers in different tasks.
pub(super) const GRACE: Duration = Duration::from_millis(250);
/// Counts without a busy server that it takes to know that a call without a token is not hidden in its queue.
const LOOKS: u8 = 2;

/// The server has so long to notice a close before it is asked.
pub(super) const FIRST_AFTER: Duration = Duration::from_millis(50);
/// llama.cpp looks once a second whether the client of a call without a token is still there, and every answer it gives, that to a poll
/// among them, puts the look off (measured on build 10434): a faster poll would keep alive what it asks after.
pub(super) const QUIET: Duration = Duration::from_secs(2);
const QUIET_FIRST: Duration = Duration::from_millis(1500);

/// A call whose exchange is closed and whose slot is kept.
#[derive(Debug)]
pub(super) struct Left {
    pub(super) id: u64,
    pub(super) closed: Instant,
    /// From then on the server is held to have stopped, unless it shows otherwise.
    pub(super) settled: Instant,
    /// Until then that is believed.
    pub(super) last: Instant,
    /// Proof that the server worked on it, and counted it.
    pub(super) first_token: Option<Instant>,
    pub(super) entry: Option<Arc<Entry>>,
    /// Counts that would have shown it, had it been there.
    looks: u8,
}

impl Left {
    pub(super) fn new(
        id: u64,
        closed: Instant,
        (kept, within): (Duration, Duration),
        first_token: Option<Instant>,
        entry: Option<Arc<Entry>>,
    ) -> Self {
        Self {
            id,
            closed,
            settled: closed + kept,
            last: closed + kept + within,
            first_token,
            entry,
            looks: 0,
        }
    }

    /// The count begun then would show it if it still ran.
    fn is_counted(&self, begun: Instant) -> bool {
        let before = |at: Instant| at + GRACE <= begun;
        self.looks >= LOOKS || self.first_token.is_some_and(before)
    }
}

/// A count that the server gave.
#[derive(Clone, Copy, Debug)]
pub(super) struct ServerCount {
    pub(super) begun: Instant,
    /// Calls that it has in hand.
    pub(super) in_hand: u64,
    /// None can be hidden: it had room for more.
    pub(super) whole: bool,
}

/// Whether the server can be asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Page {
    #[default]
    Unread,
    Read,
    Unreadable,
}

#[derive(Debug, Default)]
pub(super) struct Book {
    left: Vec<Left>,
    pub(super) page: Page,
    /// The last count: when it was begun, and how many abandoned calls it leaves room for.
    seen: Option<(Instant, usize)>,
}

impl Book {
    pub(super) fn add(&mut self, left: Left) {
        self.left.push(left);
    }

    pub(super) fn remove(&mut self, id: u64) {
        self.left.retain(|left| left.id != id);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.left.is_empty()
    }

    /// The server has so many calls in hand; `own` of them are certainly not abandoned ones.
    pub(super) fn count(&mut self, count: ServerCount, own: usize) {
        self.page = Page::Read;
        let most = usize::try_from(count.in_hand).unwrap_or(usize::MAX);
        self.seen = Some((count.begun, most.saturating_sub(own)));
    }

    /// As far as this count goes no call is hidden. Once for each count.
    pub(super) fn saw(&mut self, count: ServerCount) {
        for left in &mut self.left {
            if left.closed + GRACE <= count.begun {
                let whole = count.whole;
                left.looks = if whole {
                    left.looks.saturating_add(1)
                } else {
                    0
                };
            }
        }
    }

    /// There is no count to be had.
    pub(super) fn unreadable(&mut self) {
        self.page = Page::Unreadable;
        self.seen = None;
    }

    /// Takes out the calls whose slots are free now, with how that is known.
    pub(super) fn free(&mut self, now: Instant) -> Vec<(u64, EndKnown)> {
        let mut free = Vec::new();
        if let Some((begun, still)) = self.seen {
            self.free_counted(now, (begun, still), &mut free);
        }
        for left in &self.left {
            if free.iter().any(|(id, _)| *id == left.id) {
                continue;
            }
            let is_covered = self.seen.is_some_and(|(begun, _)| left.closed < begun);
            if now >= left.last {
                let shown = is_covered && self.page == Page::Read;
                let known = if shown {
                    EndKnown::GivenUp
                } else {
                    EndKnown::Settled
                };
                free.push((left.id, known));
            } else if now >= left.settled {
                if self.page == Page::Unreadable {
                    free.push((left.id, EndKnown::Settled));
                } else if is_covered && let Some(entry) = &left.entry {
                    entry.state(WorkState::Overdue);
                }
            }
        }
        self.left
            .retain(|left| !free.iter().any(|(id, _)| *id == left.id));
        free
    }

    /// At most `still` of the calls that were closed before the count began still run.
    fn free_counted(
        &self,
        now: Instant,
        (begun, still): (Instant, usize),
        free: &mut Vec<(u64, EndKnown)>,
    ) {
        let covered = self.left.iter().filter(|left| left.closed < begun);
        let (mut counted, hidden): (Vec<&Left>, Vec<&Left>) =
            covered.partition(|left| left.is_counted(begun));
        let covered = counted.len() + hidden.len();
        // What the server shows may be all counted ones: so many of those stay. The longest overdue is free first.
        counted.sort_by_key(|left| (now < left.settled, left.closed));
        let sure = counted.len().saturating_sub(still);
        for left in counted.into_iter().take(sure) {
            let known = if now < left.settled {
                EndKnown::Confirmed
            } else {
                EndKnown::Late
            };
            free.push((left.id, known));
        }
        // Of those that it may not show the time speaks, as long as there are enough others for what it shows.
        let room = (covered - free.len()).saturating_sub(still);
        let settled = hidden.into_iter().filter(|left| now >= left.settled);
        free.extend(settled.take(room).map(|left| (left.id, EndKnown::Settled)));
    }

    /// When the server may be asked again. `polled`: the end of the last poll, and the time from it to the next.
    pub(super) fn due(
        &self,
        polled: Option<(Instant, Duration)>,
        is_llama: bool,
    ) -> Option<Instant> {
        let unasked = |left: &&Left| polled.is_none_or(|(polled, _)| left.closed >= polled);
        // A call that was just left is asked after soon, but not sooner than the least time after the last poll.
        let noticed = self
            .left
            .iter()
            .filter(unasked)
            .map(|left| left.closed)
            .min();
        let noticed = noticed.map(|closed| closed + FIRST_AFTER);
        let due = noticed.max(polled.map(|(polled, gap)| polled + gap));
        let hidden = self.left.iter().filter(|left| left.first_token.is_none());
        match hidden.map(|left| left.closed).min() {
            Some(closed) if is_llama => due
                .max(Some(closed + QUIET_FIRST))
                .max(polled.map(|(polled, _)| polled + QUIET)),
            _ => due,
        }
    }

    /// When time alone changes something.
    pub(super) fn next_change(&self, now: Instant) -> Option<Instant> {
        let next = |left: &Left| {
            if now < left.settled {
                left.settled
            } else {
                left.last
            }
        };
        self.left.iter().map(next).min()
    }
}
