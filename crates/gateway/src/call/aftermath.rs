//! What is done when a call no longer has a client, or no longer an answer.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tidegate_limiter::{Ended, Slot};
use tidegate_wire::{Dialect, StreamScanner};
use tokio::time::Instant;

use super::answer::Commit;
use super::outcome::{Outcome, Rejection, WaitEnd, WorkEnd};
use super::settle::Record;
use super::{Worker, deadline::Tier};
use crate::admission::Held;
use crate::signal::Signal;
use crate::upstream::Upstream;
use crate::upstream::endpoint::InFlight;
use crate::upstream::exchange::UpstreamBody;
use crate::upstream::http1::Http1;

/// How much of one event is held while an answer is read for nobody.
const HELD_BYTES: usize = 64 * 1024;
/// After its last event an answer may take this long to end in HTTP's sense; a connection that does is kept.
const TAIL_TIME: Duration = Duration::from_millis(100);

/// Everything that a call holds upstream, from its head to its end.
#[derive(Debug)]
pub struct Running {
    body: UpstreamBody,
    held: Held,
    _in_flight: InFlight,
    keep_idle: Duration,
    worker: Arc<Worker>,
    upstream: Arc<Upstream>,
    background: bool,
    /// The dialect of its events, if the answer is a stream.
    events: Option<Dialect>,
    total: Option<Instant>,
    cut: Signal,
    /// The status was not a success: a broken body is still worth its beginning.
    pub is_error: bool,
}

impl Running {
    pub fn new(
        body: UpstreamBody,
        held: Held,
        in_flight: InFlight,
        keep_idle: Duration,
        commit: &Commit<'_>,
    ) -> Self {
        Self {
            body,
            held,
            _in_flight: in_flight,
            keep_idle,
            worker: Arc::clone(commit.worker),
            upstream: Arc::clone(commit.upstream),
            background: commit.wish.background,
            events: commit.wish.events().then_some(commit.route.dialect),
            total: commit.patience.total,
            cut: commit.patience.cut().clone(),
            is_error: false,
        }
    }

    pub fn body(&mut self) -> &mut UpstreamBody {
        &mut self.body
    }

    pub fn exact_length(&self) -> Option<u64> {
        self.body.exact_length()
    }

    pub fn is_complete(&self) -> bool {
        self.body.is_complete()
    }

    /// The server has finished, well or badly: the slot goes back at once. The connection is kept if it ended properly.
    pub fn ended(self, why: WorkEnd, record: &mut Record) {
        record.work_ended(why);
        let ended = if why == WorkEnd::Complete {
            Ended::Ok
        } else {
            Ended::Error
        };
        self.held.slot.finish(ended);
        self.held.waiter.done();
        if why != WorkEnd::Complete {
            return;
        }
        let (worker, keep_idle) = (self.worker, self.keep_idle);
        if self.body.is_complete() {
            if let Some(conn) = self.body.into_idle() {
                worker.pool.put(conn, keep_idle);
            }
        } else if tokio::runtime::Handle::try_current().is_ok() {
            let pool = Arc::clone(&worker.pool);
            worker.tasks.spawn(async move {
                if let Some(conn) = tail(self.body).await {
                    pool.put(conn, keep_idle);
                }
            });
        }
    }

    /// We end the exchange: it is closed (HTTP/1) or reset (HTTP/2) here and now; the slot is kept for the upstream's `settle` time.
    fn cancelled(self, waiter_left: bool, record: &mut Record) {
        let settle = self.upstream.settings.settle;
        let Held { slot, waiter, .. } = self.held;
        if waiter_left {
            drop(waiter);
            drop(self.body);
        } else {
            drop(self.body);
            waiter.done();
        }
        record.work_ended(WorkEnd::Cancelled);
        give_back(slot, settle);
    }
}

fn give_back(slot: Slot, settle: Duration) {
    if settle.is_zero() {
        slot.finish(Ended::Cancelled);
    } else {
        slot.linger_for(Ended::Cancelled, settle);
    }
}

/// Reads what follows the last event: nothing but the end of the body, if the server behaves.
async fn tail(mut body: UpstreamBody) -> Option<Box<Http1>> {
    let end = async {
        match body.data().await {
            None => Some(()),
            Some(_) => None,
        }
    };
    tokio::time::timeout(TAIL_TIME, end).await.ok()??;
    body.into_idle()
}

/// The call ended before its answer began, after an exchange had begun.
pub fn gave_up(running: Running, rejection: &Rejection, record: &mut Record) {
    note(rejection, record);
    match rejection {
        Rejection::Truncated | Rejection::UpstreamFailed(_) => {
            running.ended(WorkEnd::Failed, record);
        }
        _ => running.cancelled(matches!(rejection, Rejection::Gone), record),
    }
}

