//! One JSON line per ended call, on standard output (or wherever the writer points).
//!
//! The line is made by `call::settle`; this module only carries it, see [`lines`](super::lines). A line that finds the buffer full is dropped
//! and counted (`tidegate_access_log_dropped_total`).

use std::cell::Cell;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use prometheus_client::metrics::counter::Counter;

use super::journal::JournalPlace;
use super::json;
pub use super::json::Word;
use super::lines::{Lines, LinesWriter};

/// Bytes that may wait for the writer.
const BUFFER_BYTES: usize = 16 * 1024 * 1024;
/// What a line mostly needs, and the most that is kept for the next one.
const LINE_BYTES: usize = 1024;
const LINE_BYTES_MAX: usize = 8 * LINE_BYTES;

thread_local! {
    /// Where this thread makes its lines.
    static LINE: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Both ends of a call. Times are since the call was accepted; absent means it never came to that.
#[derive(Debug)]
pub struct Line<'a> {
    /// When the request head was read; RFC 3339, UTC.
    pub time: SystemTime,
    pub id: Word<'a>,
    pub principal: Word<'a>,
    /// The caller's socket address.
    pub peer: SocketAddr,
    pub method: Word<'a>,
    /// Without the query, cut to 128 characters.
    pub path: &'a str,
    pub dialect: Word<'a>,
    /// As the client named it, cut to 128 characters.
    pub model: Option<&'a str>,
    pub stream: bool,
    pub upstream: Option<Word<'a>>,
    pub endpoint: Option<&'a str>,
    /// Status sent downstream; absent if the client left before one was sent.
    pub status: Option<u16>,
    pub outcome: Word<'a>,
    /// The tier or reason inside the outcome, such as `response_head` or `queue_full`.
    pub reason: Option<Word<'a>>,
    /// What the call was doing when its wait ended.
    pub phase: Word<'a>,
    pub wait_end: Word<'a>,
    pub wait_ended_ms: Duration,
    pub work_end: Word<'a>,
    pub work_ended_ms: Option<Duration>,
    /// How it is known that the work has ended.
    pub end_known: Option<Word<'a>>,
    /// The bound of `[upstreams.abandon]` at which a drain became a cancel.
    pub overrun: Option<Word<'a>>,
    /// How long the slot is kept after the exchange was closed; where the server was asked for the end of the work, how long it was.
    pub slot_kept_ms: Option<Duration>,
    /// Output tokens generated after the client had left.
    pub wasted_tokens: Option<u64>,
    /// How that number is known.
    pub waste: Option<Word<'a>>,
    pub wasted_ms: Option<Duration>,
    /// In the currency of `[prices]`.
    pub wasted_money: Option<f64>,
    /// The id of the abandoned call that this one tries again.
    pub retry_of: Option<Word<'a>>,
    /// The id of the call whose answer this retry was given.
    pub attached_to: Option<Word<'a>>,
    /// How many retries took this call up.
    pub attaches: Option<u32>,
    pub settled_ms: Duration,
    pub times: Times,
    /// Connections tried; 0 if the upstream was never touched.
    pub attempts: u32,
    /// `x-stainless-retry-count`, when the client's SDK says that this is a retry.
    pub client_retry: Option<u32>,
    pub request_bytes: u64,
    pub response_bytes: u64,
    /// Meaningful stream events seen.
    pub events: u64,
    pub input_tokens: Option<u64>,
    pub output_tokens: Option<u64>,
    pub usage: Word<'a>,
    pub generation: u64,
}

/// The line of a call whose process was killed: what the journal holds of it, and that neither of its ends is known.
#[derive(Debug)]
pub struct LostLine<'a> {
    /// When it began.
    pub time: SystemTime,
    pub id: &'a str,
    pub principal: &'a str,
    pub model: Option<&'a str>,
    pub upstream: Option<&'a str>,
    pub endpoint: Option<&'a str>,
    pub outcome: Word<'a>,
    pub wait_end: Word<'a>,
    pub work_end: Word<'a>,
    pub end_known: Option<Word<'a>>,
    pub usage: Word<'a>,
}

impl LostLine<'_> {
    fn write(&self, out: &mut Vec<u8>) {
        json::object!(out, self, { time, id, principal, model, upstream, endpoint, outcome, wait_end, work_end, end_known, usage });
    }
}

/// The moments between the ends.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    pub received_ms: Option<Duration>,
    pub queued_ms: Option<Duration>,
    pub admitted_ms: Option<Duration>,
    pub sent_ms: Option<Duration>,
    pub head_ms: Option<Duration>,
    pub first_byte_ms: Option<Duration>,
    pub first_token_ms: Option<Duration>,
}

