//! Upstream connections: few for many calls, given back by errors too, and none that is dead.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::json;
use tidegate::config::Config;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::caller::Caller;
use super::stage::{Form, Http, STREAMS, Stage, forms, ms, on_each, over};
use crate::support::{CHAT, LOCALHOST, SOON, gateway_at, only, slots, stream, whole};

#[tokio::test]
async fn c80_one_connection_carries_call_after_call() {
    on_each(one_worker, async |stage: &Stage| {
        let mut caller = stage.caller().await;
        for form in forms().into_iter().cycle().take(4 * forms().len()) {
            caller.post(form.path, &form.ask(json!({}))).await;
            caller.accepted().await;
            assert!(caller.rest().await.whole, "{stage}, {form:?}");
        }
        let opened = stage.upstream_connections();
        assert!(opened <= 2, "{stage}: {opened}");
    })
    .await;
}

/// The client has its end with the last event. A connection that ends the answer properly soon after is kept; where that does not come, the
/// connection (HTTP/1.1) or the stream (HTTP/2) is closed, not awaited.
#[tokio::test]
async fn c80_an_end_that_comes_late_does_not_hold_the_client() {
    for delay in [Some(1), Some(30), None] {
        on_each(one_worker, async |stage: &Stage| {
            let late = match delay {
                Some(ms) => json!({"stall": {"at": "terminator", "ms": ms}}),
                None => json!({"stall": {"at": "terminator"}}),
            };
            for (n, path) in STREAMS.into_iter().cycle().take(12).enumerate() {
                let mut caller = stage.post(path, &stream(late.clone())).await;
                caller.accepted().await;
                assert!(caller.rest().await.whole, "{stage}, {path}, {delay:?}");
                if delay.is_some() {
                    // The next call comes when the connection is back.
                    let done = stage.up.wait_for(|t| t.ended() > n as u64, SOON);
                    done.await.expect("the upstream is done");
                }
            }
            let opened = stage.upstream_connections();
            // On a machine that stands still for a moment, an end in good time is late too: rarely, and it costs that one connection.
            let truth = stage.up.truth();
            let given_up = truth.ended() - truth.ended_complete;
            match (delay, stage.back) {
                (None, Http::One) => assert_eq!(opened, 12, "{stage}"),
                (None, Http::Two) => assert!(opened <= 4, "{stage}: {opened}"),
                (Some(_), _) => assert!(
                    opened <= 4 + given_up && given_up <= 6,
                    "{stage}, {delay:?}: {opened}, {truth:?}"
                ),
            }
            stage.settled().await;
            for line in stage.gate.logged(12).await {
                assert_eq!(line["outcome"], "ok", "{stage}: {line}");
            }
        })
        .await;
    }
}

fn one_worker(config: &mut Config) {
    config.server.workers = slots(1);
}

/// Many short calls, errors among them, from several keys: a connection for each lane at most.
#[tokio::test]
async fn c81_many_short_calls_need_few_connections() {
    const LANES: usize = 8;
    on_each(
        |_| {},
        async |stage: &Stage| {
            let mut lanes = Vec::new();
            for _ in 0..LANES {
                lanes.push(stage.caller().await);
            }
            for round in 0..25 {
                for (lane, caller) in lanes.iter_mut().enumerate() {
                    let script = if (round + lane) % 4 == 0 {
                        json!({"status": 500})
                    } else {
                        json!({})
                    };
                    let form = forms()[(round * LANES + lane) % forms().len()];
                    let body = form.ask(script);
                    let key = format!("Bearer key-{}", lane % 3);
                    let fields = [("authorization", key.as_str())];
                    caller
                        .request("POST", form.path, &fields, body.to_string().as_bytes())
                        .await;
                }
                for caller in &mut lanes {
                    caller.answer().await;
                }
            }
            assert_eq!(stage.up.truth().calls_begun as usize, 25 * LANES, "{stage}");
            let opened = stage.upstream_connections() as usize;
            assert!(opened <= 2 * LANES, "{stage}: {opened}");
        },
    )
    .await;
}

