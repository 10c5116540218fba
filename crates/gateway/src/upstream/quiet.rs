//! A waker that does not wake the task that is polling.
//!
//! An exchange polls hyper's connection and hyper's body in one task. The two tell each other of progress by waking that same task, which is
//! running at that moment: each chunk would cost one more poll of everything, for nothing. [`Quiet`] notes such a wake-up, and the exchange
//! looks again before it says that it is pending; wake-ups from outside (the socket, a timer) pass at once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

/// How often an exchange looks again before it lets others run.
const LOOKS: usize = 8;

/// One exchange's waker.
#[derive(Debug)]
pub(super) struct Quiet {
    state: Arc<State>,
    waker: Waker,
    /// The task that `state` wakes; kept here too, so that the usual case takes no lock.
    task: Option<Waker>,
}

#[derive(Debug, Default)]
struct State {
    polling: AtomicBool,
    again: AtomicBool,
    task: Mutex<Option<Waker>>,
}

impl State {
    fn wake_task(&self) {
        if self.polling.load(Ordering::Acquire) {
            self.again.store(true, Ordering::Release);
            // The poll may have ended between the two lines; then nobody will look again.
            if self.polling.load(Ordering::Acquire) {
                return;
            }
        }
        let task = self
            .task
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        if let Some(task) = task {
            task.wake();
        }
    }
}

impl Wake for State {
    fn wake(self: Arc<Self>) {
        self.wake_task();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.wake_task();
    }
}

impl Quiet {
    pub(super) fn new() -> Self {
        let state = Arc::new(State::default());
        Self {
            waker: Waker::from(Arc::clone(&state)),
            state,
            task: None,
        }
    }

    /// Polls until `work` is ready or nothing woke it from within.
    pub(super) fn poll<T>(
        &mut self,
        cx: &Context<'_>,
        mut work: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        if !self
            .task
            .as_ref()
            .is_some_and(|task| task.will_wake(cx.waker()))
        {
            self.task = Some(cx.waker().clone());
            *self
                .state
                .task
                .lock()
                .unwrap_or_else(PoisonError::into_inner) = Some(cx.waker().clone());
        }
        let mut inner = Context::from_waker(&self.waker);
        self.state.polling.store(true, Ordering::Release);
        let mut polled = Poll::Pending;
        for _ in 0..LOOKS {
            self.state.again.store(false, Ordering::Release);
            polled = work(&mut inner);
            if polled.is_ready() || !self.state.again.load(Ordering::Acquire) {
                break;
            }
        }
        self.state.polling.store(false, Ordering::Release);
        // Woken once more, by tokio's budget (it wants others to run first) or from another thread right at the end: the task comes back.
        if polled.is_pending() && self.state.again.swap(false, Ordering::AcqRel) {
            cx.waker().wake_by_ref();
        }
        polled
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_wake_from_within_is_looked_at_and_not_passed_on() {
        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        let cx = Context::from_waker(&waker);
        let mut polls = 0;
        let polled = Quiet::new().poll(&cx, |cx| {
            polls += 1;
            if polls < 3 {
                cx.waker().wake_by_ref();
            }
            Poll::<()>::Pending
        });
        assert!(polled.is_pending());
        assert_eq!((polls, count.0.load(Ordering::SeqCst)), (3, 0));
    }

    #[test]
    fn a_wake_from_outside_passes_to_the_task_that_polled_last() {
        let (first, second) = (Arc::new(Count::default()), Arc::new(Count::default()));
        let mut quiet = Quiet::new();
        let mut kept = None;
        for count in [&first, &second] {
            let waker = Waker::from(Arc::clone(count));
            let polled = quiet.poll(&Context::from_waker(&waker), |cx| {
                kept = Some(cx.waker().clone());
                Poll::<()>::Pending
            });
            assert!(polled.is_pending());
        }
        kept.unwrap().wake();
        assert_eq!(
            (
                first.0.load(Ordering::SeqCst),
                second.0.load(Ordering::SeqCst)
            ),
            (0, 1)
        );
    }

    #[test]
    fn work_that_wakes_itself_without_end_lets_others_run() {
        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        let polled = Quiet::new().poll(&Context::from_waker(&waker), |cx| {
            cx.waker().wake_by_ref();
            Poll::<()>::Pending
        });
        assert!(polled.is_pending());
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn ready_ends_the_poll_even_if_woken() {
        let mut quiet = Quiet::new();
        let polled = quiet.poll(&Context::from_waker(Waker::noop()), |cx| {
            cx.waker().wake_by_ref();
            Poll::Ready(7)
        });
        assert_eq!(polled, Poll::Ready(7));
    }
}
