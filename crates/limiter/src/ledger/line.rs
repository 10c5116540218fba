//! The order of the queue: who is served next, and nothing else.
//!
//! Three classes, each a set of flows, each flow first in, first out.
//!
//! - *Between classes* the higher one goes first, but a class that waits is served at the latest at
//!   every [`FLOOR_EVERY`]th slot that is handed out: a floor, so that nobody starves.
//! - *Between flows* of a class the one that has spent the least slot time goes first. A flow is charged
//!   an estimate when a call of its starts, corrected to the real slot time when it ends; the progress
//!   of the class moves on when calls end, by each one's slot time shared by the flows there are. A flow
//!   that comes, or comes back, starts at that progress: nobody saves up for later.
//!
//! A flow is forgotten as soon as it holds nothing and owes nothing, so there are never more flows than
//! calls plus debtors, and debts last only while others wait.

use std::collections::{BTreeMap, BTreeSet};

use crate::arena::{Arena, Key, List};
use crate::limits::{Class, Limits};

use super::Call;

/// A class that waits gets at least one of so many slots.
const FLOOR_EVERY: u32 = 10;

#[derive(Debug)]
pub(super) struct Line {
    flows: Arena<Flow>,
    /// A tree: it hashes nothing, and its storage follows the number of flows down.
    names: BTreeMap<(Class, u64), Key>,
    ranks: [Rank; Class::ALL.len()],
    turns: u64,
    /// The most calls of a flow that hold slots, and of abandoned ones among them.
    most_held: usize,
    most_abandoned: usize,
}

/// One class.
#[derive(Debug, Default)]
struct Rank {
    /// Flows with queued calls that are not capped: the least spent first, then the longest waiting.
    waiting: BTreeSet<(u64, u64, Key)>,
    /// Flows that hold nothing but still owe.
    resting: BTreeSet<(u64, Key)>,
    /// Flows that hold slots or queued calls.
    active: u64,
    queued: usize,
    /// Those of the queued calls whose flows are not capped.
    ready: usize,
    /// The virtual time: what a flow that always waited would have spent.
    progress: u64,
    passed_over: u32,
}

#[derive(Debug)]
struct Flow {
    class: Class,
    name: u64,
    queue: List<0>,
    /// Slot time charged, in microseconds, on the scale of the class's progress.
    spent: u64,
    /// Calls that hold slots, and those of them whose waiters have left.
    held: usize,
    abandoned: usize,
    /// It is among the waiting.
    waits: bool,
    /// When it joined the waiting flows, for ties.
    turn: u64,
}

// === impl Line ===

