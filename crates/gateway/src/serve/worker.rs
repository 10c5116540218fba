//! A thread that serves connections.

use std::io;
use std::net::{SocketAddr, TcpStream as StdStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::task::TaskTracker;

use super::connection::{self, Settings};
use super::{HAND_OVER, Lane};
use crate::call::downstream::Answers;
use crate::telemetry::metrics::{Metrics, SideLabel, WorkerLabel};
use crate::upstream::pool::Pool;

/// How often lag is measured.
const TICK: Duration = Duration::from_millis(100);
/// Every how many ticks idle upstream connections are looked through.
const SWEEP_TICKS: u32 = 3;
/// Threads beside a worker, for name lookups and for reading large bodies. More at once wait in line; an endpoint's name is looked up once at a
/// time, and the bytes of all bodies are bounded.
const THREADS_BESIDE: usize = 16;

/// A running worker.
#[derive(Debug)]
pub struct RunningWorker {
    pub lane: Lane,
    /// Ends the thread once its tasks are done; dropping it does so too.
    finish: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What a worker is made of.
pub struct Plan<F> {
    pub id: u32,
    pub pool: Arc<Pool>,
    pub tasks: TaskTracker,
    pub settings: Arc<Settings>,
    pub front: F,
}

impl<F> std::fmt::Debug for Plan<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plan")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

/// Starts the thread.
pub fn start<F: Answers>(plan: Plan<F>) -> io::Result<RunningWorker> {
    let (connections, accepted) = mpsc::channel(HAND_OVER);
    let (finish, finished) = oneshot::channel();
    let open = Arc::new(AtomicUsize::new(0));
    let lane = Lane {
        connections,
        open: Arc::clone(&open),
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        // Not all: a worker has no children, and would look for dead ones at each wait.
        .enable_io()
        .enable_time()
        .max_blocking_threads(THREADS_BESIDE)
        .build()?;
    let thread = std::thread::Builder::new()
        .name(format!("worker-{}", plan.id))
        .spawn(move || {
            runtime.block_on(run(plan, accepted, open, finished));
            // A name lookup that hangs must not hold up the exit.
            runtime.shutdown_background();
        })?;
    Ok(RunningWorker {
        lane,
        finish: Some(finish),
        thread: Some(thread),
    })
}

async fn run<F: Answers>(
    plan: Plan<F>,
    mut accepted: mpsc::Receiver<(StdStream, SocketAddr)>,
    open: Arc<AtomicUsize>,
    mut finished: oneshot::Receiver<()>,
) {
    let metrics = Arc::clone(&plan.settings.metrics);
    let side = SideLabel { side: "downstream" };
    let gauge = metrics.connections.get_or_create_owned(&side);
    let opened = metrics.connections_opened.get_or_create_owned(&side);
    // Goes on to the worker's end, through a drain: nobody waits for it, it is dropped with the runtime.
    let chores = TaskTracker::new();
    chores.spawn(tick(plan.id, Arc::clone(&plan.pool), Arc::clone(&metrics)));
    loop {
        let (stream, peer) = tokio::select! {
            biased;
            _ = &mut finished => break,
            next = accepted.recv() => match next {
                Some(next) => next,
                None => break,
            },
        };
        let counted = Counted {
            open: Arc::clone(&open),
            gauge: gauge.clone(),
        };
        gauge.inc();
        opened.inc();
        let Ok(tcp) = TcpStream::from_std(stream) else {
            continue;
        };
        let (settings, front) = (Arc::clone(&plan.settings), plan.front.clone());
        plan.tasks.spawn(async move {
            connection::serve(tcp, peer, settings, front).await;
            drop(counted);
        });
        // One by one, and those that are there first: in a crowd that leaves and comes anew, who has left is noticed before the next call begins.
        tokio::task::yield_now().await;
    }
}

/// One open connection.
struct Counted {
    open: Arc<AtomicUsize>,
    gauge: prometheus_client::metrics::gauge::Gauge,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
        self.gauge.dec();
    }
}

/// The worker's housekeeping: lag and idle connections. Never ends by itself.
async fn tick(worker: u32, pool: Arc<Pool>, metrics: Arc<Metrics>) {
    let lag = metrics
        .loop_lag_seconds
        .get_or_create_owned(&WorkerLabel { worker });
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut count = 0u32;
    loop {
        let due = ticks.tick().await;
        let now = Instant::now();
        lag.observe(now.duration_since(due));
        count = count.wrapping_add(1);
        if count.is_multiple_of(SWEEP_TICKS) {
            pool.sweep(now);
        }
    }
}

impl RunningWorker {
    /// Ends the thread. Tasks that still run are dropped: end them first.
    pub fn finish(&mut self) {
        if let Some(finish) = self.finish.take() {
            let _ = finish.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for RunningWorker {
    fn drop(&mut self) {
        self.finish();
    }
}
