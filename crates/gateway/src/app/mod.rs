//! The composition root: configuration → a running gateway, and its orderly end. The only file that knows every module.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio_util::task::TaskTracker;

use crate::admin;
use crate::auth::Keys;
use crate::call::attach::Orphans;
use crate::call::budget::Budget;
use crate::call::confirm::Inquiries;
use crate::call::listing::LISTS_AT_ONCE;
use crate::call::settle::Books;
use crate::call::table::Table;
use crate::call::{Caller, Current, Generation, Worker};
use crate::config::Config;
use crate::front::Front;
use crate::serve::{self, Door, connection, guard, tls, worker};
use crate::signal::Signal;
use crate::telemetry::access_log::AccessLog;
use crate::telemetry::journal::{Journal, JournalError};
use crate::telemetry::lines::LinesWriter;
use crate::telemetry::metrics::{FileLabel, Metrics};
use crate::upstream::connect::TcpOptions;
use crate::upstream::pool::Pool;
use crate::upstream::registry::{BuildError, Registry};

mod descriptors;
mod generations;
mod journal;
mod restart;

pub use generations::{Generations, Reloaded};

/// After the cut, streams have this long to take their last event; and so has, after the end, whoever reads the logs.
pub const LAST_WORDS: Duration = Duration::from_secs(2);

/// The same, where somebody wants the end now.
const AT_ONCE: Duration = Duration::from_millis(500);

/// Why the gateway does not start.
#[derive(Debug)]
pub enum StartError {
    Listen {
        what: &'static str,
        address: SocketAddr,
        source: io::Error,
    },
    /// A socket that was passed to the process is not what it must be.
    Passed {
        /// Counted from 1.
        number: usize,
        source: io::Error,
    },
    /// Everybody who reaches this socket could use the models, and nobody said that this is meant.
    OpenDoor {
        address: SocketAddr,
    },
    Tls(tls::TlsError),
    Build(BuildError),
    Journal(JournalError),
    Thread(io::Error),
    /// Signals could not be heard.
    Signals(io::Error),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Listen {
                what,
                address,
                source,
            } => {
                let help = match source.kind() {
                    _ if is_short(source) => more_of(source),
                    io::ErrorKind::AddrNotAvailable => {
                        "this machine has no such address: take one of its own, or 0.0.0.0 or [::] for all of them"
                    }
                    _ => "free the port or choose another",
                };
                write!(f, "cannot listen on {address}: {source}; {help} ({what})")
            }
            Self::Passed { number, source } => write!(
                f,
                "passed socket number {number} (LISTEN_FDS) cannot be used: {source}; pass a listening TCP socket (ListenStream=ADDRESS:PORT, Accept=no)"
            ),
            Self::OpenDoor { address } => write!(
                f,
                "the data socket {address} can be reached from other machines and no client needs a key; add [[keys]] (or --keys-file), open the socket on 127.0.0.1 (server.listen, or ListenStream= if systemd passes it; takes a restart), or say allow_unauthenticated = true"
            ),
            Self::Tls(error) => error.fmt(f),
            Self::Build(error) => error.fmt(f),
            Self::Journal(error) => error.fmt(f),
            Self::Signals(error) => write!(f, "cannot listen for signals: {error}"),
            Self::Thread(error) => write!(f, "cannot start a thread: {error}; {}", more_of(error)),
        }
    }
}

impl std::error::Error for StartError {}

/// No descriptor is left, of the process or of the machine.
fn is_short(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// What there is too little of, where a thread cannot be started.
fn more_of(error: &io::Error) -> &'static str {
    if is_short(error) {
        "raise the descriptor limit (LimitNOFILE, ulimit -n)"
    } else {
        "raise the limit of threads (TasksMax, ulimit -u) or of memory"
    }
}

/// Sockets that are open already: from systemd, or from a test.
#[derive(Debug, Default)]
pub struct Listeners {
    pub data: Option<StdListener>,
    pub admin: Option<StdListener>,
}

/// A running gateway.
#[derive(Debug)]
pub struct Gateway {
    pub metrics: Arc<Metrics>,
    admin_addr: Option<SocketAddr>,
    generations: Arc<Generations>,
    workers: Vec<worker::RunningWorker>,
    tasks: TaskTracker,
    signals: Signals,
    control: Option<JoinHandle<()>>,
    log_writer: Option<LinesWriter>,
    journal: Option<Journal>,
}

/// The steps of an orderly end, in their order.
#[derive(Clone, Debug, Default)]
struct Signals {
    unready: Signal,
    stop_accepting: Signal,
    drain: Signal,
    cut: Signal,
    stop_control: Signal,
}

