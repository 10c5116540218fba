//! The protocol of the ledger and its handles, every state of it: lingering, coming back, fairness, shutdown.
//!
//! `RUSTFLAGS="--cfg protocol" cargo test -p tidegate-limiter --test protocol --release`
//!
//! Stateright visits every state that four calls can bring about and checks every invariant in each. Where the
//! order is first in, first out, the crate itself is taken along to each of them and one step further, by every
//! step there is, and compared. Faults are put into the rules to see that the invariants find them.
#![cfg(protocol)]
#![expect(clippy::print_stdout, reason = "how much was explored")]

#[path = "protocol/replay.rs"]
mod replay;
#[path = "protocol/rules.rs"]
mod rules;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use stateright::{Checker, CheckerVisitor, HasDiscoveries, Model, Path, Property};

use self::replay::Replay;
use self::rules::{Bounds, CALLS, Call, Counts, Door, Fault, Phase, Rules, State, Step};

const ONE: Bounds = Bounds {
    calls: CALLS,
    limit: 1,
    hard_limit: 1,
    queue: 2,
    flows: [0; CALLS],
    weights: [1; CALLS],
};

/// One leftover is tolerated beside the attended call.
const ONE_BESIDE: Bounds = Bounds {
    hard_limit: 2,
    calls: 3,
    ..ONE
};

const HEAVY: Bounds = Bounds {
    limit: 2,
    hard_limit: 2,
    weights: [1, 1, 2, 1],
    ..ONE
};

const NO_QUEUE: Bounds = Bounds { queue: 0, ..HEAVY };

/// A flood of one flow, and a newcomer.
const FLOWS: Bounds = Bounds {
    queue: 3,
    flows: [0, 0, 0, 1],
    ..ONE
};

const FLOWS_MIXED: Bounds = Bounds {
    flows: [0, 1, 1, 0],
    ..FLOWS
};

impl Model for Rules {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State::new()]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        self.steps(state, steps);
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        Some(self.take(state, step))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(
                "no more really runs than the hard limit",
                |rules, state: &State| really_running(rules, state) <= rules.bounds.hard_limit,
            ),
            Property::always(
                "no more is attended than the limit",
                |rules, state: &State| {
                    let attended = |call: &Call| call.phase == Phase::Running && call.attended;
                    state.weight(rules, attended) <= rules.bounds.limit
                },
            ),
            Property::always("the counts add up", |_, state: &State| adds_up(state)),
            Property::always(
                "no slot is free while the next one fits",
                |rules, state: &State| {
                    rules
                        .next(state)
                        .is_none_or(|next| !rules.fits(state, next))
                },
            ),
            Property::always(
                "what holds a slot can still give it back",
                |_, state: &State| {
                    let held = |phase| matches!(phase, Phase::Running | Phase::Lingering);
                    let can_end = |hands: rules::Hands| hands.place || hands.slot || hands.linger;
                    let calls = state.calls.iter();
                    calls
                        .into_iter()
                        .all(|call| held(call.phase) == can_end_now(call, can_end))
                },
            ),
            Property::always("when nothing is left to do, all is over", is_over),
            Property::always("a closed limiter queues nobody", |_, state: &State| {
                state.door != Door::Closed || state.queue.is_empty()
            }),
            Property::always("a drain names all that still runs", |_, state: &State| {
                let Some(report) = &state.report else {
                    return true;
                };
                state.holding().iter().all(|call| report.contains(call))
            }),
            Property::always("a flow is passed once at most", |_, state: &State| {
                state.calls.iter().all(|call| call.passed <= 1)
            }),
        ]
    }
}

fn can_end_now(call: &Call, can_end: impl Fn(rules::Hands) -> bool) -> bool {
    let told = matches!(call.phase, Phase::Queued | Phase::Left);
    !told && can_end(call.hands)
}

/// Told by the handles, without asking the ledger.
fn really_running(rules: &Rules, state: &State) -> u8 {
    state.weight(rules, |call| call.hands.slot || call.hands.linger)
}

