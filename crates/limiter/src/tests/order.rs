//! Who is served next: flows, classes, deadlines, overload.

use super::*;

fn ask(flow: u64) -> Ask {
    Ask::new(flow.to_string(), 0).with_flow(flow)
}

impl Rig {
    fn queue(&self, ask: Ask) -> Place {
        let place = self.limiter.offer(ask).expect("queued");
        self.check();
        place
    }

    /// Ends the running call and says the label of the one that gets its slot.
    fn turn(&self, running: Started, waiting: &mut Vec<(String, Place)>) -> (String, Started) {
        running.slot.finish(Ended::Ok);
        running.waiter.done();
        self.check();
        while let Some(next) = waiting
            .iter()
            .position(|(_, place)| place.position().is_none())
        {
            let (label, mut place) = waiting.remove(next);
            match poll(&mut place) {
                Poll::Ready(Ok(started)) => return (label, started),
                Poll::Ready(Err(refused)) => assert!(!refused.started()),
                Poll::Pending => panic!("it is out of the queue"),
            }
        }
        panic!("nobody was served");
    }
}

fn wide(limit: usize) -> Limits {
    Limits::new(calls(limit)).with_queue(1_000)
}

/// Keeps three calls of each flow queued and serves `turns` slots; `cost` is what a call of a flow takes.
fn share(rig: &Rig, flows: &[u64], turns: usize, cost: impl Fn(&str) -> Duration) -> Vec<String> {
    let mut running = started(rig.queue(ask(flows[0])));
    let mut label = flows[0].to_string();
    let mut waiting: Vec<(String, Place)> = Vec::new();
    let mut served = Vec::new();
    for _ in 0..turns {
        for flow in flows {
            let name = flow.to_string();
            while waiting.iter().filter(|(other, _)| *other == name).count() < 3 {
                waiting.push((name.clone(), rig.queue(ask(*flow))));
            }
        }
        rig.clock.advance(cost(&label));
        (label, running) = rig.turn(running, &mut waiting);
        served.push(label.clone());
    }
    drop(running);
    served
}

fn count(served: &[String], flow: &str) -> usize {
    served.iter().filter(|label| *label == flow).count()
}

#[test]
fn a_flood_does_not_keep_a_newcomer_waiting() {
    let rig = Rig::new(wide(1));
    let mut running = started(rig.queue(ask(1)));
    let mut waiting: Vec<(String, Place)> = (0..50)
        .map(|_| ("1".to_owned(), rig.queue(ask(1))))
        .collect();
    rig.clock.advance(SECOND);
    (_, running) = rig.turn(running, &mut waiting);
    waiting.push(("2".to_owned(), rig.queue(ask(2))));
    rig.clock.advance(SECOND);
    let (label, running) = rig.turn(running, &mut waiting);
    assert_eq!(label, "2");
    drop(running);
}

#[test]
fn flows_share_slot_time_and_not_calls() {
    let rig = Rig::new(wide(1));
    let cost = |label: &str| if label == "1" { 4 * SECOND } else { SECOND };
    let served = share(&rig, &[1, 2], 200, cost);
    let (slow, fast) = (count(&served, "1"), count(&served, "2"));
    assert!((35..=45).contains(&slow), "{slow} slow, {fast} fast");
}

#[test]
fn flows_of_equal_cost_take_turns() {
    let rig = Rig::new(wide(1));
    let served = share(&rig, &[1, 2, 3], 90, |_| SECOND);
    for flow in ["1", "2", "3"] {
        let turns = count(&served, flow);
        assert!((28..=32).contains(&turns), "{flow}: {turns}");
    }
}

#[test]
fn nobody_saves_up_for_later() {
    let rig = Rig::new(wide(1));
    share(&rig, &[1], 100, |_| SECOND);
    let served = share(&rig, &[1, 2], 20, |_| SECOND);
    let newcomer = count(&served, "2");
    assert!((9..=12).contains(&newcomer), "{newcomer} of 20");
}

