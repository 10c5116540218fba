//! The HTTP edge: request → route → principal → call → response. Status codes are chosen here and nowhere else.

use std::sync::Arc;

use http::uri::PathAndQuery;
use http::{Method, StatusCode, Version};
use tidegate_wire::Dialect;

use crate::auth::{Denied, Principal};
use crate::call::answer::Answer;
use crate::call::downstream::{Answers, Client, Request};
use crate::call::entry::Entry;
use crate::call::handover::{Handover, boxed};
use crate::call::settle::{Edge, Record};
use crate::call::stop::By;
use crate::call::{
    self, Ask, Asker, Caller, Generation, Id, Refused, Rejection, RouteFacts, Worker,
};
use crate::fields::{Field, Fields};
use crate::telemetry::metrics::ReasonLabel;

pub mod cors;
pub mod models;
pub mod reject;
pub mod route;

use route::{Destination, Route};

/// Answers the requests of one worker's connections. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Front {
    worker: Arc<Worker>,
}

impl Front {
    pub fn new(worker: Arc<Worker>) -> Self {
        Self { worker }
    }

    fn caller(&self) -> &Caller {
        &self.worker.caller
    }
}

impl Answers for Front {
    fn answer(&self, request: Request, client: Client) -> Handover<Answer> {
        let client = Arc::new(client);
        let (front, waiting) = (self.clone(), Arc::clone(&client));
        Handover::new(|| front.respond(request, waiting), client)
    }
}

impl Front {
    /// Answers one request, from its head to the first byte of its answer. In this order:
    ///
    /// 1. The running configuration is taken, and kept to the end; the request has its id.
    /// 2. The [route](route::find), and with it the dialect that any answer of ours is in.
    /// 3. Nothing begins on a connection that is over. Else [`decide`](Self::decide): one host, preflight, known host, own origin, a route at
    ///    all, a key, no WebSocket; the first that fails says no.
    /// 4. What the route stands for: [the call](call::run), a list of models, the end of another call.
    /// 5. The fields that each answer has: those of CORS, and the ids.
    ///
    /// There is always an answer, and with it a record and a line in the log: of the call, or of a request that never became one
    /// ([`turn_away`](Self::turn_away)).
    ///
    /// # Cancel safety
    ///
    /// None, and it is not dropped: all of it runs in a [`Handover`]. When its client leaves, that moves it into a tracked task, where the call
    /// sees that nobody waits, ends, and is written down; the answer that comes of it is nobody's. It is dropped only with its worker, and
    /// then the record's own drop writes the line.
    async fn respond(self, request: Request, client: Arc<Client>) -> Answer {
        let generation = self.caller().generation();
        let id = Id::new();
        let found = route::find(&request.method, &request.target);
        let dialect = dialect(&found, &request.fields);
        let origin = request.fields.get(Field::Origin).map(<[u8]>::to_vec);
        let turned_away = |rejection: Rejection| {
            let path = request.target.path().to_owned();
            let (method, peer) = (request.method.clone(), client.downstream().peer);
            let edge = Edge {
                peer,
                method,
                path,
                dialect,
            };
            self.turn_away(&rejection, edge, id, &generation)
        };
        let decided = if client.downstream().is_over() {
            Err(Rejection::ConnectionOver)
        } else {
            self.decide(&request, &generation, found)
        };
        let mut answer = match decided {
            Ok(Decided::Call {
                route,
                path_and_query,
                principal,
                own_id,
            }) => {
                let asker = Asker {
                    id,
                    own_id,
                    principal,
                };
                let ask = Ask {
                    route,
                    method: request.method,
                    path_and_query,
                    fields: request.fields,
                    body: request.body,
                    client: &client,
                    generation: &generation,
                };
                // Boxed: the call is some KiB, and each layer of futures around it would hold it twice.
                let call = boxed(|| call::run(&self.worker, asker, ask));
                match Box::into_pin(call).await {
                    Ok(answer) => answer,
                    Err(refused) => self.refuse(refused, dialect, id.text()),
                }
            }
            Ok(Decided::Models(one)) => {
                let (one, anthropic) = (one.as_deref(), is_anthropic(&request.fields));
                let listed = self.models(one, anthropic, &generation, &client);
                listed.await.unwrap_or_else(turned_away)
            }
            Ok(Decided::Said(answer)) => *answer,
            Err(rejection) => turned_away(rejection),
        };
        let fields = &mut answer.head.fields;
        cors::allow(origin.as_deref(), &generation.config.cors, fields);
        identify(fields, dialect, id.text());
        answer.body = answer.body.holding(client);
        answer
    }

