//! Gateways and balancers in a row: whoever leaves the outermost ends the work of the innermost.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;
use socket2::SockRef;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;

use super::caller::Caller;
use super::disconnect::At;
use super::stage::{Http, PAIRINGS, STREAMS, Stage, forms, ms, on_each, over};
use crate::support::{CANCEL, LOCALHOST, gateway_at, only, room_for, stream};

#[tokio::test]
async fn c06_a_chain_of_gateways_passes_the_leaving_on() {
    for pairing in PAIRINGS {
        let inner = Stage::new(pairing, |c| room_for(c, 50)).await;
        let outer = gateway_at(inner.gate.addr(), |c| {
            over(c, pairing.0);
            room_for(c, 50);
        });
        let mut calls = 0;
        for down in [Http::One, Http::Two] {
            for at in [
                At::Head,
                At::Silence,
                At::Streaming,
                At::Stalled,
                At::ErrorBody,
            ] {
                for (form, way) in forms().into_iter().zip(down.ways().into_iter().cycle()) {
                    if at == At::Silence && !form.streaming {
                        // A head without a first event is a stream's.
                        continue;
                    }
                    let id = format!("{down:?} {at:?} {form:?}");
                    let mut caller = Caller::connect(down, outer.addr()).await;
                    let body = at.body(form.streaming, &id);
                    caller.post(form.path, &body).await;
                    calls += 1;
                    if at == At::ErrorBody {
                        // Each hop holds it back for a while to see its shape.
                        at.came(&inner.up, &id).await;
                    } else {
                        at.reached(&inner.up, &id, &mut caller).await;
                    }
                    let rest = caller.leave(way).await;
                    let told = inner.up.wait_for(|t| t.running == 0, 2 * CANCEL).await;
                    told.unwrap_or_else(|t| panic!("{inner}, {id}: not told: {t:?}"));
                    drop(rest);
                }
            }
        }
        inner.settled().await;
        for gate in [&outer, &inner.gate] {
            gate.eventually("nothing runs", |g| g.counted().is_empty())
                .await;
            for line in gate.logged(calls).await {
                assert_eq!(line["outcome"], "client_closed", "{inner}: {line}");
            }
        }
    }
}

/// Passes bytes both ways until none has moved for `idle`; then both ends are reset.
async fn relay(mut near: TcpStream, to: SocketAddr, idle: Duration) -> std::io::Result<()> {
    let mut far = TcpStream::connect(to).await?;
    let (mut up, mut down) = ([0; 16_384], [0; 16_384]);
    loop {
        let moved = async {
            tokio::select! {
                n = near.read(&mut up) => {
                    let n = n?;
                    far.write_all(&up[..n]).await?;
                    Ok::<_, std::io::Error>(n)
                }
                n = far.read(&mut down) => {
                    let n = n?;
                    near.write_all(&down[..n]).await?;
                    Ok(n)
                }
            }
        };
        if !matches!(tokio::time::timeout(idle, moved).await, Ok(Ok(1..))) {
            for socket in [&near, &far] {
                SockRef::from(socket).set_linger(Some(Duration::ZERO))?;
            }
            return Ok(());
        }
    }
}

/// Cuts a connection on which nothing moved for this long, as balancers do.
async fn balancer(to: SocketAddr, idle: Duration) -> (SocketAddr, AbortHandle) {
    let listener = TcpListener::bind(LOCALHOST).await.expect("a port");
    let addr = listener.local_addr().expect("an address");
    let task = tokio::spawn(async move {
        let mut pipes = tokio::task::JoinSet::new();
        while let Ok((near, _)) = listener.accept().await {
            pipes.spawn(relay(near, to, idle));
        }
    });
    (addr, task.abort_handle())
}

const IDLE: Duration = ms(2000);

/// A long silence behind a balancer that cuts idle connections.
fn thinks() -> serde_json::Value {
    stream(json!({"tokens": 4, "stall": {"at": {"event": 2}, "ms": 3 * IDLE.as_millis() as u64}}))
}

#[tokio::test]
async fn c26_heartbeats_carry_a_silent_stream_through_a_balancer() {
    on_each(
        |c| only(c).heartbeat = Some(ms(150)),
        async |stage: &Stage| {
            let (addr, task) = balancer(stage.gate.addr(), IDLE).await;
            let mut callers = Vec::new();
            for path in STREAMS {
                let mut caller = Caller::connect(stage.down, addr).await;
                caller.post(path, &thinks()).await;
                callers.push((path, caller));
            }
            for (path, mut caller) in callers {
                caller.accepted().await;
                let rest = caller.rest().await;
                assert!(rest.whole, "{stage}, {path}: {}", rest.text());
                let (_, beats) = crate::heartbeats::without_beats(&rest.body);
                assert!(beats >= 3, "{stage}, {path}: {beats}");
            }
            task.abort();
        },
    )
    .await;
}

#[tokio::test]
async fn c26_without_heartbeats_the_cut_is_seen_and_passed_on() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            let (addr, task) = balancer(stage.gate.addr(), IDLE).await;
            let mut callers = Vec::new();
            for path in STREAMS {
                let mut caller = Caller::connect(stage.down, addr).await;
                caller.post(path, &thinks()).await;
                caller.accepted().await;
                callers.push(caller);
            }
            for mut caller in callers {
                assert!(!caller.rest().await.whole, "{stage}");
            }
            stage.running(0).await;
            for line in stage.gate.logged(4).await {
                assert_eq!(line["outcome"], "client_closed", "{stage}: {line}");
            }
            task.abort();
        },
    )
    .await;
}
