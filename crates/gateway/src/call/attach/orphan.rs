//! A call that can be taken up: what it and whoever waits for it tell each other.
//!
//! The call has the [`Writer`], the one that waits has a [`Seat`]. There is one seat: who sits down last has it. The call's first client needs
//! none as long as it is there, it has the answer from the call itself.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::StatusCode;

use super::tape::{BLOCK_BYTES, Full, Tape};
use super::tapped::Around;
use crate::call::answer::AnswerHead;
use crate::call::entry::Entry;
use crate::call::outcome::Rejection;
use crate::fields::Fields;
use crate::signal::Signal;
use crate::telemetry::metrics::Metrics;

/// Memory of all tapes, and of those of one client key. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Budget {
    all: Arc<AtomicUsize>,
    key: Arc<AtomicUsize>,
    metrics: Arc<Metrics>,
}

/// Bytes that are kept at most.
#[derive(Clone, Copy, Debug)]
pub(super) struct Most {
    /// Of one answer.
    pub(super) own: usize,
    /// Of all answers of one client key.
    pub(super) key: usize,
    pub(super) all: usize,
}

impl Budget {
    pub(super) fn new(metrics: &Arc<Metrics>) -> Self {
        Self {
            all: Arc::default(),
            key: Arc::default(),
            metrics: Arc::clone(metrics),
        }
    }

    /// The same, with what the calls of this key hold.
    pub(super) fn of_key(&self, key: Arc<AtomicUsize>) -> Self {
        Self {
            key,
            ..self.clone()
        }
    }

    /// One block more, if all of them, and all of the key's, stay within bounds.
    fn grant(&self, most: Most) -> bool {
        let add = |used: &AtomicUsize, most: usize| {
            let more = |used: usize| (used + BLOCK_BYTES <= most).then_some(used + BLOCK_BYTES);
            used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
                .is_ok()
        };
        if !add(&self.key, most.key) {
            return false;
        }
        if !add(&self.all, most.all) {
            self.key.fetch_sub(BLOCK_BYTES, Ordering::Relaxed);
            return false;
        }
        self.metrics.attach_bytes.inc_by(BLOCK_BYTES as i64);
        true
    }

    fn give_back(&self, blocks: usize) {
        let bytes = blocks * BLOCK_BYTES;
        self.key.fetch_sub(bytes, Ordering::Relaxed);
        self.all.fetch_sub(bytes, Ordering::Relaxed);
        self.metrics.attach_bytes.dec_by(bytes as i64);
    }
}

/// What a retry must have in common with the call: who asks, and for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Likeness(pub(super) [u8; 32]);

/// Shared between a call and whoever waits for it.
#[derive(Debug)]
pub struct Orphan {
    pub(super) entry: Arc<Entry>,
    pub(super) like: Likeness,
    /// The client named the call itself: then its newest retry takes it, even from a client that seems to be there.
    named: bool,
    most: Most,
    budget: Budget,
    /// The gateway drains: nobody can come back to it.
    closing: Signal,
    state: Mutex<OrphanState>,
}

#[derive(Debug)]
struct OrphanState {
    tape: Tape,
    /// Nobody can sit down any more.
    closed: bool,
    head: Option<TapedHead>,
    end: Option<AnswerEnd>,
    who: Who,
    seats: u64,
    /// How far the one that sits has read.
    read: u64,
    /// It has read on since the writer looked.
    moved: bool,
    /// A sign of life for one that has read everything.
    beat: bool,
    /// It has had the end.
    delivered: bool,
    writer: Option<Waker>,
    sitter: Option<Waker>,
}

/// How an answer on a tape begins.
#[derive(Clone, Debug)]
pub struct TapedHead {
    pub status: StatusCode,
    pub fields: Fields,
    /// Of the whole body, if that is known.
    pub length: Option<u64>,
}

#[derive(Clone, Debug)]
enum AnswerEnd {
    Complete,
    /// It broke off; what it said of that is on the tape.
    Broken,
    /// There was no answer.
    Failed(Rejection),
}

/// Who waits for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// The client that began it.
    First,
    Nobody,
    /// A retry, by the number of its seat.
    Retry(u64),
}

/// The call's side. Dropping it says that nobody can take the call up any more, and if its answer had not ended, that it broke off.
#[derive(Debug)]
pub struct Writer {
    orphan: Arc<Orphan>,
    listed: Option<super::ListedOrphan>,
    pub(super) around: Around,
}

/// The side of a retry that waits. Dropping it says "I leave".
#[derive(Debug)]
pub struct Seat {
    orphan: Arc<Orphan>,
    number: u64,
    at: u64,
}

/// Why a retry does not get the answer that it sat down for.
#[derive(Debug)]
pub enum Lost {
    /// The call ended before it had begun its work, or without a word.
    Over,
    /// The call's own failure.
    Failed(Rejection),
    /// A newer retry has the seat.
    Replaced,
}

/// What a retry gets next.
#[derive(Debug)]
pub enum FromTape {
    Bytes(Bytes),
    Beat,
    Complete,
    Broken,
    Replaced,
}

// === impl Orphan ===

