//! The tiers: every wait has a name, a limit, and an error of its own.

use std::fmt;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::time::Instant;

use super::handover::Gone;
use super::outcome::Rejection;
use super::table::Entry;
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
#[derive(Clone, Debug)]
pub struct Patience {
    /// `None`: the call goes on whoever leaves.
    gone: Option<Arc<Gone>>,
    cut: Signal,
    /// Whether it is ended from outside.
    entry: Option<Arc<Entry>>,
    accepted: Instant,
    pub total: Option<Instant>,
}

impl Patience {
    pub fn new(gone: Arc<Gone>, cut: Signal) -> Self {
        Self {
            gone: Some(gone),
            cut,
            entry: None,
            accepted: Instant::now(),
            total: None,
        }
    }

    /// Of a call that can be ended from outside.
    #[must_use]
    pub fn with_entry(mut self, entry: Option<Arc<Entry>>) -> Self {
        self.entry = entry;
        self
    }

    #[must_use]
    pub fn with_total(mut self, total: Option<Duration>) -> Self {
        self.total = total.map(|t| self.accepted + t);
        self
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
        let mut timer = pin!(None);
        let mut tier = tier;
        let mut cut = pin!(self.cut.raised());
        poll_fn(|cx| {
            if self.gone.as_ref().is_some_and(|gone| gone.is_set()) {
                return Poll::Ready(Err(Rejection::Gone));
            }
            if let Some(by) = self.entry.as_ref().and_then(|entry| entry.stopped()) {
                return Poll::Ready(Err(Rejection::Stopped(by)));
            }
            if let Poll::Ready(done) = work.as_mut().poll(cx) {
                return Poll::Ready(Ok(done));
            }
            // Only what has to be waited for needs a clock; much is there already.
            if timer.is_none() {
                let mut until = Instant::now() + limit;
                if let Some(total) = self.total.filter(|total| *total < until) {
                    (until, tier) = (total, Tier::Total);
                }
                timer.set(Some(tokio::time::sleep_until(until)));
            }
            if let Some(timer) = timer.as_mut().as_pin_mut()
                && timer.poll(cx).is_ready()
            {
                return Poll::Ready(Err(Rejection::Timeout(tier)));
            }
            if let Some(entry) = &self.entry
                && let Poll::Ready(by) = entry.poll_stop(cx)
            {
                return Poll::Ready(Err(Rejection::Stopped(by)));
            }
            cut.as_mut().poll(cx).map(|()| Err(Rejection::Draining))
        })
        .await
    }

    /// Of a call that goes on without its client.
    #[must_use]
    pub fn alone(&self) -> Self {
        Self {
            gone: None,
            ..self.clone()
        }
    }

    pub fn gone(&self) -> Option<&Arc<Gone>> {
        self.gone.as_ref()
    }

    pub fn cut(&self) -> &Signal {
        &self.cut
    }
}
