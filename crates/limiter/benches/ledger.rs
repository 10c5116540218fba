//! What a call costs: `cargo bench -p tidegate-limiter`.
//!
//! No harness and no statistics beyond the best and the median of short rounds: the targets are an
//! order of magnitude, 500 ns for a call and 50 ns for a snapshot.
#![cfg_attr(loom, expect(unused, reason = "not built for loom"))]
#![expect(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use tidegate_limiter::{Ask, Ended, Limiter, Limits, Place, Started};

const ROUNDS: usize = 301;

fn main() {
    // `cargo test --all-targets` runs this too: one call each, to see that it works.
    let calls = if std::env::args().any(|arg| arg == "--bench") {
        10_000
    } else {
        1
    };
    for threads in [1, 2, 4] {
        let name = format!("offer + finish, {threads} threads");
        report(&name, calls, || free_slots(threads, calls / threads));
    }
    report("offer + queue + hand-off + finish", calls, || queued(calls));
    report("offer + queue + leave, 1,000 ahead", calls, || {
        leaving(calls)
    });
    report("rejected offer", calls, || rejected(calls));
    report("snapshot", calls, || snapshots(calls));
}

fn report(name: &str, calls: usize, mut round: impl FnMut()) {
    let mut nanos: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            round();
            start.elapsed().as_secs_f64() * 1e9 / calls as f64
        })
        .collect();
    nanos.sort_by(f64::total_cmp);
    let (best, median) = (nanos[0], nanos[ROUNDS / 2]);
    println!("{name:<40} {best:8.1} ns best {median:8.1} ns median");
}

fn limiter(limit: usize, queue: usize) -> Limiter {
    let limit = NonZeroUsize::new(limit).expect("not zero");
    Limiter::new(Limits::new(limit).with_queue(queue)).expect("sound limits")
}

fn ask(label: &Arc<str>) -> Ask {
    Ask::new(label.clone(), 1_024)
}

fn started(place: &mut Place) -> Started {
    match Pin::new(place).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Ok(started)) => started,
        other => panic!("no slot: {other:?}"),
    }
}

fn one_call(limiter: &Limiter, label: &Arc<str>) {
    let mut place = limiter.offer(ask(label)).expect("a free slot");
    let Started { waiter, slot, .. } = started(&mut place);
    slot.finish(Ended::Ok);
    waiter.done();
}

fn free_slots(threads: usize, calls: usize) {
    let limiter = limiter(64, 64);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let label: Arc<str> = "bench".into();
                for _ in 0..calls {
                    one_call(&limiter, &label);
                }
            });
        }
    });
}

fn queued(calls: usize) {
    let (limiter, label) = (limiter(1, 1), "bench".into());
    let mut running = started(&mut limiter.offer(ask(&label)).expect("a free slot"));
    for _ in 0..calls {
        let mut place = limiter.offer(ask(&label)).expect("queued");
        let polled = Pin::new(&mut place).poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending());
        running.slot.finish(Ended::Ok);
        running.waiter.done();
        running = started(&mut place);
    }
}

fn leaving(calls: usize) {
    let (limiter, label) = (limiter(1, 1_001), "bench".into());
    let _running = started(&mut limiter.offer(ask(&label)).expect("a free slot"));
    let _ahead: Vec<Place> = (0..1_000)
        .map(|_| limiter.offer(ask(&label)).expect("queued"))
        .collect();
    for _ in 0..calls {
        drop(limiter.offer(ask(&label)).expect("queued"));
    }
}

fn rejected(calls: usize) {
    let (limiter, label) = (limiter(1, 0), "bench".into());
    let _running = started(&mut limiter.offer(ask(&label)).expect("a free slot"));
    for _ in 0..calls {
        let rejected = limiter.offer(ask(&label));
        assert!(black_box(rejected).is_err());
    }
}

fn snapshots(calls: usize) {
    let (limiter, label) = (limiter(1, 1), "bench".into());
    let _running = started(&mut limiter.offer(ask(&label)).expect("a free slot"));
    let _queued = limiter.offer(ask(&label)).expect("queued");
    for _ in 0..calls {
        black_box(limiter.snapshot());
    }
}
