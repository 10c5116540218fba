//! The protocol: what a ledger owes to those who hold its handles, without locks, threads or time.
//!
//! The handles are the world's, the states the ledger's. Nothing here is derived from the crate's code, so that
//! a fault has to be made twice to pass.

pub(crate) const CALLS: usize = 4;
pub(crate) const FLOWS: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    pub(crate) limit: u8,
    pub(crate) hard_limit: u8,
    pub(crate) queue: usize,
    /// How many come.
    pub(crate) calls: usize,
    /// Of each call: whose it is, and how many slots it takes.
    pub(crate) flows: [usize; CALLS],
    pub(crate) weights: [u8; CALLS],
}

/// Put into the protocol on purpose: the invariants must see each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The classic one: the slot comes free when the waiter leaves.
    SlotFollowsWaiter,
    LingerFreesTheSlot,
    BackAboveTheLimit,
    ReturnNotCounted,
    UnclaimedLeaks,
    AbandonedHandsNothingOn,
    CloseForgetsTheQueue,
    FirstComeAcrossFlows,
    DrainForgetsTheLingering,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Phase {
    Unborn,
    Rejected,
    Queued,
    Left,
    Running,
    Lingering,
    Ended,
}

/// What the world holds of a call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct Hands {
    pub(crate) place: bool,
    pub(crate) waiter: bool,
    pub(crate) slot: bool,
    pub(crate) linger: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Call {
    pub(crate) phase: Phase,
    pub(crate) attended: bool,
    /// It stepped away once: once is enough.
    pub(crate) stepped: bool,
    pub(crate) hands: Hands,
    /// Starts of other flows while it was the first of its own.
    pub(crate) passed: u8,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct Counts {
    pub(crate) offered: u8,
    pub(crate) rejected: u8,
    pub(crate) admitted: u8,
    pub(crate) left: u8,
    pub(crate) started: u8,
    pub(crate) ended: u8,
    pub(crate) ended_abandoned: u8,
    pub(crate) abandoned: u8,
    pub(crate) reattached: u8,
    pub(crate) unclaimed: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Door {
    Open,
    /// No offers, the queue is served.
    Sealed,
    /// No offers, no queue.
    Closed,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct State {
    pub(crate) calls: [Call; CALLS],
    /// In the order they came.
    pub(crate) queue: Vec<usize>,
    pub(crate) door: Door,
    pub(crate) counts: Counts,
    /// Starts charged to each flow, level with the others when it comes.
    pub(crate) charged: [u8; FLOWS],
    /// What a drain said was left when its deadline came.
    pub(crate) report: Option<Vec<usize>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    Offer(usize),
    /// The place is polled: a slot is picked up, or the end of the place heard.
    Poll(usize),
    DropPlace(usize),
    GoAway(usize),
    ComeBack(usize),
    DropWaiter(usize),
    Done(usize),
    Finish(usize),
    Linger(usize),
    EndLinger(usize),
    Seal,
    Close,
    /// The end of a drain.
    Deadline,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    pub(crate) bounds: Bounds,
    pub(crate) fault: Option<Fault>,
}

// === impl State ===

impl State {
    pub(crate) fn new() -> Self {
        let unborn = Call {
            phase: Phase::Unborn,
            attended: false,
            stepped: false,
            hands: Hands::default(),
            passed: 0,
        };
        Self {
            calls: [unborn; CALLS],
            queue: Vec::new(),
            door: Door::Open,
            counts: Counts::default(),
            charged: [0; FLOWS],
            report: None,
        }
    }

    pub(crate) fn count(&self, is: impl Fn(&Call) -> bool) -> u8 {
        self.calls.iter().map(|call| u8::from(is(call))).sum()
    }

    pub(crate) fn in_phase(&self, phase: Phase) -> u8 {
        self.count(|call| call.phase == phase)
    }

    pub(crate) fn holding(&self) -> Vec<usize> {
        let holds = |call: &usize| {
            let phase = self.calls[*call].phase;
            matches!(phase, Phase::Running | Phase::Lingering)
        };
        (0..CALLS).filter(holds).collect()
    }

    pub(crate) fn weight(&self, rules: &Rules, is: impl Fn(&Call) -> bool) -> u8 {
        let calls = self.calls.iter().enumerate().filter(|(_, call)| is(call));
        calls.map(|(index, _)| rules.held_by(index)).sum()
    }
}

// === impl Rules ===

impl Rules {
    fn has(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    /// A call heavier than the limit takes the whole limit.
    pub(crate) fn held_by(&self, call: usize) -> u8 {
        self.bounds.weights[call].min(self.bounds.limit)
    }

    pub(crate) fn fits(&self, state: &State, call: usize) -> bool {
        let attended = |call: &Call| call.phase == Phase::Running && call.attended;
        let held = |call: &Call| matches!(call.phase, Phase::Running | Phase::Lingering);
        let weight = self.held_by(call);
        state.weight(self, attended) + weight <= self.bounds.limit
            && state.weight(self, held) + weight <= self.bounds.hard_limit
    }

    /// The first of the flow that was charged least; of two that are level, the one whose first call came first.
    pub(crate) fn next(&self, state: &State) -> Option<usize> {
        if self.has(Fault::FirstComeAcrossFlows) {
            return state.queue.first().copied();
        }
        let charged = |call: &&usize| state.charged[self.bounds.flows[**call]];
        state.queue.iter().min_by_key(charged).copied()
    }

    fn is_first_of_its_flow(&self, state: &State, call: usize) -> bool {
        let same = |other: &&usize| self.bounds.flows[**other] == self.bounds.flows[call];
        state.queue.iter().find(same) == Some(&call)
    }

    pub(crate) fn steps(&self, state: &State, steps: &mut Vec<Step>) {
        let unborn = |call: &Call| call.phase == Phase::Unborn;
        steps.extend(
            state.calls[..self.bounds.calls]
                .iter()
                .position(unborn)
                .map(Step::Offer),
        );
        for (index, call) in state.calls.iter().enumerate() {
            let Hands {
                place,
                waiter,
                slot,
                linger,
            } = call.hands;
            let away = !call.attended;
            let mut can = |may: bool, step: fn(usize) -> Step| {
                if may {
                    steps.push(step(index));
                }
            };
            can(place && call.phase != Phase::Queued, Step::Poll);
            can(place, Step::DropPlace);
            can(waiter && !call.stepped && !away, Step::GoAway);
            can(waiter && call.stepped && away, Step::ComeBack);
            can(waiter, Step::DropWaiter);
            can(waiter && !away, Step::Done);
            can(slot, Step::Finish);
            can(slot, Step::Linger);
            can(linger, Step::EndLinger);
        }
        if state.door == Door::Open {
            steps.push(Step::Seal);
        }
        if state.door != Door::Closed {
            steps.push(Step::Close);
        }
        if state.door == Door::Sealed {
            steps.push(Step::Deadline);
        }
    }

    pub(crate) fn take(&self, before: &State, step: Step) -> State {
        let mut state = before.clone();
        match step {
            Step::Offer(call) => self.offer(&mut state, call),
            Step::Poll(call) => {
                let call = &mut state.calls[call];
                let started = call.phase == Phase::Running;
                call.hands = Hands {
                    waiter: started,
                    slot: started,
                    ..Hands::default()
                };
            }
            Step::DropPlace(call) => self.drop_place(&mut state, call),
            Step::GoAway(call) => {
                state.calls[call].stepped = true;
                self.abandon(&mut state, call);
            }
            Step::ComeBack(call) => self.come_back(&mut state, call),
            Step::DropWaiter(call) => {
                state.calls[call].hands.waiter = false;
                self.abandon(&mut state, call);
            }
            Step::Done(call) => state.calls[call].hands.waiter = false,
            Step::Finish(call) => {
                state.calls[call].hands.slot = false;
                self.end(&mut state, call);
            }
            Step::Linger(call) => {
                state.calls[call].hands.slot = false;
                state.calls[call].hands.linger = true;
                state.calls[call].phase = Phase::Lingering;
                if self.has(Fault::LingerFreesTheSlot) {
                    self.end(&mut state, call);
                }
                self.hand_on(&mut state);
            }
            Step::EndLinger(call) => {
                state.calls[call].hands.linger = false;
                self.end(&mut state, call);
            }
            Step::Seal => state.door = Door::Sealed,
            Step::Close => self.close(&mut state),
            Step::Deadline => {
                self.close(&mut state);
                let forgets = self.has(Fault::DrainForgetsTheLingering);
                let mut left = state.holding();
                left.retain(|call| !forgets || state.calls[*call].phase == Phase::Running);
                state.report = Some(left);
            }
        }
        state
    }

    fn offer(&self, state: &mut State, call: usize) {
        state.counts.offered += 1;
        let starts = state.queue.is_empty() && self.fits(state, call);
        if state.door != Door::Open || (!starts && state.queue.len() >= self.bounds.queue) {
            state.calls[call].phase = Phase::Rejected;
            state.counts.rejected += 1;
            return;
        }
        self.level(state, self.bounds.flows[call]);
        state.counts.admitted += 1;
        state.calls[call].phase = Phase::Queued;
        state.calls[call].attended = true;
        state.calls[call].hands.place = true;
        state.queue.push(call);
        self.hand_on(state);
    }

    /// A flow that comes starts level with the one that is there: nobody saves up for later.
    fn level(&self, state: &mut State, flow: usize) {
        let is_here = |of: usize| {
            let flows = self.bounds.flows.iter().zip(&state.calls);
            let here = |phase| matches!(phase, Phase::Queued | Phase::Running | Phase::Lingering);
            flows
                .filter(|(flow, _)| **flow == of)
                .any(|(_, call)| here(call.phase))
        };
        if !is_here(flow) && is_here(1 - flow) {
            state.charged[flow] = state.charged[flow].max(state.charged[1 - flow]);
        } else if !is_here(flow) {
            state.charged = [0; FLOWS];
        }
    }

    fn drop_place(&self, state: &mut State, call: usize) {
        state.calls[call].hands.place = false;
        match state.calls[call].phase {
            Phase::Queued => {
                state.queue.retain(|other| *other != call);
                state.calls[call].phase = Phase::Left;
                state.counts.left += 1;
                self.hand_on(state);
            }
            Phase::Running => {
                state.counts.unclaimed += 1;
                if !self.has(Fault::UnclaimedLeaks) {
                    self.end(state, call);
                }
            }
            _ => {}
        }
    }

    fn abandon(&self, state: &mut State, index: usize) {
        let call = &mut state.calls[index];
        if call.phase != Phase::Running || !call.attended {
            return;
        }
        call.attended = false;
        state.counts.abandoned += 1;
        if self.has(Fault::SlotFollowsWaiter) {
            self.end(state, index);
        }
        if !self.has(Fault::AbandonedHandsNothingOn) {
            self.hand_on(state);
        }
    }

    fn come_back(&self, state: &mut State, index: usize) {
        let attended = |call: &Call| call.phase == Phase::Running && call.attended;
        let taken = state.weight(self, attended) + self.held_by(index);
        let may = taken <= self.bounds.limit || self.has(Fault::BackAboveTheLimit);
        let call = &mut state.calls[index];
        if call.phase != Phase::Running || !may {
            return;
        }
        call.attended = true;
        state.counts.reattached += u8::from(!self.has(Fault::ReturnNotCounted));
    }

    /// A call gives its slot back, if it still has one.
    fn end(&self, state: &mut State, index: usize) {
        let call = &mut state.calls[index];
        if !matches!(call.phase, Phase::Running | Phase::Lingering) {
            return;
        }
        call.phase = Phase::Ended;
        state.counts.ended += 1;
        state.counts.ended_abandoned += u8::from(!call.attended);
        self.hand_on(state);
    }

    fn close(&self, state: &mut State) {
        state.door = Door::Closed;
        if self.has(Fault::CloseForgetsTheQueue) {
            return;
        }
        for call in std::mem::take(&mut state.queue) {
            state.calls[call].phase = Phase::Left;
            state.counts.left += 1;
        }
    }

    /// Slots go to the next, and so on, as long as the next one fits.
    fn hand_on(&self, state: &mut State) {
        while let Some(next) = self.next(state).filter(|next| self.fits(state, *next)) {
            let flow = self.bounds.flows[next];
            for other in state.queue.clone() {
                if self.bounds.flows[other] != flow && self.is_first_of_its_flow(state, other) {
                    state.calls[other].passed += 1;
                }
            }
            state.queue.retain(|other| *other != next);
            state.calls[next].phase = Phase::Running;
            state.charged[flow] += 1;
            state.counts.started += 1;
        }
    }
}
