//! One address of an upstream, and what is known about it.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::Semaphore;
use tokio::time::{Duration, Instant};

use super::lookup::Lookup;
use crate::config::Endpoint;
use crate::telemetry::metrics::{EndpointLabels, Metrics};

/// Survives reloads: the connections and calls it counts do too.
#[derive(Debug)]
pub struct EndpointState {
    pub address: Endpoint,
    /// `host:port`, as it appears in logs, metrics and the `Host` header.
    pub authority: Arc<str>,
    pub(super) lookup: Arc<Lookup>,
    /// One permit per open connection, over all workers.
    pub connections: Arc<Semaphore>,
    /// How many permits there are, given out or not.
    connections_max: AtomicUsize,
    pub open: Gauge,
    pub opened: Counter,
    in_flight: AtomicUsize,
    /// Calls waiting for a permit; idle connections give way while it is not zero.
    waiting: AtomicUsize,
    /// Milliseconds since `epoch` until which the endpoint is left out; 0: it is not.
    ejected_until: AtomicU64,
    epoch: Instant,
    ejected: Gauge,
    /// Where its gauges are to be taken out of at its end.
    shown: (Arc<Metrics>, EndpointLabels),
    /// The log says that it is left out.
    told: AtomicBool,
    /// The last connection that could not be opened.
    trouble: Mutex<Option<Trouble>>,
    ejections: Seldom,
    shortages: Seldom,
    /// The page on which it shows its work could not be read when it was last asked for.
    page_fails: AtomicBool,
    /// The log says what kind of server it is.
    kind_told: AtomicBool,
    /// When that was.
    page_asked: Mutex<Option<Instant>>,
}

/// A connection that could not be opened.
#[derive(Clone, Debug)]
pub struct Trouble {
    /// Since when none could be; `None`: one was opened since.
    pub out: Option<Instant>,
    /// When it was tried last in vain.
    pub last: Instant,
    /// As in the metrics.
    pub reason: &'static str,
    pub why: String,
}

/// Lets through what is worth a line in the log: the first, and another one only after [`NEWS_AFTER`].
#[derive(Debug, Default)]
struct Seldom(Mutex<Option<Instant>>);

/// An endpoint that comes and goes is told of no more often than this.
const NEWS_AFTER: Duration = Duration::from_secs(10);

impl Seldom {
    fn is_news(&self) -> bool {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let due = last.is_none_or(|last| now.duration_since(last) >= NEWS_AFTER);
        if due {
            *last = Some(now);
        }
        due
    }
}

impl EndpointState {
    pub fn new(
        upstream: &Arc<str>,
        address: Endpoint,
        connections_max: usize,
        metrics: &Arc<Metrics>,
    ) -> Self {
        let authority: Arc<str> = authority(&address).into();
        let labels = EndpointLabels {
            upstream: Arc::clone(upstream),
            endpoint: Arc::clone(&authority),
        };
        let connections_max = connections_max.min(Semaphore::MAX_PERMITS);
        Self {
            connections: Arc::new(Semaphore::new(connections_max)),
            connections_max: AtomicUsize::new(connections_max),
            open: metrics.upstream_connections.get_or_create_owned(&labels),
            opened: metrics.upstream_connects.get_or_create_owned(&labels),
            ejected: metrics.endpoint_ejected.get_or_create_owned(&labels),
            shown: (Arc::clone(metrics), labels),
            in_flight: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            ejected_until: AtomicU64::new(0),
            epoch: Instant::now(),
            told: AtomicBool::new(false),
            trouble: Mutex::default(),
            ejections: Seldom::default(),
            shortages: Seldom::default(),
            page_fails: AtomicBool::new(false),
            kind_told: AtomicBool::new(false),
            page_asked: Mutex::new(None),
            lookup: Arc::default(),
            authority,
            address,
        }
    }

