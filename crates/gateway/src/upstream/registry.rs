//! What outlives a configuration: limiters, endpoint states, and the table of the running generation.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tidegate_limiter::{Limiter, Limits, LimitsError};

use super::connect::{self, TlsError};
use super::mask::Mask;
use super::route::Routes;
use super::{EndpointState, Upstream};
use crate::config::{self, Config, Endpoint};
use crate::telemetry::metrics::Metrics;

/// Builds the upstreams of each generation around the states that stay.
#[derive(Debug)]
pub struct Registry {
    metrics: Arc<Metrics>,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    limiters: HashMap<String, Limiter>,
    /// Kept by the generations that name them and by the calls and connections on them; gone with the last.
    endpoints: HashMap<(String, Endpoint), Weak<EndpointState>>,
}

/// Why a validated configuration could still not be put to work.
#[derive(Debug)]
pub enum BuildError {
    Limits {
        upstream: String,
        source: LimitsError,
    },
    Tls {
        upstream: String,
        source: TlsError,
    },
}

impl std::fmt::Display for BuildError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Limits { upstream, source } => write!(f, "upstream `{upstream}`: {source}"),
            Self::Tls { upstream, source } => write!(f, "upstream `{upstream}`: {source}"),
        }
    }
}

impl std::error::Error for BuildError {}

impl Registry {
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            metrics,
            kept: Mutex::default(),
        }
    }

    /// The table of a new generation. Fails before anything is changed.
    pub fn build(&self, config: &Config) -> Result<Routes, BuildError> {
        let mut tls = Vec::with_capacity(config.upstreams.len());
        for upstream in &config.upstreams {
            let client = connect::tls_config(upstream).map_err(|source| BuildError::Tls {
                upstream: upstream.name.clone(),
                source,
            })?;
            tls.push(client);
            Limiter::new(limits(upstream, config)).map_err(|source| BuildError::Limits {
                upstream: upstream.name.clone(),
                source,
            })?;
        }
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let mut upstreams = Vec::with_capacity(config.upstreams.len());
        for (settings, tls) in config.upstreams.iter().zip(tls) {
            let name: Arc<str> = settings.name.as_str().into();
            let limiter = kept
                .limiter(&settings.name, limits(settings, config))
                .map_err(|source| BuildError::Limits {
                    upstream: settings.name.clone(),
                    source,
                })?;
            self.metrics.show_limiter(&name, &limiter);
            let endpoints = settings
                .endpoints
                .iter()
                .map(|address| {
                    kept.endpoint(&name, address, settings.pool.connections_max, &self.metrics)
                })
                .collect();
            upstreams.push(Arc::new(Upstream {
                settings: settings.clone(),
                limiter,
                endpoints,
                tls,
                mask: Mask::new(settings.api_key.as_ref()),
                families: Arc::new(self.metrics.upstream(&name)),
                metrics: Arc::clone(&self.metrics),
                name,
            }));
        }
        // Limiters stay: a call that was being received when its upstream was taken out is still to ask for its slot, and if the upstream comes
        // back there must be one limit, not two.
        kept.endpoints.retain(|_, state| state.strong_count() > 0);
        self.metrics
            .hide_limiters(|name| config.upstreams.iter().any(|u| u.name == name));
        Ok(Routes::new(
            upstreams,
            config.default_upstream,
            config.unknown_models,
        ))
    }
}

fn limits(upstream: &config::Upstream, config: &Config) -> Limits {
    let limits = Limits::new(upstream.slots)
        .with_queue(upstream.queue)
        .with_queue_bytes(config.limits.request_bodies_total_bytes as u64);
    match upstream.abandon.per_key {
        // Calls that wait because of their key's leftovers must not take the places of the others' either.
        Some(most) => limits
            .with_flow_abandoned(most)
            .with_flow_queue(upstream.queue.div_ceil(2)),
        None => limits,
    }
}

impl Kept {
    /// The running limiter with its new limits, or a new one. Work that runs keeps its slot either way.
    fn limiter(&mut self, name: &str, limits: Limits) -> Result<Limiter, LimitsError> {
        if let Some(limiter) = self.limiters.get(name) {
            limiter.resize(limits)?;
            return Ok(limiter.clone());
        }
        let limiter = Limiter::new(limits)?;
        self.limiters.insert(name.to_owned(), limiter.clone());
        Ok(limiter)
    }

    fn endpoint(
        &mut self,
        name: &Arc<str>,
        address: &Endpoint,
        connections_max: usize,
        metrics: &Arc<Metrics>,
    ) -> Arc<EndpointState> {
        let key = (name.to_string(), address.clone());
        if let Some(state) = self.endpoints.get(&key).and_then(Weak::upgrade) {
            state.resize(connections_max);
            return state;
        }
        let state = EndpointState::new(name, address.clone(), connections_max, metrics);
        let state = Arc::new(state);
        self.endpoints.insert(key, Arc::downgrade(&state));
        state
    }
}
