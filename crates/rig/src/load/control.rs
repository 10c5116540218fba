//! Asking a fake upstream in another process for the truth.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use crate::raw::RawClient;
use crate::script::Script;
use crate::truth::Truth;

/// A fake upstream's control paths.
#[derive(Clone, Copy, Debug)]
pub struct Control {
    /// Where it listens.
    pub addr: SocketAddr,
}

impl Control {
    async fn ask(&self, method: &str, path: &str, body: &[u8]) -> io::Result<Vec<u8>> {
        let mut client = RawClient::connect(self.addr).await?;
        client.request(method, path, &[], body).await?;
        let head = client.head().await?;
        let (answer, _) = client.rest().await?;
        if head.status != 200 {
            let why = String::from_utf8_lossy(&answer).into_owned();
            return Err(io::Error::other(why));
        }
        // A close would leave a socket in TIME_WAIT that looks like one of the
        // gateway's.
        client.leave_rst()?;
        Ok(answer)
    }

    /// The counts, now.
    pub async fn truth(&self) -> io::Result<Truth> {
        let json = self.ask("GET", "/__rig/truth", b"").await?;
        serde_json::from_slice(&json).map_err(io::Error::other)
    }

    /// Forgets the counts.
    pub async fn reset(&self) -> io::Result<()> {
        self.ask("POST", "/__rig/reset", b"").await.map(drop)
    }

    /// Resets all connections, the one that asks for it too: there may be no
    /// answer.
    pub async fn cut(&self) {
        let _ = self.ask("POST", "/__rig/cut", b"").await;
    }

    /// The default script.
    pub async fn script_now(&self) -> io::Result<Script> {
        let json = self.ask("GET", "/__rig/script", b"").await?;
        serde_json::from_slice(&json).map_err(io::Error::other)
    }

    /// Sets the default script.
    pub async fn script(&self, script: &Script) -> io::Result<()> {
        let json = serde_json::to_vec(script).map_err(io::Error::other)?;
        self.ask("PUT", "/__rig/script", &json).await.map(drop)
    }

    /// Waits until nothing runs; the counts then, or at the end of `within`.
    pub async fn quiet(&self, within: Duration) -> io::Result<Truth> {
        let until = tokio::time::Instant::now() + within;
        loop {
            let truth = self.truth().await?;
            if truth.running == 0 || tokio::time::Instant::now() >= until {
                return Ok(truth);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
