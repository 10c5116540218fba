//! A fake model server that can be told to misbehave and that counts the truth.

mod answer;
mod black_hole;
mod connection;
mod control;
mod dress;
mod gone;
mod h2_front;
mod pen;
mod request;

pub use black_hole::BlackHole;
pub use h2_front::{H2Front, H2Options, H2Truth};

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::{Semaphore, watch};
use tokio::task::{AbortHandle, JoinSet};

use crate::script::{Accept, Script};
use crate::truth::{CallTruth, Ledger, PeerEnd, Truth};

/// What all connections of one fake upstream share.
#[derive(Debug)]
struct Shared {
    ledger: Ledger,
    script: watch::Sender<Arc<Script>>,
    known: Mutex<HashMap<String, Arc<Script>>>,
    slots: Option<Semaphore>,
    cut: watch::Sender<PeerEnd>,
}

impl Shared {
    fn script(&self) -> Arc<Script> {
        self.script.borrow().clone()
    }

    /// The default script changed by this JSON text; kept, as the same text
    /// comes with every call of a load.
    fn scripted(&self, text: &str) -> Result<Arc<Script>, String> {
        const KEPT: usize = 256;
        let lock = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(script) = lock().get(text) {
            return Ok(script.clone());
        }
        let change = serde_json::from_str(text).map_err(|e| format!("rig: {e}"))?;
        let script = self.script().changed(change);
        let script = Arc::new(script.map_err(|e| format!("rig: {e}"))?);
        let mut known = lock();
        if known.len() == KEPT {
            known.clear();
        }
        known.insert(text.to_owned(), script.clone());
        Ok(script)
    }
}

/// A fake model server on a TCP port. Dropping it ends it and everything it
/// has open.
#[derive(Debug)]
pub struct FakeUpstream {
    addr: SocketAddr,
    shared: Arc<Shared>,
    task: AbortHandle,
}

impl FakeUpstream {
    /// How many calls are kept one by one.
    pub const CALLS_KEPT: usize = 20_000;

    /// Listens on `addr` (port 0: any) and serves `default` unless a request
    /// brings changes of its own.
    pub async fn start(addr: SocketAddr, default: Script) -> io::Result<Self> {
        Self::start_keeping(addr, default, Self::CALLS_KEPT).await
    }

    /// As [`FakeUpstream::start`], keeping the last `kept` calls one by one.
    pub async fn start_keeping(addr: SocketAddr, default: Script, kept: usize) -> io::Result<Self> {
        let listener = listen(addr)?;
        let addr = listener.local_addr()?;
        let slots = default.slots.map(|n| Semaphore::new(n as usize));
        let shared = Arc::new(Shared {
            ledger: Ledger::new(kept),
            script: watch::Sender::new(Arc::new(default)),
            known: Mutex::default(),
            slots,
            cut: watch::Sender::new(PeerEnd::Fin),
        });
        let serve = serve(addr, listener, shared.clone());
        let task = tokio::spawn(serve).abort_handle();
        Ok(Self { addr, shared, task })
    }

    /// Where it listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The counts, now.
    #[must_use]
    pub fn truth(&self) -> Truth {
        self.shared.ledger.truth()
    }

    /// The calls, oldest first.
    #[must_use]
    pub fn calls(&self) -> Vec<CallTruth> {
        self.shared.ledger.calls()
    }

    /// Waits for the counts to satisfy `what`; the counts at the end of
    /// `within` if they never did.
    pub async fn wait_for(
        &self,
        what: impl Fn(&Truth) -> bool,
        within: Duration,
    ) -> Result<Truth, Truth> {
        let found = self
            .shared
            .ledger
            .wait_for(within, |truth, _| what(truth).then_some(*truth))
            .await;
        found.ok_or_else(|| self.truth())
    }

    /// Waits for a call that satisfies `what`; all calls if there is none.
    pub async fn wait_for_call(
        &self,
        what: impl Fn(&CallTruth) -> bool,
        within: Duration,
    ) -> Result<CallTruth, Vec<CallTruth>> {
        let found = self
            .shared
            .ledger
            .wait_for(within, |_, calls| calls.iter().find(|c| what(c)).cloned())
            .await;
        found.ok_or_else(|| self.calls())
    }

    /// Changes the default script for requests to come. With
    /// [`Accept::Refuse`] the listener is closed until a later script opens it
    /// again on the same port.
    pub fn set_default(&self, script: Script) {
        self.shared.set_default(script);
    }

    /// Forgets counts and calls; what is open or running stays counted.
    pub fn reset(&self) {
        self.shared.ledger.reset();
    }

    /// Breaks all open connections in one moment.
    pub fn cut_all(&self, how: PeerEnd) {
        self.shared.cut.send_replace(how);
    }

    /// Ends it as a killed process would: all sockets closed at once.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for FakeUpstream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = match addr {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    socket.listen(8192)
}

async fn serve(addr: SocketAddr, listener: TcpListener, shared: Arc<Shared>) {
    let mut listener = Some(listener);
    let mut connections = JoinSet::new();
    let mut script = shared.script.subscribe();
    loop {
        let refuse = script.borrow_and_update().accept == Accept::Refuse;
        if refuse {
            listener = None;
        } else if listener.is_none() {
            listener = listen(addr).ok();
        }
        let accept = async {
            match &listener {
                Some(l) => l.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = script.changed() => {}
            Some(_) = connections.join_next() => {}
            accepted = accept => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(connection::serve(stream, shared.clone()));
                }
                // Out of descriptors: the next close makes room.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            },
        }
    }
}
