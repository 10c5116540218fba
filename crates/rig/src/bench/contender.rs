//! The gateways that are compared, each started as one would tune it for
//! event streams.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

/// The kinds of contender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// No proxy at all.
    Direct,
    /// nginx.
    Nginx,
    /// HAProxy.
    Haproxy,
    /// Tidegate.
    Tidegate,
    /// The naive proxy.
    Naive,
}

impl Kind {
    /// Its name in results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Nginx => "nginx",
            Self::Haproxy => "HAProxy",
            Self::Tidegate => "Tidegate",
            Self::Naive => "naive",
        }
    }
}

/// A running contender.
#[derive(Debug)]
pub struct Contender {
    addr: SocketAddr,
    child: Option<Child>,
    dir: Option<PathBuf>,
}

impl Contender {
    /// Starts `program` in front of `upstream` and waits until it accepts.
    pub async fn start(kind: Kind, program: &Path, upstream: SocketAddr) -> io::Result<Self> {
        if kind == Kind::Direct {
            return Ok(Self {
                addr: upstream,
                child: None,
                dir: None,
            });
        }
        let addr = crate::free_port()?;
        let dir = std::env::temp_dir().join(format!(
            "rig-{}-{}",
            kind.name().to_lowercase(),
            addr.port()
        ));
        std::fs::create_dir_all(&dir)?;
        let mut command = command(kind, program, upstream, addr, &dir)?;
        let log = std::fs::File::create(dir.join("log"))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| io::Error::other(format!("{}: {e}", program.display())))?;
        let mut contender = Self {
            addr,
            child: Some(child),
            dir: Some(dir),
        };
        contender.accepts().await?;
        Ok(contender)
    }

    async fn accepts(&mut self) -> io::Result<()> {
        let until = Instant::now() + Duration::from_secs(10);
        while TcpStream::connect(self.addr).await.is_err() {
            let ended = match &mut self.child {
                Some(child) => child.try_wait()?,
                None => None,
            };
            if ended.is_some() || Instant::now() > until {
                let log = self.dir.as_ref().map(|d| d.join("log"));
                let log = log.and_then(|l| std::fs::read_to_string(l).ok());
                return Err(io::Error::other(format!(
                    "it does not listen: {}",
                    log.unwrap_or_default().trim()
                )));
            }
            sleep(Duration::from_millis(20)).await;
        }
        // The probing connection is gone before the measurement.
        sleep(Duration::from_millis(200)).await;
        Ok(())
    }

    /// Where it listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref()?.id()
    }

    /// Ends it: asked first, then killed.
    pub async fn stop(mut self) {
        let pid = self.pid();
        if let (Some(child), Some(pid)) = (&mut self.child, pid) {
            let asked = Command::new("kill").arg(pid.to_string()).status().await;
            if asked.is_err() || timeout(Duration::from_secs(3), child.wait()).await.is_err() {
                // Gone already is as good.
                let _ = child.kill().await;
            }
        }
    }
}

impl Drop for Contender {
    fn drop(&mut self) {
        if let Some(dir) = &self.dir {
            // Only a temporary directory is left behind if this fails.
            let _ = std::fs::remove_dir_all(dir);
        }
    }
}

fn command(
    kind: Kind,
    program: &Path,
    upstream: SocketAddr,
    listen: SocketAddr,
    dir: &Path,
) -> io::Result<Command> {
    let mut command = Command::new(program);
    match kind {
        Kind::Direct => {}
        Kind::Nginx => {
            let conf = dir.join("nginx.conf");
            std::fs::write(&conf, nginx(upstream, listen, dir))?;
            command.arg("-p").arg(dir).arg("-c").arg(conf);
        }
        Kind::Haproxy => {
            let conf = dir.join("haproxy.cfg");
            std::fs::write(&conf, haproxy(upstream, listen))?;
            command.arg("-db").arg("-f").arg(conf);
        }
        Kind::Tidegate => {
            command
                .arg("serve")
                .args(["--upstream", &format!("http://{upstream}")])
                .args(["--listen", &listen.to_string()])
                .args(["--admin", &crate::free_port()?.to_string()])
                .args(["--slots", "20000", "--queue", "20000"]);
        }
        Kind::Naive => {
            command
                .arg("naive-proxy")
                .args(["--upstream", &upstream.to_string()])
                .args(["--listen", &listen.to_string()]);
        }
    }
    Ok(command)
}

fn nginx(upstream: SocketAddr, listen: SocketAddr, dir: &Path) -> String {
    let dir = dir.display();
    format!(
        "daemon off;
worker_processes 2;
worker_rlimit_nofile 20000;
pid {dir}/nginx.pid;
error_log {dir}/error.log crit;
events {{ worker_connections 16000; }}
http {{
  access_log off;
  tcp_nodelay on;
  keepalive_requests 10000000;
  keepalive_timeout 75s;
  client_max_body_size 64m;
  client_body_temp_path {dir}/body;
  proxy_temp_path {dir}/proxy;
  fastcgi_temp_path {dir}/fastcgi;
  uwsgi_temp_path {dir}/uwsgi;
  scgi_temp_path {dir}/scgi;
  upstream model {{
    server {upstream};
    keepalive 1024;
    keepalive_requests 10000000;
  }}
  server {{
    listen {listen} reuseport backlog=4096;
    location / {{
      proxy_pass http://model;
      proxy_http_version 1.1;
      proxy_set_header Connection \"\";
      proxy_buffering off;
      proxy_next_upstream off;
      proxy_read_timeout 3600s;
      proxy_send_timeout 3600s;
    }}
  }}
}}
"
    )
}

fn haproxy(upstream: SocketAddr, listen: SocketAddr) -> String {
    format!(
        "global
  nbthread 2
  maxconn 9900
defaults
  mode http
  option http-no-delay
  option abortonclose
  http-reuse always
  retries 0
  timeout connect 5s
  timeout client 1h
  timeout server 1h
  timeout http-keep-alive 75s
frontend clients
  bind {listen} backlog 4096
  default_backend model
backend model
  server one {upstream} pool-max-conn 1024
"
    )
}
