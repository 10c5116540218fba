//! Tidegate: the LLM gateway that knows what is really running.
//!
//! A **call** is work; a **waiter** is somebody interested in it. They end at different times. The slot and the upstream exchange belong
//! to the call; the place in the queue and the downstream connection belong to the waiter.
//!
//! # Life of a request
//!
//! 1. [`serve::accept`] accepts the connection and hands it to the [worker](serve::worker) with the fewest.
//!    [`serve::connection`] tells HTTP/1 (`serve::http1`) from HTTP/2 (hyper) and runs it under a [guard](serve::guard::Guard): slow heads, idle
//!    connections, stalled readers, drain.
//! 2. [`front::Front`] answers each request: [`route::find`](front::route::find) the route, refuse
//!    [foreign origins](front::cors::refuse_foreign), [authenticate](auth::Keys::authenticate) the principal.
//!    All of it runs in a [`Handover`](call::handover::Handover): if the client leaves before its answer begins, the call goes on in
//!    a tracked task, knows it, and ends itself.
//! 3. [`call::run`] is the straight line. [`upload::receive`](call::upload::receive) reads the body under its bounds;
//!    [`peek`](tidegate_wire::peek) finds the few fields that we act on; [`Routes::find`](upstream::route::Routes::find) turns the
//!    model into an upstream.
//! 4. [`admission::offer`] asks for a slot. The wait in the queue ends with a slot, a refusal, the `queue` tier, or the client's leaving;
//!    a queued call never touches the upstream.
//! 5. [`attempt::until_head`](call::attempt::until_head): [`pick`](upstream::pick::pick) an endpoint, take a connection from the
//!    [pool](upstream::pool::Pool) or [open one](upstream::connect), send, wait for the head. [`retry::next`](call::retry::next) says
//!    whether trying again is safe. Every wait goes through [`Patience::within`](call::deadline::Patience::within).
//! 6. [`call::answer`] holds the head back until the first event is there, for at most [`COMMIT_HOLD`](call::answer::COMMIT_HOLD): until
//!    then a failure has its true status. Then the answer is committed.
//! 7. [`Relay`](call::relay::Relay) is the answer's body: the connection polls it, it polls the [exchange](upstream::exchange::UpstreamBody).
//!    Bytes pass unchanged; the [meter](usage::Meter) reads along. A stream that breaks gets an error event and an abnormal end.
//! 8. The answer is complete: the slot goes to the next call, the connection back to the pool. Or the client left: the relay is dropped, and
//!    [`aftermath`](call::aftermath) closes the exchange and keeps the slot for the upstream's `settle` time.
//! 9. [`Record::settle`](call::settle::Record::settle): one outcome, one access-log line, both ends.
//!
//! An error before the commit is a [`Rejection`](call::Rejection); [`reject::respond`](front::reject::respond) alone turns it into a status
//! and words.
//!
//! # Modules
//!
//! From the top down; each imports only from floors below its own (`tests/tidy` holds it).
//!
//! | floor | modules |
//! |---|---|
//! | composition | [`cli`], [`app`], [`reload`], [`probe`] |
//! | edges | [`serve`] sockets, [`front`] HTTP, [`admin`] the operator's port |
//! | the call | [`call`], the only composer |
//! | its parts | [`admission`] slots, [`upstream`] servers and connections, [`usage`] meter, [`auth`] keys |
//! | ground | [`telemetry`], [`config`], [`fields`], [`signal`], [`warm`] |
//!
//! Below are the crates `tidegate_limiter` (queue and slots) and `tidegate_wire` (bytes in, facts out).

#![deny(unsafe_code)] // one exception: upstream::acknowledged

pub mod admin;
pub mod admission;
pub mod app;
pub mod auth;
pub mod call;
pub mod cli;
pub mod config;
pub mod fields;
pub mod front;
pub mod probe;
pub mod reload;
pub mod serve;
pub mod signal;
pub mod telemetry;
pub mod upstream;
pub mod usage;
pub mod warm;
