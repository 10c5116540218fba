//! Every metric family of the gateway: name, help, labels. Nowhere else.
//!
//! Label values come from closed sets or from the configuration (upstream, endpoint and key names), never from a request: the number
//! of series is bounded by the configuration. Counts of running work are not counted here a second time: [`Metrics::encode`] reads each
//! limiter's own snapshot, so one scrape is consistent in itself.

use std::sync::Arc;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use tidegate_limiter::Limiter;

use super::histogram::Histogram;
use super::limiters::{Limiters, Shown};
use super::process::Process;
pub use super::shares::Count;
pub use super::upstream::UpstreamMetrics;

type Sum = Counter<f64, std::sync::atomic::AtomicU64>; // of what is no whole number

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct CallLabels {
    pub upstream: Arc<str>,
    pub route: &'static str,
    pub outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct UpstreamLabel {
    pub upstream: Arc<str>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct PhaseLabels {
    pub upstream: Arc<str>,
    pub phase: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ReasonLabel {
    pub reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct UpstreamReason {
    pub upstream: Arc<str>,
    pub reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct TierLabels {
    pub upstream: Arc<str>,
    pub tier: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct BoundLabels {
    pub upstream: Arc<str>,
    pub bound: &'static str,
}

/// `model`: as the configuration lists it, else `other`. `key`: the name of a client key.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct WasteLabels {
    pub upstream: Arc<str>,
    pub model: String,
    pub key: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct WastedTokenLabels {
    pub upstream: Arc<str>,
    pub model: String,
    pub key: String,
    pub source: &'static str,
}

/// `result`: how the end of the work was known, or what became of a poll.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ConfirmLabels {
    pub upstream: Arc<str>,
    pub result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct TokenLabels {
    pub upstream: Arc<str>,
    pub direction: &'static str,
    pub source: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct SideLabel {
    pub side: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct EndpointLabels {
    pub upstream: Arc<str>,
    pub endpoint: Arc<str>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct WorkerLabel {
    pub worker: u32,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ResultLabel {
    pub result: &'static str,
}

/// `file`: as the configuration names it.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct FileLabel {
    pub file: String,
}

/// The families. One per process (tests make their own).
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    limiters: Limiters,
    pub calls: Family<CallLabels, Count>,
    pub refusals: Family<ReasonLabel, Counter>,
    pub timeouts: Family<TierLabels, Counter>,
    pub disconnects: Family<PhaseLabels, Counter>,
    pub overruns: Family<BoundLabels, Counter>,
    pub abandoned_retries: Family<UpstreamLabel, Counter>,
    pub confirmations: Family<ConfirmLabels, Counter>,
    pub confirm_polls: Family<ConfirmLabels, Counter>,
    pub attaches: Family<UpstreamLabel, Counter>,
    pub attach_lost: Family<BoundLabels, Counter>,
    pub attach_bytes: Gauge,
    pub attach_kept: Gauge,
    pub wasted_tokens: Family<WastedTokenLabels, Counter>,
    pub wasted_seconds: Family<WasteLabels, Sum>,
    pub wasted_money: Family<WasteLabels, Sum>,
    pub retries: Family<UpstreamReason, Counter>,
    pub call_seconds: Family<UpstreamLabel, Histogram>,
    pub phase_seconds: Family<PhaseLabels, Histogram>,
    pub ttft_seconds: Family<UpstreamLabel, Histogram>,
    pub tokens: Family<TokenLabels, Count>,
    pub usage_unknown: Family<UpstreamLabel, Counter>,
    pub malformed_events: Family<UpstreamLabel, Counter>,
    pub connections: Family<SideLabel, Gauge>,
    pub connections_opened: Family<SideLabel, Counter>,
    pub connections_refused: Family<ReasonLabel, Counter>,
    pub connections_ended: Family<ReasonLabel, Counter>,
    pub upstream_connections: Family<EndpointLabels, Gauge>,
    pub upstream_connects: Family<EndpointLabels, Counter>,
    pub upstream_connect_errors: Family<UpstreamReason, Counter>,
    pub endpoint_ejected: Family<EndpointLabels, Gauge>,
    pub request_bodies_bytes: Gauge,
    pub answers_bytes: Gauge,
    pub loop_lag_seconds: Family<WorkerLabel, Histogram>,
    pub access_log_dropped: Counter,
    pub log_dropped: Counter,
    pub journal_missed: Counter,
    pub config_generation: Gauge,
    pub config_reloads: Family<ResultLabel, Counter>,
    pub certificate_expiry: Family<FileLabel, Gauge>,
    pub draining: Gauge,
    pub panics: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    #[expect(clippy::too_many_lines, reason = "one line per family, nothing else")]
    pub fn new() -> Self {
        let mut registry = Registry::default();
        let limiters = Limiters::default();
        let r = registry.sub_registry_with_prefix("tidegate");
        r.register_collector(Box::new(limiters.clone()));
        r.register(
            "build",
            "The version that runs; always 1",
            Info::new([("version", env!("CARGO_PKG_VERSION"))]),
        );
        let made = Self {
            calls: add(r, "calls", "Ended calls by outcome", Family::default()),
            refusals: add(
                r,
                "refusals",
                "Requests answered by the gateway itself with an error, by reason",
                Family::default(),
            ),
            timeouts: add(
                r,
                "timeouts",
                "Waits ended by their tier's limit",
                Family::default(),
            ),
            disconnects: add(
                r,
                "disconnects",
                "Clients that left before their answer was complete, by the phase they left in",
                Family::default(),
            ),
            overruns: add(
                r,
                "overruns",
                "Abandoned calls that were cancelled at a bound of their drain or grace",
                Family::default(),
            ),
            abandoned_retries: add(
                r,
                "abandoned_retries",
                "Calls that try an abandoned call again",
                Family::default(),
            ),
            confirmations: add(
                r,
                "confirmations",
                "Closed calls whose end the server was asked for (abandon.confirm), by how it was known in the end",
                Family::default(),
            ),
            confirm_polls: add(
                r,
                "confirm_polls",
                "Polls of a server's own count of its work, by what became of them",
                Family::default(),
            ),
            attaches: add(
                r,
                "attaches",
                "Retries that were given the answer of the call they try again",
                Family::default(),
            ),
            attach_lost: add(
                r,
                "attach_lost",
                "Calls that can no longer be taken up by a retry, by the bound of bytes that their answer is past",
                Family::default(),
            ),
            attach_bytes: add(
                r,
                "attach_bytes",
                "Memory of answers that are kept for retries",
                Gauge::default(),
            ),
            attach_kept: add(
                r,
                "attach_kept",
                "Calls that are over and whose answer is kept for a retry",
                Gauge::default(),
            ),
            wasted_tokens: add(
                r,
                "wasted_tokens",
                "Output tokens generated after the client had left, by how the number is known",
                Family::default(),
            ),
            wasted_seconds: add_unit(
                r,
                "wasted",
                "Time for which the server worked after the client had left, as far as the contract tells",
                Unit::Seconds,
                Family::default(),
            ),
            wasted_money: add(
                r,
                "wasted_money",
                "Price of the wasted tokens, in the currency of [prices]",
                Family::default(),
            ),
            retries: add(
                r,
                "retries",
                "Attempts made again after a failure that provably reached no server",
                Family::default(),
            ),
            call_seconds: add_unit(
                r,
                "call_duration",
                "Request head read to wait ended",
                Unit::Seconds,
                Family::default(),
            ),
            phase_seconds: add_unit(
                r,
                "phase_duration",
                "Time spent in one phase of a call",
                Unit::Seconds,
                Family::default(),
            ),
            ttft_seconds: add_unit(
                r,
                "time_to_first_token",
                "Request head read to first non-empty delta of a stream, also of one that is put together",
                Unit::Seconds,
                Family::default(),
            ),
            tokens: add(
                r,
                "tokens",
                "Tokens by direction and by how the number is known",
                Family::default(),
            ),
            usage_unknown: add(
                r,
                "usage_unknown",
                "Ended calls whose token usage is not known",
                Family::default(),
            ),
            malformed_events: add(
                r,
                "malformed_events",
                "Stream events that were passed on but could not be understood",
                Family::default(),
            ),
            connections: add(
                r,
                "connections",
                "Open connections by side",
                Family::default(),
            ),
            connections_opened: add(
                r,
                "connections_opened",
                "Connections opened by side",
                Family::default(),
            ),
            connections_refused: add(
                r,
                "connections_refused",
                "Client connections closed at once, by reason",
                Family::default(),
            ),
            connections_ended: add(
                r,
                "connections_ended",
                "Client connections ended by the gateway, by reason",
                Family::default(),
            ),
            upstream_connections: add(
                r,
                "upstream_connections",
                "Open connections to an endpoint",
                Family::default(),
            ),
            upstream_connects: add(
                r,
                "upstream_connects",
                "Connections opened to an endpoint",
                Family::default(),
            ),
            upstream_connect_errors: add(
                r,
                "upstream_connect_errors",
                "Connections that could not be opened, by reason",
                Family::default(),
            ),
            endpoint_ejected: add(
                r,
                "endpoint_ejected",
                "1 from a failed connect until a connection succeeds",
                Family::default(),
            ),
            request_bodies_bytes: add_unit(
                r,
                "request_bodies",
                "Request bodies held in memory",
                Unit::Bytes,
                Gauge::default(),
            ),
            answers_bytes: add_unit(
                r,
                "answers",
                "Answers in one piece in memory: those being put together out of streams, and all that wait for their clients to read them",
                Unit::Bytes,
                Gauge::default(),
            ),
            loop_lag_seconds: add_unit(
                r,
                "loop_lag",
                "How late a worker's 100 ms timer fires",
                Unit::Seconds,
                Family::default(),
            ),
            access_log_dropped: add(
                r,
                "access_log_dropped",
                "Access-log lines lost because the writer was too slow",
                Counter::default(),
            ),
            journal_missed: add(
                r,
                "journal_missed",
                "Records of calls that the journal could not take: it is full, or its disk is",
                Counter::default(),
            ),
            log_dropped: add(
                r,
                "log_dropped",
                "Lines of the program's own log lost because the reader of standard error was too slow",
                super::log::dropped(),
            ),
            config_generation: add(
                r,
                "config_generation",
                "Number of the running configuration, from 1",
                Gauge::default(),
            ),
            config_reloads: add(r, "config_reloads", "Reloads by result", Family::default()),
            certificate_expiry: add_unit(
                r,
                "certificate_expiry_timestamp",
                "When the first of the certificates in server.tls.cert_file ends to be valid, in seconds since 1970",
                Unit::Seconds,
                Family::default(),
            ),
            draining: add(r, "draining", "1 after SIGTERM", Gauge::default()),
            panics: add(
                r,
                "panics",
                "Calls ended by a defect in the gateway; report each one",
                Counter::default(),
            ),
            limiters,
            registry: Registry::default(),
        };
        let process = registry.sub_registry_with_prefix("process");
        process.register_collector(Box::new(Process));
        Self { registry, ..made }
    }

    /// The families of the upstream `name`.
    pub fn upstream(&self, name: &Arc<str>) -> UpstreamMetrics {
        UpstreamMetrics::new(self, name)
    }

    /// Shows a limiter's counts under `upstream`; a second registration of the name replaces the first.
    pub fn show_limiter(&self, upstream: &Arc<str>, limiter: &Limiter) {
        let mut shown = self.limiters.lock();
        shown.retain(|row| row.upstream != *upstream);
        shown.push(Shown {
            upstream: Arc::clone(upstream),
            limiter: limiter.clone(),
            removed: false,
        });
    }

    /// The names of the upstreams that the running configuration has.
    pub fn upstreams(&self) -> Vec<Arc<str>> {
        let shown = self.limiters.lock();
        let named = shown.iter().filter(|row| !row.removed);
        named.map(|row| Arc::clone(&row.upstream)).collect()
    }

    /// Takes a removed upstream's limiter out as soon as nothing runs in it any more.
    pub fn hide_limiters(&self, keep: impl Fn(&str) -> bool) {
        for row in self.limiters.lock().iter_mut() {
            row.removed = !keep(&row.upstream);
        }
    }

    /// Takes a removed endpoint's gauges out.
    pub fn hide_endpoint(&self, labels: &EndpointLabels) {
        self.upstream_connections.remove(labels);
        self.endpoint_ejected.remove(labels);
    }

    /// The OpenMetrics text of one scrape.
    pub fn encode(&self) -> String {
        let mut text = String::with_capacity(16 * 1024);
        // Writing to a String cannot fail; an encoder error would be a defect that a scrape must not turn into a panic.
        if prometheus_client::encoding::text::encode(&mut text, &self.registry).is_err() {
            text.push_str("# EOF\n");
        }
        text
    }
}

fn add<M>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M
where
    M: prometheus_client::registry::Metric + Clone,
{
    registry.register(name, help, metric.clone());
    metric
}

fn add_unit<M>(registry: &mut Registry, name: &str, help: &str, unit: Unit, metric: M) -> M
where
    M: prometheus_client::registry::Metric + Clone,
{
    registry.register_with_unit(name, help, unit, metric.clone());
    metric
}
