//! The `tidegate` binary: arguments, signals, exit code.

#![forbid(unsafe_code)]

use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::Duration;

use socket2::SockRef;
use tidegate::app::{Gateway, LAST_WORDS, Listeners, StartError};
use tidegate::cli::probe::Probe;
use tidegate::cli::{self, Command, Demo, Exit, Output};
use tidegate::config::{self, Config, Endpoint, Loaded, Sources};
use tidegate::probe;
use tidegate::reload::{Reloads, Watched};
use tidegate::telemetry;
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// glibc keeps what a burst of streams took; see docs/decisions/0009.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// For what is under way when a second signal comes.
const LAST_WORD: Duration = Duration::from_millis(500);

fn main() -> ExitCode {
    let output = match cli::parse(std::env::args_os(), Sources::of_process()) {
        Err(error) => Output::from(error),
        Ok(Command::Check(sources)) => cli::check(&sources, tidegate::app::check),
        Ok(Command::Schema) => cli::schema(),
        Ok(Command::HashKey(args)) => cli::hash_key(&args, io::stdin()),
        Ok(Command::Health(args)) => cli::health::health(&args),
        Ok(Command::Serve(sources)) => serve(sources),
        Ok(Command::Demo(demo)) => run_demo(&demo),
        Ok(Command::Calls(args)) => cli::admin::calls(&args),
        Ok(Command::Kill(args)) => cli::admin::kill(&args),
        Ok(Command::Report(args)) => cli::report::report(&args, io::stdin().lock()),
        Ok(Command::Rig(command)) => run_rig(command),
        Ok(Command::Probe(args)) => run_probe(&args),
    };
    // A closed pipe is the reader's choice. Where a gateway ran, one that is not read is so too.
    if !telemetry::log::last_words(&output.stderr, LAST_WORDS) {
        let _ = io::stderr().write_all(output.stderr.as_bytes());
    }
    if !output.stdout.is_empty() {
        let _ = io::stdout().write_all(output.stdout.as_bytes());
    }
    output.exit.into()
}

fn failed(error: impl std::fmt::Display) -> Output {
    Output {
        stdout: String::new(),
        stderr: format!("tidegate: {error}\n"),
        exit: Exit::Failed,
    }
}

fn done() -> Output {
    Output {
        stdout: String::new(),
        stderr: String::new(),
        exit: Exit::Ok,
    }
}

/// Descriptors that a runtime opens, and some more.
const PAIRS: usize = 4;

/// # Errors
///
/// Descriptors have run out.
fn runtime() -> Result<Runtime, StartError> {
    // With the first runtime tokio makes a pair of sockets for signals, and panics where it cannot.
    let room: Result<Vec<_>, _> = (0..PAIRS).map(|_| UnixStream::pair()).collect();
    drop(room.map_err(StartError::Thread)?);
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(StartError::Thread)
}

fn block_on(work: impl Future<Output = Output>) -> Output {
    match runtime() {
        Ok(runtime) => runtime.block_on(work),
        Err(error) => failed(error),
    }
}

/// Progress goes to standard error as it comes; what was found is printed at the end.
fn run_probe(args: &Probe) -> Output {
    let plan = probe::plan(&args.settings);
    if args.plan {
        return Output {
            stdout: plan,
            ..done()
        };
    }
    let mut say = |line: &str| {
        let _ = writeln!(io::stderr(), "  {line} …");
    };
    let _ = io::stderr().write_all(plan.as_bytes());
    block_on(async {
        match probe::run(&args.settings, &mut say).await {
            Ok(report) => Output {
                stdout: if args.json {
                    report.json()
                } else {
                    format!("\n{}", report.table())
                },
                ..done()
            },
            Err(probe::Failure(why)) => failed(why),
        }
    })
}

fn serve(sources: Sources) -> Output {
    let loaded = match config::load(&sources) {
        Ok(loaded) => loaded,
        Err(mistakes) => {
            return Output {
                stdout: String::new(),
                stderr: format!("{mistakes}\n"),
                exit: Exit::Usage,
            };
        }
    };
    telemetry::log::init(&loaded.config.log);
    for warning in &loaded.warnings {
        tracing::warn!("{}", warning.0);
    }
    start(loaded, sources).unwrap_or_else(failed)
}

/// # Errors
///
/// Whatever keeps the gateway from running.
fn start(loaded: Loaded, sources: Sources) -> Result<Output, StartError> {
    let runtime = runtime()?;
    let signals = runtime
        .block_on(async { Signals::listen() })
        .map_err(StartError::Signals)?;
    let upstreams = loaded.config.upstreams.len();
    let file = sources.by_env_name("TIDEGATE_CONFIG");
    let config = file.map_or("from flags", |file| file.text).to_owned();
    let gateway = Gateway::start(loaded.config, from_systemd()?, access_log())?;
    let watched = Watched::new(loaded.watch);
    let reloads = Reloads::start(gateway.generations(), sources, watched);
    let reloads = reloads.map_err(StartError::Thread)?;
    tracing::info!(
        listen = %gateway.data_addr(),
        admin = %shown(gateway.admin_addr()),
        version = env!("CARGO_PKG_VERSION"),
        config,
        upstreams,
        "ready"
    );
    Ok(runtime.block_on(until_stopped(gateway, signals, Some(reloads))))
}

