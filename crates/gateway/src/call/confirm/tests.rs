use std::time::Duration;

use proptest::prelude::*;
use tokio::time::Instant;

use super::book::{Book, FIRST_AFTER, GRACE, Left, Page, QUIET, ServerCount};
use crate::call::outcome::EndKnown;

const MS: Duration = Duration::from_millis(1);
const SETTLE: Duration = Duration::from_secs(1);
const WITHIN: Duration = Duration::from_secs(10);

fn count(begun: Instant, in_hand: u64) -> ServerCount {
    ServerCount {
        begun,
        in_hand,
        whole: false,
    }
}

/// One call with a token long before it was closed at `zero`, and one without.
fn two(zero: Instant) -> Book {
    let mut book = Book::default();
    let bounds = (SETTLE, WITHIN);
    book.add(Left::new(1, zero, bounds, Some(zero - SETTLE), None));
    book.add(Left::new(2, zero, bounds, None, None));
    book
}

fn start() -> Instant {
    Instant::now() + 60 * SETTLE
}

#[test]
fn a_count_frees_what_it_would_have_shown_and_nothing_else() {
    let zero = start();
    let mut book = two(zero);
    let at = zero + 300 * MS;
    book.count(count(zero, 0), 0);
    assert_eq!(book.free(at), [], "it was begun before they were closed");
    book.count(count(at, 1), 0);
    assert_eq!(book.free(at), [], "it may be the one");
    book.count(count(at, 5), 4);
    assert_eq!(book.free(at), [], "four are others', not five");
    book.count(count(at, 5), 5);
    assert_eq!(book.free(at), [(1, EndKnown::Confirmed)]);
    assert_eq!(book.free(zero + SETTLE), [(2, EndKnown::Settled)]);
}

#[test]
fn a_token_of_this_moment_is_not_counted_yet() {
    let zero = start();
    let mut book = Book::default();
    book.add(Left::new(1, zero, (SETTLE, WITHIN), Some(zero), None));
    book.count(count(zero + GRACE - MS, 0), 0);
    assert_eq!(book.free(zero + GRACE), []);
    book.count(count(zero + GRACE, 0), 0);
    assert_eq!(book.free(zero + GRACE), [(1, EndKnown::Confirmed)]);
}

#[test]
fn what_is_still_shown_is_kept_to_its_bound() {
    let zero = start();
    let mut book = two(zero);
    for second in 1..11 {
        let now = zero + second * SETTLE;
        book.count(count(now - 10 * MS, 2), 0);
        assert_eq!(book.free(now), [], "{second}");
    }
    let mut late = two(zero);
    late.count(count(zero + 5 * SETTLE, 1), 0);
    let free = late.free(zero + 5 * SETTLE + 10 * MS);
    assert_eq!(
        free,
        [(2, EndKnown::Settled)],
        "one of two; the other may be what is shown"
    );
    late.count(count(zero + 6 * SETTLE, 0), 0);
    let free = late.free(zero + 6 * SETTLE + 10 * MS);
    assert_eq!(free, [(1, EndKnown::Late)]);
    let end = zero + SETTLE + WITHIN;
    let given_up = [(1, EndKnown::GivenUp), (2, EndKnown::GivenUp)];
    assert_eq!(book.free(end), given_up);
}

#[test]
fn without_a_count_the_time_of_the_contract_stands() {
    let zero = start();
    let mut book = two(zero);
    assert_eq!(book.free(zero + 2 * SETTLE), [], "a poll may be on its way");
    book.unreadable();
    assert_eq!(book.free(zero + SETTLE - MS), []);
    let settled = [(1, EndKnown::Settled), (2, EndKnown::Settled)];
    assert_eq!(book.free(zero + SETTLE), settled);
    let mut silent = two(zero);
    assert_eq!(
        silent.free(zero + SETTLE + WITHIN),
        settled,
        "whatever happens"
    );
    assert_eq!(silent.page, Page::Unread);
}

#[test]
fn a_call_without_a_token_is_known_where_none_can_hide() {
    let zero = start();
    let mut book = two(zero);
    let whole = |begun| ServerCount {
        begun,
        in_hand: 0,
        whole: true,
    };
    for (millis, free) in [(300, vec![1]), (2300, vec![2])] {
        let begun = zero + millis * MS;
        book.saw(whole(begun));
        book.count(whole(begun), 0);
        let ids: Vec<_> = book.free(begun).into_iter().map(|(id, _)| id).collect();
        assert_eq!(ids, free, "{millis}");
    }
    let mut full = two(zero);
    full.saw(whole(zero + 300 * MS));
    full.saw(count(zero + 2300 * MS, 0));
    full.saw(whole(zero + 4300 * MS));
    full.count(whole(zero + 4300 * MS), 0);
    let early = full.free(zero + 500 * MS);
    assert_eq!(early, [(1, EndKnown::Confirmed)], "it was full in between");
}

