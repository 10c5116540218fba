//! An answer that is put on a tape while it passes, and that goes on when its client leaves.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, Bytes};
use http_body::Frame;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::orphan::{Who, Writer};
use super::tape::Full;
use crate::call::Toward;
use crate::call::answer::{Answer, AnswerHead};
use crate::call::body::{Broken, OutBody};
use crate::call::entry::{Entry, WorkState};
use crate::call::outcome::{Rejection, WaitEnd};
use crate::call::relay::Relay;
use crate::call::settle::Record;
use crate::signal::Signal;
use crate::telemetry::metrics::{BoundLabels, Metrics};

/// What goes with a tapped answer.
#[derive(Clone, Debug)]
pub struct Around {
    grace: Duration,
    upstream: Arc<str>,
    metrics: Arc<Metrics>,
    tasks: TaskTracker,
    cut: Signal,
}

/// The body of an answer whose client is there.
#[derive(Debug)]
pub struct Tapped {
    /// `None`: it goes on elsewhere.
    relay: Option<Box<Relay>>,
    /// `None`: the tape is full.
    writer: Option<Writer>,
    /// Bytes that are still to be handed on, where the length is known.
    rest: Option<u64>,
}

impl Around {
    pub(super) fn new(Toward { worker, upstream }: Toward<'_>) -> Option<Self> {
        Some(Self {
            grace: upstream.settings.attach?.grace,
            upstream: Arc::clone(&upstream.name),
            metrics: Arc::clone(&worker.caller.metrics),
            tasks: worker.tasks.clone(),
            cut: worker.caller.cut.clone(),
        })
    }

    fn count_lost(&self, full: Full) {
        let bound = match full {
            Full::Own => "bytes",
            Full::All => "total",
        };
        let labels = BoundLabels {
            upstream: Arc::clone(&self.upstream),
            bound,
        };
        self.metrics.attach_lost.get_or_create(&labels).inc();
    }
}

/// An answer on its way. It goes to whoever waits: the client that began the call, or its retry.
pub fn relaying(head: AnswerHead, mut relay: Relay, writer: Writer) -> Answer {
    writer.begin(&head, relay.exact_length());
    if writer.who() == Who::First {
        let tapped = Tapped {
            rest: relay.exact_length(),
            relay: Some(Box::new(relay)),
            writer: Some(writer),
        };
        let body = OutBody::tapped(Box::new(tapped));
        return Answer { head, body };
    }
    relay.detach();
    Pump::start(Work::Relay(Box::new(relay)), writer);
    Answer {
        head,
        body: OutBody::broken(),
    }
}

/// A whole answer.
pub fn whole(head: AnswerHead, bytes: Bytes, writer: Writer, mut record: Box<Record>) -> Answer {
    if writer.who() == Who::First {
        record.settle();
        return Answer::whole(head, bytes);
    }
    writer.begin(&head, Some(bytes.len() as u64));
    Pump::start(Work::Whole(Some(bytes), Some(record)), writer);
    Answer {
        head,
        body: OutBody::broken(),
    }
}

impl Tapped {
    pub fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let Some(relay) = &mut self.relay else {
            return Poll::Ready(Some(Err(Broken)));
        };
        let mut is_taken = |writer: &Writer| {
            writer
                .orphan()
                .poll_changed(cx, Who::First, false)
                .is_ready()
        };
        if self.writer.as_ref().is_some_and(&mut is_taken) {
            self.go_on();
            return Poll::Ready(Some(Err(Broken)));
        }
        let mut polled = relay.poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &polled {
            let length = frame.data_ref().map_or(0, Bytes::len) as u64;
            self.rest = self.rest.map(|rest| rest.saturating_sub(length));
            if self.rest == Some(0) {
                // Where the length is known the connection does not ask for the end; it is usually here already.
                let mut here = Context::from_waker(std::task::Waker::noop());
                if let Poll::Ready(Some(Err(broken))) = relay.poll_frame(&mut here) {
                    polled = Poll::Ready(Some(Err(broken)));
                }
                relay.no_orphan();
                self.writer = None;
            }
        }
        let Some(writer) = &self.writer else {
            return polled;
        };
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                let bytes = frame.data_ref().filter(|_| !relay.was_beat());
                let full = bytes.and_then(|bytes| writer.push(bytes).1);
                if let Some(full) = full {
                    writer.around.count_lost(full);
                    relay.no_orphan();
                    self.writer = None;
                }
            }
            // The answer is handed on in full, or cannot be: there is nothing left to take up.
            Poll::Ready(_) => self.writer = None,
            Poll::Pending => {}
        }
        polled
    }

    pub fn is_done(&self) -> bool {
        self.relay.as_ref().is_some_and(|relay| relay.is_done())
    }

    pub fn exact_length(&self) -> Option<u64> {
        self.relay.as_ref()?.exact_length()
    }

    /// The work goes on in a task of its own, if there is any.
    fn go_on(&mut self) {
        let (Some(mut relay), Some(writer)) = (self.relay.take(), self.writer.take()) else {
            return;
        };
        // Outside a runtime (a worker that is being torn down) it ends, and its own drop sees to the rest.
        let here = tokio::runtime::Handle::try_current().is_ok() && !std::thread::panicking();
        if here && relay.is_running() {
            writer.orphan().first_left();
            relay.detach();
            Pump::start(Work::Relay(relay), writer);
        }
    }
}

