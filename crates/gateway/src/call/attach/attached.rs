//! The answer of a call as its retry gets it: what is on the tape, then what comes.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::Frame;
use tokio::time::Instant;

use super::orphan::{FromTape, Seat, TapedHead};
use crate::call::answer::{Answer, AnswerHead};
use crate::call::body::{Broken, OutBody};
use crate::call::clock::Clock;
use crate::call::downstream::{Downstream, Reader};
use crate::call::outcome::{Outcome, Phase, WaitEnd};
use crate::call::relay::{HEARTBEAT, RESET_AFTER};
use crate::call::settle::Record;
use crate::fields::Field;

/// The body of a retry's answer.
#[derive(Debug)]
pub struct Attached {
    seat: Option<Seat>,
    /// Of the retry. The call has its own.
    record: Option<Box<Record>>,
    downstream: Arc<Downstream>,
    reader: Arc<Reader>,
    length: Option<u64>,
    state: AttachedState,
    clock: Clock,
    /// Somebody ended this retry; the call was told.
    told: bool,
    /// As the relay's.
    unflushed: u64,
}

type Polled = Poll<Option<Result<Frame<Bytes>, Broken>>>;

#[derive(Debug, PartialEq, Eq)]
enum AttachedState {
    Flowing,
    /// The answer broke off; the break is passed on when the kernel has what came before. `flushes`: the count before.
    Flushing {
        flushes: u64,
    },
    Done,
}

/// What lacks only its record.
#[derive(Debug)]
pub struct UnstartedAttached {
    pub(super) head: TapedHead,
    pub(super) seat: Seat,
    pub(super) downstream: Arc<Downstream>,
    pub(super) reader: Arc<Reader>,
}

impl UnstartedAttached {
    pub fn start(self, mut record: Box<Record>) -> Answer {
        let TapedHead {
            status,
            mut fields,
            length,
        } = self.head;
        // The id of the call whose answer this is.
        fields.insert(Field::XTidegateAttached, self.seat.entry().id.text());
        if let Some(entry) = record.listed_entry() {
            self.reader.reads(entry);
        }
        record.head();
        record.status(status.as_u16());
        record.phase(Phase::Streaming);
        let attached = Attached {
            unflushed: self.downstream.flushes(),
            seat: Some(self.seat),
            record: Some(record),
            downstream: self.downstream,
            reader: self.reader,
            length,
            state: AttachedState::Flowing,
            clock: Clock::new(Instant::now(), None),
            told: false,
        };
        Answer {
            head: AnswerHead { status, fields },
            body: OutBody::attached(Box::new(attached)),
        }
    }
}

impl Attached {
    pub fn exact_length(&self) -> Option<u64> {
        self.length
    }

    pub fn is_done(&self) -> bool {
        self.state == AttachedState::Done
    }

    pub fn poll_frame(&mut self, cx: &mut Context<'_>) -> Polled {
        loop {
            match &self.state {
                AttachedState::Flowing => {}
                AttachedState::Flushing { flushes } => {
                    let written = self.downstream.flushes() != *flushes;
                    if !written {
                        self.downstream.on_flush(cx.waker());
                        return Poll::Pending;
                    }
                    if self.downstream.http2 {
                        ready!(self.clock.poll_rest(cx, RESET_AFTER));
                    }
                    self.state = AttachedState::Done;
                    return Poll::Ready(Some(Err(Broken)));
                }
                AttachedState::Done => return Poll::Ready(None),
            }
            self.pass_on_stop(cx);
            let Some(seat) = &mut self.seat else {
                self.state = AttachedState::Done;
                continue;
            };
            match ready!(seat.poll_next(cx)) {
                FromTape::Bytes(bytes) => {
                    if let Some(record) = &mut self.record {
                        record.first_byte();
                        record.sent_downstream(bytes.len());
                    }
                    // Where the length is known the connection does not ask for the end.
                    if self.length == Some(seat.at()) || seat.is_at_end() {
                        self.state = AttachedState::Done;
                        if let Some(seat) = self.seat.take() {
                            seat.has_all();
                        }
                        self.end(WaitEnd::Answered, None);
                    }
                    return self.hand(bytes);
                }
                FromTape::Beat => return self.hand(HEARTBEAT),
                FromTape::Complete => {
                    self.state = AttachedState::Done;
                    self.end(WaitEnd::Answered, None);
                }
                FromTape::Broken => self.break_off("broken"),
                FromTape::Replaced => self.break_off("taken_over"),
            }
        }
    }

    fn hand(&mut self, bytes: Bytes) -> Polled {
        self.unflushed = self.downstream.flushes();
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }

    /// Whoever ends the retry means the work: the call is ended, and says so in its answer.
    fn pass_on_stop(&mut self, cx: &mut Context<'_>) {
        let Some(record) = self.record.as_ref().filter(|_| !self.told) else {
            return;
        };
        if let Some(entry) = record.listed_entry()
            && let Poll::Ready(by) = entry.poll_stop(cx)
            && let Some(seat) = &self.seat
        {
            self.told = true;
            self.reader.has_its_end();
            seat.entry().end(by);
        }
    }

    fn break_off(&mut self, reason: &'static str) {
        self.downstream.break_off();
        self.state = AttachedState::Flushing {
            flushes: self.unflushed,
        };
        self.end(WaitEnd::Failed, Some(reason));
    }

    fn end(&mut self, wait: WaitEnd, reason: Option<&'static str>) {
        let stopped = self.seat.take().and_then(|seat| seat.entry().stopped());
        if let Some(mut record) = self.record.take() {
            record.phase(Phase::Done);
            match stopped.filter(|_| wait == WaitEnd::Failed) {
                // The retry or its call, which is the same work: that is why the answer breaks.
                Some(by) => record.stopped(by),
                None => {
                    record.outcome(Outcome::Attached, reason);
                    record.wait_ended(wait);
                }
            }
            record.settle();
        }
    }
}

impl Drop for Attached {
    /// The client has left. Its seat goes with it, and the call sees that.
    fn drop(&mut self) {
        if let Some(mut record) = self.record.take() {
            let stopped = record.listed_entry().and_then(|entry| entry.stopped());
            if let (Some(by), Some(seat)) = (stopped, &self.seat) {
                seat.entry().end(by);
                record.stopped(by);
            } else if self.downstream.is_stalled() || self.reader.is_stalled() {
                record.outcome(Outcome::ClientStalled, None);
                record.wait_ended(WaitEnd::Stalled);
            } else {
                record.outcome(Outcome::ClientClosed, None);
                record.wait_ended(WaitEnd::Left);
            }
            record.settle();
        }
    }
}
