//! What is done when a call no longer has a client, or no longer an answer.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tidegate_limiter::{Ended, Slot};
use tidegate_wire::Dialect;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::answer::Commit;
use super::attempt::Exchange;
use super::attendance::Attendance;
use super::confirm::Closed;
use super::contract::{self, Bound};
use super::deadline::{Patience, Tier};
use super::entry::{Entry, WorkState};
use super::handover::boxed;
use super::outcome::{Outcome, Rejection, WaitEnd, WorkEnd};
use super::settle::Record;
use super::source::Source;
use super::table::Listed;
use super::{Held, Toward, Worker};
use crate::config::Confirm;
use crate::fields::UpstreamHead;
use crate::signal::Signal;
use crate::upstream::endpoint::InFlight;
use crate::upstream::exchange::{Failure, UpstreamBody};
use crate::upstream::http1::Http1;
use crate::upstream::{EndpointState, Upstream};

/// After its last event an answer may take this long to end in HTTP's sense; a connection that does is kept.
const TAIL_TIME: Duration = Duration::from_millis(100);

/// Everything that a call holds upstream, from its head to its end.
#[derive(Debug)]
pub struct Running {
    body: UpstreamBody,
    held: Held,
    in_flight: InFlight,
    keep_idle: Duration,
    worker: Arc<Worker>,
    dialect: Dialect,
    /// Bytes that were read for nobody.
    read_alone: u64,
    total: Option<Instant>,
    /// The status was not a success: a broken body is still worth its beginning.
    pub is_error: bool,
    /// The exchange broke by itself: nobody knows what the server does now.
    broke: bool,
}

impl Running {
    /// An answer has begun: its head, and what goes on. Boxed: it is handed on several times.
    pub fn begin(
        exchange: Exchange,
        held: Held,
        commit: &Commit<'_>,
    ) -> (Box<UpstreamHead>, Box<Self>) {
        let is_error = !exchange.head.status.is_success();
        let running = boxed(|| Self {
            body: exchange.body,
            held,
            in_flight: exchange.in_flight,
            keep_idle: exchange.keep_idle,
            worker: Arc::clone(commit.worker),
            dialect: commit.route.dialect,
            read_alone: 0,
            total: commit.patience.total,
            is_error,
            broke: false,
        });
        (exchange.head, running)
    }

    /// What came was no answer's end but a connection's.
    pub fn broke(&mut self) {
        self.broke = true;
    }

    pub fn body(&mut self) -> &mut UpstreamBody {
        &mut self.body
    }

    /// The next bytes of the body, as long as anybody waits for them or the contract goes on.
    ///
    /// # Errors
    ///
    /// As [`Attendance::within`].
    pub async fn next(
        &mut self,
        patience: &Patience<'_>,
        tier: Tier,
        limit: Duration,
        record: &mut Record,
    ) -> Result<Option<Result<Bytes, Failure>>, Rejection> {
        let attendance = &mut self.held.attendance;
        let data = {
            let work = pin!(listen(&mut self.body, record.listed_entry()));
            attendance.within(patience, tier, limit, work).await?
        };
        self.broke |= matches!(data, Some(Err(_)));
        if attendance.is_orphan() {
            record.left(attendance);
        }
        if attendance.left_at().is_some() {
            record.left(attendance);
            let bytes = data
                .as_ref()
                .map_or(0, |data| data.as_ref().map_or(0, Bytes::len));
            self.read_alone += bytes as u64;
        }
        Ok(data)
    }

    /// Whether a call that goes on for nobody has had all that its contract allows; `tokens`: those that came for nobody.
    pub fn is_past_bound(&mut self, tokens: u64) -> bool {
        let attendance = &mut self.held.attendance;
        let Some(bound) = attendance.passed(self.read_alone, tokens) else {
            return false;
        };
        attendance.overran(bound);
        true
    }

    pub fn attendance(&self) -> &Attendance {
        &self.held.attendance
    }

    pub fn attendance_mut(&mut self) -> &mut Attendance {
        &mut self.held.attendance
    }

    pub fn cut(&self) -> &Signal {
        &self.worker.caller.cut
    }

    /// So many bytes of a call that goes on for nobody came.
    pub fn read_alone(&mut self, bytes: usize) {
        self.read_alone += bytes as u64;
    }

    /// How much is still to come, where that is known.
    pub fn exact_length(&self) -> Option<u64> {
        if self.is_complete() {
            return Some(0);
        }
        self.body.exact_length()
    }

    pub fn is_complete(&self) -> bool {
        self.body.is_complete()
    }

