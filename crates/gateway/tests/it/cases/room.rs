//! Slots, queue and refusals: the limit is kept at every instant, and every slot comes back.

use serde_json::{Value, json};
use tidegate::config::Timeouts;

use super::caller::Caller;
use super::stage::{STREAMS, Stage, forms, ms, on_each, routes};
use crate::support::{CHAT, Gate, ask, only, room_for, slots, stream};

fn endless() -> Value {
    stream(json!({"end": "never", "pace_ms": 40}))
}

async fn run(stage: &Stage, n: usize) -> Vec<Caller> {
    let mut callers = Vec::new();
    for i in 0..n {
        let mut caller = stage.post(STREAMS[i % 4], &endless()).await;
        caller.accepted().await;
        callers.push(caller);
    }
    callers
}

async fn all_leave(stage: &Stage, callers: Vec<Caller>) {
    let mut rests = Vec::new();
    for (n, caller) in callers.into_iter().enumerate() {
        rests.push(caller.leave(stage.down.ways()[n % 3]).await);
    }
    stage.running(0).await;
}

/// After every way to end, three run and a fourth waits.
#[tokio::test]
#[expect(clippy::too_many_lines, reason = "one scene, told in its order")]
async fn c62_every_way_to_end_gives_the_slot_back() {
    on_each(
        |c| {
            only(c).slots = slots(3);
            only(c).queue = 20;
            only(c).timeouts.silence = ms(500);
            only(c).timeouts.response_head = ms(500);
            c.limits.request_body_bytes = 100_000;
        },
        async |stage: &Stage| {
            let ends = [
                json!({"tokens": 2}),
                json!({"end": "rst", "tokens": 3}),
                json!({"end": "fin", "end_at": 3}),
                json!({"status": 429, "retry_after": "1"}),
                json!({"body": "html"}),
                json!({"error_at": 2}),
                json!({"end": "bad_chunk", "tokens": 3}),
            ];
            let mut stalled = Vec::new();
            for form in forms() {
                let silent = form.ask(json!({"stall": {"at": "head"}}));
                stalled.push(stage.post(form.path, &silent).await);
            }
            for path in STREAMS {
                let stops = stream(json!({"stall": {"at": {"event": 2}}}));
                stalled.push(stage.post(path, &stops).await);
            }
            for mut caller in stalled {
                caller.answer().await;
            }
            // The short limits have done their part: what is left and what runs at the end is ended by nothing else.
            let mut config = stage.gate.config();
            only(&mut config).timeouts = Timeouts::default();
            stage.gate.gateway.reload(config).expect("it is good");
            for form in forms() {
                let path = form.path;
                for end in &ends {
                    let ask = form.ask(end.clone());
                    stage.post(path, &ask).await.answer().await;
                }
                for bad in ["{", "[]"] {
                    let mut caller = stage.caller().await;
                    caller.request("POST", path, &[], bad.as_bytes()).await;
                    let refused = caller.head().await.status == 400;
                    // What is right on a route that we do not know, its upstream knows.
                    let known = routes().last() != Some(&path);
                    assert!(refused || !known, "{stage}, {path}");
                }
                let mut caller = stage.caller().await;
                caller.announce(path, 200_000).await;
                assert_eq!(caller.head().await.status, 413, "{stage}, {path}");
                let silent = json!({"stall": {"at": "head"}});
                let rigs = if form.streaming {
                    [
                        silent,
                        json!({"first_ms": 60_000}),
                        json!({"end": "never", "pace_ms": 5}),
                    ]
                } else {
                    [(); 3].map(|()| silent.clone())
                };
                for (rig, way) in rigs.into_iter().zip(stage.down.ways()) {
                    let caller = stage.post(path, &form.ask(rig)).await;
                    stage.running(1).await;
                    let rest = caller.leave(way).await;
                    stage.running(0).await;
                    drop(rest);
                }
            }
            stage.settled().await;
            let mut callers = run(stage, 3).await;
            callers.push(stage.post(CHAT, &endless()).await);
            stage
                .gate
                .eventually("the fourth waits", |g| g.metric("queued", &[]) == 1.0)
                .await;
            assert_eq!(stage.gate.metric("running", &[]), 3.0, "{stage}");
            all_leave(stage, callers).await;
        },
    )
    .await;
}

