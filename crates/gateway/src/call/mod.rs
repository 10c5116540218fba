//! One call, from an authenticated request to its settlement. THE STRAIGHT LINE is [`run`].
//!
//! A **call** is work, a **waiter** is somebody interested in it; they end at different times. The call owns the slot and the upstream
//! exchange; the waiter owns the place in the queue and the downstream connection. [`handover`] keeps a call alive whose waiter went
//! before its answer began, [`relay`] carries an answer, [`aftermath`] ends what a leaving client left behind, [`settle`] writes the one
//! record. This module is the only one that composes the floor below (admission, upstream, usage, auth); it never chooses a status code.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use http::uri::PathAndQuery;
use http_body::Body as _;
use tidegate_limiter::{Slot, Started};
use tidegate_wire::{Dialect, Peek, peek};
use tokio_util::task::TaskTracker;

use crate::admission;
use crate::auth::{Keys, Principal};
use crate::config::{Config, Timeouts};
use crate::fields::{Fields, Sent};
use crate::signal::Signal;
use crate::telemetry::journal::Journal;
use crate::telemetry::metrics::Metrics;
use crate::upstream::Upstream;
use crate::upstream::arriving::Arriving;
use crate::upstream::connect::TcpOptions;
use crate::upstream::pool::Pool;
use crate::upstream::route::{Routes, Target};

pub mod aftermath;
pub mod alarm;
pub mod answer;
mod assembled;
pub mod attach;
pub mod attempt;
pub mod attendance;
mod beside;
pub mod body;
pub mod budget;
mod clock;
pub mod confirm;
pub mod contract;
pub mod deadline;
pub mod downstream;
pub mod entry;
pub mod handover;
pub mod headers;
mod id;
pub mod listing;
pub mod outcome;
pub mod relay;
pub mod retried;
pub mod retry;
pub mod settle;
pub mod source;
pub mod stop;
pub mod table;
pub mod upload;
pub mod waste;
mod wish;

pub use answer::Answer;
pub use id::Id;
pub use outcome::Rejection;

use aftermath::Running;
use answer::AnswerHead;
use attach::orphan::Writer;
use attach::tapped;
use attach::{Candidate, Found, Orphans};
use attendance::Attendance;
use beside::{aside, is_read_here};
use budget::Budget;
use confirm::Inquiries;
use deadline::{Patience, Tier};
use downstream::Client;
use outcome::Phase;
use settle::{Books, Record};
use table::Table;
use upload::Upload;
use wish::Wish;

/// One configuration generation, ready to serve. A call takes one at its start and keeps it.
#[derive(Debug)]
pub struct Generation {
    pub number: u64,
    pub config: Config,
    pub routes: Routes,
    pub keys: Keys,
}

/// The running generation, as one worker has it. Each worker has a copy: what its calls hold is counted by the worker alone, not in memory
/// that all workers would take from each other for each call.
#[derive(Debug)]
pub struct Current(Mutex<Arc<Generation>>);

/// What every call needs and none owns. As with [`Current`], each worker has its own, around what all share.
#[derive(Clone, Debug)]
pub struct Caller {
    pub current: Arc<Current>,
    pub metrics: Arc<Metrics>,
    pub books: Arc<Books>,
    /// Request bodies.
    pub bodies: Budget,
    /// Answers in one piece.
    pub answers: Budget,
    /// What is left of the calls if the process is killed.
    pub journal: Option<Journal>,
    /// Calls that their client's retry can take up.
    pub orphans: Orphans,
    /// Lists of models that are fetched at once; they need no slot, so they must not use up the connections.
    pub listings: Arc<tokio::sync::Semaphore>,
    /// Fires at the drain deadline: what still waits or streams is told and ended.
    pub cut: Signal,
}

/// The thread a call runs on: its connections to upstreams and its background tasks.
#[derive(Debug)]
pub struct Worker {
    pub id: u32,
    pub pool: Arc<Pool>,
    pub tasks: TaskTracker,
    /// Drivers of shared HTTP/2 connections: they end with the worker, nothing waits for them.
    pub drivers: TaskTracker,
    pub tcp: TcpOptions,
    pub stream_buffer_bytes: usize,
    /// Where servers are asked whether abandoned work has ended; one for all workers.
    pub inquiries: Inquiries,
    pub caller: Caller,
}

/// What the front knows about a route; the call acts on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteFacts {
    /// Bounded name for metrics.
    pub name: &'static str,
    pub dialect: Dialect,
    pub model: ModelIn,
    /// The answer may come as a stream, if that is asked for.
    pub can_stream: bool,
}

/// Where a request says which model it wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelIn {
    /// In its body, which must be a JSON object.
    Body,
    /// In its body, if that happens to be a JSON object.
    BodyIfJson,
    /// Nowhere: it goes to the default upstream.
    Nowhere,
}

