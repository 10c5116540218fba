//! The limiter as a tower layer for HTTP services.
//!
//! Two things are not as in tower's own limit and timeout: the slot is kept to the end of the response
//! *body*, and one deadline covers the queue, the service's readiness and its response head. Nothing is
//! held in `poll_ready`.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response};
use http_body::Body;
use tokio::time::{Instant, timeout_at};
use tower_layer::Layer;
use tower_service::Service;

use crate::body::SlotBody;
use crate::call::Started;
use crate::limiter::Limiter;
use crate::limits::Ask;
use crate::snapshot::Ended;
use crate::timed::NotStarted;

/// Stands in for a timeout beyond what a clock can tell: thirty years.
const FAR: Duration = Duration::from_secs(30 * 365 * 24 * 3_600);

/// Puts a service under a [`Limiter`].
#[derive(Debug, Clone)]
pub struct LimitLayer {
    limiter: Limiter,
    timeout: Duration,
}

/// A service under a [`Limiter`]. Made by [`LimitLayer`].
#[derive(Debug, Clone)]
pub struct Limit<S> {
    inner: S,
    layer: LimitLayer,
}

/// Why there is no response.
#[derive(Debug)]
pub enum LimitError<E> {
    /// The service was not called.
    NotStarted(NotStarted),
    /// The deadline passed before the response head. The call was started, and its future dropped.
    Timeout,
    /// The service failed.
    Inner(E),
}

// === impl LimitLayer ===

impl LimitLayer {
    /// Calls wait, and run up to their response head, for at most `timeout`. The body may stream on.
    #[must_use]
    pub const fn new(limiter: Limiter, timeout: Duration) -> Self {
        Self { limiter, timeout }
    }
}

impl<S> Layer<S> for LimitLayer {
    type Service = Limit<S>;

    fn layer(&self, inner: S) -> Limit<S> {
        Limit {
            inner,
            layer: self.clone(),
        }
    }
}

// === impl Limit ===

impl<S, B, R> Service<Request<B>> for Limit<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    B: Send + 'static,
    R: Body + Send + 'static,
{
    type Response = Response<SlotBody<R>>;
    type Error = LimitError<S::Error>;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    /// Always ready: what cannot be queued is rejected by the call, and nothing is reserved before it.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    /// # Cancel safety
    ///
    /// Dropping the future leaves the queue, or drops the service's future and then ends the slot.
    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (mut inner, layer) = (self.inner.clone(), self.layer.clone());
        Box::pin(async move {
            let now = Instant::now();
            let deadline = now.checked_add(layer.timeout).unwrap_or(now + FAR);
            let ask = Ask::new(request.uri().path(), 0);
            let started = layer.limiter.acquire_until(ask, deadline).await?;
            let head = timeout_at(deadline, async {
                poll_fn(|cx| inner.poll_ready(cx)).await?;
                inner.call(request).await
            });
            let Started { slot, waiter, .. } = started;
            let (waiter, slot) = (waiter, slot); // dropped in the reverse order: the work ends first
            match head.await {
                Ok(Ok(response)) => Ok(response.map(|body| {
                    let queued_for = started.queued_for;
                    SlotBody::whole(
                        body,
                        Started {
                            slot,
                            waiter,
                            queued_for,
                        },
                    )
                })),
                Ok(Err(error)) => {
                    slot.finish(Ended::Error);
                    waiter.done();
                    Err(LimitError::Inner(error))
                }
                Err(_) => {
                    slot.finish(Ended::Cancelled);
                    waiter.done();
                    Err(LimitError::Timeout)
                }
            }
        })
    }
}

// === impl LimitError ===

impl<E> LimitError<E> {
    /// Whether the service was called, so that a retry could double what it did.
    #[must_use]
    pub const fn started(&self) -> bool {
        !matches!(self, Self::NotStarted(_))
    }
}

impl<E> From<NotStarted> for LimitError<E> {
    fn from(not_started: NotStarted) -> Self {
        Self::NotStarted(not_started)
    }
}

impl<E> fmt::Display for LimitError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotStarted(_) => "the service was not called",
            Self::Timeout => "the deadline passed before the response",
            Self::Inner(_) => "the service failed",
        })
    }
}

impl<E: std::error::Error + 'static> std::error::Error for LimitError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::NotStarted(not_started) => Some(not_started),
            Self::Timeout => None,
            Self::Inner(error) => Some(error),
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle, protocol))))]
mod tests {
    use std::convert::Infallible;
    use std::future::{Ready, pending, ready};
    use std::num::NonZeroUsize;

    use bytes::Bytes;
    use http_body_util::{BodyExt, Full};

    use super::*;
    use crate::{Limits, Reason};

    const SECOND: Duration = Duration::from_secs(1);

    #[derive(Clone)]
    struct Echo;

    #[derive(Clone)]
    struct Stuck;

    impl Service<Request<()>> for Echo {
        type Response = Response<Full<Bytes>>;
        type Error = Infallible;
        type Future = Ready<Result<Self::Response, Infallible>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: Request<()>) -> Self::Future {
            ready(Ok(Response::new(Full::new(Bytes::from("all of it")))))
        }
    }

    impl Service<Request<()>> for Stuck {
        type Response = Response<Full<Bytes>>;
        type Error = Infallible;
        type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: Request<()>) -> Self::Future {
            Box::pin(pending())
        }
    }

    fn layer(queue: usize) -> LimitLayer {
        let limits = Limits::new(NonZeroUsize::new(1).expect("not zero")).with_queue(queue);
        LimitLayer::new(Limiter::new(limits).expect("sound limits"), SECOND)
    }

    #[tokio::test(start_paused = true)]
    async fn the_slot_is_kept_to_the_end_of_the_body() {
        let layer = layer(0);
        let mut service = layer.layer(Echo);
        let response = service.call(Request::new(())).await.expect("free");
        assert_eq!(layer.limiter.snapshot().running, 1);
        let rejected = service.call(Request::new(())).await.expect_err("full");
        let LimitError::NotStarted(NotStarted::Rejected(reason)) = rejected else {
            panic!("{rejected:?}");
        };
        assert_eq!(reason.reason(), Reason::QueueFull);
        let body = response.into_body().collect().await.expect("a body");
        assert_eq!(body.to_bytes(), "all of it");
        let now = layer.limiter.snapshot();
        assert_eq!((now.running, now.ended.ok.attended), (0, 1));
        assert_eq!(now.broken_identity(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn one_deadline_covers_the_queue_and_the_call() {
        let layer = layer(1);
        let (mut stuck, mut second) = (layer.layer(Stuck), layer.layer(Echo));
        let begun = Instant::now();
        let first = tokio::spawn(stuck.call(Request::new(())));
        tokio::time::sleep(SECOND / 2).await;
        let response = second
            .call(Request::new(()))
            .await
            .expect("after the first");
        assert_eq!(begun.elapsed(), SECOND);
        let error = first.await.expect("no panic").expect_err("stuck");
        assert!(matches!(error, LimitError::Timeout) && error.started());
        drop(response);
        let now = layer.limiter.snapshot();
        assert_eq!((now.running, now.ended.cancelled.attended), (0, 2));
        assert_eq!(now.broken_identity(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_goes_ends_the_call_and_abandons_nothing() {
        let layer = layer(1);
        let call = layer.layer(Stuck).call(Request::new(()));
        assert!(tokio::time::timeout(SECOND / 2, call).await.is_err());
        let now = layer.limiter.snapshot();
        assert_eq!((now.running, now.ended.dropped.attended), (0, 1));
        assert_eq!(now.abandoned_total, 0);
    }
}
