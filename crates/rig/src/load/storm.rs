//! The storm: users who all cut the connection in mid-stream.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::conn::{Conn, events};
use super::report::{Quantiles, Report, Waste, histogram};
use super::sample::Sampler;
use super::{Control, Target, raise_descriptors};
use crate::truth::Truth;

/// How users leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cut {
    /// By RST.
    #[default]
    Rst,
    /// By FIN.
    Fin,
    /// Not at all: the answer is read to its end.
    None,
}

/// When users leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Leave {
    /// In mid-stream, at a chunk.
    #[default]
    Chunk,
    /// After 50 ms, while the upstream is silent before the head.
    Prefill,
    /// After 50 ms of an answer that is not streamed.
    Plain,
}

/// The storm's size.
#[derive(Clone, Debug)]
pub struct StormPlan {
    /// Users at once.
    pub users: usize,
    /// Calls in all.
    pub calls: u64,
    /// Time between tokens.
    pub pace_ms: f64,
    /// Tokens planned per call.
    pub tokens: u64,
    /// When a user leaves.
    pub leave: Leave,
    /// The chunk at which a user leaves.
    pub cut_at: u64,
    /// How.
    pub cut: Cut,
    /// Also run each user once undisturbed before, to compare.
    pub undisturbed: bool,
}

impl Default for StormPlan {
    fn default() -> Self {
        Self {
            users: 500,
            calls: 5_000,
            pace_ms: 20.0,
            tokens: 400,
            leave: Leave::Chunk,
            cut_at: 5,
            cut: Cut::Rst,
            undisturbed: true,
        }
    }
}

/// How long users wait who leave without having seen a byte.
const PATIENCE: Duration = Duration::from_millis(50);

struct Shared {
    left: AtomicU64,
    done: AtomicU64,
    received: AtomicU64,
    first: Mutex<Histogram<u64>>,
    errors: Mutex<Vec<String>>,
}

/// Runs the storm.
pub async fn storm(target: &Target, plan: &StormPlan) -> io::Result<Report> {
    raise_descriptors(plan.users as u64 + 64)?;
    let mut report = Report::new("storm");
    let control = target.upstream.map(|addr| Control { addr });
    let watched = target.watched();
    if plan.undisturbed {
        target.say(format_args!("storm: {} users undisturbed", plan.users));
        let calm = StormPlan {
            calls: plan.users as u64,
            cut: Cut::None,
            leave: Leave::Chunk,
            tokens: 50,
            ..plan.clone()
        };
        let shared = run(target, &calm).await;
        report.first_event_undisturbed = Some(Quantiles::of(&lock(&shared.first)));
        for why in lock(&shared.errors).drain(..) {
            report.error(format!("undisturbed: {why}"));
        }
    }
    if let Some(control) = control {
        control.quiet(Duration::from_secs(5)).await?;
        control.reset().await?;
    }
    report.before = watched.process();
    let sampler = Sampler::start(watched, Duration::from_millis(500));
    target.say(format_args!("storm: {} calls, {:?}", plan.calls, plan.cut));
    let start = Instant::now();
    let shared = run(target, plan).await;
    report.seconds = start.elapsed().as_secs_f64();
    report.sockets_during = Some(watched.sockets());
    report.calls = shared.done.load(Ordering::Relaxed);
    sleep(Duration::from_secs(1)).await;
    let received = shared.received.load(Ordering::Relaxed);
    if let Some(control) = control {
        let truth = control.truth().await?;
        truth_into(&mut report, truth, plan, received);
    }
    sleep(Duration::from_secs(1)).await;
    report.after = watched.process();
    report.sockets_after = Some(watched.sockets());
    report.peak = sampler.map(Sampler::peak);
    report.cpu(report.before, report.after);
    report.first_event = Some(Quantiles::of(&lock(&shared.first)));
    for why in lock(&shared.errors).drain(..) {
        report.error(why);
    }
    Ok(report)
}

