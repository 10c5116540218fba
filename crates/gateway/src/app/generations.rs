//! What a new configuration is put in place around.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::sync::watch;

use super::{StartError, check_open_door, descriptors, generation, load_tls, restart, show_expiry};
use crate::call::{Current, Generation};
use crate::config::Config;
use crate::telemetry::metrics::{Metrics, ResultLabel};
use crate::upstream::registry::Registry;

/// The running generation, and all that takes part in its change. A thread that hangs in one (files can) holds nothing of the rest.
#[derive(Debug)]
pub struct Generations {
    pub(super) metrics: Arc<Metrics>,
    /// What was put in place at the start and stays until the end.
    pub(super) started: Config,
    /// Descriptors that the process may have.
    pub(super) descriptors: u64,
    pub(super) data_addr: SocketAddr,
    pub(super) registry: Registry,
    pub(super) current: watch::Sender<Arc<Generation>>,
    /// The same, as each worker has it.
    pub(super) copies: Vec<Arc<Current>>,
    pub(super) tls: Option<watch::Sender<Arc<rustls::ServerConfig>>>,
}

/// A new configuration that is in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reloaded {
    pub generation: u64,
    /// Settings that are not what runs: they take effect after a restart.
    pub needs_restart: Vec<&'static str>,
}

impl Generations {
    pub(super) fn current(&self) -> Arc<Generation> {
        Arc::clone(&self.current.borrow())
    }

    /// As [`Gateway::reload`](super::Gateway::reload).
    ///
    /// # Errors
    ///
    /// Why it cannot be used; the old one goes on.
    pub fn reload(&self, config: Config) -> Result<Reloaded, StartError> {
        let result = self.try_reload(config);
        let label = ResultLabel {
            result: if result.is_ok() { "ok" } else { "failed" },
        };
        self.metrics.config_reloads.get_or_create(&label).inc();
        result
    }

    fn try_reload(&self, mut config: Config) -> Result<Reloaded, StartError> {
        check_open_door(self.data_addr, &config)?;
        descriptors::fit(&mut config, self.descriptors);
        let identity = load_tls(&config)?;
        let needs_restart = restart::needed(&self.started, &config);
        let number = self.current().number + 1;
        let generation = generation(&self.registry, config, number)?;
        if let (Some(sender), Some(identity)) = (&self.tls, identity) {
            show_expiry(&self.metrics, &generation.config, Some(&identity));
            sender.send_replace(identity.config);
        }
        for copy in &self.copies {
            copy.replace(&generation);
        }
        self.current.send_replace(Arc::new(generation));
        self.metrics
            .config_generation
            .set(i64::try_from(number).unwrap_or(i64::MAX));
        Ok(Reloaded {
            generation: number,
            needs_restart,
        })
    }

    /// A failed reload that never came as far as a configuration is counted too.
    pub fn reload_failed(&self) {
        self.metrics
            .config_reloads
            .get_or_create(&ResultLabel { result: "failed" })
            .inc();
    }
}