impl Drop for Tapped {
    /// The client left.
    fn drop(&mut self) {
        self.go_on();
    }
}

/// What goes on.
enum Work {
    Relay(Box<Relay>),
    /// It is over, and its answer is here.
    Whole(Option<Bytes>, Option<Box<Record>>),
}

/// Carries an answer to its tape while no connection does.
struct Pump {
    work: Work,
    writer: Writer,
    entry: Arc<Entry>,
    /// What came and is not put down yet.
    pending: VecDeque<Bytes>,
}

/// How the work of a pump ended.
enum Over {
    /// The answer is on the tape; who has it is not known yet.
    Kept(WaitEnd, Box<Record>),
    /// It goes the way of any call that is left.
    Left,
}

impl Pump {
    fn start(work: Work, writer: Writer) {
        let tasks = writer.around.tasks.clone();
        let pump = Self {
            entry: Arc::clone(&writer.orphan().entry),
            work,
            writer,
            pending: VecDeque::new(),
        };
        tasks.spawn(pump.run());
    }

    fn around(&self) -> &Around {
        &self.writer.around
    }

    async fn run(mut self) {
        match self.carry().await {
            Over::Kept(wait, record) => self.keep(wait, record).await,
            Over::Left => {
                if let Some((_, mut record)) = self.work.take_kept() {
                    record.away_now();
                    record.settle();
                }
                if let Work::Relay(relay) = &mut self.work {
                    relay.no_orphan();
                }
                // Dropped together: the relay hands over what it still has, the writer says that it is over.
            }
        }
    }

    /// Until the answer is on the tape in full.
    async fn carry(&mut self) -> Over {
        let mut stopped = false;
        loop {
            let Ok(who) = self.follow() else {
                // Unless a retry has just sat down.
                if self.gives_up() {
                    return Over::Left;
                }
                continue;
            };
            let full = self.put_down();
            if let (Some(full), Who::Nobody) = (full, who)
                && self.gives_up()
            {
                self.around().count_lost(full);
                return Over::Left;
            }
            if full.is_none()
                && let Some(over) = self.over()
            {
                return over;
            }
            // Without room it is asked for nothing more, unless it is to end.
            let wanted = full.is_none() || stopped;
            let nobody = who == Who::Nobody;
            let cut = &self.writer.around.cut;
            let orphan = self.writer.orphan();
            let until = self.work.until();
            tokio::select! {
                biased;
                polled = std::future::poll_fn(|cx| self.work.poll(cx)), if wanted && !self.work.is_over() => {
                    if self.came(polled, nobody) && self.gives_up() {
                        return Over::Left;
                    }
                }
                () = self.writer.changed(who, full.is_some()) => {}
                _ = self.entry.stop(), if !stopped => stopped = true,
                () = cut.raised(), if !stopped => stopped = true,
                () = orphan.closing(), if nobody => if self.gives_up() {
                    return Over::Left;
                },
                () = sleep_until(until), if nobody => if self.gives_up() {
                    self.work.late();
                    return Over::Left;
                },
            }
        }
    }

    /// Nobody can take it up from now on; false if a retry just has.
    fn gives_up(&self) -> bool {
        self.writer.orphan().close_unless_taken()
    }

