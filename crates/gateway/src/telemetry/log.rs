//! The program's own log, on standard error.
//!
//! It goes through a buffer like the access log's: a worker that has something to say must not wait for whoever reads it.

use std::io::{self, Write};
use std::sync::{LazyLock, OnceLock};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use super::lines::{self, Lines, LinesWriter};
use crate::config::{Level, Log, LogFormat};

/// Bytes that may wait for the writer.
const BUFFER_BYTES: usize = 1024 * 1024;

/// The log of this process, once it is installed.
static LOG: OnceLock<(Lines, LinesWriter)> = OnceLock::new();
static DROPPED: LazyLock<Counter> = LazyLock::new(Counter::default);

/// Counts the lines that found the buffer full, over all gateways of this process.
pub fn dropped() -> Counter {
    DROPPED.clone()
}

/// Takes one event at a time, as the formatter writes it.
struct LogEntry(&'static Lines);

impl Write for LogEntry {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if !self.0.push(line, None) {
            DROPPED.inc();
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

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
    let (lines, _) = LOG.get_or_init(|| {
        let stderr: Box<dyn Write + Send> = match lines::unlocked(&io::stderr()) {
            Ok(file) => Box::new(file),
            Err(_) => Box::new(io::stderr()),
        };
        Lines::start("log", BUFFER_BYTES, dropped(), stderr)
    });
    let layer = fmt::layer()
        .with_writer(move || LogEntry(lines))
        .with_target(false);
    let installed = match log.format {
        LogFormat::Text => registry.with(layer.with_ansi(false)).try_init(),
        LogFormat::Json => registry.with(layer.json().flatten_event(true)).try_init(),
    };
    if installed.is_err() {
        tracing::debug!("log was already installed");
    }
}

/// Says this on standard error after what the log still holds, and waits for it, for so long at most. `false`: there is no log.
pub fn last_words(text: &str, limit: Duration) -> bool {
    let Some((lines, writer)) = LOG.get() else {
        return false;
    };
    if !lines.push(text.as_bytes(), None) {
        DROPPED.inc();
    }
    writer.flush(limit);
    true
}
