//! The request's body: read whole under its bounds, or passed on as it comes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http_body::Body;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use prometheus_client::metrics::gauge::Gauge;
use tokio::time::Instant;

use super::deadline::{Patience, Tier};
use super::outcome::Rejection;
use super::{Caller, Generation, ModelIn, RouteFacts};
use crate::upstream::exchange::RequestBody;
use crate::upstream::upload::{PROGRESS_BYTES, Received, Streamed};

/// Reserved at once for a body of announced length; more only as it really comes.
const RESERVE_BYTES: usize = 256 * 1024;

/// The bytes of all request bodies in memory, bounded.
#[derive(Debug)]
pub struct BodyBudget {
    used: AtomicUsize,
    shown: Gauge,
}

impl BodyBudget {
    pub fn new(shown: Gauge) -> Self {
        Self {
            used: AtomicUsize::new(0),
            shown,
        }
    }
}

/// A part of the budget, given back when dropped.
#[derive(Debug)]
pub struct Lease {
    budget: Arc<BodyBudget>,
    bytes: AtomicUsize,
}

impl Lease {
    fn new(budget: &Arc<BodyBudget>) -> Self {
        Self {
            budget: Arc::clone(budget),
            bytes: AtomicUsize::new(0),
        }
    }

    fn grow(&self, bytes: usize, max: usize) -> bool {
        let before = self.budget.used.fetch_add(bytes, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.budget.shown.inc_by(bytes as i64);
        before.saturating_add(bytes) <= max
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let bytes = *self.bytes.get_mut();
        self.budget.used.fetch_sub(bytes, Ordering::Relaxed);
        self.budget.shown.dec_by(bytes as i64);
    }
}

/// A request body on its way.
#[derive(Debug)]
pub enum Upload {
    /// In memory: may be looked at, edited, and sent a second time as long as no answer has begun.
    Whole { body: Bytes, lease: Arc<Lease> },
    /// As it comes from the client. Never sent twice.
    Streamed { body: Streamed, length: Option<u64> },
    /// There is none, or it is on its way already.
    Gone,
}

impl Upload {
    /// No body at all.
    pub fn none() -> Self {
        Self::Gone
    }

    #[cfg(test)]
    pub(super) fn whole_for_tests(body: Bytes) -> Self {
        let budget = Arc::new(BodyBudget::new(Gauge::default()));
        let lease = Arc::new(Lease::new(&budget));
        Self::Whole { body, lease }
    }

    /// In bytes; 0 if not announced.
    pub fn len(&self) -> u64 {
        match self {
            Self::Whole { body, .. } => body.len() as u64,
            Self::Streamed { length, .. } => length.unwrap_or(0),
            Self::Gone => 0,
        }
    }

