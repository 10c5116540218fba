//! Tests on a clock of their own, with every identity checked.

mod bad_input;
mod caps;
mod order;
mod transitions;

use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

struct Rig {
    limiter: Limiter,
    clock: Arc<ManualClock>,
}

#[derive(Default)]
struct Alarm(AtomicUsize);

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Alarm {
    fn rung(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

fn calls(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).expect("not zero")
}

fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

fn poll_with<F: Future + Unpin>(future: &mut F, alarm: &Arc<Alarm>) -> Poll<F::Output> {
    let waker = Waker::from(alarm.clone());
    Pin::new(future).poll(&mut Context::from_waker(&waker))
}

fn started(mut place: Place) -> Started {
    match poll(&mut place) {
        Poll::Ready(Ok(started)) => started,
        other => panic!("no slot: {other:?}"),
    }
}

impl Rig {
    fn new(limits: Limits) -> Self {
        let clock = Arc::new(ManualClock::new());
        let limiter = Limiter::with_clock(limits, clock.clone()).expect("sound limits");
        Self { limiter, clock }
    }

    fn of(limit: usize) -> Self {
        Self::new(Limits::new(calls(limit)))
    }

    fn offer(&self) -> Place {
        self.try_offer(0).expect("admitted")
    }

    fn try_offer(&self, bytes: u64) -> Result<Place, Rejected> {
        let advice = self.limiter.would_reject(bytes);
        let place = self.limiter.offer(Ask::new("call", bytes));
        assert_eq!(advice, place.as_ref().err().copied());
        self.check();
        place
    }

    fn start(&self) -> Started {
        started(self.offer())
    }

    fn check(&self) -> Snapshot {
        let snapshot = self.limiter.snapshot();
        assert_eq!(snapshot.broken_identity(), None, "{snapshot:?}");
        snapshot
    }
}
