//! Until when an answer over HTTP/2 is on its way.
//!
//! hyper hands a piece of it to h2 as soon as one byte may be sent, and is done when it has handed over the last; h2 keeps what its client
//! gives no room for. Here an answer is over when all of it has left h2. Until then its connection is busy, and its reader is held to the
//! limit of those that stop.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::{Buf, Bytes};
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Duration, Instant};

use crate::call::body::{Broken, OutBody};

/// What h2 has of one answer and has not sent.
#[derive(Debug)]
pub struct Held {
    bytes: AtomicUsize,
    begun: Instant,
    /// When some of it was last sent, in milliseconds since the beginning.
    moved: AtomicU64,
    body: Mutex<Option<Waker>>,
}

impl Default for Held {
    fn default() -> Self {
        Self {
            bytes: AtomicUsize::new(0),
            begun: Instant::now(),
            moved: AtomicU64::new(0),
            body: Mutex::default(),
        }
    }
}

impl Held {
    /// Since when none of what is held has moved, to the millisecond. `None`: nothing is.
    pub fn since(&self) -> Option<Instant> {
        let moved = Duration::from_millis(self.moved.load(Ordering::Relaxed));
        (!self.is_empty()).then(|| self.begun + moved)
    }

    fn is_empty(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) == 0
    }

    fn mark(&self) {
        let now = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.moved.store(now, Ordering::Relaxed);
    }

    fn take(self: &Arc<Self>, bytes: Bytes) -> Piece {
        if self.bytes.fetch_add(bytes.len(), Ordering::Relaxed) == 0 {
            self.mark();
        }
        let held = Arc::clone(self);
        Piece { bytes, held }
    }

    fn left(&self, bytes: usize) {
        self.mark();
        if self.bytes.fetch_sub(bytes, Ordering::Relaxed) != bytes {
            return;
        }
        let mut body = self.body.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(body) = body.take() {
            body.wake();
        }
    }

    /// Ready when nothing is held.
    fn poll_empty(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut body = self.body.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_empty() {
            return Poll::Ready(());
        }
        *body = Some(cx.waker().clone());
        Poll::Pending
    }
}

/// A part of an answer in the hands of h2, which drops it when its stream is reset.
#[derive(Debug)]
pub struct Piece {
    bytes: Bytes,
    held: Arc<Held>,
}

impl Buf for Piece {
    fn remaining(&self) -> usize {
        self.bytes.len()
    }

    fn chunk(&self) -> &[u8] {
        &self.bytes
    }

    fn advance(&mut self, bytes: usize) {
        self.bytes.advance(bytes);
        self.held.left(bytes);
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if !self.bytes.is_empty() {
            self.held.left(self.bytes.len());
        }
    }
}

/// The body of an answer that ends, in whatever way, when its last piece was sent.
#[derive(Debug)]
pub struct Sent {
    body: OutBody,
    held: Arc<Held>,
    end: Option<Result<(), Broken>>,
}

impl Sent {
    pub fn new(body: OutBody, held: Arc<Held>) -> Self {
        let end = None;
        Self { body, held, end }
    }
}

impl Body for Sent {
    type Data = Piece;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Piece>, Broken>>> {
        let this = &mut *self;
        let end = match this.end {
            Some(end) => end,
            None => match std::task::ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    let frame = frame.map_data(|bytes| this.held.take(bytes));
                    return Poll::Ready(Some(Ok(frame)));
                }
                Some(Err(broken)) => Err(broken),
                None => Ok(()),
            },
        };
        this.end = Some(end);
        this.held.poll_empty(cx).map(|()| end.err().map(Err))
    }

    fn is_end_stream(&self) -> bool {
        self.held.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn poll(body: &mut Sent) -> Poll<Option<Frame<Piece>>> {
        let mut cx = Context::from_waker(Waker::noop());
        let polled = Pin::new(body).poll_frame(&mut cx);
        polled.map(|frame| frame.transpose().expect("whole"))
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_ends_when_its_last_piece_was_sent() {
        let held = Arc::new(Held::default());
        let mut body = Sent::new(OutBody::whole("abcd".into()), Arc::clone(&held));
        assert!(!body.is_end_stream() && held.since().is_none());
        let Poll::Ready(Some(frame)) = poll(&mut body) else {
            panic!("a frame");
        };
        let mut piece = frame.into_data().expect("data");
        let handed = Instant::now();
        assert!(!body.is_end_stream() && poll(&mut body).is_pending());
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(held.since(), Some(handed));
        piece.advance(3);
        assert_eq!(held.since(), Some(handed + Duration::from_secs(1)));
        assert!(poll(&mut body).is_pending());
        drop(piece);
        assert!(held.since().is_none() && matches!(poll(&mut body), Poll::Ready(None)));
    }

    #[test]
    fn an_empty_answer_is_over_at_once() {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        let _entered = runtime.as_ref().expect("a runtime").enter();
        assert!(Sent::new(OutBody::empty(), Arc::default()).is_end_stream());
    }
}