/// Who makes an authenticated request, and by which ids it is known.
#[derive(Debug)]
pub struct Asker {
    pub id: Id,
    /// The id that the client chose (`x-tidegate-call`), checked by the front.
    pub own_id: Option<Arc<str>>,
    pub principal: Principal,
}

/// What it asks for.
#[derive(Debug)]
pub struct Ask<'a> {
    pub route: RouteFacts,
    pub method: Method,
    /// Checked by the front: absolute, no dot segments.
    pub path_and_query: PathAndQuery,
    pub fields: Fields,
    pub body: Arriving,
    pub client: &'a Arc<Client>,
    pub generation: &'a Arc<Generation>,
}

/// A call that ended before an answer began: why, and its record, still to be settled with the status that the front chooses.
#[derive(Debug)]
pub struct Refused {
    pub rejection: Rejection,
    pub record: Box<Record>,
}

/// What a call holds from its admission to its end.
#[derive(Debug)]
pub struct Held {
    /// The right to occupy upstream capacity: goes with the work.
    pub slot: Slot,
    /// Whose answer it will be: goes with the client.
    pub attendance: Attendance,
}

/// Where the work of a call goes, and from which thread.
#[derive(Clone, Copy, Debug)]
pub struct Toward<'a> {
    pub worker: &'a Arc<Worker>,
    pub upstream: &'a Arc<Upstream>,
}

/// A request whose body is still to be read.
#[derive(Debug)]
pub struct Arrival<'a> {
    pub fields: &'a Fields,
    pub body: Arriving,
}

/// What goes upstream, the same for every attempt.
#[derive(Debug)]
pub struct Prepared<'a> {
    pub method: &'a Method,
    pub path_and_query: &'a PathAndQuery,
    pub fields: Sent,
    pub upload: Upload,
}

/// Runs one call up to the first byte of its answer; the answer's body carries it from there.
///
/// # Cancel safety
///
/// Not meant to be dropped: wrap it in [`handover::Handover`], which lets it go on when its waiter leaves.
///
/// # Errors
///
/// Everything that ends a call before its answer begins.
#[expect(
    clippy::manual_async_fn,
    reason = "an `async fn` moves its arguments once more, and an ask is large"
)]
pub fn run<'a>(
    worker: &'a Arc<Worker>,
    asker: Asker,
    mut ask: Ask<'a>,
) -> impl Future<Output = Result<Answer, Refused>> + Send + 'a {
    async move {
        let mut record = Record::begin(worker, asker, &ask);
        let entry = record.listed_entry().cloned();
        let alarm = ask.client.reader().alarm();
        let patience = Patience::new((ask.client, alarm), &worker.caller.cut, entry.as_deref());
        let step = line(worker, &mut ask, patience, &mut record).await;
        finish(step, record)
    }
}

fn finish(step: Result<Step, Rejection>, mut record: Box<Record>) -> Result<Answer, Refused> {
    match step {
        Ok(Step::Answered(head, bytes, None)) => {
            record.settle_done();
            Ok(Answer::whole(head, bytes))
        }
        Ok(Step::Answered(head, bytes, Some(writer))) => {
            Ok(tapped::whole(head, bytes, *writer, record))
        }
        Ok(Step::Relaying(head, relay)) => {
            let mut relay = relay.start(record);
            Ok(match relay.take_writer() {
                None => Answer::relaying(head, relay),
                Some(writer) => tapped::relaying(head, relay, *writer),
            })
        }
        Ok(Step::Attaching(attaching)) => Ok(attaching.start(record)),
        Err(rejection) => Err(Refused { rejection, record }),
    }
}

/// How an admitted call goes on after its line.
enum Step {
    /// With what its retry would take it up by.
    Answered(AnswerHead, Bytes, Option<Box<Writer>>),
    Relaying(AnswerHead, Box<relay::UnstartedRelay>),
    /// It is a retry and has the answer of its own call.
    Attaching(Box<attach::attached::UnstartedAttached>),
}