    /// Takes what the work gave; true if it is past a bound of what may come for nobody.
    fn came(&mut self, polled: Option<Result<Frame<Bytes>, Broken>>, nobody: bool) -> bool {
        match polled {
            Some(Ok(frame)) => {
                let bytes = frame.into_data().unwrap_or_default();
                if self.work.was_beat() {
                    self.writer.beat();
                    return false;
                }
                let length = bytes.len();
                self.pending.push_back(bytes);
                nobody && self.work.read_alone(length)
            }
            Some(Err(Broken)) | None => false,
        }
    }

    /// The work has ended and all of it is put down.
    fn over(&mut self) -> Option<Over> {
        if !self.work.is_over() {
            return None;
        }
        let kept = self.work.take_kept();
        Some(kept.map_or(Over::Left, |(wait, record)| Over::Kept(wait, record)))
    }

    /// Moves what came to the tape, as far as there is room.
    fn put_down(&mut self) -> Option<Full> {
        while let Some(bytes) = self.pending.front_mut() {
            let (taken, full) = self.writer.push(bytes);
            bytes.advance(taken);
            if full.is_some() {
                return full;
            }
            self.pending.pop_front();
        }
        None
    }

    /// The answer is on the tape. It is kept until somebody has had it or the grace is over.
    async fn keep(self, wait: WaitEnd, mut record: Box<Record>) {
        self.writer.ended(wait == WaitEnd::Answered);
        let Around {
            metrics,
            grace,
            cut,
            ..
        } = self.around();
        let orphan = self.writer.orphan();
        let kept = Kept::new(metrics);
        loop {
            let who = self.writer.who();
            let delivered = self.writer.is_delivered();
            if delivered || matches!(who, Who::Retry(_)) {
                record.back();
                record.taken_up(orphan.seats());
                self.entry.attended_again();
            } else {
                if record.away_now() {
                    self.entry.left_for_now();
                }
                self.entry.state(WorkState::Kept);
            }
            let away = record.away_since().filter(|_| !delivered);
            let open = orphan.is_open();
            if delivered || self.entry.stopped().is_some() || (away.is_some() && !open) {
                break;
            }
            tokio::select! {
                biased;
                () = self.writer.changed(who, false) => {}
                _ = self.entry.stop() => {}
                () = cut.raised() => break,
                () = orphan.closing(), if away.is_some() => if self.gives_up() { break },
                () = sleep_until(away.map(|at| at + *grace)) => if self.gives_up() { break },
            }
        }
        drop(kept);
        record.wait_ended(wait);
        record.settle();
    }

    /// Goes by who waits now. An error: nobody does, and the contract lets the call go on no longer.
    fn follow(&mut self) -> Result<Who, Rejection> {
        match &mut self.work {
            Work::Relay(relay) if relay.is_running() => relay.follow(),
            _ => Ok(self.writer.who()),
        }
    }
}

impl Work {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        match self {
            Self::Relay(relay) => relay.poll_frame(cx),
            Self::Whole(bytes, _) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
        }
    }

    /// Nothing more will come.
    fn is_over(&self) -> bool {
        match self {
            Self::Relay(relay) => relay.is_done(),
            Self::Whole(bytes, _) => bytes.is_none(),
        }
    }

    fn was_beat(&mut self) -> bool {
        match self {
            Self::Relay(relay) => relay.was_beat(),
            Self::Whole(..) => false,
        }
    }

    fn read_alone(&mut self, bytes: usize) -> bool {
        match self {
            Self::Relay(relay) => relay.read_alone(bytes),
            Self::Whole(..) => false,
        }
    }

    fn until(&self) -> Option<Instant> {
        match self {
            Self::Relay(relay) => relay.until(),
            Self::Whole(..) => None,
        }
    }

    fn late(&mut self) {
        if let Self::Relay(relay) = self {
            relay.late();
        }
    }

    fn take_kept(&mut self) -> Option<(WaitEnd, Box<Record>)> {
        match self {
            Self::Relay(relay) => relay.take_kept(),
            Self::Whole(_, record) => Some((WaitEnd::Answered, record.take()?)),
        }
    }
}

async fn sleep_until(until: Option<Instant>) {
    match until {
        Some(until) => tokio::time::sleep_until(until).await,
        None => std::future::pending().await,
    }
}

/// One of the answers that are kept.
struct Kept<'a>(&'a Metrics);

impl<'a> Kept<'a> {
    fn new(metrics: &'a Metrics) -> Self {
        metrics.attach_kept.inc();
        Self(metrics)
    }
}

impl Drop for Kept<'_> {
    fn drop(&mut self) {
        self.0.attach_kept.dec();
    }
}
