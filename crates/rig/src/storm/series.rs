//! What happens over time, on a thread of its own.

use std::collections::BTreeMap;
use std::io::{IsTerminal as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::Source;
use super::live::Live;
use crate::load::{ProcessUse, Report, Sockets, Watch, float, millis};
use crate::truth::Truth;

/// How often things are looked at.
const EVERY: Duration = Duration::from_millis(250);

/// One moment of a storm.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Tick {
    /// Seconds since the start.
    pub at: f64,
    /// Calls that clients have open.
    pub open: u64,
    /// Calls the upstream works on.
    pub running: u64,
    /// Calls clients have open and the upstream does not know of.
    pub queued: u64,
    /// Calls the upstream works on and no client has open.
    pub abandoned: u64,
    /// The gateway's process, if it is watched.
    pub process: Option<ProcessUse>,
    /// The gateway's sockets by state, both sides.
    pub sockets: BTreeMap<String, u64>,
}

impl Tick {
    /// The truth takes a moment to ask for; what was open before and after it
    /// bounds what was open then, and only what is beyond both is counted.
    fn new(
        at: f64,
        (before, after): (u64, u64),
        truth: Option<Truth>,
        process: Option<ProcessUse>,
        sockets: &Sockets,
    ) -> Self {
        let running = truth.map_or(0, |t| t.running);
        let known = |n: u64| if truth.is_some() { n } else { 0 };
        Self {
            at,
            open: after,
            running,
            queued: known(before.min(after).saturating_sub(running)),
            abandoned: known(running.saturating_sub(before.max(after))),
            process,
            sockets: by_state(sockets),
        }
    }
}

fn by_state(sockets: &Sockets) -> BTreeMap<String, u64> {
    let mut all = BTreeMap::new();
    for (state, n) in sockets.downstream.iter().chain(&sockets.upstream) {
        *all.entry(state.clone()).or_insert(0) += n;
    }
    all
}

/// Samples until it is asked for its report.
#[derive(Debug)]
pub(super) struct Series {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<Looks>>,
    looks: Looks,
}

/// What was seen: all moments, and the sockets when they were most.
#[derive(Debug, Default)]
struct Looks {
    ticks: Vec<Tick>,
    most: Sockets,
}

impl Series {
    pub(super) fn start(
        watched: Watch,
        source: Option<Source>,
        live: Arc<Live>,
        progress: bool,
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let look = move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            runtime.map_or_else(
                |_| Looks::default(),
                |runtime| runtime.block_on(looks(&watched, source, &live, progress, &stopped)),
            )
        };
        let thread = std::thread::Builder::new()
            .name("series".to_owned())
            .spawn(look);
        Self {
            stop,
            thread: thread.ok(),
            looks: Looks::default(),
        }
    }

    /// Ends it. From here on it asks the upstream nothing: a socket of its own to
    /// there looks like one of the gateway's.
    pub(super) fn end(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            self.looks = thread.join().unwrap_or_default();
        }
    }

    /// Ends it and puts what it saw into the report.
    pub(super) fn into_report(mut self, report: &mut Report) {
        self.end();
        let Looks { ticks, most } = self.looks;
        let mut peak: Option<ProcessUse> = None;
        for now in ticks.iter().filter_map(|t| t.process) {
            let most = peak.get_or_insert(now);
            most.rss_kib = most.rss_kib.max(now.rss_kib);
            most.pss_kib = most.pss_kib.max(now.pss_kib);
            most.descriptors = most.descriptors.max(now.descriptors);
            most.threads = most.threads.max(now.threads);
            most.cpu_us = now.cpu_us;
        }
        report.peak = peak;
        report.sockets_during = Some(most);
        report.max_abandoned = ticks.iter().map(|t| t.abandoned).max();
        report.abandoned_call_seconds = Some(area(&ticks));
        report.series = ticks;
    }
}

/// Calls that ran for nobody, times how long; between two looks as many as the mean of both.
fn area(ticks: &[Tick]) -> f64 {
    let pairs = ticks.iter().zip(ticks.iter().skip(1));
    pairs
        .map(|(from, to)| float(from.abandoned + to.abandoned) / 2.0 * (to.at - from.at))
        .sum()
}