/// body → peek → route → admit → attempt … head → commit.
async fn line(
    worker: &Arc<Worker>,
    ask: &mut Ask<'_>,
    mut patience: Patience<'_>,
    record: &mut Record,
) -> Result<Step, Rejection> {
    let (caller, route, generation) = (&worker.caller, ask.route, ask.generation);
    let fields = &ask.fields;
    let (downstream, reader) = (ask.client.downstream(), ask.client.reader());

    let arrival = Arrival::new(fields, ask.body.take());
    room_for_body(caller, &generation.routes, &arrival, record.flow())?;
    let mut lease = caller.bodies.lease();
    let received = upload::receive(&mut lease, generation, &patience, route, arrival).await?;
    record.received(fields, &received).await?;

    let peek = look(route, &received).await?;
    let target = find_target(&generation.routes, peek.as_ref(), record)?;
    record.routed(&target, peek.as_ref());
    let upstream = target.upstream;
    let wish = record.asks(Wish::of(&upstream.settings, route, peek.as_ref()));
    let candidate = Candidate {
        method: &ask.method,
        path_and_query: &ask.path_and_query,
        fields,
        received: &received,
        peer: downstream.peer,
    };
    let ticket = match attach::look(caller, generation, upstream, &candidate)? {
        None => None,
        // Boxed: rare, and a large part of the call's future otherwise.
        Some(look) => match Box::pin(look.own(&patience, record)).await? {
            Found::Own(own) => return Ok(own.attaching(downstream, reader)),
            Found::Nothing(ticket) => ticket.filter(|_| !wish.background),
        },
    };
    room_for_answer(caller, generation, wish)?;
    let upload = edit(wish, received, &target, peek.as_ref()).await?;

    record.phase(Phase::Queued);
    patience.limit_total(upstream.settings.timeouts.total);
    let started = admit(upstream, &patience, record, upload.len())
        .await
        .inspect_err(|why| aftermath::note(why, record))?;
    record.admitted(started.queued_for);
    let to = Toward { worker, upstream };
    let writer = ticket.and_then(|ticket| ticket.list(to, record));
    let mut held = Held::new(started, upstream, wish.background, writer);

    let fields = std::mem::take(&mut ask.fields);
    let answered = {
        let mut prepared = Prepared {
            method: &ask.method,
            path_and_query: &ask.path_and_query,
            fields: headers::to_upstream(fields, &generation.config, &upstream.settings),
            upload,
        };
        let attendance = &mut held.attendance;
        attempt::until_head(to, &patience, &mut prepared, attendance, record).await
    };
    drop(lease);
    record.left(&held.attendance);
    let exchange = match answered {
        Ok(exchange) => exchange,
        Err(why) => return Err(aftermath::never_answered(to, held, why, record)),
    };

    let commit = answer::Commit {
        came: record.head(),
        worker,
        generation,
        upstream,
        patience: &patience,
        route,
        wish,
        downstream,
        reader,
    };
    let (mut head, running) = Running::begin(exchange, held, &commit);
    answer::begin(&commit, &mut head, running, record).await
}

/// Refuses before a byte of the body is read, if every upstream would turn the request away.
fn room_for_body(
    caller: &Caller,
    routes: &Routes,
    arrival: &Arrival<'_>,
    flow: u64,
) -> Result<(), Rejection> {
    let bytes = arrival.body.size_hint().exact().unwrap_or(0);
    let limiters = routes.upstreams().iter().map(|u| &u.limiter);
    match admission::would_shed(limiters, bytes, flow) {
        Some(shed) if !attach::may_find(&caller.orphans, arrival.fields) => Err(shed.into()),
        _ => Ok(()),
    }
}

/// Refuses before anything is sent, if there is no room for an answer that is put together.
fn room_for_answer(caller: &Caller, generation: &Generation, wish: Wish) -> Result<(), Rejection> {
    let max = generation.config.limits.answers_total_bytes;
    if wish.assemble.is_some() && caller.answers.is_full(max) {
        return Err(Rejection::AnswersFull);
    }
    Ok(())
}

/// Queue → slot. A client that leaves while it is queued never touches the upstream.
async fn admit(
    upstream: &Upstream,
    patience: &Patience<'_>,
    record: &Record,
    bytes: u64,
) -> Result<Started, Rejection> {
    let place = admission::offer(&upstream.limiter, bytes, record.flow())?;
    patience.check()?;
    let mut place = match place.claim() {
        Ok(started) => return Ok(started),
        Err(place) => place,
    };
    match patience
        .within(Tier::Queue, upstream.settings.timeouts.queue, &mut place)
        .await
    {
        Ok(Ok(started)) if started.queued_for.is_zero() => Ok(started),
        Ok(Ok(started)) => still_there(patience).await.map(|()| started),
        Ok(Err(_closed)) => Err(Rejection::Draining),
        Err(Rejection::Timeout(tier)) => {
            let retry_after = place.retry_after();
            let leftovers = admission::are_all_left(&upstream.limiter);
            // The slot may have been granted in the same instant: then it is taken.
            match place.expire() {
                Some(started) => Ok(started),
                None if tier == Tier::Queue => Err(Rejection::QueueTimeout {
                    retry_after,
                    leftovers,
                }),
                None => Err(Rejection::Timeout(tier)),
            }
        }
        Err(over) => Err(over),
    }
}

