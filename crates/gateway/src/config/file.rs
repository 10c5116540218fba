//! The configuration as written in the file.
//!
//! These types mirror the TOML, and their doc comments are the reference (`docs/config.md`) and the JSON schema
//! (`tidegate schema`). All defaults that are plain values stand here. A field is an `Option` only where its default depends on
//! other settings. Bounds (`range`, `x-min`, `x-max`) are checked by `tree`; what spans several settings by
//! `validate`.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroUsize;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::units::{Size, Time, TimeOrOff};
use super::{
    AuthStyle, Confirm, Contract, HalfClose, HttpVersion, Kind, Level, LogFormat, UnknownModels,
};

/// The configuration file of Tidegate.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "Tidegate configuration")]
#[serde(default, deny_unknown_fields)]
pub struct File {
    /// Name of the upstream that gets requests without a model (`/v1/files`, multipart bodies) and, with
    /// `unknown_models = "default"`, unknown models. Default: the first upstream.
    pub default_upstream: Option<String>,
    /// What a model name that no upstream lists gets. Default: `"default"` if the one upstream lists no models, else `"refuse"`.
    pub unknown_models: Option<UnknownModels>,
    /// The data plane's listener. A change needs a restart.
    pub server: Server,
    /// Health, readiness and metrics; never on the data port.
    pub admin: Admin,
    /// Bounds in bytes.
    pub limits: Limits,
    /// Every wait has a name and a limit. Here for all upstreams; an upstream's own `timeouts` win.
    pub timeouts: Timeouts,
    /// Browsers.
    pub cors: Cors,
    /// What is written to standard output and standard error.
    pub log: Log,
    /// What models cost, for the sums of waste: name = `"INPUT/OUTPUT"`, the prices of a million tokens of each, in a currency of your
    /// choice: `"2.50/10"`. Names or patterns as in `models`; where clients use an alias, its own
    /// price or that of the name that is sent.
    pub prices: BTreeMap<String, String>,
    /// Client keys. None: every caller is `anonymous`, and only a loopback address is served.
    pub keys: Vec<Key>,
    /// Named pools of model servers. At least one.
    pub upstreams: Vec<Upstream>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Server {
    /// Address and port of the data plane. An address that is not loopback needs `[[keys]]` or `allow_unauthenticated`.
    pub listen: String,
    /// Serve without client keys on an address that is not loopback: whoever reaches the port uses your models.
    pub allow_unauthenticated: bool,
    /// Worker threads, each with a runtime and connection pools of its own. Default: the number of cores.
    #[schemars(range(min = 1, max = 1024))]
    pub workers: Option<NonZeroUsize>,
    /// Open client connections; one more is answered with 503 and closed.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub connections_max: usize,
    /// How long an idle client connection stays open. Longer than the balancer in front keeps it (60 to 75 s), or it sends
    /// requests into a closing connection.
    #[schemars(extend("x-min" = "1s", "x-max" = "24h"))]
    pub keep_alive: Time,
    /// What FIN from a client in mid-call means.
    pub half_close: HalfClose,
    /// A written byte that is not acknowledged for this long ends the connection, on both sides and on the admin port: the peer vanished, or reads nothing.
    #[schemars(extend("x-min" = "1s", "x-max" = "1h"))]
    pub tcp_user_timeout: Time,
    /// Silence on a connection before TCP keep-alive probes, on both sides. Idle upstream connections are probed each second. Linux takes no more than 32,767 s (`tcp(7)`).
    #[schemars(extend("x-min" = "1s", "x-max" = "9h"))]
    pub tcp_keep_alive: Time,
    /// After SIGTERM go on accepting for this long while readiness already says no.
    #[schemars(extend("x-min" = "0s", "x-max" = "1h"))]
    pub drain_lag: Time,
    /// After SIGTERM running calls have this long to finish; what is left ends with an in-band error. Keep `drain_lag` + `drain`
    /// under the supervisor's own limit (Kubernetes 30 s, systemd 90 s).
    #[schemars(extend("x-min" = "0s", "x-max" = "24h"))]
    pub drain: Time,
    /// TLS of the data plane. Default: none.
    pub tls: Option<ServerTls>,
}

/// PEM files, read again when they change.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ServerTls {
    /// Certificate chain, the server's own first.
    pub cert_file: Option<String>,
    /// Private key.
    pub key_file: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Admin {
    /// Address and port, or `"off"`.
    pub listen: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Client request line and header fields.
    #[schemars(extend("x-min" = "1KiB", "x-max" = "16MiB"))]
    pub request_head: Size,
    /// One request body.
    #[schemars(extend("x-min" = "1KiB", "x-max" = "4GiB"))]
    pub request_body: Size,
    /// All request bodies held at once.
    #[schemars(extend("x-min" = "1KiB", "x-max" = "1024GiB"))]
    pub request_bodies_total: Size,
    /// An event of a stream up to this size is forwarded whole; a larger one in pieces.
    pub event: Size,
    /// Read buffer of one upstream connection and write buffer of one client connection.
    pub stream_buffer: Size,
    /// An upstream's error body up to this size is read whole to check its shape.
    pub error_body: Size,
    /// Longest answer that is put together out of a stream, for a client that wants it in one piece. One that is longer fails.
    pub assembled: Size,
    /// All answers in one piece held at once, until their clients have read them; those that are put together count from their first byte. One of
    /// these for which there is no room is refused; any other keeps its slot until it is read.
    #[schemars(extend("x-min" = "1KiB", "x-max" = "1024GiB"))]
    pub answers_total: Size,
    /// Bytes of all answers that are kept for retries, see `[upstreams.attach]`. Where there are several client keys, those of one key take at
    /// most half.
    #[schemars(extend("x-min" = "4KiB", "x-max" = "1024GiB"))]
    pub attach_total: Size,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Timeouts {
    /// Connection accepted, or first byte of the next request read → request head complete.
    pub request_head: Time,
    /// Longest time in which a client may send less than 1 KiB of its body. It is the least rate, and the only limit of a body's time: a large
    /// one over a slow line takes long and is no fault. Its memory is bounded by `limits`.
    pub request_body: Time,
    /// Call offered → slot.
    pub queue: Time,
    /// Slot → a connection may be opened or reused.
    pub pool: Time,
    /// Name lookup and TCP connect, over all addresses.
    pub connect: Time,
    /// TLS handshake, upstream and on the listener. For clients this one holds, whatever an upstream sets for itself.
    pub tls: Time,
    /// Request sent → response head. Long, since a non-streaming answer comes with its head. A body that is passed on while the client sends it
    /// starts this anew with each part, until all of it is sent.
    pub response_head: Time,
    /// Response head → first meaningful event of a stream.
    pub first_event: Time,
    /// No byte at all from the upstream in mid-body; any byte starts it again, comments too.
    pub silence: Time,
    /// No meaningful event in mid-stream; comments and pings do not feed it.
    pub idle: Time,
    /// Longest time in which the client takes no byte that waits for it. One for all clients; an upstream has none of its own.
    pub write: Time,
    /// Request accepted → answer ended.
    pub total: TimeOrOff,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Cors {
    /// Origins that browsers may call from: exact (`"https://app.example"`), or `"*"`. None: no origin.
    pub origins: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// Form of the log on standard error.
    pub format: LogFormat,
    /// The least important line that is written.
    pub level: Level,
    /// One JSON line per call on standard output.
    pub access: bool,
    /// File in which the calls in flight stand, 512 bytes each, so that one that is cut off by the end of the process (killed, out of
    /// memory) has its line after the next start. Each gateway needs one of its own; it is made if it is not there. None: such calls leave
    /// no line.
    pub journal: Option<String>,
}

/// A client key, in exactly one of three forms.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Key {
    /// The principal: appears in logs and metrics. Required.
    pub name: Option<String>,
    /// SHA-256 of the key in hex, as `tidegate hash-key` prints it.
    pub sha256: Option<String>,
    /// The key itself from the environment: `"${CI_KEY}"`. Hashed at load.
    pub key: Option<SecretText>,
    /// File that holds the key. Hashed at load.
    pub key_file: Option<String>,
}

/// A named pool of model servers that serve the same models.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Upstream {
    /// Name in logs and metrics. Required with several upstreams; one alone is called `default`.
    pub name: Option<String>,
    /// Kind of server; fills in what follows from it, see [kinds.md](kinds.md). Default: guessed from well-known host names, else
    /// `"other"`.
    pub kind: Option<Kind>,
    /// Address of the one endpoint: `"http://127.0.0.1:8000"`. A trailing `/v1` is dropped, another path is put before `/v1/…`. Exactly one of `url` and `endpoints`.
    pub url: Option<String>,
    /// Addresses of several endpoints; least in flight picks.
    pub endpoints: Vec<String>,
    /// Model names routed here, exact or with one trailing `*`. None: any name.
    pub models: Vec<String>,
    /// Name that clients use = name that is sent upstream. Applied once.
    pub aliases: BTreeMap<String, String>,
    /// The upstream's key, from the environment: `"${OPENAI_API_KEY}"`. Replaces what the client sent.
    pub api_key: Option<SecretText>,
    /// File that holds the upstream's key; read again when it changes.
    pub api_key_file: Option<String>,
    /// How the key is sent. Default: `"x-api-key"` for kind `"anthropic"`, else `"bearer"`.
    pub auth: Option<AuthStyle>,
    /// Calls that may run here at once, over all endpoints. 64 is under what vLLM batches by default, so that calls wait here,
    /// where a client that leaves is noticed, and not in the server. Set it to what your server runs in parallel.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub slots: NonZeroUsize,
    /// Calls that may wait for a slot; 0: none waits. Default: as many as `slots`, so the last one waits about one call's time.
    #[schemars(range(min = 0, max = 1_000_000))]
    pub queue: Option<usize>,
    /// What becomes of a call whose client has left. Default: that of the kind.
    pub on_abandon: Option<Contract>,
    /// How long a slot is kept after a call was cancelled, where the server is known to run on for a while. Default: that of the
    /// kind, which may be longer for answers in one piece.
    #[schemars(extend("x-min" = "0s", "x-max" = "1h"))]
    pub settle: Option<Time>,
    /// Comment lines sent to the client while a stream is silent, or `"off"`.
    #[schemars(extend("x-min" = "100ms", "x-max" = "1h"))]
    pub heartbeat: TimeOrOff,
    /// Ask for a stream where the client wants its answer in one piece, and put the pieces together: such a call can be cancelled and is
    /// metered at every token. Default: that of the kind.
    pub ask_stream: Option<bool>,
    /// Ask for usage on streams whose client did not, and keep the extra event from the client. Default: on for the kinds that
    /// are known to answer it.
    pub ask_usage: Option<bool>,
    /// Bounds of the work that is left when clients leave.
    pub abandon: Abandon,
    /// Retries that are given the answer of the call they try again.
    pub attach: Attach,
    /// Limits of waits that differ from `[timeouts]`.
    pub timeouts: UpstreamTimeouts,
    /// Connections.
    pub pool: Pool,
    /// TLS of `https://` endpoints.
    pub tls: UpstreamTls,
}

/// Bounds of the work that runs on, or is held to run on, after its client has left. Past a bound a `drain` becomes a `cancel`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Abandon {
    /// `drain`: how long an answer may be read for nobody. `linger`: how long the slot is kept. Default: `"60s"`.
    #[schemars(extend("x-min" = "100ms", "x-max" = "24h"))]
    pub time: Option<Time>,
    /// `drain`, or with `attach.grace`: bytes that may be read for nobody. Default: `"16MiB"`.
    #[schemars(extend("x-min" = "1KiB", "x-max" = "4GiB"))]
    pub bytes: Option<Size>,
    /// `drain`, or with `attach.grace`: tokens that may be generated for nobody, as far as they can be counted. Default: no bound.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub tokens: Option<u32>,
    /// `drain`, or with `attach.grace`: calls that may run on for nobody at once; one more is cancelled. Default: half of `slots`.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub at_once: Option<usize>,
    /// Abandoned calls of one client key from which on its next calls wait, so that one client's leftovers do not take the slots of
    /// all. Default: half of `slots` where there are several keys, else no bound.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub per_key: Option<NonZeroUsize>,
    /// Ask the server itself whether the work has ended, once the exchange is closed: the slot is free as soon as the server's own count
    /// shows it, and kept beyond `settle` while the count shows that the work goes on. Only for endpoints that are one server each, used by
    /// this gateway alone: the count of a server behind a balancer, or of one that others use too, tells nothing of our calls. Default:
    /// `"off"`.
    pub confirm: Option<Confirm>,
    /// How much longer than `settle` a slot is kept while the server shows that the work goes on; `"0s"`: no longer. Default: `"30s"`.
    #[schemars(extend("x-min" = "0s", "x-max" = "1h"))]
    pub confirm_within: Option<Time>,
}