fn shown(address: Option<SocketAddr>) -> String {
    address.map_or_else(|| "off".to_owned(), |a| a.to_string())
}

/// systemd socket activation: the first socket is the data port, the second, if any, the admin port.
fn from_systemd() -> Result<Listeners, StartError> {
    let mut given = listenfd::ListenFd::from_env();
    let mut take = |index| {
        let listener = given
            .take_tcp_listener(index)
            .and_then(|taken| match taken {
                Some(listener) if !SockRef::from(&listener).is_listener()? => Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "it does not listen",
                )),
                taken => Ok(taken),
            });
        listener.map_err(|source| StartError::Passed {
            number: index + 1,
            source,
        })
    };
    Ok(Listeners {
        data: take(0)?,
        admin: take(1)?,
    })
}

/// Standard output.
fn access_log() -> Box<dyn Write + Send> {
    match telemetry::lines::unlocked(&io::stdout()) {
        Ok(file) => Box::new(file),
        Err(_) => Box::new(io::stdout()),
    }
}

struct Signals {
    term: Signal,
    int: Signal,
    hup: Signal,
}

impl Signals {
    /// In a runtime. What comes from now on is heard, if later.
    fn listen() -> io::Result<Self> {
        Ok(Self {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
            hup: signal(SignalKind::hangup())?,
        })
    }

    async fn end(&mut self) {
        tokio::select! { _ = self.term.recv() => {}, _ = self.int.recv() => {} }
    }
}

async fn until_stopped(gateway: Gateway, mut signals: Signals, reloads: Option<Reloads>) -> Output {
    loop {
        tokio::select! {
            _ = signals.term.recv() => break,
            _ = signals.int.recv() => break,
            _ = signals.hup.recv() => if let Some(reloads) = &reloads { reloads.want() },
        }
    }
    drop(reloads);
    tracing::info!("draining; a second signal ends at once");
    let mut again = async || {
        signals.end().await;
        failed("ended by a second signal; running calls were cut")
    };
    end(gateway, again()).await
}

/// Drain, stop; once `again` is through, as much of it as can be had at once.
async fn end(gateway: Gateway, again: impl Future<Output = Output>) -> Output {
    let mut again = std::pin::pin!(again);
    let drained = tokio::select! {
        drained = gateway.drain() => drained,
        output = &mut again => {
            gateway.abort().await;
            // Threads end with the process.
            std::mem::forget(gateway);
            return output;
        }
    };
    if drained.cut > 0 {
        tracing::warn!(
            cut = drained.cut,
            left = drained.left,
            "the drain's time was up; what still ran was told and ended"
        );
    }
    // Beside us: it waits for threads, and a signal must be heard meanwhile.
    let (stopped, mut is_stopped) = tokio::sync::oneshot::channel();
    let stop = std::thread::Builder::new()
        .name("stop".into())
        .spawn(move || {
            gateway.stop();
            let _ = stopped.send(());
        });
    if let Err(error) = stop {
        return failed(error);
    }
    tokio::select! {
        _ = &mut is_stopped => {
            tracing::info!("stopped");
            if drained.cut > 0 { Output { exit: Exit::Cut, ..done() } } else { done() }
        }
        output = again => {
            // The access log may be on its way; whoever reads it may also have stopped.
            let _ = tokio::time::timeout(LAST_WORD, is_stopped).await;
            output
        }
    }
}

/// The judge's commands say themselves what they have to say.
fn run_rig(command: tidegate_rig::cli::Command) -> Output {
    block_on(async move {
        match tidegate_rig::cli::run(command).await {
            Ok(true) => done(),
            Ok(false) => Output {
                exit: Exit::Failed,
                ..done()
            },
            Err(error) => Output {
                exit: Exit::Usage,
                ..failed(error)
            },
        }
    })
}

fn run_demo(demo: &Demo) -> Output {
    let demo = demo.clone();
    block_on(async move {
        let nowhere = SocketAddr::from(([127, 0, 0, 1], 0));
        // Nine seconds, long enough to hang up in.
        let script = tidegate_rig::Script {
            tokens: Some(60),
            pace_ms: 150.0,
            ..Default::default()
        };
        let upstream = match tidegate_rig::FakeUpstream::start(nowhere, script).await {
            Ok(upstream) => upstream,
            Err(error) => return failed(error),
        };
        let mut config = Config::one_upstream(Endpoint::from(upstream.addr()));
        config.server.listen = demo.listen;
        // Of the fake server's names the list shows the one that the pages use; it answers to any.
        for upstream in &mut config.upstreams {
            upstream.models = vec!["demo".to_owned()];
            // It is our own.
            upstream.stops_known = true;
        }
        config.admin.listen = Some(demo.admin);
        telemetry::log::init(&config.log);
        let signals = Signals::listen().map_err(StartError::Signals);
        let started = signals.and_then(|signals| {
            Ok((
                signals,
                Gateway::start(config, Listeners::default(), access_log())?,
            ))
        });
        let (signals, gateway) = match started {
            Ok(started) => started,
            Err(error) => return failed(error),
        };
        let program = std::env::args_os().next();
        let program =
            program.map_or_else(|| "tidegate".into(), |p| p.to_string_lossy().into_owned());
        let text = cli::demo::text(&program, gateway.data_addr(), gateway.admin_addr());
        let _ = io::stderr().write_all(text.as_bytes());
        until_stopped(gateway, signals, None).await
    })
}
