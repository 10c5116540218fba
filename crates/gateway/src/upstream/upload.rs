//! A request body that is sent upstream while it comes from the client.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::Body;
use tokio::time::{Instant, Sleep};

use super::arriving::Arriving;

/// The client must send at least this much in each `stall`, or the rest of its body.
pub const PROGRESS_BYTES: usize = 1024;

/// When a part of a body that is being sent was last on its way.
#[derive(Clone, Debug)]
pub struct Progress(Arc<(Instant, AtomicU64)>);

impl Progress {
    fn new() -> Self {
        Self(Arc::new((Instant::now(), AtomicU64::new(0))))
    }

    pub(super) fn mark(&self) {
        let (begin, moved) = &*self.0;
        let now = u64::try_from(begin.elapsed().as_millis()).unwrap_or(u64::MAX);
        moved.store(now, Ordering::Relaxed);
    }

    /// How long nothing of it has moved, to the millisecond.
    pub fn stalled(&self) -> Duration {
        let (begin, moved) = &*self.0;
        let moved = Duration::from_millis(moved.load(Ordering::Relaxed));
        begin.elapsed().saturating_sub(moved)
    }
}

/// Never sent twice. A client that stops sending ends it: its call holds a slot.
#[derive(Debug)]
pub struct Streamed {
    body: Box<Arriving>,
    stall: Duration,
    sent: Progress,
    /// Bytes since the timer was set.
    progress: usize,
    timer: Option<Pin<Box<Sleep>>>,
}

/// Why a client's body did not come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UploadError {
    /// The client is gone.
    Broken,
    /// The client sends too slowly.
    Slow,
}

impl fmt::Display for UploadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Broken => "the client's body broke off",
            Self::Slow => "the client's body did not come in time",
        })
    }
}

impl std::error::Error for UploadError {}

impl Streamed {
    pub fn new(body: Arriving, stall: Duration) -> Self {
        Self {
            body: Box::new(body),
            stall,
            sent: Progress::new(),
            progress: 0,
            timer: None,
        }
    }

    pub fn sent(&self) -> &Progress {
        &self.sent
    }

    /// The bytes that are still to come, as announced.
    pub fn left(&self) -> Option<u64> {
        self.body.size_hint().exact()
    }

    pub fn is_done(&self) -> bool {
        self.body.is_end_stream()
    }

    pub fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, UploadError>>> {
        loop {
            match Pin::new(&mut *self.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    let Ok(data) = frame.into_data() else {
                        continue;
                    };
                    self.sent.mark();
                    self.progress += data.len();
                    if self.progress >= PROGRESS_BYTES {
                        self.timer = None;
                    }
                    return Poll::Ready(Some(Ok(data)));
                }
                Poll::Ready(Some(Err(_))) => return Poll::Ready(Some(Err(UploadError::Broken))),
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => {}
            }
            if self.timer.is_none() {
                self.progress = 0;
                self.timer = Some(Box::pin(tokio::time::sleep_until(
                    Instant::now() + self.stall,
                )));
            }
            if let Some(timer) = &mut self.timer {
                ready!(timer.as_mut().poll(cx));
            }
            return Poll::Ready(Some(Err(UploadError::Slow)));
        }
    }
}
