//! What a process and its sockets look like from outside, by `/proc`.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Arc, mpsc};
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

    /// All of them, in whatever state.
    #[must_use]
    pub fn all(&self) -> u64 {
        self.downstream.values().sum::<u64>() + self.upstream.values().sum::<u64>()
    }
}

impl std::fmt::Display for Sockets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (side, states) in [("clients", &self.downstream), ("upstream", &self.upstream)] {
            let all: Vec<String> = states.iter().map(|(s, n)| format!("{n} {s}")).collect();
            let all = if all.is_empty() {
                "none".to_owned()
            } else {
                all.join(", ")
            };
            let space = if side == "clients" { "" } else { "  " };
            write!(f, "{space}{side}: {all}")?;
        }
        Ok(())
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

    /// The sockets now, whosoever they are.
    #[must_use]
    pub fn sockets(&self) -> Sockets {
        self.sockets_but(&HashSet::new())
    }

    fn sockets_but(&self, strangers: &HashSet<Ends>) -> Sockets {
        let mut sockets = Sockets::default();
        each_socket(|socket| {
            let side = if socket.ends.local == self.listen && socket.state != "LISTEN" {
                &mut sockets.downstream
            } else if Some(socket.ends.remote) == self.upstream && socket.ends.local != self.listen
            {
                &mut sockets.upstream
            } else {
                return;
            };
            if !strangers.contains(&socket.ends) {
                *side.entry(socket.state.to_owned()).or_insert(0) += 1;
            }
        });
        sockets
    }

    /// The same, from now on without what other runs and other gateways have
    /// left on the two ports: nothing tells whose a socket in `TIME_WAIT` is
    /// but when it came.
    #[must_use]
    pub fn from_now(self) -> Watch {
        let mut known = HashSet::new();
        each_socket(|socket| {
            let ours = [Some(socket.ends.remote), Some(socket.ends.local)];
            if ours.contains(&Some(self.listen)) || ours.contains(&self.upstream) {
                known.insert((socket.ends, socket.inode));
            }
        });
        let owned = self.pid.map(|pid| inodes(&family(pid)));
        let stranger = |inode: u64| match &owned {
            // Those of a process that cannot be seen may be the gateway's.
            None => inode == 0,
            Some(owned) => !owned.contains(&inode),
        };
        let strangers = known.into_iter().filter(|(_, inode)| stranger(*inode));
        Watch {
            watched: self,
            strangers: Arc::new(strangers.map(|(ends, _)| ends).collect()),
        }
    }
}

/// What is watched, and which sockets were there before and are not the
/// gateway's.
#[derive(Clone, Debug)]
pub struct Watch {
    watched: Watched,
    strangers: Arc<HashSet<Ends>>,
}

impl Watch {
    /// As [`Watched::process`].
    #[must_use]
    pub fn process(&self) -> Option<ProcessUse> {
        self.watched.process()
    }

    /// The gateway's sockets now.
    #[must_use]
    pub fn sockets(&self) -> Sockets {
        self.watched.sockets_but(&self.strangers)
    }
}

/// The ports of a connection, with the hash of its addresses: two connections
/// between the same ports differ by them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Ends {
    local: u16,
    remote: u16,
    addresses: u64,
}

/// A line of the kernel's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Socket {
    ends: Ends,
    state: &'static str,
    /// 0 if it is no process's any more.
    inode: u64,
}

fn each_socket(mut see: impl FnMut(Socket)) {
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let text = fs::read_to_string(table).unwrap_or_default();
        text.lines().skip(1).filter_map(socket).for_each(&mut see);
    }
}

/// Inodes of the sockets that these processes hold.
fn inodes(pids: &[u32]) -> HashSet<u64> {
    let descriptors = pids
        .iter()
        .filter_map(|pid| fs::read_dir(format!("/proc/{pid}/fd")).ok());
    let links = descriptors.flatten().flatten();
    let links = links.filter_map(|entry| fs::read_link(entry.path()).ok());
    links
        .filter_map(|link| {
            let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
            inode.parse().ok()
        })
        .collect()
}

fn socket(line: &str) -> Option<Socket> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let mut addresses = DefaultHasher::new();
    let mut port = || {
        let (address, port) = fields.next()?.rsplit_once(':')?;
        address.hash(&mut addresses);
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
    Some(Socket {
        ends: Ends {
            local,
            remote,
            addresses: addresses.finish(),
        },
        state,
        inode: fields.nth(5).and_then(|i| i.parse().ok()).unwrap_or(0),
    })
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
        let line = "   1: 0100007F:80C6 0100007F:AB8B 06 00000000:00000000 03:000001B2 00000000     0        0 77";
        let socket = socket(line).expect("a socket");
        assert_eq!((socket.ends.local, socket.ends.remote), (0x80C6, 0xAB8B));
        assert_eq!((socket.state, socket.inode), ("TIME_WAIT", 77));
    }

    #[test]
    fn what_was_there_before_and_is_nobodys_is_not_counted() {
        use std::net::{TcpListener, TcpStream};
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let addr = listener.local_addr().expect("bound");
        let pair = || {
            let client = TcpStream::connect(addr).expect("connects");
            (client, listener.accept().expect("accepts").0)
        };
        // The listener's side closes first: its end stays in TIME_WAIT.
        let linger = |(client, server): (TcpStream, TcpStream)| {
            drop(server);
            drop(client);
        };
        let kept = pair();
        linger(pair());
        let mut watched = Watched {
            pid: Some(std::process::id()),
            listen: addr.port(),
            upstream: None,
        };
        let waiting = |sockets: Sockets| sockets.count("TIME_WAIT");
        assert_eq!(waiting(watched.sockets()), 1);
        let ours = watched.from_now();
        // A process that holds none of them.
        watched.pid = Some(999_999_999);
        let theirs = watched.from_now();
        assert_eq!(waiting(ours.sockets()), 0);
        assert_eq!(ours.sockets().count("ESTABLISHED"), 1);
        assert_eq!(theirs.sockets().count("ESTABLISHED"), 0);
        linger(pair());
        assert_eq!(waiting(ours.sockets()), 1);
        linger(kept);
        assert_eq!(waiting(ours.sockets()), 2, "it was the process's own");
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