fn truth_into(report: &mut Report, truth: Truth, plan: &StormPlan, received: u64) {
    report.running_after = Some(truth.running);
    let planned = plan.calls * plan.tokens;
    report.waste = Some(Waste::of(planned, truth.tokens, received));
    report.truth = Some(truth);
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn run(target: &Target, plan: &StormPlan) -> Arc<Shared> {
    let shared = Arc::new(Shared {
        left: AtomicU64::new(plan.calls),
        done: AtomicU64::new(0),
        received: AtomicU64::new(0),
        first: Mutex::new(histogram()),
        errors: Mutex::new(Vec::new()),
    });
    let prefill_ms = match plan.leave {
        Leave::Prefill => 5_000,
        Leave::Chunk | Leave::Plain => 0,
    };
    let body = serde_json::json!({
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello there"}],
        "stream": plan.leave != Leave::Plain,
        "max_tokens": plan.tokens,
        "rig": {
            "tokens": plan.tokens, "pace_ms": plan.pace_ms, "role_chunk": false,
            "delay_ms": prefill_ms,
        },
    });
    let request: Arc<[u8]> = target.request(&body.to_string()).into();
    let waited_for = match plan.leave {
        Leave::Plain => {
            let tokens = PATIENCE.as_secs_f64() * 1000.0 / plan.pace_ms.max(0.001);
            (0..plan.tokens)
                .take_while(|n| super::float(*n) <= tokens)
                .count() as u64
        }
        Leave::Chunk | Leave::Prefill => 0,
    };
    let mut tasks = JoinSet::new();
    let between = Duration::from_secs_f64(plan.pace_ms.max(1.0) / 1000.0) / 25;
    for n in 0..plan.users {
        let (request, shared, addr) = (request.clone(), shared.clone(), target.addr);
        let way = (plan.cut, plan.leave, plan.cut_at, waited_for);
        tasks.spawn(async move {
            sleep(between * u32::try_from(n).unwrap_or(0)).await;
            let take = || {
                shared
                    .left
                    .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1))
                    .is_ok()
            };
            while take() {
                let call = user(addr, &request, &shared, way);
                // A gateway that wedges must not wedge the judge.
                match timeout(Duration::from_secs(60), call).await {
                    Ok(Ok(())) => {}
                    Ok(Err(e)) => lock(&shared.errors).push(e.to_string()),
                    Err(_) => lock(&shared.errors).push("no answer in 60 s".to_owned()),
                }
                shared.done.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    while tasks.join_next().await.is_some() {}
    shared
}

async fn user(
    addr: std::net::SocketAddr,
    request: &[u8],
    shared: &Shared,
    (cut, leave, cut_at, waited_for): (Cut, Leave, u64, u64),
) -> io::Result<()> {
    let mut conn = Conn::connect(addr, None).await?;
    let start = Instant::now();
    conn.send(request).await?;
    if cut != Cut::None && leave != Leave::Chunk {
        // What was generated while the user still waited is no waste.
        shared.received.fetch_add(waited_for, Ordering::Relaxed);
        return match timeout(PATIENCE, conn.head()).await {
            Ok(head) => Err(io::Error::other(format!("an answer too early: {head:?}"))),
            Err(_) if cut == Cut::Rst => conn.reset(),
            Err(_) => Ok(()),
        };
    }
    let status = conn.head().await?;
    if status != 200 {
        return Err(io::Error::other(format!("status {status}")));
    }
    let mut chunks = 0;
    while let Some(bytes) = conn.body().await? {
        let fresh = events(bytes);
        if chunks == 0 && fresh > 0 {
            let took = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
            lock(&shared.first).saturating_record(took);
        }
        chunks += fresh;
        if cut != Cut::None && chunks >= cut_at {
            break;
        }
    }
    shared.received.fetch_add(chunks, Ordering::Relaxed);
    match cut {
        Cut::None => Ok(()),
        _ if chunks < cut_at => Err(io::Error::other("the stream ended before the cut")),
        Cut::Rst => conn.reset(),
        Cut::Fin => Ok(()),
    }
}
