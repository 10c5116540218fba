//! Abandoned calls, remembered for a while: a retry of one is known as such.
//!
//! The retries of callers that gave up are where overload comes from. Only abandoned calls are remembered, and only by hashes; the memory is
//! bounded in number and time, and no key sees another's calls.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::aside;
use super::id::Id;
use super::outcome::Rejection;
use super::upload::Upload;
use crate::auth::Principal;
use crate::fields::{Field, Fields};

/// How long an abandoned call is remembered.
const REMEMBERED: Duration = Duration::from_secs(600);
/// How many of them.
const REMEMBERED_MAX: usize = 4096;

/// What the client named its request by. An empty name is none, and several are none: nobody knows which of them the retry will have.
pub fn idempotency_key(fields: &Fields) -> Option<&[u8]> {
    let key = fields.get(Field::IdempotencyKey)?;
    let names = !key.is_empty() && !fields.repeats(Field::IdempotencyKey);
    names.then_some(key)
}

/// Abandoned calls by what their retry would be known by. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Retried(Arc<Mutex<Memory>>);

#[derive(Debug, Default)]
struct Memory {
    ids: HashMap<Mark, (Instant, Id)>,
    order: VecDeque<(Instant, Mark)>,
}

/// What a call and its retry have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mark(u64);

impl Mark {
    /// `None`: the client says nothing from which its retry could be known. `body`: the whole request body, where it is here. A long one is
    /// read beside the worker.
    pub async fn of(
        fields: &Fields,
        principal: &Principal,
        path: &str,
        body: &Upload,
    ) -> Result<Option<Self>, Rejection> {
        let hasher = || {
            let mut hasher = DefaultHasher::new();
            principal.flow().hash(&mut hasher);
            path.hash(&mut hasher);
            hasher
        };
        if let Some(key) = idempotency_key(fields) {
            let mut hasher = hasher();
            key.hash(&mut hasher);
            return Ok(Some(Self(hasher.finish())));
        }
        let Upload::Whole { body, .. } = body else {
            return Ok(None);
        };
        // SDKs count their retries from the first try on, so the first one bears the field, too.
        if !fields.has(Field::RetryCount) {
            return Ok(None);
        }
        let (body, mut hasher) = (body.clone(), hasher());
        let hashed = aside(body.len(), move || {
            body.hash(&mut hasher);
            Self(hasher.finish())
        });
        hashed.await.map(Some)
    }
}

impl Retried {
    /// A call was abandoned.
    pub fn abandoned(&self, mark: Mark, id: Id) {
        let now = Instant::now();
        let mut memory = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        memory.forget(now);
        memory.order.push_back((now, mark));
        memory.ids.insert(mark, (now, id));
    }

    /// The abandoned call that this one tries again.
    pub fn first(&self, mark: Mark) -> Option<Id> {
        let mut memory = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        memory.forget(Instant::now());
        memory.ids.get(&mark).map(|(_, id)| *id)
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

    /// With the one thread beside the worker taken, a long body waits for it, and a short one does not.
    #[test]
    fn a_long_body_does_not_hold_up_the_worker() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(1)
            .build()
            .expect("a runtime");
        runtime.block_on(marks());
    }

    async fn marks() {
        let fields = crate::fields::list(&[("x-stainless-retry-count", "0")]);
        let principal = Principal::default();
        let mut marks = Vec::new();
        for (bytes, here) in [(1000, true), (2 << 20, false)] {
            let body = Upload::whole_for_tests(vec![b'x'; bytes].into());
            for _ in 0..2 {
                let (free, taken) = std::sync::mpsc::channel::<()>();
                #[expect(
                    clippy::disallowed_methods,
                    reason = "takes the place beside the worker"
                )]
                let beside = tokio::task::spawn_blocking(move || taken.recv().is_err());
                let mut mark = std::pin::pin!(Mark::of(&fields, &principal, "/", &body));
                let first =
                    std::future::poll_fn(|cx| std::task::Poll::Ready(mark.as_mut().poll(cx)));
                let first = first.await;
                assert_eq!(first.is_ready(), here, "{bytes}");
                drop(free);
                let mark = match first {
                    std::task::Poll::Ready(mark) => mark,
                    std::task::Poll::Pending => mark.await,
                };
                marks.push(mark.unwrap().expect("a mark"));
                assert!(beside.await.expect("freed"));
            }
        }
        assert!(marks[0] == marks[1] && marks[2] == marks[3] && marks[0] != marks[2]);
    }

    #[tokio::test]
    async fn workers_remember_the_same_calls() {
        let (one, id) = (Retried::default(), Id::new());
        let two = one.clone();
        one.abandoned(Mark(1), id);
        assert_eq!(two.first(Mark(1)), Some(id));
        assert_eq!(two.first(Mark(2)), None);
    }

    #[tokio::test(start_paused = true)]
    async fn the_memory_is_bounded_in_number_and_time() {
        let retried = Retried::default();
        for n in 0..2 * REMEMBERED_MAX as u64 {
            retried.abandoned(Mark(n), Id::new());
        }
        assert_eq!(retried.first(Mark(0)), None);
        assert!(retried.first(Mark(2 * REMEMBERED_MAX as u64 - 1)).is_some());
        assert!(retried.0.lock().unwrap().ids.len() <= REMEMBERED_MAX);
        tokio::time::advance(REMEMBERED).await;
        assert_eq!(retried.first(Mark(2 * REMEMBERED_MAX as u64 - 1)), None);
        assert!(retried.0.lock().unwrap().ids.is_empty());
    }
}
