//! One scripted answer, from delay to end.

mod events;
mod whole;

use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, sleep, sleep_until};

use super::pen::Pen;
use crate::answer::{Ask, error_body, streamed};
use crate::clock::now_ns;
use crate::http1::reason;
use crate::script::{Body, Compress, End, Framing, Next, OnClose, Script, Segment, StallAt};
use crate::truth::Ended;

/// What happens to the connection after the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finish {
    Keep(Next),
    Close,
    Reset,
}

/// The answer is over before its end, as scripted.
struct Over;

pub(super) struct Answer<'a> {
    pen: Pen<'a>,
    script: &'a Script,
    ask: &'a Ask,
    /// All events were written while the peer was there.
    pub(super) terminal: bool,
    head_sent: bool,
    events: u64,
    left_after: u64,
    /// The work was stopped because the peer had left.
    pub(super) stopped: bool,
    gzip: Option<GzEncoder<Vec<u8>>>,
    framing: Framing,
}

impl<'a> Answer<'a> {
    pub(super) fn new(pen: Pen<'a>, ask: &'a Ask) -> Self {
        let script = pen.script;
        Self {
            pen,
            script,
            ask,
            terminal: false,
            head_sent: false,
            events: 0,
            left_after: 0,
            stopped: false,
            gzip: None,
            framing: script.framing,
        }
    }

    /// Works until the end; why it ended and what becomes of the connection.
    pub(super) async fn run(&mut self) -> (Ended, Finish) {
        let script = self.script;
        let full = script
            .capacity
            .is_some_and(|most| self.pen.shared.ledger.truth().running > most);
        if full {
            self.refuse(script.capacity_status).await;
            return (Ended::Complete, Finish::Keep(self.script.next));
        }
        let _slot = match &self.pen.shared.slots {
            Some(slots) => match self.slot(slots).await {
                None => return (Ended::Script, Finish::Close),
                slot => slot,
            },
            None => None,
        };
        self.pen.shared.ledger.prompt(script.prompt_tokens);
        self.pause(script.delay_ms).await;
        self.stall(StallAt::Head).await;
        self.interim().await;
        if let Body::Wire(pieces) = &script.body {
            let over = self.pieces(pieces, true).await;
            return self.end(over.is_ok()).await;
        }
        let over = match streamed(&script.body, self.ask) {
            Some(dialect) if script.status < 400 => self.stream(dialect).await,
            _ => self.one_piece().await,
        };
        self.end(over.is_ok()).await
    }

