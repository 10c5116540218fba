//! Blocking work on threads of our own.
//!
//! Not a runtime's blocking pool: its queue has no bound, and shutting it down waits for the work. A
//! closure is held by its waiter until it has a slot, so a call that leaves the queue takes its closure
//! with it. There are never more threads than slots, idle ones end after a while, and none is ever
//! joined: work left behind does not keep a process from ending.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::PoisonError;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::call::{CannotReturn, Slot, Started, Waiter};
use crate::error::{Refused, Rejected};
use crate::limiter::Limiter;
use crate::limits::Ask;
use crate::place::Place;
use crate::snapshot::Ended;
use crate::sync::pool::{Arc, Builder, Condvar, Mutex, MutexGuard, wait_for};

/// How long an idle thread is kept.
const KEEP: Duration = Duration::from_secs(10);

/// Threads for the blocking work of one limiter. Clones share the threads.
///
/// ```
/// use std::num::NonZeroUsize;
/// use tidegate_limiter::{Ask, Limiter, Limits, Threads};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::new(Limits::new(NonZeroUsize::new(4).ok_or("zero")?))?;
/// let threads = Threads::new(limiter);
/// let call = threads.run_blocking(Ask::new("fib", 0), |slot| {
///     // a long loop would look at `slot.is_abandoned()` now and then
///     (1..=10_u64).product::<u64>()
/// })?;
/// # fn block_on<F: Future>(f: F) -> F::Output {
/// #     let mut f = Box::pin(f);
/// #     struct Unpark(std::thread::Thread);
/// #     impl std::task::Wake for Unpark {
/// #         fn wake(self: std::sync::Arc<Self>) { self.0.unpark() }
/// #     }
/// #     let waker = std::sync::Arc::new(Unpark(std::thread::current())).into();
/// #     let mut cx = std::task::Context::from_waker(&waker);
/// #     loop {
/// #         if let std::task::Poll::Ready(out) = f.as_mut().poll(&mut cx) { return out }
/// #         std::thread::park();
/// #     }
/// # }
/// assert_eq!(block_on(call)?, 3_628_800); // `.await` elsewhere
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Threads {
    limiter: Limiter,
    pool: Arc<Pool>,
}

/// A blocking call: queued, then running on a thread. Made by [`Threads::run_blocking`].
///
/// # Cancel safety
///
/// Dropping it is the waiter leaving. While queued, the closure is dropped at once and never runs. Once
/// started it runs to its end as an abandoned call and holds its slot; its answer is dropped.
#[must_use = "dropping it abandons the call"]
pub struct BlockingCall<T> {
    stage: Stage<T>,
    pool: Arc<Pool>,
}

/// Why a blocking call brought no answer.
#[derive(Debug)]
pub enum BlockingError {
    /// The work never started: its place in the queue ended.
    Refused(Refused),
    /// The work never started: the system gave no thread.
    NoThread(io::Error),
    /// The work started and panicked, with this message if it had one.
    Panicked(String),
}

type Work<T> = Box<dyn FnOnce(&Slot) -> T + Send>;

enum Stage<T> {
    Queued {
        place: Place,
        work: Work<T>,
    },
    Running {
        waiter: Waiter,
        answer: Arc<Answer<T>>,
    },
    Over,
}

/// Where the thread leaves the answer and the waiter its waker.
struct Answer<T>(Mutex<AnswerState<T>>);

struct AnswerState<T> {
    answer: Option<Result<T, String>>,
    waker: Option<Waker>,
}

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Pool {
    state: Mutex<PoolState>,
    wanted: Condvar,
}

#[derive(Default)]
struct PoolState {
    /// Started work that no thread has taken up yet: at most as much as there are slots.
    jobs: VecDeque<Job>,
    /// Jobs whose work is not over: each holds a slot, so there are never more than slots.
    busy: usize,
    /// Never more than there have been jobs at once.
    threads: usize,
}

// === impl Threads ===

