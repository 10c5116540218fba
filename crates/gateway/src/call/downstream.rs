//! What a call may know of the client connection it came on, written by `serve` and read by the relay; and how `serve` asks for an answer.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::Waker;

use http::{Request, Response};
use hyper::body::Incoming;

use super::body::OutBody;
use super::handover::Handover;
use super::table::Entry;
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
    /// On HTTP/1, where one answer is read at a time.
    reader: Arc<Reader>,
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
            reader: Arc::default(),
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

    /// The reading side of whatever request is answered now (HTTP/1).
    pub fn reader(&self) -> &Arc<Reader> {
        &self.reader
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

/// The reading side of one request on a connection. On HTTP/2 each has its own: one stream can stop being read while the others go on.
#[derive(Debug, Default)]
pub struct Reader {
    /// A frame was handed over and the next has not been asked for.
    behind: AtomicBool,
    stalled: AtomicBool,
    handed: AtomicU64,
    /// Whose answer is read.
    of: Mutex<Weak<Entry>>,
}

impl Reader {
    /// What is read from here on is the answer of this call.
    pub fn reads(&self, call: &Arc<Entry>) {
        *self.of.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(call);
    }

    /// The call's end is on its way to the client, or is nobody's concern any more.
    pub fn has_its_end(&self) {
        *self.of.lock().unwrap_or_else(PoisonError::into_inner) = Weak::new();
    }

    /// Somebody has ended the call from outside. A body that nobody asks for more, since its reader has stopped, cannot see to that itself.
    pub fn is_ended(&self) -> bool {
        let call = self.of.lock().unwrap_or_else(PoisonError::into_inner);
        call.upgrade().is_some_and(|call| call.stopped().is_some())
    }

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
