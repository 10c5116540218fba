//! `rig load`.

use std::io;
use std::net::SocketAddr;

use clap::{Args, Subcommand, ValueEnum};

use crate::load::{
    Bars, CallsPlan, Cut, HeldPlan, Leave, Report, StormPlan, StreamsPlan, Target, calls, idle,
    slow, storm, streams,
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
    /// Streams that say two words and fall silent.
    Idle {
        #[arg(long, default_value_t = 5_000)]
        streams: usize,
        #[arg(long, default_value_t = 3.0)]
        seconds: f64,
    },
    /// Slow readers of a fast upstream.
    Slow {
        #[arg(long, default_value_t = 200)]
        streams: usize,
        #[arg(long, default_value_t = 8.0)]
        seconds: f64,
    },
    /// Users who all cut the connection in mid-stream.
    Storm {
        #[arg(long, default_value_t = 500)]
        users: usize,
        #[arg(long, default_value_t = 5_000)]
        calls: u64,
        #[arg(long, default_value_t = 20.0)]
        pace_ms: f64,
        #[arg(long, default_value_t = 400)]
        tokens: u64,
        #[arg(long, default_value_t = 5)]
        cut_at: u64,
        #[arg(long, value_enum, default_value_t = CutArg::Rst)]
        cut: CutArg,
        /// When users leave.
        #[arg(long, value_enum, default_value_t = LeaveArg::Chunk)]
        leave: LeaveArg,
        /// Leave out the undisturbed run before.
        #[arg(long)]
        no_undisturbed: bool,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum CutArg {
    Rst,
    Fin,
    None,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LeaveArg {
    /// At a chunk.
    Chunk,
    /// Before the head, while the upstream is silent.
    Prefill,
    /// In an answer that is not streamed.
    Plain,
}

/// Bars; a result above one makes the exit code 1.
#[derive(Clone, Debug, Args)]
pub(super) struct BarArgs {
    /// Wasted tokens, percent of the planned ones (`0.1%` or `0.1`).
    #[arg(long, global = true, value_parser = percent)]
    max_waste: Option<f64>,
    #[arg(long, global = true)]
    max_time_wait: Option<u64>,
    #[arg(long, global = true)]
    max_close_wait: Option<u64>,
    #[arg(long, global = true)]
    max_running_after: Option<u64>,
    #[arg(long, global = true)]
    max_memory_left_mib: Option<f64>,
    #[arg(long, global = true)]
    max_cpu_us_per_call: Option<f64>,
    #[arg(long, global = true)]
    max_cpu_us_per_chunk: Option<f64>,
    #[arg(long, global = true)]
    max_kib_per_stream: Option<f64>,
    #[arg(long, global = true)]
    max_mib: Option<f64>,
    #[arg(long, global = true)]
    max_delay_p99_ms: Option<f64>,
    #[arg(long, global = true)]
    max_first_event_ratio: Option<f64>,
    #[arg(long, global = true)]
    max_errors: Option<u64>,
    /// Upstream calls for each call that a user wanted.
    #[arg(long, global = true)]
    max_amplification: Option<f64>,
    /// Calls that ran for nobody, times how long they did, in seconds.
    #[arg(long, global = true)]
    max_abandoned_seconds: Option<f64>,
    /// Calls running at the upstream at once.
    #[arg(long, global = true)]
    max_running: Option<u64>,
}

fn percent(text: &str) -> Result<f64, std::num::ParseFloatError> {
    text.trim_end_matches('%').parse()
}

impl BarArgs {
    pub(super) fn bars(&self) -> Bars {
        Bars {
            max_waste_percent: self.max_waste,
            max_time_wait: self.max_time_wait,
            max_close_wait: self.max_close_wait,
            max_running_after: self.max_running_after,
            max_memory_left_mib: self.max_memory_left_mib,
            max_cpu_us_per_call: self.max_cpu_us_per_call,
            max_cpu_us_per_chunk: self.max_cpu_us_per_chunk,
            max_kib_per_stream: self.max_kib_per_stream,
            max_mib: self.max_mib,
            max_delay_p99_ms: self.max_delay_p99_ms,
            max_first_event_ratio: self.max_first_event_ratio,
            max_errors: self.max_errors,
            max_amplification: self.max_amplification,
            max_abandoned_seconds: self.max_abandoned_seconds,
            max_running: self.max_running,
        }
    }
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
        Scenario::Idle { streams, seconds } => idle(target, &HeldPlan { streams, seconds }).await,
        Scenario::Slow { streams, seconds } => slow(target, &HeldPlan { streams, seconds }).await,
        Scenario::Storm {
            users,
            calls,
            pace_ms,
            tokens,
            cut_at,
            cut,
            leave,
            no_undisturbed,
        } => {
            let plan = StormPlan {
                users,
                calls,
                pace_ms,
                tokens,
                cut_at,
                cut: match cut {
                    CutArg::Rst => Cut::Rst,
                    CutArg::Fin => Cut::Fin,
                    CutArg::None => Cut::None,
                },
                leave: match leave {
                    LeaveArg::Chunk => Leave::Chunk,
                    LeaveArg::Prefill => Leave::Prefill,
                    LeaveArg::Plain => Leave::Plain,
                },
                undisturbed: !no_undisturbed,
            };
            storm(target, &plan).await
        }
    }
}
