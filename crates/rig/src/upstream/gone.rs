//! Whether the peer has left.

use std::sync::OnceLock;

use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::truth::PeerEnd;

/// Set once, when the peer is seen to be gone.
#[derive(Debug, Default)]
pub(super) struct Gone {
    how: OnceLock<(PeerEnd, Instant)>,
    notify: Notify,
}

impl Gone {
    pub(super) fn get(&self) -> Option<PeerEnd> {
        self.how.get().map(|(how, _)| *how)
    }

    /// Notes how the peer left; false if that was known already.
    pub(super) fn set(&self, how: PeerEnd) -> bool {
        let first = self.how.set((how, Instant::now())).is_ok();
        self.notify.notify_waiters();
        first
    }

    /// Waits until the peer is gone; since when it is.
    pub(super) async fn wait(&self) -> Instant {
        loop {
            let notified = self.notify.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if let Some((_, at)) = self.how.get() {
                return *at;
            }
            notified.await;
        }
    }
}

/// Reads what is there into `buf`; an end is how the peer left.
pub(super) async fn fill(stream: &TcpStream, buf: &mut Vec<u8>) -> Result<usize, PeerEnd> {
    loop {
        // See `Pen::put`.
        tokio::task::coop::consume_budget().await;
        // A peer that vanished with an error counts as a reset.
        stream.readable().await.map_err(|_| PeerEnd::Rst)?;
        buf.reserve(4096);
        match stream.try_read_buf(buf) {
            Ok(0) => return Err(PeerEnd::Fin),
            Ok(n) => return Ok(n),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return Err(PeerEnd::Rst),
        }
    }
}