/// Heads come at once and bodies take their time: the slot is the body's. However many workers there are, the limit is one.
#[tokio::test]
async fn c64_c69_the_slot_is_held_to_the_last_byte_whatever_the_workers() {
    for workers in [1, 2, 4] {
        on_each(
            |c| {
                c.server.workers = slots(workers);
                only(c).slots = slots(4);
                only(c).queue = 30;
                // The time that the upstream takes to hear that a client has gone.
                only(c).settle = ms(1000);
            },
            async |stage: &Stage| {
                let full = run(stage, 4).await;
                let mut callers = Vec::new();
                for n in 0..16 {
                    let ask = stream(json!({"tokens": 15, "pace_ms": 5}));
                    callers.push(stage.post(STREAMS[n % 4], &ask).await);
                }
                let mut rests = Vec::new();
                for caller in full {
                    rests.push(caller.leave(stage.down.reset()).await);
                }
                for (n, mut caller) in callers.into_iter().enumerate() {
                    caller.accepted().await;
                    if n % 5 == 0 {
                        caller.events(2).await;
                        rests.push(caller.leave(stage.down.ways()[n % 3]).await);
                    } else {
                        assert!(caller.rest().await.whole, "{stage}");
                    }
                }
                stage.running(0).await;
                assert_eq!(
                    stage.up.truth().max_running,
                    4,
                    "{stage}, {workers} workers"
                );
                assert_eq!(stage.gate.metric("started_total", &[]), 20.0, "{stage}");
            },
        )
        .await;
    }
}

/// The time of a call is counted from its arrival, wherever it is spent.
#[tokio::test]
async fn c67_the_time_in_the_queue_counts() {
    on_each(
        |c| {
            only(c).timeouts.total = Some(ms(2500));
            only(c).slots = slots(1);
            only(c).settle = ms(1500);
        },
        async |stage: &Stage| {
            // Holds the only slot for more than half of what the second has.
            let held = stream(json!({"tokens": 2, "delay_ms": 1400}));
            let mut holder = stage.post(CHAT, &held).await;
            stage.running(1).await;
            let mut late = Vec::new();
            for form in forms() {
                let ask = form.ask(json!({"delay_ms": 60_000}));
                late.push((form, stage.post(form.path, &ask).await));
            }
            let waits = |g: &Gate| g.metric("queued", &[]) as usize == late.len();
            stage.gate.eventually("all wait", waits).await;
            let begun = stage.up.truth().calls_begun;
            holder.accepted().await;
            for (form, mut caller) in late {
                let (head, rest) = caller.answer().await;
                let refused = [503, 504].contains(&head.status);
                assert!(refused, "{stage}, {form:?}: {}", rest.text());
                let line = stage.gate.line_of(caller.peer()).await;
                assert_eq!(line["reason"], "total", "{stage}: {line}");
                let ended = line["wait_ended_ms"].as_f64().expect("a number");
                assert!((2490.0..3500.0).contains(&ended), "{stage}: {line}");
            }
            // The slot is kept for a while after the one that got it was cut: the others had no time left when it came.
            assert_eq!(stage.up.truth().calls_begun, begun + 1, "{stage}");
            stage
                .gate
                .eventually("nothing is left", |g| g.counted().is_empty())
                .await;
        },
    )
    .await;
}

