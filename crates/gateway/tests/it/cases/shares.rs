//! Keys that wait for the same slots, and what is set aside for a call before it runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use sha2::Digest as _;
use tidegate::config::ClientKey;
use tokio::task::JoinSet;

use super::caller::Caller;
use super::stage::{STREAMS, Stage, on_each, routes};
use crate::support::{Gate, ask, only, slots, whole};

const SLOTS: usize = 8;
/// Calls that the greedy key keeps outstanding.
const CROWD: usize = 60;
const MODEST: [&str; 4] = ["b", "c", "d", "e"];

fn key(name: &str) -> ClientKey {
    ClientKey {
        name: name.into(),
        sha256: sha2::Sha256::digest(name.as_bytes()).into(),
    }
}

async fn asks(caller: &mut Caller, key: &str, path: &str, body: &Value) {
    let bearer = format!("Bearer {key}");
    let fields = [("authorization", bearer.as_str())];
    let body = body.to_string();
    caller.request("POST", path, &fields, body.as_bytes()).await;
}

/// Asks again and again, until told to stop.
async fn greedy(mut caller: Caller, path: &'static str, stop: Arc<AtomicBool>) {
    while !stop.load(Ordering::Relaxed) {
        asks(&mut caller, "a", path, &whole(json!({"delay_ms": 50}))).await;
        assert_eq!(caller.answer().await.0.status, 200);
    }
}

/// One key keeps the queue full; the others are served within two calls' time, are never refused, and no slot is idle for it.
#[tokio::test]
async fn c65_one_key_does_not_take_everything() {
    on_each(
        |c| {
            c.keys = ["a"].iter().chain(&MODEST).map(|name| key(name)).collect();
            only(c).slots = slots(SLOTS);
            only(c).queue = 2 * CROWD;
        },
        async |stage: &Stage| {
            let stop = Arc::new(AtomicBool::new(false));
            let mut crowd = JoinSet::new();
            for n in 0..CROWD {
                crowd.spawn(greedy(stage.caller().await, routes()[n % 7], stop.clone()));
            }
            let waits = |g: &Gate| g.metric("queued", &[]) as usize >= CROWD / 2;
            stage.gate.eventually("a crowd waits", waits).await;
            for round in 0..3 {
                for (n, name) in MODEST.into_iter().enumerate() {
                    let id = format!("{name}-{round}");
                    let mut caller = stage.caller().await;
                    let before = stage.up.truth().calls_begun as usize;
                    let body = whole(json!({"id": id, "delay_ms": 50}));
                    asks(&mut caller, name, routes()[(n + 4 * round) % 7], &body).await;
                    assert_eq!(caller.answer().await.0.status, 200, "{stage}, {id}");
                    let calls = stage.up.calls();
                    let own = calls.iter().position(|c| c.test_id.as_deref() == Some(&id));
                    let passed = own.expect("it ran") - before;
                    // All slots twice over, and once more for its way to the queue. First come, first served: all of the crowd.
                    assert!(
                        passed <= 3 * SLOTS,
                        "{stage}, {id}: {passed} calls went first"
                    );
                    let busy = |g: &Gate| g.metric("running", &[]) as usize == SLOTS;
                    stage.gate.eventually("every slot is used", busy).await;
                }
            }
            assert_eq!(stage.up.truth().max_running as usize, SLOTS, "{stage}");
            stop.store(true, Ordering::Relaxed);
            while let Some(lane) = crowd.join_next().await {
                lane.expect("all are answered");
            }
        },
    )
    .await;
}

/// Request bodies of this size that fit into the memory for them.
const FIT: usize = 10;

fn padded(rig: Value) -> Value {
    let mut body = ask(json!({"stream": true, "padding": "x".repeat(50_000)}));
    body["rig"] = rig;
    body
}

fn held(gate: &Gate) -> f64 {
    gate.metric("request_bodies_bytes", &[])
}

/// Half of them wait for an answer, the others for a slot; all the memory is set aside.
async fn whole_bodies(stage: &Stage) -> Vec<Caller> {
    let mut inside = Vec::new();
    for n in 0..FIT {
        let body = padded(json!({"stall": {"at": "head"}}));
        inside.push(stage.post(routes()[n % 7], &body).await);
        let there = |g: &Gate| g.metric("running", &[]) + g.metric("queued", &[]) == (n + 1) as f64;
        stage.gate.eventually("it is in", there).await;
    }
    let (head, _) = stage
        .post(STREAMS[0], &padded(json!({})))
        .await
        .answer()
        .await;
    assert_eq!(head.status, 503, "{stage}: all of it is set aside");
    // Those that wait leave first: none of them gets a slot.
    inside.reverse();
    inside
}

/// In the middle of their own requests.
async fn half_bodies(stage: &Stage) -> Vec<Caller> {
    let mut halves = Vec::new();
    for n in 0..FIT {
        let mut caller = stage.caller().await;
        caller.announce(routes()[n % 7], 50_000).await;
        assert!(caller.part(&[b' '; 20_000], false).await);
        halves.push(caller);
    }
    let there = |g: &Gate| held(g) >= 20_000.0 * FIT as f64;
    stage.gate.eventually("halves are held", there).await;
    halves
}

/// A body's room in memory is set aside before it is read: whoever leaves, in whichever phase, gives all of it back.
#[tokio::test]
async fn c72_what_is_set_aside_comes_back_in_every_phase() {
    on_each(
        |c| {
            only(c).slots = slots(FIT / 2);
            only(c).queue = FIT;
            c.limits.request_bodies_total_bytes = FIT * 51_000;
        },
        async |stage: &Stage| {
            for round in 0..6 {
                let inside = match round % 2 {
                    0 => whole_bodies(stage).await,
                    _ => half_bodies(stage).await,
                };
                let mut rests = Vec::new();
                for caller in inside {
                    rests.push(caller.leave(stage.down.ways()[round / 2]).await);
                }
                stage
                    .gate
                    .eventually("all of it is back", |g| held(g) == 0.0)
                    .await;
                stage.running(0).await;
            }
            let mut normal = Vec::new();
            for n in 0..FIT {
                normal.push(
                    stage
                        .post(STREAMS[n % 4], &padded(json!({"tokens": 5})))
                        .await,
                );
            }
            for mut caller in normal {
                caller.accepted().await;
                assert!(caller.rest().await.whole, "{stage}");
            }
        },
    )
    .await;
}