    /// Waits for a slot; none if the work is forgotten meanwhile.
    async fn slot(&mut self, slots: &'a Semaphore) -> Option<SemaphorePermit<'a>> {
        // Never closed: whoever waits gets a slot in the end.
        if let Ok(slot) = slots.try_acquire() {
            return Some(slot);
        }
        let _counted = self.pen.shared.ledger.waits();
        let gone = self.pen.gone;
        let forgets = self.on_close() == OnClose::Step;
        tokio::select! {
            slot = slots.acquire() => slot.ok(),
            _ = gone.wait(), if forgets => {
                self.stopped = true;
                None
            }
        }
    }

    /// How a close is treated, for the kind of answer this is.
    pub(super) fn on_close(&self) -> OnClose {
        let script = self.script;
        let plain = || streamed(&script.body, self.ask).is_none();
        match script.on_close_plain {
            Some(on_close) if plain() => on_close,
            _ => script.on_close,
        }
    }

    async fn refuse(&mut self, status: u16) {
        self.made();
        let body = error_body(status, self.ask, "the upstream is at its capacity");
        self.head(status, "application/json", Some(body.len() as u64))
            .await;
        self.pen.raw(&body).await;
        self.pen.flush().await;
        self.terminal = true;
    }

    async fn interim(&mut self) {
        for interim in &self.script.interim {
            let mut head = format!("HTTP/1.1 {} {}\r\n", interim.status, reason(interim.status));
            for (name, value) in &interim.headers {
                head.push_str(&format!("{name}: {value}\r\n"));
            }
            head.push_str("\r\n");
            self.pen.raw(head.as_bytes()).await;
            self.pause(interim.pause_ms).await;
        }
    }

    /// Writes the head.
    async fn head(&mut self, status: u16, kind: &str, length: Option<u64>) {
        let script = self.script;
        let version = match self.framing {
            Framing::Http10 => "HTTP/1.0",
            _ => "HTTP/1.1",
        };
        let mut lines: Vec<(String, String)> = vec![
            (
                "date".into(),
                httpdate::fmt_http_date(std::time::SystemTime::now()),
            ),
            ("server".into(), "uvicorn".into()),
            ("content-type".into(), kind.into()),
        ];
        if let Some(length) = length {
            lines.push(("content-length".into(), length.to_string()));
        }
        if self.pen.chunked {
            lines.push(("transfer-encoding".into(), "chunked".into()));
        }
        if script.close || self.ask.close || self.framing == Framing::Close {
            lines.push(("connection".into(), "close".into()));
        }
        if let Some(seconds) = script.keep_alive_s {
            lines.push(("keep-alive".into(), format!("timeout={seconds}")));
        }
        if let Some(after) = &script.retry_after {
            lines.push(("retry-after".into(), after.clone()));
        }
        if self.gzip.is_some() {
            lines.push(("content-encoding".into(), "gzip".into()));
        }
        let same = |a: &str, b: &str| a.eq_ignore_ascii_case(b);
        lines.retain(|(name, _)| {
            !script.without_headers.iter().any(|w| same(w, name))
                && !script.headers.iter().any(|(n, _)| same(n, name))
        });
        lines.extend(script.headers.iter().cloned());
        let mut head = format!("{version} {status} {}\r\n", reason(status)).into_bytes();
        for (i, (name, value)) in lines.iter().enumerate() {
            if i == 1 && self.stalls(StallAt::HeaderLine) {
                self.pen.raw(&std::mem::take(&mut head)).await;
                self.pen.flush().await;
                self.stall(StallAt::HeaderLine).await;
            }
            head.extend_from_slice(name.as_bytes());
            head.extend_from_slice(b": ");
            // Header values are bytes below 256, as they were received.
            head.extend(value.chars().map(|c| u8::try_from(c).unwrap_or(b'?')));
            head.extend_from_slice(b"\r\n");
        }
        head.extend_from_slice(b"\r\n");
        self.head_sent = true;
        self.pen.raw(&head).await;
        let (pen, call) = (&self.pen, self.pen.call);
        pen.shared.ledger.note(call, |c| c.status = status);
    }

    fn start_body(&mut self, auto: Framing) {
        let script = self.script;
        if self.framing == Framing::Auto {
            self.framing = auto;
        }
        self.pen.chunked = matches!(self.framing, Framing::Chunked | Framing::Both);
        let gzip = match script.compress {
            Compress::No => false,
            Compress::IfAccepted => self.ask.accepts_gzip,
            Compress::Gzip => true,
        };
        self.gzip = gzip.then(|| GzEncoder::new(Vec::new(), Compression::fast()));
    }

    /// Counts tokens; over when enough were made after the peer left.
    fn count(&mut self, tokens: u64) -> Result<(), Over> {
        let left = self.pen.gone.get().is_some();
        let ledger = &self.pen.shared.ledger;
        if left
            && let Some(most) = self.on_close().tokens_left()
            && self.left_after + tokens > most
        {
            self.stopped = true;
            return Err(Over);
        }
        if left {
            self.left_after += tokens;
        }
        ledger.tokens(self.pen.call, tokens, left);
        Ok(())
    }

    /// All of the answer is made; what is left is to write it.
    fn made(&self) {
        self.pen.shared.ledger.finishes(self.pen.call);
    }

    fn stalls(&self, at: StallAt) -> bool {
        self.script.stall.is_some_and(|s| s.at == at)
    }

    async fn stall(&mut self, at: StallAt) {
        let Some(stall) = self.script.stall.filter(|s| s.at == at) else {
            return;
        };
        match stall.ms {
            Some(ms) => self.pause(ms).await,
            None => loop {
                self.pause(3_600_000).await;
            },
        }
    }

    async fn pause(&mut self, ms: u64) {
        if ms > 0 {
            self.pause_until(Instant::now() + Duration::from_millis(ms))
                .await;
        }
    }

    /// Waits; heartbeats go out meanwhile if scripted.
    async fn pause_until(&mut self, until: Instant) {
        let beat = self.script.heartbeat_ms.filter(|_| self.head_sent);
        if let Some(ms) = beat {
            loop {
                let next = Instant::now() + Duration::from_millis(ms.max(1));
                if next >= until {
                    break;
                }
                sleep_until(next).await;
                let heartbeat = self.script.heartbeat.as_bytes();
                self.pen.framed(heartbeat).await;
            }
        }
        sleep_until(until).await;
    }

    /// Ends the answer; `whole`: all of it was made.
    async fn end(&mut self, whole: bool) -> (Ended, Finish) {
        let script = self.script;
        self.terminal = whole && self.pen.gone.get().is_none();
        if self.terminal {
            let call = self.pen.call;
            let ledger = &self.pen.shared.ledger;
            ledger.note(call, |c| c.terminal_ns = Some(now_ns()));
        }
        if script.segment != Segment::Once {
            self.pen.flush().await;
        }
        self.stall(StallAt::Terminator).await;
        if script.end_delay_ms > 0 {
            self.pen.flush().await;
            sleep(Duration::from_millis(script.end_delay_ms)).await;
        }
        if let Some(gzip) = self.gzip.take() {
            let rest = gzip.finish().unwrap_or_default();
            self.pen.body(&rest).await;
        }
        let wire = matches!(script.body, Body::Wire(_));
        if self.pen.chunked && !wire && matches!(script.end, End::Clean | End::Extra) {
            let mut end = b"0\r\n".to_vec();
            for (name, value) in &script.trailers {
                end.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
            }
            end.extend_from_slice(b"\r\n");
            self.pen.raw(&end).await;
        }
        match script.end {
            End::Extra => {
                self.pen
                    .raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 5\r\n\r\nextra")
                    .await;
            }
            End::BadChunk => self.pen.raw(b"zz\r\ngarbage\r\n").await,
            _ => {}
        }
        self.pen.flush().await;
        self.last_word(wire).await
    }

    async fn last_word(&self, wire: bool) -> (Ended, Finish) {
        let until_close = matches!(self.framing, Framing::Close | Framing::Http10);
        match self.script.end {
            End::Clean if until_close || self.script.close || wire => {
                (Ended::Complete, Finish::Close)
            }
            End::Clean | End::Never | End::Extra => {
                (Ended::Complete, Finish::Keep(self.script.next))
            }
            End::Rst => (Ended::Script, Finish::Reset),
            End::Hang => {
                self.pen.gone.wait().await;
                (Ended::Script, Finish::Close)
            }
            End::Fin | End::ShortLength | End::BadChunk => (Ended::Script, Finish::Close),
        }
    }
}

/// `n` times the pace.
fn pace(ms: f64, n: u64) -> Duration {
    #[expect(clippy::cast_precision_loss, reason = "token counts are small")]
    let n = n as f64;
    Duration::from_secs_f64((ms * n / 1000.0).clamp(0.0, 1e9))
}
