use std::num::NonZeroUsize;
use std::sync::mpsc;
use std::task::Wake;
use std::thread;
use std::time::Instant;

use super::*;
use crate::{Limits, Snapshot};

/// Longer than a busy machine takes.
const LONG: Duration = Duration::from_secs(10);

struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: Future + Unpin>(mut future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        if let Poll::Ready(output) = Pin::new(&mut future).poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        let begun = Instant::now();
        thread::park_timeout(LONG);
        assert!(begun.elapsed() < LONG, "nobody was woken");
    }
}

fn start<T: Send + 'static>(call: &mut BlockingCall<T>) {
    let polled = Pin::new(call).poll(&mut Context::from_waker(Waker::noop()));
    assert!(polled.is_pending());
}

fn threads(limit: usize) -> Threads {
    let limits = Limits::new(NonZeroUsize::new(limit).expect("not zero"));
    Threads::new(Limiter::new(limits).expect("sound limits"))
}

fn check(threads: &Threads) -> Snapshot {
    let snapshot = threads.limiter.snapshot();
    assert_eq!(snapshot.broken_identity(), None, "{snapshot:?}");
    snapshot
}

#[test]
fn the_answer_comes_back_and_the_thread_is_used_again() {
    let threads = threads(1);
    for call in 0..50 {
        let answer = threads.run_blocking(Ask::default(), move |_| call);
        assert_eq!(block_on(answer.expect("free")).expect("an answer"), call);
    }
    let now = check(&threads);
    assert_eq!((now.ended.ok.attended, now.abandoned_total), (50, 0));
    assert!(threads.threads() <= 1, "{}", threads.threads());
}

#[test]
fn three_abandoned_calls_under_a_limit_of_one_run_one() {
    let threads = threads(1);
    let (let_go, held) = mpsc::channel::<()>();
    let mut first = threads
        .run_blocking(Ask::default(), move |_| held.recv())
        .expect("free");
    start(&mut first);
    drop(first);
    let token = Arc::new(());
    let work = {
        let token = token.clone();
        move |_: &Slot| drop(token)
    };
    let mut second = threads.run_blocking(Ask::default(), work).expect("queued");
    start(&mut second);
    assert_eq!(Arc::strong_count(&token), 2);
    drop(second);
    assert_eq!(Arc::strong_count(&token), 1, "its closure is gone at once");
    let now = check(&threads);
    assert_eq!((now.running, now.abandoned, now.left.caller), (1, 1, 1));
    assert_eq!(threads.threads(), 1);
    let_go.send(()).expect("it runs on");
    block_on(threads.limiter.idle());
    assert_eq!(check(&threads).ended.ok.abandoned, 1);
}

#[test]
fn work_can_see_that_nobody_waits() {
    let threads = threads(1);
    let (seen, saw) = mpsc::channel();
    let mut call = threads
        .run_blocking(Ask::default(), move |slot| {
            let begun = Instant::now();
            while !slot.is_abandoned() && begun.elapsed() < LONG {
                thread::yield_now();
            }
            seen.send(slot.is_abandoned()).expect("somebody listens");
        })
        .expect("free");
    start(&mut call);
    drop(call);
    assert_eq!(saw.recv(), Ok(true));
    block_on(threads.limiter.idle());
    check(&threads);
}

#[test]
fn a_panic_is_the_calls_and_not_the_threads() {
    let threads = threads(1);
    let call = threads.run_blocking(Ask::default(), |_| panic!("a torn page"));
    let answer: Result<(), BlockingError> = block_on(call.expect("free"));
    let error = answer.expect_err("it panicked");
    assert_eq!(error.to_string(), "the work panicked: a torn page");
    assert!(error.started());
    let again = threads.run_blocking(Ask::default(), |_| 1).expect("free");
    assert_eq!(block_on(again).expect("an answer"), 1);
    assert_eq!(check(&threads).ended.panicked.attended, 1);
}

#[test]
fn many_calls_from_many_threads_never_run_above_the_limit() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static RUNNING: AtomicUsize = AtomicUsize::new(0);
    let limits = Limits::new(NonZeroUsize::new(2).expect("not zero")).with_queue(100);
    let threads = Threads::new(Limiter::new(limits).expect("sound limits"));
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let call = threads.run_blocking(Ask::default(), |_| {
                        let others = RUNNING.fetch_add(1, Ordering::SeqCst);
                        assert!(others < 2, "above the limit");
                        thread::yield_now();
                        RUNNING.fetch_sub(1, Ordering::SeqCst);
                    });
                    block_on(call.expect("queued")).expect("an answer");
                }
            });
        }
    });
    assert_eq!(check(&threads).ended.ok.attended, 400);
    assert!(threads.threads() <= 2, "{}", threads.threads());
}

/// Panics when it is dropped, and not only then.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("even its end fails");
    }
}

#[test]
fn a_panic_that_panics_again_leaves_nobody_waiting() {
    let threads = threads(1);
    let call = threads.run_blocking(Ask::default(), |_| std::panic::panic_any(Bomb));
    let answer: Result<(), BlockingError> = block_on(call.expect("free"));
    assert!(answer.expect_err("it panicked").started());
    let (let_go, held) = mpsc::channel::<()>();
    let work = move |_: &Slot| {
        let _let_go = held.recv();
        Bomb
    };
    let mut leaves = threads.run_blocking(Ask::default(), work).expect("free");
    start(&mut leaves);
    drop(leaves);
    let_go.send(()).expect("it runs on");
    let again = threads
        .run_blocking(Ask::default(), |_| 1)
        .expect("a place");
    assert_eq!(block_on(again).expect("an answer"), 1);
    let now = check(&threads);
    assert_eq!((now.running, now.ended.panicked.attended), (0, 1));
    assert_eq!(now.ended.ok.total(), 2);
}

#[test]
fn a_caller_comes_back_to_its_running_work() {
    let threads = threads(1);
    let (let_go, held) = mpsc::channel::<()>();
    let work = move |_: &Slot| held.recv().is_ok();
    let mut call = threads.run_blocking(Ask::default(), work).expect("free");
    call.step_away();
    assert_eq!(call.come_back(), Ok(()), "it has not started");
    start(&mut call);
    call.step_away();
    assert_eq!(check(&threads).abandoned, 1);
    assert_eq!(call.come_back(), Ok(()));
    assert_eq!(check(&threads).abandoned, 0);
    call.step_away();
    let_go.send(()).expect("it runs on");
    assert!(block_on(&mut call).expect("the answer is kept"));
    assert_eq!(call.come_back(), Err(CannotReturn::Over));
    assert_eq!(check(&threads).ended.ok.abandoned, 1);
}