fn adds_up(state: &State) -> bool {
    let Counts {
        offered,
        rejected,
        admitted,
        left,
        started,
        ended,
        ended_abandoned,
        abandoned,
        reattached,
        unclaimed,
    } = state.counts;
    let (running, lingering) = (
        state.in_phase(Phase::Running),
        state.in_phase(Phase::Lingering),
    );
    let away = state
        .count(|call| matches!(call.phase, Phase::Running | Phase::Lingering) && !call.attended);
    offered == rejected + admitted
        && admitted == state.in_phase(Phase::Queued) + started + left
        && started == running + lingering + ended
        && abandoned == away + ended_abandoned + reattached
        && unclaimed <= ended
}

fn is_over(rules: &Rules, state: &State) -> bool {
    let mut steps = Vec::new();
    rules.steps(state, &mut steps);
    let over = |call: &Call| matches!(call.phase, Phase::Rejected | Phase::Left | Phase::Ended);
    !steps.is_empty() || state.calls[..rules.bounds.calls].iter().all(over)
}

/// Takes the crate to the state, and one step further by every step there is.
struct Along {
    rules: Rules,
    compared: Arc<AtomicUsize>,
}

impl CheckerVisitor<Rules> for Along {
    fn visit(&self, _: &Rules, path: Path<State, Step>) {
        let state = path.last_state().clone();
        let path = path.into_actions();
        let mut steps = Vec::new();
        self.rules.steps(&state, &mut steps);
        for step in steps {
            let mut replay = Replay::new(self.rules.bounds);
            path.iter().for_each(|step| replay.take(*step));
            replay.compare(&state, &self.rules);
            replay.take(step);
            replay.compare(&self.rules.take(&state, step), &self.rules);
            self.compared.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn explore(name: &str, bounds: Bounds) {
    let rules = Rules {
        bounds,
        fault: None,
    };
    let compared = Arc::<AtomicUsize>::default();
    let mut checker = rules.checker().threads(2);
    if bounds.flows == [0; CALLS] {
        let compared = compared.clone();
        checker = checker.visitor(Along { rules, compared });
    }
    let checker = checker.spawn_bfs().join();
    checker.assert_properties();
    println!(
        "{name}: {} states, {} steps deep, {} steps of the crate compared",
        checker.unique_state_count(),
        checker.max_depth(),
        compared.load(Ordering::Relaxed),
    );
}

#[test]
fn a_limit_of_one() {
    explore("one", ONE);
}

#[test]
fn a_leftover_beside_the_limit() {
    explore("one beside", ONE_BESIDE);
}

#[test]
fn a_heavy_call_among_light_ones() {
    explore("heavy", HEAVY);
}

#[test]
fn no_queue() {
    explore("no queue", NO_QUEUE);
}

#[test]
fn two_flows() {
    explore("a flood and a newcomer", FLOWS);
    explore("two flows", FLOWS_MIXED);
}

#[test]
fn faults_are_found() {
    for (fault, bounds, property) in [
        (
            Fault::SlotFollowsWaiter,
            ONE,
            "no more really runs than the hard limit",
        ),
        (
            Fault::LingerFreesTheSlot,
            ONE,
            "no more really runs than the hard limit",
        ),
        (
            Fault::BackAboveTheLimit,
            ONE_BESIDE,
            "no more is attended than the limit",
        ),
        (Fault::ReturnNotCounted, ONE, "the counts add up"),
        (
            Fault::UnclaimedLeaks,
            ONE,
            "what holds a slot can still give it back",
        ),
        (
            Fault::AbandonedHandsNothingOn,
            ONE_BESIDE,
            "no slot is free while the next one fits",
        ),
        (
            Fault::CloseForgetsTheQueue,
            ONE,
            "a closed limiter queues nobody",
        ),
        (
            Fault::FirstComeAcrossFlows,
            FLOWS,
            "a flow is passed once at most",
        ),
        (
            Fault::DrainForgetsTheLingering,
            ONE,
            "a drain names all that still runs",
        ),
    ] {
        let rules = Rules {
            bounds,
            fault: Some(fault),
        };
        let found = HasDiscoveries::AllOf([property].into());
        let checker = rules.checker().threads(1).finish_when(found);
        let checker = checker.spawn_bfs().join();
        let path = checker.discovery(property);
        let path = path.unwrap_or_else(|| panic!("{fault:?} escaped"));
        println!("{fault:?}: {:?}", path.into_actions());
    }
}