/// The body of an error is read or cut, and its connection is free for the next call.
#[tokio::test]
async fn c83_error_answers_give_their_connection_back() {
    on_each(
        |c| {
            c.server.workers = slots(1);
            only(c).pool.connections_max = 2;
        },
        async |stage: &Stage| {
            let error = |form: Form, bytes: usize| {
                form.ask(json!({"status": 429, "headers": [["content-type", "application/json"]],
                    "body": {"pieces": [{"text": format!("{{\"error\":{{\"message\":\"{}\"}}}}", "x".repeat(bytes))}]}}))
            };
            for form in forms() {
                for _ in 0..5 {
                    let mut caller = stage.post(form.path, &error(form, 2000)).await;
                    assert_eq!(caller.answer().await.0.status, 429, "{stage}, {form:?}");
                }
            }
            let opened = stage.upstream_connections();
            assert!(opened <= 2, "{stage}: {opened}");
            for form in forms() {
                let path = form.path;
                let (head, rest) = stage.post(path, &error(form, 1_200_000)).await.answer().await;
                assert!(head.status == 429 && rest.whole && rest.body.len() > 1_200_000, "{stage}, {path}");
                // Endless: whoever leaves it sets it free.
                let endless = json!({"status": 429, "body": {"pieces": [{"text": "x".repeat(50_000), "times": 100_000_000, "pause_ms": 5}]}});
                let mut caller = stage.post(path, &form.ask(endless)).await;
                assert_eq!(caller.head().await.status, 429, "{stage}, {path}");
                caller.bytes(1_200_000).await;
                let rest = caller.leave(stage.down.reset()).await;
                stage.running(0).await;
                drop(rest);
                let (head, _) = stage.post(path, &form.ask(json!({"tokens": 2}))).await.answer().await;
                assert_eq!(head.status, 200, "{stage}, {path}");
            }
        },
    )
    .await;
}

/// A middlebox: passes bytes on until it is told to swallow them all, on the connections that are there.
struct Middlebox {
    addr: SocketAddr,
    swallow: Arc<AtomicBool>,
    told: Arc<Notify>,
    task: AbortHandle,
}

impl Middlebox {
    async fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind(LOCALHOST).await.expect("a port");
        let addr = listener.local_addr().expect("an address");
        let (swallow, told) = (Arc::new(AtomicBool::new(false)), Arc::new(Notify::new()));
        let seen = (swallow.clone(), told.clone());
        let task = tokio::spawn(async move {
            let mut pipes = tokio::task::JoinSet::new();
            while let Ok((mut near, _)) = listener.accept().await {
                let (swallow, told) = seen.clone();
                pipes.spawn(async move {
                    let mut far = TcpStream::connect(to).await?;
                    let stop = told.notified();
                    tokio::select! {
                        done = tokio::io::copy_bidirectional(&mut near, &mut far) => done.map(drop)?,
                        () = stop => if swallow.load(Ordering::SeqCst) {
                            // Neither end hears anything any more, nor that it is over.
                            std::future::pending::<()>().await;
                        },
                    }
                    Ok::<_, std::io::Error>(())
                });
            }
        });
        Self {
            addr,
            swallow,
            told,
            task: task.abort_handle(),
        }
    }

    fn swallow(&self) {
        self.swallow.store(true, Ordering::SeqCst);
        self.told.notify_waiters();
    }
}

