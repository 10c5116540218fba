//! The limiter against a naive model: random sequences of everything a caller can do, every number
//! compared and every identity checked after each step.
#![cfg(not(any(loom, shuttle, protocol)))]

#[path = "model/check.rs"]
mod check;
#[path = "model/choice.rs"]
mod choice;
#[path = "model/naive.rs"]
mod naive;
#[path = "model/world.rs"]
mod world;

use std::cell::RefCell;
use std::collections::BTreeMap;

use proptest::prelude::{ProptestConfig, any};
use proptest::test_runner::TestRunner;
use tidegate_limiter::Snapshot;

use self::choice::Choice;
use self::world::World;

/// How many, unless the environment's `SEQUENCES` says otherwise.
const SEQUENCES: u32 = 20_000;

#[test]
fn the_limiter_is_its_model() {
    let sequences = std::env::var("SEQUENCES").ok();
    let sequences = sequences.map_or(SEQUENCES, |count| count.parse().expect("a number"));
    let mut runner = TestRunner::new(ProptestConfig {
        cases: sequences,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let words = (
        any::<u32>(),
        proptest::collection::vec(any::<u32>(), 1..60),
        any::<u32>(),
    );
    let seen = RefCell::new(BTreeMap::new());
    let outcome = runner.run(&words, |(limits, words, end)| {
        let mut world = World::new(Choice(limits).limits());
        for word in words {
            world.step(word);
        }
        remember(&mut seen.borrow_mut(), &world.finish(end));
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
    for (event, times) in seen.take() {
        assert!(
            times > 10 || sequences < SEQUENCES,
            "the sequences hardly ever came to {event}: {times}"
        );
    }
}

/// Counts what the sequences came to: a model that is never put to the test proves nothing.
fn remember(seen: &mut BTreeMap<String, u64>, (end, predicted): &(Snapshot, u64)) {
    let mut add = |event: String, times: u64| *seen.entry(event).or_default() += times;
    for (reason, times) in end.rejected.by_reason() {
        add(format!("rejected {reason}"), times);
    }
    for (reason, times) in end.left.by_reason() {
        add(format!("left {reason}"), times);
    }
    for (outcome, split) in end.ended.by_outcome() {
        add(format!("ended {outcome} attended"), split.attended);
        add(format!("ended {outcome} abandoned"), split.abandoned);
    }
    add("rejected for a predicted wait".into(), *predicted);
    add("abandoned".into(), end.abandoned_total);
    add("reattached".into(), end.reattached_total);
    add("unclaimed".into(), end.unclaimed_total);
    add("lingered".into(), end.lingered_total);
    add("confirmed".into(), end.confirmed_total);
}
