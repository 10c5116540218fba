//! What a process and its sockets look like from outside, by `/proc`.

use std::collections::BTreeMap;
use std::fs;
use std::sync::mpsc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What is watched during a run.
#[derive(Clone, Copy, Debug)]
pub struct Watched {
    /// The gateway's process; its children are counted with it.
    pub pid: Option<u32>,
    /// Port it listens on.
    pub listen: u16,
    /// Port of the upstream behind it.
    pub upstream: Option<u16>,
}

/// Use of a process and its children at one moment.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct ProcessUse {
    /// CPU time so far, microseconds.
    pub cpu_us: u64,
    /// Resident memory, KiB.
    pub rss_kib: u64,
    /// Proportional share of memory, KiB (0 where it cannot be read).
    pub pss_kib: u64,
    /// Open descriptors.
    pub descriptors: u64,
    /// Threads.
    pub threads: u64,
}

/// Socket states on the gateway's two sides, by state name. The load's own
/// ends and the upstream's are not counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sockets {
    /// Gateway's ends towards clients.
    pub downstream: BTreeMap<String, u64>,
    /// Gateway's ends towards the upstream.
    pub upstream: BTreeMap<String, u64>,
}

impl Sockets {
    /// Both sides together.
    #[must_use]
    pub fn count(&self, state: &str) -> u64 {
        let of = |side: &BTreeMap<String, u64>| side.get(state).copied().unwrap_or(0);
        of(&self.downstream) + of(&self.upstream)
    }
}

impl Watched {
    /// The process now; nothing if none is watched or it has gone.
    #[must_use]
    pub fn process(&self) -> Option<ProcessUse> {
        let pid = self.pid?;
        let mut total = ProcessUse::default();
        let mut seen = false;
        for pid in family(pid) {
            if let Some(one) = one_process(pid) {
                seen = true;
                total.cpu_us += one.cpu_us;
                total.rss_kib += one.rss_kib;
                total.pss_kib += one.pss_kib;
                total.descriptors += one.descriptors;
                total.threads += one.threads;
            }
        }
        seen.then_some(total)
    }

    /// CPU time of one process and its children, microseconds.
    pub(crate) fn cpu_us_of(pid: u32) -> Option<u64> {
        let watched = Self {
            pid: Some(pid),
            listen: 0,
            upstream: None,
        };
        watched.process().map(|p| p.cpu_us)
    }

    /// The sockets now.
    #[must_use]
    pub fn sockets(&self) -> Sockets {
        let mut sockets = Sockets::default();
        for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
            for line in fs::read_to_string(table)
                .unwrap_or_default()
                .lines()
                .skip(1)
            {
                let Some((local, remote, state)) = socket(line) else {
                    continue;
                };
                let side = if local == self.listen && state != "LISTEN" {
                    &mut sockets.downstream
                } else if Some(remote) == self.upstream && local != self.listen {
                    &mut sockets.upstream
                } else {
                    continue;
                };
                *side.entry(state.to_owned()).or_insert(0) += 1;
            }
        }
        sockets
    }
}

/// Local port, remote port and state of a line of the kernel's table.
fn socket(line: &str) -> Option<(u16, u16, &'static str)> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let mut port = || {
        let (_, port) = fields.next()?.rsplit_once(':')?;
        u16::from_str_radix(port, 16).ok()
    };
    let (local, remote) = (port()?, port()?);
    let state = match fields.next()? {
        "01" => "ESTABLISHED",
        "02" => "SYN_SENT",
        "03" => "SYN_RECV",
        "04" => "FIN_WAIT1",
        "05" => "FIN_WAIT2",
        "06" => "TIME_WAIT",
        "07" => "CLOSE",
        "08" => "CLOSE_WAIT",
        "09" => "LAST_ACK",
        "0A" => "LISTEN",
        "0B" => "CLOSING",
        _ => "OTHER",
    };
    Some((local, remote, state))
}

