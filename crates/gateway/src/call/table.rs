//! The calls in flight: who they are, what they are doing, and the way to end one from outside.
//!
//! One shard a worker, so that its lock is uncontended: a call takes it once when it begins and once when nothing of it is left, its
//! slot included. What changes in between is in the entry itself.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::time::Instant;

use super::outcome::Phase;
use crate::auth::Principal;

/// All calls in flight. Clones share it.
#[derive(Clone, Debug)]
pub struct Table {
    shards: Arc<[Mutex<Shard>]>,
}

/// Entries by place; free places are used again.
#[derive(Debug, Default)]
struct Shard {
    entries: Vec<Option<Arc<Entry>>>,
    free: Vec<usize>,
}

/// One call as others see it.
#[derive(Debug)]
pub struct Entry {
    pub id: Arc<str>,
    /// The id that the client chose (`x-tidegate-call`).
    pub own_id: Option<Arc<str>>,
    pub principal: Principal,
    pub route: &'static str,
    began: Instant,
    phase: AtomicU8,
    state: AtomicU8,
    tokens: AtomicU64,
    /// Milliseconds after the beginning at which the first token came; 0: none has.
    first_token_ms: AtomicU64,
    /// All that has come from the upstream was read, and its answer has not ended.
    listens: AtomicBool,
    /// Milliseconds after the beginning at which the client left; 0: it has not.
    left_ms: AtomicU64,
    /// It waits for its client's retry.
    attachable: AtomicBool,
    facts: Mutex<Facts>,
    stop: Stop,
}

/// What is found out on the way.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    pub model: Option<Arc<str>>,
    pub upstream: Option<Arc<str>>,
    pub endpoint: Option<Arc<str>>,
    /// The upstream's contract for calls whose client has left.
    pub contract: &'static str,
    /// The call whose answer this one is given.
    pub attached_to: Option<Arc<str>>,
}

/// Whom the work is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// Somebody waits for it.
    Attended,
    /// It runs on for nobody.
    Abandoned,
    /// The exchange is over; the slot is kept because the server may run on.
    Lingering,
    /// The time for that is over, and the server shows that it does run on.
    Overdue,
    /// All of it is over, and its answer is kept for its client's retry.
    Kept,
}

/// Who ends a call from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum By {
    /// The client, with the id that it chose. As if it had left, but it is told.
    Client = 1,
    /// The operator: the work ends and the slot is free, whatever the contract.
    Operator = 2,
}

/// Raised once; awaited by the one task that has the call.
#[derive(Default)]
struct Stop {
    by: AtomicU8,
    waker: Mutex<Option<Waker>>,
}

/// The place of a call in the table; given back when it is dropped.
#[derive(Debug)]
pub struct Listed {
    entry: Arc<Entry>,
    table: Table,
    shard: usize,
    place: usize,
}

/// What [`Table::list`] shows of one call.
#[derive(Clone, Debug)]
pub struct Row {
    pub id: Arc<str>,
    pub own_id: Option<Arc<str>>,
    pub key: String,
    pub route: &'static str,
    pub facts: Facts,
    pub phase: &'static str,
    pub state: State,
    pub age: Duration,
    /// Since the client left.
    pub left: Option<Duration>,
    /// It waits for its client's retry.
    pub attachable: bool,
    pub tokens: u64,
}

// === impl Table ===

impl Table {
    pub fn new(workers: usize) -> Self {
        Self {
            shards: (0..workers.max(1)).map(|_| Mutex::default()).collect(),
        }
    }

