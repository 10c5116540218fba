//! Whether somebody still waits for a call, and the waits that go on when nobody does.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tidegate_limiter::Waiter;
use tokio::time::Instant;

use super::contract::{self, Bound, Bounds, Fate, Leaving};
use super::deadline::{Patience, Tier};
use super::outcome::Rejection;
use crate::upstream::Upstream;

/// The client's side of a call that has its slot. Dropping it says that the client has left.
#[derive(Debug)]
pub struct Attendance {
    /// `None`: what is fetched needs no slot.
    waiter: Option<Waiter>,
    upstream: Arc<Upstream>,
    /// A background response.
    background: bool,
    left: Option<Left>,
    overrun: Option<Bound>,
}

/// When the client left, and how far the call goes on without it.
#[derive(Clone, Copy, Debug)]
struct Left {
    at: Instant,
    bounds: Bounds,
}

impl Attendance {
    pub fn new(waiter: Waiter, upstream: &Arc<Upstream>, background: bool) -> Self {
        Self {
            waiter: Some(waiter),
            upstream: Arc::clone(upstream),
            background,
            left: None,
            overrun: None,
        }
    }

    /// Of what needs no slot and ends with its client.
    pub fn without_slot(upstream: &Arc<Upstream>) -> Self {
        Self {
            waiter: None,
            upstream: Arc::clone(upstream),
            background: false,
            left: None,
            overrun: None,
        }
    }

    /// Waits for `work` at most `limit`, after the request was sent. If the client leaves meanwhile, the contract says whether it is
    /// waited for all the same.
    ///
    /// # Errors
    ///
    /// As [`Patience::within`]; [`Rejection::Gone`] if the exchange is to be closed because nobody waits for it any more.
    ///
    /// # Cancel safety
    ///
    /// As safe as `work`, which is pinned where it is: taken by value it would be in the call's future several times.
    pub async fn within<T>(
        &mut self,
        patience: &Patience,
        tier: Tier,
        limit: Duration,
        mut work: Pin<&mut impl Future<Output = T>>,
    ) -> Result<T, Rejection> {
        if self.left.is_none() {
            match patience.within(tier, limit, work.as_mut()).await {
                Err(Rejection::Gone) => self.leave()?,
                other => return other,
            }
        }
        // Rare, and a large part of the call's future otherwise.
        Box::pin(self.within_alone(patience, tier, limit, work)).await
    }

    async fn within_alone<T>(
        &mut self,
        patience: &Patience,
        tier: Tier,
        limit: Duration,
        work: impl Future<Output = T>,
    ) -> Result<T, Rejection> {
        let alone = patience.alone();
        let until = self.until();
        tokio::select! {
            biased;
            done = alone.within(tier, limit, work) => done,
            () = sleep_until(until) => {
                self.overrun = Some(Bound::Time);
                Err(Rejection::Gone)
            }
        }
    }

    /// The client has left, and the request was sent.
    ///
    /// # Errors
    ///
    /// [`Rejection::Gone`] if the exchange is to be closed now.
    pub fn leave(&mut self) -> Result<(), Rejection> {
        if self.left.is_some() {
            return Ok(());
        }
        let Some(waiter) = &mut self.waiter else {
            return Err(Rejection::Gone);
        };
        waiter.step_away();
        let leaving = Leaving {
            background: self.background,
            at_once: self.upstream.limiter.snapshot().abandoned,
        };
        match contract::at_leaving(&self.upstream.settings.abandon, leaving) {
            Fate::Close => Err(Rejection::Gone),
            Fate::Overrun(bound) => {
                self.overrun = Some(bound);
                Err(Rejection::Gone)
            }
            Fate::ReadOn(bounds) => {
                let at = Instant::now();
                self.left = Some(Left { at, bounds });
                Ok(())
            }
        }
    }

    /// When the client left a call that goes on.
    pub fn left_at(&self) -> Option<Instant> {
        self.left.map(|left| left.at)
    }

    /// Until when the call may go on for nobody. `None`: as long as it takes, or somebody is there.
    pub fn until(&self) -> Option<Instant> {
        let left = self.left?;
        Some(left.at + left.bounds.time?)
    }

    /// The bound that so many bytes and tokens, read for nobody, are past.
    pub fn passed(&self, bytes: u64, tokens: u64) -> Option<Bound> {
        self.left?.bounds.passed(bytes, tokens)
    }

    /// The bound at which the call was closed instead of read on.
    pub fn overrun(&self) -> Option<Bound> {
        self.overrun
    }

    pub fn overran(&mut self, bound: Bound) {
        self.overrun = Some(bound);
    }

    /// The client has its answer, or the error that stands for it.
    pub fn done(self) {
        if let Some(waiter) = self.waiter {
            waiter.done();
        }
    }
}

async fn sleep_until(until: Option<Instant>) {
    match until {
        Some(until) => tokio::time::sleep_until(until).await,
        None => std::future::pending().await,
    }
}
