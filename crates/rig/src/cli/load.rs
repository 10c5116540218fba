//! `rig load`.

use std::io;
use std::net::SocketAddr;

use clap::{Args, Subcommand};

use super::bars::BarArgs;
use crate::load::{
    CallsPlan, LeavePlan, StreamsPlan, Target, ToldBars, Way, calls, leave, streams,
};

#[derive(Clone, Debug, Args)]
pub struct LoadArgs {
    #[command(subcommand)]
    scenario: Scenario,
    /// The gateway's address.
    #[arg(long, global = true, default_value = "127.0.0.1:8080")]
    target: SocketAddr,
    /// The fake upstream behind it (for the truth and the sockets).
    #[arg(long, global = true)]
    upstream: Option<SocketAddr>,
    /// The gateway's process.
    #[arg(long, global = true)]
    pid: Option<u32>,
    /// Request path.
    #[arg(long, global = true, default_value = "/v1/chat/completions")]
    path: String,
    /// Further request header, `name: value`.
    #[arg(long, global = true)]
    header: Vec<String>,
    /// Print JSON instead of a table.
    #[arg(long, global = true)]
    json: bool,
    #[command(flatten)]
    bars: BarArgs,
}

#[derive(Clone, Debug, Subcommand)]
enum Scenario {
    /// Closed loop of small calls that are not streamed.
    Calls {
        #[arg(long, default_value_t = 64)]
        connections: usize,
        #[arg(long, default_value_t = 100_000)]
        calls: u64,
        #[arg(long, default_value_t = 10_000)]
        warmup: u64,
    },
    /// Paced, stamped streams.
    Streams {
        #[arg(long, default_value_t = 500)]
        streams: usize,
        #[arg(long, default_value_t = 20.0)]
        pace_ms: f64,
        #[arg(long, default_value_t = 8.0)]
        seconds: f64,
    },
    /// Clients that leave, everywhere and in every way: how soon the upstream sees the close.
    Leave(LeaveArgs),
}

#[derive(Clone, Debug, Args)]
struct LeaveArgs {
    /// Where to start the fake upstream that judges; the gateway has to forward to it.
    #[arg(long)]
    upstream_listen: SocketAddr,
    /// Calls of each kind: a route, streaming or not, a moment, a way to leave.
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    /// Also clients that speak HTTP/2.
    #[arg(long)]
    http2: bool,
    /// The upstream speaks HTTP/2 (the gateway has to as well).
    #[arg(long)]
    upstream_http2: bool,
    /// Time of 99 in 100 calls, ms; above it the exit code is 1.
    #[arg(long, value_name = "MS")]
    max_p99_ms: Option<f64>,
    /// Time of any call, ms; above it the exit code is 1.
    #[arg(long, value_name = "MS")]
    max_ms: Option<f64>,
}

async fn leaving(target: &Target, args: LeaveArgs, json: bool) -> io::Result<bool> {
    let mut ways = Way::ONE.to_vec();
    if args.http2 {
        ways.extend(Way::TWO);
    }
    let plan = LeavePlan {
        rounds: args.rounds,
        ways,
        upstream_http2: args.upstream_http2,
        ..LeavePlan::default()
    };
    let told = leave(target, args.upstream_listen, &plan).await?;
    let bars = ToldBars {
        p99_ms: args.max_p99_ms,
        max_ms: args.max_ms,
    };
    let failures = told.failures(&bars);
    super::say(&if json { told.json()? } else { told.table() })?;
    for failure in &failures {
        super::complain(&format!("FAILED {failure}"));
    }
    Ok(failures.is_empty())
}

pub(super) async fn run(args: LoadArgs) -> io::Result<bool> {
    let mut target = Target::new(args.target);
    target.upstream = args.upstream;
    target.pid = args.pid;
    target.path = args.path;
    target.progress = true;
    for header in &args.header {
        let (name, value) = header.split_once(':').ok_or_else(|| {
            io::Error::other(format!("--header {header:?}: expected `name: value`"))
        })?;
        let pair = (name.trim().to_owned(), value.trim().to_owned());
        target.headers.push(pair);
    }
    if target.pid.is_some() && target.pid.is_some_and(|pid| !alive(pid)) {
        return Err(io::Error::other("--pid: no such process"));
    }
    let report = match args.scenario {
        Scenario::Leave(leave) => return leaving(&target, leave, args.json).await,
        Scenario::Calls {
            connections,
            calls: n,
            warmup,
        } => {
            let plan = CallsPlan {
                connections,
                calls: n,
                warmup,
                ..CallsPlan::default()
            };
            calls(&target, &plan).await?
        }
        Scenario::Streams {
            streams: n,
            pace_ms,
            seconds,
        } => {
            let plan = StreamsPlan {
                streams: n,
                pace_ms,
                seconds,
                ..StreamsPlan::default()
            };
            streams(&target, &plan).await?
        }
    };
    let failures = report.failures(&args.bars.bars());
    if args.json {
        super::say(&serde_json::to_string_pretty(&report)?)?;
    } else {
        super::say(report.table().trim_end())?;
    }
    for failure in &failures {
        super::complain(&format!("FAILED {failure}"));
    }
    Ok(failures.is_empty())
}

fn alive(pid: u32) -> bool {
    std::path::Path::new("/proc").join(pid.to_string()).exists()
}