    /// What a request comes to, before anything runs for it.
    fn decide(
        &self,
        request: &Request,
        generation: &Generation,
        found: Result<Destination, route::Misrouted>,
    ) -> Result<Decided, Rejection> {
        let (uri, fields) = (&request.target, &request.fields);
        if !names_one_host(request.version, fields) {
            return Err(Rejection::BadHost);
        }
        if let Some(preflight) = cors::preflight(&request.method, fields, &generation.config.cors) {
            return Ok(Decided::Said(Box::new(preflight)));
        }
        cors::refuse_unknown_host(uri, fields, generation)?;
        cors::refuse_foreign(uri, fields, generation)?;
        let Destination {
            route,
            path_and_query,
        } = found.map_err(|misrouted| misrouted.rejection)?;
        let principal = generation
            .keys
            .authenticate(fields)
            .map_err(|denied| match denied {
                Denied::Missing => Rejection::KeyMissing,
                Denied::Unknown => Rejection::KeyUnknown,
            })?;
        if begins_websocket(fields) {
            return Err(Rejection::WebSocket);
        }
        Ok(match route {
            Route::Call(route) => {
                let own_id = own_id(fields)?;
                Decided::Call {
                    route,
                    path_and_query,
                    principal,
                    own_id,
                }
            }
            Route::Models => Decided::Models(None),
            Route::Model(id) => Decided::Models(Some(id)),
            Route::Cancel => {
                let cancelled = self.cancel(path_and_query.path(), &principal)?;
                Decided::Said(Box::new(cancelled))
            }
        })
    }

    /// A call that got no answer.
    fn refuse(&self, refused: Refused, dialect: Dialect, id: &str) -> Answer {
        let Refused {
            rejection,
            mut record,
        } = refused;
        self.count(&rejection);
        let answer = reject::respond(&rejection, dialect, id, record.may_have_run());
        record.refused(&rejection, answer.head.status.as_u16());
        record.settle();
        answer
    }

    /// All models, or one of them.
    async fn models(
        &self,
        id: Option<&str>,
        anthropic: bool,
        generation: &Arc<Generation>,
        client: &Arc<Client>,
    ) -> Result<Answer, Rejection> {
        let worker = &self.worker;
        // Boxed: rare, and a large part of each request's future otherwise.
        match id {
            None => Box::pin(models::list(worker, generation, anthropic, client)).await,
            Some(id) => Box::pin(models::one(worker, generation, id, anthropic, client)).await,
        }
    }

    /// Ends the calls of this key that have this id: the one that the gateway gave, or the one that the client chose. Whether another
    /// key has such a call is not told.
    fn cancel(&self, path: &str, principal: &Principal) -> Result<Answer, Rejection> {
        let id = route::cancelled_call(path).unwrap_or_default();
        let meant = |entry: &Entry| {
            let named = entry.id.text() == id || entry.own_id.as_deref() == Some(id);
            let its = entry.is_attended() || entry.is_attachable();
            named && entry.principal == *principal && its
        };
        match self.caller().table().stop(By::Client, meant) {
            0 => Err(Rejection::NoSuchCall),
            cancelled => {
                let body = serde_json::json!({"id": id, "cancelled": cancelled});
                Ok(Answer::json(StatusCode::OK, body.to_string().into()))
            }
        }
    }

