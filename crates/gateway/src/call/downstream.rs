//! What a call may know of the client connection it came on, written by `serve` and read by the relay; and how `serve` asks for an answer.

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::task::Waker;
use std::time::Duration;

use http::{Method, Uri, Version};
use hyper::body::Incoming;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::alarm::Alarm;
use super::answer::Answer;
use super::entry::Entry;
use super::handover::Handover;
use crate::fields::Fields;
use crate::upstream::arriving::Arriving;

/// Whoever answers requests. Asked once per request, on the connection's task.
pub trait Answers: Clone + Send + Unpin + 'static {
    fn answer(&self, request: Request, client: Client) -> Handover<Answer>;
}

/// What a client asks.
pub struct Request {
    pub method: Method,
    pub target: Uri,
    pub version: Version,
    pub fields: Fields,
    pub body: Arriving,
}

/// From HTTP/2.
impl From<http::Request<Incoming>> for Request {
    fn from(request: http::Request<Incoming>) -> Self {
        let (head, body) = request.into_parts();
        Self {
            method: head.method,
            target: head.uri,
            version: head.version,
            fields: Fields::from(&head.headers),
            body: Arriving::Http2(body),
        }
    }
}

impl fmt::Debug for Request {
    /// Without what its client sent.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.method, self.target.path())
    }
}

/// A count that one thread changes and others may look at: a connection stays on its worker, and its calls do. No bus is locked for it.
#[derive(Debug, Default)]
pub struct Tally(AtomicU64);

impl Tally {
    pub fn raise(&self) {
        let raised = self.get().wrapping_add(1);
        self.0.store(raised, Ordering::Relaxed);
    }

    fn lower(&self) {
        let lowered = self.get().wrapping_sub(1);
        self.0.store(lowered, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How long a client may take to hear that its connection ends. What it begins until then is served.
pub const GOODBYE: Duration = Duration::from_secs(1);

/// One client connection.
// In this order: see `relay::Relay`.
#[repr(C)]
#[derive(Debug)]
pub struct Downstream {
    active: Tally,
    entered: Tally,
    flushes: Tally,
    awaited: AtomicBool,
    stalled: AtomicBool,
    until_close: AtomicBool,
    broken_off: AtomicBool,
    pub http2: bool,
    pub peer: SocketAddr,
    /// What goes on for a client that has left is one of these.
    tasks: TaskTracker,
    /// On HTTP/1, where one answer is read at a time.
    reader: Arc<Reader>,
    /// Since when its client is told that it ends.
    told: OnceLock<Instant>,
    flush_wakers: Mutex<Vec<Waker>>,
}

impl Downstream {
    pub fn new(peer: SocketAddr, http2: bool, tasks: TaskTracker) -> Self {
        Self {
            peer,
            http2,
            active: Tally::default(),
            entered: Tally::default(),
            tasks,
            reader: Arc::default(),
            stalled: AtomicBool::new(false),
            until_close: AtomicBool::new(false),
            broken_off: AtomicBool::new(false),
            told: OnceLock::new(),
            flushes: Tally::default(),
            awaited: AtomicBool::new(false),
            flush_wakers: Mutex::default(),
        }
    }

    /// Requests on this connection whose answer is not complete.
    pub fn active(&self) -> u64 {
        self.active.get()
    }

    /// Requests begun on this connection.
    pub fn entered(&self) -> u64 {
        self.entered.get()
    }

    /// The reading side of whatever request is answered now (HTTP/1).
    pub fn reader(&self) -> &Arc<Reader> {
        &self.reader
    }

    /// Whoever makes a request on this connection. `stream`: the reading side of its stream, on HTTP/2.
    pub fn enter(self: &Arc<Self>, stream: Option<Arc<Reader>>) -> Client {
        self.active.raise();
        self.entered.raise();
        Client {
            downstream: Arc::clone(self),
            stream,
            gone: AtomicBool::new(false),
        }
    }

    /// The client took no byte for too long; the connection is about to be closed for it.
    pub fn set_stalled(&self) {
        self.stalled.store(true, Ordering::Relaxed);
    }

    pub fn is_stalled(&self) -> bool {
        self.stalled.load(Ordering::Relaxed)
    }

    /// The client is told that its connection ends.
    pub fn tell(&self) {
        self.told.get_or_init(Instant::now);
    }

    /// Since when it is.
    pub fn told(&self) -> Option<Instant> {
        self.told.get().copied()
    }

    /// Whoever begins something on it now has had the time to hear that it ends. On HTTP/1 nothing can begin then.
    pub fn is_over(&self) -> bool {
        self.http2 && self.told().is_some_and(|at| at.elapsed() > GOODBYE)
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

    /// An answer is not whole, and only the manner of the connection's end can tell so.
    pub fn is_cut_unseen(&self) -> bool {
        self.until_close.load(Ordering::Relaxed) && self.active() > 0
    }

    /// Everything written so far has been taken by the kernel.
    pub fn flushed(&self) {
        self.flushes.raise();
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
        self.flushes.get()
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

/// Whoever made one request, and whether they still wait for it. The connection is busy with the request until it is dropped.
#[derive(Debug)]
pub struct Client {
    downstream: Arc<Downstream>,
    stream: Option<Arc<Reader>>,
    gone: AtomicBool,
}

impl Client {
    pub fn downstream(&self) -> &Arc<Downstream> {
        &self.downstream
    }

    pub fn reader(&self) -> &Arc<Reader> {
        self.stream.as_ref().unwrap_or(&self.downstream.reader)
    }

    pub(super) fn tasks(&self) -> &TaskTracker {
        &self.downstream.tasks
    }

    /// A call needs no waker to be told: it is polled right after this is set.
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// It has left.
    pub fn set_gone(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.downstream.active.lower();
    }
}

/// The reading side of one request on a connection. On HTTP/2 each has its own: one stream can stop being read while the others go on.
#[derive(Debug, Default)]
pub struct Reader {
    stalled: AtomicBool,
    /// Whose answer is read.
    of: Mutex<Weak<Entry>>,
    alarm: Arc<Alarm>,
}

impl Reader {
    /// Of the task that answers the request.
    pub fn alarm(&self) -> &Arc<Alarm> {
        &self.alarm
    }

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

    pub fn set_stalled(&self) {
        self.stalled.store(true, Ordering::Relaxed);
    }

    pub fn is_stalled(&self) -> bool {
        self.stalled.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_counts_the_requests_that_it_has_and_all_that_it_had() {
        let peer = SocketAddr::from(([127, 0, 0, 1], 1));
        let downstream = Arc::new(Downstream::new(peer, true, TaskTracker::new()));
        let counts = || (downstream.active(), downstream.entered());
        let (one, two) = (downstream.enter(None), downstream.enter(None));
        assert_eq!(counts(), (2, 2));
        drop(one);
        assert_eq!(counts(), (1, 2));
        drop((two, downstream.enter(None)));
        assert_eq!(counts(), (0, 3));
    }
}
