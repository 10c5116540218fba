//! Storms: users who leave, lag, crowd, retry or lose their gateway, and what
//! becomes of the work they asked for.
//!
//! A storm runs against any gateway. The truth comes from a fake upstream
//! behind it, this process's own or another's; what a process uses, from
//! `/proc`. Work is *abandoned* when more calls run at the upstream than
//! clients have open, and *queued* when fewer do: that needs no word from the
//! gateway.

mod compare;
mod failure;
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

pub use compare::{Compared, compare, ratios, side_by_side};
pub use failure::{Failure, failures};
pub use page::page;
pub use scenario::{By, Plan, Scenario};
pub use series::Tick;
pub use source::Source;
pub use target::{Gateway, owner_of};
pub use vanish::{VanishArgs, clients as vanish_clients, vanish};

use crate::Script;
use crate::load::{CallsPlan, Control, Quantiles, Report, Target, Waste, calls};
use crate::truth::Truth;
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

impl std::fmt::Display for Ceiling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (calls, chunks) = (self.calls_per_second, self.chunks_per_second);
        write!(f, "{calls:.0} small calls/s, {chunks:.0} chunks/s")
    }
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
            Self::Limit(after) => write!(f, "not done after {} s (--limit)", after.as_secs_f64()),
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
        source.unused().await?;
        source.prepare(scenario.upstream(plan)).await?;
        source.reset().await?;
    }
    if scenario == Scenario::Vanish {
        return vanish(gateway, source, plan, &std::env::current_exe()?).await;
    }
    let mut report = Report::new(scenario.name());
    if plan.undisturbed && scenario == Scenario::Abort {
        undisturbed(gateway, source, plan, &mut report).await?;
    }
    let watched = gateway.watched(source).from_now();
    report.before = watched.process();
    let live = Arc::new(Live::default());
    let mut series = Series::start(
        watched.clone(),
        source.cloned(),
        live.clone(),
        plan.progress,
    );
    let start = Instant::now();
    let early = load(gateway, scenario, plan, &live, &mut report).await;
    let end = Instant::now();
    report.seconds = (end - start).as_secs_f64();
    if let Some(early) = early {
        report.ended_early = Some(early.to_string());
    }
    sleep_until(end + Duration::from_secs(1)).await;
    if let Some(source) = source {
        match source.truth().await {
            Ok(truth) => truth_into(&mut report, truth, scenario, plan, &live),
            Err(e) => report.error(format!("the upstream's truth: {e}")),
        }
    }
    sleep_until(end + Duration::from_secs(2)).await;
    series.end();
    // Before the upstream is cut: that would tidy up for the gateway.
    report.after = watched.process();
    report.sockets_after = Some(watched.sockets());
    if let Some(source) = source {
        // What is left running would be counted in the next storm.
        source.cut().await;
        if let Err(e) = source.prepare(None).await {
            report.error(format!("the upstream's script: {e}"));
        }
    }
    finish(&mut report, &live, series);
    if scenario.held() {
        report.memory_of(plan.users as u64);
    }
    report.void = failure::void(&report, scenario, source);
    Ok(report)
}

fn truth_into(report: &mut Report, truth: Truth, scenario: Scenario, plan: &Plan, live: &Live) {
    report.running_after = Some(truth.running);
    report.amplification = scenario
        .retries()
        .then(|| crate::load::float(truth.calls_begun) / crate::load::float(live.wanted().max(1)));
    if let Some(tokens) = scenario.tokens(plan) {
        // A refusal is no work that was planned.
        let planned = live.not_refused() * tokens;
        report.waste = Some(Waste::of(planned, truth.tokens, live.received()));
    }
    report.truth = Some(truth);
}

/// How long the first event takes while nobody leaves: each user reads one
/// short answer.
async fn undisturbed(
    gateway: &Gateway,
    source: Option<&Source>,
    plan: &Plan,
    report: &mut Report,
) -> io::Result<()> {
    let calm = Plan {
        calls: Some(plan.users as u64),
        tokens: plan.tokens.min(50),
        ..plan.clone()
    };
    let live = Arc::new(Live::default());
    let work = closed(gateway, Scenario::Steady, &calm, &live);
    if timeout(plan.limit, work).await.is_err() {
        report.error("undisturbed: not done in time".to_owned());
    }
    let seen = live.seen();
    report.first_event_undisturbed = Some(Quantiles::of(&seen.first));
    for (kind, n) in seen.errors {
        *report
            .errors
            .entry(format!("undisturbed: {kind}"))
            .or_insert(0) += n;
    }
    if let Some(source) = source {
        source.quiet(Duration::from_secs(5)).await?;
        source.reset().await?;
    }
    Ok(())
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
    if scenario == Scenario::Drain {
        let half = Duration::from_secs_f64(scenario.seconds(plan) / 2.0);
        tokio::select! {
            () = &mut work => return None,
            why = live.lost(gateway) => return Some(Early::Lost(why)),
            () = sleep(half) => return drain(gateway, live, &mut work, limit, report).await,
        }
    }
    tokio::select! {
        () = &mut work => None,
        () = sleep(limit) => Some(Early::Limit(limit)),
        _ = crate::cli::asked_to_end() => Some(Early::Asked),
        why = live.lost(gateway) => Some(Early::Lost(why)),
    }
}

