//! Closed loop: connections that make small calls one after the other.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio::time::timeout;

use super::conn::Conn;
use super::report::{Quantiles, Report, histogram};
use super::sample::Sampler;
use super::{Target, raise_descriptors};

/// Small calls, not streamed.
#[derive(Clone, Debug)]
pub struct CallsPlan {
    /// Connections, each with one call at a time.
    pub connections: usize,
    /// Calls measured, in all.
    pub calls: u64,
    /// Calls before the measurement.
    pub warmup: u64,
    /// The request's JSON.
    pub body: String,
}

impl Default for CallsPlan {
    fn default() -> Self {
        Self {
            connections: 64,
            calls: 100_000,
            warmup: 10_000,
            body: "{\"model\":\"tiny\",\"messages\":[{\"role\":\"user\",\"content\":\"hello there\"}],\"max_tokens\":6}".to_owned(),
        }
    }
}

struct Shared {
    left: AtomicU64,
    tally: Mutex<(hdrhistogram::Histogram<u64>, Vec<String>)>,
}

/// Runs the plan.
pub async fn calls(target: &Target, plan: &CallsPlan) -> io::Result<Report> {
    raise_descriptors(plan.connections as u64 + 64)?;
    let mut report = Report::new("calls");
    let mut conns = Vec::new();
    for _ in 0..plan.connections {
        conns.push(Conn::connect(target.addr, None).await?);
    }
    let request: Arc<[u8]> = target.request(&plan.body).into();
    target.say(format_args!("calls: {} to warm up", plan.warmup));
    let (conns, _) = round(target, conns, &request, plan.warmup).await;
    let watched = target.watched().from_now();
    report.before = watched.process();
    let sampler = Sampler::start(target.watched(), Duration::from_millis(500));
    target.say(format_args!("calls: {} measured", plan.calls));
    let from = watched.process();
    let start = Instant::now();
    let (conns, tally) = round(target, conns, &request, plan.calls).await;
    report.seconds = start.elapsed().as_secs_f64();
    let to = watched.process();
    report.sockets_during = Some(watched.sockets());
    let (latency, errors) = tally;
    report.calls = latency.len();
    report.latency = Some(Quantiles::of(&latency));
    for error in errors {
        report.error(error);
    }
    report.cpu(from, to);
    report.peak = sampler.map(Sampler::peak);
    drop(conns);
    report.after = watched.process();
    report.sockets_after = Some(watched.sockets());
    Ok(report)
}

type Tally = (hdrhistogram::Histogram<u64>, Vec<String>);

/// Makes so many calls over these connections; gives the connections back.
async fn round(
    target: &Target,
    conns: Vec<Conn>,
    request: &Arc<[u8]>,
    calls: u64,
) -> (Vec<Conn>, Tally) {
    let shared = Arc::new(Shared {
        left: AtomicU64::new(calls),
        tally: Mutex::new((histogram(), Vec::new())),
    });
    let mut tasks = JoinSet::new();
    for conn in conns {
        let (request, shared) = (request.clone(), shared.clone());
        tasks.spawn(one(target.addr, conn, request, shared));
    }
    let conns = tasks.join_all().await.into_iter().flatten().collect();
    let tally = std::mem::replace(
        &mut *shared.tally.lock().unwrap_or_else(PoisonError::into_inner),
        (histogram(), Vec::new()),
    );
    (conns, tally)
}

async fn one(
    addr: std::net::SocketAddr,
    mut conn: Conn,
    request: Arc<[u8]>,
    shared: Arc<Shared>,
) -> Option<Conn> {
    const ERRORS_KEPT: usize = 100_000;
    let take = || {
        shared
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1))
            .is_ok()
    };
    while take() {
        let start = Instant::now();
        // A gateway that wedges must not wedge the judge.
        let result = match timeout(Duration::from_secs(60), conn.call(&request)).await {
            Ok(result) => result,
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        };
        let took = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let broken = result.is_err() || conn.close;
        {
            let mut tally = shared.tally.lock().unwrap_or_else(PoisonError::into_inner);
            match result {
                Ok(200) => tally.0.saturating_record(took),
                Ok(status) if tally.1.len() < ERRORS_KEPT => {
                    tally.1.push(format!("status {status}"));
                }
                Err(e) if tally.1.len() < ERRORS_KEPT => tally.1.push(e.kind().to_string()),
                _ => {}
            }
        }
        if broken {
            match Conn::connect(addr, None).await {
                Ok(fresh) => conn = fresh,
                Err(e) => {
                    let mut tally = shared.tally.lock().unwrap_or_else(PoisonError::into_inner);
                    tally.1.push(format!("connect: {}", e.kind()));
                    return None;
                }
            }
        }
    }
    Some(conn)
}
