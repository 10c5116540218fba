//! The limits of a client connection that hyper does not keep: slow heads, idle keep-alive, stalled readers, drain.
//!
//! The guard polls hyper's connection and looks, after each poll, at what the socket and the calls were doing. It has one timer, which is only
//! touched when a limit really begins to run: a streaming connection pays nothing for it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep};

use super::socket::IoState;
use crate::call::downstream::Downstream;
use crate::signal::Watch;

/// A connection that can be told to finish.
pub trait Drainable: Future<Output = Result<(), hyper::Error>> {
    fn begin_drain(self: Pin<&mut Self>);
}

/// How long what may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub request_head: Duration,
    pub keep_alive: Duration,
    pub write: Duration,
}

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// In HTTP's own way, or by the client.
    Closed,
    Tls,
    RequestHead,
    KeepAlive,
    Write,
    /// Its call was ended from outside, and the client reads nothing that could tell it.
    Stopped,
    /// More bytes came behind a request than are kept for later.
    Pipelined,
}

impl End {
    pub fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Tls => "tls",
            Self::RequestHead => "request_head",
            Self::KeepAlive => "keep_alive",
            Self::Write => "write",
            Self::Stopped => "stopped",
            Self::Pipelined => "pipelined",
        }
    }
}

/// hyper's connection under guard.
#[derive(Debug)]
pub struct Guard<C> {
    conn: Pin<Box<C>>,
    io: Arc<IoState>,
    downstream: Arc<Downstream>,
    limits: Limits,
    drain: Watch,
    draining: bool,
    wait: Wait,
    sleep: Option<Pin<Box<Sleep>>>,
    seen: Seen,
}

/// Which limit runs, since when.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wait {
    Nothing,
    Head(Instant),
    Idle(Instant),
    Write(Instant),
}

/// Counters at the last look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    reads: u64,
    writes: u64,
    entered: u64,
}

impl<C: Drainable> Guard<C> {
    pub fn new(
        conn: C,
        io: Arc<IoState>,
        downstream: Arc<Downstream>,
        limits: Limits,
        drain: Watch,
    ) -> Self {
        Self {
            conn: Box::pin(conn),
            io,
            downstream,
            limits,
            drain,
            draining: false,
            wait: Wait::Head(Instant::now()),
            sleep: None,
            seen: Seen::default(),
        }
    }

    /// Looks at what happened since the last poll and says which limit runs now.
    fn look(&mut self) -> Wait {
        let now = Seen {
            reads: self.io.reads(),
            writes: self.io.writes(),
            entered: self.downstream.entered(),
        };
        let before = std::mem::replace(&mut self.seen, now);
        if self.io.is_blocked() {
            return match self.wait {
                Wait::Write(since) if before.writes == now.writes => Wait::Write(since),
                _ => Wait::Write(Instant::now()),
            };
        }
        if self.downstream.active() > 0 {
            return Wait::Nothing;
        }
        let first = now.entered == 0;
        let new_request = before.entered != now.entered;
        let reading = before.reads != now.reads && !new_request && !self.downstream.http2;
        match self.wait {
            Wait::Head(since) if !new_request => Wait::Head(since),
            _ if first || reading => Wait::Head(Instant::now()),
            Wait::Idle(since) if !new_request => Wait::Idle(since),
            _ => Wait::Idle(Instant::now()),
        }
    }

    fn limit(&self) -> Option<(Instant, End)> {
        match self.wait {
            Wait::Nothing => None,
            Wait::Head(since) => Some((since + self.limits.request_head, End::RequestHead)),
            Wait::Idle(since) => Some((since + self.limits.keep_alive, End::KeepAlive)),
            Wait::Write(since) => Some((since + self.limits.write, End::Write)),
        }
    }

    /// Whether the running limit is over; arms the timer for it otherwise.
    fn poll_limit(&mut self, cx: &mut Context<'_>) -> Option<End> {
        loop {
            let (until, end) = self.limit()?;
            let sleep = self
                .sleep
                .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
            if sleep.deadline() > until || sleep.is_elapsed() {
                sleep.as_mut().reset(until);
            }
            // No clock is read while the timer runs; one that was early only looks again.
            if sleep.as_mut().poll(cx).is_pending() {
                return None;
            }
            if until <= Instant::now() {
                return Some(end);
            }
        }
    }
}

impl<C: Drainable> Future for Guard<C> {
    type Output = End;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<End> {
        let this = &mut *self;
        if !this.draining && this.drain.poll_raised(cx) {
            this.draining = true;
            this.conn.as_mut().begin_drain();
        }
        if let Poll::Ready(result) = this.conn.as_mut().poll(cx) {
            if let Err(error) = result {
                tracing::debug!(%error, peer = %this.downstream.peer, "connection ended");
            }
            let flooded = this.io.is_flooded();
            return Poll::Ready(if flooded { End::Pipelined } else { End::Closed });
        }
        if this.io.is_blocked() && this.downstream.reader().is_ended() {
            this.downstream.break_off();
            return Poll::Ready(End::Stopped);
        }
        this.wait = this.look();
        match this.poll_limit(cx) {
            Some(end) => {
                if end == End::Write {
                    this.downstream.set_stalled();
                }
                Poll::Ready(end)
            }
            None => Poll::Pending,
        }
    }
}
