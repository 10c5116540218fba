//! Whether somebody still waits for a call, and the waits that go on when nobody does.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tidegate_limiter::Waiter;
use tokio::time::Instant;

use super::attach::orphan::{Orphan, Who, Writer};
use super::contract::{self, Bound, Bounds, Fate, Leaving};
use super::deadline::{Patience, Tier};
use super::entry::Entry;
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
    /// The limiter counts it as abandoned.
    away: bool,
    overrun: Option<Bound>,
    /// A retry can take the call up.
    orphan: Option<Arc<Orphan>>,
    /// Boxed: rare, and a large part of a call otherwise.
    writer: Option<Box<Writer>>,
    /// Its first client is there, as far as is known.
    first: bool,
}

/// When the client left, and how far the call goes on without it.
#[derive(Clone, Copy, Debug)]
struct Left {
    at: Instant,
    bounds: Bounds,
    /// What it means that the time is up.
    late: Bound,
}

impl Attendance {
    /// `writer`: what a retry can take the call up by.
    pub fn new(
        waiter: Waiter,
        upstream: &Arc<Upstream>,
        background: bool,
        writer: Option<Writer>,
    ) -> Self {
        Self {
            waiter: Some(waiter),
            background,
            orphan: writer.as_ref().map(|writer| Arc::clone(writer.orphan())),
            writer: writer.map(Box::new),
            ..Self::without_slot(upstream)
        }
    }

