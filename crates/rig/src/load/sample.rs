//! What a process and its sockets look like from outside, by `/proc`.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::hash::{DefaultHasher, Hasher as _};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

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
        let nothing = Before {
            at: Instant::now(),
            strangers: HashMap::new(),
        };
        self.sockets_but(&nothing, &Peers::default())
    }

    fn sockets_but(&self, before: &Before, peers: &Peers) -> Sockets {
        let mut sockets = Sockets::default();
        let now = Instant::now();
        each_socket(|socket| {
            let ends = socket.ends;
            let straight = !peers.others && Some(ends.remote) == self.upstream;
            let upstream = || straight || peers.known.contains(&socket.peer);
            let side = if ends.local == self.listen && socket.state != "LISTEN" {
                &mut sockets.downstream
            } else if ends.local != self.listen && upstream() {
                &mut sockets.upstream
            } else {
                return;
            };
            if !before.has(&socket, now) {
                *side.entry(socket.state.to_owned()).or_insert(0) += 1;
            }
        });
        sockets
    }

    /// The same, from now on without what other runs and other gateways have
    /// left: nothing tells whose a socket in `TIME_WAIT` is but when it came.
    #[must_use]
    pub fn from_now(self) -> Watch {
        let owned = self.pid.map(|pid| inodes(&family(pid)));
        let stranger = |inode: u64| match &owned {
            // Those of a process that cannot be seen may be the gateway's.
            None => inode == 0,
            Some(owned) => !owned.contains(&inode),
        };
        let mut before = Before {
            at: Instant::now(),
            strangers: HashMap::new(),
        };
        each_socket(|socket| {
            if stranger(socket.inode) {
                before.strangers.insert(socket.ends, socket);
            }
        });
        Watch {
            watched: self,
            before: Arc::new(before),
            peers: Arc::default(),
        }
    }

    /// Whom the gateway's process talks to, its own clients left out.
    fn peers(&self) -> Peers {
        let mut peers = Peers::default();
        let this = std::process::id();
        let Some(pid) = self.pid.filter(|pid| *pid != this) else {
            return peers;
        };
        let (owned, ours) = (inodes(&family(pid)), inodes(&[this]));
        let mut straight = false;
        each_socket(|socket| {
            if socket.ends.local == self.listen || socket.state != "ESTABLISHED" {
                return;
            }
            let upstream = Some(socket.ends.remote) == self.upstream;
            if owned.contains(&socket.inode) {
                peers.known.insert(socket.peer);
                straight |= upstream;
            } else {
                peers.others |= upstream && socket.inode > 0 && !ours.contains(&socket.inode);
            }
        });
        peers.others &= !straight;
        peers
    }
}

/// Whom a gateway talks to.
#[derive(Debug, Default)]
struct Peers {
    known: HashSet<Peer>,
    /// The fake upstream's clients are others: something stands between.
    others: bool,
}

/// What is watched, which sockets were there before and are not the
/// gateway's, and whom the gateway was seen to talk to.
#[derive(Clone, Debug)]
pub struct Watch {
    watched: Watched,
    before: Arc<Before>,
    peers: Arc<Mutex<Peers>>,
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
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        self.watched.sockets_but(&self.before, &peers)
    }

    /// Looks whom the gateway talks to. What stands between it and the fake
    /// upstream is known by this alone, and only while connections are open.
    pub fn look_for_peers(&self) {
        let found = self.watched.peers();
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.known.extend(found.known);
        peers.others |= found.others;
    }
}

/// Sockets of others at one moment.
#[derive(Debug)]
struct Before {
    at: Instant,
    strangers: HashMap<Ends, Socket>,
}

