//! The defaults, for what builds a configuration without a file: tests and `tidegate demo`.

use std::num::NonZeroUsize;

use super::file;
use super::{
    Abandon, Admin, Config, Cors, Endpoint, HttpVersion, Kind, Limits, Log, Pool, Server, Timeouts,
    UnknownModels, Upstream, UpstreamTls, upstreams,
};

impl Config {
    /// One upstream, everything else as it is when nothing is written. Nothing is read, so this cannot fail.
    pub fn one_upstream(endpoint: impl Into<Endpoint>) -> Self {
        Self {
            server: Server::default(),
            admin: Admin::default(),
            limits: Limits::default(),
            cors: Cors::default(),
            log: Log::default(),
            prices: std::collections::BTreeMap::new(),
            keys: Vec::new(),
            upstreams: vec![Upstream::new(
                upstreams::ONLY,
                Kind::Other,
                vec![endpoint.into()],
            )],
            default_upstream: 0,
            unknown_models: UnknownModels::Default,
        }
    }

    /// The limits of waits that belong to the listener: request head, request body, and writes to clients.
    pub fn edge_timeouts(&self) -> &Timeouts {
        // `[timeouts]` fills these tiers for every upstream, and no upstream can set them for itself.
        &self.upstreams[self.default_upstream].timeouts
    }
}

impl Upstream {
    /// An upstream with the defaults of its kind.
    pub fn new(name: impl Into<String>, kind: Kind, endpoints: Vec<Endpoint>) -> Self {
        let written = file::Upstream::default();
        Self {
            name: name.into(),
            kind,
            models: Vec::new(),
            aliases: written.aliases,
            api_key: None,
            auth: kind.row().auth,
            slots: written.slots,
            queue: written.slots.get(),
            settle: kind.row().settle,
            settle_whole: kind.row().settle_whole,
            stops_known: kind != Kind::Other,
            abandon: Abandon::of(kind, written.slots),
            attach: None,
            timeouts: Timeouts::default(),
            pool: Pool::of(kind, written.slots, &endpoints),
            tls: UpstreamTls::default(),
            heartbeat: written.heartbeat.duration(),
            ask_stream: kind.row().ask_stream,
            ask_usage: kind.row().ask_usage,
            endpoints,
        }
    }
}

impl Pool {
    /// Room for all slots on one endpoint, and for connections that are being closed.
    pub fn of(kind: Kind, slots: NonZeroUsize, endpoints: &[Endpoint]) -> Self {
        let written = file::Pool::default();
        let tls = endpoints.iter().any(|endpoint| endpoint.tls);
        Self {
            connections_max: slots.get().saturating_add(16),
            idle: kind.row().pool_idle(),
            http: if tls {
                HttpVersion::Auto
            } else {
                HttpVersion::Http1
            },
            eject: written.eject.0,
        }
    }
}

impl Default for Server {
    fn default() -> Self {
        Self::from(&file::Server::default())
    }
}

impl Default for Admin {
    fn default() -> Self {
        Self {
            listen: file::Admin::default().listen.parse().ok(),
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self::from(&file::Limits::default())
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        Self::from(&file::Timeouts::default())
    }
}

impl Default for Log {
    fn default() -> Self {
        Self::from(&file::Log::default())
    }
}
