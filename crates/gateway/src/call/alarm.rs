//! What wakes a call that waits: its time, and the end of the drain.

use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio::time::{Instant, Sleep};

use crate::signal::{Signal, Watch};

/// Wakes one task. It stays set from wait to wait and from call to call: what was asked for last mostly rings no earlier than what it is set
/// to, and then nothing of it is touched. One that rings for a wait that is over wakes its task once, in vain.
#[derive(Debug, Default)]
pub struct Alarm(Mutex<Option<Set>>);

#[derive(Debug)]
struct Set {
    sleep: Pin<Box<Sleep>>,
    cut: Watch,
    /// Whom both wake.
    task: Waker,
}

/// Why it rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rung {
    Time,
    Cut,
}

impl Alarm {
    /// Pending: the task is woken at `until`, or earlier to look again, and once `cut` is raised.
    ///
    /// Several waits may share an alarm, each with a time of its own, if one task polls them all each time that it is woken.
    pub fn poll(&self, cx: &mut Context<'_>, until: Instant, cut: &Signal) -> Poll<Rung> {
        let mut set = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *set {
            Some(set) => set.poll(cx, until),
            none => none.insert(Set::new(cx, until, cut)).poll_anew(cx, until),
        }
    }
}

impl Set {
    fn new(cx: &Context<'_>, until: Instant, cut: &Signal) -> Self {
        Self {
            sleep: Box::pin(tokio::time::sleep_until(until)),
            cut: cut.watch(),
            task: cx.waker().clone(),
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>, until: Instant) -> Poll<Rung> {
        if !self.task.will_wake(cx.waker()) {
            self.task.clone_from(cx.waker());
            self.cut.moved();
        } else if self.sleep.deadline() <= until && !self.sleep.is_elapsed() {
            return self.poll_cut(cx);
        }
        self.poll_anew(cx, until)
    }

    fn poll_anew(&mut self, cx: &mut Context<'_>, until: Instant) -> Poll<Rung> {
        loop {
            if until <= Instant::now() {
                return Poll::Ready(Rung::Time);
            }
            if self.sleep.deadline() > until || self.sleep.is_elapsed() {
                self.sleep.as_mut().reset(until);
            }
            if self.sleep.as_mut().poll(cx).is_pending() {
                return self.poll_cut(cx);
            }
        }
    }

    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<Rung> {
        if self.cut.poll_raised(cx) {
            return Poll::Ready(Rung::Cut);
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;
    use std::time::Duration;

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    struct Waits {
        alarm: Alarm,
        cut: Signal,
        began: Instant,
    }

    impl Waits {
        fn new() -> Self {
            Self {
                alarm: Alarm::default(),
                cut: Signal::default(),
                began: Instant::now(),
            }
        }

        fn poll(&self, task: &Arc<Woken>, seconds: u64) -> Poll<Rung> {
            let waker = Waker::from(Arc::clone(task));
            let until = self.began + Duration::from_secs(seconds);
            let mut cx = Context::from_waker(&waker);
            self.alarm.poll(&mut cx, until, &self.cut)
        }
    }

    fn woken(task: &Arc<Woken>) -> usize {
        task.0.swap(0, Ordering::Relaxed)
    }

    async fn pass(seconds: u64) {
        tokio::time::advance(Duration::from_secs(seconds)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_later_wait_is_woken_early_to_look_again_and_then_in_time() {
        let (waits, task) = (Waits::new(), Arc::default());
        assert!(waits.poll(&task, 10).is_pending());
        pass(4).await;
        assert!(waits.poll(&task, 14).is_pending());
        pass(6).await;
        assert_eq!(woken(&task), 1);
        assert!(waits.poll(&task, 14).is_pending());
        pass(4).await;
        assert_eq!(woken(&task), 1);
        assert_eq!(waits.poll(&task, 14), Poll::Ready(Rung::Time));
    }

    #[tokio::test(start_paused = true)]
    async fn an_earlier_wait_is_woken_in_time() {
        let (waits, task) = (Waits::new(), Arc::default());
        assert!(waits.poll(&task, 600).is_pending());
        assert!(waits.poll(&task, 2).is_pending());
        pass(2).await;
        assert_eq!(woken(&task), 1);
        assert_eq!(waits.poll(&task, 2), Poll::Ready(Rung::Time));
        assert_eq!(waits.poll(&task, 1), Poll::Ready(Rung::Time));
    }

    #[tokio::test(start_paused = true)]
    async fn two_waits_at_once_are_each_woken_in_time() {
        let (waits, task) = (Waits::new(), Arc::default());
        for (from, until) in [(0, 3), (3, 5)] {
            assert!(waits.poll(&task, 5).is_pending());
            assert_eq!(waits.poll(&task, 3).is_pending(), from < 3);
            assert!(waits.poll(&task, 5).is_pending());
            pass(until - from).await;
            assert_eq!(woken(&task), 1);
        }
        assert_eq!(waits.poll(&task, 5), Poll::Ready(Rung::Time));
    }

    #[tokio::test(start_paused = true)]
    async fn the_task_that_polls_now_is_woken_by_time_and_by_the_cut() {
        let (waits, first, second) = (Waits::new(), Arc::default(), Arc::default());
        assert!(waits.poll(&first, 10).is_pending());
        assert!(waits.poll(&second, 10).is_pending());
        pass(10).await;
        assert_eq!((woken(&first), woken(&second)), (0, 1));
        assert!(waits.poll(&second, 20).is_pending());
        waits.cut.raise();
        assert_eq!((woken(&first), woken(&second)), (0, 1));
        assert_eq!(waits.poll(&second, 20), Poll::Ready(Rung::Cut));
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_after_the_cut_does_not_begin() {
        let (waits, task) = (Waits::new(), Arc::default());
        waits.cut.raise();
        assert_eq!(waits.poll(&task, 10), Poll::Ready(Rung::Cut));
    }
}
