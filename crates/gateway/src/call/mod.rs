//! One call, from an authenticated request to its settlement. THE STRAIGHT LINE is [`run`].
//!
//! A **call** is work, a **waiter** is somebody interested in it; they end at different times. The call owns the slot and the upstream
//! exchange; the waiter owns the place in the queue and the downstream connection. [`handover`] keeps a call alive whose waiter went
//! before its answer began, [`relay`] carries an answer, [`aftermath`] ends what a leaving client left behind, [`settle`] writes the one
//! record. This module is the only one that composes the floor below (admission, upstream, usage, auth); it never chooses a status code.

use std::sync::Arc;

use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{HeaderMap, Method};
use hyper::body::Incoming;
use tidegate_limiter::{Slot, Started};
use tidegate_wire::{Dialect, Peek, peek};
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use crate::admission::{self, Shed};
use crate::auth::{Keys, Principal};
use crate::config::{Config, Timeouts};
use crate::signal::Signal;
use crate::telemetry::access_log::AccessLog;
use crate::telemetry::journal::Journal;
use crate::telemetry::metrics::Metrics;
use crate::upstream::Upstream;
use crate::upstream::connect::TcpOptions;
use crate::upstream::pool::Pool;
use crate::upstream::route::{Routes, Target};

pub mod aftermath;
pub mod answer;
mod assembled;
pub mod attach;
pub mod attempt;
pub mod attendance;
pub mod body;
mod clock;
pub mod confirm;
pub mod contract;
pub mod deadline;
pub mod downstream;
pub mod handover;
pub mod headers;
pub mod listing;
pub mod outcome;
pub mod relay;
pub mod retried;
pub mod retry;
pub mod settle;
pub mod source;
pub mod table;
pub mod upload;
pub mod waste;
mod wish;

pub use answer::Answer;
pub use outcome::Rejection;

use attach::orphan::Writer;
use attach::tapped;
use attach::{Asked, Found, Orphans};
use attendance::Attendance;
use confirm::Inquiries;
use deadline::{Patience, Tier};
use downstream::{Downstream, Reader};
use handover::Gone;
use outcome::Phase;
use retried::Retried;
use settle::Record;
use table::Table;
use upload::{BodyBudget, Upload};
use wish::Wish;

/// One configuration generation, ready to serve. A call takes one at its start and keeps it.
#[derive(Debug)]
pub struct Generation {
    pub number: u64,
    pub config: Config,
    pub routes: Routes,
    pub keys: Keys,
}