#[test]
fn a_higher_class_goes_first_and_a_lower_one_has_a_floor() {
    let rig = Rig::new(wide(1));
    let mut running = rig.start();
    let mut waiting = Vec::new();
    for (class, name) in [(Class::Low, "low"), (Class::High, "high")] {
        for _ in 0..40 {
            let ask = Ask::default().with_class(class);
            waiting.push((name.to_owned(), rig.queue(ask)));
        }
    }
    let mut served = Vec::new();
    for _ in 0..40 {
        let label;
        (label, running) = rig.turn(running, &mut waiting);
        served.push(label);
    }
    assert_eq!(served.iter().position(|label| label == "low"), Some(9));
    assert_eq!(count(&served, "low"), 4);
    drop(running);
}

#[test]
fn one_flow_cannot_take_the_whole_queue() {
    let rig = Rig::new(wide(1).with_flow_queue(2));
    let running = rig.start();
    let queued = [rig.queue(ask(1)), rig.queue(ask(1))];
    assert_eq!(
        rig.limiter.would_reject_ask(&ask(1)).map(|r| r.reason()),
        Some(Reason::FlowFull)
    );
    let rejected = rig.limiter.offer(ask(1)).expect_err("too many of one flow");
    assert_eq!(rejected.reason(), Reason::FlowFull);
    drop(rig.queue(ask(2)));
    assert_eq!(rig.check().rejected.flow_full, 1);
    drop((running, queued));
}

#[test]
fn what_cannot_start_in_time_is_refused_at_once() {
    let rig = Rig::new(wide(1));
    let running = rig.start();
    let past = Ask::default().with_deadline(rig.clock.now());
    let rejected = rig.limiter.offer(past).expect_err("past");
    assert_eq!(rejected.reason(), Reason::Deadline);
    let soon = |rig: &Rig, time| Ask::default().with_deadline(rig.clock.now() + time);
    drop(rig.queue(soon(&rig, SECOND / 1_000)));
    drop(running);
    for _ in 0..8 {
        let running = rig.start();
        rig.clock.advance(10 * SECOND);
        drop(running);
    }
    let running = rig.start();
    let queued = rig.queue(soon(&rig, 11 * SECOND));
    let rejected = rig
        .limiter
        .offer(soon(&rig, 11 * SECOND))
        .expect_err("two ahead");
    assert_eq!(rejected.reason(), Reason::Deadline);
    // Nine calls have ended, the first of them at once: 80 s / 9 each.
    assert_eq!(rejected.predicted_wait().as_secs(), 17);
    let high = soon(&rig, 11 * SECOND).with_class(Class::High);
    drop(rig.queue(high));
    assert_eq!(rig.check().rejected.deadline, 2);
    drop((running, queued));
}

#[test]
fn a_deadline_that_passes_in_the_queue_costs_no_slot() {
    let rig = Rig::new(wide(1));
    let running = rig.start();
    let deadline = rig.clock.now() + SECOND;
    let mut late = rig.queue(Ask::default().with_deadline(deadline));
    let next = rig.queue(Ask::default());
    let alarm = Arc::<Alarm>::default();
    assert!(poll_with(&mut late, &alarm).is_pending());
    rig.clock.advance(2 * SECOND);
    drop(running);
    assert_eq!(alarm.rung(), 1);
    let now = rig.check();
    assert_eq!((now.left.deadline, now.running, now.queued), (1, 1, 0));
    let Poll::Ready(Err(refused)) = poll(&mut late) else {
        panic!("not refused");
    };
    assert!(matches!(refused, Refused::Deadline { waited, .. } if waited == 2 * SECOND));
    drop(late);
    drop(started(next));
    let now = rig.check();
    assert_eq!((now.left.deadline, now.running), (1, 0));
}

