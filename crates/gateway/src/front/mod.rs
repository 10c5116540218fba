//! The HTTP edge: request → route → principal → call → response. Status codes are chosen here and nowhere else.

use std::sync::Arc;

use http::header::{HOST, HeaderName, HeaderValue, ORIGIN, TRANSFER_ENCODING};
use http::{HeaderMap, Method, Request, Response, StatusCode, Version};
use hyper::body::{Body, Incoming};
use tidegate_wire::Dialect;

use crate::auth::{Denied, Principal};
use crate::call::body::OutBody;
use crate::call::downstream::{Answers, Downstream, Reader};
use crate::call::handover::{Gone, Handover, boxed};
use crate::call::settle::{Edge, Record};
use crate::call::table::{By, Entry};
use crate::call::{self, Ask, Caller, Generation, Refused, Rejection, Worker};
use crate::telemetry::metrics::ReasonLabel;

pub mod cors;
pub mod models;
pub mod reject;
pub mod route;

use route::{Place, Route};

const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
/// The client's own id of its call.
const X_TIDEGATE_CALL: HeaderName = HeaderName::from_static("x-tidegate-call");
/// Our own id, where the upstream gave the request another.
const X_TIDEGATE_ID: HeaderName = HeaderName::from_static("x-tidegate-id");

/// Answers the requests of one worker's connections. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Front {
    caller: Arc<Caller>,
    worker: Arc<Worker>,
}

impl Front {
    pub fn new(caller: Arc<Caller>, worker: Arc<Worker>) -> Self {
        Self { caller, worker }
    }
}

impl Answers for Front {
    fn answer(
        &self,
        request: Request<Incoming>,
        downstream: &Arc<Downstream>,
        reader: Arc<Reader>,
    ) -> Handover<Response<OutBody>> {
        let gone = Arc::new(Gone::default());
        let active = downstream.enter();
        downstream.received().set(request.body().is_end_stream());
        let (front, downstream, left) = (self.clone(), Arc::clone(downstream), Arc::clone(&gone));
        let answer = || async move {
            let response = front
                .respond(request, downstream, Arc::clone(&reader), left)
                .await;
            // From here on it is the client's turn to read.
            reader.handed();
            response.map(|body| body.holding(active, reader))
        };
        Handover::new(answer, gone, self.worker.tasks.clone())
    }
}

impl Front {
    async fn respond(
        &self,
        request: Request<Incoming>,
        downstream: Arc<Downstream>,
        reader: Arc<Reader>,
        gone: Arc<Gone>,
    ) -> Response<OutBody> {
        let generation = self.caller.generation();
        let id = new_id();
        let origin = request.headers().get(ORIGIN).cloned();
        let place = route::find(request.method(), request.uri());
        let dialect = match &place {
            Ok(place) if !place.is_a_call() && is_anthropic(request.headers()) => {
                Dialect::Anthropic
            }
            Ok(place) => place.dialect(),
            Err(misrouted) => misrouted.dialect,
        };
        let (method, uri, peer) = (
            request.method().clone(),
            request.uri().clone(),
            downstream.peer,
        );
        let arrival = Arrival {
            id: Arc::clone(&id),
            downstream,
            reader,
            gone,
        };
        let answer = match cors::preflight(&request, &generation.config.cors) {
            _ if !names_one_host(&request) => Err(Rejection::BadHost),
            Some(preflight) => Ok(preflight),
            None => self.route(request, &generation, place, arrival).await,
        };
        let mut response = answer.unwrap_or_else(|rejection| {
            let path = uri.path().to_owned();
            let edge = Edge {
                peer,
                method,
                path,
                dialect,
            };
            self.turn_away(&rejection, edge, &id, generation.number)
        });
        cors::allow(
            origin.as_ref(),
            &generation.config.cors,
            response.headers_mut(),
        );
        identify(response.headers_mut(), dialect, &id);
        response
    }