/// How a drain went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// Tasks (connections and calls) that had to be told to end when the time was up.
    pub cut: usize,
    /// Tasks that were still there after that.
    pub left: usize,
}

impl Gateway {
    /// Opens the sockets and starts the threads. On an error nothing is left running.
    ///
    /// # Errors
    ///
    /// A port that is taken, files that cannot be used.
    pub fn start(
        mut config: Config,
        listeners: Listeners,
        log_to: impl io::Write + Send + 'static,
    ) -> Result<Self, StartError> {
        let descriptors = descriptors::raise();
        descriptors::fit(&mut config, descriptors);
        let started = config.clone();
        let metrics = Arc::new(Metrics::new());
        let registry = Registry::new(Arc::clone(&metrics));
        let (tls, tls_now) = shown_tls(&metrics, &config)?.map(watch::channel).unzip();
        let (data, admin) = sockets(listeners, &config)?;
        descriptors::widen(&data, &config, descriptors);
        let data_addr = local(&data, "server.listen", config.server.listen)?;
        let admin_addr = admin
            .as_ref()
            .map(|a| local(a, "admin.listen", config.server.listen))
            .transpose()?;
        check_open_door(data_addr, &config)?;
        let generation = generation(&registry, config, 1)?;
        metrics.config_generation.set(1);
        let (access_log, log_writer, journal) = open_log(&generation, &metrics, log_to)?;
        let signals = Signals::default();
        let tasks = TaskTracker::new();
        let settings = Arc::new(settings(
            &generation.config,
            tls_now,
            &signals,
            &metrics,
            &tasks,
        ));
        let table = Table::new(generation.config.server.workers.get());
        let caller = Caller {
            current: Arc::new(Current::of(&generation)),
            journal: journal.clone(),
            orphans: Orphans::new(&metrics, signals.drain.clone()),
            metrics: Arc::clone(&metrics),
            books: Arc::new(Books::new(&metrics, access_log, table.clone())),
            bodies: Budget::new(metrics.request_bodies_bytes.clone()),
            answers: Budget::new(metrics.answers_bytes.clone()),
            listings: Arc::new(Semaphore::new(LISTS_AT_ONCE)),
            cut: signals.cut.clone(),
        };
        let (workers, copies) =
            workers(&caller, &generation, &settings, &tasks).map_err(StartError::Thread)?;
        let (generations, running) = watch::channel(Arc::new(generation));
        let control = Control {
            data,
            admin,
            lanes: workers.iter().map(|w| w.lane.clone()).collect(),
            view: view(&metrics, &signals, table, running),
            signals: signals.clone(),
        };
        let control = control.start().map_err(StartError::Thread)?;
        Ok(Self {
            generations: Arc::new(Generations {
                metrics: Arc::clone(&metrics),
                started,
                descriptors,
                data_addr,
                registry,
                current: generations,
                copies,
                tls,
            }),
            metrics,
            admin_addr,
            workers,
            tasks,
            signals,
            control: Some(control),
            log_writer,
            journal,
        })
    }

    pub fn data_addr(&self) -> SocketAddr {
        self.generations.data_addr
    }

    pub fn admin_addr(&self) -> Option<SocketAddr> {
        self.admin_addr
    }

    /// Puts a new configuration in place, whole or not at all. Running calls keep the settings they began with and stay counted.
    ///
    /// # Errors
    ///
    /// Why it cannot be used; the old one goes on.
    pub fn reload(&self, config: Config) -> Result<Reloaded, StartError> {
        self.generations.reload(config)
    }

    /// What a thread needs that reads the files again.
    pub fn generations(&self) -> Arc<Generations> {
        Arc::clone(&self.generations)
    }

    /// Not ready → (lag) → no new connections → running calls end by themselves → at the deadline they are told and cut.
    pub async fn drain(&self) -> Drained {
        let server = self.generations.current().config.server.clone();
        self.signals.unready.raise();
        self.metrics.draining.set(1);
        tokio::time::sleep(server.drain_lag).await;
        self.signals.stop_accepting.raise();
        self.tasks.close();
        self.signals.drain.raise();
        if tokio::time::timeout(server.drain, self.tasks.wait())
            .await
            .is_ok()
        {
            return Drained { cut: 0, left: 0 };
        }
        let cut = self.tasks.len();
        self.signals.cut.raise();
        let _ = tokio::time::timeout(LAST_WORDS, self.tasks.wait()).await;
        Drained {
            cut,
            left: self.tasks.len(),
        }
    }