impl Line<'_> {
    /// Puts the line's JSON into `out`, without a line end.
    fn write(&self, out: &mut Vec<u8>) {
        json::object!(out, self, {
            time, id, principal, peer, method, path, dialect, model, stream, upstream, endpoint, status, outcome, reason, phase,
            wait_end, wait_ended_ms, work_end, work_ended_ms, end_known, overrun, slot_kept_ms, wasted_tokens, waste, wasted_ms, wasted_money, retry_of, attached_to, attaches,
            settled_ms,
            times: Times { received_ms, queued_ms, admitted_ms, sent_ms, head_ms, first_byte_ms, first_token_ms },
            attempts, client_retry, request_bytes, response_bytes, events, input_tokens, output_tokens, usage, generation
        });
    }
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
    pub fn start(out: impl Write + Send + 'static, dropped: Counter) -> (Self, LinesWriter) {
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

    /// `place`: the call's own in the journal, which it keeps until the line is written.
    pub fn write(&self, line: &Line<'_>, place: Option<JournalPlace>) {
        self.push(|text| line.write(text), place);
    }

    /// The line of a call that an earlier process left in its journal.
    pub fn write_lost(&self, lost: &LostLine<'_>, place: JournalPlace) {
        self.push(|text| lost.write(text), Some(place));
    }

    fn push(&self, write: impl FnOnce(&mut Vec<u8>), place: Option<JournalPlace>) {
        let Some(lines) = &self.lines else { return };
        // A thread at its end has none any more.
        let mut text = LINE.try_with(Cell::take).unwrap_or_default();
        text.reserve(LINE_BYTES);
        write(&mut text);
        text.push(b'\n');
        if !lines.push(&text, place) {
            self.dropped.inc();
        }
        text.clear();
        text.shrink_to(LINE_BYTES_MAX);
        let _ = LINE.try_with(|line| line.set(text));
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
    use super::*;

    fn line(path: &str) -> Line<'_> {
        Line {
            time: SystemTime::UNIX_EPOCH,
            id: Word("req_1"),
            principal: Word("anonymous"),
            peer: SocketAddr::from(([127, 0, 0, 1], 8080)),
            method: Word("POST"),
            path,
            dialect: Word("openai"),
            model: Some("a \"model\""),
            stream: true,
            upstream: None,
            endpoint: None,
            status: Some(200),
            outcome: Word("ok"),
            reason: None,
            phase: Word("done"),
            wait_end: Word("answered"),
            wait_ended_ms: Duration::from_micros(12_300),
            work_end: Word("complete"),
            work_ended_ms: None,
            end_known: None,
            overrun: None,
            slot_kept_ms: None,
            wasted_tokens: None,
            waste: None,
            wasted_ms: None,
            wasted_money: None,
            retry_of: None,
            attached_to: None,
            attaches: None,
            settled_ms: Duration::ZERO,
            times: Times {
                head_ms: Some(Duration::from_millis(7)),
                ..Times::default()
            },
            attempts: 1,
            client_retry: None,
            request_bytes: 0,
            response_bytes: 9,
            events: 3,
            input_tokens: Some(5),
            output_tokens: None,
            usage: Word("reported"),
            generation: 1,
        }
    }

    #[test]
    fn a_line_is_one_json_object_without_what_is_absent() {
        let mut out = Vec::new();
        line("/v1/x").write(&mut out);
        assert_eq!(
            String::from_utf8(out).expect("text"),
            concat!(
                r#"{"time":"1970-01-01T00:00:00.000Z","id":"req_1","principal":"anonymous","peer":"127.0.0.1:8080","method":"POST","#,
                r#""path":"/v1/x","dialect":"openai","model":"a \"model\"","stream":true,"status":200,"outcome":"ok","phase":"done","#,
                r#""wait_end":"answered","wait_ended_ms":12.300,"work_end":"complete","settled_ms":0.000,"head_ms":7.000,"attempts":1,"#,
                r#""request_bytes":0,"response_bytes":9,"events":3,"input_tokens":5,"usage":"reported","generation":1}"#,
            )
        );
    }

    #[test]
    fn every_line_is_written_before_the_writer_ends() {
        let memory = Memory::default();
        let (log, writer) = AccessLog::start(memory.clone(), Counter::default());
        for i in 0..1000 {
            let line = Line {
                request_bytes: i,
                ..line("/")
            };
            log.write(&line, None);
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
            log.write(&line(&path), None);
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
