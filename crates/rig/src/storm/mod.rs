//! Storms: users who leave, lag, crowd, retry or lose their gateway, and what
//! becomes of the work they asked for.
//!
//! A storm runs against any gateway. The truth comes from a fake upstream
//! behind it, this process's own or another's; what a process uses, from
//! `/proc`. Work is *abandoned* when more calls run at the upstream than
//! clients have open, and *queued* when fewer do: that needs no word from the
//! gateway.

mod compare;
mod live;
mod page;
mod plot;
mod scenario;
mod series;
mod source;
mod target;
mod user;
mod vanish;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

pub use compare::{Compared, Run, compare, ratios};
pub use page::page;
pub use scenario::{By, Plan, Scenario};
pub use series::Tick;
pub use source::Source;
pub use target::{Gateway, owner_of};
pub use vanish::{VanishArgs, clients as vanish_clients, vanish};

use crate::load::{CallsPlan, Control, Quantiles, Report, Target, Waste, calls};
use live::Live;
use scenario::Arrivals;
use series::Series;

/// What this program can do without a gateway, for comparison.
#[derive(Clone, Copy, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct Ceiling {
    /// Small calls a second.
    pub calls_per_second: f64,
    /// Chunks of streams a second.
    pub chunks_per_second: f64,
}

/// Why a storm ended before its time.
#[derive(Debug)]
enum Early {
    Asked,
    Limit(Duration),
    Lost(String),
}

impl std::fmt::Display for Early {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Asked => f.write_str("stopped by a signal; what was measured until then is kept"),
            Self::Limit(after) => write!(f, "not done after {} s (--limit)", after.as_secs()),
            Self::Lost(why) => f.write_str(why),
        }
    }
}

/// Runs one scenario against one gateway. What went wrong on the way stands in
/// the report; an error means that it could not begin.
pub async fn storm(
    gateway: &Gateway,
    source: Option<&Source>,
    scenario: Scenario,
    plan: &Plan,
) -> io::Result<Report> {
    crate::load::raise_descriptors(plan.users as u64 + 64)?;
    gateway.reachable().await?;
    if let Some(source) = source {
        source.quiet(Duration::from_secs(5)).await?;
        source.prepare(scenario.upstream(plan)).await?;
        source.reset().await?;
    }
    if scenario == Scenario::Vanish {
        return vanish(gateway, source, plan, &std::env::current_exe()?).await;
    }
    let mut report = Report::new(scenario.name());
    let watched = gateway.watched(source);
    report.before = watched.process();
    let live = Arc::new(Live::default());
    let series = Series::start(watched, source.cloned(), live.clone(), plan.progress);
    let start = Instant::now();
    let early = load(gateway, scenario, plan, &live, &mut report).await;
    report.seconds = start.elapsed().as_secs_f64();
    report.sockets_during = Some(watched.sockets());
    let end = Instant::now();
    if let Some(early) = early {
        report.ended_early = Some(early.to_string());
    }
    if scenario == Scenario::Drain {
        drained(gateway, start, &mut report).await;
    }
    sleep_until(end + Duration::from_secs(1)).await;
    if let Some(source) = source {
        let truth = source.truth().await;
        match truth {
            Ok(truth) => {
                report.running_after = Some(truth.running);
                report.amplification = scenario.retries().then(|| {
                    crate::load::float(truth.calls_begun) / crate::load::float(live.wanted().max(1))
                });
                if let Some(tokens) = scenario.tokens(plan) {
                    let planned = live.begun() * tokens;
                    report.waste = Some(Waste::of(planned, truth.tokens, live.received()));
                }
                report.truth = Some(truth);
            }
            Err(e) => report.error(format!("the upstream's truth: {e}")),
        }
        // What is left running would be counted in the next storm.
        source.cut().await;
    }
    sleep_until(end + Duration::from_secs(2)).await;
    report.after = watched.process();
    report.sockets_after = Some(watched.sockets());
    finish(&mut report, &live, series);
    Ok(report)
}

/// Puts what users and samples have seen into the report.
fn finish(report: &mut Report, live: &Live, series: Series) {
    let seen = live.seen();
    report.calls = seen.done;
    report.attempts = live.begun();
    report.chunks = seen.chunks;
    report.latency = (!seen.latency.is_empty()).then(|| Quantiles::of(&seen.latency));
    report.first_event = (!seen.first.is_empty()).then(|| Quantiles::of(&seen.first));
    report.delay = (!seen.delay.is_empty()).then(|| Quantiles::of(&seen.delay));
    for (name, histogram) in [
        ("first event", &seen.first),
        ("delay per chunk", &seen.delay),
        ("whole call", &seen.latency),
    ] {
        if !histogram.is_empty() {
            let points = series::distribution(histogram);
            report.distributions.insert(name.to_owned(), points);
        }
    }
    for (kind, n) in &seen.errors {
        *report.errors.entry(kind.clone()).or_insert(0) += n;
    }
    report.cpu(report.before, report.after);
    series.into_report(report);
}

