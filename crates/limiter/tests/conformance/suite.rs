//! What a limiter is asked here, whichever it is: a limit of one, three calls on blocking threads, each
//! abandoned after a moment. How many really run?

use std::future::Future;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// How long a caller waits before it gives up, and how long a slot that comes free is given to be used.
pub(crate) const PATIENCE: Duration = Duration::from_millis(20);

/// How many more moments a busy machine gets to start what is going to start.
const SETTLE: u32 = 20;

/// A limiter with a limit of one, put to the test.
pub(crate) trait Subject {
    fn name(&self) -> &'static str;

    /// Runs `work` on a blocking thread under the limit and gives up waiting after `patience`.
    fn call(&self, work: Work, patience: Duration) -> impl Future<Output = ()>;

    /// How many calls it says run although their callers have gone; `None` if it cannot say.
    fn leftovers(&self) -> Option<usize>;
}

pub(crate) type Work = Box<dyn FnOnce() + Send>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Report {
    /// The most that really ran at once.
    pub(crate) real: usize,
    /// What the subject said of it when all three callers had gone.
    pub(crate) leftovers: Option<usize>,
    /// Calls that started after their caller had gone.
    pub(crate) ran_later: usize,
}

/// Work that blocks until it is let go, and counts itself.
#[derive(Default)]
pub(crate) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    open: bool,
    running: usize,
    most: usize,
    started: usize,
}

impl Gate {
    pub(crate) fn work(self: &Arc<Self>) -> Work {
        let gate = self.clone();
        Box::new(move || gate.block())
    }

    fn block(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.started += 1;
        state.running += 1;
        state.most = state.most.max(state.running);
        while !state.open {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        state.running -= 1;
    }

    fn read<T>(&self, read: impl FnOnce(&mut State) -> T) -> T {
        read(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn open(&self) {
        self.read(|state| state.open = true);
        self.changed.notify_all();
    }
}

pub(crate) async fn three_abandoned(subject: &impl Subject) -> Report {
    let gate = Arc::new(Gate::default());
    for _ in 0..3 {
        subject.call(gate.work(), PATIENCE).await;
        tokio::time::sleep(PATIENCE).await;
    }
    for _ in 0..SETTLE {
        if gate.read(|state| state.most) == 3 {
            break;
        }
        tokio::time::sleep(PATIENCE).await;
    }
    let (real, started) = gate.read(|state| (state.most, state.started));
    let leftovers = subject.leftovers();
    gate.open();
    tokio::time::sleep(4 * PATIENCE).await;
    Report {
        real,
        leftovers,
        ran_later: gate.read(|state| state.started) - started,
    }
}
