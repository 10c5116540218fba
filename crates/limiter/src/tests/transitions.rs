//! One test per transition.

use super::*;

#[test]
fn a_slot_free_starts_at_once() {
    let rig = Rig::of(1);
    let started = rig.start();
    assert_eq!(started.queued_for, Duration::ZERO);
    let now = rig.check();
    assert_eq!((now.running, now.attended, now.queued), (1, 1, 0));
    started.slot.finish(Ended::Ok);
    started.waiter.done();
    let now = rig.check();
    assert_eq!((now.running, now.ended.ok.attended), (0, 1));
    assert_eq!(now.abandoned_total, 0);
}

#[test]
fn a_slot_that_was_free_can_be_claimed_and_one_that_is_waited_for_cannot() {
    let rig = Rig::of(1);
    let first = rig.offer().claim().expect("it has its slot");
    assert_eq!(first.queued_for, Duration::ZERO);
    let second = rig.offer().claim().expect_err("it waits for its slot");
    let now = rig.check();
    assert_eq!((now.running, now.queued, now.left.caller), (1, 1, 0));
    first.slot.finish(Ended::Ok);
    let second = second.claim().expect_err("it has waited, which is told");
    let second = started(second);
    let now = rig.check();
    assert_eq!((now.running, now.unclaimed_total), (1, 0));
    drop(second);
}

#[test]
fn the_slot_stays_with_the_work_when_the_waiter_leaves() {
    let rig = Rig::of(1);
    let Started { waiter, slot, .. } = rig.start();
    let mut second = rig.offer();
    drop(waiter);
    assert!(slot.is_abandoned());
    assert!(
        poll(&mut second).is_pending(),
        "two at once under a limit of one"
    );
    let now = rig.check();
    assert_eq!((now.running, now.abandoned, now.queued), (1, 1, 1));
    slot.finish(Ended::Error);
    let second = started(second);
    let now = rig.check();
    assert_eq!(now.ended.error.abandoned, 1);
    assert_eq!((now.running, now.attended), (1, 1));
    drop(second);
}

#[test]
fn the_queue_is_first_in_first_out_and_wakes_the_head() {
    let rig = Rig::of(1);
    let first = rig.start();
    let (mut second, mut third) = (rig.offer(), None);
    assert_eq!(
        rig.try_offer(0).expect_err("full").reason(),
        Reason::QueueFull
    );
    let wide = Limits::new(calls(1)).with_queue(2);
    rig.limiter.resize(wide).expect("sound limits");
    let third = third.get_or_insert_with(|| rig.offer());
    let (early, late) = (Arc::<Alarm>::default(), Arc::<Alarm>::default());
    assert!(poll_with(&mut second, &early).is_pending());
    assert!(poll_with(third, &late).is_pending());
    assert_eq!((second.position(), third.position()), (Some(0), Some(1)));
    rig.clock.advance(3 * SECOND);
    drop(first);
    assert_eq!((early.rung(), late.rung()), (1, 0));
    assert_eq!(third.position(), Some(0));
    assert_eq!(started(second).queued_for, 3 * SECOND);
    assert_eq!(late.rung(), 1, "the second was dropped and ended");
    rig.check();
}

#[test]
fn a_queued_call_that_leaves_is_gone_at_once() {
    let rig = Rig::of(1);
    let running = rig.start();
    let queued = rig.try_offer(70).expect("queued");
    assert_eq!(rig.check().queued_bytes, 70);
    drop(queued);
    let now = rig.check();
    assert_eq!((now.queued, now.queued_bytes, now.left.caller), (0, 0, 1));
    drop(running);
    assert_eq!(rig.check().running, 0);
}

#[test]
fn a_deadline_is_counted_apart() {
    let rig = Rig::of(1);
    let running = rig.start();
    assert!(rig.offer().expire().is_none());
    assert_eq!(rig.check().left.deadline, 1);
    drop(running);
}

#[test]
fn a_deadline_that_meets_its_grant_has_started() {
    let rig = Rig::of(1);
    let running = rig.start();
    let queued = rig.offer();
    drop(running);
    let started = queued.expire().expect("granted in the same instant");
    let now = rig.check();
    assert_eq!((now.left.deadline, now.running), (0, 1));
    drop(started);
    assert!(rig.offer().expire().is_some(), "granted from the start");
    assert_eq!(rig.check().running, 0);
}