/// What every call needs and none owns.
#[derive(Clone, Debug)]
pub struct Caller {
    pub generations: watch::Receiver<Arc<Generation>>,
    pub metrics: Arc<Metrics>,
    pub access_log: AccessLog,
    pub bodies: Arc<BodyBudget>,
    /// The calls in flight.
    pub table: Table,
    /// What is left of the calls if the process is killed.
    pub journal: Option<Journal>,
    /// Abandoned calls, to know their retries by.
    pub retried: Retried,
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
    /// As in [`Caller`].
    pub cut: Signal,
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

/// An authenticated request.
#[derive(Debug)]
pub struct Ask {
    pub id: Arc<str>,
    /// The id that the client chose (`x-tidegate-call`), checked by the front.
    pub own_id: Option<Arc<str>>,
    pub route: RouteFacts,
    pub method: Method,
    /// Checked by the front: absolute, no dot segments.
    pub path_and_query: PathAndQuery,
    pub headers: HeaderMap,
    pub body: Incoming,
    pub principal: Principal,
    pub downstream: Arc<Downstream>,
    pub reader: Arc<Reader>,
    pub gone: Arc<Gone>,
    pub generation: Arc<Generation>,
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

/// What goes upstream, the same for every attempt.
#[derive(Debug)]
pub struct Prepared {
    pub method: Method,
    pub path_and_query: PathAndQuery,
    pub headers: HeaderMap,
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
pub async fn run(caller: &Caller, worker: &Arc<Worker>, ask: Ask) -> Result<Answer, Refused> {
    let mut record = Record::begin(caller, worker, &ask);
    match line(caller, worker, ask, &mut record).await {
        Ok(Step::Answered(head, bytes, None)) => {
            record.settle();
            Ok(Answer::whole(*head, bytes))
        }
        Ok(Step::Answered(head, bytes, Some(writer))) => {
            Ok(tapped::whole(*head, bytes, writer, record))
        }
        Ok(Step::Relaying(head, relay)) => {
            let mut relay = relay.start(record);
            Ok(match relay.take_writer() {
                None => Answer::relaying(*head, relay),
                Some(writer) => tapped::relaying(*head, relay, writer),
            })
        }
        Ok(Step::Attaching(attaching)) => Ok(attaching.start(record)),
        Err(rejection) => Err(Refused { rejection, record }),
    }
}

/// How an admitted call goes on after its line.
enum Step {
    /// With what its retry would take it up by.
    Answered(Box<answer::Head>, Bytes, Option<Writer>),
    Relaying(Box<answer::Head>, Box<relay::Unstarted>),
    /// It is a retry and has the answer of its own call.
    Attaching(Box<attach::attached::Unstarted>),
}

/// body → peek → route → admit → attempt … head → commit.
async fn line(
    caller: &Caller,
    worker: &Arc<Worker>,
    ask: Ask,
    record: &mut Record,
) -> Result<Step, Rejection> {
    let (route, headers, generation) = (ask.route, ask.headers, ask.generation);
    let patience = Patience::new(ask.gone, caller.cut.clone()).with_entry(record.entry().cloned());

    record.phase(Phase::Body);
    room_for_body(caller, &generation.routes, &headers, record.flow())?;
    let arriving = (&headers, ask.body, ask.downstream.received());
    let received = upload::receive(caller, &generation, &patience, route, arriving).await?;
    record.received(&headers, &received).await?;

    let peek = look(route, &received).await?;
    let target = find_target(&generation.routes, peek.as_ref())
        .inspect_err(|why| record.refused_model(why))?;
    record.routed(&target, peek.as_ref());
    let upstream = Arc::clone(target.upstream);
    let wish = Wish::of(&upstream.settings, route, peek.as_ref());
    let asked = Asked {
        method: &ask.method,
        path_and_query: &ask.path_and_query,
        headers: &headers,
        received: &received,
        peer: ask.downstream.peer,
    };
    let ticket = match attach::look((caller, &generation, &upstream), &asked)? {
        None => None,
        // Boxed: rare, and a large part of the call's future otherwise.
        Some(look) => match Box::pin(look.own(&patience, record)).await? {
            Found::Own(own) => return Ok(own.attaching(ask.downstream, ask.reader)),
            Found::Nothing(ticket) => ticket.filter(|_| !wish.background),
        },
    };
    let upload = edit(wish, received, &target, peek.as_ref()).await?;

    record.phase(Phase::Queued);
    let patience = patience.with_total(upstream.settings.timeouts.total);
    let started = admit(&upstream, &patience, record, upload.len())
        .await
        .inspect_err(|why| aftermath::note(why, record))?;
    record.admitted();
    let of = (caller, &**worker, &*upstream);
    let writer = ticket.and_then(|ticket| ticket.list(of, &patience, record));
    let mut held = Held {
        slot: started.slot,
        attendance: Attendance::new(started.waiter, &upstream, wish.background, writer, record),
    };

    let prepared = Prepared {
        method: ask.method,
        path_and_query: ask.path_and_query,
        headers: headers::to_upstream(&headers, &generation.config, &upstream.settings),
        upload,
    };
    let to = (worker, &upstream);
    let attendance = &mut held.attendance;
    let answered = attempt::until_head(to, &patience, prepared, attendance, record).await;
    record.left(&held.attendance);
    let exchange = match answered {
        Ok(exchange) => exchange,
        Err(rejection) => {
            aftermath::never_answered(to, held, &rejection, record);
            return Err(rejection);
        }
    };

    let commit = answer::Commit {
        worker,
        generation: &generation,
        upstream: &upstream,
        patience: &patience,
        route,
        wish,
        downstream: ask.downstream,
        reader: ask.reader,
    };
    answer::begin(commit, exchange, held, record).await
}

/// Refuses before a byte of the body is read, if every upstream would turn the request away.
fn room_for_body(
    caller: &Caller,
    routes: &Routes,
    headers: &HeaderMap,
    flow: u64,
) -> Result<(), Rejection> {
    let bytes = upload::announced(headers).unwrap_or(0);
    let limiters = routes.upstreams().iter().map(|u| &u.limiter);
    match admission::would_shed(limiters, bytes, flow) {
        Some(shed) if !attach::may_find(&caller.orphans, headers) => Err(shed.into()),
        _ => Ok(()),
    }
}

/// Queue → slot. A client that leaves while it is queued never touches the upstream.
async fn admit(
    upstream: &Upstream,
    patience: &Patience,
    record: &Record,
    bytes: u64,
) -> Result<Started, Rejection> {
    let mut place = admission::offer(&upstream.limiter, record.id(), bytes, record.flow())?;
    match patience
        .within(Tier::Queue, upstream.settings.timeouts.queue, &mut place)
        .await
    {
        Ok(Ok(started)) if started.queued_for.is_zero() => Ok(started),
        Ok(Ok(started)) => still_there(patience).await.map(|()| started),
        Ok(Err(_closed)) => Err(Rejection::Draining),
        Err(Rejection::Timeout(tier)) => {
            let retry_after = place.retry_after();
            // The slot may have been granted in the same instant: then it is taken.
            match place.expire() {
                Some(started) => Ok(started),
                None if tier == Tier::Queue => Err(Rejection::QueueTimeout { retry_after }),
                None => Err(Rejection::Timeout(tier)),
            }
        }
        Err(over) => Err(over),
    }
}

/// That a client has left while its call was queued may be known to the kernel and not yet to us, above all where many leave at once: what was
/// freed by one would be given to the next. So the sockets are looked at before anything is sent, and (HTTP/2) the streams after them.
async fn still_there(patience: &Patience) -> Result<(), Rejection> {
    for _ in 0..2 {
        tokio::task::yield_now().await;
    }
    match patience.gone() {
        Some(gone) if gone.is_set() => Err(Rejection::Gone),
        _ => Ok(()),
    }
}

impl From<Shed> for Rejection {
    fn from(shed: Shed) -> Self {
        match shed {
            Shed::QueueFull { retry_after } => Self::QueueFull { retry_after },
            Shed::LeftoverFull { retry_after } => Self::LeftoverFull { retry_after },
            Shed::ShareFull { retry_after } => Self::ShareFull { retry_after },
            Shed::Closed => Self::Closed,
        }
    }
}

/// Longer bodies are read on a thread of their own. 64 MiB hold up a worker, and with it all of its streams, for 35 ms (one long text) to
/// 260 ms (numbers), and copying them for 100 ms.
const READ_HERE_BYTES: usize = 1024 * 1024;

/// Does what takes a time that grows with so many bytes.
#[expect(
    clippy::disallowed_methods,
    reason = "awaited by its call; how many there can be is bounded by the bytes of all bodies"
)]
async fn aside<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Rejection> {
    if bytes <= READ_HERE_BYTES {
        return Ok(work());
    }
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|_panicked| Rejection::Internal)
}

