//! Asking a server whether the work of abandoned calls has ended.
//!
//! An exchange that was closed says nothing of the work behind it. Where the server shows how many calls it has in hand, it is asked: one
//! poll at a time for each endpoint, at a bounded rate, of bounded bytes and time, and only while slots are kept there. [`book`] decides what
//! the answers mean; here are the polls, the timers, and the task that keeps a slot. What the count can and cannot tell: decision 0015.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tidegate_limiter::Linger;
use tidegate_wire::{llama_in_hand, vllm_in_hand};
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout};

use super::outcome::EndKnown;
use super::settle::Record;
use super::table::{Listed, Table};
use super::{Generation, Worker, headers};
use crate::config::Confirm;
use crate::fields::Fields;
use crate::telemetry::metrics::ConfirmLabels;
use crate::upstream::page::{self, PageError, Way};
use crate::upstream::{EndpointState, Upstream};

mod book;
#[cfg(test)]
mod tests;

use book::{Book, GRACE, Left, ServerCount};

/// Time from one poll to the next, at first; it doubles as long as nothing new happens.
const EACH: Duration = Duration::from_millis(200);
const EACH_MAX: Duration = Duration::from_secs(1);
/// The same after a poll that failed.
const AFTER_FAILURE: Duration = Duration::from_secs(5);
/// Longest that a poll may take. llama.cpp answers between two batches of a prompt.
const POLL_TIME: Duration = Duration::from_secs(10);

/// The endpoints at which slots are kept until the server shows that the work has ended.
#[derive(Clone, Debug)]
pub struct Inquiries {
    table: Table,
    /// By the address of their states, which they hold. One for each endpoint at which something is left.
    open: Arc<Mutex<HashMap<usize, Arc<Inquiry>>>>,
}

/// What is left at one endpoint.
#[derive(Debug)]
struct Inquiry {
    endpoint: Arc<EndpointState>,
    desk: Mutex<Desk>,
    changed: Notify,
}

#[derive(Debug)]
struct Desk {
    book: Book,
    waiting: HashMap<u64, oneshot::Sender<EndKnown>>,
    next_id: u64,
    /// How the server is asked: as the last call that was left here would have been.
    asked: Asked,
    gap: Duration,
}

#[derive(Clone, Debug)]
struct Asked {
    upstream: Arc<Upstream>,
    generation: Arc<Generation>,
}

/// A call whose exchange is closed.
#[derive(Debug)]
pub struct Closed {
    pub upstream: Arc<Upstream>,
    pub endpoint: Arc<EndpointState>,
    pub generation: Arc<Generation>,
    pub linger: Linger,
    /// Its place among the calls in flight.
    pub listed: Option<Listed>,
    /// How long the contract keeps the slot.
    pub kept: Duration,
    pub first_token: Option<Instant>,
    /// Brings the record, as soon as the call is over for its client.
    pub record: oneshot::Receiver<Box<Record>>,
}

// === impl Inquiries ===

impl Inquiries {
    pub fn new(table: Table) -> Self {
        Self {
            table,
            open: Arc::default(),
        }
    }