/// Lets users do what the scenario says, until all is done or something ends
/// it early.
async fn load(
    gateway: &Gateway,
    scenario: Scenario,
    plan: &Plan,
    live: &Arc<Live>,
    report: &mut Report,
) -> Option<Early> {
    let work = async {
        match scenario.arrivals(plan) {
            Arrivals::Closed => closed(gateway, scenario, plan, live).await,
            Arrivals::Open(rate) => open(gateway, scenario, plan, live, rate).await,
        }
    };
    tokio::pin!(work);
    let limit = plan.limit;
    let half = Duration::from_secs_f64(plan.seconds / 2.0);
    if scenario == Scenario::Drain {
        tokio::select! {
            () = &mut work => {}
            () = sleep(half) => {
                if let Err(why) = gateway.terminate() {
                    return Some(Early::Lost(why));
                }
                live.draining();
                report.error_free_until_drain = Some(live.seen().errors.is_empty());
            }
        }
    }
    tokio::select! {
        () = &mut work => None,
        () = sleep(limit) => Some(Early::Limit(limit)),
        _ = tokio::signal::ctrl_c() => Some(Early::Asked),
        why = live.lost(gateway), if scenario != Scenario::Drain => Some(Early::Lost(why)),
    }
}

/// So many users, each with one call at a time.
async fn closed(gateway: &Gateway, scenario: Scenario, plan: &Plan, live: &Arc<Live>) {
    let ask = Arc::new(user::Ask::new(gateway, scenario, plan));
    let until = Instant::now() + Duration::from_secs_f64(plan.seconds);
    let calls = scenario.calls(plan);
    let between = Duration::from_secs_f64(plan.pace_ms.clamp(1.0, 100.0) / 1000.0) / 25;
    let mut users = JoinSet::new();
    for n in 0..plan.users {
        let (ask, live) = (ask.clone(), live.clone());
        users.spawn(async move {
            // Users do not come in step, and neither do their tokens.
            sleep(between * u32::try_from(n % 10_000).unwrap_or(0)).await;
            let more = || match calls {
                Some(calls) => live.take(calls),
                None => Instant::now() < until && !live.drains(),
            };
            while more() {
                user::call(&ask, &live, Instant::now()).await;
            }
        });
    }
    while users.join_next().await.is_some() {}
}

/// Calls at a fixed rate, whoever is still waiting. What a call takes is
/// counted from when it was due, so that a gateway that falls behind cannot
/// hide it.
async fn open(gateway: &Gateway, scenario: Scenario, plan: &Plan, live: &Arc<Live>, rate: f64) {
    let ask = Arc::new(user::Ask::new(gateway, scenario, plan));
    let start = Instant::now();
    let mut calls = JoinSet::new();
    let mut n = 0_u32;
    loop {
        let due = start + Duration::from_secs_f64(f64::from(n) / rate);
        if due > start + Duration::from_secs_f64(plan.seconds) {
            break;
        }
        sleep_until(due).await;
        let (ask, live) = (ask.clone(), live.clone());
        calls.spawn(async move { user::call(&ask, &live, due).await });
        while calls.try_join_next().is_some() {}
        n += 1;
    }
    while calls.join_next().await.is_some() {}
}

/// Waits for the process that was asked to end.
async fn drained(gateway: &Gateway, start: Instant, report: &mut Report) {
    const LONGEST: Duration = Duration::from_secs(60);
    let Some(pid) = gateway.pid else { return };
    let gone = async {
        while target::alive(pid) {
            sleep(Duration::from_millis(20)).await;
        }
    };
    match timeout(LONGEST, gone).await {
        Ok(()) => report.exit_seconds = Some(start.elapsed().as_secs_f64()),
        Err(_) => report.error("the process did not end within 60 s of SIGTERM".to_owned()),
    }
}

/// What load and upstream do without a gateway between them.
pub async fn ceiling(source: &Source) -> io::Result<Ceiling> {
    /// Long enough for a stable figure.
    const CALLS: u64 = 20_000;
    let mut target = Target::new(source.addr());
    let plan = CallsPlan {
        calls: CALLS,
        warmup: 1_000,
        ..CallsPlan::default()
    };
    source.prepare(None).await?;
    let small = calls(&target, &plan).await?;
    target.upstream = None;
    let gateway = Gateway::direct(source.addr());
    let plan = Plan {
        users: 16,
        calls: Some(48),
        tokens: 20_000,
        pace_ms: 0.0,
        limit: Duration::from_secs(20),
        ..Plan::default()
    };
    let live = Arc::new(Live::default());
    let start = Instant::now();
    closed(&gateway, Scenario::Steady, &plan, &live).await;
    let chunks = live.seen().chunks;
    Ok(Ceiling {
        calls_per_second: crate::load::float(small.calls) / small.seconds.max(1e-9),
        chunks_per_second: crate::load::float(chunks) / start.elapsed().as_secs_f64(),
    })
}

/// A fake upstream that runs elsewhere, if one answers there.
pub async fn upstream_at(addr: std::net::SocketAddr) -> io::Result<Source> {
    let said = |e| {
        io::Error::other(format!(
            "--upstream {addr}: no fake upstream answers there ({e}); start one with \
             `tidegate fake-upstream --listen {addr}`, or have one started here with --upstream-listen"
        ))
    };
    Control { addr }.truth().await.map_err(said)?;
    Ok(Source::Theirs(Control { addr }))
}
