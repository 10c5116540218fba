//! How a record begins: that of a call, of a request that never became one, and of what is no call at all.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::Method;
use tidegate_wire::Dialect;
use tokio::time::Instant;

use super::{Record, Who};
use crate::auth::Principal;
use crate::call::handover::boxed;
use crate::call::outcome::Phase;
use crate::call::retried::Retried;
use crate::call::{Ask, Caller, ModelIn, RouteFacts, Worker};
use crate::telemetry::access_log::{AccessLog, Times};
use crate::telemetry::metrics::Metrics;
use crate::usage::Meter;

/// Longest model name or path that is kept for the log.
const SHOWN_CHARS: usize = 128;

/// What is known of a request that never became a call.
#[derive(Debug)]
pub struct Edge {
    pub peer: SocketAddr,
    pub method: Method,
    pub path: String,
    pub dialect: Dialect,
}

/// At most [`SHOWN_CHARS`] characters of a text that a client chose.
pub(super) fn shown(text: &str) -> &str {
    text.char_indices()
        .nth(SHOWN_CHARS)
        .map_or(text, |(end, _)| text.get(..end).unwrap_or_default())
}

impl Record {
    pub fn begin(caller: &Caller, worker: &Worker, ask: &Ask) -> Box<Self> {
        let path = ask.path_and_query.path();
        let retry = ask
            .headers
            .get("x-stainless-retry-count")
            .and_then(|v| v.to_str().ok()?.parse().ok());
        let who = Who {
            id: Arc::clone(&ask.id),
            route: ask.route,
            principal: ask.principal.clone(),
            peer: ask.downstream.peer,
            method: ask.method.clone(),
            path: shown(path).to_owned(),
            client_retry: retry,
            generation: ask.generation.number,
        };
        let mut record = boxed(|| Self::new(caller, caller.access_log.clone(), who));
        let is = (&ask.principal, ask.route.name);
        let own_id = ask.own_id.clone();
        record.generation = Some(Arc::clone(&ask.generation));
        record.listed = Some(caller.table.begin(worker.id, &ask.id, own_id, is));
        record.begin_note(caller.journal.as_ref());
        record
    }

    fn new(caller: &Caller, log: AccessLog, who: Who) -> Self {
        Self::with((&caller.metrics, &caller.retried), log, who)
    }

    pub(super) fn with(
        (metrics, retried): (&Arc<Metrics>, &Retried),
        log: AccessLog,
        who: Who,
    ) -> Self {
        let now = Instant::now();
        Self {
            metrics: Arc::clone(metrics),
            upstream: None,
            log,
            place: None,
            listed: None,
            began: now,
            began_at: SystemTime::now(),
            who,
            phase: Phase::Accepted,
            phase_since: now,
            wait: None,
            work: None,
            worked: false,
            overrun: None,
            outcome: None,
            likely: None,
            meter: Meter::default(),
            times: Times::default(),
            model: None,
            stream: false,
            endpoint: None,
            status: None,
            attempts: 0,
            request_bytes: 0,
            response_bytes: 0,
            kept: Duration::ZERO,
            known: None,
            keeper: None,
            retried: retried.clone(),
            mark: None,
            retry_of: None,
            attached_to: None,
            away: None,
            left_in: None,
            attaches: 0,
            generation: None,
            settled: false,
        }
    }

    /// For a request that the front turned away: no route, no key.
    pub fn at_the_edge(caller: &Caller, id: &Arc<str>, request: Edge, generation: u64) -> Self {
        let Edge {
            peer,
            method,
            path,
            dialect,
        } = request;
        let who = Who {
            id: Arc::clone(id),
            route: RouteFacts {
                name: "none",
                dialect,
                model: ModelIn::Nowhere,
                can_stream: false,
            },
            principal: Principal::nobody(),
            peer,
            method,
            path: shown(&path).to_owned(),
            client_retry: None,
            generation,
        };
        Self::new(caller, caller.access_log.clone(), who)
    }

    /// For an exchange that is no call: nothing is written.
    pub fn unwritten(caller: &Caller) -> Self {
        let who = Who {
            id: "".into(),
            route: RouteFacts {
                name: "",
                dialect: Dialect::OpenAi,
                model: ModelIn::Nowhere,
                can_stream: false,
            },
            principal: Principal::default(),
            peer: SocketAddr::from(([0, 0, 0, 0], 0)),
            method: Method::GET,
            path: String::new(),
            client_retry: None,
            generation: 0,
        };
        let mut record = Self::new(caller, AccessLog::off(), who);
        record.settled = true;
        record
    }
}
