//! One user: a call, read and left as the scenario says.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::live::Live;
use super::scenario::{By, Leaves, Plan, Reads, Scenario};
use super::target::Gateway;
use crate::clock::now_ns;
use crate::load::{Conn, events, stamps};

pub(super) const NO_HTTP: &str = "the answer is no HTTP";

/// What each call of a storm is like.
#[derive(Debug)]
pub(super) struct Ask {
    addr: SocketAddr,
    request: Vec<u8>,
    scenario: Scenario,
    leaves: Leaves,
    reads: Reads,
    by: By,
    tokens: Option<u64>,
    pace_ms: f64,
}

/// How one attempt ended.
enum Attempt {
    /// As planned.
    Well,
    /// With a status that is not 200, and when to try again.
    Refused(u16, Option<Duration>),
    /// The user's time was up.
    GaveUp,
    Failed(String),
}

impl Ask {
    pub(super) fn new(gateway: &Gateway, scenario: Scenario, plan: &Plan) -> Self {
        let body = serde_json::json!({
            "model": gateway.model,
            "messages": [{"role": "user", "content": "hello there"}],
            "stream": scenario.streamed(),
            "max_tokens": scenario.tokens(plan).unwrap_or(plan.tokens),
            "rig": scenario.rig(plan),
        });
        Self {
            addr: gateway.addr,
            request: gateway.request(&body.to_string()),
            scenario,
            leaves: scenario.leaves(plan),
            reads: scenario.reads(),
            by: plan.by,
            tokens: scenario.tokens(plan),
            pace_ms: plan.pace_ms,
        }
    }
}

/// One call, with its retries, as if it had begun when it was `due`. Who holds
/// a stream does so until `until`.
pub(super) async fn call(ask: &Ask, live: &Live, due: Instant, until: Option<Instant>) {
    /// As the OpenAI and Anthropic SDKs have it.
    const RETRIES: u32 = 2;
    live.wants();
    let mut tried = 0;
    let ended = loop {
        let ended = attempt(ask, live, due, until).await;
        let again = match &ended {
            Attempt::Well => None,
            Attempt::Refused(status, after) => {
                let retried = matches!(status, 408 | 409 | 429 | 500..);
                retried.then(|| after.unwrap_or_else(|| backoff(tried)))
            }
            Attempt::GaveUp | Attempt::Failed(_) => Some(backoff(tried)),
        };
        match again {
            Some(pause) if ask.scenario.retries() && tried < RETRIES => sleep(pause).await,
            _ => break ended,
        }
        tried += 1;
    };
    live.note(|seen| seen.done += 1);
    let why = match ended {
        Attempt::Well => return,
        Attempt::GaveUp if ask.scenario.gives_up() => return,
        Attempt::GaveUp => "gave up".to_owned(),
        Attempt::Refused(status, _) => format!("status {status}"),
        Attempt::Failed(why) => why,
    };
    live.failed(&why);
    // A target that fails at once is not asked a million times.
    sleep(Duration::from_millis(20)).await;
}

/// Half a second, doubled each time up to eight, less up to a quarter.
fn backoff(tried: u32) -> Duration {
    let full = 0.5 * f64::from(2_u32.saturating_pow(tried.min(4)));
    // Spread by the clock's last digits: no more is needed here.
    let spread = u32::try_from(now_ns() % 1000).unwrap_or(0);
    Duration::from_secs_f64(full.min(8.0) * (1.0 - 0.25 * f64::from(spread) / 1000.0))
}

async fn attempt(ask: &Ask, live: &Live, due: Instant, until: Option<Instant>) -> Attempt {
    /// A gateway that wedges must not wedge the judge.
    const LONGEST: Duration = Duration::from_secs(60);
    let connected = timeout(
        Duration::from_secs(10),
        Conn::connect(ask.addr, ask.buffer()),
    )
    .await;
    let mut conn = match connected {
        Ok(Ok(conn)) => conn,
        Ok(Err(e)) => {
            live.connected(false);
            return Attempt::Failed(format!("connect: {}", e.kind()));
        }
        Err(_) => {
            live.connected(false);
            return Attempt::Failed("connect: not within 10 s".to_owned());
        }
    };
    live.connected(true);
    let open = live.opened();
    let begun = Instant::now();
    let mut reading = Reading {
        ask,
        live,
        due,
        events: 0,
        half: false,
        began: false,
        ended: false,
    };
    let (limit, given) = match (ask.leaves, until) {
        (Leaves::After(limit), _) => (limit, true),
        (Leaves::Together, Some(until)) => (until.saturating_duration_since(begun), true),
        _ => (LONGEST, false),
    };
    let ended = timeout(limit, reading.answer(&mut conn)).await;
    let (events, whole, began) = (reading.events, reading.ended, reading.began);
    let ended = match ended {
        Ok(ended) => ended,
        Err(_) if given => Attempt::GaveUp,
        Err(_) => Attempt::Failed("no end within 60 s".to_owned()),
    };
    live.got(ask.received(events, whole, begun.elapsed(), &ended));
    if matches!(ended, Attempt::Refused(..)) {
        live.refused();
    }
    if matches!(ended, Attempt::Refused(..)) || (whole && matches!(ended, Attempt::Well)) {
        return ended;
    }
    leave(conn, ask.by).await;
    drop(open);
    match ended {
        // Who holds a stream for the scenario's time has done what it came for.
        Attempt::GaveUp if ask.tokens.is_none() && began => Attempt::Well,
        Attempt::GaveUp if ask.tokens.is_none() => {
            Attempt::Failed("nothing of a stream came".to_owned())
        }
        ended => ended,
    }
}