/// The few fields of a body that we act on; `None` where there are none to look for.
async fn look(route: RouteFacts, received: &Upload) -> Result<Option<Peek>, Rejection> {
    let body = match received {
        Upload::Whole { body, .. } if route.model != ModelIn::Nowhere => body,
        _ => return Ok(None),
    };
    let (own, dialect) = (body.clone(), route.dialect);
    match (
        aside(body.len(), move || peek(&own, dialect)).await?,
        route.model,
    ) {
        (Ok(peek), _) => Ok(Some(peek)),
        // What looks like a JSON object is taken at its word: a model that is hidden from us must not reach an upstream.
        (Err(_), ModelIn::BodyIfJson) if !body.trim_ascii_start().starts_with(b"{") => Ok(None),
        (Err(error), _) => Err(Rejection::MalformedBody(error)),
    }
}

fn find_target<'a>(routes: &'a Routes, peek: Option<&Peek>) -> Result<Target<'a>, Rejection> {
    match peek.and_then(|peek| peek.model.as_ref()) {
        Some(model) => routes
            .find(model)
            .ok_or_else(|| Rejection::UnknownModel(model.chars().take(128).collect())),
        None => routes.default_target().ok_or(Rejection::Internal),
    }
}

/// As [`Wish::edit`].
async fn edit(
    wish: Wish,
    received: Upload,
    target: &Target<'_>,
    peek: Option<&Peek>,
) -> Result<Upload, Rejection> {
    let bytes = match &received {
        Upload::Whole { body, .. } if body.len() > READ_HERE_BYTES => body.len(),
        _ => return Ok(wish.edit(received, target.model, peek)),
    };
    let (peek, model) = (peek.cloned(), target.model.map(str::to_owned));
    let edited = move || wish.edit(received, model.as_deref(), peek.as_ref());
    aside(bytes, edited).await
}

impl Caller {
    /// The running configuration.
    pub fn generation(&self) -> Arc<Generation> {
        Arc::clone(&self.generations.borrow())
    }
}

impl Generation {
    /// The tiers that hold before an upstream is known: those of the default upstream.
    pub fn timeouts(&self) -> Timeouts {
        self.config
            .upstreams
            .get(self.config.default_upstream)
            .map(|u| u.timeouts.clone())
            .unwrap_or_default()
    }
}

pub(crate) fn dialect_name(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::OpenAi => "openai",
        Dialect::Responses => "responses",
        Dialect::Anthropic => "anthropic",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn much_is_read_beside_the_worker_and_little_at_once() {
        let here = std::thread::current().id();
        let on = || std::thread::current().id();
        assert_eq!(aside(READ_HERE_BYTES, on).await.unwrap(), here);
        assert_ne!(aside(READ_HERE_BYTES + 1, on).await.unwrap(), here);
    }
}
