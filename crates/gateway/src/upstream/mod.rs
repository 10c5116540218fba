//! The model servers: where a call can go and the connections that lead there.
//!
//! [`registry`] keeps what must survive a reload (slots, counts, endpoint health). [`route`] and [`pick`] decide, without I/O. [`pool`] keeps
//! idle connections, [`connect`] opens new ones, [`exchange`] is one request and its answer on a connection. This module never sees a
//! dialect's JSON and never chooses a status code.

use std::sync::Arc;

use tidegate_limiter::Limiter;

use crate::config;
use crate::fields::{FieldLine, Fields};
use crate::telemetry::metrics::{Metrics, UpstreamMetrics};

mod acknowledged;
pub mod arriving;
pub mod connect;
pub mod endpoint;
pub mod exchange;
pub mod http1;
#[cfg(test)]
mod http2_tests;
mod lookup;
pub mod mask;
pub mod page;
pub mod pick;
pub mod pool;
mod preface;
pub mod registry;
pub mod route;
pub mod socket;
pub mod upload;

pub use endpoint::EndpointState;

/// One named upstream in one configuration generation. The limiter and the endpoints' states are shared by all generations.
#[derive(Debug)]
pub struct Upstream {
    pub name: Arc<str>,
    pub settings: config::Upstream,
    pub limiter: Limiter,
    pub endpoints: Vec<Arc<EndpointState>>,
    pub tls: Arc<rustls::ClientConfig>,
    /// Keeps its key from clients.
    pub mask: mask::Mask,
    pub metrics: Arc<Metrics>,
    /// Its own share of them.
    pub families: Arc<UpstreamMetrics>,
}

impl Upstream {
    /// Tells once which kind to set, if nothing is known of the server and this answer of it says what it is.
    pub fn notice(&self, answer: &Fields) {
        if self.settings.stops_known {
            return;
        }
        let says = |line: FieldLine<'_>| {
            line.name.eq_ignore_ascii_case(b"server") && line.value.starts_with(b"llama.cpp")
        };
        let first = self.endpoints.first();
        if answer.lines().any(says) && first.is_some_and(|endpoint| endpoint.kind_is_news()) {
            tracing::warn!(
                upstream = %self.name,
                "the model server says that it is llama.cpp: set kind = \"llama.cpp\" (--kind), or what clients leave runs on"
            );
        }
    }

    /// The same around the same limiter and endpoints, counted in the same families.
    #[must_use]
    pub fn copy(&self) -> Self {
        let name: Arc<str> = (&*self.name).into();
        Self {
            settings: self.settings.clone(),
            limiter: self.limiter.clone(),
            endpoints: self.endpoints.clone(),
            tls: Arc::clone(&self.tls),
            mask: mask::Mask::new(self.settings.api_key.as_ref()),
            families: Arc::new(self.metrics.upstream(&name)),
            metrics: Arc::clone(&self.metrics),
            name,
        }
    }
}
