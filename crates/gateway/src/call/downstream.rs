//! What a call may know of the client connection it came on, written by `serve` and read by the relay; and how `serve` asks for an answer.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;

use http::{Request, Response};
use hyper::body::Incoming;

use super::body::OutBody;
use super::handover::Handover;
use crate::upstream::upload::Received;

/// Whoever answers requests. Asked once per request, on the connection's task.
pub trait Answers: Clone + Send + 'static {
    fn answer(
        &self,
        request: Request<Incoming>,
        downstream: &Arc<Downstream>,
        reader: Arc<Reader>,
    ) -> Handover<Response<OutBody>>;
}

/// One client connection.
#[derive(Debug)]
pub struct Downstream {
    pub peer: SocketAddr,
    pub http2: bool,
    active: AtomicUsize,
    entered: AtomicU64,
    received: Received,
    stalled: AtomicBool,
    until_close: AtomicBool,
    broken_off: AtomicBool,
    flushes: AtomicU64,
    awaited: AtomicBool,
    flush_wakers: Mutex<Vec<Waker>>,
}

impl Downstream {
    pub fn new(peer: SocketAddr, http2: bool) -> Self {
        Self {
            peer,
            http2,
            active: AtomicUsize::new(0),
            entered: AtomicU64::new(0),
            received: Received::default(),
            stalled: AtomicBool::new(false),
            until_close: AtomicBool::new(false),
            broken_off: AtomicBool::new(false),
            flushes: AtomicU64::new(0),
            awaited: AtomicBool::new(false),
            flush_wakers: Mutex::default(),
        }
    }

    /// Requests on this connection whose answer is not complete.
    pub fn active(&self) -> usize {
        self.active.load(Ordering::Relaxed)
    }

    /// Requests begun on this connection.
    pub fn entered(&self) -> u64 {
        self.entered.load(Ordering::Relaxed)
    }

    /// Whether the request that came last was read to its end (HTTP/1).
    pub fn received(&self) -> &Received {
        &self.received
    }

    /// Counts one request until the guard is dropped.
    pub fn enter(self: &Arc<Self>) -> Active {
        self.received.set(false);
        self.active.fetch_add(1, Ordering::Relaxed);
        self.entered.fetch_add(1, Ordering::Relaxed);
        Active(Arc::clone(self))
    }

    /// The client took no byte for too long; the connection is about to be closed for it.
    pub fn set_stalled(&self) {
        self.stalled.store(true, Ordering::Relaxed);
    }

    pub fn is_stalled(&self) -> bool {
        self.stalled.load(Ordering::Relaxed)
    }

    /// The client speaks HTTP/1.0: an answer of unknown length ends with the connection.
    pub fn ends_by_close(&self) {
        self.until_close.store(true, Ordering::Relaxed);
    }

    /// The answer breaks off and nothing in it says so.
    pub fn break_off(&self) {
        self.broken_off.store(true, Ordering::Relaxed);
    }

    /// Only a reset tells this client that its answer is not whole.
    pub fn must_reset(&self) -> bool {
        self.until_close.load(Ordering::Relaxed) && self.broken_off.load(Ordering::Relaxed)
    }

    /// Everything written so far has been taken by the kernel.
    pub fn flushed(&self) {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        if !self.awaited.load(Ordering::Relaxed) {
            return;
        }
        self.awaited.store(false, Ordering::Relaxed);
        let wakers = std::mem::take(
            &mut *self
                .flush_wakers
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
        wakers.into_iter().for_each(Waker::wake);
    }

    pub fn flushes(&self) -> u64 {
        self.flushes.load(Ordering::Relaxed)
    }

    /// Wakes `waker` at the next flush.
    pub fn on_flush(&self, waker: &Waker) {
        self.flush_wakers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(waker.clone());
        self.awaited.store(true, Ordering::Relaxed);
    }
}

/// A request under way on a connection.
#[derive(Debug)]
pub struct Active(Arc<Downstream>);

impl Active {
    pub fn is_http2(&self) -> bool {
        self.0.http2
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        self.0.active.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The reading side of one request on a connection, for HTTP/2, where one stream can stop being read while the others go on.
#[derive(Debug, Default)]
pub struct Reader {
    /// A frame was handed over and the next has not been asked for.
    behind: AtomicBool,
    stalled: AtomicBool,
    handed: AtomicU64,
}

impl Reader {
    pub fn handed(&self) {
        self.handed.fetch_add(1, Ordering::Relaxed);
        self.behind.store(true, Ordering::Relaxed);
    }

    pub fn asked(&self) {
        self.behind.store(false, Ordering::Relaxed);
    }

    /// How many frames were handed over, if the last one is still in the way.
    pub fn behind(&self) -> Option<u64> {
        self.behind
            .load(Ordering::Relaxed)
            .then(|| self.handed.load(Ordering::Relaxed))
    }

    pub fn set_stalled(&self) {
        self.stalled.store(true, Ordering::Relaxed);
    }

    pub fn is_stalled(&self) -> bool {
        self.stalled.load(Ordering::Relaxed)
    }
}
