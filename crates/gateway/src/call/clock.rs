//! What the relay's tiers are measured from.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep};

/// A pause between two polls longer than this means that the client was not reading.
const BLOCKED_AFTER: Duration = Duration::from_millis(100);

/// When what happened last.
#[derive(Debug)]
pub(super) struct Clock {
    /// Since when nothing came although we asked.
    pub(super) waiting_since: Option<Instant>,
    /// Last meaningful event, moved on by the time in which the client did not read.
    pub(super) event: Instant,
    pub(super) seen_event: bool,
    /// Last byte toward the client.
    pub(super) sent: Instant,
    /// When the last frame was handed to the connection; `None` while we are being waited for.
    pub(super) handed: Option<Instant>,
    pub(super) total: Option<Instant>,
    sleep: Option<Pin<Box<Sleep>>>,
    /// When `sleep` wakes the task that polls, which it knows already.
    armed: Option<Instant>,
    resting: bool,
}

impl Clock {
    pub(super) fn new(now: Instant, total: Option<Instant>) -> Self {
        Self {
            waiting_since: None,
            event: now,
            seen_event: false,
            sent: now,
            handed: None,
            total,
            sleep: None,
            armed: None,
            resting: false,
        }
    }

    /// Ready after a rest of `time`, counted from the first poll. Only for a relay that waits for nothing else any more.
    pub(super) fn poll_rest(&mut self, cx: &mut Context<'_>, time: Duration) -> Poll<()> {
        if !std::mem::replace(&mut self.resting, true) {
            self.sleep = Some(Box::pin(tokio::time::sleep(time)));
        }
        match &mut self.sleep {
            Some(sleep) => sleep.as_mut().poll(cx),
            None => Poll::Ready(()),
        }
    }

    /// Pending: the task is woken at `until`, or earlier to look again. The timer is not touched while what it is set to will do: it is cold
    /// memory, of which each chunk of each stream would have to fetch some.
    pub(super) fn poll_until(
        &mut self,
        cx: &mut Context<'_>,
        until: Instant,
        now: Instant,
    ) -> Poll<()> {
        if self.armed.is_some_and(|at| now < at && at <= until) {
            return Poll::Pending;
        }
        let sleep = self
            .sleep
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
        if sleep.deadline() > until || sleep.is_elapsed() {
            sleep.as_mut().reset(until);
        }
        let polled = sleep.as_mut().poll(cx);
        self.armed = polled.is_pending().then(|| sleep.deadline());
        polled
    }

    /// Another task polls from here on.
    pub(super) fn moved(&mut self) {
        self.armed = None;
    }

    /// The connection asks for more. A long pause since the last frame was the client's, not the upstream's.
    pub(super) fn polled(&mut self, now: Instant) {
        if let Some(handed) = self.handed.take() {
            let pause = now.duration_since(handed);
            if pause > BLOCKED_AFTER {
                self.event += pause;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Wake, Waker};

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    impl Woken {
        fn times(&self) -> usize {
            self.0.load(Ordering::Relaxed)
        }
    }

    fn poll(clock: &mut Clock, task: &Arc<Woken>, seconds: u64, began: Instant) -> bool {
        let waker = Waker::from(Arc::clone(task));
        let mut cx = Context::from_waker(&waker);
        let until = began + Duration::from_secs(seconds);
        clock.poll_until(&mut cx, until, Instant::now()).is_ready()
    }

    async fn pass(seconds: u64) {
        tokio::time::advance(Duration::from_secs(seconds)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_deadline_that_moves_on_is_met_by_looking_again() {
        let (began, task) = (Instant::now(), Arc::<Woken>::default());
        let mut clock = Clock::new(began, None);
        assert!(!poll(&mut clock, &task, 10, began));
        pass(4).await;
        assert!(!poll(&mut clock, &task, 14, began));
        pass(6).await;
        assert_eq!(task.times(), 1, "early, to look again");
        assert!(!poll(&mut clock, &task, 14, began));
        pass(4).await;
        assert_eq!(task.times(), 2);
        assert!(poll(&mut clock, &task, 14, began));
    }

    #[tokio::test(start_paused = true)]
    async fn a_deadline_that_comes_nearer_is_met() {
        let (began, task) = (Instant::now(), Arc::<Woken>::default());
        let mut clock = Clock::new(began, None);
        assert!(!poll(&mut clock, &task, 10, began));
        assert!(!poll(&mut clock, &task, 2, began));
        pass(2).await;
        assert_eq!(task.times(), 1);
        assert!(poll(&mut clock, &task, 2, began));
    }

    #[tokio::test(start_paused = true)]
    async fn the_task_that_polls_now_is_woken() {
        let (began, first, second) = (Instant::now(), Arc::default(), Arc::<Woken>::default());
        let mut clock = Clock::new(began, None);
        assert!(!poll(&mut clock, &first, 10, began));
        clock.moved();
        assert!(!poll(&mut clock, &second, 10, began));
        pass(10).await;
        assert_eq!((first.times(), second.times()), (0, 1));
    }
}
