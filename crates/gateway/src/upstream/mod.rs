//! The model servers: where a call can go and the connections that lead there.
//!
//! [`registry`] keeps what must survive a reload (slots, counts, endpoint health). [`route`] and [`pick`] decide, without I/O. [`pool`] keeps
//! idle connections, [`connect`] opens new ones, [`exchange`] is one request and its answer on a connection. This module never sees a
//! dialect's JSON and never chooses a status code.

use std::sync::Arc;

use tidegate_limiter::Limiter;

use crate::config;
use crate::telemetry::metrics::{Metrics, UpstreamMetrics};

mod acknowledged;
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
