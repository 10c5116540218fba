//! One JSON line per ended call, on standard output (or wherever the writer points).
//!
//! The line is made by `call::settle`; this module only carries it. Lines go through a bounded queue to a thread of their own, so a
//! slow disk or pipe never holds a worker. A line that finds the queue full is dropped and counted
//! (`tidegate_access_log_dropped_total`): losing a line is bad, stopping all streams for it is worse.

use std::io::Write;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

use prometheus_client::metrics::counter::Counter;
use serde::Serialize;

/// Lines that may wait for the writer.
const QUEUE_LINES: usize = 65_536;

/// Both ends of a call. Times are milliseconds since the call was accepted; absent means it never came to that.
#[derive(Debug, Default, Serialize)]
pub struct Line {
    /// RFC 3339, UTC, when the request head was read.
    pub time: String,
    pub id: String,
    pub principal: String,
    /// The caller's socket address.
    pub peer: String,
    pub method: String,
    pub path: String,
    pub dialect: &'static str,
    /// As the client named it, cut to 128 characters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    pub stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
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

/// The sending side. Cheap to clone.
#[derive(Clone, Debug)]
pub struct AccessLog {
    lines: Option<SyncSender<Vec<u8>>>,
    dropped: Counter,
}

/// Ends when the last [`AccessLog`] is gone and every queued line is written.
#[derive(Debug)]
pub struct Writer(Option<JoinHandle<()>>);

impl AccessLog {
    /// A log that writes nothing.
    pub fn off() -> Self {
        Self {
            lines: None,
            dropped: Counter::default(),
        }
    }

    /// Starts the writer thread.
    pub fn start(mut out: impl Write + Send + 'static, dropped: Counter) -> (Self, Writer) {
        let (lines, queue) = sync_channel::<Vec<u8>>(QUEUE_LINES);
        let thread = std::thread::Builder::new()
            .name("access-log".into())
            .spawn(move || {
                while let Ok(line) = queue.recv() {
                    // A closed pipe must not end the gateway: the line is lost, as it would be without us.
                    let _ = out.write_all(&line);
                    let mut more = 0;
                    while more < 1_000
                        && let Ok(line) = queue.try_recv()
                    {
                        let _ = out.write_all(&line);
                        more += 1;
                    }
                    let _ = out.flush();
                }
            })
            .ok();
        let log = Self {
            lines: Some(lines),
            dropped,
        };
        (log, Writer(thread))
    }

    pub fn write(&self, line: &Line) {
        let Some(lines) = &self.lines else { return };
        let Ok(mut text) = serde_json::to_vec(line) else {
            self.dropped.inc();
            return;
        };
        text.push(b'\n');
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) = lines.try_send(text) {
            self.dropped.inc();
        }
    }
}

impl Writer {
    /// Waits for the queued lines. Drop every [`AccessLog`] first.
    pub fn join(mut self) {
        if let Some(thread) = self.0.take() {
            let _ = thread.join();
        }
    }
}

/// A place to write that tests can read back.
#[derive(Clone, Debug, Default)]
pub struct Memory(Arc<std::sync::Mutex<Vec<u8>>>);

impl Memory {
    pub fn text(&self) -> String {
        let bytes = self
            .0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Write for Memory {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        self.0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .extend_from_slice(buf);
        Ok(buf.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