/// The call ended before there was an exchange, but with a slot.
pub fn never_answered(upstream: &Upstream, held: Held, rejection: &Rejection, record: &mut Record) {
    note(rejection, record);
    let Held { slot, waiter, .. } = held;
    // A server that was sent nothing has nothing to settle.
    let settle = if record.has_worked() {
        upstream.settings.settle
    } else {
        Duration::ZERO
    };
    match rejection {
        Rejection::Gone => {
            drop(waiter);
            record.work_ended(WorkEnd::Cancelled);
            give_back(slot, settle);
        }
        Rejection::Timeout(Tier::ResponseHead | Tier::Total) | Rejection::Draining => {
            record.work_ended(WorkEnd::Cancelled);
            give_back(slot, settle);
            waiter.done();
        }
        _ => {
            record.work_ended(WorkEnd::Failed);
            slot.finish(Ended::Error);
            waiter.done();
        }
    }
}

/// We give up an answer under way whose client is still there.
pub fn cancel(running: Running, record: &mut Record) {
    running.cancelled(false, record);
}

/// Why the wait ended, for the record.
pub fn note(rejection: &Rejection, record: &mut Record) {
    if record.has_ended() {
        return;
    }
    if let Rejection::Timeout(tier) = rejection {
        record.timed_out(*tier);
    }
    if matches!(rejection, Rejection::QueueTimeout { .. }) {
        record.timed_out(Tier::Queue);
    }
    record.outcome(rejection.outcome(), Some(rejection.reason()));
    record.wait_ended(if matches!(rejection, Rejection::Gone) {
        WaitEnd::Left
    } else {
        WaitEnd::Answered
    });
}

/// The client of an answer under way has gone. Called from a body's drop: only hands over.
pub fn client_left(running: Running, mut record: Box<Record>, stalled: bool) {
    let (outcome, wait) = if stalled {
        (Outcome::ClientStalled, WaitEnd::Stalled)
    } else {
        (Outcome::ClientClosed, WaitEnd::Left)
    };
    record.outcome(outcome, None);
    record.wait_ended(wait);
    if tokio::runtime::Handle::try_current().is_err() {
        // The worker is being torn down: the exchange ends with it, the record's drop writes the line.
        return;
    }
    let tasks = running.worker.tasks.clone();
    tasks.spawn(async move {
        if stalled {
            record.timed_out(Tier::Write);
        }
        if running.background {
            read_on(running, &mut record).await;
        } else {
            running.cancelled(true, &mut record);
        }
        record.settle();
    });
}

/// A background response goes on by contract: read it to its end, for nobody, so that its slot is held as long as it runs. It is counted as
/// abandoned meanwhile. It ends with its terminal event, and at the latest when the upstream falls silent or its total time is up.
async fn read_on(running: Running, record: &mut Record) {
    let Running {
        mut body,
        held,
        upstream,
        events,
        total,
        cut,
        ..
    } = running;
    let Held { slot, waiter, .. } = held;
    drop(waiter);
    let silence = upstream.settings.timeouts.silence;
    let mut scanner = events.map(|dialect| StreamScanner::new(dialect, HELD_BYTES));
    let why = loop {
        let until = Instant::now() + silence;
        let until = total.map_or(until, |total| total.min(until));
        let data = tokio::select! {
            biased;
            () = cut.raised() => break WorkEnd::Cancelled,
            data = body.data() => data,
            () = tokio::time::sleep_until(until) => break WorkEnd::Cancelled,
        };
        match data {
            Some(Ok(data)) => {
                if sees_the_end(scanner.as_mut(), data, record) {
                    break WorkEnd::Complete;
                }
            }
            None => break WorkEnd::Complete,
            Some(Err(_)) => break WorkEnd::Failed,
        }
    };
    drop(body);
    record.work_ended(why);
    match why {
        WorkEnd::Cancelled => give_back(slot, upstream.settings.settle),
        WorkEnd::Failed => slot.finish(Ended::Error),
        WorkEnd::Complete | WorkEnd::None => slot.finish(Ended::Ok),
    }
}

/// Meters what nobody reads any more; true at the terminal event.
fn sees_the_end(scanner: Option<&mut StreamScanner>, data: Bytes, record: &mut Record) -> bool {
    let Some(scanner) = scanner else { return false };
    scanner.push(data);
    let mut ended = false;
    while let Some(piece) = scanner.pop() {
        record.meter.see(&piece.facts);
        ended |= piece.facts.terminal.is_some();
    }
    ended
}
