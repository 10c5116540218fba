//! Every interleaving of a few threads, up to three preemptions.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p tidegate-limiter --test loom --release`
//!
//! A lost wake-up shows as a deadlock, which loom reports. `Work` counts what really runs, without
//! asking the limiter.
#![cfg(loom)]

use std::num::NonZeroUsize;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use loom::future::block_on;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;
use tidegate_limiter::{Ask, Ended, Limiter, Limits, Place, Refused, Slot, Started};

#[derive(Clone)]
struct Work(Arc<AtomicUsize>);

impl Work {
    fn new() -> Self {
        Self(Arc::new(AtomicUsize::new(0)))
    }

    /// Runs under the slot; `limit` is what may run at once.
    fn run(&self, slot: Slot, limit: usize) {
        self.begin(limit);
        self.end(slot);
    }

    fn begin(&self, limit: usize) {
        let others = self.0.fetch_add(1, Ordering::SeqCst);
        assert!(
            others < limit,
            "{} at once under a limit of {limit}",
            others + 1
        );
    }

    fn end(&self, slot: Slot) {
        self.0.fetch_sub(1, Ordering::SeqCst);
        slot.finish(Ended::Ok);
    }
}

fn calls(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).expect("not zero")
}

fn limiter(limit: usize, queue: usize) -> Limiter {
    Limiter::new(Limits::new(calls(limit)).with_queue(queue)).expect("sound limits")
}

fn start(limiter: &Limiter) -> Started {
    let place = limiter.offer(Ask::default()).expect("admitted");
    place.expire().expect("a free slot")
}

fn poll(place: &mut Place) -> Poll<Result<Started, Refused>> {
    Pin::new(place).poll(&mut Context::from_waker(Waker::noop()))
}

fn check(limiter: &Limiter) {
    let now = limiter.snapshot();
    assert_eq!(now.broken_identity(), None, "{now:?}");
}

fn check_empty(limiter: &Limiter) {
    check(limiter);
    let now = limiter.snapshot();
    assert_eq!(
        (now.queued, now.running, now.lingering),
        (0, 0, 0),
        "{now:?}"
    );
}

fn explore(body: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(body);
}

#[test]
fn an_abandoned_holder_ends_while_one_waits_and_one_leaves() {
    explore(|| {
        let (limiter, work) = (limiter(1, 1), Work::new());
        let Started { waiter, slot, .. } = start(&limiter);
        work.begin(1);
        let holder = {
            let work = work.clone();
            thread::spawn(move || work.end(slot))
        };
        let passer = {
            let (limiter, work) = (limiter.clone(), work.clone());
            thread::spawn(move || {
                if let Ok(mut place) = limiter.offer(Ask::default())
                    && let Poll::Ready(Ok(Started { waiter, slot, .. })) = poll(&mut place)
                {
                    work.run(slot, 1);
                    waiter.done();
                }
            })
        };
        drop(waiter);
        if let Ok(place) = limiter.offer(Ask::default()) {
            let Started { waiter, slot, .. } = block_on(place).expect("open");
            check(&limiter);
            work.run(slot, 1);
            waiter.done();
        }
        holder.join().expect("holder");
        passer.join().expect("passer");
        check_empty(&limiter);
    });
}

#[test]
fn a_grant_passes_on_when_its_waiter_leaves_in_the_same_instant() {
    explore(|| {
        let (limiter, work) = (limiter(1, 2), Work::new());
        let first = start(&limiter);
        let mut leaves = limiter.offer(Ask::default()).expect("queued");
        let waits = limiter.offer(Ask::default()).expect("queued");
        assert!(poll(&mut leaves).is_pending());
        let end = thread::spawn(move || first.slot.finish(Ended::Ok));
        let leave = thread::spawn(move || drop(leaves));
        let Started { waiter, slot, .. } = block_on(waits).expect("open");
        work.run(slot, 1);
        waiter.done();
        end.join().expect("end");
        leave.join().expect("leave");
        check_empty(&limiter);
    });
}

#[test]
fn a_deadline_meets_its_grant() {
    explore(|| {
        let (limiter, work) = (limiter(1, 2), Work::new());
        let first = start(&limiter);
        let expires = limiter.offer(Ask::default()).expect("queued");
        let waits = limiter.offer(Ask::default()).expect("queued");
        let end = thread::spawn(move || first.slot.finish(Ended::Ok));
        let expire = {
            let work = work.clone();
            thread::spawn(move || match expires.expire() {
                Some(started) => {
                    work.run(started.slot, 1);
                    1
                }
                None => 0,
            })
        };
        work.run(block_on(waits).expect("open").slot, 1);
        end.join().expect("end");
        let late = expire.join().expect("expire");
        let now = limiter.snapshot();
        assert_eq!((now.left.deadline, now.started), (1 - late, 2 + late));
        check_empty(&limiter);
    });
}

