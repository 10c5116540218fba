//! The program's own log, on standard error.

use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::{Level, Log, LogFormat};

/// Installs the log once per process; a second call changes nothing.
pub fn init(log: &Log) {
    let level = match log.level {
        Level::Error => LevelFilter::ERROR,
        Level::Warn => LevelFilter::WARN,
        Level::Info => LevelFilter::INFO,
        Level::Debug => LevelFilter::DEBUG,
        Level::Trace => LevelFilter::TRACE,
    };
    // Libraries below us log whole heads (with credentials) at debug and trace: they stay at warn whatever the level.
    let targets = tracing_subscriber::filter::Targets::new()
        .with_default(LevelFilter::WARN.min(level))
        .with_target("tidegate", level);
    let registry = tracing_subscriber::registry().with(targets);
    let layer = fmt::layer().with_writer(std::io::stderr).with_target(false);
    let installed = match log.format {
        LogFormat::Text => registry.with(layer.with_ansi(false)).try_init(),
        LogFormat::Json => registry.with(layer.json().flatten_event(true)).try_init(),
    };
    if installed.is_err() {
        tracing::debug!("log was already installed");
    }
}