    /// Lists a call that has just been accepted by this worker.
    pub fn begin(
        &self,
        worker: u32,
        id: &Arc<str>,
        own_id: Option<Arc<str>>,
        (principal, route): (&Principal, &'static str),
    ) -> Listed {
        let entry = Arc::new(Entry {
            id: Arc::clone(id),
            own_id,
            principal: principal.clone(),
            route,
            began: Instant::now(),
            phase: AtomicU8::new(Phase::Accepted as u8),
            state: AtomicU8::new(State::Attended as u8),
            tokens: AtomicU64::new(0),
            first_token_ms: AtomicU64::new(0),
            listens: AtomicBool::new(false),
            left_ms: AtomicU64::new(0),
            attachable: AtomicBool::new(false),
            facts: Mutex::default(),
            stop: Stop::default(),
        });
        let shard = worker as usize % self.shards.len();
        let place = self.shard(shard).add(Arc::clone(&entry));
        Listed {
            entry,
            table: self.clone(),
            shard,
            place,
        }
    }

    fn shard(&self, index: usize) -> std::sync::MutexGuard<'_, Shard> {
        // No code of others runs under this lock, so a poisoned one holds sound data.
        self.shards[index]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Every call in flight, the oldest first.
    pub fn list(&self) -> Vec<Row> {
        let mut rows: Vec<_> = self.all().iter().map(|entry| entry.row()).collect();
        rows.sort_by(|a, b| b.age.cmp(&a.age).then_with(|| a.id.cmp(&b.id)));
        rows
    }

    fn all(&self) -> Vec<Arc<Entry>> {
        let shards = 0..self.shards.len();
        shards
            .flat_map(|index| {
                let shard = self.shard(index);
                let here: Vec<_> = shard.entries.iter().flatten().cloned().collect();
                here
            })
            .collect()
    }

    /// Calls that the server at this endpoint certainly worked on at any time from `since` until now: their tokens came before, all that came
    /// is read, and their end is not among it. A slow reader's call is none: its end may lie unread in the socket.
    pub fn steady(&self, endpoint: &Arc<str>, since: Instant) -> usize {
        let all = self.all();
        let steady = all.iter().filter(|entry| entry.is_steady(endpoint, since));
        steady.count()
    }

    /// Ends the calls that `which` says; how many those were.
    pub fn stop(&self, by: By, which: impl Fn(&Entry) -> bool) -> usize {
        let all = self.all();
        let meant: Vec<_> = all.iter().filter(|entry| which(entry)).collect();
        // All of them before the first wakes: what its end sets free must not start another one of them.
        meant.iter().for_each(|entry| entry.stop.mark(by));
        meant.iter().for_each(|entry| entry.stop.wake());
        meant.len()
    }
}

// === impl Shard ===

impl Shard {
    fn add(&mut self, entry: Arc<Entry>) -> usize {
        match self.free.pop() {
            Some(place) => {
                self.entries[place] = Some(entry);
                place
            }
            None => {
                self.entries.push(Some(entry));
                self.entries.len() - 1
            }
        }
    }
}

/// At least 1: 0 is what never happened.
fn millis(after: Duration) -> u64 {
    u64::try_from(after.as_millis()).unwrap_or(u64::MAX).max(1)
}

// === impl Entry ===

impl Entry {
    /// The upstream that the call was routed to has this name.
    pub fn is_at(&self, upstream: &str) -> bool {
        let facts = self.facts.lock().unwrap_or_else(PoisonError::into_inner);
        facts.upstream.as_deref() == Some(upstream)
    }

    pub fn learn(&self, change: impl FnOnce(&mut Facts)) {
        change(&mut self.facts.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub fn phase(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    pub fn state(&self, state: State) {
        self.state.store(state as u8, Ordering::Relaxed);
    }

    /// The client has left, so long after the beginning.
    pub fn left(&self, after: Duration) {
        self.left_ms.store(millis(after), Ordering::Relaxed);
    }

    /// Left just now, and it goes on for nobody.
    pub fn left_for_good(&self) {
        self.left(self.began.elapsed());
        self.state(State::Abandoned);
        self.attachable(false);
    }

    /// Left just now, in the grace for its client's retry.
    pub fn left_for_now(&self) {
        self.left_for_good();
        self.attachable(true);
    }

    /// Somebody waits for it again.
    pub fn attended_again(&self) {
        self.left_ms.store(0, Ordering::Relaxed);
        self.state(State::Attended);
        self.attachable(false);
    }

    pub fn attachable(&self, is: bool) {
        self.attachable.store(is, Ordering::Relaxed);
    }

    /// Its client may come back for it, and may end it.
    pub fn is_attachable(&self) -> bool {
        self.attachable.load(Ordering::Relaxed)
    }

    /// Ends it from outside.
    pub fn end(&self, by: By) {
        self.stop.raise(by);
    }

    /// Has whoever has the call look at it.
    pub fn wake(&self) {
        self.stop.wake();
    }

    pub fn tokens(&self, tokens: u64) {
        self.tokens.store(tokens, Ordering::Relaxed);
    }

    /// Its first token came, so long after the beginning.
    pub fn first_token(&self, after: Duration) {
        self.first_token_ms.store(millis(after), Ordering::Relaxed);
    }

    /// Whether the upstream was just asked for more of the answer and had nothing yet.
    pub fn listens(&self, listens: bool) {
        self.listens.store(listens, Ordering::Relaxed);
    }

    /// The server certainly worked on it at any time from `since` until now, at this endpoint.
    fn is_steady(&self, endpoint: &Arc<str>, since: Instant) -> bool {
        let first = self.first_token_ms.load(Ordering::Relaxed);
        let open = self.state.load(Ordering::Relaxed) < State::Lingering as u8;
        let listens = self.listens.load(Ordering::Relaxed);
        if first == 0 || !open || !listens || self.began + Duration::from_millis(first) > since {
            return false;
        }
        let facts = self.facts.lock().unwrap_or_else(PoisonError::into_inner);
        let at = facts.endpoint.as_ref();
        at.is_some_and(|at| Arc::ptr_eq(at, endpoint))
    }

    /// Who wants the call to end, if anybody does.
    pub fn stopped(&self) -> Option<By> {
        self.stop.by()
    }

    /// Resolves when somebody wants the call to end.
    ///
    /// # Cancel safety
    ///
    /// May be dropped and made anew. One task waits at a time: the one that has the call.
    pub async fn stop(&self) -> By {
        std::future::poll_fn(|cx| self.poll_stop(cx)).await
    }

    /// Resolves when the operator wants all of it to end, the slot too.
    ///
    /// # Cancel safety
    ///
    /// As [`stop`](Self::stop).
    pub async fn killed(&self) {
        std::future::poll_fn(|cx| match self.stop.poll_at(cx, By::Operator) {
            Poll::Ready(_) => Poll::Ready(()),
            Poll::Pending => Poll::Pending,
        })
        .await;
    }

    /// Somebody still waits for it.
    pub fn is_attended(&self) -> bool {
        self.left_ms.load(Ordering::Relaxed) == 0
    }

    pub fn poll_stop(&self, cx: &mut Context<'_>) -> Poll<By> {
        self.stop.poll_at(cx, By::Client)
    }

    fn row(&self) -> Row {
        let age = self.began.elapsed();
        let left = match self.left_ms.load(Ordering::Relaxed) {
            0 => None,
            at => Some(age.saturating_sub(Duration::from_millis(at))),
        };
        let facts = self.facts.lock().unwrap_or_else(PoisonError::into_inner);
        Row {
            id: Arc::clone(&self.id),
            own_id: self.own_id.clone(),
            key: self.principal.name().to_owned(),
            route: self.route,
            facts: facts.clone(),
            phase: Phase::of(self.phase.load(Ordering::Relaxed)).name(),
            state: match self.state.load(Ordering::Relaxed) {
                0 => State::Attended,
                1 => State::Abandoned,
                2 => State::Lingering,
                3 => State::Overdue,
                _ => State::Kept,
            },
            age,
            left,
            attachable: self.is_attachable(),
            tokens: self.tokens.load(Ordering::Relaxed),
        }
    }
}

impl State {
    pub fn name(self) -> &'static str {
        match self {
            Self::Attended => "attended",
            Self::Abandoned => "abandoned",
            Self::Lingering => "lingering",
            Self::Overdue => "overdue",
            Self::Kept => "kept",
        }
    }
}

impl By {
    /// For metrics, the log and the error's code.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Client => "cancelled_by_client",
            Self::Operator => "killed",
        }
    }

