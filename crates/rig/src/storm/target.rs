//! The gateway a storm goes to, and its process.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::process::Command;
use tokio::time::timeout;

use super::Source;
use crate::load::{Watched, family};

/// A gateway.
#[derive(Clone, Debug)]
pub struct Gateway {
    /// Its name in comparisons.
    pub name: String,
    /// Where it listens.
    pub addr: SocketAddr,
    /// Host and port as they were given.
    host: String,
    /// Request path.
    pub path: String,
    /// Further request headers.
    pub headers: Vec<(String, String)>,
    /// Model asked for.
    pub model: String,
    /// Its process; its children are counted with it.
    pub pid: Option<u32>,
    /// Why its process is not looked at, if it is known to be there.
    pub unseen: Option<String>,
}

impl Gateway {
    /// Reads `http://host:port`; resolves the name.
    pub fn at(url: &str) -> Result<Self, String> {
        let rest = match url.split_once("://") {
            Some(("http", rest)) => rest,
            Some((scheme, _)) => {
                return Err(format!(
                    "{url:?}: {scheme} is not spoken here; give http://HOST:PORT"
                ));
            }
            None => url,
        };
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        let port = |text: &str| {
            text.rsplit_once(':')
                .is_some_and(|(_, p)| p.parse::<u16>().is_ok())
        };
        let full = if port(host) {
            host.to_owned()
        } else {
            format!("{host}:80")
        };
        let addr = full
            .to_socket_addrs()
            .map_err(|e| format!("{url:?}: {e}"))?
            .next()
            .ok_or_else(|| format!("{url:?}: the name has no address"))?;
        Ok(Self {
            name: "gateway".to_owned(),
            addr,
            host: full,
            path: match path {
                "" => "/v1/chat/completions".to_owned(),
                path => format!("/{path}"),
            },
            headers: Vec::new(),
            model: "tiny".to_owned(),
            pid: None,
            unseen: None,
        })
    }

    /// No gateway at all: the upstream itself.
    #[must_use]
    pub fn direct(upstream: SocketAddr) -> Self {
        Self {
            name: "direct".to_owned(),
            addr: upstream,
            host: upstream.to_string(),
            path: "/v1/chat/completions".to_owned(),
            headers: Vec::new(),
            model: "tiny".to_owned(),
            pid: None,
            unseen: None,
        }
    }

    /// As it is shown.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.host)
    }

    pub(super) fn request(&self, json: &str) -> Vec<u8> {
        let mut headers = vec![("host", self.host.as_str())];
        headers.extend(self.headers.iter().map(|(n, v)| (n.as_str(), v.as_str())));
        crate::raw::request_bytes("POST", &self.path, &headers, json.as_bytes())
    }

    /// Whether an upstream that listens there is what users talk to: no gateway
    /// at all.
    #[must_use]
    pub fn is(&self, upstream: SocketAddr) -> bool {
        let same = upstream.ip() == self.addr.ip() || upstream.ip().is_unspecified();
        same && upstream.port() == self.addr.port()
    }

    pub(super) fn watched(&self, source: Option<&Source>) -> Watched {
        let upstream = source.map(Source::addr).filter(|a| !self.is(*a));
        Watched {
            pid: self.pid,
            listen: self.addr.port(),
            upstream: upstream.map(|a| a.port()),
        }
    }

    /// Whether anybody is there.
    pub async fn reachable(&self) -> io::Result<()> {
        let why = match timeout(Duration::from_secs(5), TcpStream::connect(self.addr)).await {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(e)) => e.kind().to_string(),
            Err(_) => "no answer in 5 s".to_owned(),
        };
        Err(io::Error::other(format!(
            "no gateway at {}: {why}",
            self.url()
        )))
    }

    /// Checks the process given, or finds the one that listens.
    pub fn find_process(&mut self, given: Option<u32>) -> Result<(), String> {
        let owner = owner_of(self.addr.port());
        let Some(pid) = given else {
            self.found(owner);
            return Ok(());
        };
        if !alive(pid) {
            return Err(format!("--pid {pid}: no such process"));
        }
        // It would be counted with the load, and `drain` would end it.
        if ancestors().contains(&pid) {
            return Err(format!(
                "--pid {pid} ({}): it has started this storm; give the gateway's own process",
                name_of(pid)
            ));
        }
        if !readable(pid) {
            return Err(format!(
                "--pid {pid} ({}): it belongs to somebody else; run this as its user or as root",
                name_of(pid)
            ));
        }
        let inodes = listening(self.addr.port());
        if !family(pid).iter().any(|pid| holds(*pid, &inodes)) {
            let who = owner.map_or_else(
                || "no process of ours".to_owned(),
                |pid| format!("pid {pid} ({})", name_of(pid)),
            );
            return Err(format!(
                "--pid {pid} ({}): it does not listen on port {}; {who} does",
                name_of(pid),
                self.addr.port()
            ));
        }
        self.pid = Some(pid);
        Ok(())
    }

    /// Takes the process that listens, unless it is only a part of the gateway:
    /// the workers of a server that somebody else has started.
    fn found(&mut self, owner: Option<u32>) {
        let port = self.addr.port();
        let hidden = match owner {
            None if self.addr.ip().is_loopback() && !listening(port).is_empty() => {
                Some(format!("the process that listens on port {port}"))
            }
            Some(pid) => parent(pid)
                .filter(|up| name_of(*up) == name_of(pid) && !readable(*up))
                .map(|up| format!("pid {up} ({})", name_of(up))),
            None => None,
        };
        self.pid = owner.filter(|_| hidden.is_none());
        self.unseen = hidden.map(|who| {
            format!(
                "{}: {who} belongs to somebody else, and nothing of it is measured; run this as its user or as root",
                self.url()
            )
        });
    }

    /// Asks the process to end.
    pub(super) fn terminate(&self) -> Result<(), String> {
        let pid = self
            .pid
            .ok_or("drain: the gateway's process is not known")?;
        let asked = std::process::Command::new("kill")
            .arg(pid.to_string())
            .status();
        match asked {
            Ok(status) if status.success() => Ok(()),
            _ => Err(format!("drain: SIGTERM could not be sent to pid {pid}")),
        }
    }
}

