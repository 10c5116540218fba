//! Abandoned calls, remembered for a while: a retry of one is known as such.
//!
//! The retries of callers that gave up are where overload comes from. Only abandoned calls are remembered, and only by hashes; the memory is
//! bounded in number and time, and no key sees another's calls.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::header::HeaderName;
use http::{HeaderMap, HeaderValue};
use tokio::time::Instant;

use super::aside;
use super::outcome::Rejection;
use super::upload::Upload;
use crate::auth::Principal;

/// How long an abandoned call is remembered.
const REMEMBERED: Duration = Duration::from_secs(600);
/// How many of them.
const REMEMBERED_MAX: usize = 4096;

pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// What the client named its request by. An empty name is none, and several are none: nobody knows which of them the retry will have.
pub fn idempotency_key(headers: &HeaderMap) -> Option<&HeaderValue> {
    let mut keys = headers.get_all(IDEMPOTENCY_KEY).iter();
    let key = keys.next().filter(|key| !key.is_empty())?;
    keys.next().is_none().then_some(key)
}

/// Abandoned calls by what their retry would be known by. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Retried(Arc<Mutex<Memory>>);

#[derive(Debug, Default)]
struct Memory {
    ids: HashMap<Mark, (Instant, Arc<str>)>,
    order: VecDeque<(Instant, Mark)>,
}

/// What a call and its retry have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mark(u64);

impl Mark {
    /// `None`: the client says nothing from which its retry could be known. `body`: the whole request body, where it is here. A long one is
    /// read beside the worker.
    pub async fn of(
        headers: &HeaderMap,
        principal: &Principal,
        path: &str,
        body: &Upload,
    ) -> Result<Option<Self>, Rejection> {
        let mut hasher = DefaultHasher::new();
        principal.flow().hash(&mut hasher);
        path.hash(&mut hasher);
        if let Some(key) = idempotency_key(headers) {
            key.as_bytes().hash(&mut hasher);
            return Ok(Some(Self(hasher.finish())));
        }
        // SDKs count their retries from the first try on, so the first one bears the header, too.
        let Upload::Whole { body, .. } = body else {
            return Ok(None);
        };
        if !headers.contains_key("x-stainless-retry-count") {
            return Ok(None);
        }
        let body = body.clone();
        let hashed = aside(body.len(), move || {
            body.hash(&mut hasher);
            Self(hasher.finish())
        });
        hashed.await.map(Some)
    }
}

impl Retried {
    /// A call was abandoned.
    pub fn abandoned(&self, mark: Mark, id: &Arc<str>) {
        let now = Instant::now();
        let mut memory = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        memory.forget(now);
        memory.order.push_back((now, mark));
        memory.ids.insert(mark, (now, Arc::clone(id)));
    }

    /// The abandoned call that this one tries again.
    pub fn first(&self, mark: Mark) -> Option<Arc<str>> {
        let mut memory = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        memory.forget(Instant::now());
        memory.ids.get(&mark).map(|(_, id)| Arc::clone(id))
    }
}

impl Memory {
    fn forget(&mut self, now: Instant) {
        while let Some((since, mark)) = self.order.front().copied() {
            let old = now.duration_since(since) >= REMEMBERED;
            if !old && self.order.len() < REMEMBERED_MAX {
                return;
            }
            self.order.pop_front();
            // One that was abandoned again has a later turn.
            if self.ids.get(&mark).is_some_and(|(at, _)| *at == since) {
                self.ids.remove(&mark);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_long_body_does_not_hold_up_the_worker() {
        let headers = HeaderMap::from_iter([(
            http::HeaderName::from_static("x-stainless-retry-count"),
            http::HeaderValue::from_static("0"),
        )]);
        let principal = Principal::default();
        let mut marks = Vec::new();
        for (bytes, here) in [(1000, true), (2 << 20, false)] {
            let body = Upload::whole_for_tests(vec![b'x'; bytes].into());
            for _ in 0..2 {
                let mut mark = std::pin::pin!(Mark::of(&headers, &principal, "/", &body));
                let first =
                    std::future::poll_fn(|cx| std::task::Poll::Ready(mark.as_mut().poll(cx)));
                let mark = match first.await {
                    std::task::Poll::Ready(mark) if here => mark,
                    std::task::Poll::Pending if !here => mark.await,
                    other => panic!("{bytes}: {other:?}"),
                };
                marks.push(mark.unwrap().expect("a mark"));
            }
        }
        assert!(marks[0] == marks[1] && marks[2] == marks[3] && marks[0] != marks[2]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_memory_is_bounded_in_number_and_time() {
        let retried = Retried::default();
        for n in 0..2 * REMEMBERED_MAX as u64 {
            retried.abandoned(Mark(n), &"a".into());
        }
        assert_eq!(retried.first(Mark(0)), None);
        assert!(retried.first(Mark(2 * REMEMBERED_MAX as u64 - 1)).is_some());
        assert!(retried.0.lock().unwrap().ids.len() <= REMEMBERED_MAX);
        tokio::time::advance(REMEMBERED).await;
        assert_eq!(retried.first(Mark(2 * REMEMBERED_MAX as u64 - 1)), None);
        assert!(retried.0.lock().unwrap().ids.is_empty());
    }
}