    /// Keeps the slot until the server shows that the work has ended, or the bounds are reached; then gives it back and settles the record.
    /// Returns at once. Needs a runtime.
    pub fn keep(&self, worker: &Arc<Worker>, closed: Closed) {
        let since = Instant::now();
        let (inquiry, id, known) = self.enter(worker, &closed);
        let cut = worker.caller.cut.clone();
        worker.drivers.spawn(async move {
            let killed = async {
                match &closed.listed {
                    Some(listed) => listed.entry().killed().await,
                    None => std::future::pending().await,
                }
            };
            let known = tokio::select! {
                known = known => known.unwrap_or(EndKnown::Unknown),
                () = killed => EndKnown::Killed,
                () = cut.raised() => EndKnown::Unknown,
            };
            inquiry.forget(id);
            match known {
                EndKnown::Confirmed | EndKnown::Late => closed.linger.confirm_end(),
                _ => drop(closed.linger),
            }
            drop(closed.listed);
            let labels = ConfirmLabels {
                upstream: Arc::clone(&closed.upstream.name),
                result: known.name(),
            };
            let metrics = &closed.upstream.metrics;
            metrics.confirmations.get_or_create(&labels).inc();
            let kept = since.elapsed();
            if let Ok(mut record) = closed.record.await {
                record.known(known, kept);
                record.settle();
            }
        });
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Arc<Inquiry>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a call in; the first at its endpoint starts the polls, on its worker.
    fn enter(
        &self,
        worker: &Arc<Worker>,
        closed: &Closed,
    ) -> (Arc<Inquiry>, u64, oneshot::Receiver<EndKnown>) {
        let asked = Asked {
            upstream: Arc::clone(&closed.upstream),
            generation: Arc::clone(&closed.generation),
        };
        let within = closed.upstream.settings.abandon.confirm_within;
        let key = Arc::as_ptr(&closed.endpoint) as usize;
        let mut open = self.lock();
        let mut is_new = false;
        let inquiry = open.entry(key).or_insert_with(|| {
            is_new = true;
            Arc::new(Inquiry::new(&closed.endpoint, asked.clone()))
        });
        let inquiry = Arc::clone(inquiry);
        let (tell, known) = oneshot::channel();
        let id = {
            let mut desk = inquiry.desk();
            desk.asked = asked;
            desk.gap = gap(&closed.endpoint);
            let id = desk.next_id;
            desk.next_id += 1;
            desk.waiting.insert(id, tell);
            let entry = closed.listed.as_ref().map(|l| Arc::clone(l.entry()));
            let bounds = (closed.kept, within);
            let left = Left::new(id, Instant::now(), bounds, closed.first_token, entry);
            desk.book.add(left);
            id
        };
        drop(open);
        inquiry.changed.notify_one();
        if is_new {
            let way = Way {
                pool: Arc::clone(&worker.pool),
                tcp: worker.tcp,
                buffer_bytes: worker.stream_buffer_bytes,
                drivers: worker.drivers.clone(),
            };
            let (own, inquiry) = (self.clone(), Arc::clone(&inquiry));
            worker.drivers.spawn(async move {
                inquiry.run(&own, &way).await;
            });
        }
        (inquiry, id, known)
    }

    /// Ends an inquiry that has nothing left to ask for. Whether it was ended.
    fn close(&self, inquiry: &Arc<Inquiry>) -> bool {
        let mut open = self.lock();
        if !inquiry.desk().book.is_empty() {
            return false;
        }
        open.remove(&(Arc::as_ptr(&inquiry.endpoint) as usize));
        true
    }
}

// === impl Inquiry ===

impl Inquiry {
    fn new(endpoint: &Arc<EndpointState>, asked: Asked) -> Self {
        let mut book = Book::default();
        if endpoint.page_fails() {
            book.unreadable();
        }
        Self {
            endpoint: Arc::clone(endpoint),
            desk: Mutex::new(Desk {
                book,
                waiting: HashMap::new(),
                next_id: 0,
                asked,
                gap: EACH,
            }),
            changed: Notify::new(),
        }
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The call's slot went back for another reason.
    fn forget(&self, id: u64) {
        let mut desk = self.desk();
        desk.book.remove(id);
        desk.waiting.remove(&id);
        drop(desk);
        self.changed.notify_one();
    }

    /// Polls as long as anything is left here.
    async fn run(self: Arc<Self>, all: &Inquiries, way: &Way) {
        let mut polled = self.endpoint.page_asked();
        let mut counted: Option<(ServerCount, Instant)> = None;
        let mut poll = None;
        loop {
            let now = Instant::now();
            if let Some((count, _)) = counted.filter(|(_, due)| *due <= now) {
                counted = None;
                // Those that were at it before the count and still are, are in the count.
                let since = count.begun.checked_sub(GRACE).unwrap_or(count.begun);
                let own = all.table.steady(&self.endpoint, since);
                self.desk().book.count(count, own);
            }
            self.desk().free(now);
            if self.desk().book.is_empty() {
                // A poll under way goes with it: nobody would read its answer.
                drop(poll.take());
                if all.close(&self) {
                    return;
                }
                continue;
            }
            if poll.is_none() && counted.is_none() && self.desk().due(polled) <= now {
                poll = Some(Box::pin(self.poll(way)));
            }
            let wake = self
                .desk()
                .wake(now, polled, poll.is_some(), counted.map(|c| c.1));
            let answer = async {
                match &mut poll {
                    Some(poll) => poll.await,
                    None => std::future::pending().await,
                }
            };
            let answer = tokio::select! {
                answer = answer => answer,
                () = self.changed.notified() => continue,
                () = tokio::time::sleep_until(wake) => continue,
            };
            poll = None;
            polled = Some(Instant::now());
            self.endpoint.page_was_asked(Instant::now());
            counted = self.answered(answer);
        }
    }

    /// Takes the answer of a poll. What may be known better in a moment is handed back.
    fn answered(&self, answer: Result<ServerCount, Unread>) -> Option<(ServerCount, Instant)> {
        let mut desk = self.desk();
        let upstream = Arc::clone(&desk.asked.upstream);
        let labels = ConfirmLabels {
            upstream: Arc::clone(&upstream.name),
            result: answer.as_ref().map_or_else(Unread::name, |_| "read"),
        };
        upstream.metrics.confirm_polls.get_or_create(&labels).inc();
        let endpoint = &self.endpoint.authority;
        match answer {
            Ok(count) => {
                if self.endpoint.page_was_read() {
                    tracing::info!(upstream = %upstream.name, %endpoint, "the server shows its work again");
                }
                desk.book.saw(count);
                desk.book.count(count, 0);
                desk.gap = (desk.gap * 2).min(EACH_MAX);
                (count.in_hand > 0).then(|| (count, Instant::now() + GRACE))
            }
            Err(why) => {
                if self.endpoint.page_failed() {
                    tracing::warn!(error = %why, upstream = %upstream.name, %endpoint, page = path(&desk.asked), "the server does not show its work (abandon.confirm); its slots are kept for the time of the contract instead");
                }
                desk.book.unreadable();
                desk.gap = AFTER_FAILURE;
                None
            }
        }
    }

    async fn poll(&self, way: &Way) -> Result<ServerCount, Unread> {
        let asked = self.desk().asked.clone();
        let Asked {
            upstream,
            generation,
        } = &asked;
        let fields =
            headers::to_upstream(Fields::default(), &generation.config, &upstream.settings);
        let begun = Instant::now();
        let fetch = page::fetch(upstream, &self.endpoint, way, &fields, path(&asked));
        let page = timeout(POLL_TIME, fetch)
            .await
            .map_err(|_| Unread::TooSlow)?
            .map_err(Unread::Page)?;
        let (in_hand, whole) = match upstream.settings.abandon.confirm {
            // What arrived in the middle of a step is not in its gauges until the step is over.
            Confirm::VllmMetrics | Confirm::Off => (vllm_in_hand(&page), false),
            Confirm::LlamaSlots => match llama_in_hand(&page) {
                Ok((busy, slots)) => (Ok(busy), busy < slots),
                Err(why) => (Err(why), false),
            },
        };
        let in_hand = in_hand.map_err(Unread::Text)?;
        Ok(ServerCount {
            begun,
            in_hand,
            whole,
        })
    }
}

/// From one poll to the next, when a call was just left.
fn gap(endpoint: &EndpointState) -> Duration {
    if endpoint.page_fails() {
        AFTER_FAILURE
    } else {
        EACH
    }
}

fn path(asked: &Asked) -> &'static str {
    match asked.upstream.settings.abandon.confirm {
        Confirm::LlamaSlots => "/slots",
        Confirm::VllmMetrics | Confirm::Off => "/metrics",
    }
}

// === impl Desk ===

impl Desk {
    /// Tells the calls whose slots are free.
    fn free(&mut self, now: Instant) {
        for (id, known) in self.book.free(now) {
            if let Some(waiting) = self.waiting.remove(&id) {
                // It may have ended for another reason in this moment.
                let _ = waiting.send(known);
            }
        }
    }