    async fn route(
        &self,
        request: Request<Incoming>,
        generation: &Arc<Generation>,
        place: Result<Place, route::Misrouted>,
        arrival: Arrival,
    ) -> Result<Response<OutBody>, Rejection> {
        cors::refuse_unknown_host(&request, generation)?;
        check_framing(request.headers())?;
        cors::refuse_foreign(&request, generation)?;
        let place = place.map_err(|misrouted| misrouted.rejection)?;
        let principal = generation
            .keys
            .authenticate(request.headers())
            .map_err(|denied| match denied {
                Denied::Missing => Rejection::KeyMissing,
                Denied::Unknown => Rejection::KeyUnknown,
            })?;
        let Place {
            route,
            path_and_query,
        } = place;
        let route = match route {
            Route::Cancel => return self.cancel(path_and_query.path(), &principal),
            Route::Call(route) => route,
            Route::Models => return self.models(None, &request, generation, &arrival.gone).await,
            Route::Model(id) => {
                let id = Some(id.as_str());
                return self.models(id, &request, generation, &arrival.gone).await;
            }
        };
        let own_id = own_id(request.headers())?;
        let (parts, body) = request.into_parts();
        let ask = Ask {
            id: arrival.id,
            own_id,
            route,
            method: parts.method,
            path_and_query,
            headers: parts.headers,
            body,
            principal,
            downstream: arrival.downstream,
            reader: arrival.reader,
            gone: arrival.gone,
            generation: Arc::clone(generation),
        };
        let (id, dialect) = (Arc::clone(&ask.id), route.dialect);
        // Boxed: the call is some KiB, and each layer of futures around it would hold it twice.
        let call = boxed(|| call::run(&self.caller, &self.worker, ask));
        match Box::into_pin(call).await {
            Ok(answer) => {
                let mut response = Response::new(answer.body);
                *response.status_mut() = answer.head.status;
                *response.headers_mut() = answer.head.headers;
                Ok(response)
            }
            Err(Refused {
                rejection,
                mut record,
            }) => {
                self.count(&rejection);
                let response = reject::respond(&rejection, dialect, &id);
                record.refused(&rejection, response.status().as_u16());
                record.settle();
                Ok(response)
            }
        }
    }

    /// All models, or one of them.
    async fn models(
        &self,
        id: Option<&str>,
        request: &Request<Incoming>,
        generation: &Arc<Generation>,
        gone: &Arc<Gone>,
    ) -> Result<Response<OutBody>, Rejection> {
        let (caller, worker) = (&self.caller, &self.worker);
        let anthropic = is_anthropic(request.headers());
        // Boxed: rare, and a large part of each request's future otherwise.
        match id {
            None => Box::pin(models::list(caller, worker, generation, anthropic, gone)).await,
            Some(id) => {
                let asked = (id, anthropic);
                Box::pin(models::one(caller, worker, generation, asked, gone)).await
            }
        }
    }

    /// Ends the calls of this key that have this id: the one that the gateway gave, or the one that the client chose. Whether another
    /// key has such a call is not told.
    fn cancel(&self, path: &str, principal: &Principal) -> Result<Response<OutBody>, Rejection> {
        let id = route::cancelled_call(path).unwrap_or_default();
        let meant = |entry: &Entry| {
            let named = *entry.id == *id || entry.own_id.as_deref() == Some(id);
            let its = entry.is_attended() || entry.is_attachable();
            named && entry.principal == *principal && its
        };
        match self.caller.table.stop(By::Client, meant) {
            0 => Err(Rejection::NoSuchCall),
            cancelled => {
                let body = serde_json::json!({"id": id, "cancelled": cancelled});
                Ok(json(StatusCode::OK, body.to_string().into()))
            }
        }
    }