#[test]
fn a_grant_nobody_picks_up_is_a_call_that_did_nothing() {
    let rig = Rig::of(1);
    drop(rig.offer());
    let now = rig.check();
    assert_eq!(
        (now.started, now.ended.dropped.attended, now.unclaimed_total),
        (1, 1, 1)
    );
    let running = rig.start();
    let (second, third) = (rig.offer(), rig.limiter.clone());
    third
        .resize(Limits::new(calls(1)).with_queue(2))
        .expect("sound limits");
    let third = rig.offer();
    drop(running);
    drop(second);
    let now = rig.check();
    assert_eq!((now.running, now.queued, now.unclaimed_total), (1, 0, 2));
    started(third).slot.finish(Ended::Ok);
    assert_eq!(rig.check().running, 0);
}

#[test]
fn a_queue_of_none_starts_or_rejects() {
    let rig = Rig::new(Limits::new(calls(1)).with_queue(0));
    let running = rig.start();
    let rejected = rig.try_offer(0).expect_err("no queue");
    assert_eq!(rejected.reason(), Reason::QueueFull);
    assert!(!rejected.started());
    assert_eq!(rejected.retry_after(), SECOND);
    drop(running);
    drop(rig.start());
    assert_eq!(rig.check().rejected.queue_full, 1);
}

#[test]
fn queued_bytes_are_bounded_and_running_ones_are_not() {
    let limits = Limits::new(calls(1)).with_queue(9).with_queue_bytes(100);
    let rig = Rig::new(limits);
    let running = started(rig.try_offer(1_000).expect("starts at once"));
    let first = rig.try_offer(60).expect("queued");
    let full = rig.try_offer(41).expect_err("too many bytes");
    assert_eq!(full.reason(), Reason::QueueBytes);
    let second = rig.try_offer(40).expect("just fits");
    assert_eq!(
        rig.try_offer(u64::MAX).expect_err("absurd").reason(),
        Reason::QueueBytes
    );
    drop(first);
    assert_eq!(rig.check().queued_bytes, 40);
    drop(running);
    assert_eq!(rig.check().queued_bytes, 0);
    drop(second);
}

#[test]
fn absurd_sizes_are_turned_away() {
    let limits = Limits::new(calls(1)).with_queue_bytes(u64::MAX);
    let rig = Rig::new(limits.with_queue(2));
    let running = rig.start();
    let queued = rig.try_offer(u64::MAX).expect("queued");
    let rejected = rig
        .try_offer(u64::MAX)
        .expect_err("more than can be counted");
    assert_eq!(rejected.reason(), Reason::QueueBytes);
    drop((running, queued));
    assert_eq!(rig.check().queued_bytes, 0);
}

#[test]
fn leftovers_that_block_are_named() {
    let rig = Rig::new(Limits::new(calls(1)).with_queue(0));
    let Started { waiter, slot, .. } = rig.start();
    drop(waiter);
    assert!(rig.check().leftovers_block());
    let rejected = rig.try_offer(0).expect_err("a leftover holds the slot");
    assert_eq!(rejected.reason(), Reason::LeftoverFull);
    let linger = slot.linger();
    let rejected = rig.try_offer(0).expect_err("so does a lingering call");
    assert_eq!(rejected.reason(), Reason::LeftoverFull);
    drop(linger);
    assert!(!rig.check().leftovers_block());
    drop(rig.start());
}

#[test]
fn a_hard_limit_above_the_limit_lets_leftovers_be() {
    let rig = Rig::new(Limits::new(calls(1)).with_hard_limit(calls(2)));
    let first = rig.start();
    let second = rig.offer();
    assert_eq!(rig.check().queued, 1);
    drop(first.waiter);
    let second = started(second);
    let now = rig.check();
    assert_eq!((now.running, now.attended, now.abandoned), (2, 1, 1));
    drop(second.waiter);
    let third = rig.offer();
    assert_eq!(rig.check().queued, 1, "the hard limit holds");
    first.slot.finish(Ended::Ok);
    drop(started(third));
    drop(second.slot);
    assert_eq!(rig.check().ended.sum().abandoned, 2);
}

#[test]
fn a_lingering_call_holds_its_slot() {
    let rig = Rig::of(1);
    let Started { waiter, slot, .. } = rig.start();
    let mut second = rig.offer();
    drop(waiter);
    let linger = slot.linger();
    assert!(poll(&mut second).is_pending());
    let now = rig.check();
    assert_eq!(
        (now.running, now.lingering, now.lingering_abandoned),
        (0, 1, 1)
    );
    let listed = rig.limiter.running();
    assert!(listed[0].lingering);
    assert_eq!(listed[0].id, linger.id());
    linger.confirm_end();
    let now = rig.check();
    assert_eq!((now.running, now.lingering, now.confirmed_total), (1, 0, 1));
    assert_eq!(now.ended.cancelled.abandoned, 1);
    let Started { waiter, slot, .. } = started(second);
    let linger = slot.linger_as(Ended::Ok);
    drop(waiter);
    assert_eq!(rig.check().abandoned_total, 1, "the second's work was over");
    drop(linger);
    let now = rig.check();
    assert_eq!((now.ended.ok.attended, now.confirmed_total), (1, 1));
}

