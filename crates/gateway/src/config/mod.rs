//! What the operator wants, validated and ready to use.
//!
//! Two steps: `file` is the configuration as written (serde, TOML, environment), `validate` turns it into the types below and
//! reports every mistake at once. Code outside this module never sees a raw value: durations are `Duration`, sizes are bytes, names
//! are resolved. This module opens no sockets and starts nothing.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use kinds::{Confirm, Contract, Kind};
pub use load::{Loaded, load, load_again, parse};
pub use mistake::{Mistake, Mistakes, Origin, Warning};
pub use secret::Secret;
pub use sources::{Env, Sources};

mod abandon;
mod defaults;
pub mod effective;
mod endpoint;
pub mod file;
mod findings;
pub mod keys;
pub mod kinds;
mod load;
mod mistake;
mod near;
mod routes;
pub mod schema;
pub mod secret;
pub mod sources;
#[cfg(test)]
pub(crate) mod tests;
mod tree;
pub mod units;
mod upstreams;
mod validate;

/// The whole configuration of one generation.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub server: Server,
    pub admin: Admin,
    pub limits: Limits,
    pub cors: Cors,
    pub log: Log,
    /// By model, as it is named by clients or listed in `models`.
    pub prices: BTreeMap<String, Price>,
    /// Empty: no client keys, every caller is the principal `anonymous`.
    pub keys: Vec<ClientKey>,
    /// At least one; the order is the order of the file.
    pub upstreams: Vec<Upstream>,
    /// Index into `upstreams`: where requests go that name no model (`/v1/files`, multipart bodies) and, if
    /// `unknown_models` says so, where unknown models go.
    pub default_upstream: usize,
    /// What a model name that no upstream lists gets.
    pub unknown_models: UnknownModels,
}

/// The data plane's listener. Changing it needs a restart; reload says so and keeps the old one.
#[derive(Clone, Debug, PartialEq)]
pub struct Server {
    pub listen: SocketAddr,
    /// Serve without client keys on an address that is not loopback.
    pub allow_unauthenticated: bool,
    pub tls: Option<ServerTls>,
    /// Worker threads, each with a runtime and connection pool of its own. Default: the number of cores.
    pub workers: NonZeroUsize,
    /// Limit of a client's TLS handshake: `[timeouts].tls`, whatever an upstream sets for itself.
    pub tls_handshake: Duration,
    pub connections_max: usize,
    /// How long an idle client connection stays open. Longer than the balancers' (nginx 60–75 s, ALB 60 s).
    pub keep_alive: Duration,
    /// FIN from a client in mid-call: `Gone` cancels (default), `Serve` goes on until a write fails.
    pub half_close: HalfClose,
    /// Time after which an unacknowledged write ends the connection (TCP_USER_TIMEOUT), both sides.
    pub tcp_user_timeout: Duration,
    /// Idle time before TCP keep-alive probes, both sides.
    pub tcp_keep_alive: Duration,
    /// Time to go on accepting after SIGTERM while readiness already says no (balancers need it). Default 0.
    pub drain_lag: Duration,
    /// Time running calls have to finish after SIGTERM.
    pub drain: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HalfClose {
    /// The client has left: the call is cancelled.
    Gone,
    /// The client may still read: the call goes on until a write fails.
    Serve,
}

/// PEM files, read again when they change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerTls {
    pub cert_file: PathBuf,
    pub key_file: PathBuf,
}

/// Health, readiness, metrics. Never on the data port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admin {
    /// `None` switches the admin listener off.
    pub listen: Option<SocketAddr>,
}

/// Bounds in bytes, for one message or for the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Client request line and header fields. Default 64 KiB.
    pub request_head_bytes: usize,
    /// One request body. Default 64 MiB.
    pub request_body_bytes: usize,
    /// All request bodies held at once. Default 1 GiB.
    pub request_bodies_total_bytes: usize,
    /// An event up to this size is forwarded whole; a larger one in pieces. Default 64 KiB.
    pub event_bytes: usize,
    /// Read buffer of one upstream connection and write buffer of one client connection. Default 64 KiB.
    pub stream_buffer_bytes: usize,
    /// An upstream error body up to this size is read whole to check its shape. Default 1 MiB.
    pub error_body_bytes: usize,
    /// Longest answer that is put together out of a stream. Default 16 MiB.
    pub assembled_bytes: usize,
    /// All such answers held at once. Default 256 MiB.
    pub answers_total_bytes: usize,
    /// All answers that are kept for retries. Default 64 MiB.
    pub attach_total_bytes: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Cors {
    /// Exact origins (`https://app.example`), or `*`. Empty (default): no origin is allowed.
    pub origins: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    pub format: LogFormat,
    /// `error`, `warn`, `info`, `debug`, `trace`.
    pub level: Level,
    /// One line per call on standard output. Default on.
    pub access: bool,
    /// Where the calls in flight are noted, in case that the process is killed.
    pub journal: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

/// What a million tokens cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Price {
    pub input: f64,
    pub output: f64,
}

/// A client key: its name (the principal, appears in logs and metrics) and the SHA-256 of the key itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientKey {
    pub name: String,
    pub sha256: [u8; 32],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum UnknownModels {
    /// Refuse with the dialect's own model-not-found error (default with several upstreams or a `models` list).
    Refuse,
    /// Send to the default upstream (default when the one upstream lists no models).
    Default,
}