    /// Of what needs no slot and ends with its client.
    pub fn without_slot(upstream: &Arc<Upstream>) -> Self {
        Self {
            waiter: None,
            upstream: Arc::clone(upstream),
            background: false,
            left: None,
            away: false,
            overrun: None,
            orphan: None,
            writer: None,
            first: true,
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
        patience: &Patience<'_>,
        tier: Tier,
        limit: Duration,
        mut work: Pin<&mut impl Future<Output = T>>,
    ) -> Result<T, Rejection> {
        if self.left.is_none() && self.first {
            match patience.within(tier, limit, work.as_mut()).await {
                Err(Rejection::Gone) => self.first_left(patience.entry())?,
                other => return other,
            }
        }
        // Rare, and a large part of the call's future otherwise.
        Box::pin(self.within_alone(patience, tier, limit, work)).await
    }

    async fn within_alone<T>(
        &mut self,
        patience: &Patience<'_>,
        tier: Tier,
        limit: Duration,
        mut work: Pin<&mut impl Future<Output = T>>,
    ) -> Result<T, Rejection> {
        let alone = patience.alone();
        let end = Instant::now() + limit;
        loop {
            let who = self.follow(patience.entry())?;
            let limit = end.saturating_duration_since(Instant::now());
            tokio::select! {
                biased;
                done = alone.within(tier, limit, work.as_mut()) => return done,
                () = sleep_until(self.until()) => {
                    if self.orphan.as_ref().is_none_or(|orphan| orphan.close_unless_taken()) {
                        self.late();
                        return Err(Rejection::Gone);
                    }
                }
                () = changed(self.orphan.as_ref(), who) => {}
                () = closing(self.orphan.as_ref()), if who == Who::Nobody => {
                    self.no_orphan();
                    self.leave(patience.entry())?;
                }
            }
        }
    }

    /// The client that began the call has left, unless its retry waits already.
    fn first_left(&mut self, entry: Option<&Entry>) -> Result<(), Rejection> {
        self.first = false;
        if self
            .orphan
            .as_ref()
            .is_none_or(|orphan| orphan.first_left())
        {
            self.leave(entry)?;
        }
        Ok(())
    }

    /// Goes by who waits for the call now, which is told; without a tape nobody new can. `entry`: what others see of the call.
    ///
    /// # Errors
    ///
    /// As [`leave`](Self::leave).
    pub fn follow(&mut self, entry: Option<&Entry>) -> Result<Who, Rejection> {
        let Some(orphan) = &self.orphan else {
            return Ok(Who::Nobody);
        };
        let who = orphan.who();
        match who {
            Who::First => {}
            Who::Nobody => self.leave(entry)?,
            Who::Retry(_) => self.come_back(),
        }
        Ok(who)
    }

    fn come_back(&mut self) {
        let Some(waiter) = self.waiter.as_mut().filter(|_| self.away) else {
            return;
        };
        self.away = false;
        // The limit of attended calls is that of all; the call has its place in it.
        let _ = waiter.come_back();
        self.left = None;
        if let Some(orphan) = &self.orphan {
            orphan.entry().attended_again();
        }
    }

    /// The tape goes with the answer.
    pub fn take_writer(&mut self) -> Option<Box<Writer>> {
        self.writer.take()
    }

    /// No retry can take the call up any more: it is left as if there had been no grace.
    pub fn no_orphan(&mut self) {
        self.orphan = None;
        self.writer = None;
        self.left = self.left.filter(|left| left.late != Bound::Grace);
    }

    /// A retry can take the call up, or has.
    pub fn is_orphan(&self) -> bool {
        self.orphan.is_some()
    }

    /// How many retries have taken the call up.
    pub fn taken_up(&self) -> u64 {
        self.orphan.as_ref().map_or(0, |orphan| orphan.seats())
    }

    /// Whoever waits is told that there is no answer.
    pub fn tell(&mut self, why: &Rejection) {
        if let Some(writer) = self.writer.take() {
            writer.failed(why);
        }
    }

    /// The time of a call that runs on is up.
    pub fn late(&mut self) {
        self.overrun = Some(self.left.map_or(Bound::Time, |left| left.late));
    }

    /// The client has left, and the request was sent. Others see it in `entry`.
    ///
    /// # Errors
    ///
    /// [`Rejection::Gone`] if the exchange is to be closed now.
    pub fn leave(&mut self, entry: Option<&Entry>) -> Result<(), Rejection> {
        if self.left.is_some() {
            return Ok(());
        }
        let Some(waiter) = &mut self.waiter else {
            return Err(Rejection::Gone);
        };
        waiter.step_away();
        self.away = true;
        let orphan = self.orphan.as_ref().filter(|orphan| orphan.is_open());
        let attach = self.upstream.settings.attach.filter(|_| orphan.is_some());
        let leaving = Leaving {
            background: self.background,
            at_once: self.upstream.limiter.snapshot().abandoned,
            grace: attach.map(|attach| attach.grace),
        };
        let (bounds, late) = match contract::at_leaving(&self.upstream.settings.abandon, leaving) {
            Fate::Close => return Err(Rejection::Gone),
            Fate::Overrun(bound) => {
                self.overrun = Some(bound);
                return Err(Rejection::Gone);
            }
            Fate::ReadOn(bounds) => (bounds, Bound::Time),
            Fate::Grace(bounds) => (bounds, Bound::Grace),
        };
        match (orphan, entry) {
            (Some(orphan), _) => orphan.entry().left_for_now(),
            (None, Some(entry)) => entry.left_for_good(),
            (None, None) => {}
        }
        let at = Instant::now();
        self.left = Some(Left { at, bounds, late });
        Ok(())
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

    /// Where the call is.
    pub fn upstream(&self) -> &Arc<Upstream> {
        &self.upstream
    }

    /// The client has its answer, or the error that stands for it.
    pub fn done(self) {
        if let Some(waiter) = self.waiter {
            waiter.done();
        }
    }
}

async fn changed(orphan: Option<&Arc<Orphan>>, known: Who) {
    match orphan {
        Some(orphan) => std::future::poll_fn(|cx| orphan.poll_changed(cx, known, false)).await,
        None => std::future::pending().await,
    }
}

async fn closing(orphan: Option<&Arc<Orphan>>) {
    match orphan {
        Some(orphan) => orphan.closing().await,
        None => std::future::pending().await,
    }
}

async fn sleep_until(until: Option<Instant>) {
    match until {
        Some(until) => tokio::time::sleep_until(until).await,
        None => std::future::pending().await,
    }
}