impl Threads {
    /// Threads that run work under the slots of `limiter`. None is started yet.
    #[must_use]
    pub fn new(limiter: Limiter) -> Self {
        Self {
            limiter,
            pool: Arc::default(),
        }
    }

    /// Queues, then runs `work` on a thread with its slot, which tells it whether anybody still waits.
    ///
    /// The work starts when the returned future is polled after its slot came free, so a call that is
    /// never polled never runs.
    ///
    /// # Errors
    ///
    /// As [`Limiter::offer`].
    pub fn run_blocking<T, F>(&self, ask: Ask, work: F) -> Result<BlockingCall<T>, Rejected>
    where
        T: Send + 'static,
        F: FnOnce(&Slot) -> T + Send + 'static,
    {
        let place = self.limiter.offer(ask)?;
        Ok(BlockingCall {
            stage: Stage::Queued {
                place,
                work: Box::new(work),
            },
            pool: self.pool.clone(),
        })
    }

    /// Threads there are now, busy and idle.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.pool.lock().threads
    }

    /// Lets the time of every idle thread run out: a schedule is over when no thread is left.
    #[cfg(shuttle)]
    #[doc(hidden)]
    pub fn end_idle(&self) {
        while self.threads() > 0 {
            self.pool.wanted.notify_all();
            shuttle::thread::yield_now();
        }
    }
}

// === impl BlockingCall ===

impl<T: Send + 'static> Future for BlockingCall<T> {
    type Output = Result<T, BlockingError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Stage::Queued { place, .. } = &mut self.stage {
            let started = match Pin::new(place).poll(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(started) => started,
            };
            if let Err(error) = self.start(started) {
                return Poll::Ready(Err(error));
            }
        }
        let Stage::Running { answer, .. } = &self.stage else {
            return Poll::Ready(Err(BlockingError::Refused(Refused::Closed)));
        };
        let Some(answer) = answer.take(cx) else {
            return Poll::Pending;
        };
        if let Stage::Running { waiter, .. } = std::mem::replace(&mut self.stage, Stage::Over) {
            waiter.done();
        }
        Poll::Ready(answer.map_err(BlockingError::Panicked))
    }
}

impl<T: Send + 'static> BlockingCall<T> {
    fn start(&mut self, started: Result<Started, Refused>) -> Result<(), BlockingError> {
        let Stage::Queued { work, .. } = std::mem::replace(&mut self.stage, Stage::Over) else {
            return Ok(());
        };
        let Started { slot, waiter, .. } = started.map_err(BlockingError::Refused)?;
        let answer = Arc::new(Answer::empty());
        let job = {
            let (answer, pool) = (answer.clone(), self.pool.clone());
            Box::new(move || work_off(work, slot, &answer, &pool))
        };
        self.pool.run(job).map_err(BlockingError::NoThread)?;
        self.stage = Stage::Running { waiter, answer };
        Ok(())
    }
}

impl<T> BlockingCall<T> {
    /// Leaves, but keeps the handle: a running call is abandoned until [`come_back`](Self::come_back), and its
    /// answer is kept. A queued call keeps its place.
    pub fn step_away(&mut self) {
        if let Stage::Running { waiter, .. } = &mut self.stage {
            waiter.step_away();
        }
    }

    /// Takes up a call again that it had stepped away from.
    ///
    /// # Errors
    ///
    /// If the work is over, or the limit of attended calls is used up by others; its answer may still be awaited.
    pub fn come_back(&mut self) -> Result<(), CannotReturn> {
        match &mut self.stage {
            Stage::Queued { .. } => Ok(()),
            Stage::Running { waiter, .. } => waiter.come_back(),
            Stage::Over => Err(CannotReturn::Over),
        }
    }
}

impl<T> fmt::Debug for BlockingCall<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stage = match &self.stage {
            Stage::Queued { .. } => "queued",
            Stage::Running { .. } => "running",
            Stage::Over => "over",
        };
        f.debug_tuple("BlockingCall").field(&stage).finish()
    }
}