/// A process and all processes below it.
pub(crate) fn family(root: u32) -> Vec<u32> {
    let mut family = vec![root];
    let mut next = 0;
    while let Some(pid) = family.get(next).copied() {
        next += 1;
        let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else {
            continue;
        };
        for task in tasks.flatten() {
            let children = fs::read_to_string(task.path().join("children"));
            let children = children.unwrap_or_default();
            family.extend(
                children
                    .split_ascii_whitespace()
                    .filter_map(|c| c.parse::<u32>().ok()),
            );
        }
    }
    family
}

fn one_process(pid: u32) -> Option<ProcessUse> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in brackets may hold anything; fields count from after it.
    let (_, fields) = stat.rsplit_once(") ")?;
    let fields: Vec<u64> = fields
        .split_ascii_whitespace()
        .map(|f| f.parse().unwrap_or(0))
        .collect();
    // USER_HZ is 100 on every Linux of today.
    let ticks = fields.get(11)? + fields.get(12)?;
    Some(ProcessUse {
        // Threads that have ended are only in the ticks.
        cpu_us: exact_cpu_us(pid).unwrap_or(0).max(ticks * 10_000),
        rss_kib: kib(&format!("/proc/{pid}/status"), "VmRSS:").unwrap_or(0),
        pss_kib: kib(&format!("/proc/{pid}/smaps_rollup"), "Pss:").unwrap_or(0),
        descriptors: fs::read_dir(format!("/proc/{pid}/fd"))
            .map(|d| d.count() as u64)
            .unwrap_or(0),
        threads: *fields.get(17)?,
    })
}

/// CPU time of all living threads from the scheduler, finer than ticks.
fn exact_cpu_us(pid: u32) -> Option<u64> {
    let mut total = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten() {
        let stat = fs::read_to_string(task.path().join("schedstat")).ok()?;
        let ns: u64 = stat.split_ascii_whitespace().next()?.parse().ok()?;
        total += ns;
    }
    Some(total / 1000)
}

fn kib(path: &str, field: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|l| l.starts_with(field))?;
    line.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// Samples a process on a thread of its own until stopped.
#[derive(Debug)]
pub struct Sampler {
    stop: mpsc::Sender<()>,
    thread: std::thread::JoinHandle<ProcessUse>,
}

impl Sampler {
    /// Starts; none if no process is watched.
    #[must_use]
    pub fn start(watched: Watched, every: Duration) -> Option<Self> {
        watched.pid?;
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("sampler".to_owned())
            .spawn(move || {
                let mut peak = ProcessUse::default();
                loop {
                    if let Some(now) = watched.process() {
                        peak.rss_kib = peak.rss_kib.max(now.rss_kib);
                        peak.pss_kib = peak.pss_kib.max(now.pss_kib);
                        peak.descriptors = peak.descriptors.max(now.descriptors);
                        peak.threads = peak.threads.max(now.threads);
                        peak.cpu_us = now.cpu_us;
                    }
                    if stopped.recv_timeout(every) != Err(mpsc::RecvTimeoutError::Timeout) {
                        return peak;
                    }
                }
            })
            .ok()?;
        Some(Self { stop, thread })
    }

    /// Stops; the highest values seen.
    #[must_use]
    pub fn peak(self) -> ProcessUse {
        drop(self.stop);
        self.thread.join().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_kernels_table_is_read() {
        let line = "   1: 0100007F:80C6 0100007F:AB8B 06 00000000:00000000 03:000001B2";
        assert_eq!(socket(line), Some((0x80C6, 0xAB8B, "TIME_WAIT")));
    }

    #[test]
    fn this_process_is_alive() {
        let watched = Watched {
            pid: Some(std::process::id()),
            listen: 1,
            upstream: None,
        };
        let now = watched.process().expect("this process");
        assert!(now.rss_kib > 0 && now.threads > 0 && now.descriptors > 2);
    }
}