async fn looks(
    watched: &Watch,
    source: Option<Source>,
    live: &Live,
    progress: bool,
    stopped: &AtomicBool,
) -> Looks {
    /// An hour of a storm.
    const MOST: usize = 4 * 3600;
    /// Looking through all descriptors of a process costs too much for each
    /// moment; whom it talks to shows in the first ones.
    const OFTEN: usize = 8;
    let start = Instant::now();
    let mut every = interval(EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut seen = Looks::default();
    let terminal = std::io::stderr().is_terminal();
    let mut goes_on = true;
    while goes_on && seen.ticks.len() < MOST {
        every.tick().await;
        // The last look comes after the end, so that what was left over is seen for as long as it was waited for.
        goes_on = !stopped.load(Ordering::Relaxed);
        let before = live.open();
        let truth = match &source {
            // One that does not answer is no reason to wait.
            Some(source) => timeout(Duration::from_secs(1), source.truth()).await,
            None => Ok(Err(std::io::ErrorKind::NotFound.into())),
        };
        let truth = truth.ok().and_then(Result::ok);
        let open = (before, live.open());
        if seen.ticks.len() < OFTEN || seen.ticks.len() % OFTEN == 0 {
            watched.look_for_peers();
        }
        let sockets = watched.sockets();
        let at = start.elapsed().as_secs_f64();
        let tick = Tick::new(at, open, truth, watched.process(), &sockets);
        if sockets.all() > seen.most.all() {
            seen.most = sockets;
        }
        let shown = terminal || seen.ticks.len() % 20 == 19;
        if progress && shown {
            say(&tick, live.done(), truth.is_some(), terminal);
        }
        seen.ticks.push(tick);
    }
    if progress && terminal {
        let _ = writeln!(std::io::stderr());
    }
    seen
}

/// A line for whoever waits; on a terminal it is written over the last one.
fn say(tick: &Tick, done: u64, known: bool, terminal: bool) {
    let (start, end) = if terminal {
        ("\r", "\x1b[K")
    } else {
        ("", "\n")
    };
    let mut text = format!(
        "{start}  {:5.1} s  done {done}  open {}",
        tick.at, tick.open
    );
    // What is not known is not said.
    if known {
        let (running, queued, abandoned) = (tick.running, tick.queued, tick.abandoned);
        text += &format!("  running {running}  queued {queued}  abandoned {abandoned}");
    }
    if let Some(process) = tick.process {
        text += &format!("  {} MiB", process.rss_kib / 1024);
    }
    text += end;
    // Nobody to tell if standard error is closed.
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// Points of a distribution: share of the values above, and the value in ms.
pub(super) fn distribution(histogram: &Histogram<u64>) -> Vec<(f64, f64)> {
    let quantiles = [
        0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975, 0.99, 0.995, 0.999, 0.9995, 0.9999,
    ];
    let point = |q: &f64| (*q, millis(histogram.value_at_quantile(*q)));
    quantiles.iter().map(point).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_runs_for_nobody_is_counted_for_as_long_as_it_is_seen() {
        let ticks = [(0.0, 0), (1.0, 8), (1.5, 8), (1.75, 0)];
        let ticks = ticks.map(|(at, abandoned)| Tick {
            at,
            abandoned,
            ..Tick::new(0.0, (0, 0), None, None, &Sockets::default())
        });
        assert!((area(&ticks) - 9.0).abs() < 1e-9, "{}", area(&ticks));
    }

    #[test]
    fn calls_that_end_while_the_truth_is_asked_for_are_neither_queued_nor_abandoned() {
        let tick = |open, running| {
            let truth = Truth {
                running,
                ..Truth::default()
            };
            let tick = Tick::new(0.0, open, Some(truth), None, &Sockets::default());
            (tick.queued, tick.abandoned)
        };
        assert_eq!(tick((60, 0), 22), (0, 0));
        assert_eq!(tick((0, 60), 22), (0, 0));
        assert_eq!(tick((60, 60), 22), (38, 0));
        assert_eq!(tick((5, 8), 22), (0, 14));
    }
}