    /// What the client is told.
    pub fn message(self) -> &'static str {
        match self {
            Self::Client => "the call was cancelled by its id",
            Self::Operator => "the call was ended by the operator of the gateway",
        }
    }
}

// === impl Stop ===

impl Stop {
    fn raise(&self, by: By) {
        self.mark(by);
        self.wake();
    }

    fn mark(&self, by: By) {
        // The operator's word is the stronger one.
        self.by.fetch_max(by as u8, Ordering::AcqRel);
    }

    fn wake(&self) {
        let waker = self.lock().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn by(&self) -> Option<By> {
        match self.by.load(Ordering::Acquire) {
            0 => None,
            1 => Some(By::Client),
            _ => Some(By::Operator),
        }
    }

    /// Ready when somebody of this standing, or a higher one, wants it.
    fn poll_at(&self, cx: &mut Context<'_>, least: By) -> Poll<By> {
        let by = || self.by().filter(|by| *by as u8 >= least as u8);
        if let Some(by) = by() {
            return Poll::Ready(by);
        }
        {
            let mut waker = self.lock();
            if !waker.as_ref().is_some_and(|w| w.will_wake(cx.waker())) {
                *waker = Some(cx.waker().clone());
            }
        }
        // It may have been raised before the waker was there.
        by().map_or(Poll::Pending, Poll::Ready)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Waker>> {
        self.waker.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Stop").field(&self.by()).finish()
    }
}

// === impl Listed ===

impl Listed {
    pub fn entry(&self) -> &Arc<Entry> {
        &self.entry
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        let mut shard = self.table.shard(self.shard);
        let entry = shard.entries[self.place].take();
        shard.free.push(self.place);
        drop(shard);
        drop(entry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(table: &Table, id: &str) -> Listed {
        table.begin(0, &id.into(), None, (&Principal::default(), "chat"))
    }

    #[tokio::test]
    async fn a_call_is_listed_until_nothing_is_left_of_it() {
        let table = Table::new(2);
        let one = begin(&table, "a");
        let two = begin(&table, "b");
        assert_eq!(table.list().len(), 2);
        drop(one);
        let three = begin(&table, "c");
        let ids: Vec<_> = table.list().iter().map(|row| row.id.to_string()).collect();
        assert_eq!(ids, ["b", "c"]);
        drop((two, three));
        assert!(table.list().is_empty());
        assert_eq!(table.shard(0).entries.len(), 2, "places are used again");
    }

    #[tokio::test]
    async fn a_stop_wakes_whoever_has_the_call_and_the_operator_has_the_last_word() {
        let table = Table::new(1);
        let listed = begin(&table, "a");
        let entry = Arc::clone(listed.entry());
        let waits = tokio::task::spawn(async move { entry.stop().await });
        tokio::task::yield_now().await;
        assert_eq!(table.stop(By::Client, |entry| &*entry.id == "none"), 0);
        assert_eq!(table.stop(By::Client, |entry| &*entry.id == "a"), 1);
        assert_eq!(waits.await.unwrap(), By::Client);
        table.stop(By::Operator, |_| true);
        table.stop(By::Client, |_| true);
        assert_eq!(listed.entry().stopped(), Some(By::Operator));
    }
}