    /// No time left: what still runs is told and ended as far as half a second allows, and the access log is written. The threads are not
    /// waited for: end the process.
    pub async fn abort(&self) {
        self.signals.unready.raise();
        self.signals.stop_accepting.raise();
        self.tasks.close();
        self.signals.drain.raise();
        self.signals.cut.raise();
        let _ = tokio::time::timeout(AT_ONCE, self.tasks.wait()).await;
        if let Some(writer) = &self.log_writer {
            writer.flush(AT_ONCE);
        }
    }

    /// Ends the threads and writes what the log still holds. Drain first; what still runs is dropped.
    pub fn stop(mut self) {
        self.shut();
    }

    fn shut(&mut self) {
        self.signals.stop_accepting.raise();
        self.signals.stop_control.raise();
        for worker in &mut self.workers {
            worker.finish();
        }
        self.workers.clear();
        if let Some(control) = self.control.take() {
            let _ = control.join();
        }
        if let Some(writer) = self.log_writer.take() {
            // Its reader may have stopped; lines are not worth a process that does not end.
            writer.flush(LAST_WORDS);
        }
        if let Some(journal) = self.journal.take() {
            journal.finish();
        }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.shut();
    }
}

/// Whether a gateway could start with this, as far as that can be told without opening a socket. Blocks on files.
///
/// # Errors
///
/// Files of certificates and keys that cannot be used.
pub fn check(config: &Config) -> Result<(), StartError> {
    load_tls(config)?;
    let registry = Registry::new(Arc::new(Metrics::new()));
    registry.build(config).map_err(StartError::Build)?;
    Ok(())
}

fn load_tls(config: &Config) -> Result<Option<tls::Identity>, StartError> {
    let files = config.server.tls.as_ref();
    files.map(tls::load).transpose().map_err(StartError::Tls)
}

/// The same at the start, and shown.
fn shown_tls(
    metrics: &Metrics,
    config: &Config,
) -> Result<Option<Arc<rustls::ServerConfig>>, StartError> {
    let identity = load_tls(config)?;
    show_expiry(metrics, config, identity.as_ref());
    Ok(identity.map(|identity| identity.config))
}

fn show_expiry(metrics: &Metrics, config: &Config, identity: Option<&tls::Identity>) {
    metrics.certificate_expiry.clear();
    let files = config.server.tls.as_ref();
    if let (Some(files), Some(expires)) = (files, identity.and_then(|i| i.expires)) {
        let file = files.cert_file.display().to_string();
        let shown = metrics
            .certificate_expiry
            .get_or_create(&FileLabel { file });
        shown.set(expires);
    }
}

fn open_log(
    generation: &Generation,
    metrics: &Metrics,
    log_to: impl io::Write + Send + 'static,
) -> Result<(AccessLog, Option<LinesWriter>, Option<Journal>), StartError> {
    if !generation.config.log.access {
        return Ok((AccessLog::off(), None, None));
    }
    let found = journal::open(&generation.config, metrics)?;
    let (log, writer) = AccessLog::start(log_to, metrics.access_log_dropped.clone());
    let journal = found.map(|found| journal::report(found, generation, &log, metrics));
    Ok((log, Some(writer), journal))
}

/// The data socket and, unless it is off, the admin socket.
fn sockets(
    given: Listeners,
    config: &Config,
) -> Result<(StdListener, Option<StdListener>), StartError> {
    let data = listen(given.data, config.server.listen, "--listen, server.listen")?;
    let admin = match (given.admin, config.admin.listen) {
        (None, None) => None,
        (given, address) => Some(listen(
            given,
            address.unwrap_or(config.server.listen),
            "--admin, admin.listen",
        )?),
    };
    Ok((data, admin))
}