impl Line {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            flows: Arena::new(),
            names: BTreeMap::new(),
            ranks: Default::default(),
            turns: 0,
            most_held: limits.flow_limit.get(),
            most_abandoned: limits.flow_abandoned.get(),
        }
    }

    /// Sets new bounds of the flows.
    pub(super) fn cap(&mut self, limits: &Limits) {
        let caps = (limits.flow_limit.get(), limits.flow_abandoned.get());
        if caps == (self.most_held, self.most_abandoned) {
            return;
        }
        (self.most_held, self.most_abandoned) = caps;
        let all: Vec<Key> = self.names.values().copied().collect();
        for key in all {
            self.sort_in(key);
        }
    }

    /// Whether a call waits for a slot, and not only for another one of its flow.
    pub(super) fn waits(&self) -> bool {
        self.ranks.iter().any(|rank| rank.ready > 0)
    }

    /// Queued calls whose flows are capped.
    pub(super) fn capped(&self) -> usize {
        let ranks = self.ranks.iter();
        ranks.map(|rank| rank.queued - rank.ready).sum()
    }

    pub(super) fn is_capped(&self, class: Class, name: u64) -> bool {
        if (self.most_held, self.most_abandoned) == (usize::MAX, usize::MAX) {
            return false; // as by default: nothing to look up
        }
        let flow = self.names.get(&(class, name));
        let flow = flow.and_then(|key| self.flows.get(*key));
        flow.is_some_and(|flow| self.caps(flow))
    }

    fn caps(&self, flow: &Flow) -> bool {
        !cfg!(mutation = "flow_cap_ignored")
            && (flow.held >= self.most_held || flow.abandoned >= self.most_abandoned)
    }

    pub(super) const fn flows(&self) -> usize {
        self.flows.len()
    }

    /// Queued calls that go before one of this class, but for those that are capped.
    pub(super) fn ahead_of(&self, class: Class) -> usize {
        let ranks = &self.ranks[..=class as usize];
        ranks.iter().map(|rank| rank.ready).sum()
    }

    pub(super) fn queued_of(&self, class: Class, name: u64) -> usize {
        let flow = self.names.get(&(class, name));
        let flow = flow.and_then(|key| self.flows.get(*key));
        flow.map_or(0, |flow| flow.queue.len())
    }

    /// Finds or makes the flow of a new call.
    pub(super) fn flow(&mut self, class: Class, name: u64) -> Key {
        if let Some(key) = self.names.get(&(class, name)) {
            return *key;
        }
        let progress = self.ranks[class as usize].progress;
        let key = self.flows.insert(Flow {
            class,
            name,
            queue: List::new(),
            spent: progress,
            held: 0,
            abandoned: 0,
            waits: false,
            turn: 0,
        });
        self.names.insert((class, name), key);
        key
    }

    pub(super) fn push(&mut self, calls: &mut Arena<Call>, call: Key, key: Key) {
        self.rouse(key);
        let Some(flow) = self.flows.get_mut(key) else {
            return;
        };
        let rank = &mut self.ranks[flow.class as usize];
        if flow.queue.len() == 0 {
            self.turns += 1;
            flow.turn = self.turns;
        }
        flow.queue.push_back(calls, call);
        rank.queued += 1;
        rank.ready += usize::from(flow.waits);
        self.sort_in(key);
    }

    /// Takes a queued call out, wherever it stands.
    pub(super) fn remove(&mut self, calls: &mut Arena<Call>, call: Key, key: Key) {
        let Some(flow) = self.flows.get_mut(key) else {
            return;
        };
        let rank = &mut self.ranks[flow.class as usize];
        flow.queue.unlink(calls, call);
        rank.queued -= 1;
        rank.ready -= usize::from(flow.waits);
        if flow.queue.len() == 0 {
            self.sort_in(key);
            self.rest(key);
        }
    }

    /// Decides who is next.
    pub(super) fn next(&self, calls: &Arena<Call>, newest_first: bool) -> Option<Key> {
        let waits = |rank: &Rank| rank.ready > 0;
        let floor = |rank: &Rank| waits(rank) && rank.passed_over + 1 >= FLOOR_EVERY;
        let starved = self.ranks.iter().find(|rank| floor(rank));
        let rank = starved.or_else(|| self.ranks.iter().find(|rank| waits(rank)))?;
        let (_, _, key) = if cfg!(mutation = "most_spent_first") {
            rank.waiting.last()?
        } else {
            rank.waiting.first()?
        };
        let queue = &self.flows.get(*key)?.queue;
        if newest_first || cfg!(mutation = "newest_first") {
            return queue.back(calls);
        }
        queue.front(calls)
    }

    /// A call of this class is served: remembers who was passed over.
    pub(super) fn pass_over(&mut self, served: Class) {
        for (class, rank) in Class::ALL.into_iter().zip(&mut self.ranks) {
            if class == served {
                rank.passed_over = 0;
            } else if rank.ready > 0 {
                rank.passed_over = rank.passed_over.saturating_add(1);
            }
        }
    }

    /// A call of the flow got its slot: charges what it will probably cost.
    pub(super) fn started(&mut self, key: Key, estimate: u64) {
        self.rouse(key);
        let Some(flow) = self.flows.get_mut(key) else {
            return;
        };
        flow.held += 1;
        self.charge(key, |spent| spent.saturating_add(estimate));
        self.sort_in(key);
    }

    /// The waiter of one of its calls left.
    pub(super) fn abandoned(&mut self, key: Key) {
        if let Some(flow) = self.flows.get_mut(key) {
            flow.abandoned += 1;
            self.sort_in(key);
        }
    }

    /// The waiter of one of its calls is back.
    pub(super) fn returned(&mut self, key: Key) {
        if let Some(flow) = self.flows.get_mut(key) {
            flow.abandoned -= 1;
            self.sort_in(key);
        }
    }

    /// A call of the flow gave its slot back: charges what it has cost instead.
    pub(super) fn ended(&mut self, key: Key, estimate: u64, cost: u64, attended: bool) {
        if !cfg!(mutation = "cost_never_corrected") {
            self.charge(key, |spent| {
                spent.saturating_add(cost).saturating_sub(estimate)
            });
        }
        if let Some(flow) = self.flows.get_mut(key) {
            flow.held -= 1;
            flow.abandoned -= usize::from(!attended);
            let rank = &mut self.ranks[flow.class as usize];
            rank.progress = rank.progress.saturating_add(cost / rank.active.max(1));
            if !cfg!(mutation = "capped_for_ever") {
                self.sort_in(key);
            }
            self.rest(key);
        }
    }

    /// Puts a flow among the waiting, or takes it out, as its queue and its bounds have it. One that comes
    /// starts level with the others.
    fn sort_in(&mut self, key: Key) {
        let Some(flow) = self.flows.get(key) else {
            return;
        };
        let waits = flow.queue.len() > 0 && !self.caps(flow);
        let Some(flow) = self.flows.get_mut(key).filter(|flow| flow.waits != waits) else {
            return;
        };
        let rank = &mut self.ranks[flow.class as usize];
        flow.waits = waits;
        if waits {
            flow.spent = flow.spent.max(rank.progress);
            rank.waiting.insert((flow.spent, flow.turn, key));
            rank.ready += flow.queue.len();
        } else {
            rank.waiting.remove(&(flow.spent, flow.turn, key));
            rank.ready -= flow.queue.len();
        }
    }

    fn charge(&mut self, key: Key, spend: impl FnOnce(u64) -> u64) {
        let Some(flow) = self.flows.get_mut(key) else {
            return;
        };
        let rank = &mut self.ranks[flow.class as usize];
        let spent = spend(flow.spent);
        if flow.waits && spent != flow.spent {
            rank.waiting.remove(&(flow.spent, flow.turn, key));
            rank.waiting.insert((spent, flow.turn, key));
        }
        flow.spent = spent;
    }

    /// A flow that held nothing is about to hold something.
    fn rouse(&mut self, key: Key) {
        let Some(flow) = self.flows.get_mut(key) else {
            return;
        };
        if flow.held > 0 || flow.queue.len() > 0 {
            return;
        }
        let rank = &mut self.ranks[flow.class as usize];
        rank.resting.remove(&(flow.spent, key));
        rank.active += 1;
        flow.spent = flow.spent.max(rank.progress);
    }

    /// A flow may hold nothing any more: it rests while it owes, or is forgotten.
    fn rest(&mut self, key: Key) {
        let Some(flow) = self.flows.get(key) else {
            return;
        };
        let rank = &mut self.ranks[flow.class as usize];
        if flow.held == 0 && flow.queue.len() == 0 {
            rank.active -= 1;
            rank.resting.insert((flow.spent, key));
        }
        self.forgive(key);
    }

    /// Forgets the flows of a class that owe nothing: all that rest, if nobody waits.
    fn forgive(&mut self, of: Key) {
        let Some(class) = self.flows.get(of).map(|flow| flow.class) else {
            return;
        };
        let rank = &mut self.ranks[class as usize];
        while let Some((spent, key)) = rank.resting.first().copied() {
            if spent > rank.progress && rank.queued > 0 {
                break;
            }
            rank.resting.pop_first();
            if let Some(flow) = self.flows.remove(key) {
                self.names.remove(&(flow.class, flow.name));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flows_that_owe_nothing_are_forgotten() {
        let mut line = Line::new(&Limits::new(std::num::NonZeroUsize::MIN));
        let flows: Vec<Key> = (0..10_000)
            .map(|name| {
                let flow = line.flow(Class::Normal, name);
                line.started(flow, 1);
                flow
            })
            .collect();
        for flow in flows {
            line.ended(flow, 1, 1, true);
        }
        assert_eq!((line.flows(), line.names.len()), (0, 0));
    }
}
