//! The limits of a client connection: slow heads, idle keep-alive, stalled readers, drain. The same for both versions of HTTP.
//!
//! The guard polls the connection and looks, after each poll, at what the socket and the calls were doing. It has one timer, which is only
//! touched when a limit really begins to run: a streaming connection pays nothing for it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep};

use super::socket::IoState;
use crate::call::downstream::{Downstream, GOODBYE};
use crate::signal::Watch;

/// A connection that can be told to finish.
pub trait Drainable: Future<Output = Result<(), Self::Error>> {
    type Error: std::fmt::Display;

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
pub enum ConnectionEnd {
    /// In HTTP's own way, or by the client.
    Closed,
    Tls,
    /// In clear text, where TLS is spoken.
    PlainHttp,
    RequestHead,
    KeepAlive,
    Write,
    /// Its call was ended from outside, and the client reads nothing that could tell it.
    Stopped,
    /// More bytes came behind a request than are kept for later.
    Pipelined,
}

impl ConnectionEnd {
    /// A client that may be about to ask is told first (RFC 9113 §6.8): it knows then that what it sent later was not begun.
    fn is_announced(self) -> bool {
        matches!(self, Self::RequestHead | Self::KeepAlive)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Tls => "tls",
            Self::PlainHttp => "plain_http",
            Self::RequestHead => "request_head",
            Self::KeepAlive => "keep_alive",
            Self::Write => "write",
            Self::Stopped => "stopped",
            Self::Pipelined => "pipelined",
        }
    }
}

/// What the guard of a connection looks at.
#[derive(Debug)]
pub struct Guarded {
    pub io: Arc<IoState>,
    pub downstream: Arc<Downstream>,
    /// Since then the head of its first request is awaited.
    pub since: Instant,
}

/// A connection under guard.
// In this order: see `call::relay::Relay`.
#[repr(C)]
#[derive(Debug)]
pub struct Guard<C> {
    conn: Pin<Box<C>>,
    io: Arc<IoState>,
    downstream: Arc<Downstream>,
    drain: Watch,
    draining: bool,
    /// Why it ends, once the client is told.
    end: Option<ConnectionEnd>,
    wait: Wait,
    seen: Seen,
    limits: Limits,
    sleep: Option<Pin<Box<Sleep>>>,
    /// Until then the timer has been asked to wake us.
    armed: Option<Instant>,
}

/// Which limit runs, since when.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wait {
    Nothing,
    Head(Instant),
    Idle(Instant),
    Write(Instant),
    /// The client is told that its connection ends.
    Goodbye(Instant),
}

/// Counters at the last look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    reads: u64,
    writes: u64,
    entered: u64,
}

impl<C: Drainable> Guard<C> {
    pub fn new(conn: C, guarded: Guarded, limits: Limits, drain: Watch) -> Self {
        let Guarded {
            io,
            downstream,
            since,
        } = guarded;
        Self {
            conn: Box::pin(conn),
            io,
            downstream,
            limits,
            drain,
            draining: false,
            end: None,
            wait: Wait::Head(since),
            sleep: None,
            armed: None,
            seen: Seen::default(),
        }
    }

    fn tell(&mut self) {
        self.downstream.tell();
        self.conn.as_mut().begin_drain();
    }

    fn count(&self) -> Seen {
        Seen {
            reads: self.io.reads(),
            writes: self.io.writes(),
            entered: self.downstream.entered(),
        }
    }

    /// Looks at what happened since the last poll and says which limit runs now.
    fn look(&mut self, at: Instant) -> Wait {
        let now = self.count();
        let before = std::mem::replace(&mut self.seen, now);
        if self.io.is_blocked() {
            return match self.wait {
                Wait::Write(since) if before.writes == now.writes => Wait::Write(since),
                _ => Wait::Write(at),
            };
        }
        if let (Some(_), Some(told)) = (self.end, self.downstream.told()) {
            return Wait::Goodbye(told);
        }
        let first = now.entered == 0;
        let new_request = before.entered != now.entered;
        let reading = before.reads != now.reads && !new_request && !self.downstream.http2;
        match self.wait {
            Wait::Head(since) if !new_request => Wait::Head(since),
            _ if first || reading => Wait::Head(at),
            Wait::Idle(since) if !new_request => Wait::Idle(since),
            _ => Wait::Idle(at),
        }
    }

    fn limit(&self) -> Option<(Instant, ConnectionEnd)> {
        match self.wait {
            Wait::Nothing => None,
            Wait::Head(since) => {
                Some((since + self.limits.request_head, ConnectionEnd::RequestHead))
            }
            Wait::Idle(since) => Some((since + self.limits.keep_alive, ConnectionEnd::KeepAlive)),
            Wait::Write(since) => Some((since + self.limits.write, ConnectionEnd::Write)),
            Wait::Goodbye(since) => Some((since + GOODBYE, self.end?)),
        }
    }

    /// Whether the running limit is over; arms the timer for it otherwise.
    fn poll_limit(&mut self, cx: &mut Context<'_>, now: Instant) -> Option<ConnectionEnd> {
        loop {
            let (until, end) = self.limit()?;
            if until <= now {
                return Some(end);
            }
            // A timer that fires before that wakes us, and we look again.
            if self.armed.is_some_and(|at| now < at && at <= until) {
                return None;
            }
            let sleep = self
                .sleep
                .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
            sleep.as_mut().reset(until);
            self.armed = Some(until);
            if sleep.as_mut().poll(cx).is_pending() {
                return None;
            }
            self.armed = None;
        }
    }
}

impl<C: Drainable> Future for Guard<C> {
    type Output = ConnectionEnd;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<ConnectionEnd> {
        let this = &mut *self;
        if !this.draining && this.drain.poll_raised(cx) {
            this.draining = true;
            this.tell();
        }
        if let Poll::Ready(result) = this.conn.as_mut().poll(cx) {
            if let Err(error) = result {
                tracing::debug!(%error, peer = %this.downstream.peer, "connection ended");
            }
            let flooded = this.io.is_flooded();
            return Poll::Ready(if flooded {
                ConnectionEnd::Pipelined
            } else {
                this.end.unwrap_or(ConnectionEnd::Closed)
            });
        }
        if this.io.is_blocked() && this.downstream.reader().is_ended() {
            this.downstream.break_off();
            return Poll::Ready(ConnectionEnd::Stopped);
        }
        if this.downstream.active() > 0 && !this.io.is_blocked() {
            // Nothing runs while an answer is awaited or flows.
            this.seen = this.count();
            this.wait = Wait::Nothing;
            return Poll::Pending;
        }
        let now = Instant::now();
        this.wait = this.look(now);
        match this.poll_limit(cx, now) {
            Some(end) if this.downstream.http2 && end.is_announced() && this.end.is_none() => {
                this.end = Some(end);
                this.tell();
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            Some(end) => {
                if end == ConnectionEnd::Write {
                    this.downstream.set_stalled();
                }
                Poll::Ready(end)
            }
            None => Poll::Pending,
        }
    }
}