impl Ask {
    fn buffer(&self) -> Option<u32> {
        (self.reads != Reads::Always).then_some(16 * 1024)
    }

    /// Tokens that somebody waited for.
    fn received(&self, events: u64, whole: bool, waited: Duration, ended: &Attempt) -> u64 {
        let Some(tokens) = self.tokens else { return 0 };
        if self.scenario.streamed() {
            // The last event of a whole stream is the sentinel.
            return events.saturating_sub(u64::from(whole));
        }
        match ended {
            Attempt::Well => tokens,
            // What was made while the user still waited is no waste.
            Attempt::GaveUp => {
                let made = waited.as_secs_f64() * 1000.0 / self.pace_ms.max(0.001);
                (0..tokens)
                    .take_while(|n| crate::load::float(*n) <= made)
                    .count() as u64
            }
            _ => 0,
        }
    }
}

/// An answer being read.
struct Reading<'a> {
    ask: &'a Ask,
    live: &'a Live,
    due: Instant,
    events: u64,
    /// What came last was the first half of an event's end.
    half: bool,
    /// Something of the body has come.
    began: bool,
    ended: bool,
}

impl Reading<'_> {
    async fn answer(&mut self, conn: &mut Conn) -> Attempt {
        match self.read(conn).await {
            Ok(attempt) => attempt,
            Err(e) => Attempt::Failed(match e.kind() {
                io::ErrorKind::InvalidData => NO_HTTP.to_owned(),
                io::ErrorKind::UnexpectedEof if self.events > 0 => "a stream was cut".to_owned(),
                io::ErrorKind::UnexpectedEof => "closed without an answer".to_owned(),
                kind => kind.to_string(),
            }),
        }
    }

    async fn read(&mut self, conn: &mut Conn) -> io::Result<Attempt> {
        let (ask, live) = (self.ask, self.live);
        conn.send(&ask.request).await?;
        let status = conn.head().await?;
        if status != 200 {
            let after = conn.retry_after;
            return Ok(Attempt::Refused(status, after));
        }
        if ask.reads == Reads::Stops {
            self.began = conn.body().await?.is_some();
            return std::future::pending().await;
        }
        let until_close = conn.until_close && ask.scenario.streamed();
        let mut tail = Vec::new();
        while let Some(bytes) = conn.body().await? {
            let now = now_ns();
            self.began = true;
            if until_close {
                tail.extend_from_slice(bytes);
                tail.drain(..tail.len().saturating_sub(TAIL));
            }
            let fresh = events(bytes) + u64::from(self.half && bytes.starts_with(b"\n"));
            self.half = match bytes {
                [b'\n'] => !self.half,
                bytes => bytes.ends_with(b"\n") && !bytes.ends_with(b"\n\n"),
            };
            let first = self.events == 0 && fresh > 0;
            self.events += fresh;
            let since = self.due.elapsed();
            live.note(|seen| {
                seen.chunks += fresh;
                if first {
                    seen.first.saturating_record(nanos(since));
                }
                for stamp in stamps(bytes) {
                    seen.delay.saturating_record(now.saturating_sub(stamp));
                }
            });
            if matches!(ask.leaves, Leaves::AtChunk(n) if self.events >= n) {
                return Ok(Attempt::Well);
            }
            if ask.reads == Reads::Slowly {
                sleep(Duration::from_secs(1)).await;
            }
        }
        if until_close && !says_that_it_is_whole(&tail) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.ended = true;
        if let Leaves::AtChunk(_) = ask.leaves {
            return Ok(Attempt::Failed(
                "the stream ended before the cut".to_owned(),
            ));
        }
        let took = nanos(self.due.elapsed());
        live.note(|seen| seen.latency.saturating_record(took));
        Ok(Attempt::Well)
    }
}

/// Enough for the last event of a stream.
const TAIL: usize = 16 * 1024;

/// Where only the close ends a stream, its last event has to.
fn says_that_it_is_whole(tail: &[u8]) -> bool {
    let ends: [&[u8]; 3] = [b"data: [DONE]", b"message_stop", b"response.completed"];
    ends.iter()
        .any(|end| memchr::memmem::find(tail, end).is_some())
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

async fn leave(conn: Conn, by: By) {
    match by {
        By::Rst => {
            // Fails on a socket that is gone already.
            let _ = conn.reset();
        }
        By::Fin => {
            let _ = conn.finish();
            // The other side sees the end before the socket goes and takes
            // what it has not read for a reset.
            sleep(Duration::from_millis(100)).await;
        }
        By::Drop => {}
    }
    drop(conn);
}
