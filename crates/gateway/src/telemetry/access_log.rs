//! One JSON line per ended call, on standard output (or wherever the writer points).
//!
//! The line is made by `call::settle`; this module only carries it, see [`lines`](super::lines). A line that finds the buffer full is dropped
//! and counted (`tidegate_access_log_dropped_total`).

use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::metrics::counter::Counter;
use serde::Serialize;

use super::lines::{Lines, Writer};

/// Bytes that may wait for the writer.
const BUFFER_BYTES: usize = 16 * 1024 * 1024;

/// Both ends of a call. Times are milliseconds since the call was accepted; absent means it never came to that.
#[derive(Debug, Default, Serialize)]
pub struct Line<'a> {
    /// RFC 3339, UTC, when the request head was read.
    pub time: &'a str,
    pub id: &'a str,
    pub principal: &'a str,
    /// The caller's socket address.
    pub peer: &'a str,
    pub method: &'a str,
    /// Without the query, cut to 128 characters.
    pub path: &'a str,
    pub dialect: &'static str,
    /// As the client named it, cut to 128 characters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<&'a str>,
    pub stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<&'a str>,
    /// Status sent downstream; absent if the client left before one was sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    pub outcome: &'static str,
    /// The tier or reason inside the outcome, such as `response_head` or `queue_full`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'static str>,
    /// What the call was doing when its wait ended.
    pub phase: &'static str,
    pub wait_end: &'static str,
    pub wait_ended_ms: f64,
    pub work_end: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub work_ended_ms: Option<f64>,
    #[serde(flatten)]
    pub times: Times,
    /// Connections tried; 0 if the upstream was never touched.
    pub attempts: u32,
    /// `x-stainless-retry-count`, when the client's SDK says that this is a retry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_retry: Option<u32>,
    pub request_bytes: u64,
    pub response_bytes: u64,
    /// Meaningful stream events seen.
    pub events: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_tokens: Option<u64>,
    pub usage: &'static str,
    pub generation: u64,
}

/// The moments between the ends.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Times {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub admitted_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sent_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_byte_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_token_ms: Option<f64>,
}

/// The sending side. Cheap to clone.
#[derive(Clone, Debug)]
pub struct AccessLog {
    lines: Option<Lines>,
    dropped: Counter,
}

impl AccessLog {
    /// A log that writes nothing.
    pub fn off() -> Self {
        Self {
            lines: None,
            dropped: Counter::default(),
        }
    }

    /// Starts the writer thread.
    pub fn start(out: impl Write + Send + 'static, dropped: Counter) -> (Self, Writer) {
        let (lines, writer) = Lines::start("access-log", BUFFER_BYTES, dropped.clone(), out);
        let log = Self {
            lines: Some(lines),
            dropped,
        };
        (log, writer)
    }

    pub fn is_on(&self) -> bool {
        self.lines.is_some()
    }

    pub fn write(&self, line: &Line<'_>) {
        let Some(lines) = &self.lines else { return };
        let mut text = Vec::with_capacity(1024);
        if serde_json::to_writer(&mut text, line).is_err() {
            self.dropped.inc();
            return;
        }
        text.push(b'\n');
        if !lines.push(&text) {
            self.dropped.inc();
        }
    }
}

/// A place to write that tests can read back.
#[derive(Clone, Debug, Default)]
pub struct Memory(Arc<Mutex<Vec<u8>>>);

impl Memory {
    pub fn text(&self) -> String {
        let bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Write for Memory {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend_from_slice(buf);
        Ok(buf.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_line_is_written_before_the_writer_ends() {
        let memory = Memory::default();
        let (log, writer) = AccessLog::start(memory.clone(), Counter::default());
        for i in 0..1000 {
            log.write(&Line {
                request_bytes: i,
                ..Line::default()
            });
        }
        assert!(writer.flush(Duration::from_secs(10)));
        let text = memory.text();
        assert_eq!(text.lines().count(), 1000);
        assert!(
            text.lines()
                .last()
                .is_some_and(|l| l.contains("\"request_bytes\":999,"))
        );
    }

    #[test]
    fn a_writer_that_stands_still_costs_lines_and_nothing_else() {
        struct Stuck(std::sync::mpsc::Receiver<()>);
        impl Write for Stuck {
            fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
                let _ = self.0.recv();
                Ok(buf.len())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let (go, stuck) = std::sync::mpsc::channel();
        let dropped = Counter::default();
        let (log, writer) = AccessLog::start(Stuck(stuck), dropped.clone());
        let path = "x".repeat(1_000_000);
        for _ in 0..40 {
            log.write(&Line {
                path: &path,
                ..Line::default()
            });
        }
        assert!(
            dropped.get() >= 8,
            "40 MB do not fit into the buffer and one batch: {}",
            dropped.get()
        );
        drop(go);
        assert!(writer.flush(Duration::from_secs(10)));
    }
}