impl Drop for Middlebox {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Idle connections that are dead without a word: the call that meets one ends by its own limit, and none is tried after the other.
#[tokio::test]
async fn c86_a_dead_idle_connection_costs_one_call_its_own_limit() {
    tokio::join!(
        Box::pin(dead_idle(Http::One)),
        Box::pin(dead_idle(Http::Two))
    );
}

async fn dead_idle(down: Http) {
    const LIMIT: Duration = ms(3000);
    let stage = Stage::new((down, Http::One), |_| {}).await;
    let middle = Middlebox::start(stage.up.addr()).await;
    let gate = gateway_at(middle.addr, |c| {
        c.server.workers = slots(1);
        only(c).timeouts.response_head = LIMIT;
        only(c).pool.idle = SOON * 6;
    });
    let mut warm = Vec::new();
    for _ in 0..3 {
        let mut caller = Caller::connect(down, gate.addr()).await;
        caller.post(CHAT, &whole(json!({"delay_ms": 1500}))).await;
        warm.push(caller);
    }
    // All at once, so that each has a connection of its own.
    stage.running(3).await;
    for mut caller in warm {
        assert_eq!(caller.answer().await.0.status, 200);
    }
    assert_eq!(gate.metric("upstream_connections", &[]), 3.0);
    middle.swallow();
    let mut caller = Caller::connect(down, gate.addr()).await;
    caller.post(CHAT, &whole(json!({}))).await;
    let (head, rest) = caller.answer().await;
    assert_eq!(head.status, 504, "{stage}: {}", rest.text());
    let line = gate.line_of(caller.peer()).await;
    assert_eq!(line["attempts"], 1, "{stage}: {line}");
    let took = line["wait_ended_ms"].as_f64().expect("a number");
    let two = 2 * LIMIT.as_millis() as u64;
    assert!(took < two as f64, "{stage}: one limit, not three: {line}");
}

/// A client connection may rest longer than a head may take to come, and is then closed by a limit of its own.
#[tokio::test]
async fn c87_an_idle_connection_is_no_slow_head() {
    on_each(
        |c| {
            only(c).timeouts.request_head = ms(800);
            c.server.keep_alive = ms(5000);
        },
        async |stage: &Stage| {
            let mut callers = Vec::new();
            for form in forms() {
                // At once: the first head has no more time than another.
                let mut caller = stage.caller().await;
                caller.post(form.path, &form.ask(json!({}))).await;
                callers.push((form, caller));
            }
            for round in 0..2 {
                if round > 0 {
                    for (form, caller) in &mut callers {
                        caller.post(form.path, &form.ask(json!({}))).await;
                    }
                }
                for (_, caller) in &mut callers {
                    assert_eq!(caller.answer().await.0.status, 200, "{stage}");
                }
                let ended = |g: &crate::support::Gate| g.metric("connections_ended_total", &[]);
                assert_eq!(ended(&stage.gate), 0.0, "{stage}");
                // Twice as long as a head may take.
                let gone = tokio::time::timeout(
                    ms(1600),
                    stage.gate.eventually("never", |g| ended(g) > 0.0),
                );
                assert!(gone.await.is_err(), "{stage}: closed too early");
            }
            assert!(tidegate::config::Server::default().keep_alive >= 75 * ms(1000));
            let idle = [("reason", "keep_alive")];
            stage
                .gate
                .eventually("closed by its own limit", |g| {
                    g.metric("connections_ended_total", &idle) as usize == forms().len()
                })
                .await;
        },
    )
    .await;
}

/// One connection for all streams goes dead: new calls are not put on it for ever.
#[tokio::test]
async fn c106_a_dead_shared_connection_is_left() {
    for down in [Http::One, Http::Two] {
        let stage = Stage::new((down, Http::Two), |_| {}).await;
        let middle = Middlebox::start(stage.upstream_addr()).await;
        let gate = gateway_at(middle.addr, |c| {
            over(c, Http::Two);
            c.server.workers = slots(1);
            only(c).timeouts.response_head = ms(500);
        });
        let mut first = Caller::connect(down, gate.addr()).await;
        first.post(CHAT, &whole(json!({}))).await;
        assert_eq!(first.answer().await.0.status, 200);
        middle.swallow();
        // One finds out.
        let mut finds = Caller::connect(down, gate.addr()).await;
        finds.post(CHAT, &whole(json!({}))).await;
        assert_eq!(finds.answer().await.0.status, 504, "{stage}");
        for path in STREAMS {
            let mut caller = Caller::connect(down, gate.addr()).await;
            caller.post(path, &stream(json!({"tokens": 2}))).await;
            caller.accepted().await;
            assert!(caller.rest().await.whole, "{stage}, {path}");
        }
    }
}