    /// When the next poll may begin.
    fn due(&self, polled: Option<Instant>) -> Instant {
        let is_llama = self.asked.upstream.settings.abandon.confirm == Confirm::LlamaSlots;
        let rested = polled.map(|polled| (polled, self.gap));
        self.book.due(rested, is_llama).unwrap_or_else(Instant::now)
    }

    /// When to look again, if nothing happens before.
    fn wake(
        &self,
        now: Instant,
        polled: Option<Instant>,
        polling: bool,
        counted: Option<Instant>,
    ) -> Instant {
        let due = (!polling && counted.is_none()).then(|| self.due(polled));
        let change = self.book.next_change(now);
        let all = [due, counted, change];
        let next = all.into_iter().flatten().min();
        next.unwrap_or(now + POLL_TIME)
    }
}

/// Why there is no count.
#[derive(Debug)]
enum Unread {
    TooSlow,
    Page(PageError),
    Text(tidegate_wire::ShownError),
}

impl Unread {
    fn name(&self) -> &'static str {
        match self {
            Self::TooSlow => "timeout",
            Self::Page(error) => error.name(),
            Self::Text(_) => "unreadable",
        }
    }
}

impl std::fmt::Display for Unread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::TooSlow => write!(f, "it did not come within {} s", POLL_TIME.as_secs()),
            Self::Page(error) => error.fmt(f),
            Self::Text(error) => error.fmt(f),
        }
    }
}