/// A call that is left goes on for a while, so that the client's own retry can take it up instead of starting it again: the answer comes from
/// its first byte. A retry is one with the same `Idempotency-Key`, or with an SDK's retry header, and the same body and client key.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Attach {
    /// How long a call that is left goes on, and its answer is kept, for a retry. It is abandoned work meanwhile, within the bounds of
    /// `[upstreams.abandon]`; then `on_abandon` holds. Default: off.
    #[schemars(extend("x-min" = "100ms", "x-max" = "1h"))]
    pub grace: Option<Time>,
    /// Bytes of one answer that are kept. A call whose answer is longer cannot be taken up any more. Default: `"1MiB"`.
    #[schemars(extend("x-min" = "4KiB", "x-max" = "1GiB"))]
    pub bytes: Option<Size>,
}

/// Limits of waits for one upstream. Default of each: the value in `[timeouts]`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct UpstreamTimeouts {
    /// Call offered → slot.
    pub queue: Option<Time>,
    /// Slot → a connection may be opened or reused.
    pub pool: Option<Time>,
    /// Name lookup and TCP connect.
    pub connect: Option<Time>,
    /// TLS handshake with the upstream.
    pub tls: Option<Time>,
    /// Request sent → response head.
    pub response_head: Option<Time>,
    /// Response head → first meaningful event.
    pub first_event: Option<Time>,
    /// No byte at all in mid-body.
    pub silence: Option<Time>,
    /// No meaningful event in mid-stream.
    pub idle: Option<Time>,
    /// Request accepted → answer ended.
    pub total: Option<TimeOrOff>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Pool {
    /// Open connections to one endpoint, over all workers. Default: `slots` + 16.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub connections_max: Option<usize>,
    /// Idle connections are closed after this time. Shorter than the server's own limit (uvicorn 5 s), or calls run into closing
    /// connections; a `Keep-Alive: timeout` from the server shortens it. Default: what suits the kind, at most `"4s"`.
    #[schemars(extend("x-min" = "0s", "x-max" = "1h"))]
    pub idle: Option<Time>,
    /// Default: `"http1"` for `http://`, `"auto"` for `https://`.
    pub http: Option<HttpVersion>,
    /// How long an endpoint that failed is left out.
    #[schemars(extend("x-min" = "0s", "x-max" = "1h"))]
    pub eject: Time,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct UpstreamTls {
    /// PEM file of extra trusted roots; the system's roots are always trusted.
    pub ca_file: Option<String>,
    /// Name to verify instead of the endpoint's host.
    pub server_name: Option<String>,
}

/// A text that is never shown.
#[derive(Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[schemars(inline, extend("x-kind" = "secret"))]
#[serde(transparent)]
pub struct SecretText(pub String);

// === impl Default ===

impl Default for Server {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8080".into(),
            allow_unauthenticated: false,
            workers: None,
            connections_max: 10_000,
            keep_alive: Time::secs(75),
            half_close: HalfClose::Gone,
            tcp_user_timeout: Time::secs(30),
            tcp_keep_alive: Time::secs(15),
            drain_lag: Time::secs(0),
            drain: Time::secs(25),
            tls: None,
        }
    }
}

