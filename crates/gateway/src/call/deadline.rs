//! The tiers: every wait has a name, a limit, and an error of its own.

use std::fmt;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Instant;

use super::alarm::{Alarm, Rung};
use super::downstream::Client;
use super::entry::Entry;
use super::outcome::Rejection;
use crate::signal::Signal;

/// A named limit of one wait. From when to when: see `config::Timeouts`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tier {
    RequestHead,
    RequestBody,
    Queue,
    Pool,
    Connect,
    Tls,
    ResponseHead,
    FirstEvent,
    Silence,
    Idle,
    Write,
    Total,
    Drain,
}

impl Tier {
    /// As in the configuration, the metrics and the log.
    pub fn name(self) -> &'static str {
        match self {
            Self::RequestHead => "request_head",
            Self::RequestBody => "request_body",
            Self::Queue => "queue",
            Self::Pool => "pool",
            Self::Connect => "connect",
            Self::Tls => "tls",
            Self::ResponseHead => "response_head",
            Self::FirstEvent => "first_event",
            Self::Silence => "silence",
            Self::Idle => "idle",
            Self::Write => "write",
            Self::Total => "total",
            Self::Drain => "drain",
        }
    }

    /// What the client is told.
    pub fn message(self) -> &'static str {
        match self {
            Self::RequestHead => "the request head did not arrive in time",
            Self::RequestBody => "the request body did not arrive in time",
            Self::Queue => "no slot became free in time",
            Self::Pool => "no connection to the model server became free in time",
            Self::Connect => "the model server could not be connected to in time",
            Self::Tls => "the TLS handshake with the model server did not finish in time",
            Self::ResponseHead => "the model server did not begin its answer in time",
            Self::FirstEvent => "the model server sent no event in time",
            Self::Silence => "the model server fell silent in the middle of its answer",
            Self::Idle => "the model server sent no meaningful event in time",
            Self::Write => "the client stopped reading",
            Self::Total => "the call took longer than it may in total",
            Self::Drain => "the gateway is shutting down",
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How long a call goes on waiting: while its client is there, its time is not up and the gateway is not past its drain.
#[derive(Clone, Copy, Debug)]
pub struct Patience<'a> {
    /// `None`: the call goes on whoever leaves.
    client: Option<&'a Arc<Client>>,
    cut: &'a Signal,
    /// Whether it is ended from outside.
    entry: Option<&'a Entry>,
    accepted: Instant,
    pub total: Option<Instant>,
    alarm: &'a Alarm,
}

impl<'a> Patience<'a> {
    /// `alarm`: of the task that waits; what it was set to for an earlier wait does for this one too. `entry`: of a call that can be ended
    /// from outside.
    pub fn new(
        (client, alarm): (&'a Arc<Client>, &'a Alarm),
        cut: &'a Signal,
        entry: Option<&'a Entry>,
    ) -> Self {
        Self {
            alarm,
            client: Some(client),
            cut,
            entry,
            accepted: entry.map_or_else(Instant::now, Entry::began),
            total: None,
        }
    }

    /// In all, from when the call was accepted.
    pub fn limit_total(&mut self, total: Option<Duration>) {
        self.total = total.map(|t| self.accepted + t);
    }

    /// Waits for `work`, at most `limit`.
    ///
    /// # Errors
    ///
    /// [`Rejection::Gone`] when the client left, [`Rejection::Stopped`], [`Rejection::Timeout`] with `tier` or [`Tier::Total`],
    /// [`Rejection::Draining`].
    ///
    /// # Cancel safety
    ///
    /// As safe as `work`: on an error it has been dropped.
    pub async fn within<T>(
        &self,
        tier: Tier,
        limit: Duration,
        work: impl Future<Output = T>,
    ) -> Result<T, Rejection> {
        let mut work = pin!(work);
        let mut end = None;
        poll_fn(|cx| {
            self.check()?;
            if let Poll::Ready(done) = work.as_mut().poll(cx) {
                return Poll::Ready(Ok(done));
            }
            // Only what has to be waited for needs a clock; much is there already.
            let (until, tier) = *end.get_or_insert_with(|| self.end(tier, limit));
            self.poll_over(cx, until, tier).map(Err)
        })
        .await
    }

    /// Whether to go on with what needs no waiting.
    ///
    /// # Errors
    ///
    /// [`Rejection::Gone`], [`Rejection::Stopped`].
    pub fn check(&self) -> Result<(), Rejection> {
        if self.is_left() {
            return Err(Rejection::Gone);
        }
        match self.entry.and_then(Entry::stopped) {
            Some(by) => Err(Rejection::Stopped(by)),
            None => Ok(()),
        }
    }

    fn end(&self, tier: Tier, limit: Duration) -> (Instant, Tier) {
        let until = Instant::now() + limit;
        match self.total {
            Some(total) if total < until => (total, Tier::Total),
            _ => (until, tier),
        }
    }

    /// Nothing came: is it time to give up?
    fn poll_over(&self, cx: &mut Context<'_>, until: Instant, tier: Tier) -> Poll<Rejection> {
        let rung = self.alarm.poll(cx, until, self.cut);
        if rung == Poll::Ready(Rung::Time) {
            return Poll::Ready(Rejection::Timeout(tier));
        }
        if let Some(entry) = self.entry
            && let Poll::Ready(by) = entry.poll_stop(cx)
        {
            return Poll::Ready(Rejection::Stopped(by));
        }
        // A retry may have taken its place before there was a waker.
        if self.is_left() {
            return Poll::Ready(Rejection::Gone);
        }
        rung.map(|_| Rejection::Draining)
    }

    /// Of a call that goes on without its client.
    #[must_use]
    pub fn alone(&self) -> Self {
        Self {
            client: None,
            ..*self
        }
    }

    /// When the call was accepted.
    pub fn accepted(&self) -> Instant {
        self.accepted
    }

    /// The client has left a call that ends with that, or its retry has its place.
    pub fn is_left(&self) -> bool {
        let replaced = || self.entry.is_some_and(Entry::is_replaced);
        self.client
            .is_some_and(|client| client.is_gone() || replaced())
    }

    pub fn client(&self) -> Option<&'a Arc<Client>> {
        self.client
    }

    pub fn entry(&self) -> Option<&'a Entry> {
        self.entry
    }

    pub fn cut(&self) -> &'a Signal {
        self.cut
    }
}
