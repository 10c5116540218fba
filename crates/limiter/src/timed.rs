//! Deadlines, tasks and timers on tokio.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use tokio::runtime::Handle as Runtime;
use tokio::time::Instant;

use crate::call::{Linger, Slot, Started};
use crate::error::{Refused, Rejected};
use crate::limiter::Limiter;
use crate::limits::Ask;
#[cfg(doc)]
use crate::limits::Limits;
use crate::snapshot::{Ended, RunningCall};

/// A call that got no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotStarted {
    /// The offer was turned down at once.
    Rejected(Rejected),
    /// The call was queued and its place ended without a slot.
    Refused(Refused),
}

/// What [`Limiter::drain`] left behind.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DrainReport {
    /// Queued calls that were sent away at the deadline.
    pub sent_away: usize,
    /// Calls that still held slots at the deadline: id, label, age.
    pub still_running: Vec<RunningCall>,
}

/// A call run by [`Limiter::run`] that brought no answer.
#[derive(Debug)]
pub enum RunError {
    /// The work never started.
    NotStarted(NotStarted),
    /// The work started and panicked.
    Panicked,
    /// There is no tokio runtime here to run it on; it never started.
    NoRuntime,
    /// The work started, and its runtime was shut down before its end.
    RuntimeGone,
}

// === impl Limiter ===

impl Limiter {
    /// Waits for a slot, at most until `deadline`, and no longer than [`Limits::queue_time`].
    ///
    /// The queue knows the deadline: a call that cannot start in time is rejected at once, with
    /// [`Reason::Deadline`](crate::Reason::Deadline) and the predicted wait. A deadline that has passed
    /// already still gets a slot that is free.
    ///
    /// # Errors
    ///
    /// [`NotStarted::Rejected`] at once, [`NotStarted::Refused`] at the deadline, under overload, or when
    /// the limiter is closed. No work has started in any of these.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the queue, as dropping a [`Place`](crate::Place) does. No slot leaks.
    pub async fn acquire_until(&self, ask: Ask, deadline: Instant) -> Result<Started, NotStarted> {
        let ask = ask.with_deadline(deadline.into_std());
        let mut place = self.offer(ask)?;
        let offered = Instant::now();
        let queue_time = self.limits().queue_time;
        let queued_until = queue_time.and_then(|time| offered.checked_add(time));
        let deadline = queued_until.map_or(deadline, |until| until.min(deadline));
        let timeout = tokio::time::timeout_at(deadline, &mut place);
        if let Ok(place) = timeout.await {
            return Ok(place?);
        }
        let retry_after = place.retry_after();
        place.expire().ok_or_else(|| {
            NotStarted::Refused(Refused::Deadline {
                waited: offered.elapsed(),
                retry_after,
            })
        })
    }

    /// Queues, then runs `work` in a task of its own that owns the slot, and waits for its answer.
    ///
    /// # Errors
    ///
    /// [`RunError::NotStarted`] if the work never ran; otherwise it had started.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future is the waiter leaving. While queued, `work` is dropped and never starts.
    /// Once started it runs to its end as an abandoned call, holding its slot; its answer is dropped.
    /// Work that wants to know of it takes the slot by hand and asks [`Slot::abandoned`].
    pub async fn run<F>(&self, ask: Ask, work: F) -> Result<F::Output, RunError>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let runtime = Runtime::try_current().map_err(|_| RunError::NoRuntime)?;
        let place = self.offer(ask).map_err(NotStarted::from)?;
        let Started { waiter, slot, .. } = place.await.map_err(NotStarted::from)?;
        let task = runtime.spawn(async move {
            let output = work.await;
            slot.finish(Ended::Ok);
            output
        });
        let answer = task.await;
        waiter.done();
        answer.map_err(|error| {
            if error.is_panic() {
                RunError::Panicked
            } else {
                RunError::RuntimeGone
            }
        })
    }
}

