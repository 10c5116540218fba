//! The limiters that are put to the test, each used as its documentation says.

use std::convert::Infallible;
use std::future::Future;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tidegate_limiter::{Ask, Limiter, Limits, Threads};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tower::limit::ConcurrencyLimit;
use tower::timeout::Timeout;
use tower::{Service, ServiceExt};

use super::suite::{PATIENCE, Subject, Work};

/// This crate.
pub(crate) struct Ours(pub(crate) Threads, pub(crate) Limiter);

/// A permit held by the caller, as in most code.
pub(crate) struct CallersPermit(pub(crate) Arc<Semaphore>);

/// A permit moved into the work, by hand.
pub(crate) struct MovedPermit(pub(crate) Arc<Semaphore>);

pub(crate) struct LimitOutside(pub(crate) ConcurrencyLimit<Timeout<Blocking>>);

pub(crate) struct LimitInside(pub(crate) Timeout<ConcurrencyLimit<Blocking>>);

/// A service that does its work on the runtime's blocking pool.
#[derive(Clone)]
pub(crate) struct Blocking;

impl Ours {
    pub(crate) fn new() -> Self {
        let limits = Limits::new(NonZeroUsize::MIN).with_queue(4);
        let limiter = Limiter::new(limits).expect("sound limits");
        Self(Threads::new(limiter.clone()), limiter)
    }
}

impl CallersPermit {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

impl MovedPermit {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

impl LimitOutside {
    pub(crate) fn new() -> Self {
        Self(ConcurrencyLimit::new(Timeout::new(Blocking, PATIENCE), 1))
    }
}

impl LimitInside {
    pub(crate) fn new() -> Self {
        Self(Timeout::new(ConcurrencyLimit::new(Blocking, 1), PATIENCE))
    }
}

#[expect(clippy::disallowed_methods, reason = "what the others do is on trial")]
async fn on_the_runtimes_pool(work: Work) {
    drop(tokio::task::spawn_blocking(work).await);
}

impl Subject for Ours {
    fn name(&self) -> &'static str {
        "tidegate-limiter, Threads"
    }

    async fn call(&self, work: Work, patience: Duration) {
        if let Ok(call) = self.0.run_blocking(Ask::default(), move |_| work()) {
            drop(timeout(patience, call).await);
        }
    }

    fn leftovers(&self) -> Option<usize> {
        Some(self.1.snapshot().abandoned)
    }
}

impl Subject for CallersPermit {
    fn name(&self) -> &'static str {
        "tokio Semaphore, permit with the caller"
    }

    async fn call(&self, work: Work, patience: Duration) {
        let call = async {
            let _permit = self.0.acquire().await;
            on_the_runtimes_pool(work).await;
        };
        drop(timeout(patience, call).await);
    }

    fn leftovers(&self) -> Option<usize> {
        None
    }
}

impl Subject for MovedPermit {
    fn name(&self) -> &'static str {
        "tokio Semaphore, permit moved into the work"
    }

    async fn call(&self, work: Work, patience: Duration) {
        let call = async {
            if let Ok(permit) = self.0.clone().acquire_owned().await {
                let work = Box::new(move || {
                    work();
                    drop(permit);
                });
                on_the_runtimes_pool(work).await;
            }
        };
        drop(timeout(patience, call).await);
    }

    fn leftovers(&self) -> Option<usize> {
        None
    }
}

impl Subject for LimitOutside {
    fn name(&self) -> &'static str {
        "tower ConcurrencyLimit(Timeout(..))"
    }

    async fn call(&self, work: Work, patience: Duration) {
        drop(timeout(2 * patience, self.0.clone().oneshot(work)).await);
    }

    fn leftovers(&self) -> Option<usize> {
        None
    }
}

impl Subject for LimitInside {
    fn name(&self) -> &'static str {
        "tower Timeout(ConcurrencyLimit(..))"
    }

    async fn call(&self, work: Work, patience: Duration) {
        drop(timeout(2 * patience, self.0.clone().oneshot(work)).await);
    }

    fn leftovers(&self) -> Option<usize> {
        None
    }
}

impl Service<Work> for Blocking {
    type Response = ();
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<(), Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, work: Work) -> Self::Future {
        Box::pin(async {
            on_the_runtimes_pool(work).await;
            Ok(())
        })
    }
}
