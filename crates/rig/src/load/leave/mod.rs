//! How soon an upstream sees the close after a client has left: routes ×
//! streaming × where the call is × how the client leaves, one call at a time.
//!
//! The time is from just before the client's system call to the moment when the
//! upstream reads the end of its connection. Both are in this process and on
//! one clock. The load and the upstream share a thread, so a figure holds what
//! the gateway takes, twice the kernel's loopback, and this thread's next turn.

mod leaver;
mod told;

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use self::leaver::Leaver;
pub use self::leaver::Way;
pub use self::told::{Told, ToldBars};
use super::Target;
use crate::clock::now_ns;
use crate::{CallTruth, FakeUpstream, H2Front, H2Options, Script};

/// What clients ask for.
const ROUTES: [&str; 6] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/something/else",
];

/// Where a call is when its client leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// The request is sent, no head has come.
    Head,
    /// The head has come and nothing else.
    Prefill,
    /// The answer comes, a piece each 5 ms.
    Streaming,
    /// The answer has begun, and no more comes.
    Silent,
}

const MOMENTS: [At; 4] = [At::Head, At::Prefill, At::Streaming, At::Silent];

const HOURS_MS: u64 = 3_600_000;

impl At {
    fn name(self) -> &'static str {
        match self {
            Self::Head => "waiting for the head",
            Self::Prefill => "waiting for the first event",
            Self::Streaming => "streaming",
            Self::Silent => "silent in its middle",
        }
    }

    fn script(self, streaming: bool) -> Value {
        let (kind, first, next) = if streaming {
            let event = "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n";
            ("text/event-stream", event, event)
        } else {
            ("application/json", "{\"text\":\"", "word ")
        };
        let headers = json!([["content-type", kind]]);
        let then =
            |more: Value| json!({"headers": headers, "body": {"pieces": [{"text": first}, more]}});
        match self {
            Self::Head => json!({"stall": {"at": "head"}}),
            Self::Prefill => {
                json!({"headers": headers, "first_ms": HOURS_MS, "body": {"pieces": [{"text": first}]}})
            }
            Self::Streaming => then(json!({"text": next, "times": 1_000_000, "pause_ms": 5})),
            Self::Silent => then(json!({"text": next, "pause_ms": HOURS_MS})),
        }
    }

    /// Whether the client has the beginning of an answer.
    fn answered(self) -> bool {
        matches!(self, Self::Streaming | Self::Silent)
    }
}

/// How much is measured.
#[derive(Clone, Debug)]
pub struct LeavePlan {
    /// Calls of each kind.
    pub rounds: usize,
    /// How clients leave; those of HTTP/2 begin it with prior knowledge.
    pub ways: Vec<Way>,
    /// The upstream speaks HTTP/2.
    pub upstream_http2: bool,
    /// What does not come, or is not told, within this time never does.
    pub within: Duration,
}

impl Default for LeavePlan {
    fn default() -> Self {
        Self {
            rounds: 20,
            ways: Way::ONE.to_vec(),
            upstream_http2: false,
            within: Duration::from_secs(5),
        }
    }
}

/// The upstream that judges.
struct Judge {
    upstream: FakeUpstream,
    front: Option<H2Front>,
}

impl Judge {
    async fn start(listen: SocketAddr, http2: bool) -> io::Result<Self> {
        const KEPT: usize = 16;
        let any = SocketAddr::new(listen.ip(), 0);
        let own = if http2 { any } else { listen };
        let upstream = FakeUpstream::start_keeping(own, Script::default(), KEPT).await?;
        let front = match http2 {
            true => Some(H2Front::start(listen, upstream.addr(), H2Options::default()).await?),
            false => None,
        };
        Ok(Self { upstream, front })
    }

    fn addr(&self) -> SocketAddr {
        let front = self.front.as_ref();
        front.map_or_else(|| self.upstream.addr(), H2Front::addr)
    }
}

/// One kind of call.
#[derive(Clone, Copy, Debug)]
struct Cell {
    path: &'static str,
    streaming: bool,
    at: At,
    way: Way,
}

fn cells(ways: &[Way]) -> Vec<Cell> {
    let mut cells = Vec::new();
    for path in ROUTES {
        for streaming in [true, false] {
            for at in MOMENTS {
                cells.extend(ways.iter().map(|&way| Cell {
                    path,
                    streaming,
                    at,
                    way,
                }));
            }
        }
    }
    cells
}

/// Runs the plan on the gateway at `target`, which forwards to `listen`: there
/// this starts a fake upstream of its own.
pub async fn leave(target: &Target, listen: SocketAddr, plan: &LeavePlan) -> io::Result<Told> {
    let judge = Judge::start(listen, plan.upstream_http2).await?;
    target.say(format_args!("leave: the upstream is at {}", judge.addr()));
    let start = Instant::now();
    let mut told = Told::default();
    let cells = cells(&plan.ways);
    for round in 0..plan.rounds {
        target.say(format_args!("leave: round {}/{}", round + 1, plan.rounds));
        for (n, cell) in cells.iter().enumerate() {
            let id = format!("{round}-{n}");
            let labels = [
                ("way", cell.way.name()),
                ("phase", cell.at.name()),
                ("route", cell.path),
                ("answer", if cell.streaming { "stream" } else { "whole" }),
            ];
            match one(target.addr, &judge.upstream, *cell, &id, plan.within).await {
                Ok(Some(ns)) => told.after(&labels, ns),
                Ok(None) => told.never(&labels),
                Err(e) => told.error(format!("{} {}: {e}", cell.path, cell.at.name())),
            }
        }
    }
    told.seconds = start.elapsed().as_secs_f64();
    Ok(told)
}

/// Makes a call and leaves it. After how many nanoseconds the upstream saw it,
/// if it did.
async fn one(
    target: SocketAddr,
    upstream: &FakeUpstream,
    cell: Cell,
    id: &str,
    within: Duration,
) -> io::Result<Option<u64>> {
    let body = json!({
        "model": "tiny", "stream": cell.streaming, "max_tokens": 64,
        "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi",
        "rig": cell.at.script(cell.streaming), "test_id": id,
    });
    let mut client = Leaver::post(cell.way, target, cell.path, &body.to_string()).await?;
    let there = |c: &CallTruth| {
        let begun = cell.at == At::Head || c.first_write_ns.is_some();
        c.test_id.as_deref() == Some(id) && c.body_ns.is_some() && begun
    };
    let came = upstream.wait_for_call(there, within).await;
    came.map_err(|_| io::Error::other("the call did not come to the upstream"))?;
    if cell.at.answered() {
        client.begun().await?;
    }
    // What the gateway does with the last that came is done.
    sleep(Duration::from_millis(3)).await;
    let left = now_ns();
    let rest = client.leave()?;
    let gone = |c: &CallTruth| c.test_id.as_deref() == Some(id) && c.peer_gone_ns.is_some();
    let call = upstream.wait_for_call(gone, within).await;
    drop(rest);
    Ok(call
        .ok()
        .and_then(|c| Some(c.peer_gone_ns?.saturating_sub(left))))
}