    /// Answers a request that never became a call; it leaves a line all the same, since somebody will ask for it by its id.
    fn turn_away(
        &self,
        rejection: &Rejection,
        edge: Edge,
        id: Id,
        generation: &Arc<Generation>,
    ) -> Answer {
        self.count(rejection);
        let answer = reject::respond(rejection, edge.dialect, id.text(), false);
        let mut record = Record::at_the_edge(self.caller(), id, edge, generation);
        record.refused(rejection, answer.head.status.as_u16());
        record.settle();
        answer
    }

    fn count(&self, rejection: &Rejection) {
        if !matches!(rejection, Rejection::Gone) {
            let reason = ReasonLabel {
                reason: rejection.reason(),
            };
            self.caller().metrics.refusals.get_or_create(&reason).inc();
        }
    }
}

/// Two servers that each take another host for the one that is meant can be played off against each other (RFC 9112 §3.2).
fn names_one_host(version: Version, fields: &Fields) -> bool {
    !fields.repeats(Field::Host) && (fields.has(Field::Host) || version != Version::HTTP_11)
}

/// RFC 6455 §4.1. Without its `Upgrade`, which is for one hop, the model server would see a plain GET and answer that.
fn begins_websocket(fields: &Fields) -> bool {
    let named = |value: &[u8]| {
        let mut protocols = value.split(|&b| b == b',');
        protocols.any(|p| p.trim_ascii().eq_ignore_ascii_case(b"websocket"))
    };
    fields.get(Field::Upgrade).is_some_and(named)
}

/// Whose words an answer of ours is in.
fn dialect(found: &Result<Destination, route::Misrouted>, fields: &Fields) -> Dialect {
    match found {
        Ok(found) if !found.is_a_call() && is_anthropic(fields) => Dialect::Anthropic,
        Ok(found) => found.dialect(),
        Err(misrouted) => misrouted.dialect,
    }
}

/// On paths that both families share, this field tells which one asks.
fn is_anthropic(fields: &Fields) -> bool {
    fields.has(Field::AnthropicVersion)
}

/// The id that the client chose for its call, to end it by.
fn own_id(fields: &Fields) -> Result<Option<Arc<str>>, Rejection> {
    let Some(value) = fields.get(Field::XTidegateCall) else {
        return Ok(None);
    };
    if fields.repeats(Field::XTidegateCall) {
        return Err(Rejection::BadCallId);
    }
    let valid = |id: &&str| {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.:".contains(&b);
        (1..=64).contains(&id.len()) && id.bytes().all(plain)
    };
    let id = str::from_utf8(value).ok().filter(valid);
    id.map(|id| Some(id.into())).ok_or(Rejection::BadCallId)
}

/// What a request comes to.
enum Decided {
    Call {
        route: RouteFacts,
        path_and_query: PathAndQuery,
        principal: Principal,
        /// The id that the client chose for it.
        own_id: Option<Arc<str>>,
    },
    /// All models, or the one of this name.
    Models(Option<String>),
    Said(Box<Answer>),
}

/// Every answer can be named: by the upstream's id if it gave one, else by ours. Each SDK family looks for its own field.
fn identify(fields: &mut Fields, dialect: Dialect, own: &str) {
    let given = fields.get(Field::XRequestId);
    let given = given.or_else(|| fields.get(Field::RequestId));
    let given = given.map(<[u8]>::to_vec);
    if given.is_some() {
        fields.insert(Field::XTidegateId, own);
    }
    let shown = given.as_deref().unwrap_or(own.as_bytes());
    if dialect == Dialect::Anthropic && !fields.has(Field::RequestId) {
        fields.append(Field::RequestId, shown);
    }
    if !fields.has(Field::XRequestId) {
        fields.append(Field::XRequestId, shown);
    }
}

/// GET, or HEAD for its fields alone.
fn is_read(method: &Method) -> bool {
    method == Method::GET || method == Method::HEAD
}