/// Whether a process runs; one that waits to be reaped does not.
pub(super) fn alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat
        .rsplit_once(") ")
        .and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| state != 'Z')
}

/// Whether this process may look into that one.
fn readable(pid: u32) -> bool {
    fs::read_dir(format!("/proc/{pid}/fd")).is_ok()
}

fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = stat.rsplit_once(") ")?;
    let parent = fields.split_ascii_whitespace().nth(1)?.parse().ok()?;
    (parent > 0).then_some(parent)
}

/// The processes that have started this one.
fn ancestors() -> HashSet<u32> {
    std::iter::successors(parent(std::process::id()), |pid| parent(*pid)).collect()
}

fn name_of(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim().to_owned()
}

/// Inodes of the sockets that listen on a port.
fn listening(port: u16) -> HashSet<String> {
    let mut inodes = HashSet::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let text = fs::read_to_string(table).unwrap_or_default();
        for line in text.lines().skip(1) {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            let local = fields.get(1).and_then(|f| f.rsplit_once(':'));
            let is_port = local.is_some_and(|(_, p)| u16::from_str_radix(p, 16) == Ok(port));
            if is_port && fields.get(3) == Some(&"0A") {
                inodes.extend(fields.get(9).map(|inode| format!("socket:[{inode}]")));
            }
        }
    }
    inodes
}

fn holds(pid: u32, inodes: &HashSet<String>) -> bool {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else {
        return false;
    };
    descriptors
        .flatten()
        .any(|fd| fs::read_link(fd.path()).is_ok_and(|to| inodes.contains(&*to.to_string_lossy())))
}

/// The process that listens on a port, if it can be seen; of several, the
/// oldest, which is the parent of the others. Whoever has started this program
/// is not it, though it may have opened the port.
#[must_use]
pub fn owner_of(port: u16) -> Option<u32> {
    let inodes = listening(port);
    if inodes.is_empty() {
        return None;
    }
    let pids = fs::read_dir("/proc").ok()?.flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let ours = ancestors();
    pids.filter(|pid| !ours.contains(pid) && holds(*pid, &inodes))
        .min()
}

/// Runs `ip` with these arguments.
pub(super) async fn ip(arguments: &[&str]) -> io::Result<()> {
    let output = Command::new("ip").args(arguments).output().await;
    let output = output.map_err(|e| io::Error::other(format!("`ip` (package iproute2): {e}")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!(
        "ip {}: {}",
        arguments.join(" "),
        said.trim()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_or_refused_in_clear_words() {
        let gateway = Gateway::at("http://127.0.0.1:8080/v1/messages").expect("good");
        assert_eq!(
            (gateway.addr.port(), gateway.path.as_str()),
            (8080, "/v1/messages")
        );
        assert_eq!(
            Gateway::at("127.0.0.1:9").expect("good").path,
            "/v1/chat/completions"
        );
        for (url, word) in [
            ("https://127.0.0.1:8080", "https is not spoken"),
            ("http://no-such-host.invalid:1", "no-such-host"),
            ("http://", "http://"),
        ] {
            let error = Gateway::at(url).expect_err(url);
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn no_gateway_is_known_by_its_address() {
        let upstream = |text: &str| text.parse().expect("an address");
        let gateway = Gateway::direct(upstream("127.0.0.1:8000"));
        assert!(gateway.is(upstream("127.0.0.1:8000")) && gateway.is(upstream("0.0.0.0:8000")));
        assert!(!gateway.is(upstream("0.0.0.0:8001")) && !gateway.is(upstream("127.0.0.2:8000")));
    }

    #[test]
    fn a_listener_has_an_owner_and_others_are_told() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let addr = listener.local_addr().expect("bound");
        assert_eq!(owner_of(addr.port()), Some(std::process::id()));
        let mut gateway = Gateway::direct(addr);
        gateway.find_process(None).expect("found");
        assert_eq!(gateway.pid, Some(std::process::id()));
        let mut other = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .expect("starts");
        for pid in [other.id(), 999_999_999] {
            let error = gateway.find_process(Some(pid)).expect_err("not ours");
            assert!(error.contains(&format!("--pid {pid}")), "{error}");
        }
        other.kill().and_then(|()| other.wait()).expect("ends");
    }
}
