//! How a record begins: that of a call, of a request that never became one, and of what is no call at all.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::Method;
use tidegate_wire::Dialect;

use super::{Record, Standing, Who};
use crate::auth::Principal;
use crate::call::entry::Entry;
use crate::call::handover::boxed;
use crate::call::outcome::Phase;
use crate::call::table::Table;
use crate::call::{Ask, Asker, Caller, Generation, Id, ModelIn, RouteFacts, Worker};
use crate::fields::Field;
use crate::telemetry::access_log::Times;
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
    if text.len() <= SHOWN_CHARS {
        return text;
    }
    text.char_indices()
        .nth(SHOWN_CHARS)
        .map_or(text, |(end, _)| text.get(..end).unwrap_or_default())
}

impl Record {
    pub fn begin(worker: &Worker, asker: Asker, ask: &Ask<'_>) -> Box<Self> {
        let caller = &worker.caller;
        let path = ask.path_and_query.path();
        let retry = ask
            .fields
            .get(Field::RetryCount)
            .and_then(|v| str::from_utf8(v).ok()?.parse().ok());
        let who = Who {
            peer: ask.client.downstream().peer,
            method: ask.method.clone(),
            path: shown(path).to_owned(),
            client_retry: retry,
        };
        let entry = Entry::new(asker, ask.route, ask.generation, &caller.books);
        let entry = Arc::new(entry);
        let mut record =
            boxed(|| Self::with(Standing::Listed(Table::begin(worker.id, entry)), who));
        // Its body is what it waits for first.
        record.phase = Phase::Body;
        record.begin_note(caller.journal.as_ref());
        record
    }

    pub(super) fn with(standing: Standing, who: Who) -> Self {
        Self {
            began: standing.entry().began(),
            standing,
            place: None,
            began_at: SystemTime::now(),
            who,
            phase: Phase::Accepted,
            phase_since: Duration::ZERO,
            wait: None,
            work: None,
            worked: false,
            overrun: None,
            outcome: None,
            likely: None,
            meter: Meter::default(),
            times: Times::default(),
            stream: false,
            status: None,
            attempts: 0,
            request_bytes: 0,
            response_bytes: 0,
            asked_stream: false,
            kept: Duration::ZERO,
            known: None,
            keeper: None,
            mark: None,
            retry_of: None,
            attached_to: None,
            away: None,
            left_in: None,
            attaches: 0,
            settled: false,
        }
    }

    /// For a request that the front turned away: no route, no key.
    pub fn at_the_edge(
        caller: &Caller,
        id: Id,
        request: Edge,
        generation: &Arc<Generation>,
    ) -> Self {
        let Edge {
            peer,
            method,
            path,
            dialect,
        } = request;
        let asker = Asker {
            id,
            own_id: None,
            principal: Principal::nobody(),
        };
        let route = RouteFacts {
            name: "none",
            dialect,
            model: ModelIn::Nowhere,
            can_stream: false,
        };
        let who = Who {
            peer,
            method,
            path: shown(&path).to_owned(),
            client_retry: None,
        };
        let entry = Entry::new(asker, route, generation, &caller.books);
        Self::with(Standing::Apart(Arc::new(entry)), who)
    }

    /// For an exchange that is no call: nothing is written.
    pub fn unwritten(caller: &Caller, generation: &Arc<Generation>) -> Self {
        let none = Edge {
            peer: SocketAddr::from(([0, 0, 0, 0], 0)),
            method: Method::GET,
            path: String::new(),
            dialect: Dialect::OpenAi,
        };
        let mut record = Self::at_the_edge(caller, Id::new(), none, generation);
        record.settled = true;
        record
    }
}
