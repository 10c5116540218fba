//! The fake upstream as a process of its own.

use std::io;
use std::net::SocketAddr;
use std::process::Stdio;

use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

/// A running fake upstream.
#[derive(Debug)]
pub(super) struct Upstream {
    child: Child,
    addr: SocketAddr,
}

impl Upstream {
    /// Starts this very program as a fake upstream on a port of its own.
    pub(super) async fn start() -> io::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["fake-upstream", "--listen", "127.0.0.1:0", "--keep", "0"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let stdout = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).await?;
        let addr = line.trim().rsplit('/').next().unwrap_or_default();
        let addr = addr
            .parse()
            .map_err(|_| io::Error::other(format!("the fake upstream says {line:?}")))?;
        Ok(Self { child, addr })
    }

    pub(super) fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub(super) async fn stop(mut self) {
        // It may have died before; then there is nothing left to end.
        let _ = self.child.kill().await;
    }
}