#[test]
fn a_waiter_can_come_back() {
    let rig = Rig::of(1);
    let Started {
        mut waiter,
        mut slot,
        ..
    } = rig.start();
    let alarm = Arc::<Alarm>::default();
    assert!(poll_with(&mut slot.abandoned(), &alarm).is_pending());
    waiter.step_away();
    assert_eq!(alarm.rung(), 1);
    waiter.step_away();
    assert!(poll(&mut slot.abandoned()).is_ready());
    assert_eq!(waiter.come_back(), Ok(()));
    assert!(!slot.is_abandoned());
    assert_eq!(waiter.come_back(), Ok(()), "it is here already");
    let now = rig.check();
    assert_eq!(
        (now.abandoned_total, now.reattached_total, now.attended),
        (1, 1, 1)
    );
    slot.finish(Ended::Ok);
    assert_eq!(waiter.come_back(), Err(CannotReturn::Over));
    assert_eq!(rig.check().ended.ok.attended, 1);
}

#[test]
fn nobody_comes_back_above_the_limit() {
    let rig = Rig::new(Limits::new(calls(1)).with_hard_limit(calls(2)));
    let mut first = rig.start();
    first.waiter.step_away();
    let second = rig.start();
    assert_eq!(first.waiter.come_back(), Err(CannotReturn::Full));
    drop(second);
    assert_eq!(first.waiter.come_back(), Ok(()));
    rig.check();
}

#[test]
fn a_waiter_that_is_done_abandons_nothing() {
    let rig = Rig::of(1);
    let Started { waiter, slot, .. } = rig.start();
    waiter.done();
    let now = rig.check();
    assert_eq!((now.attended, now.abandoned_total), (1, 0));
    slot.finish(Ended::Ok);
    assert_eq!(rig.check().ended.ok.attended, 1);
}

#[test]
fn a_panic_is_counted_and_frees_the_slot() {
    let rig = Rig::of(1);
    let Started { waiter, slot, .. } = rig.start();
    let end = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        let _slot = slot;
        panic!("the work failed");
    }));
    assert!(end.is_err());
    let now = rig.check();
    assert_eq!((now.running, now.ended.panicked.attended), (0, 1));
    drop(waiter);
    assert_eq!(rig.check().abandoned_total, 0);
}

#[test]
fn growing_wakes_exactly_the_difference() {
    let rig = Rig::new(Limits::new(calls(1)).with_queue(5));
    let running = rig.start();
    let mut queued: Vec<Place> = (0..5).map(|_| rig.offer()).collect();
    let alarms: Vec<Arc<Alarm>> = queued.iter().map(|_| Arc::default()).collect();
    for (place, alarm) in queued.iter_mut().zip(&alarms) {
        assert!(poll_with(place, alarm).is_pending());
    }
    rig.limiter
        .resize(Limits::new(calls(3)))
        .expect("sound limits");
    let rung: Vec<usize> = alarms.iter().map(|alarm| alarm.rung()).collect();
    assert_eq!(rung, [1, 1, 0, 0, 0]);
    assert_eq!(rig.check().running, 3);
    drop(queued);
    drop(running);
    assert_eq!(rig.check().running, 0);
}

#[test]
fn shrinking_grants_nothing_until_drained() {
    let rig = Rig::of(3);
    let mut running: Vec<Started> = (0..3).map(|_| rig.start()).collect();
    let mut queued = rig.offer();
    rig.limiter
        .resize(Limits::new(calls(1)))
        .expect("sound limits");
    let now = rig.check();
    assert!(now.over_limit);
    assert_eq!((now.running, now.limit), (3, 1));
    running.pop();
    running.pop();
    assert!(poll(&mut queued).is_pending());
    assert!(!rig.check().over_limit);
    running.pop();
    drop(started(queued));
}

#[test]
fn closing_sends_the_queue_away_and_lets_the_running_be() {
    let rig = Rig::of(1);
    let running = rig.start();
    let mut queued = rig.try_offer(10).expect("queued");
    let unpolled = rig.limiter.clone();
    let alarm = Arc::<Alarm>::default();
    assert!(poll_with(&mut queued, &alarm).is_pending());
    unpolled.close();
    assert_eq!(alarm.rung(), 1);
    assert_eq!(queued.position(), None);
    let Poll::Ready(Err(refused)) = poll(&mut queued) else {
        panic!("not refused");
    };
    assert_eq!(refused, Refused::Closed);
    assert!(!refused.started());
    assert!(matches!(
        poll(&mut queued),
        Poll::Ready(Err(Refused::Closed))
    ));
    let rejected = rig.try_offer(0).expect_err("closed");
    assert_eq!(rejected.reason(), Reason::Closed);
    drop(queued);
    running.slot.finish(Ended::Ok);
    let now = rig.check();
    assert_eq!((now.queued_bytes, now.left.closed, now.running), (0, 1, 0));
    assert_eq!(now.left.caller, 0);
}

