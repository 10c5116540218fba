//! What the bench ran on and with.

use std::fs;
use std::path::Path;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use tokio::process::Command;

/// Machine, versions and date of a bench.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Machine {
    /// Processor as the kernel names it.
    pub processor: String,
    /// Cores seen.
    pub cores: usize,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Kernel release.
    pub kernel: String,
    /// Load average before the bench.
    pub load_before: String,
    /// When.
    pub date: String,
    /// Versions, by program.
    pub versions: Vec<(String, String)>,
    /// The command line.
    pub command: String,
}

impl Machine {
    /// Looks around.
    pub async fn look(programs: &[(&str, &Path, &str)]) -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = read("/proc/cpuinfo");
        let processor = cpuinfo
            .lines()
            .find_map(|l| l.strip_prefix("model name")?.split_once(": "))
            .map_or("unknown", |(_, name)| name);
        let memory = read("/proc/meminfo")
            .split_ascii_whitespace()
            .nth(1)
            .and_then(|kib| kib.parse::<u64>().ok())
            .unwrap_or(0);
        let mut versions = Vec::new();
        for (name, program, flag) in programs {
            versions.push(((*name).to_owned(), version(program, flag).await));
        }
        Self {
            processor: processor.to_owned(),
            cores: std::thread::available_parallelism().map_or(0, std::num::NonZero::get),
            memory_mib: memory / 1024,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            load_before: read("/proc/loadavg")
                .split_ascii_whitespace()
                .take(3)
                .collect::<Vec<_>>()
                .join(" "),
            date: httpdate::fmt_http_date(SystemTime::now()),
            versions,
            command: arguments(),
        }
    }
}

/// The command line, programs without their directories.
fn arguments() -> String {
    let short = |a: String| match Path::new(&a).file_name() {
        Some(name) if a.contains('/') && !a.contains("://") => name.to_string_lossy().into_owned(),
        _ => a,
    };
    std::env::args().map(short).collect::<Vec<_>>().join(" ")
}

async fn version(program: &Path, flag: &str) -> String {
    let output = Command::new(program).arg(flag).output().await;
    let Ok(output) = output else {
        return "not found".to_owned();
    };
    let text = if output.stdout.is_empty() {
        output.stderr
    } else {
        output.stdout
    };
    let text = String::from_utf8_lossy(&text);
    text.lines().next().unwrap_or("unknown").trim().to_owned()
}