    /// The server has finished, well or badly: the slot goes back at once, unless the exchange broke and the contract keeps it then. The
    /// connection is kept if it ended properly.
    pub fn ended(self: Box<Self>, why: WorkEnd, record: &mut Record) {
        let now = record.work_ended(why);
        let kept = contract::kept_broken(&self.upstream().settings);
        if self.broke && why == WorkEnd::Failed && !kept.is_zero() {
            self.leftover(kept, Ended::Error)
                .give_back(self.held.slot, record);
            self.held.attendance.done();
            return;
        }
        let ended = if why == WorkEnd::Complete {
            Ended::Ok
        } else {
            Ended::Error
        };
        self.held.slot.finish(ended);
        self.held.attendance.done();
        if why != WorkEnd::Complete {
            return;
        }
        let (worker, body, keep_idle) = (self.worker, self.body, self.keep_idle);
        if body.is_complete() {
            if let Some(conn) = body.into_idle() {
                worker.pool.put(conn, now, keep_idle);
            }
        } else if tokio::runtime::Handle::try_current().is_ok() {
            let pool = Arc::clone(&worker.pool);
            worker.tasks.spawn(async move {
                if let Some(conn) = tail(body).await {
                    pool.put(conn, Instant::now(), keep_idle);
                }
            });
        }
    }

    fn upstream(&self) -> &Arc<Upstream> {
        self.held.attendance.upstream()
    }

    fn leftover(&self, kept: Duration, ended: Ended) -> Leftover {
        Leftover {
            worker: Arc::clone(&self.worker),
            upstream: Arc::clone(self.upstream()),
            endpoint: Some(Arc::clone(self.in_flight.endpoint())),
            kept,
            ended,
        }
    }

    /// We end the exchange: it is closed (HTTP/1) or reset (HTTP/2) here and now; the slot is kept as long as the contract says.
    fn cancelled(self: Box<Self>, client_left: bool, record: &mut Record) {
        let kept = record.kept_by_contract(&self.upstream().settings);
        let leftover = self.leftover(kept, Ended::Cancelled);
        let Held { slot, attendance } = self.held;
        record.left(&attendance);
        if client_left {
            drop(attendance);
            drop(self.body);
        } else {
            drop(self.body);
            attendance.done();
        }
        record.work_ended(WorkEnd::Cancelled);
        leftover.give_back(slot, record);
    }
}

/// What may run on where an exchange was closed.
struct Leftover {
    worker: Arc<Worker>,
    upstream: Arc<Upstream>,
    endpoint: Option<Arc<EndpointState>>,
    /// How long the contract keeps the slot.
    kept: Duration,
    ended: Ended,
}