    /// Answers a request that never became a call; it leaves a line all the same, since somebody will ask for it by its id.
    fn turn_away(
        &self,
        rejection: &Rejection,
        edge: Edge,
        id: &Arc<str>,
        generation: u64,
    ) -> Response<OutBody> {
        self.count(rejection);
        let response = reject::respond(rejection, edge.dialect, id);
        let mut record = Record::at_the_edge(&self.caller, id, edge, generation);
        record.refused(rejection, response.status().as_u16());
        record.settle();
        response
    }

    fn count(&self, rejection: &Rejection) {
        if !matches!(rejection, Rejection::Gone) {
            let reason = ReasonLabel {
                reason: rejection.reason(),
            };
            self.caller.metrics.refusals.get_or_create(&reason).inc();
        }
    }
}

/// Two servers that each take another host for the one that is meant can be played off against each other (RFC 9112 §3.2).
fn names_one_host(request: &Request<Incoming>) -> bool {
    let mut hosts = request.headers().get_all(HOST).iter();
    let (first, second) = (hosts.next(), hosts.next());
    second.is_none() && (first.is_some() || request.version() != Version::HTTP_11)
}

/// One coding, once: a server behind us may read anything else differently.
fn check_framing(headers: &HeaderMap) -> Result<(), Rejection> {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    let plain = |coding: &HeaderValue| coding.as_bytes().eq_ignore_ascii_case(b"chunked");
    match (codings.next(), codings.next()) {
        (None, _) => Ok(()),
        (Some(coding), None) if plain(coding) => Ok(()),
        _ => Err(Rejection::BodyBroken),
    }
}

/// On paths that both families share, this field tells which one asks.
fn is_anthropic(headers: &HeaderMap) -> bool {
    headers.contains_key("anthropic-version")
}

/// The id that the client chose for its call, to end it by.
fn own_id(headers: &HeaderMap) -> Result<Option<Arc<str>>, Rejection> {
    let mut values = headers.get_all(X_TIDEGATE_CALL).iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    if values.next().is_some() {
        return Err(Rejection::BadCallId);
    }
    let valid = |id: &&str| {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.:".contains(&b);
        (1..=64).contains(&id.len()) && id.bytes().all(plain)
    };
    let id = value.to_str().ok().filter(valid);
    id.map(|id| Some(id.into())).ok_or(Rejection::BadCallId)
}

/// What comes with a request besides itself.
struct Arrival {
    id: Arc<str>,
    downstream: Arc<Downstream>,
    reader: Arc<Reader>,
    gone: Arc<Gone>,
}

/// 128 random bits: unique, and not a secret.
fn new_id() -> Arc<str> {
    let mut id = *b"req_00000000000000000000000000000000";
    let mut bits = fastrand::u128(..);
    for digit in &mut id[4..] {
        *digit = b"0123456789abcdef"[(bits & 15) as usize];
        bits >>= 4;
    }
    std::str::from_utf8(&id).unwrap_or_default().into()
}

/// Every answer can be named: by the upstream's id if it gave one, else by ours. Each SDK family looks for its own field.
fn identify(headers: &mut HeaderMap, dialect: Dialect, id: &str) {
    let Ok(own) = HeaderValue::try_from(id) else {
        return;
    };
    let given = headers
        .get(X_REQUEST_ID)
        .or_else(|| headers.get(REQUEST_ID))
        .cloned();
    if given.is_some() {
        headers.insert(X_TIDEGATE_ID, own.clone());
    }
    let shown = given.unwrap_or(own);
    if dialect == Dialect::Anthropic {
        headers.entry(REQUEST_ID).or_insert_with(|| shown.clone());
    }
    headers.entry(X_REQUEST_ID).or_insert(shown);
}

/// An answer made here.
fn json(status: StatusCode, body: bytes::Bytes) -> Response<OutBody> {
    let mut response = Response::new(OutBody::whole(body));
    *response.status_mut() = status;
    response.headers_mut().insert(
        http::header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    response
}

/// GET, or HEAD for its fields alone.
fn is_read(method: &Method) -> bool {
    method == Method::GET || method == Method::HEAD
}
