//! A retry is given the answer of the call that it tries again, instead of starting it a second time. Off unless the operator gave the
//! upstream a grace (decision 0017).
//!
//! A call that a retry could be known of has a tape ([`tape`]) on which its answer is put while it passes ([`tapped`]). If its client leaves, the
//! call goes on for the grace, in a task, as abandoned work. A retry sits down ([`orphan`]) and reads the tape from the beginning ([`attached`]).

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use http::Method;
use http::uri::PathAndQuery;
use sha2::{Digest, Sha256};
use tokio::time::Duration;

use super::deadline::{Patience, Tier};
use super::downstream::{Downstream, Reader};
use super::outcome::{Phase, Rejection};
use super::retried::{Mark, idempotency_key};
use super::settle::Record;
use super::upload::Upload;
use super::{Caller, Generation, Step, Toward, aside};
use crate::config;
use crate::fields::{Field, Fields};
use crate::signal::Signal;
use crate::telemetry::metrics::{Metrics, UpstreamLabel};
use crate::upstream::Upstream;

pub mod attached;
pub mod orphan;
pub mod tape;
pub mod tapped;

use attached::UnstartedAttached;
use orphan::{Budget, Likeness, Lost, Most, Of, Orphan, Seat, TapedHead, Writer};
use tape::BLOCK_BYTES;
use tapped::Around;

/// Where clients have no keys, this key is all that tells them apart: it must not be guessed.
const SECRET_CHARS: usize = 16;

/// The head of a call that is taken up may take as long as the call's own tiers allow; this is only an end to it.
const HEAD_TIME: Duration = Duration::from_secs(24 * 3600);

/// Fields that decide over the answer, beside the body: who asks, and which form of the API is meant.
const ALIKE: [Field; 9] = [
    Field::Authorization,
    Field::XApiKey,
    Field::ApiKey,
    Field::Accept,
    Field::AnthropicVersion,
    Field::AnthropicBeta,
    Field::OpenaiBeta,
    Field::OpenaiOrganization,
    Field::OpenaiProject,
];

/// The calls that can be taken up. Clones share it.
#[derive(Clone, Debug)]
pub struct Orphans {
    /// A call is here as long as it has its writer, so there are as many as run or are kept.
    listed: Arc<Mutex<HashMap<Mark, Vec<Arc<Orphan>>>>>,
    budget: Budget,
    /// What the tapes of each client key hold, while it has any.
    keys: Arc<Mutex<HashMap<u64, Weak<AtomicUsize>>>>,
    /// A call was listed since the start. Where none ever was, nobody looks.
    ever: Arc<AtomicBool>,
    /// The gateway drains: nobody can come back to it.
    closing: Signal,
}

/// A place in [`Orphans`]; given back when it is dropped.
#[derive(Debug)]
pub(super) struct ListedOrphan {
    orphans: Orphans,
    mark: Mark,
    orphan: Weak<Orphan>,
}

/// A request that came to an upstream whose calls can be taken up.
#[derive(Debug)]
pub struct Candidate<'a> {
    pub method: &'a Method,
    pub path_and_query: &'a PathAndQuery,
    pub fields: &'a Fields,
    pub received: &'a Upload,
    pub peer: SocketAddr,
}

/// What a call is found by.
#[derive(Clone, Copy, Debug)]
pub struct Ticket {
    mark: Mark,
    like: Likeness,
    named: bool,
    /// `None`: it is only looked for, and its own call cannot be taken up.
    most: Option<Most>,
}

/// What there is for a request.
#[derive(Debug)]
pub enum Found {
    /// Its own call, whose answer has begun.
    Own(Own),
    /// Nothing: it begins a call, which can be taken up by this, if at all.
    Nothing(Option<Ticket>),
}

/// A call that a retry has taken up.
#[derive(Debug)]
pub struct Own {
    head: TapedHead,
    seat: Seat,
}

impl Own {
    /// Its answer, for this connection.
    pub(super) fn attaching(self, downstream: &Arc<Downstream>, reader: &Arc<Reader>) -> Step {
        Step::Attaching(Box::new(UnstartedAttached {
            head: self.head,
            seat: self.seat,
            downstream: Arc::clone(downstream),
            reader: Arc::clone(reader),
        }))
    }
}

impl Orphans {
    pub fn new(metrics: &Arc<Metrics>, closing: Signal) -> Self {
        Self {
            listed: Arc::default(),
            budget: Budget::new(metrics),
            keys: Arc::default(),
            ever: Arc::default(),
            closing,
        }
    }