impl Default for Admin {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:9090".into(),
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            request_head: Size::kib(64),
            request_body: Size::mib(64),
            request_bodies_total: Size::mib(1024),
            event: Size::kib(64),
            stream_buffer: Size::kib(64),
            error_body: Size::mib(1),
            assembled: Size::mib(16),
            answers_total: Size::mib(256),
            attach_total: Size::mib(64),
        }
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            request_head: Time::secs(10),
            request_body: Time::secs(10),
            queue: Time::secs(30),
            pool: Time::secs(10),
            connect: Time::secs(5),
            tls: Time::secs(5),
            response_head: Time::secs(600),
            first_event: Time::secs(600),
            silence: Time::secs(180),
            idle: Time::secs(600),
            write: Time::secs(30),
            total: TimeOrOff::Off,
        }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self {
            format: LogFormat::Text,
            level: Level::Info,
            access: true,
            journal: None,
        }
    }
}

impl Default for Upstream {
    fn default() -> Self {
        Self {
            name: None,
            kind: None,
            url: None,
            endpoints: Vec::new(),
            models: Vec::new(),
            aliases: BTreeMap::new(),
            api_key: None,
            api_key_file: None,
            auth: None,
            slots: NonZeroUsize::new(64).expect("64 is not 0"),
            queue: None,
            on_abandon: None,
            settle: None,
            heartbeat: TimeOrOff::Off,
            ask_stream: None,
            ask_usage: None,
            abandon: Abandon::default(),
            attach: Attach::default(),
            timeouts: UpstreamTimeouts::default(),
            pool: Pool::default(),
            tls: UpstreamTls::default(),
        }
    }
}

impl Default for Pool {
    fn default() -> Self {
        Self {
            connections_max: None,
            idle: None,
            http: None,
            eject: Time::secs(5),
        }
    }
}

// === impl SecretText ===

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl Serialize for SecretText {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str("***")
    }
}