/// That a client has left while its call was queued may be known to the kernel and not yet to us, above all where many leave at once: what was
/// freed by one would be given to the next. So the sockets are looked at before anything is sent, and (HTTP/2) the streams after them.
async fn still_there(patience: &Patience<'_>) -> Result<(), Rejection> {
    for _ in 0..2 {
        tokio::task::yield_now().await;
    }
    if patience.is_left() {
        return Err(Rejection::Gone);
    }
    // The slots of calls that the end of a drain has cut are nobody's any more.
    if patience.cut().is_raised() {
        return Err(Rejection::Draining);
    }
    Ok(())
}

/// The few fields of a body that we act on; `None` where there are none to look for.
async fn look(route: RouteFacts, received: &Upload) -> Result<Option<Peek>, Rejection> {
    let body = match received {
        Upload::Whole { body, .. } if route.model != ModelIn::Nowhere => body,
        _ => return Ok(None),
    };
    let peeked = if is_read_here(body.len()) {
        peek(body, route.dialect)
    } else {
        let own = body.clone();
        aside(body.len(), move || peek(&own, route.dialect)).await?
    };
    match (peeked, route.model) {
        (Ok(peek), _) => Ok(Some(peek)),
        // What looks like a JSON object is taken at its word: a model that is hidden from us must not reach an upstream.
        (Err(_), ModelIn::BodyIfJson) if !body.trim_ascii_start().starts_with(b"{") => Ok(None),
        (Err(error), _) => Err(Rejection::MalformedBody(error)),
    }
}

fn find_target<'a>(
    routes: &'a Routes,
    peek: Option<&Peek>,
    record: &mut Record,
) -> Result<Target<'a>, Rejection> {
    let found = match peek.and_then(|peek| peek.model.as_ref()) {
        Some(model) => routes
            .find(model)
            .ok_or_else(|| Rejection::UnknownModel(model.chars().take(128).collect())),
        None => routes.default_target().ok_or(Rejection::Internal),
    };
    found.inspect_err(|why| record.refused_model(why))
}

/// As [`Wish::edit`].
async fn edit(
    wish: Wish,
    mut received: Upload,
    target: &Target<'_>,
    peek: Option<&Peek>,
) -> Result<Upload, Rejection> {
    let bytes = match &received {
        Upload::Whole { body, .. } if !is_read_here(body.len()) => body.len(),
        _ => {
            wish.edit(&mut received, target.model, peek);
            return Ok(received);
        }
    };
    let (peek, model) = (peek.cloned(), target.model.map(str::to_owned));
    let edited = move || {
        wish.edit(&mut received, model.as_deref(), peek.as_ref());
        received
    };
    aside(bytes, edited).await
}

impl<'a> Arrival<'a> {
    fn new(fields: &'a Fields, body: Arriving) -> Self {
        Self { fields, body }
    }
}

impl Held {
    fn new(
        started: Started,
        upstream: &Arc<Upstream>,
        background: bool,
        writer: Option<Writer>,
    ) -> Self {
        Self {
            slot: started.slot,
            attendance: Attendance::new(started.waiter, upstream, background, writer),
        }
    }
}

impl Caller {
    /// The same, as a worker has it.
    #[must_use]
    pub fn of_worker(&self, current: &Arc<Current>) -> Self {
        Self {
            current: Arc::clone(current),
            books: Arc::new(Books::clone(&self.books)),
            ..self.clone()
        }
    }

    /// The calls in flight.
    pub fn table(&self) -> &Table {
        &self.books.table
    }

    /// The running configuration.
    pub fn generation(&self) -> Arc<Generation> {
        self.current.get()
    }
}

impl Current {
    /// A copy of `generation`.
    pub fn of(generation: &Generation) -> Self {
        Self(Mutex::new(Arc::new(generation.copy())))
    }

    fn get(&self) -> Arc<Generation> {
        Arc::clone(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Calls that have begun keep what they have.
    pub fn replace(&self, generation: &Generation) {
        let copy = Arc::new(generation.copy());
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = copy;
    }
}

impl Generation {
    /// The same around the same limiters and endpoints.
    fn copy(&self) -> Self {
        Self {
            number: self.number,
            config: self.config.clone(),
            routes: self.routes.copy(),
            keys: Keys::new(&self.config.keys),
        }
    }

    /// The tier of the request's body holds before an upstream is known: it is that of the default upstream.
    pub fn request_body_time(&self) -> Duration {
        let default = self.config.upstreams.get(self.config.default_upstream);
        default.map_or_else(
            || Timeouts::default().request_body,
            |upstream| upstream.timeouts.request_body,
        )
    }
}

pub(crate) fn dialect_name(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::OpenAi => "openai",
        Dialect::Responses => "responses",
        Dialect::Anthropic => "anthropic",
    }
}