    /// A call may be listed, of this generation or of one before it.
    fn may_list_any(&self) -> bool {
        self.ever.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Mark, Vec<Arc<Orphan>>>> {
        // No code of others runs under this lock, so a poisoned one holds sound data.
        self.listed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The memory for a call of this key.
    fn budget_of(&self, flow: u64) -> Budget {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        let held = keys.get(&flow).and_then(Weak::upgrade);
        let held = held.unwrap_or_else(|| {
            let held = Arc::default();
            keys.retain(|_, key| key.strong_count() > 0);
            keys.insert(flow, Arc::downgrade(&held));
            held
        });
        self.budget.of_key(held)
    }

    /// A seat at the newest call that can be taken up with this.
    fn find(&self, ticket: &Ticket) -> Option<Seat> {
        let alike: Vec<_> = {
            let listed = self.lock();
            let calls = listed.get(&ticket.mark)?.iter().rev();
            calls
                .filter(|call| call.like == ticket.like)
                .cloned()
                .collect()
        };
        alike.iter().find_map(Orphan::sit)
    }
}

impl Ticket {
    /// Lists a call that has its slot.
    pub fn list(self, to: Toward<'_>, record: &Record) -> Option<Writer> {
        let orphans = &to.worker.caller.orphans;
        let around = Around::new(to)?;
        let of = Of {
            entry: Arc::clone(record.listed_entry()?),
            like: self.like,
            named: self.named,
            closing: orphans.closing.clone(),
        };
        let orphan = Orphan::new(of, orphans.budget_of(record.flow()), self.most?);
        orphans.ever.store(true, Ordering::Relaxed);
        let mut listed = orphans.lock();
        let alike = listed.entry(self.mark).or_default();
        alike.push(Arc::clone(&orphan));
        drop(listed);
        let listed = ListedOrphan {
            orphans: orphans.clone(),
            mark: self.mark,
            orphan: Arc::downgrade(&orphan),
        };
        Some(Writer::new(orphan, Some(listed), around))
    }
}

impl Drop for ListedOrphan {
    fn drop(&mut self) {
        let mut listed = self.orphans.lock();
        let gone = listed.get_mut(&self.mark).and_then(|calls| {
            let here = |call: &Arc<Orphan>| Arc::as_ptr(call) == self.orphan.as_ptr();
            let at = calls.iter().position(here)?;
            Some((calls.remove(at), calls.is_empty()))
        });
        if let Some((_, true)) = gone {
            listed.remove(&self.mark);
        }
        drop(listed);
        drop(gone);
    }
}

/// Whether a request that is turned away for want of room may have a call of its own to take up.
pub fn may_find(orphans: &Orphans, fields: &Fields) -> bool {
    orphans.may_list_any() && (idempotency_key(fields).is_some() || is_retry(fields))
}

/// Where and for what a request looks.
#[derive(Debug)]
pub struct Look<'a> {
    caller: &'a Caller,
    generation: &'a Generation,
    /// Off by now: only calls that began before that can be found.
    attach: Option<config::Attach>,
    candidate: &'a Candidate<'a>,
}

/// `None`: no calls wait for their retries, neither this upstream's nor those that an earlier configuration has left.
///
/// # Errors
///
/// [`Rejection::NothingToResume`] if a retry asks for its call there.
pub fn look<'a>(
    caller: &'a Caller,
    generation: &'a Generation,
    upstream: &Upstream,
    candidate: &'a Candidate<'_>,
) -> Result<Option<Look<'a>>, Rejection> {
    let attach = upstream.settings.attach;
    if attach.is_none() && !caller.orphans.may_list_any() {
        return if resumes(candidate.fields) {
            Err(Rejection::NothingToResume)
        } else {
            Ok(None)
        };
    }
    Ok(Some(Look {
        caller,
        generation,
        attach,
        candidate,
    }))
}