impl Before {
    /// Whether this socket was there then. The kernel gives the ports of a
    /// connection that waits to the next one, so that the same ends may be
    /// another socket.
    fn has(&self, socket: &Socket, now: Instant) -> bool {
        /// More than a clock tick, less than the second after which ports are
        /// given away.
        const SLACK: Duration = Duration::from_millis(500);
        let Some(then) = self.strangers.get(&socket.ends) else {
            return false;
        };
        match (then.waits, socket.waits) {
            (Some(then), Some(left)) => now + left <= self.at + then + SLACK,
            (Some(_), None) => false,
            (None, Some(_)) => true,
            (None, None) => [then.inode, 0].contains(&socket.inode),
        }
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

/// The other end of a connection: a hash of its address and port.
type Peer = u64;

/// A line of the kernel's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Socket {
    ends: Ends,
    peer: Peer,
    state: &'static str,
    /// 0 if it is no process's any more.
    inode: u64,
    /// In `TIME_WAIT`: how long it still waits.
    waits: Option<Duration>,
}

fn each_socket(see: impl FnMut(Socket)) {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"];
    let tables = tables.map(|table| fs::read_to_string(table).unwrap_or_default());
    each_of(&tables, see);
}

/// Each once: the kernel gives a table piece by piece, and what moves between
/// two pieces is in both.
fn each_of(tables: &[String], mut see: impl FnMut(Socket)) {
    let mut seen = HashSet::new();
    for table in tables {
        let sockets = table.lines().skip(1).filter_map(socket);
        // Those that listen on one port together have the same ends.
        let fresh = |s: &Socket| s.state == "LISTEN" || seen.insert(s.ends);
        sockets.filter(fresh).for_each(&mut see);
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
    let (local, remote) = (fields.next()?, fields.next()?);
    let port = |end: &str| u16::from_str_radix(end.rsplit_once(':')?.1, 16).ok();
    let ends = Ends {
        local: port(local)?,
        remote: port(remote)?,
        addresses: hash(&(local, remote)),
    };
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
    // Which timer runs, and for how many ticks; USER_HZ is 100.
    let ticks = fields.nth(1)?.rsplit_once(':')?.1;
    let ticks = u64::from_str_radix(ticks, 16).unwrap_or(0);
    Some(Socket {
        ends,
        peer: hash(&remote),
        state,
        inode: fields.nth(3).and_then(|i| i.parse().ok()).unwrap_or(0),
        waits: (state == "TIME_WAIT").then(|| Duration::from_millis(ticks.saturating_mul(10))),
    })
}

fn hash(what: &impl std::hash::Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish()
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
        assert_eq!(socket.waits, Some(Duration::from_millis(4340)));
    }

    #[test]
    fn a_socket_that_the_table_names_twice_is_one() {
        let line =
            |state: &str| format!("1: 0100007F:80C6 0100007F:AB8B {state} 0:0 00:0 0 0 0 7\n");
        let count = |state: &str| {
            let table = format!("head\n{}{}", line(state), line(state));
            let mut seen = 0;
            each_of(&[table], |_| seen += 1);
            seen
        };
        assert_eq!(count("01"), 1);
        // Workers that listen on one port have the same line each.
        assert_eq!(count("0A"), 2);
    }

    /// The kernel gives the ports of a connection that waits to the next one.
    #[tokio::test]
    async fn a_socket_with_the_ports_of_an_older_one_is_counted() {
        use tokio::net::{TcpListener, TcpSocket};
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let addr = listener.local_addr().expect("bound");
        let mut from = "127.0.0.1:0".parse().expect("an address");
        let mut pair = async || {
            let socket = TcpSocket::new_v4().expect("a socket");
            socket.set_reuseaddr(true).expect("an option");
            socket.bind(from).expect("the same port");
            let client = socket.connect(addr).await.expect("connects");
            from = client.local_addr().expect("bound");
            (listener.accept().await.expect("accepts").0, client)
        };
        // The listener's side closes first: its end stays in TIME_WAIT.
        drop(pair().await);
        let watch = Watched {
            pid: None,
            listen: addr.port(),
            upstream: None,
        };
        let watch = watch.from_now();
        assert_eq!(watch.sockets(), Sockets::default());
        let again = pair().await;
        assert_eq!(watch.sockets().count("ESTABLISHED"), 1);
        let waits = |sockets: &Sockets| sockets.count("TIME_WAIT");
        let end = Instant::now() + Duration::from_secs(10);
        drop(again);
        // Until a second later the old one and the new one look the same.
        while waits(&watch.sockets()) == 0 && Instant::now() < end {
            drop(pair().await);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert_eq!(watch.sockets().all(), 1, "{:?}", watch.sockets());
    }

    /// What stands between gateway and fake upstream has a port of its own.
    #[test]
    fn sockets_of_whomever_the_gateway_talks_to_are_counted() {
        use std::io::BufRead as _;
        use std::net::TcpListener;
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let talks = format!("exec 3<>/dev/tcp/127.0.0.1/{port}; read line; exec 3>&-; echo; read");
        let mut gateway = std::process::Command::new("bash")
            .args(["-c", &talks])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("starts");
        let (theirs, _) = listener.accept().expect("accepts");
        let upstream = TcpListener::bind("127.0.0.1:0").expect("a port");
        let watched = Watched {
            pid: Some(gateway.id()),
            listen: 1,
            upstream: Some(upstream.local_addr().expect("bound").port()),
        };
        let watch = watched.from_now();
        assert_eq!(watch.sockets(), Sockets::default(), "not known yet");
        watch.look_for_peers();
        // What stands between has sockets too; they are not the gateway's.
        let to = upstream.local_addr().expect("bound").port();
        let to = format!("exec 3<>/dev/tcp/127.0.0.1/{to}; read");
        let mut between = std::process::Command::new("bash")
            .args(["-c", &to])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .expect("starts");
        let _held = upstream.accept().expect("accepts");
        assert_eq!(watch.sockets().all(), 2, "not known yet");
        watch.look_for_peers();
        let open = watch.sockets();
        assert_eq!(
            (open.all(), open.upstream.get("ESTABLISHED")),
            (1, Some(&1))
        );
        let mut stdin = gateway.stdin.take().expect("piped");
        std::io::Write::write_all(&mut stdin, b"\n").expect("told");
        let mut line = String::new();
        let mut said = std::io::BufReader::new(gateway.stdout.take().expect("piped"));
        said.read_line(&mut line).expect("closed");
        drop(theirs);
        let after = watch.sockets();
        assert_eq!((after.all(), after.count("TIME_WAIT")), (1, 1), "{after:?}");
        drop((stdin, between.stdin.take()));
        gateway.wait().and_then(|_| between.wait()).expect("end");
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
        // A port may still have ends of whoever had it before.
        assert!(waiting(watched.sockets()) >= 1);
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
