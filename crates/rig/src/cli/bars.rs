//! Bars on the command line.

use clap::Args;

use crate::load::Bars;

/// Bars; a result above one makes the exit code 1.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Bars (a figure above one makes the exit code 1)")]
pub(super) struct BarArgs {
    /// Tokens generated that no user read, percent of the planned ones (`0.1%` or `0.1`)
    #[arg(long, global = true, value_name = "PERCENT", value_parser = percent)]
    max_waste: Option<f64>,
    /// The gateway's sockets in TIME_WAIT after the run
    #[arg(long, global = true, value_name = "N")]
    max_time_wait: Option<u64>,
    /// The gateway's sockets in CLOSE_WAIT after the run
    #[arg(long, global = true, value_name = "N")]
    max_close_wait: Option<u64>,
    /// Calls that still run at the upstream a second after all users have gone
    #[arg(long, global = true, value_name = "N")]
    max_running_after: Option<u64>,
    /// Memory that the gateway keeps, MiB
    #[arg(long, global = true, value_name = "MIB", value_parser = number)]
    max_memory_left_mib: Option<f64>,
    /// CPU of the gateway for each call, microseconds
    #[arg(long, global = true, value_name = "US", value_parser = number)]
    max_cpu_us_per_call: Option<f64>,
    /// CPU of the gateway for each chunk, microseconds
    #[arg(long, global = true, value_name = "US", value_parser = number)]
    max_cpu_us_per_chunk: Option<f64>,
    /// Memory of the gateway for each held stream (`idle`, `slow`, `stalled`), KiB
    #[arg(long, global = true, value_name = "KIB", value_parser = number)]
    max_kib_per_stream: Option<f64>,
    /// Memory that held streams take in all (`idle`, `slow`, `stalled`), MiB
    #[arg(long, global = true, value_name = "MIB", value_parser = number)]
    max_mib: Option<f64>,
    /// From the upstream's writing of a chunk to the user's reading, 99th percentile, ms
    #[arg(long, global = true, value_name = "MS", value_parser = number)]
    max_delay_p99_ms: Option<f64>,
    /// First event's 99th percentile in `abort`, as a multiple of the one while nobody leaves
    #[arg(long, global = true, value_name = "TIMES", value_parser = number)]
    max_first_event_ratio: Option<f64>,
    /// Things gone wrong: refusals, cut streams, users who gave up where that is not the scenario
    #[arg(long, global = true, value_name = "N")]
    max_errors: Option<u64>,
    /// Upstream calls for each call that a user wanted (`retry`)
    #[arg(long, global = true, value_name = "TIMES", value_parser = number)]
    max_amplification: Option<f64>,
    /// Calls that ran for nobody, times how long they did, in seconds
    #[arg(long, global = true, value_name = "SECONDS", value_parser = number)]
    max_abandoned_seconds: Option<f64>,
    /// Calls running at the upstream at once
    #[arg(long, global = true, value_name = "N")]
    max_running: Option<u64>,
    /// From SIGTERM to the end of the process (`drain`), seconds
    #[arg(long, global = true, value_name = "SECONDS", value_parser = number)]
    max_exit_seconds: Option<f64>,
}

fn percent(text: &str) -> Result<f64, String> {
    number(text.trim_end_matches('%'))
}

/// A bar that some figure can be above, and some below.
fn number(text: &str) -> Result<f64, String> {
    let bar: f64 = text.parse().map_err(|e| format!("{e}"))?;
    if bar.is_finite() && bar >= 0.0 {
        return Ok(bar);
    }
    Err("a bar is 0 or more".to_owned())
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
            max_exit_seconds: self.max_exit_seconds,
        }
    }
}