impl<T> Unpin for BlockingCall<T> {}

/// Runs on the thread: the work, then the end of its slot, then the answer.
fn work_off<T>(work: Work<T>, slot: Slot, answer: &Answer<T>, pool: &Pool) {
    let result = catch_unwind(AssertUnwindSafe(|| work(&slot)));
    pool.job_done();
    let (ended, result, payload) = match result {
        Ok(value) => (Ended::Ok, Ok(value), None),
        Err(payload) => (Ended::Panicked, Err(message(&*payload)), Some(payload)),
    };
    slot.finish(ended);
    answer.put(result);
    drop(payload); // last, as it may panic too
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or_default().to_owned()
}

// === impl Answer ===

impl<T> Answer<T> {
    const fn empty() -> Self {
        Self(Mutex::new(AnswerState {
            answer: None,
            waker: None,
        }))
    }

    fn lock(&self) -> MutexGuard<'_, AnswerState<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, answer: Result<T, String>) {
        let mut state = self.lock();
        state.answer = Some(answer);
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn take(&self, cx: &Context<'_>) -> Option<Result<T, String>> {
        let waker = cx.waker().clone();
        let mut state = self.lock();
        if let Some(answer) = state.answer.take() {
            return Some(answer);
        }
        let unused = state.waker.replace(waker);
        drop(state);
        drop(unused);
        None
    }
}

// === impl Pool ===

impl Pool {
    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the job to a thread that is free or about to be, or else to a new one.
    fn run(self: &Arc<Self>, job: Job) -> io::Result<()> {
        let mut state = self.lock();
        state.busy += 1;
        if state.busy <= state.threads {
            state.jobs.push_back(job);
            drop(state);
            if !cfg!(mutation = "thread_not_woken") {
                self.wanted.notify_one();
            }
            return Ok(());
        }
        state.threads += 1;
        drop(state);
        let pool = self.clone();
        let thread = Builder::new().name("tidegate-limiter".to_owned());
        match thread.spawn(move || pool.thread(job)) {
            Ok(_never_joined) => Ok(()),
            Err(error) => {
                let mut state = self.lock();
                state.threads -= 1;
                state.busy -= 1;
                Err(error)
            }
        }
    }

    /// The work of a job is over; its thread will look for another. Said before its slot comes free, so
    /// that whoever gets the slot finds the thread.
    fn job_done(&self) {
        self.lock().busy -= 1;
    }

    fn thread(&self, first: Job) {
        let mut job = Some(first);
        while let Some(run) = job {
            // The work's own panic is caught with its answer; this is one of a dropped answer.
            drop(catch_unwind(AssertUnwindSafe(run)));
            job = self.next_job();
        }
    }

    /// Waits for more, at most for [`KEEP`].
    fn next_job(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            let (back, timed_out) = wait_for(&self.wanted, state, &self.state, KEEP);
            state = back;
            if timed_out && (state.jobs.is_empty() || cfg!(mutation = "idle_thread_leaves_a_job")) {
                state.threads -= 1;
                return None;
            }
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        f.debug_struct("Pool")
            .field("threads", &state.threads)
            .field("busy", &state.busy)
            .finish_non_exhaustive()
    }
}

// === impl BlockingError ===

impl BlockingError {
    /// Whether work had started, so that a retry could double it.
    #[must_use]
    pub const fn started(&self) -> bool {
        matches!(self, Self::Panicked(_))
    }
}

impl fmt::Display for BlockingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(_) => f.write_str("the work was not started"),
            Self::NoThread(_) => f.write_str("there is no thread to run the work on"),
            Self::Panicked(message) => write!(f, "the work panicked: {message}"),
        }
    }
}

impl std::error::Error for BlockingError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Refused(refused) => Some(refused),
            Self::NoThread(error) => Some(error),
            Self::Panicked(_) => None,
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle, protocol))))]
#[path = "blocking_tests.rs"]
mod tests;
