//! One scripted answer, from delay to end.

use std::io::Write as _;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use tokio::time::{Instant, sleep, sleep_until};

use super::dress::{dress, plain};
use super::pen::Pen;
use crate::answer::{Ask, Dialect, Talk, echo, error_body, html, streamed, whole};
use crate::clock::now_ns;
use crate::http1::reason;
use crate::script::{Body, Compress, End, Framing, Next, OnClose, Piece, Script, Segment, StallAt};
use crate::truth::{CallTruth, Ended};

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
            // Never closed, so there always is a slot in the end.
            Some(slots) => slots.acquire().await.ok(),
            None => None,
        };
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

    async fn refuse(&mut self, status: u16) {
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

    /// An answer that is not a stream of events.
    async fn one_piece(&mut self) -> Result<(), Over> {
        let script = self.script;
        let (kind, body) = match &script.body {
            Body::Pieces(pieces) => return self.raw_body(pieces).await,
            Body::EndlessLine => return self.endless().await,
            Body::Html => ("text/html", html(script.status)),
            Body::Empty => ("application/json", Vec::new()),
            Body::Error => ("application/json", self.error()),
            _ if script.status >= 400 => ("application/json", self.error()),
            body => {
                let call = self.pen.call;
                let made =
                    whole(body, self.ask, script, call).unwrap_or_else(|| echo(&self.call()));
                ("application/json", made)
            }
        };
        self.generate().await?;
        self.start_body(Framing::Length);
        let body = match self.gzip.take() {
            Some(mut gzip) => {
                // Writing to a Vec cannot fail.
                let _ = gzip.write_all(&body);
                let packed = gzip.finish().unwrap_or_default();
                self.gzip = Some(GzEncoder::new(Vec::new(), Compression::fast()));
                packed
            }
            None => body,
        };
        let length = match (self.framing, script.end) {
            (Framing::Length | Framing::Both, End::ShortLength) => Some(body.len() as u64 + 500),
            (Framing::Length | Framing::Both, _) => Some(body.len() as u64),
            _ => None,
        };
        self.head(script.status, kind, length).await;
        self.gzip = None;
        if self.ask.head_request || matches!(script.status, 204 | 304) {
            self.pen.chunked = false;
            return Ok(());
        }
        self.events = 1;
        let half = &body[..body.len() / 2];
        if self.stalls(StallAt::MidEvent(1)) {
            self.pen.body(half).await;
            self.pen.flush().await;
            self.stall(StallAt::MidEvent(1)).await;
            self.pen.body(&body[half.len()..]).await;
            return Ok(());
        }
        match script.end {
            End::Fin | End::Rst | End::BadChunk | End::Hang if script.end_at != Some(1) => {
                self.pen.body(half).await;
                Err(Over)
            }
            _ => {
                self.pen.body(&body).await;
                Ok(())
            }
        }
    }

    fn error(&self) -> Vec<u8> {
        error_body(self.script.status, self.ask, &self.script.message)
    }

    /// This call as received; its number alone if it is not kept.
    fn call(&self) -> CallTruth {
        let call = self.pen.call;
        self.pen.shared.ledger.call(call).unwrap_or_default()
    }

    /// The time and the tokens that an answer in one piece takes.
    async fn generate(&mut self) -> Result<(), Over> {
        let script = self.script;
        let Some(dialect) = self.ask.route.dialect() else {
            return Ok(());
        };
        if script.status >= 400 {
            return Ok(());
        }
        let steps = Talk::new(dialect, self.ask, script, self.pen.call).steps();
        if script.pace_ms <= 0.0 {
            return self.count(steps);
        }
        let start = Instant::now();
        for n in 0..steps {
            self.count(1)?;
            sleep_until(start + pace(script.pace_ms, n + 1)).await;
        }
        Ok(())
    }

    /// Counts tokens; over when enough were made after the peer left.
    fn count(&mut self, tokens: u64) -> Result<(), Over> {
        let left = self.pen.gone.get().is_some();
        let ledger = &self.pen.shared.ledger;
        if left
            && let OnClose::AfterTokens(most) = self.script.on_close
            && self.left_after + tokens > most
        {
            return Err(Over);
        }
        if left {
            self.left_after += tokens;
        }
        ledger.tokens(self.pen.call, tokens, left);
        Ok(())
    }

    async fn raw_body(&mut self, pieces: &[Piece]) -> Result<(), Over> {
        let script = self.script;
        let total: u64 = pieces
            .iter()
            .map(|p| p.bytes().map_or(0, |b| b.len() as u64) * p.times.unwrap_or(1))
            .sum();
        self.start_body(Framing::Chunked);
        let length = match (self.framing, script.end) {
            (Framing::Length | Framing::Both, End::ShortLength) => Some(total + 500),
            (Framing::Length | Framing::Both, _) => Some(total),
            _ => None,
        };
        self.head(script.status, "text/event-stream; charset=utf-8", length)
            .await;
        self.pause(script.first_ms).await;
        self.pieces(pieces, false).await
    }

    async fn pieces(&mut self, pieces: &[Piece], wire: bool) -> Result<(), Over> {
        self.head_sent = true;
        for piece in pieces {
            let bytes = piece.bytes().unwrap_or_else(String::into_bytes);
            for _ in 0..piece.times.unwrap_or(1) {
                self.count(piece.tokens)?;
                if wire {
                    self.pen.raw(&bytes).await;
                } else {
                    self.event(&bytes).await?;
                }
                self.pause(piece.pause_ms).await;
            }
        }
        Ok(())
    }

    async fn endless(&mut self) -> Result<(), Over> {
        self.start_body(Framing::Chunked);
        let kind = "text/event-stream; charset=utf-8";
        self.head(self.script.status, kind, None).await;
        self.pen.body(b"data: {\"x\":\"").await;
        let block = vec![b'x'; self.script.event_bytes.max(1024)];
        let start = Instant::now();
        for n in 0.. {
            self.count(0)?;
            self.pen.body(&block).await;
            if self.script.pace_ms > 0.0 {
                sleep_until(start + pace(self.script.pace_ms, n + 1)).await;
            } else {
                tokio::task::yield_now().await;
            }
        }
        Ok(())
    }

    async fn stream(&mut self, dialect: Dialect) -> Result<(), Over> {
        let script = self.script;
        let talk = Talk::new(dialect, self.ask, script, self.pen.call);
        self.start_body(Framing::Chunked);
        let length = match (self.framing, script.end) {
            (Framing::Length | Framing::Both, _) if script.end == End::ShortLength => {
                Some(1_000_000_000)
            }
            (Framing::Length | Framing::Both, _) => Some(self.measure(&talk)),
            _ => None,
        };
        let kind = "text/event-stream; charset=utf-8";
        self.head(script.status, kind, length).await;
        self.pause(script.first_ms).await;
        for event in talk.prelude() {
            self.dressed(&event, false).await?;
        }
        let steps = match script.end {
            End::Never => u64::MAX,
            _ => talk.steps(),
        };
        let start = Instant::now();
        let mut out = Vec::with_capacity(512);
        for n in 0..steps {
            if script.error_at == Some(n) {
                self.dressed(&talk.error_event(), false).await?;
            }
            self.count(1)?;
            out.clear();
            let stamp = script.stamp.then(now_ns);
            talk.step(n, n + 1 == steps, stamp, &mut out);
            self.dressed(&out, false).await?;
            if script.pace_ms > 0.0 {
                let to = start + pace(script.pace_ms, n + 1);
                self.pause_until(to).await;
            } else if n & 15 == 15 {
                tokio::task::yield_now().await;
            }
        }
        let postlude = talk.postlude(steps);
        for (i, event) in postlude.iter().enumerate() {
            self.dressed(event, i + 1 == postlude.len()).await?;
        }
        Ok(())
    }

    /// Length of the whole stream, for a declared length.
    fn measure(&self, talk: &Talk<'_>) -> u64 {
        let steps = talk.steps();
        let mut total = 0;
        let mut events = talk.prelude();
        for n in 0..steps {
            let mut out = Vec::new();
            let stamp = self.script.stamp.then(now_ns);
            talk.step(n, n + 1 == steps, stamp, &mut out);
            events.push(out);
        }
        events.extend(talk.postlude(steps));
        for (i, event) in events.iter().enumerate() {
            total += dress(self.script, event, i as u64, i + 1 == events.len()).len() as u64;
        }
        total
    }

    async fn dressed(&mut self, event: &[u8], last: bool) -> Result<(), Over> {
        if plain(self.script) {
            self.event(event).await
        } else {
            let event = dress(self.script, event, self.events, last);
            self.event(&event).await
        }
    }

    /// Writes one event, with the stalls and ends scripted for it.
    async fn event(&mut self, event: &[u8]) -> Result<(), Over> {
        let packed;
        let event = match &mut self.gzip {
            Some(gzip) => {
                // Writing to a Vec cannot fail.
                let _ = gzip.write_all(event).and_then(|()| gzip.flush());
                packed = std::mem::take(gzip.get_mut());
                packed.as_slice()
            }
            None => event,
        };
        if self.script.end_at == Some(self.events) {
            if self.script.end_mid_event {
                self.pen.body(&event[..event.len() / 2]).await;
            }
            return Err(Over);
        }
        self.events += 1;
        if self.script.stall.is_none() {
            self.pen.body(event).await;
            return Ok(());
        }
        let n = self.events;
        let cut = if self.stalls(StallAt::MidEvent(n)) {
            Some((event.len() / 2, StallAt::MidEvent(n)))
        } else if self.stalls(StallAt::MidLines(n)) {
            let line = event.iter().position(|b| *b == b'\n' || *b == b'\r');
            Some((line.map_or(0, |p| p + 1), StallAt::MidLines(n)))
        } else {
            None
        };
        if let Some((cut, at)) = cut {
            self.pen.body(&event[..cut]).await;
            self.pen.flush().await;
            self.stall(at).await;
            self.pen.body(&event[cut..]).await;
        } else if self.stalls(StallAt::ChunkSize(n)) && self.pen.chunked {
            let framed = format!("{:x}\r\n", event.len());
            self.pen.raw(&framed.as_bytes()[..1]).await;
            self.pen.flush().await;
            self.stall(StallAt::ChunkSize(n)).await;
            self.pen.raw(&framed.as_bytes()[1..]).await;
            self.pen.raw(event).await;
            self.pen.raw(b"\r\n").await;
        } else {
            self.pen.body(event).await;
        }
        if self.stalls(StallAt::Event(n)) {
            self.pen.flush().await;
            self.stall(StallAt::Event(n)).await;
        }
        Ok(())
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