#[test]
fn bad_limits_are_typed_errors() {
    assert_eq!(Limits::try_from(0), Err(LimitsError::Zero));
    let wrong = Limits::new(calls(2)).with_hard_limit(calls(1));
    let error = Limiter::new(wrong).expect_err("hard below limit");
    assert_eq!(error.to_string(), "hard_limit 1 is below limit 2");
    let huge = Limits::new(calls(1)).with_queue(usize::MAX);
    assert!(matches!(
        Limiter::new(huge),
        Err(LimitsError::TooLarge {
            setting: "queue",
            ..
        })
    ));
    let rig = Rig::of(1);
    assert!(rig.limiter.resize(wrong).is_err());
    assert_eq!(rig.limiter.limits(), Limits::new(calls(1)));
}

#[test]
fn ages_and_integrals_follow_the_clock() {
    let rig = Rig::of(1);
    let Started { waiter, slot, .. } = rig.start();
    let queued = rig.offer();
    rig.clock.advance(2 * SECOND);
    drop(waiter);
    rig.clock.advance(3 * SECOND);
    let now = rig.check();
    assert_eq!(now.oldest_queued, Some(5 * SECOND));
    assert_eq!(now.oldest_running, Some(5 * SECOND));
    assert_eq!(now.oldest_abandoned, Some(3 * SECOND));
    assert_eq!(
        (now.queued_time, now.running_time),
        (5 * SECOND, 5 * SECOND)
    );
    assert_eq!(now.abandoned_time, 3 * SECOND);
    let listed = rig.limiter.running();
    assert_eq!(
        (listed[0].age, listed[0].abandoned_since),
        (5 * SECOND, Some(3 * SECOND))
    );
    assert_eq!(listed[0].label.as_deref(), Some("call"));
    drop((slot, queued));
    assert!(rig.limiter.running().is_empty());
}

/// Of a call whose waiter had left, too, its age among the lingering begins with the lingering.
#[test]
fn the_longest_lingering_is_told_from_its_own_beginning() {
    let rig = Rig::of(2);
    let first = rig.start();
    let second = rig.start();
    drop(first.waiter);
    rig.clock.advance(2 * SECOND);
    assert_eq!(rig.check().oldest_lingering, None);
    let second = second.slot.linger();
    rig.clock.advance(SECOND);
    let first = first.slot.linger();
    rig.clock.advance(SECOND);
    assert_eq!(rig.check().oldest_lingering, Some(2 * SECOND));
    drop(second);
    assert_eq!(rig.check().oldest_lingering, Some(SECOND));
    drop(first);
    assert_eq!(rig.check().oldest_lingering, None);
}

#[test]
fn retry_after_is_the_queue_at_the_measured_rate() {
    let rig = Rig::of(1);
    for _ in 0..3 {
        let running = rig.start();
        rig.clock.advance(10 * SECOND);
        drop(running);
    }
    rig.clock.advance(3_600 * SECOND);
    let _running = rig.start();
    let queued = rig.offer();
    assert_eq!(queued.retry_after(), 20 * SECOND);
    let rejected = rig.try_offer(0).expect_err("full");
    assert_eq!(rejected.retry_after(), 20 * SECOND);
}

#[test]
fn cancelled_entries_hold_nothing() {
    let label: Arc<str> = "shared".into();
    let limits = Limits::new(calls(1)).with_queue(100_000);
    let rig = Rig::new(limits);
    let running = rig.start();
    let places: Vec<Place> = (0..100_000)
        .map(|_| {
            rig.limiter
                .offer(Ask::new(label.clone(), 10))
                .expect("queued")
        })
        .collect();
    assert_eq!(Arc::strong_count(&label), 100_001);
    drop(places);
    assert_eq!(Arc::strong_count(&label), 1);
    let now = rig.check();
    assert_eq!(
        (now.queued, now.queued_bytes, now.left.caller),
        (0, 0, 100_000)
    );
    drop(running);
}

#[test]
fn handles_are_send_and_small() {
    fn send<T: Send + Sync + 'static>() {}
    send::<Limiter>();
    send::<Place>();
    send::<Slot>();
    send::<Waiter>();
    send::<Linger>();
    assert!(size_of::<Place>() <= 40, "{}", size_of::<Place>());
    const { assert!(crate::ledger::ENTRY_BYTES <= 256) };
}
