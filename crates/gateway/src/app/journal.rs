//! The journal at the start: opened, and what an earlier process left in it told.

use super::StartError;
use crate::call::Generation;
use crate::call::settle::lost;
use crate::config::Config;
use crate::telemetry::access_log::AccessLog;
use crate::telemetry::journal::{FoundAtStart, Journal};
use crate::telemetry::metrics::Metrics;

/// `None`: there is to be none.
pub(super) fn open(
    config: &Config,
    metrics: &Metrics,
) -> Result<Option<(Journal, FoundAtStart)>, StartError> {
    let open = |path: &std::path::PathBuf| Journal::open(path, metrics.journal_missed.clone());
    let opened = config.log.journal.as_ref().map(open).transpose();
    opened.map_err(StartError::Journal)
}

/// Writes the lines of the calls that were lost, and says what else there was.
pub(super) fn report(
    (journal, found): (Journal, FoundAtStart),
    generation: &Generation,
    log: &AccessLog,
    metrics: &Metrics,
) -> Journal {
    if let Some(aside) = &found.set_aside {
        tracing::warn!(now = %aside.display(), "what stood at log.journal is no journal of calls, or none that can be read: it was set aside, and the journal begins anew");
    }
    if found.damaged > 0 {
        tracing::warn!(
            records = found.damaged,
            "records in the journal could not be read: those calls leave no line"
        );
    }
    if !found.lost.is_empty() {
        tracing::warn!(
            calls = found.lost.len(),
            "the gateway was killed with calls in flight; each has its line now, with outcome \"lost\""
        );
    }
    let upstreams = &generation.config.upstreams;
    let is_known = |name: &str| upstreams.iter().any(|upstream| upstream.name == name);
    lost::report(found, (log, metrics), is_known);
    journal
}
