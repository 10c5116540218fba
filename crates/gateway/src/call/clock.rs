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
    /// When the last frame was handed to hyper; `None` while we are being waited for.
    pub(super) handed: Option<Instant>,
    pub(super) total: Option<Instant>,
    pub(super) sleep: Option<Pin<Box<Sleep>>>,
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

    /// hyper asks for more. A long pause since the last frame was the client's, not the upstream's.
    pub(super) fn polled(&mut self, now: Instant) {
        if let Some(handed) = self.handed.take() {
            let pause = now.duration_since(handed);
            if pause > BLOCKED_AFTER {
                self.event += pause;
            }
        }
    }
}
