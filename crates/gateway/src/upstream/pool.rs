//! Idle connections of one worker.
//!
//! A connection lives on the worker that opened it; how many there may be to an endpoint is counted over all workers by
//! [`EndpointState::connections`]. None is opened ahead of a call: servers close those (llama.cpp after 5 s). The idle limit is
//! shorter than the servers' own (4.7–4.8 s measured for uvicorn and llama.cpp), so a connection is hardly ever taken while it is being closed.
//!
//! What is on a shelf is probed by the kernel each second. A connection whose other end has forgotten it (a machine that was started again) is
//! closed within that second, and one that a middlebox has dropped is not used after [`LOST`](super::socket::LOST): a call that is put on a dead
//! connection waits for its own limit and cannot be moved, as nothing proves that it was not read.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::EndpointState;
use super::exchange::Http2;
use super::http1::Http1;

/// Streams on one HTTP/2 connection before another is opened, if the server allows as many.
pub(super) const STREAMS_PER_CONNECTION: usize = 100;

#[derive(Debug, Default)]
pub struct Pool {
    shelves: Mutex<BTreeMap<usize, Shelf>>,
}

#[derive(Debug, Default)]
struct Shelf {
    idle: Vec<Idle>,
    shared: Vec<Shared>,
}

#[derive(Debug)]
struct Idle {
    conn: Box<Http1>,
    until: Instant,
}

#[derive(Debug)]
struct Shared {
    conn: Http2,
    /// Held, as [`Idle`] holds it: while anything is on a shelf, the address that is its key belongs to this endpoint and no other.
    endpoint: Arc<EndpointState>,
    use_of: Arc<Use>,
    idle: Duration,
    idle_since: Option<Instant>,
}

/// What is on a shared connection.
#[derive(Debug, Default)]
struct Use {
    streams: AtomicUsize,
    /// It turned a stream away: it takes no more of them.
    retired: AtomicBool,
}

/// A stream's place on a shared connection; dropped with the exchange.
#[derive(Debug)]
pub struct StreamPlace {
    pub conn: Http2,
    /// The connection was there before this call.
    pub reused: bool,
    use_of: Arc<Use>,
}

impl StreamPlace {
    fn new(conn: Http2, use_of: &Arc<Use>, reused: bool) -> Self {
        use_of.streams.fetch_add(1, Ordering::Relaxed);
        Self {
            conn,
            reused,
            use_of: Arc::clone(use_of),
        }
    }

    /// Later calls leave the connection alone; it closes with its last stream.
    pub fn retire(&self) {
        self.use_of.retired.store(true, Ordering::Relaxed);
    }
}

impl Drop for StreamPlace {
    fn drop(&mut self) {
        self.use_of.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection ready for a request.
#[derive(Debug)]
pub enum Checkout {
    Http1(Box<Http1>),
    Http2(StreamPlace),
}

fn key(endpoint: &Arc<EndpointState>) -> usize {
    Arc::as_ptr(endpoint) as usize
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Shelf>> {
        self.shelves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The most recently used connection that still looks alive.
    pub fn checkout(&self, endpoint: &Arc<EndpointState>, now: Instant) -> Option<Checkout> {
        let mut shelves = self.lock();
        let shelf = shelves.get_mut(&key(endpoint))?;
        while let Some(mut idle) = shelf.idle.pop() {
            if idle.until > now && idle.conn.is_usable() && idle.conn.take() {
                return Some(Checkout::Http1(idle.conn));
            }
        }
        shelf.shared.retain(Shared::is_open);
        let open = shelf
            .shared
            .iter_mut()
            .find(|s| s.streams() < s.streams_max() && !s.conn.is_lost())?;
        open.idle_since = None;
        let place = StreamPlace::new(open.conn.clone(), &open.use_of, true);
        Some(Checkout::Http2(place))
    }

    /// Waits for the right to open one more connection to the endpoint.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up the place in the line.
    pub async fn permit(&self, endpoint: &Arc<EndpointState>) -> Option<OwnedSemaphorePermit> {
        let permits = Arc::clone(&endpoint.connections);
        if let Ok(permit) = Arc::clone(&permits).try_acquire_owned() {
            return Some(permit);
        }
        let _waiting = endpoint.wait();
        self.sweep(Instant::now());
        permits.acquire_owned().await.ok()
    }

    /// Keeps a connection that is idle since `now` for the next call, for at most `idle`.
    pub fn put(&self, conn: Box<Http1>, now: Instant, idle: Duration) {
        if idle.is_zero() || conn.endpoint.is_wanted() {
            return;
        }
        let idle = Idle {
            until: now + idle,
            conn,
        };
        self.lock()
            .entry(key(&idle.conn.endpoint))
            .or_default()
            .idle
            .push(idle);
    }

    /// Offers a new HTTP/2 connection to later calls; the first stream's place is returned.
    pub fn share(&self, endpoint: &Arc<EndpointState>, conn: Http2, idle: Duration) -> StreamPlace {
        let use_of = Arc::default();
        let place = StreamPlace::new(conn.clone(), &use_of, false);
        self.lock()
            .entry(key(endpoint))
            .or_default()
            .shared
            .push(Shared {
                conn,
                endpoint: Arc::clone(endpoint),
                use_of,
                idle,
                idle_since: None,
            });
        place
    }

    /// Closes what has been idle too long, what the server has closed, and what others wait for. Called a few times a second.
    pub fn sweep(&self, now: Instant) {
        let mut closed = Vec::new();
        let mut shelves = self.lock();
        for shelf in shelves.values_mut() {
            let mut kept = Vec::with_capacity(shelf.idle.len());
            for mut idle in shelf.idle.drain(..) {
                let wanted = idle.conn.endpoint.is_wanted();
                if idle.until > now && !wanted && idle.conn.is_usable() && idle.conn.is_there() {
                    kept.push(idle);
                } else {
                    closed.push(idle);
                }
            }
            shelf.idle = kept;
            shelf.shared.retain_mut(|s| s.keep(now));
        }
        shelves.retain(|_, shelf| !shelf.idle.is_empty() || !shelf.shared.is_empty());
        drop(shelves);
        drop(closed);
    }
}

impl Shared {
    fn streams(&self) -> usize {
        self.use_of.streams.load(Ordering::Relaxed)
    }

    fn streams_max(&self) -> usize {
        self.conn.streams_max().min(STREAMS_PER_CONNECTION)
    }

    /// It takes streams.
    fn is_open(&self) -> bool {
        !self.conn.sender.is_closed() && !self.use_of.retired.load(Ordering::Relaxed)
    }

    fn keep(&mut self, now: Instant) -> bool {
        if self.streams() > 0 {
            self.idle_since = None;
        } else {
            let since = *self.idle_since.get_or_insert(now);
            let lost = self.conn.is_lost();
            if lost || now.duration_since(since) >= self.idle || self.endpoint.is_wanted() {
                return false;
            }
        }
        self.is_open()
    }
}
