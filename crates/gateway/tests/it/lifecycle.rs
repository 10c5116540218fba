//! The orderly end: not ready, no new connections, time for what runs, a word to what does not end, and out.

use std::time::Duration;

use serde_json::{Value, json};
use tidegate::app::Drained;
use tidegate_rig::{BodyEnd, Closed, RawClient, Script};

use crate::support::{
    CHAT, LOCALHOST, MESSAGES, RESPONSES, ask, gateway, only, slots, stream, upstream, whole,
};

fn endless() -> Value {
    stream(json!({"end": "never", "pace_ms": 10}))
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "one scene, told in its order")]
async fn c110_a_drain_lets_the_short_finish_and_tells_the_endless() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        c.server.drain = Duration::from_millis(1500);
        only(c).slots = slots(11);
    });
    let mut idle = Vec::new();
    for _ in 0..5 {
        let mut client = gate.post(CHAT, &whole(json!({}))).await;
        client.final_head().await.expect("head");
        client.rest().await.expect("body");
        idle.push(client);
    }
    let paths = [CHAT, MESSAGES, RESPONSES];
    let mut streams = Vec::new();
    for i in 0..9 {
        let mut client = gate.post(paths[i % 3], &endless()).await;
        assert_eq!(client.final_head().await.expect("head").status, 200);
        streams.push(client);
    }
    let short = ask(json!({"rig": {"delay_ms": 500}}));
    let mut shorts = [gate.post(CHAT, &short).await, gate.post(CHAT, &short).await];
    gate.eventually("all run", |g| g.metric("running", &[]) == 11.0)
        .await;
    let mut waits = Vec::new();
    for i in 0..5 {
        waits.push(gate.post(paths[i % 3], &endless()).await);
        gate.eventually("it waits", |g| g.metric("queued", &[]) as usize == i + 1)
            .await;
    }
    let clients = async {
        for client in &mut idle {
            assert_eq!(
                client.closed(Duration::from_secs(1)).await,
                Closed::Fin,
                "idle ones are closed at once"
            );
        }
        for client in &mut shorts {
            assert_eq!(client.final_head().await.expect("head").status, 200);
            assert_eq!(client.rest().await.expect("body").1, BodyEnd::Clean);
            assert_eq!(
                client.closed(Duration::from_secs(1)).await,
                Closed::Fin,
                "and no more requests"
            );
        }
        for (i, client) in streams.iter_mut().enumerate() {
            let (events, end) = client.all_events().await.expect("events");
            assert!(!end.looks_whole(), "{end:?}");
            let last = &events.last().expect("an event").data;
            let last: Value = serde_json::from_str(last).expect("JSON");
            match i % 3 {
                0 => assert_eq!(last["error"]["code"], "drain"),
                1 => assert_eq!(last["error"]["type"], "overloaded_error"),
                _ => assert_eq!(
                    (&last["type"], &last["code"]),
                    (&json!("error"), &json!("drain"))
                ),
            }
        }
        // Two got the slots of the short ones, the others are told that nothing was begun.
        let mut refused = 0;
        for client in &mut waits {
            let head = client.final_head().await.expect("head");
            if head.status == 503 {
                refused += 1;
                assert_eq!(head.header("x-tidegate-started"), Some("false"));
                assert_eq!(head.header("connection"), Some("close"));
            }
        }
        assert_eq!(refused, 3);
    };
    let began = tokio::time::Instant::now();
    let (drained, ()) = tokio::join!(gate.gateway.drain(), clients);
    let took = began.elapsed();
    assert!(drained.cut > 0 && drained.left == 0, "{drained:?}");
    assert!(
        took >= Duration::from_millis(1500) && took < Duration::from_secs(15),
        "{took:?}"
    );
    assert_eq!(up.truth().running, 0);
    assert!(
        RawClient::connect(gate.addr()).await.is_err(),
        "nothing listens any more"
    );
    let lines = gate.stop();
    assert_eq!(lines.len(), 5 + 9 + 2 + 5, "one line for each call");
    let drained = lines.iter().filter(|l| l["outcome"] == "drained").count();
    assert_eq!(drained, 9 + 5);
}

#[tokio::test]
async fn a_drain_without_calls_is_over_at_once() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let _idle = gate.client().await;
    let drained = tokio::time::timeout(Duration::from_secs(3), gate.gateway.drain()).await;
    assert_eq!(drained, Ok(Drained { cut: 0, left: 0 }));
}

