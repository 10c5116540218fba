//! The request's body: read whole under its bounds, or passed on as it comes.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::Body;
use http_body_util::BodyExt;
use tokio::time::Instant;

use super::budget::Lease;
use super::deadline::{Patience, Tier};
use super::outcome::Rejection;
use super::{Arrival, Generation, ModelIn, RouteFacts};
use crate::fields::{Field, Fields};
use crate::upstream::arriving::{Arriving, Cut};
use crate::upstream::exchange::RequestBody;
use crate::upstream::upload::{PROGRESS_BYTES, Streamed};

/// Reserved at once for a body of announced length; more only as it really comes.
const RESERVE_BYTES: usize = 256 * 1024;

/// Fits behind most heads into the memory that is there for them.
const SMALL_BYTES: usize = 512;

/// A request body on its way.
#[derive(Debug)]
pub enum Upload {
    /// In memory: may be looked at, edited, and sent a second time as long as no answer has begun.
    Whole { body: Bytes },
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
        Self::Whole { body }
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
        if let Self::Whole { body } = self {
            return RequestBody::Whole((!body.is_empty()).then(|| body.clone()));
        }
        match std::mem::replace(self, Self::Gone) {
            Self::Streamed { body, .. } => RequestBody::Streamed(body),
            Self::Whole { .. } | Self::Gone => RequestBody::Whole(None),
        }
    }

    /// A body that is copied behind the head of its request: that costs less than a second piece.
    pub fn small(&self) -> &[u8] {
        match self {
            Self::Whole { body, .. } if body.len() <= SMALL_BYTES => body,
            _ => &[],
        }
    }

    /// As [`body`](Self::body), but for one that is [`small`](Self::small).
    pub fn body_apart(&mut self) -> RequestBody {
        if self.small().is_empty() {
            self.body()
        } else {
            RequestBody::Whole(None)
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Reads the body, or decides to pass it on.
///
/// JSON is read whole, since `model` and `stream` decide what happens to it. Anything else (audio, files) is passed on as it comes; its
/// length is bounded by the same limit while it passes. `lease` grows by what is kept in memory.
///
/// # Errors
///
/// Too large (refused before reading if announced), too slow, broken off, no memory left in the budget for all bodies.
pub async fn receive(
    lease: &mut Lease<'_>,
    generation: &Generation,
    patience: &Patience<'_>,
    route: RouteFacts,
    Arrival { fields, body }: Arrival<'_>,
) -> Result<Upload, Rejection> {
    let limits = &generation.config.limits;
    let limit = limits.request_body_bytes;
    let length = body.size_hint().exact();
    if length.is_some_and(|length| length > limit as u64) {
        return Err(Rejection::BodyTooLarge { limit });
    }
    if route.model != ModelIn::Body && !is_json(fields) && !body.is_end_stream() {
        if length.is_none() {
            // Without an announced length the bound could only be noticed in mid-request: read it whole instead.
            return whole(lease, generation, patience, body, None).await;
        }
        let window = generation.request_body_time();
        let body = Streamed::new(body, window);
        return Ok(Upload::Streamed { body, length });
    }
    if let Arriving::Whole(body) = body {
        patience.check()?;
        return in_one_piece(lease, generation, body.unwrap_or_default());
    }
    whole(lease, generation, patience, body, length).await
}

/// Or says nothing, as many clients do.
fn is_json(fields: &Fields) -> bool {
    fields
        .get(Field::ContentType)
        .is_none_or(|v| v.to_ascii_lowercase().windows(4).any(|w| w == b"json"))
}

/// As most bodies are: there with the head.
fn in_one_piece(
    lease: &mut Lease<'_>,
    generation: &Generation,
    body: Bytes,
) -> Result<Upload, Rejection> {
    let limits = &generation.config.limits;
    let limit = limits.request_body_bytes;
    if body.len() > limit {
        return Err(Rejection::BodyTooLarge { limit });
    }
    if !lease.grow(body.len(), limits.request_bodies_total_bytes) {
        return Err(Rejection::BodiesFull);
    }
    Ok(Upload::Whole { body })
}

async fn whole(
    lease: &mut Lease<'_>,
    generation: &Generation,
    patience: &Patience<'_>,
    mut body: Arriving,
    length: Option<u64>,
) -> Result<Upload, Rejection> {
    let limits = &generation.config.limits;
    let limit = limits.request_body_bytes;
    let mut read = BytesMut::new();
    let mut pace = Pace::new(generation.request_body_time(), patience.accepted());
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
            Some(Err(Cut::Left)) => return Err(Rejection::Gone),
            Some(Err(Cut::Broken)) => return Err(Rejection::BodyBroken),
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
    Ok(Upload::Whole { body })
}

/// Minimal progress: in each window of the `request_body` time at least [`PROGRESS_BYTES`] must come.
struct Pace {
    window: Duration,
    since: Instant,
    bytes: usize,
    /// It has been looked at: of what is here at the first look no clock is read.
    began: bool,
}

impl Pace {
    fn new(window: Duration, since: Instant) -> Self {
        Self {
            window,
            since,
            bytes: 0,
            began: false,
        }
    }

    /// What is left of the window; a window that has passed with enough bytes starts anew.
    fn left(&mut self) -> Result<Duration, Rejection> {
        if !std::mem::replace(&mut self.began, true) {
            return Ok(self.window);
        }
        let passed = self.since.elapsed();
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
        self.since = Instant::now();
        self.bytes = 0;
        Ok(self.window)
    }

    fn progress(&mut self, bytes: usize) {
        self.bytes += bytes;
        if self.bytes >= PROGRESS_BYTES {
            self.since = Instant::now();
            self.bytes = 0;
        }
    }
}