/// Ends the gateway's process in mid-work, and waits for what is open and for
/// its exit.
async fn drain(
    gateway: &Gateway,
    live: &Live,
    work: impl Future<Output = ()>,
    limit: Duration,
    report: &mut Report,
) -> Option<Early> {
    /// Longer than any drain that an orchestrator waits for.
    const LONGEST: Duration = Duration::from_secs(60);
    // Nobody begins a call that meets a closed door; those who have begun are
    // let in first.
    live.draining();
    let mut work = std::pin::pin!(work);
    let over = timeout(Duration::from_millis(50), &mut work).await.is_ok();
    report.error_free_until_drain = Some(live.seen().errors.is_empty());
    report.open_at_drain = Some(live.open());
    let asked = Instant::now();
    if let Err(why) = gateway.terminate() {
        return Some(Early::Lost(why));
    }
    let exit = async {
        let pid = gateway.pid?;
        while target::alive(pid) {
            sleep(Duration::from_millis(20)).await;
        }
        Some(asked.elapsed().as_secs_f64())
    };
    let work = async {
        if !over {
            work.await;
        }
    };
    let both = async { tokio::join!(work, timeout(LONGEST, exit)).1 };
    tokio::select! {
        ended = both => {
            report.exit_seconds = ended.ok().flatten();
            if report.exit_seconds.is_none() {
                report.error("the process did not end within 60 s of SIGTERM".to_owned());
            }
            None
        }
        () = sleep(limit) => Some(Early::Limit(limit)),
        _ = crate::cli::asked_to_end() => Some(Early::Asked),
    }
}

/// So many users, each with one call at a time.
async fn closed(gateway: &Gateway, scenario: Scenario, plan: &Plan, live: &Arc<Live>) {
    let ask = Arc::new(user::Ask::new(gateway, scenario, plan));
    let between = scenario.between(plan);
    let seconds = Duration::from_secs_f64(scenario.seconds(plan));
    // Those who hold a stream hold it until all have done so for a while.
    let coming = between * u32::try_from(plan.users.min(10_000)).unwrap_or(0);
    let until = Instant::now()
        + seconds
        + if scenario.held() {
            coming
        } else {
            Duration::ZERO
        };
    let calls = scenario.calls(plan);
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
                user::call(&ask, &live, Instant::now(), Some(until)).await;
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
        if due > start + Duration::from_secs_f64(scenario.seconds(plan)) {
            break;
        }
        sleep_until(due).await;
        let (ask, live) = (ask.clone(), live.clone());
        calls.spawn(async move { user::call(&ask, &live, due, None).await });
        while calls.try_join_next().is_some() {}
        n += 1;
    }
    while calls.join_next().await.is_some() {}
}

/// What load and upstream do without a gateway between them; two seconds or
/// three, on a slow machine too. The upstream is as quick as it can be
/// meanwhile, whatever its own script says.
pub async fn ceiling(source: &Source) -> io::Result<Ceiling> {
    /// More than the slowest machine needs.
    const MOST: Duration = Duration::from_secs(20);
    source.prepare(Some(Script::default())).await?;
    let found = timeout(MOST, without_gateway(source)).await;
    source.prepare(None).await?;
    source.quiet(Duration::from_secs(5)).await?;
    found.unwrap_or_else(|_| {
        Err(io::Error::other(format!(
            "the upstream at {} did not answer {CALLS} small calls of {CONNECTIONS} connections in {} s; \
             has it descriptors enough (`ulimit -n`)?",
            source.addr(),
            MOST.as_secs()
        )))
    })
}

/// Small calls that are made at least.
const CALLS: u64 = 3_000;
/// And on how many connections.
const CONNECTIONS: usize = 64;

async fn without_gateway(source: &Source) -> io::Result<Ceiling> {
    /// Long enough for a stable figure.
    const LONG: Duration = Duration::from_secs(1);
    let target = Target::new(source.addr());
    let mut plan = CallsPlan {
        connections: CONNECTIONS,
        calls: CALLS - 1_000,
        warmup: 1_000,
        ..CallsPlan::default()
    };
    let mut total = Report::default();
    while total.seconds < LONG.as_secs_f64() {
        let some = calls(&target, &plan).await?;
        total.calls += some.calls;
        total.seconds += some.seconds.max(1e-3);
        plan.warmup = 0;
    }
    let gateway = Gateway::direct(source.addr());
    let plan = Plan {
        users: 16,
        tokens: 1_000_000_000,
        pace_ms: 0.0,
        ..Plan::default()
    };
    let live = Arc::new(Live::default());
    let start = Instant::now();
    let work = closed(&gateway, Scenario::Steady, &plan, &live);
    // It is cut: nothing ends by itself.
    let _ = timeout(LONG, work).await;
    let (chunks, seconds) = (live.seen().chunks, start.elapsed().as_secs_f64());
    Ok(Ceiling {
        calls_per_second: crate::load::float(total.calls) / total.seconds,
        chunks_per_second: crate::load::float(chunks) / seconds,
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
    let control = Control { addr };
    let script = control.script_now().await.map_err(said)?;
    Ok(Source::Theirs(control, Box::new(script)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_refused_was_not_planned() {
        let live = Live::default();
        for _ in 0..4 {
            drop(live.opened());
        }
        (0..3).for_each(|_| live.refused());
        live.got(40);
        let mut report = Report::default();
        let truth = Truth {
            tokens: 50,
            ..Truth::default()
        };
        let plan = Plan {
            tokens: 50,
            ..Plan::default()
        };
        truth_into(&mut report, truth, Scenario::Retry, &plan, &live);
        let waste = report.waste.expect("known");
        assert_eq!((waste.planned, waste.wasted), (50, 10));
        assert!((waste.percent_of_planned - 20.0).abs() < 1e-9);
    }
}