#[test]
fn a_standing_queue_serves_the_newest_and_sends_the_oldest_away() {
    let rig = Rig::new(wide(1).with_target_delay(SECOND));
    let mut running = rig.start();
    let mut waiting: Vec<(String, Place)> = Vec::new();
    let mut served = Vec::new();
    for call in 0..60 {
        waiting.push((call.to_string(), rig.queue(Ask::default())));
        if call % 2 == 1 {
            rig.clock.advance(SECOND);
            let label;
            (label, running) = rig.turn(running, &mut waiting);
            served.push(label.parse::<usize>().expect("a number"));
        }
    }
    let now = rig.check();
    assert!(now.overloaded);
    assert!(now.left.overload > 5, "{now:?}");
    assert!(now.oldest_queued <= Some(3 * SECOND), "{now:?}");
    assert!(served.windows(2).take(5).all(|pair| pair[0] < pair[1]));
    assert!(
        served.iter().rev().take(5).all(|call| *call > 45),
        "{served:?}"
    );
    drop(running);
}

#[test]
fn flows_are_forgotten() {
    let rig = Rig::new(wide(1));
    for flow in 0..1_000 {
        drop(started(rig.queue(ask(flow))));
    }
    assert_eq!(rig.check().flows, 0);
    let mut running = started(rig.queue(ask(0)));
    let mut waiting = Vec::new();
    for flow in 1..1_000_u64 {
        waiting.push((String::new(), rig.queue(ask(flow))));
        if flow > 10 {
            rig.clock.advance(SECOND);
            (_, running) = rig.turn(running, &mut waiting);
        }
        assert!(rig.check().flows <= 40, "{:?}", rig.check());
    }
    drop((running, waiting));
    assert_eq!(rig.check().flows, 0);
}

fn heavy(weight: u32) -> Ask {
    Ask::default().with_weight(weight.try_into().expect("not zero"))
}

#[test]
fn a_heavy_call_waits_until_it_fits_and_nobody_passes_it() {
    let rig = Rig::new(wide(3));
    let (first, second) = (started(rig.queue(heavy(1))), started(rig.queue(heavy(1))));
    let big = rig.queue(heavy(2));
    let mut small = rig.queue(heavy(1));
    assert!(
        poll(&mut small).is_pending(),
        "a slot is free, but not for it"
    );
    let now = rig.check();
    assert_eq!((now.held_weight, now.next_weight), (2, Some(2)));
    drop(first);
    let big = started(big);
    assert_eq!(rig.check().held_weight, 3);
    drop(second);
    drop(started(small));
    drop(big);
    assert_eq!(rig.check().held_weight, 0);
}

#[test]
fn a_heavy_call_that_leaves_lets_the_next_start() {
    let rig = Rig::new(wide(2));
    let running = rig.start();
    let big = rig.queue(heavy(2));
    let mut small = rig.queue(heavy(1));
    let alarm = Arc::<Alarm>::default();
    assert!(poll_with(&mut small, &alarm).is_pending());
    drop(big);
    assert_eq!(alarm.rung(), 1);
    let (small, big) = (started(small), rig.queue(heavy(2)));
    let next = rig.queue(heavy(1));
    drop(small);
    assert!(big.expire().is_none());
    drop(started(next));
    drop(running);
    assert_eq!(rig.check().running, 0);
}

#[test]
fn a_call_heavier_than_the_limit_takes_the_whole_limit() {
    let rig = Rig::new(wide(2));
    let whole = started(rig.queue(heavy(u32::MAX)));
    let now = rig.check();
    assert_eq!((now.attended, now.attended_weight), (1, 2));
    assert_eq!(rig.limiter.running()[0].weight, 2);
    let mut small = rig.queue(heavy(1));
    assert!(poll(&mut small).is_pending());
    drop(whole);
    drop(started(small));
    assert_eq!(rig.check().held_weight, 0);
}

#[test]
fn a_flow_is_charged_for_a_call_that_emptied_its_queue() {
    let rig = Rig::new(wide(2));
    let (first, second) = (rig.start(), rig.start());
    let served = rig.queue(ask(1));
    drop(first);
    let served = started(served);
    let (again, other) = (rig.queue(ask(1)), rig.queue(ask(2)));
    drop(second);
    assert!(again.position().is_some(), "flow 1 has a slot already");
    drop(started(other));
    drop((served, again));
}
