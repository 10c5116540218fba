//! What a careless caller does: a typed error or a counted end, never a leak, a hang or a panic of ours.

use super::*;

/// Puts the four handles of two calls down in the order that `order` encodes, each in the way that `how` says.
fn put_down(order: usize, how: usize) {
    let rig = Rig::of(1);
    let (first, second) = (rig.start(), rig.offer());
    let linger = (how & 1 == 1).then(|| rig.limiter.idle());
    let mut actions: Vec<Box<dyn FnOnce()>> = vec![
        Box::new(move || drop(first.slot)),
        Box::new(move || drop(first.waiter)),
        Box::new(move || drop(second)),
        Box::new(move || drop(linger)),
    ];
    let mut order = order;
    for left in (1..=actions.len()).rev() {
        let next = actions.remove(order % left);
        order /= left;
        next();
        rig.check();
    }
    let now = rig.check();
    assert_eq!((now.queued, now.running, now.flows), (0, 0, 0));
    assert_eq!(now.started + now.left.total(), 2);
    drop(rig.start());
}

#[test]
fn handles_are_dropped_in_any_order() {
    for order in 0..24 {
        put_down(order, 0);
        put_down(order, 1);
    }
}

#[test]
fn handles_outlive_their_limiter() {
    let Rig { limiter, clock } = Rig::of(1);
    let running = started(limiter.offer(Ask::default()).expect("free"));
    let mut queued = limiter.offer(Ask::default()).expect("queued");
    drop((limiter, clock));
    let alarm = Arc::<Alarm>::default();
    assert!(poll_with(&mut queued, &alarm).is_pending());
    drop(running);
    assert_eq!(alarm.rung(), 1);
    drop(started(queued));
}

#[test]
fn deadlines_in_the_past_and_beyond_all_time() {
    let rig = Rig::of(1);
    rig.clock.advance(SECOND);
    let before = rig.clock.now().checked_sub(3_600 * SECOND);
    let past = Ask::default().with_deadline(before.expect("an hour ago"));
    let running = started(rig.limiter.offer(past.clone()).expect("a free slot"));
    let rejected = rig.limiter.offer(past).expect_err("too late to queue");
    assert_eq!(rejected.reason(), Reason::Deadline);
    assert!(!rejected.started());
    let ages = rig.clock.now() + Duration::from_secs(1 << 40);
    let far = Ask::default().with_deadline(ages);
    drop(rig.limiter.offer(far).expect("queued"));
    drop(running);
    assert_eq!(rig.check().running, 0);
}

#[test]
fn absurd_times_and_weights_are_held_within_bounds() {
    for time in [Duration::ZERO, Duration::MAX] {
        let limits = Limits::new(calls(2))
            .with_queue_time(time)
            .with_target_delay(time);
        let rig = Rig::new(limits);
        let heavy = Ask::default().with_weight(std::num::NonZeroU32::MAX);
        let heaviest = started(rig.limiter.offer(heavy).expect("the whole limit"));
        assert_eq!(rig.check().held_weight, 2);
        let queued = rig.limiter.offer(Ask::default());
        assert_eq!(queued.is_ok(), time == Duration::MAX);
        rig.clock.advance(Duration::MAX);
        rig.check();
        drop((heaviest, queued));
        assert_eq!(rig.check().running, 0);
    }
}

#[test]
fn limits_as_large_as_they_may_be_and_larger() {
    let most = Limits::new(calls(MAX_CALLS))
        .with_queue(MAX_CALLS)
        .with_queue_bytes(u64::MAX);
    let rig = Rig::new(most);
    drop(rig.start());
    for (limits, setting) in [
        (Limits::new(calls(MAX_CALLS + 1)), "limit"),
        (Limits::new(calls(usize::MAX)), "limit"),
        (most.with_hard_limit(calls(MAX_CALLS + 1)), "hard_limit"),
        (most.with_queue(MAX_CALLS + 1), "queue"),
    ] {
        let error = rig.limiter.resize(limits).expect_err("too large");
        assert!(matches!(error, LimitsError::TooLarge { setting: s, .. } if s == setting));
        assert_eq!(rig.limiter.limits(), most, "the old bounds stay");
    }
}

#[test]
fn a_panic_among_the_handles_ends_what_it_passes() {
    let rig = Rig::of(1);
    let (running, queued) = (rig.start(), rig.offer());
    let end = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        let _both = (running, queued);
        panic!("the caller failed");
    }));
    assert!(end.is_err());
    let now = rig.check();
    assert_eq!((now.queued, now.running, now.flows), (0, 0, 0));
    assert_eq!(now.ended.panicked.total(), 1);
    drop(rig.start());
}

#[test]
fn a_limiter_is_closed_twice_and_asked_again() {
    let rig = Rig::of(1);
    let running = rig.start();
    rig.limiter.close();
    rig.limiter.close();
    rig.limiter.seal();
    let rejected = rig.try_offer(0).expect_err("closed");
    assert_eq!(rejected.reason(), Reason::Closed);
    rig.limiter
        .resize(Limits::new(calls(9)))
        .expect("sound limits");
    assert!(rig.try_offer(0).is_err(), "it stays closed");
    drop(running);
    assert!(poll(&mut rig.limiter.idle()).is_ready());
}
