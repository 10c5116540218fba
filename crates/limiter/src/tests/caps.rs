//! What one flow may hold, so that it leaves room for the others.

use super::*;

fn flow(flow: u64) -> Ask {
    Ask::default().with_flow(flow)
}

fn offer(rig: &Rig, ask: Ask) -> Place {
    let place = rig.limiter.offer(ask).expect("admitted");
    rig.check();
    place
}

fn leave(started: Started) -> Slot {
    drop(started.waiter);
    started.slot
}

fn of_flow(most: usize) -> Limits {
    Limits::new(calls(3)).with_flow_limit(calls(most))
}

#[test]
fn a_flow_holds_no_more_slots_than_it_may_and_the_others_pass_it() {
    let rig = Rig::new(of_flow(1));
    let first = started(offer(&rig, flow(1)));
    let waits = offer(&rig, flow(1));
    let now = rig.check();
    assert_eq!((now.running, now.queued, now.queued_capped), (1, 1, 1));
    assert!(now.has_room());
    let other = started(offer(&rig, flow(2)));
    let linger = leave(first).linger();
    assert_eq!(
        rig.check().queued_capped,
        1,
        "a lingering call holds a slot"
    );
    drop(linger);
    assert_eq!(rig.check().queued, 0);
    drop((started(waits), other));
    assert_eq!(rig.check().flows, 0);
}

#[test]
fn abandoned_calls_keep_the_next_of_their_flow_from_starting() {
    let limits = Limits::new(calls(3)).with_flow_abandoned(calls(1));
    let rig = Rig::new(limits);
    let (first, second) = (offer(&rig, flow(1)), offer(&rig, flow(1)));
    let (first, second) = (leave(started(first)), started(second));
    let waits = offer(&rig, flow(1));
    assert_eq!(
        rig.check().queued_capped,
        1,
        "one of its calls is abandoned"
    );
    let other = started(offer(&rig, flow(2)));
    first.finish(Ended::Cancelled);
    assert_eq!(rig.check().queued, 0, "it has ended");
    drop((waits, second, other));
    rig.check();
}

#[test]
fn a_waiter_that_comes_back_frees_its_flow() {
    let limits = Limits::new(calls(2)).with_flow_abandoned(calls(1));
    let rig = Rig::new(limits);
    let mut first = started(offer(&rig, flow(1)));
    first.waiter.step_away();
    let mut waits = offer(&rig, flow(1));
    let alarm = Arc::<Alarm>::default();
    assert!(poll_with(&mut waits, &alarm).is_pending());
    assert_eq!(first.waiter.come_back(), Ok(()));
    assert_eq!(alarm.rung(), 1);
    drop((started(waits), first));
    assert_eq!(rig.check().running, 0);
}

#[test]
fn wider_bounds_start_what_was_capped() {
    let rig = Rig::new(of_flow(1));
    let first = started(offer(&rig, flow(1)));
    let waits = offer(&rig, flow(1));
    rig.limiter.resize(of_flow(2)).expect("sound limits");
    assert_eq!(rig.check().queued, 0);
    drop((started(waits), first));
    rig.limiter.resize(of_flow(1)).expect("sound limits");
    assert_eq!(rig.check().flows, 0);
}

#[test]
fn a_capped_flow_is_told_so_when_the_queue_is_full() {
    let rig = Rig::new(of_flow(1).with_queue(0));
    let first = started(offer(&rig, flow(1)));
    let rejected = rig.limiter.offer(flow(1)).expect_err("capped, no queue");
    assert_eq!(rejected.reason(), Reason::FlowFull);
    let other = started(offer(&rig, flow(2)));
    drop((first, other));
    rig.check();
}

#[test]
fn capped_calls_do_not_make_the_others_late() {
    let rig = Rig::new(of_flow(1).with_target_delay(SECOND));
    for _ in 0..8 {
        let call = rig.start();
        rig.clock.advance(SECOND);
        drop(call);
    }
    let first = started(offer(&rig, flow(1)));
    let waits = offer(&rig, flow(1));
    rig.clock.advance(60 * SECOND);
    let soon = flow(2).with_deadline(rig.clock.now() + SECOND);
    let other = started(offer(&rig, soon));
    assert!(!rig.check().overloaded);
    drop((first, waits, other));
}