fn listen(
    given: Option<StdListener>,
    address: SocketAddr,
    what: &'static str,
) -> Result<StdListener, StartError> {
    let failed = |source| StartError::Listen {
        what,
        address,
        source,
    };
    let listener = given
        .map_or_else(|| serve::bind(address), Ok)
        .map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

fn local(
    listener: &StdListener,
    what: &'static str,
    address: SocketAddr,
) -> Result<SocketAddr, StartError> {
    listener.local_addr().map_err(|source| StartError::Listen {
        what,
        address,
        source,
    })
}

/// The configuration's own check knows what was written; this one knows the socket, which may have been passed to us, or opened under an
/// earlier configuration.
fn check_open_door(data: SocketAddr, config: &Config) -> Result<(), StartError> {
    let loopback = data.ip().to_canonical().is_loopback();
    if loopback || !config.keys.is_empty() || config.server.allow_unauthenticated {
        return Ok(());
    }
    Err(StartError::OpenDoor { address: data })
}

fn generation(registry: &Registry, config: Config, number: u64) -> Result<Generation, StartError> {
    let routes = registry.build(&config).map_err(StartError::Build)?;
    let keys = Keys::new(&config.keys);
    Ok(Generation {
        number,
        config,
        routes,
        keys,
    })
}

fn view(
    metrics: &Arc<Metrics>,
    signals: &Signals,
    table: Table,
    running: watch::Receiver<Arc<Generation>>,
) -> admin::View {
    let tcp = tcp_options(&running.borrow().config);
    admin::View {
        metrics: Arc::clone(metrics),
        unready: signals.unready.clone(),
        table,
        running,
        tcp,
    }
}

fn tcp_options(config: &Config) -> TcpOptions {
    TcpOptions {
        user_timeout: config.server.tcp_user_timeout,
        keep_alive: config.server.tcp_keep_alive,
    }
}

fn settings(
    config: &Config,
    tls: Option<watch::Receiver<Arc<rustls::ServerConfig>>>,
    signals: &Signals,
    metrics: &Arc<Metrics>,
    tasks: &TaskTracker,
) -> connection::Settings {
    let timeouts = config.edge_timeouts();
    connection::Settings {
        limits: guard::Limits {
            request_head: timeouts.request_head,
            keep_alive: config.server.keep_alive,
            write: timeouts.write,
        },
        tls_handshake: config.server.tls_handshake,
        half_close: config.server.half_close,
        head_bytes: config.limits.request_head_bytes,
        buffer_bytes: config.limits.stream_buffer_bytes,
        tls,
        drain: signals.drain.clone(),
        metrics: Arc::clone(metrics),
        tasks: tasks.clone(),
    }
}

/// The workers, and the generation as each has it.
fn workers(
    caller: &Caller,
    generation: &Generation,
    settings: &Arc<connection::Settings>,
    tasks: &TaskTracker,
) -> io::Result<(Vec<worker::RunningWorker>, Vec<Arc<Current>>)> {
    let config = &generation.config;
    let count = u32::try_from(config.server.workers.get()).unwrap_or(u32::MAX);
    let inquiries = Inquiries::new(caller.table().clone());
    let start = |id| {
        let current = Arc::new(Current::of(generation));
        let pool = Arc::new(Pool::default());
        let own = Arc::new(Worker {
            id,
            pool: Arc::clone(&pool),
            tasks: tasks.clone(),
            drivers: TaskTracker::new(),
            tcp: tcp_options(config),
            stream_buffer_bytes: config.limits.stream_buffer_bytes,
            inquiries: inquiries.clone(),
            caller: caller.of_worker(&current),
        });
        let plan = worker::Plan {
            id,
            pool,
            tasks: tasks.clone(),
            settings: Arc::clone(settings),
            front: Front::new(own),
        };
        Ok((worker::start(plan)?, current))
    };
    (0..count).map(start).collect()
}

/// The thread that accepts and answers the operator: calls never hold it up.
struct Control {
    data: StdListener,
    admin: Option<StdListener>,
    lanes: Vec<serve::Lane>,
    view: admin::View,
    signals: Signals,
}

impl Control {
    fn start(self) -> io::Result<JoinHandle<()>> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        std::thread::Builder::new()
            .name("control".into())
            .spawn(move || runtime.block_on(self.run()))
    }

    async fn run(self) {
        let Self {
            data,
            admin,
            lanes,
            view,
            signals,
        } = self;
        let running = view.running.clone();
        let connections_max = || running.borrow().config.server.connections_max;
        let metrics = Arc::clone(&view.metrics);
        let stop = signals.stop_accepting.clone();
        let tls = running.borrow().config.server.tls.is_some();
        let tcp = view.tcp;
        let accept = async {
            let door = Door {
                lanes: &lanes,
                connections_max,
                tls,
                tcp,
                metrics: &metrics,
            };
            if let Err(error) = serve::accept(data, &door, stop.raised()).await {
                tracing::error!(%error, "the data listener failed");
            }
            // The lanes end with their last sender; until then the workers wait for connections.
            drop(lanes);
        };
        let answer = async {
            match admin.map(TcpListener::from_std).transpose() {
                Ok(Some(listener)) => {
                    admin::serve(listener, view, signals.stop_control.clone()).await
                }
                Ok(None) => {}
                Err(error) => tracing::error!(%error, "the admin listener failed"),
            }
        };
        tokio::join!(accept, answer);
    }
}
