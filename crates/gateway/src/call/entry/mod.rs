//! One call and its facts: what it is and where it goes, who waits for it and how far it is, and that somebody ends it.
//!
//! A call's record has it from the beginning to the end, the table of calls in flight lists it, and whoever has a part in the call writes into
//! it what it knows. Nothing here has a lock on the way of a call: what others are shown is an index into the call's own generation, a number,
//! or set once.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Instant;

use super::id::Id;
use super::outcome::Phase;
use super::settle::Books;
use super::stop::{By, Stop};
use super::{Asker, Generation, RouteFacts};
use crate::auth::Principal;
use crate::upstream::route::Target;
use crate::upstream::{EndpointState, Upstream};

mod row;

pub use row::Row;

/// One call.
// In this order: what each chunk of a stream touches is one line of the cache.
#[repr(C)]
#[derive(Debug)]
pub struct Entry {
    stop: Stop,
    tokens: AtomicU64,
    /// All that has come from the upstream was read, and its answer has not ended.
    listens: AtomicBool,
    phase: AtomicU8,
    state: AtomicU8,
    /// It waits for its client's retry.
    attachable: AtomicBool,
    /// A retry has the place of the client that began it.
    replaced: AtomicBool,
    pub id: Id,
    /// The id that the client chose (`x-tidegate-call`).
    pub own_id: Option<Arc<str>>,
    pub principal: Principal,
    pub route: RouteFacts,
    pub generation: Arc<Generation>,
    pub books: Arc<Books>,
    began: Instant,
    /// Milliseconds after the beginning at which the first token came; 0: none has.
    first_token_ms: AtomicU64,
    /// Milliseconds after the beginning at which the client left; 0: it has not.
    left_ms: AtomicU64,
    /// As the client named it, cut.
    model: OnceLock<Box<str>>,
    /// Where among those of the generation; none has the place [`NOWHERE`].
    upstream: AtomicUsize,
    /// The one that was tried last: where among those of the upstream.
    endpoint: AtomicUsize,
    /// The call whose answer this one is given.
    attached_to: Mutex<Option<Id>>,
}

const NOWHERE: usize = usize::MAX;

/// Whom the work is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum WorkState {
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

/// Where one stands among several; [`NOWHERE`] if it is none of them.
fn place_of<T>(all: &[Arc<T>], one: &Arc<T>) -> usize {
    let is = |it: &Arc<T>| Arc::ptr_eq(it, one);
    all.iter().position(is).unwrap_or(NOWHERE)
}

/// At least 1: 0 is what never happened.
fn millis(after: Duration) -> u64 {
    u64::try_from(after.as_millis()).unwrap_or(u64::MAX).max(1)
}

// === impl Entry ===

impl Entry {
    pub fn new(
        asker: Asker,
        route: RouteFacts,
        generation: &Arc<Generation>,
        books: &Arc<Books>,
    ) -> Self {
        Self {
            stop: Stop::default(),
            tokens: AtomicU64::new(0),
            listens: AtomicBool::new(false),
            phase: AtomicU8::new(Phase::Body as u8),
            state: AtomicU8::new(WorkState::Attended as u8),
            attachable: AtomicBool::new(false),
            replaced: AtomicBool::new(false),
            id: asker.id,
            own_id: asker.own_id,
            principal: asker.principal,
            route,
            generation: Arc::clone(generation),
            books: Arc::clone(books),
            began: Instant::now(),
            first_token_ms: AtomicU64::new(0),
            left_ms: AtomicU64::new(0),
            model: OnceLock::new(),
            upstream: AtomicUsize::new(NOWHERE),
            endpoint: AtomicUsize::new(NOWHERE),
            attached_to: Mutex::default(),
        }
    }

    /// The upstream that the call was routed to has this name.
    pub fn is_at(&self, upstream: &str) -> bool {
        self.upstream().is_some_and(|at| *at.name == *upstream)
    }

    pub fn model(&self) -> Option<&str> {
        self.model.get().map(AsRef::as_ref)
    }

    /// What the client calls the model. The first word stands.
    pub fn asks_for(&self, model: &str) {
        self.model.get_or_init(|| model.into());
    }

    /// Where it was routed to.
    pub fn upstream(&self) -> Option<&Arc<Upstream>> {
        let upstreams = self.generation.routes.upstreams();
        upstreams.get(self.upstream.load(Ordering::Relaxed))
    }

    pub fn goes_to(&self, target: &Target<'_>) {
        let upstreams = self.generation.routes.upstreams();
        let place = place_of(upstreams, target.upstream);
        self.upstream.store(place, Ordering::Relaxed);
    }

    /// The one that was tried last.
    pub fn endpoint(&self) -> Option<&Arc<EndpointState>> {
        let endpoints = &self.upstream()?.endpoints;
        endpoints.get(self.endpoint.load(Ordering::Relaxed))
    }

    pub fn tries(&self, endpoint: &Arc<EndpointState>) {
        if let Some(upstream) = self.upstream() {
            let place = place_of(&upstream.endpoints, endpoint);
            self.endpoint.store(place, Ordering::Relaxed);
        }
    }

    pub fn attaches_to(&self, call: Option<Id>) {
        *self
            .attached_to
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = call;
    }

    pub fn began(&self) -> Instant {
        self.began
    }

    pub fn phase(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    pub fn state(&self, state: WorkState) {
        self.state.store(state as u8, Ordering::Relaxed);
    }

    /// The client has left, so long after the beginning.
    pub fn left(&self, after: Duration) {
        self.left_ms.store(millis(after), Ordering::Relaxed);
    }

    /// Left just now, and it goes on for nobody.
    pub fn left_for_good(&self) {
        self.left(self.began.elapsed());
        self.state(WorkState::Abandoned);
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
        self.state(WorkState::Attended);
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
        self.mark_end(by);
        self.wake();
    }

    /// As [`end`](Self::end), but whoever has the call is not woken yet.
    pub(super) fn mark_end(&self, by: By) {
        self.stop.mark(by);
    }

    /// A retry has the place of the client that began it. Whatever the call waits for, it looks at this next.
    pub fn replace(&self) {
        self.replaced.store(true, Ordering::Release);
        self.stop.wake();
    }

    pub fn is_replaced(&self) -> bool {
        self.replaced.load(Ordering::Acquire)
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
    pub(super) fn is_steady(&self, endpoint: &Arc<EndpointState>, since: Instant) -> bool {
        let first = self.first_token_ms.load(Ordering::Relaxed);
        let open = self.state.load(Ordering::Relaxed) < WorkState::Lingering as u8;
        let listens = self.listens.load(Ordering::Relaxed);
        if first == 0 || !open || !listens || self.began + Duration::from_millis(first) > since {
            return false;
        }
        self.endpoint().is_some_and(|at| Arc::ptr_eq(at, endpoint))
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
}

impl WorkState {
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