#[tokio::test]
async fn c68_a_full_queue_refuses_at_once_in_each_dialect() {
    on_each(
        |c| {
            only(c).slots = slots(2);
            only(c).queue = 3;
        },
        async |stage: &Stage| {
            let mut callers = run(stage, 2).await;
            for path in &STREAMS[..3] {
                callers.push(stage.post(path, &endless()).await);
            }
            stage
                .gate
                .eventually("three wait", |g| g.metric("queued", &[]) == 3.0)
                .await;
            let asked = 2 * forms().len();
            for form in forms().into_iter().cycle().take(asked) {
                let path = form.path;
                let (head, rest) = stage.post(path, &form.ask(json!({}))).await.answer().await;
                assert_eq!(head.status, 503, "{stage}, {path}");
                let wait: u32 = head
                    .header("retry-after")
                    .expect("a hint")
                    .parse()
                    .expect("seconds");
                assert!((1..=60).contains(&wait), "{stage}");
                let body = rest.json();
                assert_eq!(
                    body["error"]["type"], "overloaded_error",
                    "{stage}, {path}: {body}"
                );
                assert_eq!(
                    body["type"] == "error",
                    form.anthropic(),
                    "{stage}, {path}: {body}"
                );
            }
            assert_eq!(stage.gate.metric("queued", &[]), 3.0, "{stage}");
            let full = [("reason", "queue_full")];
            let refused = stage.gate.metric("refusals_total", &full);
            assert_eq!(refused as usize, asked, "{stage}");
            assert_eq!(stage.up.truth().calls_begun, 2, "{stage}");
            // Those that wait leave first: none of them ever runs.
            for caller in callers.drain(2..) {
                caller.leave(stage.down.ways()[0]).await;
            }
            stage
                .gate
                .eventually("none waits", |g| g.metric("queued", &[]) == 0.0)
                .await;
            all_leave(stage, callers).await;
            assert_eq!(stage.up.truth().calls_begun, 2, "{stage}");
        },
    )
    .await;
}

/// A crowd in front of an upstream that says nothing: what has no place is refused before its body is read.
#[tokio::test]
async fn c70_a_crowd_is_refused_before_its_bodies_are_read() {
    on_each(
        |c| {
            only(c).slots = slots(2);
            only(c).queue = 4;
        },
        async |stage: &Stage| {
            let body = ask(json!({"stream": true, "padding": "x".repeat(50_000), "rig": {"stall": {"at": "head"}}}));
            let mut inside = Vec::new();
            for n in 1..=6 {
                inside.push(stage.post(routes()[n % 7], &body).await);
                stage
                    .gate
                    .eventually("it is in", |g| {
                        g.metric("running", &[]) + g.metric("queued", &[]) == n as f64
                    })
                    .await;
            }
            let held = stage.gate.metric("request_bodies_bytes", &[]);
            for n in 0..70 {
                let mut caller = stage.caller().await;
                // Announced, and not a byte of it sent.
                caller.announce(routes()[n % 7], 50_000).await;
                assert_eq!(caller.head().await.status, 503, "{stage}");
            }
            assert!(stage.gate.metric("request_bodies_bytes", &[]) <= held, "{stage}");
            assert!(held <= 6.0 * 51_000.0, "{stage}: {held}");
            assert_eq!(stage.up.truth().max_running, 2, "{stage}");
            for caller in inside.into_iter().rev() {
                caller.leave(stage.down.ways()[0]).await;
            }
        },
    )
    .await;
}

/// Both counts agree while many streams are open, and are zero when they have ended in different ways.
#[tokio::test]
async fn c128_gauges_tell_the_truth() {
    on_each(
        |c| room_for(c, 60),
        async |stage: &Stage| {
            let mut callers = run(stage, 40).await;
            while !callers.is_empty() {
                let n = callers.len() as u64;
                stage.running(n).await;
                stage
                    .gate
                    .eventually("both counts agree", |g| {
                        g.metric("running", &[]) as u64 == n
                    })
                    .await;
                let rest = callers.split_off(callers.len().saturating_sub(10));
                let mut kept = Vec::new();
                for (i, caller) in rest.into_iter().enumerate() {
                    kept.push(caller.leave(stage.down.ways()[i % 3]).await);
                }
                stage.running(callers.len() as u64).await;
            }
            for script in [
                json!({"tokens": 2}),
                json!({"status": 429}),
                json!({"end": "fin", "end_at": 2}),
                json!({"body": "html"}),
            ] {
                for form in forms() {
                    let ask = form.ask(script.clone());
                    stage.post(form.path, &ask).await.answer().await;
                }
            }
            stage.settled().await;
            let all = (40 + 4 * forms().len()) as f64;
            let of = |name: &str| stage.gate.metric(name, &[]);
            assert_eq!(
                (of("started_total"), of("ended_total")),
                (all, all),
                "{stage}"
            );
            assert_eq!(of("calls_total"), all, "{stage}: each in one outcome");
            stage.gate.logged(all as usize).await;
        },
    )
    .await;
}
