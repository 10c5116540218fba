//! The fake upstream behind the gateway, as the storm sees it.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use crate::load::Control;
use crate::{FakeUpstream, PeerEnd, Script, Truth};

/// Where the truth comes from.
#[derive(Clone, Debug)]
pub enum Source {
    /// A fake upstream of this process.
    Ours(Arc<Ours>),
    /// One that runs elsewhere, and what it does by default.
    Theirs(Control, Box<Script>),
}

/// A fake upstream on a thread of its own, ended when this is dropped.
#[derive(Debug)]
pub struct Ours {
    upstream: FakeUpstream,
    default: Script,
    _stop: oneshot::Sender<()>,
}

impl Source {
    /// Starts one on `addr`.
    pub fn start(addr: SocketAddr, default: Script) -> io::Result<Self> {
        let (started, is_started) = mpsc::channel();
        let (stop, stopped) = oneshot::channel();
        let script = default.clone();
        std::thread::Builder::new()
            .name("upstream".to_owned())
            .spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build();
                let runtime = match runtime {
                    Ok(runtime) => runtime,
                    Err(e) => return drop(started.send(Err(e))),
                };
                runtime.block_on(async {
                    // Nobody to tell if the starter has gone.
                    let _ = started.send(FakeUpstream::start_keeping(addr, script, 0).await);
                    let _ = stopped.await;
                });
            })?;
        let upstream = is_started
            .recv()
            .map_err(io::Error::other)?
            .map_err(|e| io::Error::other(format!("--upstream-listen {addr}: {e}")))?;
        Ok(Self::Ours(Arc::new(Ours {
            upstream,
            default,
            _stop: stop,
        })))
    }

    /// Where it listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        match self {
            Self::Ours(ours) => ours.upstream.addr(),
            Self::Theirs(control, _) => control.addr,
        }
    }

    /// The counts, now.
    pub async fn truth(&self) -> io::Result<Truth> {
        match self {
            Self::Ours(ours) => Ok(ours.upstream.truth()),
            Self::Theirs(control, _) => control.truth().await,
        }
    }

    /// Waits until nothing runs, or until `within` has passed.
    pub(super) async fn quiet(&self, within: Duration) -> io::Result<()> {
        let until = Instant::now() + within;
        while self.truth().await?.running > 0 && Instant::now() < until {
            sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// An error while calls run that are not this storm's: they would be
    /// counted as the gateway's, and its own as theirs.
    pub async fn unused(&self) -> io::Result<()> {
        /// What a gateway closes takes a moment to be seen.
        const WITHIN: Duration = Duration::from_secs(5);
        self.quiet(WITHIN).await?;
        match self.truth().await?.running {
            0 => Ok(()),
            n => Err(io::Error::other(format!(
                "the upstream at {}: {n} calls of somebody else run there; is it another storm's?",
                self.addr()
            ))),
        }
    }

    /// Forgets the counts.
    pub(super) async fn reset(&self) -> io::Result<()> {
        match self {
            Self::Ours(ours) => {
                ours.upstream.reset();
                Ok(())
            }
            Self::Theirs(control, _) => control.reset().await,
        }
    }

    /// Makes it what a scenario needs, or what it was at the start.
    pub(super) async fn prepare(&self, script: Option<Script>) -> io::Result<()> {
        match (self, script) {
            (Self::Ours(ours), script) => {
                let script = script.unwrap_or_else(|| ours.default.clone());
                ours.upstream.set_default(script);
                Ok(())
            }
            (Self::Theirs(control, _), Some(script)) => control.script(&script).await,
            (Self::Theirs(control, default), None) => control.script(default).await,
        }
    }

    /// Ends what still runs.
    pub(super) async fn cut(&self) {
        match self {
            Self::Ours(ours) => ours.upstream.cut_all(PeerEnd::Rst),
            Self::Theirs(control, _) => {
                if self.truth().await.is_ok_and(|t| t.running > 0) {
                    control.cut().await;
                }
            }
        }
    }
}