    /// What is sent of it now. One that can be sent only once is taken; later there is nothing left.
    pub fn body(&mut self) -> RequestBody {
        if let Self::Whole { body, .. } = self {
            return RequestBody::Whole((!body.is_empty()).then(|| body.clone()));
        }
        match std::mem::replace(self, Self::Gone) {
            Self::Streamed { body, .. } => RequestBody::Streamed(body),
            Self::Whole { .. } | Self::Gone => RequestBody::Whole(None),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The length that the head announces.
pub fn announced(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Reads the body, or decides to pass it on.
///
/// JSON is read whole, since `model` and `stream` decide what happens to it. Anything else (audio, files) is passed on as it comes; its
/// length is bounded by the same limit while it passes.
///
/// # Errors
///
/// Too large (refused before reading if announced), too slow, broken off, no memory left in the budget for all bodies.
pub async fn receive(
    caller: &Caller,
    generation: &Generation,
    patience: &Patience,
    route: RouteFacts,
    (headers, body, received): (&HeaderMap, Incoming, &Received),
) -> Result<Upload, Rejection> {
    let limits = &generation.config.limits;
    let limit = limits.request_body_bytes;
    let length = announced(headers);
    if length.is_some_and(|length| length > limit as u64) {
        return Err(Rejection::BodyTooLarge { limit });
    }
    if route.model != ModelIn::Body && !is_json(headers) && !body.is_end_stream() {
        if length.is_none() {
            // Without an announced length the bound could only be noticed in mid-request: read it whole instead.
            let whole = whole(caller, generation, patience, body, None).await?;
            received.set(true);
            return Ok(whole);
        }
        let window = generation.timeouts().request_body;
        let body = Streamed::new(body, window, received.clone());
        return Ok(Upload::Streamed { body, length });
    }
    let whole = whole(caller, generation, patience, body, length).await?;
    received.set(true);
    Ok(whole)
}

/// Or says nothing, as many clients do.
fn is_json(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_none_or(|v| {
        v.as_bytes()
            .to_ascii_lowercase()
            .windows(4)
            .any(|w| w == b"json")
    })
}

async fn whole(
    caller: &Caller,
    generation: &Generation,
    patience: &Patience,
    mut body: Incoming,
    length: Option<u64>,
) -> Result<Upload, Rejection> {
    let limits = &generation.config.limits;
    let limit = limits.request_body_bytes;
    let lease = Arc::new(Lease::new(&caller.bodies));
    let mut read = BytesMut::new();
    let mut pace = Pace::new(generation.timeouts().request_body);
    let mut only: Option<Bytes> = None;
    loop {
        let frame = patience
            .within(Tier::RequestBody, pace.left()?, body.frame())
            .await?;
        let data = match frame {
            None => break,
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => data,
                Err(_trailers) => continue,
            },
            Some(Err(_)) => return Err(Rejection::BodyBroken),
        };
        pace.progress(data.len());
        if read.len() + only.as_ref().map_or(0, Bytes::len) + data.len() > limit {
            return Err(Rejection::BodyTooLarge { limit });
        }
        if !lease.grow(data.len(), limits.request_bodies_total_bytes) {
            return Err(Rejection::BodiesFull);
        }
        // Small bodies come in one piece and are never copied.
        if read.is_empty() && only.is_none() {
            only = Some(data);
            if body.is_end_stream() {
                break;
            }
            continue;
        }
        if let Some(first) = only.take() {
            read.reserve(
                usize::try_from(length.unwrap_or(0))
                    .unwrap_or(usize::MAX)
                    .clamp(
                        first.len() + data.len(),
                        RESERVE_BYTES.max(first.len() + data.len()),
                    ),
            );
            read.extend_from_slice(&first);
        }
        read.extend_from_slice(&data);
    }
    let body = only.unwrap_or_else(|| read.freeze());
    Ok(Upload::Whole { body, lease })
}

/// Minimal progress: in each window of the `request_body` time at least [`PROGRESS_BYTES`] must come.
struct Pace {
    window: Duration,
    /// `None`: since the first look.
    since: Option<Instant>,
    bytes: usize,
}

impl Pace {
    fn new(window: Duration) -> Self {
        Self {
            window,
            since: None,
            bytes: 0,
        }
    }

    /// What is left of the window; a window that has passed with enough bytes starts anew.
    fn left(&mut self) -> Result<Duration, Rejection> {
        let Some(since) = self.since else {
            self.since = Some(Instant::now());
            return Ok(self.window);
        };
        let passed = since.elapsed();
        if let Some(left) = self
            .window
            .checked_sub(passed)
            .filter(|left| !left.is_zero())
        {
            return Ok(left);
        }
        if self.bytes < PROGRESS_BYTES {
            return Err(Rejection::Timeout(Tier::RequestBody));
        }
        self.since = Some(Instant::now());
        self.bytes = 0;
        Ok(self.window)
    }

    fn progress(&mut self, bytes: usize) {
        self.bytes += bytes;
        if self.bytes >= PROGRESS_BYTES {
            self.since = Some(Instant::now());
            self.bytes = 0;
        }
    }
}