/// A poll puts off llama.cpp's own look, once a second, at whether the client of a call without a token is there.
#[test]
fn a_poll_does_not_keep_alive_what_it_asks_after() {
    let zero = start();
    let each = 200 * MS;
    let streams = {
        let mut book = two(zero);
        book.remove(2);
        book
    };
    let soon = Some(zero + FIRST_AFTER);
    assert_eq!(
        streams.due(None, true),
        soon,
        "this one stops with its stream"
    );
    assert_eq!(two(zero).due(None, false), soon);
    let polled = Some((zero + FIRST_AFTER, each));
    assert_eq!(streams.due(polled, true), Some(zero + FIRST_AFTER + each));
    let first = two(zero).due(None, true).unwrap();
    assert!(first > zero + SETTLE);
    let next = two(zero).due(Some((first, each)), true).unwrap();
    assert!(next >= first + QUIET && QUIET > SETTLE);
    // Others that are left meanwhile put nothing off, and bring nothing forward.
    let mut more = two(zero);
    more.add(Left::new(3, first - MS, (SETTLE, WITHIN), None, None));
    assert_eq!(more.due(Some((first, each)), true), Some(next));
    assert_eq!(Book::default().due(None, true), None);
}

/// A server with calls of all sorts, and the book that looks at its count from time to time.
#[derive(Clone, Debug)]
struct World {
    /// Closed at, ends at, had a token; in units of 50 ms.
    left: Vec<(u32, u32, bool)>,
    /// Calls of others that run all the time, and those of ours that certainly do.
    foreign: u64,
    own: u64,
    /// Of ours, those that are not certain.
    unsure: u64,
    polls: Vec<u32>,
}

fn world() -> impl Strategy<Value = World> {
    let left = proptest::collection::vec((0u32..60, 0u32..200, any::<bool>()), 1..8);
    let polls = proptest::collection::btree_set(1u32..300, 0..40);
    (left, 0u64..3, 0u64..3, 0u64..3, polls).prop_map(|(left, foreign, own, unsure, polls)| World {
        left,
        foreign,
        own,
        unsure,
        polls: polls.into_iter().collect(),
    })
}

proptest! {
    /// As long as the bound is not reached, no more work of left calls runs than slots are kept for it.
    #[test]
    fn never_less_slots_than_work(world in world()) {
        let zero = start();
        let unit = 50 * MS;
        let mut book = Book::default();
        let mut kept: Vec<u64> = Vec::new();
        let ends = |id: u64| {
            let (closed, runs, token) = world.left[usize::try_from(id).unwrap()];
            // What the server may hide ends within its settle time: that is what the time is for.
            closed + if token { runs } else { runs.min(20) }
        };
        for tick in 0u32..400 {
            let now = zero + tick * unit;
            for (id, (closed, _, token)) in (0u64..).zip(&world.left) {
                if *closed == tick {
                    let first = token.then(|| now - SETTLE);
                    book.add(Left::new(id, now, (SETTLE, 100 * WITHIN), first, None));
                    kept.push(id);
                }
            }
            if world.polls.contains(&tick) {
                let shown = kept_or_not(&world, tick, ends);
                let in_hand = shown + world.foreign + world.own + world.unsure;
                book.count(count(now, in_hand), usize::try_from(world.own).unwrap());
            }
            for (id, known) in book.free(now) {
                prop_assert!(known != EndKnown::GivenUp);
                kept.retain(|k| *k != id);
            }
            let runs = (0u64..).zip(&world.left).filter(|(id, (closed, ..))| *closed <= tick && tick < ends(*id)).count();
            prop_assert!(kept.len() >= runs, "tick {tick}: {} slots, {runs} run", kept.len());
        }
    }
}

/// Left calls that the server shows: those that had a token.
fn kept_or_not(world: &World, tick: u32, ends: impl Fn(u64) -> u32) -> u64 {
    let shown = (0u64..)
        .zip(&world.left)
        .filter(|(id, (closed, _, token))| *token && *closed <= tick && tick < ends(*id));
    shown.count() as u64
}