/// Readiness says no while connections are still taken: balancers need the time. Liveness stays.
#[tokio::test]
async fn c111_readiness_fails_before_the_listener_closes() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        c.admin.listen = Some(LOCALHOST);
        c.server.drain_lag = Duration::from_millis(1500);
        c.server.drain = Duration::from_secs(20);
    });
    let admin = gate.gateway.admin_addr().expect("on");
    let probe = async |path: &str| {
        let mut client = RawClient::connect(admin).await.expect("accepted");
        client.request("GET", path, &[], b"").await.expect("sent");
        client.final_head().await.expect("head").status
    };
    assert_eq!(probe("/readyz").await, 200);
    let mut long = gate
        .post(CHAT, &stream(json!({"tokens": 250, "pace_ms": 10})))
        .await;
    long.final_head().await.expect("head");
    let clients = async {
        let mut served = 0;
        while probe("/readyz").await == 200 {}
        // All through the lag.
        while gate.metric("draining", &[]) == 1.0 {
            let Ok(mut client) = RawClient::connect(gate.addr()).await else {
                break;
            };
            // The listener may close between the two.
            let sent = client.post(CHAT, &whole(json!({})).to_string()).await;
            let (Ok(()), Ok(head)) = (sent, client.final_head().await) else {
                break;
            };
            assert_eq!(head.status, 200);
            served += 1;
            assert_eq!(probe("/readyz").await, 503);
            assert_eq!(probe("/healthz").await, 200);
        }
        assert!(served > 5, "{served}");
        let (_, end) = long.all_events().await.expect("events");
        assert_eq!(end, BodyEnd::Clean, "the long stream is not cut");
    };
    let (drained, ()) = tokio::join!(gate.gateway.drain(), clients);
    assert_eq!(drained.cut, 0);
}

/// A stream whose upstream never pauses and whose client reads slowly is told like the others.
#[tokio::test]
async fn a_drain_tells_a_stream_that_is_never_waited_for() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| c.server.drain = Duration::from_millis(300));
    let mut client = RawClient::connect_slow(gate.addr(), 65_536)
        .await
        .expect("accepted");
    let body = stream(json!({"end": "never", "event_bytes": 16_384}));
    client.post(CHAT, &body.to_string()).await.expect("sent");
    client.final_head().await.expect("head");
    let reads = async {
        let mut pause = tokio::time::interval(Duration::from_millis(20));
        let mut read = 0;
        while up.truth().running > 0 {
            pause.tick().await;
            read = client.body_bytes(read + 65_536).await.expect("read");
        }
        client.all_events().await.expect("events")
    };
    let (drained, (events, end)) = tokio::join!(gate.gateway.drain(), reads);
    assert_eq!(drained.left, 0);
    assert!(!end.looks_whole());
    assert!(
        events.last().expect("an event").data.contains("\"drain\""),
        "{:?}",
        events.last().map(|e| e.data.len())
    );
}

/// A drain may take minutes: lag is measured and idle upstream connections are closed all through it.
#[tokio::test]
async fn housekeeping_goes_on_while_it_drains() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        c.server.drain = Duration::from_secs(20);
        only(c).pool.idle = Duration::from_secs(1);
    });
    let mut running = gate
        .post(CHAT, &stream(json!({"tokens": 300, "pace_ms": 10})))
        .await;
    running.final_head().await.expect("head");
    let mut short = gate.post(CHAT, &whole(json!({}))).await;
    short.final_head().await.expect("head");
    short.rest().await.expect("body");
    assert_eq!(gate.metric("upstream_connections", &[]), 2.0);
    let during = async {
        gate.eventually("it drains", |g| g.metric("draining", &[]) == 1.0)
            .await;
        let ticks = gate.metric("loop_lag_seconds_count", &[]);
        gate.eventually("the idle one is closed", |g| {
            g.metric("upstream_connections", &[]) == 1.0
        })
        .await;
        // More than the one tick that each worker may have had under way.
        gate.eventually("its workers tick on", |g| {
            g.metric("loop_lag_seconds_count", &[]) > ticks + 8.0
        })
        .await;
        assert_eq!(gate.metric("running", &[]), 1.0, "all within the drain");
        running.all_events().await.expect("events").1
    };
    let (drained, end) = tokio::join!(gate.gateway.drain(), during);
    assert_eq!((drained.cut, end), (0, BodyEnd::Clean));
}
