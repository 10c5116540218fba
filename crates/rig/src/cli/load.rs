//! `rig load`.

use std::io;
use std::net::SocketAddr;

use clap::{Args, Subcommand};

use super::bars::BarArgs;
use crate::load::{CallsPlan, Report, StreamsPlan, Target, calls, streams};

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
    let report = scenario(&target, args.scenario).await?;
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

async fn scenario(target: &Target, scenario: Scenario) -> io::Result<Report> {
    match scenario {
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
            calls(target, &plan).await
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
            streams(target, &plan).await
        }
    }
}