impl Limiter {
    /// Takes no more offers, lets the queue and the running work end until `deadline`, then sends away
    /// what is still queued. Always returns by the deadline, with a report of what still runs; that work
    /// goes on and keeps its slots.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future stops the waiting; the limiter stays closed to new offers. May be called again.
    pub async fn drain(&self, deadline: Instant) -> DrainReport {
        self.seal();
        let ended = tokio::time::timeout_at(deadline, self.idle()).await;
        let before = self.snapshot().left.closed;
        self.close();
        let sent_away = self.snapshot().left.closed - before;
        DrainReport {
            sent_away: usize::try_from(sent_away).unwrap_or(usize::MAX),
            still_running: if ended.is_ok() {
                Vec::new()
            } else {
                self.running()
            },
        }
    }
}

// === impl Slot ===

impl Slot {
    /// The local work is over; keeps the slot for `time` more, on a timer of the present runtime.
    ///
    /// Without a runtime, or when it goes away, the slot is given back at once: a timer that nobody
    /// runs would keep it for ever.
    pub fn linger_for(self, ended: Ended, time: Duration) {
        self.linger_as(ended).end_after(time);
    }
}

// === impl Linger ===

impl Linger {
    /// Gives the slot back after `time`, on a timer of the present runtime; without one, at once.
    pub fn end_after(self, time: Duration) {
        if time.is_zero() {
            return;
        }
        let Ok(runtime) = Runtime::try_current() else {
            return;
        };
        drop(runtime.spawn(async move {
            tokio::time::sleep(time).await;
            drop(self);
        }));
    }
}

// === impl NotStarted ===

impl NotStarted {
    /// Whether work had started: never. A retry cannot double anything.
    #[must_use]
    pub const fn started(&self) -> bool {
        false
    }

    /// When it is worth asking again, 1 s to 60 s.
    #[must_use]
    pub const fn retry_after(&self) -> Duration {
        match self {
            Self::Rejected(rejected) => rejected.retry_after(),
            Self::Refused(refused) => refused.retry_after(),
        }
    }
}

impl From<Rejected> for NotStarted {
    fn from(rejected: Rejected) -> Self {
        Self::Rejected(rejected)
    }
}

impl From<Refused> for NotStarted {
    fn from(refused: Refused) -> Self {
        Self::Refused(refused)
    }
}

impl fmt::Display for NotStarted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the call was not started")
    }
}

impl std::error::Error for NotStarted {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Rejected(rejected) => Some(rejected),
            Self::Refused(refused) => Some(refused),
        }
    }
}

// === impl RunError ===

impl RunError {
    /// Whether work had started, so that a retry could double it.
    #[must_use]
    pub const fn started(&self) -> bool {
        matches!(self, Self::Panicked | Self::RuntimeGone)
    }
}

impl From<NotStarted> for RunError {
    fn from(not_started: NotStarted) -> Self {
        Self::NotStarted(not_started)
    }
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotStarted(_) => "the work was not run",
            Self::NoRuntime => "there is no runtime to run the work on",
            Self::Panicked => "the work panicked",
            Self::RuntimeGone => "the runtime ended before the work",
        })
    }
}

