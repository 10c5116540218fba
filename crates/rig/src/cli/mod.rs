//! `rig`: fake upstream, load, bench, and a proxy that must fail.

mod bars;
mod bench;
mod fake;
mod load;
mod storm;
mod words;

pub use fake::{FAKE_HELP, FakeArgs};
pub use storm::{STORM_HELP, StormArgs};

use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};

use crate::NaiveProxy;

/// A fake model server that knows the truth, load for any gateway in front of
/// it, and the comparison of several.
#[derive(Debug, Parser)]
#[command(name = "rig", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// The judge's commands; another program can take them into its own.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Serve scripted answers and count what really happens.
    #[command(after_help = FAKE_HELP)]
    FakeUpstream(Box<FakeArgs>),
    /// Let users leave, lag, crowd and retry, and see what a gateway makes of it.
    #[command(after_help = STORM_HELP)]
    Storm(Box<StormArgs>),
    /// Put load on a gateway and measure it.
    Load(Box<load::LoadArgs>),
    /// Compare gateways under the same load.
    Bench(bench::BenchArgs),
    /// Serve a proxy with every fault this judge looks for.
    NaiveProxy(NaiveArgs),
}

#[derive(Clone, Debug, clap::Args)]
pub struct NaiveArgs {
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1:8081")]
    listen: SocketAddr,
    /// Where to forward to.
    #[arg(long)]
    upstream: SocketAddr,
    /// Slots, freed too early.
    #[arg(long, default_value_t = 20_000)]
    slots: usize,
}

/// Runs the command line.
#[must_use]
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let result = runtime.and_then(|runtime| runtime.block_on(run(cli.command)));
    match result {
        Ok(held) => ExitCode::from(u8::from(!held)),
        Err(e) => {
            complain(&format!("rig: {e}"));
            ExitCode::from(2)
        }
    }
}

/// Runs one command; whether all bars held. Load is made on the current
/// runtime, which had better be a current-thread one.
pub async fn run(command: Command) -> io::Result<bool> {
    match command {
        Command::FakeUpstream(args) => fake::run(*args).await,
        Command::NaiveProxy(args) => naive(args).await,
        Command::Bench(args) => bench::run(args).await,
        Command::Storm(args) => storm::run(*args).await,
        Command::Load(args) => load::run(*args).await,
    }
}

/// Writes a line for people to standard error.
pub(crate) fn complain(text: &str) {
    // Nobody to tell if standard error is closed.
    let _ = writeln!(io::stderr(), "{text}");
}

/// Writes a result to standard output.
fn say(text: &str) -> io::Result<()> {
    writeln!(io::stdout(), "{text}")
}

/// Waits for SIGINT or SIGTERM.
pub(crate) async fn asked_to_end() -> io::Result<()> {
    let mut term = signal(SignalKind::terminate())?;
    tokio::select! {
        interrupted = tokio::signal::ctrl_c() => interrupted,
        _ = term.recv() => Ok(()),
    }
}

async fn naive(args: NaiveArgs) -> io::Result<bool> {
    crate::load::raise_descriptors(0)?;
    let proxy = NaiveProxy::start(args.listen, args.upstream, args.slots).await?;
    say(&format!("listening on {}", proxy.addr()))?;
    asked_to_end().await?;
    Ok(true)
}