impl Look<'_> {
    /// Looks for the call that this request tries again, and waits for the beginning of its answer.
    ///
    /// # Errors
    ///
    /// The call's own failure, if it has no answer; [`Rejection::TakenOver`]; [`Rejection::NothingToResume`]; those of
    /// [`Patience::within`].
    ///
    /// # Cancel safety
    ///
    /// May be dropped: the seat goes with it.
    pub async fn own(
        self,
        patience: &Patience<'_>,
        record: &mut Record,
    ) -> Result<Found, Rejection> {
        let ticket = self.ticket(record).await?;
        let resume = resumes(self.candidate.fields);
        let again = |ticket: &Ticket| ticket.named || resume || is_retry(self.candidate.fields);
        let own = ticket.filter(again);
        let seat = own.and_then(|ticket| self.caller.orphans.find(&ticket));
        if let Some(seat) = seat
            && let Some(own) = self.wait(seat, patience, record).await?
        {
            return Ok(Found::Own(own));
        }
        if resume {
            return Err(Rejection::NothingToResume);
        }
        Ok(Found::Nothing(ticket))
    }

    /// Until the call has begun its answer. `None`: it is over without one, and never did any work.
    async fn wait(
        &self,
        mut seat: Seat,
        patience: &Patience<'_>,
        record: &mut Record,
    ) -> Result<Option<Own>, Rejection> {
        record.attaches(seat.entry());
        record.phase(Phase::WaitingHead);
        let head = patience.within(Tier::ResponseHead, HEAD_TIME, seat.head());
        match head.await {
            Ok(Ok(head)) => {
                let upstream = record.upstream_name();
                let attaches = &self.caller.metrics.attaches;
                attaches.get_or_create(&UpstreamLabel { upstream }).inc();
                Ok(Some(Own { head, seat }))
            }
            Ok(Err(Lost::Failed(why))) => Err(why),
            Ok(Err(Lost::Replaced)) => Err(Rejection::TakenOver),
            Ok(Err(Lost::Over)) => {
                record.attaches_no_more();
                Ok(None)
            }
            Err(Rejection::Stopped(by)) => {
                // Whoever ends the retry means the work.
                seat.entry().end(by);
                Err(Rejection::Stopped(by))
            }
            Err(over) => Err(over),
        }
    }

    /// `None`: its call cannot be taken up, because nothing tells its retry from anybody else's request.
    async fn ticket(&self, record: &Record) -> Result<Option<Ticket>, Rejection> {
        let Self {
            generation,
            attach,
            candidate,
            ..
        } = self;
        let (Some(mark), Upload::Whole { body, .. }) = (record.mark(), candidate.received) else {
            return Ok(None);
        };
        let key = idempotency_key(candidate.fields);
        let secret = || key.is_some_and(|key| key.len() >= SECRET_CHARS);
        let near = || candidate.peer.ip().to_canonical().is_loopback();
        if generation.keys.is_open() && !(near() && secret()) {
            return Ok(None);
        }
        let hasher = alike(candidate, record.principal());
        let body = body.clone();
        let like = aside(body.len(), move || {
            hasher.chain_update(&body).finalize().into()
        });
        Ok(Some(Ticket {
            mark,
            like: Likeness(like.await?),
            named: key.is_some(),
            most: attach.map(|attach| most(attach, &generation.config)),
        }))
    }
}

/// Where there are several client keys, one of them does not get the memory of all.
fn most(attach: config::Attach, config: &config::Config) -> Most {
    let all = config.limits.attach_total_bytes;
    let several = config.keys.len() > 1;
    let half = (all / 2).max(BLOCK_BYTES);
    Most {
        own: attach.bytes,
        key: if several { half } else { all },
        all,
    }
}

/// It is to have its call or nothing, and fails instead of starting one: any value but one that says no.
fn resumes(fields: &Fields) -> bool {
    let mut resume = fields.get_all(Field::XTidegateResume);
    resume.any(|value| !matches!(value, b"" | b"0" | b"false"))
}

/// An SDK says so.
fn is_retry(fields: &Fields) -> bool {
    let count = fields.get(Field::RetryCount);
    count.is_some_and(|count| count != b"0")
}

/// All that a retry has in common with its call, but for the body.
fn alike(candidate: &Candidate<'_>, principal: &str) -> Sha256 {
    let mut hasher = Sha256::new();
    let mut part = |bytes: &[u8]| {
        hasher.update((bytes.len() as u64).to_be_bytes());
        hasher.update(bytes);
    };
    part(principal.as_bytes());
    part(candidate.method.as_str().as_bytes());
    part(candidate.path_and_query.as_str().as_bytes());
    let key = idempotency_key(candidate.fields);
    part(key.unwrap_or_default());
    for field in ALIKE {
        let values = || candidate.fields.get_all(field);
        part(&values().count().to_be_bytes());
        values().for_each(&mut part);
    }
    hasher
}
