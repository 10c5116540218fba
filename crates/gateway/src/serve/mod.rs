//! Sockets of the data plane: listen, accept, hand each connection to a worker, drain.
//!
//! One thread accepts; each worker is a thread with a runtime of its own, and a connection stays on the worker it was given to, together with
//! the upstream connections of its calls. New connections go to the worker with the fewest: streams are long, and a balance by hash
//! (SO_REUSEPORT) lets them pile up on one core. This module knows HTTP framing and nothing of routes; see `docs/decisions/0003`.

use std::io;
use std::net::{SocketAddr, TcpListener as StdListener, TcpStream as StdStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::telemetry::metrics::{Metrics, ReasonLabel};
use crate::upstream::connect::TcpOptions;

pub mod connection;
mod expiry;
pub mod guard;
pub mod http1;
mod malformed;
pub mod socket;
mod tail;
pub mod tls;
pub mod worker;

/// Connections that the kernel keeps until they are accepted.
const BACKLOG: i32 = 4096;
/// Accepted connections that may wait for their worker.
pub const HAND_OVER: usize = 1024;
/// What the kernel may hold for one client. Bounds how far an answer can run ahead of its reader; autotuning would go to 4 MiB.
const SEND_BUFFER: usize = 256 * 1024;
/// After a failed accept (out of descriptors), so that the loop neither ends nor spins.
const BACK_OFF: Duration = Duration::from_millis(100);

/// Sent to a connection above the limit, before any byte of it is read; the dialect is not known yet.
static TOO_MANY: LazyLock<String> = LazyLock::new(|| {
    let body = r#"{"error":{"message":"too many connections; try again","type":"overloaded_error","param":null,"code":"connections_max"}}"#;
    format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
});

/// Opens a listening socket.
pub fn bind(address: SocketAddr) -> io::Result<StdListener> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// Where accepted connections go.
#[derive(Clone, Debug)]
pub struct Lane {
    pub connections: mpsc::Sender<(StdStream, SocketAddr)>,
    pub open: Arc<AtomicUsize>,
}

/// How connections are taken.
#[derive(Debug)]
pub struct Door<'a, M> {
    pub lanes: &'a [Lane],
    /// Asked for each connection, so that a reload holds as places become free.
    pub connections_max: M,
    /// Nothing is said in clear text.
    pub tls: bool,
    pub tcp: TcpOptions,
    pub metrics: &'a Metrics,
}

/// Accepts until `stop` is ready. Errors of single connections are theirs; running out of descriptors slows accepting down and is logged once
/// per second.
///
/// Connections get their options from the listener (`tcp(7)`: inherited when the handshake is done), which spares seven system calls for each.
/// Those that were in its backlog before, as with a socket passed by systemd, are given them one by one.
///
/// # Cancel safety
///
/// Dropping the future stops accepting; accepted connections are with their workers.
pub async fn accept(
    listener: StdListener,
    door: &Door<'_, impl Fn() -> usize>,
    stop: impl Future<Output = ()>,
) -> io::Result<()> {
    prepare(&listener, door.tcp)?;
    door.take_backlog(&listener);
    let listener = TcpListener::from_std(listener)?;
    let mut stop = std::pin::pin!(stop);
    let mut complained = None;
    loop {
        let accepted = tokio::select! {
            biased;
            () = &mut stop => return Ok(()),
            accepted = listener.accept() => accepted,
        };
        // The worker registers the socket with its own reactor.
        match accepted.and_then(|(stream, peer)| Ok((stream.into_std()?, peer))) {
            Ok((stream, peer)) => door.hand_over(stream, peer),
            Err(error) if is_about_one_connection(&error) => {}
            Err(error) => {
                let reason = ReasonLabel {
                    reason: "accept_failed",
                };
                door.metrics
                    .connections_refused
                    .get_or_create(&reason)
                    .inc();
                let now = Instant::now();
                if complained.is_none_or(|last| now.duration_since(last) > Duration::from_secs(1)) {
                    complained = Some(now);
                    tracing::error!(%error, "cannot accept; raise the descriptor limit (LimitNOFILE, ulimit -n) or lower server.connections_max");
                }
                tokio::time::sleep(BACK_OFF).await;
            }
        }
    }
}

