//! Bodies in one piece.

use std::io::Write as _;

use flate2::Compression;
use flate2::write::GzEncoder;
use tokio::time::{Instant, sleep_until};

use super::{Answer, Over, pace};
use crate::answer::{Talk, echo, error_body, html, whole};
use crate::script::{Body, End, Framing, StallAt};
use crate::truth::CallTruth;

impl Answer<'_> {
    /// An answer that is not a stream of events.
    pub(super) async fn one_piece(&mut self) -> Result<(), Over> {
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
        self.made();
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
}
