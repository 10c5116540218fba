//! Users whose machines vanish: clients in a network namespace of their own,
//! whose cable is pulled.

use std::io::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::live::Live;
use super::scenario::{Plan, Scenario};
use super::series::Series;
use super::target::ip;
use super::{Early, Gateway, Source};
use crate::load::{Conn, Report};

/// What this program is told when it plays the clients.
#[derive(Clone, Debug, Args)]
pub struct VanishArgs {
    /// Where the gateway is, seen from the namespace
    #[arg(long, hide = true, value_name = "ADDRESS")]
    vanish_clients: Option<SocketAddr>,
    /// The bytes of each request
    #[arg(long, hide = true, value_name = "FILE", requires = "vanish_clients")]
    vanish_request: Option<std::path::PathBuf>,
}

impl VanishArgs {
    /// Where to, and what, if this program plays the clients.
    #[must_use]
    pub fn asked(&self) -> Option<(SocketAddr, &std::path::Path)> {
        Some((self.vanish_clients?, self.vanish_request.as_deref()?))
    }
}

/// Opens streams, says `ready` when each has begun, and reads on until killed.
pub async fn clients(to: SocketAddr, request: &std::path::Path, users: usize) -> io::Result<()> {
    let request: Arc<[u8]> = std::fs::read(request)?.into();
    let mut streams = JoinSet::new();
    for _ in 0..users {
        let mut conn = Conn::connect(to, None).await?;
        conn.send(&request).await?;
        let status = conn.head().await?;
        if status != 200 || conn.body().await?.is_none() {
            return Err(io::Error::other(format!("status {status}, or no event")));
        }
        streams.spawn(async move { while conn.body().await.is_ok_and(|b| b.is_some()) {} });
    }
    writeln!(io::stdout(), "ready")?;
    while streams.join_next().await.is_some() {}
    Ok(())
}

/// A network namespace with a cable to this one, removed with it.
struct Namespace {
    name: String,
    ours: String,
    theirs: String,
}

/// Addresses of the cable's ends: a network for documentation, so that it is
/// nobody's.
const OURS: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
const THEIRS: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);

impl Namespace {
    async fn new() -> io::Result<Self> {
        let id = std::process::id() % 100_000;
        let namespace = Self {
            name: format!("storm{id}"),
            ours: format!("stormA{id}"),
            theirs: format!("stormB{id}"),
        };
        let (name, ours, theirs) = (&*namespace.name, &*namespace.ours, &*namespace.theirs);
        ip(&["netns", "add", name]).await?;
        ip(&[
            "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name,
        ])
        .await?;
        ip(&["addr", "add", &format!("{OURS}/30"), "dev", ours]).await?;
        ip(&["link", "set", ours, "up"]).await?;
        ip(&[
            "-n",
            name,
            "addr",
            "add",
            &format!("{THEIRS}/30"),
            "dev",
            theirs,
        ])
        .await?;
        ip(&["-n", name, "link", "set", theirs, "up"]).await?;
        Ok(namespace)
    }

    /// From now on nothing gets through, and nobody is told.
    async fn pull(&self) -> io::Result<()> {
        ip(&["-n", &self.name, "link", "set", &self.theirs, "down"]).await
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        for arguments in [["link", "del", &self.ours], ["netns", "del", &self.name]] {
            // What is gone already need not be removed.
            let _ = std::process::Command::new("ip")
                .args(arguments)
                .stderr(Stdio::null())
                .status();
        }
    }
}

/// The scenario; `program` plays the clients. An error means that it could not
/// begin.
pub async fn vanish(
    gateway: &Gateway,
    source: Option<&Source>,
    plan: &Plan,
    program: &std::path::Path,
) -> io::Result<Report> {
    let source = source.ok_or_else(|| {
        io::Error::other(
            "vanish: only the upstream knows what runs on; give --upstream or --upstream-listen",
        )
    })?;
    let namespace = Namespace::new()
        .await
        .map_err(|e| io::Error::other(format!("vanish needs a network namespace: {e}")))?;
    let to = SocketAddr::new(IpAddr::V4(OURS), gateway.addr.port());
    let ask = format!("tidegate-vanish-{}", std::process::id());
    let file = std::env::temp_dir().join(ask);
    let body = serde_json::json!({
        "model": gateway.model, "stream": true,
        "messages": [{"role": "user", "content": "hello there"}],
        "rig": {"end": "never", "pace_ms": plan.pace_ms.max(1.0), "role_chunk": false},
    });
    std::fs::write(&file, gateway.request(&body.to_string()))?;
    let mut report = Report::new("vanish");
    let watched = gateway.watched(Some(source)).from_now();
    report.before = watched.process();
    let live = Arc::new(Live::default());
    let series = Series::start(
        watched.clone(),
        Some(source.clone()),
        live.clone(),
        plan.progress,
    );
    let clients = Clients {
        namespace: &namespace,
        program,
        to,
        request: &file,
    };
    let played = clients.play(plan, &live).await;
    let _ = std::fs::remove_file(&file);
    match played {
        Ok(()) => {}
        Err(e) => report.ended_early = Some(Early::Lost(e.to_string()).to_string()),
    }
    let pulled = Instant::now();
    let until = pulled + Duration::from_secs_f64(Scenario::Vanish.seconds(plan));
    while source.truth().await?.running > 0 && Instant::now() < until {
        sleep(Duration::from_millis(20)).await;
    }
    let truth = source.truth().await?;
    report.seconds = pulled.elapsed().as_secs_f64();
    report.calls = truth.calls_begun;
    report.running_after = Some(truth.running);
    report.stopped_after_seconds = (truth.running == 0).then_some(report.seconds);
    report.truth = Some(truth);
    report.after = watched.process();
    report.sockets_after = Some(watched.sockets());
    source.cut().await;
    series.into_report(&mut report);
    Ok(report)
}

/// Another process that plays the clients.
struct Clients<'a> {
    namespace: &'a Namespace,
    program: &'a std::path::Path,
    to: SocketAddr,
    request: &'a std::path::Path,
}

impl Clients<'_> {
    /// Has them open their streams, pulls the cable and ends them.
    async fn play(&self, plan: &Plan, live: &Live) -> io::Result<()> {
        let to = self.to;
        let mut child = Command::new("ip")
            .args(["netns", "exec", &self.namespace.name])
            .arg(self.program)
            .args([
                "storm",
                "--vanish-clients",
                &to.to_string(),
                "--vanish-request",
            ])
            .arg(self.request)
            .args(["--users", &plan.users.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let ready = timeout(plan.limit, ready(&mut child)).await;
        if !matches!(ready, Ok(Ok(true))) {
            let output = timeout(Duration::from_secs(1), child.wait_with_output()).await;
            let said = output
                .ok()
                .and_then(Result::ok)
                .map(|o| o.stderr)
                .unwrap_or_default();
            return Err(io::Error::other(format!(
                "the clients did not get their streams from {to}; for this scenario the gateway has to listen on all addresses (0.0.0.0): {}",
                String::from_utf8_lossy(&said).trim()
            )));
        }
        let _open: Vec<_> = (0..plan.users).map(|_| live.opened()).collect();
        self.namespace.pull().await?;
        // Their farewell goes nowhere.
        child.kill().await
    }
}

async fn ready(child: &mut Child) -> io::Result<bool> {
    let stdout = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line).await?;
    Ok(line.trim() == "ready")
}