/// A named pool of model servers that serve the same models.
#[derive(Clone, Debug, PartialEq)]
pub struct Upstream {
    pub name: String,
    /// What server it is; filled the defaults.
    pub kind: Kind,
    pub endpoints: Vec<Endpoint>,
    /// Model names routed here, exact or with one trailing `*`. Empty: any name.
    pub models: Vec<String>,
    /// Name that clients use → name that is sent upstream.
    pub aliases: BTreeMap<String, String>,
    pub api_key: Option<Secret>,
    /// How the key is sent.
    pub auth: AuthStyle,
    /// Calls that may run here at once, over all endpoints.
    pub slots: NonZeroUsize,
    /// Calls that may wait for a slot. 0: none waits.
    pub queue: usize,
    /// How long a slot is kept after a call was cancelled, where the server is known to run on for a while.
    pub settle: Duration,
    /// The same for an answer that was asked for in one piece, where that takes longer.
    pub settle_whole: Option<Duration>,
    /// Whether anything is known of how it stops: by its kind, or because the operator wrote `on_abandon` or `settle`.
    pub stops_known: bool,
    /// What becomes of calls whose clients have left.
    pub abandon: Abandon,
    /// Calls that are left wait for their client's retry. `None`, the default: they do not.
    pub attach: Option<Attach>,
    pub timeouts: Timeouts,
    pub pool: Pool,
    pub tls: UpstreamTls,
    /// Comment lines sent to the client while a stream is silent. `None`: off.
    pub heartbeat: Option<Duration>,
    /// Ask for a stream where the client wants its answer in one piece.
    pub ask_stream: bool,
    /// Ask for usage on streams whose client did not, and keep the extra event from the client.
    pub ask_usage: bool,
}

/// The contract for abandoned calls and its bounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Abandon {
    pub contract: Contract,
    /// Drain: the longest time that an answer is read for nobody. Linger: how long the slot is kept after the close.
    pub time: Duration,
    /// Drain and grace: the most bytes that are read for nobody.
    pub bytes: u64,
    /// Drain and grace: the most tokens that are generated for nobody, as far as they can be counted. `None`: no bound.
    pub tokens: Option<u64>,
    /// Drain and grace: the most calls that run on for nobody at once.
    pub at_once: usize,
    /// The most abandoned calls of one key before its next ones wait. `None`: no bound.
    pub per_key: Option<NonZeroUsize>,
    /// Where the server is asked whether the work has ended.
    pub confirm: Confirm,
    /// How much longer than `settle` a slot is kept while the server shows that it has not.
    pub confirm_within: Duration,
}

/// How long, and how much of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attach {
    pub grace: Duration,
    /// Of one answer. 1 MiB.
    pub bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AuthStyle {
    /// `Authorization: Bearer KEY`
    Bearer,
    /// `x-api-key: KEY`
    XApiKey,
}

/// One address of an upstream.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    pub tls: bool,
    /// Host name or IP literal, without brackets.
    pub host: String,
    pub port: u16,
    /// Path prefix without a trailing slash (`""` or `/openai`). A trailing `/v1` in the URL is dropped, since every route carries it.
    pub base_path: String,
}

/// Every wait has a name and a limit. `None` is off, only possible where the field says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Connection accepted, or previous answer sent and first byte of the next request read → request head complete. 10 s. Server-wide.
    pub request_head: Duration,
    /// Longest time in which a client may send less than 1 KiB of its body. 10 s. Server-wide.
    pub request_body: Duration,
    /// Offered → slot. 30 s.
    pub queue: Duration,
    /// Slot → a connection may be opened or reused (endpoint connection limit). 10 s.
    pub pool: Duration,
    /// Name lookup and TCP connect, over all addresses. 5 s.
    pub connect: Duration,
    /// TLS handshake upstream (and, for the listener, downstream). 5 s.
    pub tls: Duration,
    /// Request sent → response head. 600 s: a non-streaming answer comes with its head.
    pub response_head: Duration,
    /// Response head → first meaningful event of a stream. 600 s.
    pub first_event: Duration,
    /// No byte at all from the upstream in mid-body; any byte, comments too, starts it again. 180 s.
    pub silence: Duration,
    /// No meaningful event in mid-stream; comments and pings do not feed it. 600 s.
    pub idle: Duration,
    /// Longest time in which the client takes no byte that waits for it. 30 s.
    pub write: Duration,
    /// Request accepted → answer ended. Off.
    pub total: Option<Duration>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Open connections to one endpoint, over all workers. Default: `slots` + 16.
    pub connections_max: usize,
    /// Idle connections are closed after this time (a `Keep-Alive: timeout` from the server shortens it). 4 s.
    pub idle: Duration,
    pub http: HttpVersion,
    /// How long a failed endpoint is left out. 5 s.
    pub eject: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HttpVersion {
    /// HTTP/1.1, over TLS too (default for `http://`).
    Http1,
    /// HTTP/2: prior knowledge over plain TCP, ALPN `h2` over TLS.
    Http2,
    /// By ALPN; HTTP/1.1 over plain TCP (default for `https://`).
    Auto,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UpstreamTls {
    /// PEM file of extra trusted roots; the system's roots are always trusted.
    pub ca_file: Option<PathBuf>,
    /// Name to verify instead of the endpoint's host.
    pub server_name: Option<String>,
}