/// What every client's socket has.
fn prepare(socket: &impl AsFd, tcp: TcpOptions) -> io::Result<()> {
    tcp.apply(socket)?;
    SockRef::from(socket).set_send_buffer_size(SEND_BUFFER)
}

fn is_about_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::Interrupted
    )
}

impl<M: Fn() -> usize> Door<'_, M> {
    /// Those that are older than the listener's options.
    fn take_backlog(&self, listener: &StdListener) {
        for _ in 0..=BACKLOG {
            let Ok((stream, peer)) = listener.accept() else {
                // Empty, or something that the loop will see again.
                return;
            };
            // Fails where the client has gone already.
            if stream.set_nonblocking(true).is_ok() && prepare(&stream, self.tcp).is_ok() {
                self.hand_over(stream, peer);
            }
        }
    }

    fn hand_over(&self, stream: StdStream, peer: SocketAddr) {
        let lanes = self.lanes;
        let total: usize = lanes.iter().map(|l| l.open.load(Ordering::Relaxed)).sum();
        let lane = lanes
            .iter()
            .min_by_key(|l| l.open.load(Ordering::Relaxed))
            .filter(|_| total < (self.connections_max)());
        let Some(lane) = lane else {
            return self.refuse(&stream, "connections_max");
        };
        lane.open.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = lane.connections.try_send((stream, peer)) {
            lane.open.fetch_sub(1, Ordering::Relaxed);
            let (stream, _) = error.into_inner();
            self.refuse(&stream, "worker_busy");
        }
    }

    fn refuse(&self, mut stream: &StdStream, reason: &'static str) {
        self.metrics
            .connections_refused
            .get_or_create(&ReasonLabel { reason })
            .inc();
        if !self.tls {
            // Best effort: a client that cannot take 200 bytes at once gets the close alone.
            let _ = io::Write::write(&mut stream, TOO_MANY.as_bytes());
        }
        let _ = stream.shutdown(std::net::Shutdown::Write);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The one that waits in the backlog and the one that comes later.
    #[tokio::test]
    async fn every_connection_has_the_options() {
        let listener = bind("127.0.0.1:0".parse().expect("an address")).expect("a port");
        let at = listener.local_addr().expect("bound");
        let connect = || StdStream::connect(at).expect("connected");
        let early = connect();
        let (connections, mut accepted) = mpsc::channel(HAND_OVER);
        let lanes = [Lane {
            connections,
            open: Arc::default(),
        }];
        let metrics = Metrics::new();
        let door = Door {
            lanes: &lanes,
            connections_max: || 10,
            tls: false,
            tcp: TcpOptions {
                user_timeout: Duration::from_secs(31),
                keep_alive: Duration::from_secs(16),
            },
            metrics: &metrics,
        };
        let looks = async {
            let mut sockets = Vec::new();
            let mut clients = vec![early];
            for _ in 0..3 {
                sockets.push(accepted.recv().await.expect("accepted"));
                clients.push(connect());
            }
            for ((stream, peer), client) in sockets.iter().zip(&clients) {
                assert_eq!(*peer, client.local_addr().expect("its own"));
                let socket = SockRef::from(stream);
                assert!(socket.tcp_nodelay().expect("read"));
                assert!(socket.keepalive().expect("read"));
                let (idle, again) = (Duration::from_secs(16), Duration::from_secs(5));
                assert_eq!(socket.tcp_keepalive_time().expect("read"), idle);
                assert_eq!(socket.tcp_keepalive_interval().expect("read"), again);
                assert_eq!(socket.tcp_keepalive_retries().expect("read"), 3);
                let unheard = socket.tcp_user_timeout().expect("read");
                assert_eq!(unheard, Some(Duration::from_secs(31)));
                // `socket(7)`: the kernel doubles what it is told.
                assert_eq!(socket.send_buffer_size().expect("read"), 2 * SEND_BUFFER);
                assert!(socket.nonblocking().expect("read"));
            }
        };
        accept(listener, &door, looks).await.expect("accepts");
    }
}