impl Leftover {
    /// Gives the slot back once it was kept long enough, or the server shows that nothing runs on; or at once if the operator says so.
    fn give_back(self, slot: Slot, record: &mut Record) {
        let (kept, ended) = (self.kept, self.ended);
        // Without a runtime there is no timer, and nothing must be kept for ever.
        if record.is_killed() || tokio::runtime::Handle::try_current().is_err() {
            slot.finish(ended);
            return;
        }
        let asks = self.upstream.settings.abandon.confirm != Confirm::Off
            && record.has_worked()
            && (ended == Ended::Cancelled || !kept.is_zero());
        if let (true, Some(endpoint)) = (asks, self.endpoint) {
            let (keeper, arrives) = oneshot::channel();
            let closed = Closed {
                upstream: self.upstream,
                endpoint,
                generation: Arc::clone(record.generation()),
                linger: slot.linger_as(ended),
                kept,
                first_token: record.first_token_at(),
                listed: lingering(record),
                record: arrives,
            };
            record.wait_for(keeper);
            let inquiries = self.worker.inquiries.clone();
            inquiries.keep(&self.worker, closed);
            return;
        }
        if kept.is_zero() {
            slot.finish(ended);
            return;
        }
        record.keeps(kept);
        let lingers = slot.linger_as(ended);
        let listed = lingering(record);
        // Nothing waits for it: with the gateway's end there is no slot to keep.
        self.worker.drivers.spawn(async move {
            let killed = async {
                match &listed {
                    Some(listed) => listed.entry().killed().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = tokio::time::sleep(kept) => {}
                () = killed => {}
            }
            drop(lingers);
        });
    }
}

/// The call's place, for as long as its slot is kept.
fn lingering(record: &mut Record) -> Option<Listed> {
    let listed = record.hand_over_place();
    if let Some(listed) = &listed {
        listed.entry().state(WorkState::Lingering);
    }
    listed
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

/// The next bytes; as long as there are none the call is seen to listen.
async fn listen(
    body: &mut UpstreamBody,
    entry: Option<&Arc<Entry>>,
) -> Option<Result<Bytes, Failure>> {
    poll_fn(|cx| {
        let polled = body.poll_data(cx);
        if let Some(entry) = entry {
            entry.listens(polled.is_pending());
        }
        polled
    })
    .await
}

/// The call ended before its answer began, after an exchange had begun.
pub fn gave_up(mut running: Box<Running>, rejection: &Rejection, record: &mut Record) {
    note(rejection, record);
    running.held.attendance.tell(rejection);
    match rejection {
        Rejection::Truncated | Rejection::UpstreamFailed(_) => {
            running.ended(WorkEnd::Failed, record);
        }
        _ => running.cancelled(matches!(rejection, Rejection::Gone), record),
    }
}

/// The call ended before there was an exchange, but with a slot.
pub fn never_answered(
    Toward { worker, upstream }: Toward<'_>,
    held: Held,
    rejection: Rejection,
    record: &mut Record,
) -> Rejection {
    note(&rejection, record);
    let Held {
        slot,
        mut attendance,
    } = held;
    attendance.tell(&rejection);
    let (why, kept) = match rejection {
        Rejection::Gone
        | Rejection::Stopped(_)
        | Rejection::Timeout(Tier::ResponseHead | Tier::Total)
        | Rejection::Draining => (
            WorkEnd::Cancelled,
            record.kept_by_contract(&upstream.settings),
        ),
        _ => (WorkEnd::Failed, contract::kept_broken(&upstream.settings)),
    };
    // A server that was sent nothing has nothing to settle.
    let kept = if record.has_worked() {
        kept
    } else {
        Duration::ZERO
    };
    record.work_ended(why);
    let leftover = Leftover {
        worker: Arc::clone(worker),
        upstream: Arc::clone(upstream),
        endpoint: record.endpoint().cloned(),
        kept,
        ended: match why {
            WorkEnd::Cancelled => Ended::Cancelled,
            _ => Ended::Error,
        },
    };
    // A client that left abandons what is kept; one that has its answer does not.
    if matches!(rejection, Rejection::Gone) {
        drop(attendance);
        leftover.give_back(slot, record);
    } else {
        leftover.give_back(slot, record);
        attendance.done();
    }
    rejection
}

/// We give up an answer under way whose client is still there.
pub fn cancel(running: Box<Running>, record: &mut Record) {
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
pub fn client_left(running: Box<Running>, source: Source, mut record: Box<Record>, stalled: bool) {
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
        fulfil(running, source, &mut record).await;
        record.settle();
    });
}

/// Does what the contract says for a call without a client.
async fn fulfil(mut running: Box<Running>, mut source: Source, record: &mut Record) {
    if running.is_complete() {
        // Only its client was slow: the server has no part in that.
        source.see_end(running.dialect, &mut record.meter);
        return running.ended(WorkEnd::Complete, record);
    }
    let entry = record.listed_entry().map(Arc::as_ref);
    if running.held.attendance.leave(entry).is_err() {
        running.cancelled(true, record);
        return;
    }
    let why = Box::pin(read_on(&mut running, source, record)).await;
    record.left(&running.held.attendance);
    match why {
        WorkEnd::Cancelled => running.cancelled(true, record),
        why => running.ended(why, record),
    }
}

/// Reads an answer to its end, for nobody, so that its slot is held as long as the work runs and what it used is known. It is counted as
/// abandoned meanwhile. It ends with its terminal event, and at the latest at a bound of its contract, when the upstream falls silent, or
/// when its total time is up.
async fn read_on(running: &mut Running, mut source: Source, record: &mut Record) -> WorkEnd {
    let silence = running.upstream().settings.timeouts.silence;
    let entry = record.listed_entry().cloned();
    let killed = async {
        match &entry {
            Some(entry) => entry.killed().await,
            None => std::future::pending().await,
        }
    };
    tokio::pin!(killed);
    // What had come before is looked at first: it may hold the end.
    let mut data = Some(Ok(Bytes::new()));
    loop {
        match data {
            Some(Ok(data)) => {
                running.read_alone += data.len() as u64;
                let ended = source.see(data, &mut record.meter);
                record.show_tokens();
                if ended {
                    return WorkEnd::Complete;
                }
            }
            None => {
                source.see_end(running.dialect, &mut record.meter);
                return WorkEnd::Complete;
            }
            Some(Err(_)) => {
                running.broke = true;
                return WorkEnd::Failed;
            }
        }
        if running.is_past_bound(record.meter.since_left()) {
            return WorkEnd::Cancelled;
        }
        let quiet = Instant::now() + silence;
        let until = running.total.map_or(quiet, |total| total.min(quiet));
        let bound = running.held.attendance.until();
        let bound = bound.filter(|bound| *bound < until);
        data = tokio::select! {
            biased;
            () = running.worker.caller.cut.raised() => return WorkEnd::Cancelled,
            () = &mut killed => return WorkEnd::Cancelled,
            data = listen(&mut running.body, entry.as_ref()) => data,
            () = tokio::time::sleep_until(bound.unwrap_or(until)) => {
                if bound.is_some() {
                    running.held.attendance.overran(Bound::Time);
                }
                return WorkEnd::Cancelled;
            }
        };
    }
}