#[test]
fn closing_meets_a_grant_and_an_offer() {
    explore(|| {
        let limiter = limiter(1, 2);
        let first = start(&limiter);
        let waits = limiter.offer(Ask::default()).expect("queued");
        let end = thread::spawn(move || drop(first));
        let close = {
            let limiter = limiter.clone();
            thread::spawn(move || limiter.close())
        };
        match block_on(waits) {
            Ok(started) => drop(started),
            Err(refused) => assert_eq!(refused, Refused::Closed),
        }
        let late = limiter.offer(Ask::default()).map(block_on);
        drop(late);
        end.join().expect("end");
        close.join().expect("close");
        assert!(limiter.offer(Ask::default()).is_err());
        check_empty(&limiter);
    });
}

#[test]
fn work_hears_that_its_waiter_left() {
    explore(|| {
        let limiter = limiter(1, 1);
        let Started {
            waiter, mut slot, ..
        } = start(&limiter);
        let leave = thread::spawn(move || drop(waiter));
        block_on(slot.abandoned());
        assert!(slot.is_abandoned());
        slot.finish(Ended::Cancelled);
        leave.join().expect("leave");
        assert_eq!(limiter.snapshot().ended.cancelled.abandoned, 1);
        check_empty(&limiter);
    });
}

#[test]
fn coming_back_meets_the_end() {
    explore(|| {
        let (limiter, work) = (limiter(1, 1), Work::new());
        let Started {
            mut waiter, slot, ..
        } = start(&limiter);
        let linger = thread::spawn(move || drop(slot.linger_as(Ended::Ok)));
        let next = {
            let (limiter, work) = (limiter.clone(), work.clone());
            thread::spawn(move || {
                let place = limiter.offer(Ask::default()).expect("queued");
                work.run(block_on(place).expect("open").slot, 1);
            })
        };
        waiter.step_away();
        let _ = waiter.come_back();
        check(&limiter);
        drop(waiter);
        linger.join().expect("linger");
        next.join().expect("next");
        check_empty(&limiter);
    });
}

#[test]
fn growing_meets_a_waiter_that_leaves() {
    explore(|| {
        let (limiter, work) = (limiter(1, 2), Work::new());
        let first = start(&limiter);
        let leaves = limiter.offer(Ask::default()).expect("queued");
        let waits = limiter.offer(Ask::default()).expect("queued");
        let grow = {
            let limiter = limiter.clone();
            thread::spawn(move || limiter.resize(Limits::new(calls(2))).expect("sound limits"))
        };
        let leave = thread::spawn(move || drop(leaves));
        work.begin(2);
        work.run(block_on(waits).expect("open").slot, 2);
        work.end(first.slot);
        grow.join().expect("grow");
        leave.join().expect("leave");
        check_empty(&limiter);
    });
}

#[test]
fn the_end_of_it_all_is_heard() {
    explore(|| {
        let limiter = limiter(1, 1);
        let first = start(&limiter);
        let queued = limiter.offer(Ask::default()).expect("queued");
        let end = thread::spawn(move || drop(first));
        let leave = thread::spawn(move || drop(queued));
        block_on(limiter.idle());
        check_empty(&limiter);
        end.join().expect("end");
        leave.join().expect("leave");
    });
}

#[test]
fn a_heavy_call_leaves_while_a_slot_comes_free() {
    explore(|| {
        let (limiter, work) = (limiter(2, 2), Work::new());
        let (first, second) = (start(&limiter), start(&limiter));
        let two = 2.try_into().expect("not zero");
        let heavy = limiter
            .offer(Ask::default().with_weight(two))
            .expect("queued");
        let light = limiter.offer(Ask::default()).expect("queued");
        let end = thread::spawn(move || drop(first));
        let leave = thread::spawn(move || drop(heavy));
        work.begin(2);
        work.run(block_on(light).expect("open").slot, 2);
        work.end(second.slot);
        end.join().expect("end");
        leave.join().expect("leave");
        check_empty(&limiter);
    });
}
