//! The threads for blocking work under random schedules, and under those that hunt for bugs of a small depth.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test -p tidegate-limiter --test shuttle --release`
//!
//! A lost wake-up, of a waiter or of a thread, shows as a deadlock, which shuttle reports. `Work` counts what
//! really runs, without asking the limiter. `SCHEDULES` is how many of each kind a scenario gets.
#![cfg(shuttle)]

use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use shuttle::future::block_on;
use shuttle::thread;
use tidegate_limiter::{Ask, BlockingCall, BlockingError, Limiter, Limits, Threads};

const SCHEDULES: usize = 50_000;

/// Bugs that so many ordered moments can show.
const DEPTH: usize = 3;

#[derive(Clone, Default)]
struct Work(Arc<Counts>);

#[derive(Default)]
struct Counts {
    limit: AtomicUsize,
    running: AtomicUsize,
    ran: AtomicUsize,
}

struct Rig {
    limiter: Limiter,
    threads: Threads,
    work: Work,
    /// One more for each closure that exists.
    closures: Arc<()>,
}

impl Work {
    fn run(&self) {
        let others = self.0.running.fetch_add(1, Ordering::SeqCst);
        let limit = self.0.limit.load(Ordering::SeqCst);
        assert!(others < limit, "{} at once under {limit}", others + 1);
        thread::yield_now();
        self.0.running.fetch_sub(1, Ordering::SeqCst);
        self.0.ran.fetch_add(1, Ordering::SeqCst);
    }

    fn ran(&self) -> usize {
        self.0.ran.load(Ordering::SeqCst)
    }
}

impl Rig {
    fn new(limit: usize, queue: usize) -> Arc<Self> {
        let limits = limits(limit).with_queue(queue);
        let limiter = Limiter::new(limits).expect("sound limits");
        let work = Work::default();
        work.0.limit.store(limit, Ordering::SeqCst);
        Arc::new(Self {
            threads: Threads::new(limiter.clone()),
            limiter,
            work,
            closures: Arc::default(),
        })
    }

    fn call(&self, answer: usize) -> Option<BlockingCall<usize>> {
        let (work, closure) = (self.work.clone(), self.closures.clone());
        let run = move |_: &_| {
            work.run();
            drop(closure);
            answer
        };
        self.threads.run_blocking(Ask::default(), run).ok()
    }

    fn check(&self) {
        let now = self.limiter.snapshot();
        assert_eq!(now.broken_identity(), None, "{now:?}");
    }

    /// Everything is over: what started ran, nothing else did, and nobody holds anything.
    fn check_end(&self) {
        block_on(self.limiter.idle());
        self.check();
        let now = self.limiter.snapshot();
        assert_eq!((now.queued, now.running, now.lingering), (0, 0, 0));
        let ran = u64::try_from(self.work.ran()).expect("few");
        assert_eq!(now.started - now.unclaimed_total, ran, "{now:?}");
        assert_eq!(now.ended.ok.total(), ran, "{now:?}");
        assert_eq!(Arc::strong_count(&self.closures), 1, "a closure is left");
        let limit = self.work.0.limit.load(Ordering::SeqCst);
        assert!(self.threads.threads() <= limit, "more threads than slots");
        self.threads.end_idle();
    }
}

fn limits(limit: usize) -> Limits {
    Limits::new(NonZeroUsize::new(limit).expect("not zero"))
}

fn poll(call: &mut BlockingCall<usize>) -> Poll<Result<usize, BlockingError>> {
    Pin::new(call).poll(&mut Context::from_waker(Waker::noop()))
}

fn explore(scenario: fn()) {
    let schedules = std::env::var("SCHEDULES").ok();
    let schedules = schedules.map_or(SCHEDULES, |count| count.parse().expect("a number"));
    shuttle::check_random(scenario, schedules);
    shuttle::check_pct(scenario, schedules, DEPTH);
}

/// One waits for its answer, one leaves while queued or running, one comes when it pleases.
fn callers_that_wait_and_leave() {
    let rig = Rig::new(1, 2);
    let waits = {
        let rig = rig.clone();
        thread::spawn(move || {
            if let Some(call) = rig.call(7) {
                assert_eq!(block_on(call).expect("an answer"), 7);
            }
            rig.check();
        })
    };
    let leaves = {
        let rig = rig.clone();
        thread::spawn(move || {
            if let Some(mut call) = rig.call(8) {
                let _abandoned = poll(&mut call);
            }
            rig.check();
        })
    };
    if let Some(call) = rig.call(9) {
        assert_eq!(block_on(call).expect("an answer"), 9);
    }
    waits.join().expect("waits");
    leaves.join().expect("leaves");
    rig.check_end();
}

/// An idle thread may end at the very moment that work comes for it.
fn threads_that_are_used_again() {
    let rig = Rig::new(2, 2);
    let other = {
        let rig = rig.clone();
        thread::spawn(move || {
            for answer in 0..2 {
                let call = rig.call(answer).expect("a slot or a place");
                assert_eq!(block_on(call).expect("an answer"), answer);
            }
        })
    };
    for answer in 2..4 {
        let call = rig.call(answer).expect("a slot or a place");
        assert_eq!(block_on(call).expect("an answer"), answer);
    }
    other.join().expect("other");
    assert_eq!(rig.work.ran(), 4);
    rig.check_end();
}

/// Closing meets a call that starts, one that is queued and one that comes.
fn a_close_among_calls() {
    let rig = Rig::new(1, 2);
    let close = {
        let rig = rig.clone();
        thread::spawn(move || rig.limiter.close())
    };
    let other = {
        let rig = rig.clone();
        thread::spawn(move || {
            if let Some(call) = rig.call(1) {
                let _answered_or_refused = block_on(call);
            }
        })
    };
    if let Some(call) = rig.call(2) {
        let answer = block_on(call);
        assert!(!matches!(answer, Err(error) if error.started()));
    }
    close.join().expect("close");
    other.join().expect("other");
    assert!(rig.call(3).is_none());
    rig.check_end();
}

/// The limit grows while calls wait, and a call is dropped that may just have been granted.
fn growing_among_calls() {
    let rig = Rig::new(1, 3);
    rig.work.0.limit.store(2, Ordering::SeqCst);
    let grow = {
        let rig = rig.clone();
        thread::spawn(move || {
            let wider = limits(2).with_queue(3);
            rig.limiter.resize(wider).expect("sound limits");
        })
    };
    let leaves = {
        let rig = rig.clone();
        thread::spawn(move || drop(rig.call(1)))
    };
    let waits = {
        let rig = rig.clone();
        thread::spawn(move || {
            let call = rig.call(2).expect("a slot or a place");
            assert_eq!(block_on(call).expect("an answer"), 2);
        })
    };
    let call = rig.call(3).expect("a slot or a place");
    assert_eq!(block_on(call).expect("an answer"), 3);
    grow.join().expect("grow");
    leaves.join().expect("leaves");
    waits.join().expect("waits");
    rig.check_end();
}

#[test]
fn nothing_runs_above_the_limit_and_nobody_waits_for_ever() {
    explore(callers_that_wait_and_leave);
}

#[test]
fn no_thread_leaves_while_work_waits_for_it() {
    explore(threads_that_are_used_again);
}

#[test]
fn a_close_refuses_or_lets_run_and_leaks_nothing() {
    explore(a_close_among_calls);
}

#[test]
fn growing_starts_what_waits() {
    explore(growing_among_calls);
}
