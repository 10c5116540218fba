//! `rig`: fake upstream, load, bench, and a proxy that must fail.

mod bench;
mod load;

use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::{FakeUpstream, NaiveProxy, Script};

/// A fake model server that knows the truth, load for any gateway in front of
/// it, and the comparison of several.
#[derive(Debug, Parser)]
#[command(name = "rig", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// The judge's commands; another program can take them into its own.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve scripted answers and count what really happens.
    FakeUpstream(FakeArgs),
    /// Put load on a gateway and measure it.
    Load(Box<load::LoadArgs>),
    /// Compare gateways under the same load.
    Bench(bench::BenchArgs),
    /// Serve a proxy with every fault this judge looks for.
    NaiveProxy(NaiveArgs),
}

#[derive(Debug, clap::Args)]
pub struct FakeArgs {
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1:8000")]
    listen: SocketAddr,
    /// Default script: JSON text, or @FILE.
    #[arg(long, default_value = "{}")]
    script: String,
    /// Calls kept one by one for /__rig/calls.
    #[arg(long, default_value_t = 0)]
    keep: usize,
}

#[derive(Debug, clap::Args)]
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
        Ok(code) => code,
        Err(e) => {
            complain(&format!("rig: {e}"));
            ExitCode::from(2)
        }
    }
}

/// Runs one command; load is made on the current runtime, which had better be
/// a current-thread one.
pub async fn run(command: Command) -> io::Result<ExitCode> {
    match command {
        Command::FakeUpstream(args) => fake(args).await,
        Command::NaiveProxy(args) => naive(args).await,
        Command::Bench(args) => bench::run(args).await,
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

fn script(text: &str) -> io::Result<Script> {
    let text = match text.strip_prefix('@') {
        Some(file) => std::fs::read_to_string(PathBuf::from(file))?,
        None => text.to_owned(),
    };
    Script::from_json(&text).map_err(|e| io::Error::other(format!("script: {e}")))
}

async fn fake(args: FakeArgs) -> io::Result<ExitCode> {
    crate::load::raise_descriptors(0)?;
    let upstream =
        FakeUpstream::start_keeping(args.listen, script(&args.script)?, args.keep).await?;
    say(&format!("listening on {}", upstream.addr()))?;
    tokio::signal::ctrl_c().await?;
    complain(&serde_json::to_string(&upstream.truth())?);
    Ok(ExitCode::SUCCESS)
}

async fn naive(args: NaiveArgs) -> io::Result<ExitCode> {
    crate::load::raise_descriptors(0)?;
    let proxy = NaiveProxy::start(args.listen, args.upstream, args.slots).await?;
    say(&format!("listening on {}", proxy.addr()))?;
    tokio::signal::ctrl_c().await?;
    Ok(ExitCode::SUCCESS)
}