impl std::error::Error for RunError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::NotStarted(not_started) => Some(not_started),
            Self::NoRuntime | Self::Panicked | Self::RuntimeGone => None,
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle, protocol))))]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;
    use crate::limits::Limits;

    const SECOND: Duration = Duration::from_secs(1);

    fn one() -> Limiter {
        let limits = Limits::new(NonZeroUsize::new(1).expect("not zero"));
        Limiter::new(limits).expect("sound limits")
    }

    fn check(limiter: &Limiter) -> crate::Snapshot {
        let snapshot = limiter.snapshot();
        assert_eq!(snapshot.broken_identity(), None, "{snapshot:?}");
        snapshot
    }

    #[tokio::test(start_paused = true)]
    async fn a_deadline_ends_the_wait_and_not_the_work() {
        let limiter = one();
        let until = Instant::now() + SECOND;
        let Started { waiter, slot, .. } = limiter
            .acquire_until(Ask::default(), until)
            .await
            .expect("free");
        drop(waiter);
        let error = limiter
            .acquire_until(Ask::default(), until)
            .await
            .expect_err("held");
        assert!(matches!(
            error,
            NotStarted::Refused(Refused::Deadline { waited, .. }) if waited == SECOND
        ));
        let now = check(&limiter);
        assert_eq!((now.left.deadline, now.abandoned), (1, 1));
        let error = limiter
            .acquire_until(Ask::default(), until)
            .await
            .expect_err("past and held");
        assert!(!error.started());
        slot.finish(Ended::Ok);
        let late = limiter.acquire_until(Ask::default(), until).await;
        assert!(late.is_ok(), "a free slot is given even late");
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_in_the_queue_is_bounded() {
        let limits = Limits::new(NonZeroUsize::MIN).with_queue_time(SECOND);
        let limiter = Limiter::new(limits).expect("sound limits");
        let running = limiter.offer(Ask::default()).expect("free").await;
        let begun = Instant::now();
        let late = begun + 60 * SECOND;
        let error = limiter.acquire_until(Ask::default(), late).await;
        assert!(error.is_err());
        assert_eq!(begun.elapsed(), SECOND);
        assert_eq!(check(&limiter).left.deadline, 1);
        drop(running);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slot_lingers_for_its_time() {
        let limiter = one();
        let started = limiter.offer(Ask::default()).expect("free").await;
        let Started { slot, waiter, .. } = started.expect("free");
        slot.linger_for(Ended::Cancelled, SECOND);
        drop(waiter);
        assert_eq!(check(&limiter).lingering, 1);
        let next = limiter.offer(Ask::default()).expect("queued").await;
        let now = check(&limiter);
        assert_eq!((now.lingering, now.ended.cancelled.attended), (0, 1));
        drop(next);
    }

    #[test]
    fn without_a_runtime_nothing_lingers_for_ever() {
        let limiter = one();
        let Some(started) = limiter.offer(Ask::default()).expect("free").expire() else {
            panic!("a free slot");
        };
        started.slot.linger_for(Ended::Cancelled, SECOND);
        assert_eq!(check(&limiter).lingering, 0);
    }

    #[test]
    fn a_runtime_that_goes_takes_its_timers_and_work_with_it() {
        let limiter = one();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let started = limiter.offer(Ask::default()).expect("free").await;
            let Started { slot, waiter, .. } = started.expect("free");
            waiter.done();
            slot.linger_for(Ended::Cancelled, 1_000 * SECOND);
            tokio::task::yield_now().await;
        });
        assert_eq!(check(&limiter).lingering, 1);
        drop(runtime);
        assert_eq!(check(&limiter).lingering, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn run_gives_the_answer() {
        let limiter = one();
        let answer = limiter.run(Ask::default(), async { 7 }).await;
        assert!(matches!(answer, Ok(7)));
        assert_eq!(check(&limiter).ended.ok.attended, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn run_ends_the_slot_of_work_that_panics() {
        let limiter = one();
        let work = async { panic!("the work failed") };
        let answer: Result<(), RunError> = limiter.run(Ask::default(), work).await;
        assert!(matches!(&answer, Err(error @ RunError::Panicked) if error.started()));
        assert_eq!(check(&limiter).ended.panicked.attended, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn run_on_abandoned_and_queued_calls_that_never_start() {
        let limiter = one();
        let (done, wait) = tokio::sync::oneshot::channel::<()>();
        let first = limiter.run(Ask::default(), wait);
        assert!(tokio::time::timeout(SECOND, first).await.is_err());
        let second = limiter.run(Ask::default(), async { panic!("ran without a waiter") });
        let second = tokio::time::timeout(SECOND, second).await;
        assert!(second.is_err());
        let now = check(&limiter);
        assert_eq!((now.started, now.abandoned, now.left.caller), (1, 1, 1));
        done.send(()).expect("the work runs on");
        tokio::task::yield_now().await;
        let now = check(&limiter);
        assert_eq!((now.running, now.ended.ok.abandoned), (0, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_serves_the_queue_and_names_what_stays() {
        let limiter = one();
        let first = limiter.offer(Ask::new("first", 0)).expect("free").await;
        let first = first.expect("free");
        let second = limiter.offer(Ask::new("second", 0)).expect("queued");
        let drain = {
            let limiter = limiter.clone();
            tokio::spawn(async move { limiter.drain(Instant::now() + SECOND).await })
        };
        tokio::task::yield_now().await;
        assert!(limiter.offer(Ask::default()).is_err());
        drop(first);
        let second = second.await.expect("served to the end");
        let report = drain.await.expect("a report");
        assert_eq!(report.sent_away, 0);
        assert_eq!(report.still_running.len(), 1);
        assert_eq!(report.still_running[0].label.as_deref(), Some("second"));
        drop(second);
        let report = limiter.drain(Instant::now() + SECOND).await;
        assert!(report.still_running.is_empty());
        check(&limiter);
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_sends_the_queue_away_at_its_deadline() {
        let limiter = one();
        let first = limiter.offer(Ask::default()).expect("free").await;
        let second = limiter.offer(Ask::default()).expect("queued");
        let report = limiter.drain(Instant::now() + SECOND).await;
        assert_eq!((report.sent_away, report.still_running.len()), (1, 1));
        assert!(matches!(second.await, Err(Refused::Closed)));
        drop(first);
        assert_eq!(check(&limiter).running, 0);
    }

    #[test]
    fn work_whose_runtime_goes_is_a_counted_end() {
        let limiter = one();
        let build = || {
            let builder = &mut tokio::runtime::Builder::new_multi_thread();
            builder.worker_threads(1).enable_time().build()
        };
        let (gone, stays) = (build().expect("a runtime"), build().expect("a runtime"));
        let call = {
            let limiter = limiter.clone();
            // The future finds its runtime when it is first polled.
            let call = async move {
                limiter
                    .run(Ask::default(), std::future::pending::<()>())
                    .await
            };
            let mut call = Box::pin(call);
            let guard = gone.enter();
            let waker = std::task::Waker::noop();
            let polled = call
                .as_mut()
                .poll(&mut std::task::Context::from_waker(waker));
            assert!(polled.is_pending());
            drop(guard);
            call
        };
        assert_eq!(check(&limiter).running, 1);
        gone.shutdown_background();
        let error = stays.block_on(call).expect_err("its runtime is gone");
        assert!(matches!(error, RunError::RuntimeGone) && error.started());
        let now = check(&limiter);
        assert_eq!((now.running, now.ended.dropped.attended), (0, 1));
    }

    #[test]
    fn without_a_runtime_nothing_is_run() {
        let limiter = one();
        let mut call = Box::pin(limiter.run(Ask::default(), async {}));
        let waker = std::task::Waker::noop();
        let polled = call
            .as_mut()
            .poll(&mut std::task::Context::from_waker(waker));
        let std::task::Poll::Ready(Err(error)) = polled else {
            panic!("{polled:?}");
        };
        assert!(matches!(error, RunError::NoRuntime) && !error.started());
        assert_eq!(check(&limiter).offered, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn absurd_times_are_no_times() {
        let limiter = one();
        let started = limiter.offer(Ask::default()).expect("free").await;
        started
            .expect("free")
            .slot
            .linger_for(Ended::Ok, Duration::ZERO);
        assert_eq!(check(&limiter).lingering, 0);
        let started = limiter.offer(Ask::default()).expect("free").await;
        started
            .expect("free")
            .slot
            .linger_for(Ended::Ok, Duration::MAX);
        tokio::time::sleep(1_000 * SECOND).await;
        assert_eq!(check(&limiter).lingering, 1);
        let past = Instant::now() - SECOND;
        let report = limiter.drain(past).await;
        assert_eq!(report.still_running.len(), 1);
    }
}
