//! Keys that wait for the same slots, and what is set aside for a call before it runs.

use std::collections::VecDeque;

use serde_json::{Value, json};
use sha2::Digest as _;
use tidegate::config::ClientKey;
use tidegate_rig::CallTruth;

use super::caller::Caller;
use super::stage::{STREAMS, Stage, far, on_each, routes};
use crate::support::{Gate, SOON, ask, only, slots, whole};

const SLOTS: usize = 8;
/// Calls of the greedy key that wait.
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

/// The calls of the greedy key, oldest first. None ends by itself.
struct Crowd<'a> {
    stage: &'a Stage,
    calls: VecDeque<(String, Caller)>,
    asked: usize,
    /// Kept until their calls have ended.
    rests: Vec<Option<Caller>>,
}

impl Crowd<'_> {
    /// So many more, until that many wait.
    async fn grow(&mut self, by: usize) {
        for _ in 0..by {
            let (id, path) = (format!("a-{}", self.asked), routes()[self.asked % 7]);
            let mut caller = self.stage.caller().await;
            let body = whole(json!({"id": id, "stall": {"at": "head"}}));
            asks(&mut caller, "a", path, &body).await;
            self.calls.push_back((id, caller));
            self.asked += 1;
        }
        let there = |g: &Gate| g.metric("queued", &[]) as usize == CROWD;
        self.stage.gate.eventually("a crowd waits", there).await;
        self.stage.running(SLOTS as u64).await;
    }

    /// The one that has run longest leaves; the call that begins for it.
    async fn next(&mut self) -> String {
        let begun = self.stage.up.truth().calls_begun;
        let runs = |c: &&CallTruth| c.ended.is_none() && c.peer.is_none();
        let calls = self.stage.up.calls();
        let ids = calls.iter().filter(runs).flat_map(|c| &c.test_id);
        let own = |id: &String| self.calls.iter().position(|(own, _)| own == id);
        let oldest = ids.filter_map(own).next().expect("one runs");
        let (_, caller) = self.calls.remove(oldest).expect("it is there");
        self.rests.push(caller.leave(self.stage.down.reset()).await);
        let next = |c: &CallTruth| c.id == begun + 1 && c.test_id.is_some();
        let next = self.stage.up.wait_for_call(next, SOON).await;
        next.expect("no slot is idle").test_id.expect("it has one")
    }
}

/// One key keeps the queue full; the others are served within a call's time, are never refused, and no slot is idle for it.
#[tokio::test]
async fn c65_one_key_does_not_take_everything() {
    on_each(
        |c| {
            c.keys = ["a"].iter().chain(&MODEST).map(|name| key(name)).collect();
            only(c).slots = slots(SLOTS);
            only(c).queue = 2 * CROWD;
            far(c);
        },
        async |stage: &Stage| {
            let mut crowd = Crowd {
                stage,
                calls: VecDeque::new(),
                asked: 0,
                rests: Vec::new(),
            };
            crowd.grow(SLOTS + CROWD).await;
            for round in 0..3 {
                for (n, name) in MODEST.into_iter().enumerate() {
                    let id = format!("{name}-{round}");
                    let mut caller = stage.caller().await;
                    let body = whole(json!({"id": id}));
                    asks(&mut caller, name, routes()[(n + 4 * round) % 7], &body).await;
                    let waits = |g: &Gate| g.metric("queued", &[]) as usize == CROWD + 1;
                    stage.gate.eventually("it waits too", waits).await;
                    let mut passed = 0;
                    while crowd.next().await != id {
                        passed += 1;
                        // All slots once over. First come, first served: all of the crowd.
                        assert!(passed <= SLOTS, "{stage}, {id}: {passed} went first");
                    }
                    assert_eq!(caller.answer().await.0.status, 200, "{stage}, {id}");
                    // One ended for each that began, and its own slot is used again.
                    crowd.grow(passed + 1).await;
                }
            }
            let refused = stage.gate.metric("calls_total", &[("outcome", "refused")]);
            assert_eq!(refused, 0.0, "{stage}");
            // Those that wait leave first: none of them gets a slot.
            while let Some((_, caller)) = crowd.calls.pop_back() {
                crowd.rests.push(caller.leave(stage.down.reset()).await);
            }
            stage.running(0).await;
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