/// What an orphan is made of, besides its bounds.
pub(super) struct Of {
    pub(super) entry: Arc<Entry>,
    pub(super) like: Likeness,
    pub(super) named: bool,
    pub(super) closing: Signal,
}

impl Orphan {
    pub(super) fn new(of: Of, budget: Budget, most: Most) -> Arc<Self> {
        let Of {
            entry,
            like,
            named,
            closing,
        } = of;
        Arc::new(Self {
            entry,
            like,
            named,
            most,
            budget,
            closing,
            state: Mutex::new(OrphanState {
                tape: Tape::new(most.own),
                closed: false,
                head: None,
                end: None,
                who: Who::First,
                seats: 0,
                read: 0,
                moved: false,
                beat: false,
                delivered: false,
                writer: None,
                sitter: None,
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, OrphanState> {
        // No code of others runs under this lock, so a poisoned one holds sound data.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn who(&self) -> Who {
        self.lock().who
    }

    /// How many retries sat down.
    pub fn seats(&self) -> u64 {
        self.lock().seats
    }

    /// The call as it can be seen from outside.
    pub fn entry(&self) -> &Entry {
        &self.entry
    }

    /// A retry can still sit down, once nobody else waits.
    pub fn is_open(&self) -> bool {
        let state = self.lock();
        !state.closed && state.tape.is_whole() && !self.closing.is_raised()
    }

    /// Nobody can sit down from now on, unless somebody just has: then false.
    pub fn close_unless_taken(&self) -> bool {
        let mut state = self.lock();
        let nobody = state.who == Who::Nobody;
        state.closed |= nobody;
        nobody
    }

    /// Resolves when nobody can come back any more.
    pub async fn closing(&self) {
        self.closing.raised().await;
    }

    /// A retry sits down, in the place of whoever sat there before. `None`: it cannot.
    pub(super) fn sit(self: &Arc<Self>) -> Option<Seat> {
        if self.entry.stopped().is_some() {
            return None;
        }
        let mut state = self.lock();
        let free = state.who == Who::Nobody || self.named;
        if state.closed || !state.tape.is_whole() || !free {
            return None;
        }
        let first = state.who == Who::First;
        state.seats += 1;
        let number = state.seats;
        state.who = Who::Retry(number);
        (state.read, state.delivered, state.beat) = (0, false, false);
        let (writer, before) = (state.writer.take(), state.sitter.take());
        drop(state);
        if first {
            self.entry.replace();
        }
        writer.into_iter().chain(before).for_each(Waker::wake);
        Some(Seat {
            orphan: Arc::clone(self),
            number,
            at: 0,
        })
    }

    /// The first client has left. False: a retry has its place already.
    pub fn first_left(&self) -> bool {
        let mut state = self.lock();
        if state.who == Who::First {
            state.who = Who::Nobody;
        }
        state.who == Who::Nobody
    }

    /// Ready when somebody else waits than `known`, or, for a writer without room, when the one that sits has read on.
    pub fn poll_changed(&self, cx: &mut Context<'_>, known: Who, full: bool) -> Poll<()> {
        let mut state = self.lock();
        let moved = full && std::mem::take(&mut state.moved);
        let over = state.delivered && state.end.is_some();
        if state.who != known || moved || over {
            return Poll::Ready(());
        }
        if !state
            .writer
            .as_ref()
            .is_some_and(|w| w.will_wake(cx.waker()))
        {
            state.writer = Some(cx.waker().clone());
        }
        Poll::Pending
    }

    /// Nobody can sit down any more; what is on the tape is let go unless somebody reads it.
    fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        if !matches!(state.who, Who::Retry(_)) {
            let blocks = state.tape.clear();
            self.budget.give_back(blocks);
        }
        let (writer, sitter) = (state.writer.take(), state.sitter.take());
        drop(state);
        self.entry.attachable(false);
        writer.into_iter().chain(sitter).for_each(Waker::wake);
    }
}

impl Drop for Orphan {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        let blocks = state.unwrap_or_else(PoisonError::into_inner).tape.clear();
        self.budget.give_back(blocks);
    }
}

// === impl Writer ===

impl Writer {
    pub(super) fn new(
        orphan: Arc<Orphan>,
        listed: Option<super::ListedOrphan>,
        around: Around,
    ) -> Self {
        Self {
            orphan,
            listed,
            around,
        }
    }

    pub fn orphan(&self) -> &Arc<Orphan> {
        &self.orphan
    }

    pub fn who(&self) -> Who {
        self.orphan.who()
    }

    pub fn begin(&self, head: &AnswerHead, length: Option<u64>) {
        let mut state = self.orphan.lock();
        state.head = Some(TapedHead {
            status: head.status,
            fields: head.fields.clone(),
            length,
        });
        wake_sitter(state);
    }

    /// Puts down what there is room for, and says how much. What has been read is forgotten first if there is none.
    pub fn push(&self, bytes: &[u8]) -> (usize, Option<Full>) {
        let budget = &self.orphan.budget;
        let mut state = self.orphan.lock();
        let grant = || budget.grant(self.orphan.most);
        let (mut taken, mut full) = state.tape.push(bytes, grant);
        if full.is_some() && matches!(state.who, Who::Retry(_)) {
            let read = state.read;
            budget.give_back(state.tape.forget(read));
            let rest = bytes.get(taken..).unwrap_or_default();
            let (more, again) = state.tape.push(rest, grant);
            (taken, full) = (taken + more, again);
        }
        state.moved = false;
        state.beat = false;
        if taken > 0 {
            wake_sitter(state);
        }
        (taken, full)
    }

    /// A sign of life, for one that has read everything.
    pub fn beat(&self) {
        let mut state = self.orphan.lock();
        if state.read == state.tape.end() {
            state.beat = true;
            wake_sitter(state);
        }
    }

    /// The answer has ended, well or badly.
    pub fn ended(&self, complete: bool) {
        self.end(if complete {
            AnswerEnd::Complete
        } else {
            AnswerEnd::Broken
        });
    }

    /// There is no answer.
    pub fn failed(self, why: &Rejection) {
        self.end(AnswerEnd::Failed(why.clone()));
    }

    fn end(&self, end: AnswerEnd) {
        let mut state = self.orphan.lock();
        state.end.get_or_insert(end);
        wake_sitter(state);
    }

    /// A retry has had the answer's end.
    pub fn is_delivered(&self) -> bool {
        self.orphan.lock().delivered
    }

    /// As [`Orphan::poll_changed`].
    pub async fn changed(&self, known: Who, full: bool) {
        std::future::poll_fn(|cx| self.orphan.poll_changed(cx, known, full)).await;
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.listed = None;
        self.end(AnswerEnd::Broken);
        self.orphan.close();
    }
}

fn wake_sitter(mut state: MutexGuard<'_, OrphanState>) {
    let sitter = state.sitter.take();
    drop(state);
    if let Some(sitter) = sitter {
        sitter.wake();
    }
}

// === impl Seat ===

impl Seat {
    pub fn entry(&self) -> &Arc<Entry> {
        &self.orphan.entry
    }

    /// How the answer begins, as soon as it has.
    ///
    /// # Errors
    ///
    /// Why there is none.
    ///
    /// # Cancel safety
    ///
    /// May be dropped and made anew.
    pub async fn head(&mut self) -> Result<TapedHead, Lost> {
        std::future::poll_fn(|cx| self.poll_head(cx)).await
    }

    fn poll_head(&mut self, cx: &Context<'_>) -> Poll<Result<TapedHead, Lost>> {
        let mut state = self.orphan.lock();
        if state.who != Who::Retry(self.number) {
            return Poll::Ready(Err(Lost::Replaced));
        }
        Poll::Ready(match (&state.head, &state.end) {
            (Some(head), _) => Ok(head.clone()),
            (None, Some(AnswerEnd::Failed(why))) if !matches!(why, Rejection::Gone) => {
                Err(Lost::Failed(why.clone()))
            }
            (None, Some(_)) => Err(Lost::Over),
            (None, None) => {
                state.sitter = Some(cx.waker().clone());
                return Poll::Pending;
            }
        })
    }

    pub fn poll_next(&mut self, cx: &Context<'_>) -> Poll<FromTape> {
        let mut state = self.orphan.lock();
        if state.who != Who::Retry(self.number) {
            return Poll::Ready(FromTape::Replaced);
        }
        let next = if let Some(bytes) = state.tape.read(self.at) {
            self.at += bytes.len() as u64;
            state.read = self.at;
            state.moved = true;
            FromTape::Bytes(bytes)
        } else if let Some(end) = &state.end {
            let next = match end {
                AnswerEnd::Complete => FromTape::Complete,
                AnswerEnd::Broken | AnswerEnd::Failed(_) => FromTape::Broken,
            };
            state.delivered = true;
            next
        } else if std::mem::take(&mut state.beat) {
            return Poll::Ready(FromTape::Beat);
        } else {
            state.sitter = Some(cx.waker().clone());
            return Poll::Pending;
        };
        let writer = state.writer.take();
        drop(state);
        if let Some(writer) = writer {
            writer.wake();
        }
        Poll::Ready(next)
    }
}

impl Seat {
    /// All of the answer has been read, so far as this one knows.
    pub fn is_at_end(&self) -> bool {
        let state = self.orphan.lock();
        matches!(state.end, Some(AnswerEnd::Complete)) && state.tape.end() == self.at
    }

    /// It has the whole answer, and does not ask for its end.
    pub fn has_all(self) {
        let mut state = self.orphan.lock();
        if state.who == Who::Retry(self.number) {
            state.delivered = true;
        }
    }

    /// Bytes read so far.
    pub fn at(&self) -> u64 {
        self.at
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut state = self.orphan.lock();
        if state.who != Who::Retry(self.number) {
            return;
        }
        state.who = Who::Nobody;
        if state.closed {
            let blocks = state.tape.clear();
            self.orphan.budget.give_back(blocks);
        }
        let writer = state.writer.take();
        drop(state);
        if let Some(writer) = writer {
            writer.wake();
        }
    }
}
