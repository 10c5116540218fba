//! Bodies that are streams of events, or of any bytes.

use std::io::Write as _;

use tokio::time::{Instant, sleep_until};

use super::super::dress::{dress, plain};
use super::{Answer, Over, pace};
use crate::answer::{Dialect, Talk};
use crate::clock::now_ns;
use crate::script::{End, Framing, Piece, StallAt};

impl Answer<'_> {
    pub(super) async fn raw_body(&mut self, pieces: &[Piece]) -> Result<(), Over> {
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

    pub(super) async fn pieces(&mut self, pieces: &[Piece], wire: bool) -> Result<(), Over> {
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
                if self.pen.gone.get().is_some() {
                    // Nothing is written any more, so nothing is waited for: others get their turn, and the end gets seen.
                    tokio::task::yield_now().await;
                }
                self.pause(piece.pause_ms).await;
            }
        }
        Ok(())
    }

    pub(super) async fn endless(&mut self) -> Result<(), Over> {
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

    pub(super) async fn stream(&mut self, dialect: Dialect) -> Result<(), Over> {
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
            let last = i + 1 == postlude.len();
            if last {
                self.made();
            }
            self.dressed(event, last).await?;
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
}