    /// Sets how many connections may be open. More: at once. Fewer: as far as there are permits that nobody uses now. Not for several
    /// threads at a time; the registry calls it under its lock.
    pub(super) fn resize(&self, max: usize) {
        let now = self.connections_max.load(Ordering::Relaxed);
        let max = max.min(Semaphore::MAX_PERMITS);
        let next = if max < now {
            now - self.connections.forget_permits(now - max)
        } else {
            self.connections.add_permits(max - now);
            max
        };
        self.connections_max.store(next, Ordering::Relaxed);
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Counts one attempt on this endpoint until the guard is dropped.
    pub fn enter(self: &Arc<Self>) -> InFlight {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlight(Arc::clone(self))
    }

    pub(super) fn wait(&self) -> Waiting<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(self)
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// Leaves the endpoint out for `time`. Whether that is worth a line in the log.
    pub fn eject(&self, time: Duration, reason: &'static str, why: String) -> bool {
        {
            let mut trouble = self.lock_trouble();
            let last = Instant::now();
            let out = trouble.as_ref().and_then(|t| t.out).or(Some(last));
            *trouble = Some(Trouble {
                out,
                last,
                reason,
                why,
            });
        }
        let until = (self.epoch.elapsed() + time).as_millis();
        let until = u64::try_from(until).unwrap_or(u64::MAX).max(1);
        let before = self.ejected_until.swap(until, Ordering::Relaxed);
        self.ejected.set(1);
        let tell = before == 0 && self.ejections.is_news();
        if tell {
            self.told.store(true, Ordering::Relaxed);
        }
        tell
    }

    /// A connection was opened: the endpoint is back. Whether the log says otherwise.
    pub fn restore(&self) -> bool {
        if self.ejected_until.load(Ordering::Relaxed) == 0 {
            return false;
        }
        self.ejected_until.store(0, Ordering::Relaxed);
        self.ejected.set(0);
        if let Some(trouble) = &mut *self.lock_trouble() {
            trouble.out = None;
        }
        self.told.swap(false, Ordering::Relaxed)
    }

    fn lock_trouble(&self) -> std::sync::MutexGuard<'_, Option<Trouble>> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last connection that could not be opened, if there was one.
    pub fn trouble(&self) -> Option<Trouble> {
        self.lock_trouble().clone()
    }

    /// This machine had no socket for it: whether that is worth a line in the log.
    pub fn shortage_is_news(&self) -> bool {
        self.shortages.is_news()
    }

    /// An answer shows what kind of server it is. Whether that is worth a line in the log.
    pub fn kind_is_news(&self) -> bool {
        !self.kind_told.swap(true, Ordering::Relaxed)
    }

    /// The page on which the server shows its work could not be read. Whether that is worth a line in the log.
    pub fn page_failed(&self) -> bool {
        !self.page_fails.swap(true, Ordering::Relaxed)
    }

    /// It could be read. Whether the log says otherwise.
    pub fn page_was_read(&self) -> bool {
        self.page_fails.swap(false, Ordering::Relaxed)
    }

    pub fn page_fails(&self) -> bool {
        self.page_fails.load(Ordering::Relaxed)
    }

    /// When it was last asked for its page.
    pub fn page_asked(&self) -> Option<Instant> {
        *self
            .page_asked
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub fn page_was_asked(&self, at: Instant) {
        *self
            .page_asked
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(at);
    }

    pub fn is_ejected(&self) -> bool {
        let until = self.ejected_until.load(Ordering::Relaxed);
        until != 0 && self.epoch.elapsed().as_millis() < u128::from(until)
    }
}

/// No generation names it and nothing is left on it: its gauges would stand still for ever.
impl Drop for EndpointState {
    fn drop(&mut self) {
        let (metrics, labels) = &self.shown;
        metrics.hide_endpoint(labels);
    }
}

fn authority(address: &Endpoint) -> String {
    let host = if address.host.contains(':') {
        format!("[{}]", address.host)
    } else {
        address.host.clone()
    };
    let default = if address.tls { 443 } else { 80 };
    if address.port == default {
        host
    } else {
        format!("{host}:{}", address.port)
    }
}

/// An attempt under way on an endpoint.
#[derive(Debug)]
pub struct InFlight(Arc<EndpointState>);

impl InFlight {
    pub fn endpoint(&self) -> &Arc<EndpointState> {
        &self.0
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Debug)]
pub(super) struct Waiting<'a>(&'a EndpointState);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_log_hears_of_changes_and_not_of_each_call() {
        let endpoint = EndpointState::new(&"u".into(), address(), 2, &Arc::new(Metrics::new()));
        let long = Duration::from_secs(5);
        let eject = |e: &EndpointState| e.eject(long, "refused", "why".into());
        assert!(!endpoint.restore(), "it was never out");
        assert!(eject(&endpoint));
        assert!(!eject(&endpoint), "it is still out");
        assert!(endpoint.restore());
        assert!(!eject(&endpoint), "it comes and goes");
        assert!(!endpoint.restore(), "nobody was told that it went");
        tokio::time::advance(NEWS_AFTER).await;
        assert!(eject(&endpoint) && endpoint.restore());
        assert!(endpoint.shortage_is_news() && !endpoint.shortage_is_news());
        assert!(!endpoint.is_ejected());
    }

    fn address() -> Endpoint {
        Endpoint {
            tls: false,
            host: "127.0.0.1".into(),
            port: 8000,
            base_path: String::new(),
        }
    }

    #[test]
    fn the_limit_of_connections_follows_a_reload() {
        let endpoint = EndpointState::new(&"u".into(), address(), 2, &Arc::new(Metrics::new()));
        let free = || endpoint.connections.available_permits();
        endpoint.resize(5);
        assert_eq!(free(), 5);
        let used = endpoint.connections.try_acquire_many(4).unwrap();
        endpoint.resize(2);
        assert_eq!(free(), 0);
        drop(used);
        assert_eq!(free(), 4, "what was in use stays");
        endpoint.resize(2);
        assert_eq!(free(), 2);
    }
}
