//! Paced streams, measured in a window while none begins or ends.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hdrhistogram::Histogram;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::conn::{Conn, events, stamps};
use super::report::{Quantiles, Report, histogram};
use super::sample::{Sampler, Watch};
use super::{Target, raise_descriptors};
use crate::clock::now_ns;

/// Paced streams, each chunk stamped.
#[derive(Clone, Debug)]
pub struct StreamsPlan {
    /// Streams at once.
    pub streams: usize,
    /// Time between the tokens of one stream.
    pub pace_ms: f64,
    /// Measured time.
    pub seconds: f64,
    /// Time before the measurement.
    pub warmup_seconds: f64,
    /// Further fields of the script.
    pub rig: serde_json::Map<String, serde_json::Value>,
}

impl Default for StreamsPlan {
    fn default() -> Self {
        Self {
            streams: 500,
            pace_ms: 20.0,
            seconds: 8.0,
            warmup_seconds: 2.0,
            rig: serde_json::Map::new(),
        }
    }
}

/// What the tasks of a run share.
#[derive(Debug)]
struct Shared {
    measuring: AtomicBool,
    chunks: AtomicU64,
    ready: AtomicU64,
    changed: Notify,
    delay: Mutex<Histogram<u64>>,
    first: Mutex<Histogram<u64>>,
    errors: Mutex<Vec<String>>,
}

impl Shared {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            measuring: AtomicBool::new(false),
            chunks: AtomicU64::new(0),
            ready: AtomicU64::new(0),
            changed: Notify::new(),
            delay: Mutex::new(histogram()),
            first: Mutex::new(histogram()),
            errors: Mutex::new(Vec::new()),
        })
    }

    fn ready(&self) {
        self.ready.fetch_add(1, Ordering::Relaxed);
        self.changed.notify_one();
    }

    fn failed(&self, why: String) {
        lock(&self.errors).push(why);
        self.ready();
    }

    /// Waits until `n` streams are under way or have failed.
    async fn wait_ready(&self, n: u64, within: Duration) -> bool {
        let wait = async {
            while self.ready.load(Ordering::Relaxed) < n {
                self.changed.notified().await;
            }
        };
        timeout(within, wait).await.is_ok()
    }

    fn errors_into(&self, report: &mut Report) {
        for why in lock(&self.errors).drain(..) {
            report.error(why);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn body(rig: &serde_json::Map<String, serde_json::Value>) -> String {
    serde_json::json!({
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello there"}],
        "stream": true,
        "rig": rig,
    })
    .to_string()
}

fn rig(fields: serde_json::Value) -> serde_json::Map<String, serde_json::Value> {
    match fields {
        serde_json::Value::Object(map) => map,
        _ => serde_json::Map::new(),
    }
}

/// Runs paced streams: CPU per chunk, and the delay a gateway adds to each.
pub async fn streams(target: &Target, plan: &StreamsPlan) -> io::Result<Report> {
    raise_descriptors(plan.streams as u64 + 64)?;
    let mut report = Report::new("streams");
    let watched = target.watched().from_now();
    report.before = watched.process();
    let sampler = Sampler::start(target.watched(), Duration::from_millis(500));
    let mut fields = rig(serde_json::json!({
        "tokens": 1_000_000_000_u64, "pace_ms": plan.pace_ms, "stamp": true, "role_chunk": false,
    }));
    fields.extend(plan.rig.clone());
    let request: Arc<[u8]> = target.request(&body(&fields)).into();
    let shared = Shared::new();
    let mut tasks = JoinSet::new();
    target.say(format_args!("streams: {} to open", plan.streams));
    let between = Duration::from_secs_f64(plan.pace_ms.max(1.0) / 1000.0) / 25;
    for n in 0..plan.streams {
        let (request, shared) = (request.clone(), shared.clone());
        let addr = target.addr;
        tasks.spawn(async move {
            // Streams are spread over the pace, as those of real users are.
            sleep(between * u32::try_from(n).unwrap_or(0)).await;
            if let Err(e) = paced(addr, &request, &shared).await {
                shared.failed(e.to_string());
            }
        });
    }
    let wait = Duration::from_secs(30);
    if !shared.wait_ready(plan.streams as u64, wait).await {
        report.error("streams that did not start".to_owned());
    }
    sleep(Duration::from_secs_f64(plan.warmup_seconds)).await;
    target.say(format_args!("streams: measuring {} s", plan.seconds));
    let from = watched.process();
    shared.measuring.store(true, Ordering::Relaxed);
    let (start, chunks) = (Instant::now(), shared.chunks.load(Ordering::Relaxed));
    sleep(Duration::from_secs_f64(plan.seconds)).await;
    let to = watched.process();
    report.seconds = start.elapsed().as_secs_f64();
    report.chunks = shared.chunks.load(Ordering::Relaxed) - chunks;
    shared.measuring.store(false, Ordering::Relaxed);
    report.sockets_during = Some(watched.sockets());
    report.cpu(from, to);
    report.delay = Some(Quantiles::of(&lock(&shared.delay)));
    report.first_event = Some(Quantiles::of(&lock(&shared.first)));
    tasks.shutdown().await;
    report.peak = sampler.map(Sampler::peak);
    settle(&mut report, &watched).await;
    shared.errors_into(&mut report);
    Ok(report)
}

async fn paced(addr: std::net::SocketAddr, request: &[u8], shared: &Shared) -> io::Result<()> {
    let mut conn = Conn::connect(addr, None).await?;
    let start = now_ns();
    conn.send(request).await?;
    let status = conn.head().await?;
    if status != 200 {
        return Err(io::Error::other(format!("status {status}")));
    }
    let mut begun = false;
    while let Some(bytes) = conn.body().await? {
        let now = now_ns();
        shared.chunks.fetch_add(events(bytes), Ordering::Relaxed);
        if !begun {
            begun = true;
            lock(&shared.first).saturating_record(now - start);
            shared.ready();
        }
        if shared.measuring.load(Ordering::Relaxed) {
            let mut delay = lock(&shared.delay);
            for stamp in stamps(bytes) {
                delay.saturating_record(now.saturating_sub(stamp));
            }
        }
    }
    Err(io::Error::other("a stream without end ended"))
}

/// What is left a second after the load has gone.
async fn settle(report: &mut Report, watched: &Watch) {
    sleep(Duration::from_secs(1)).await;
    report.after = watched.process();
    report.sockets_after = Some(watched.sockets());
}
