//! The process: what it does when nobody is left, how it ends, and what a new configuration does to what runs.

use serde_json::json;

use super::caller::Caller;
use super::stage::{Http, STREAMS, Stage, far, ms, on_each};
use super::waits::told;
use crate::binary::{Program, file};
use crate::support::{CHAT, only, room_for, slots, stream, upstream, whole};

/// Nothing spins for clients that have gone: from big streams, from silent ones, after the end and after an error.
#[tokio::test]
async fn c11_no_work_is_left_when_all_have_gone() {
    let up = upstream(tidegate_rig::Script::default()).await;
    let program = Program::configured(&file(&up, "slots = 200"));
    let addr = program.address("listen=").await;
    let mut rests = Vec::new();
    for n in 0..48 {
        let down = if n % 2 == 0 { Http::One } else { Http::Two };
        let mut caller = Caller::connect(down, addr).await;
        let script = match n % 6 {
            0 | 1 => json!({"end": "never", "event_bytes": 16_384}),
            2 => json!({"stall": {"at": "head"}}),
            3 => json!({"stall": {"at": {"event": 2}}}),
            4 => json!({"tokens": 2}),
            _ => json!({"error_at": 2, "tokens": 9}),
        };
        caller.post(STREAMS[n % 4], &stream(script)).await;
        if n % 6 != 2 {
            caller.accepted().await;
            caller.bytes(100).await;
        }
        rests.push(caller.leave(down.ways()[n / 2 % 3]).await);
    }
    let quiet = up.wait_for(|t| t.running == 0, crate::support::SOON).await;
    quiet.expect("all are gone");
    let before = program.cpu_ms();
    // A window to look through: a loop that wakes itself takes all of it.
    let more = up.wait_for(|t| t.running > 0, ms(1000)).await;
    assert!(more.is_err());
    let spent = program.cpu_ms() - before;
    assert!(spent < 250, "{spent} ms of CPU in a quiet second");
    drop(rests);
}

/// Endless streams are told, in the form of their clients, and do not hold the end up.
#[tokio::test]
async fn c110_a_drain_tells_endless_streams() {
    on_each(
        |c| {
            c.server.drain = ms(1500);
            room_for(c, 20);
        },
        async |stage: &Stage| {
            let mut callers = Vec::new();
            for n in 0..8 {
                let path = STREAMS[n % 4];
                let mut caller = stage
                    .post(path, &stream(json!({"end": "never", "pace_ms": 10})))
                    .await;
                if n >= 4 {
                    // Their upstreams are silent.
                    caller = stage
                        .post(path, &stream(json!({"stall": {"at": {"event": 3}}})))
                        .await;
                }
                callers.push((path, caller));
            }
            stage
                .gate
                .eventually("all run", |g| g.metric("running", &[]) >= 8.0)
                .await;
            let clients = async {
                for (path, caller) in &mut callers {
                    let code = told(stage, path, caller).await;
                    assert!(
                        ["drain", "overloaded_error"].contains(&code.as_str()),
                        "{stage}: {code}"
                    );
                }
            };
            let (drained, ()) = tokio::join!(stage.gate.gateway.drain(), clients);
            assert!(drained.cut > 0 && drained.left == 0, "{stage}: {drained:?}");
            stage.running(0).await;
        },
    )
    .await;
}

/// Reloads, good and bad, while streams run: none is cut, and a new limit counts what runs already.
#[tokio::test]
async fn c112_reloads_cut_nothing() {
    on_each(
        |c| only(c).slots = slots(8),
        async |stage: &Stage| {
            let mut callers = Vec::new();
            for n in 0..8 {
                let ask = stream(json!({"tokens": 60, "pace_ms": 10}));
                let mut caller = stage.post(STREAMS[n % 4], &ask).await;
                caller.accepted().await;
                callers.push(caller);
            }
            for i in 0..20 {
                let mut config = stage.gate.config();
                match i % 4 {
                    0 => {
                        config.server.tls = Some(tidegate::config::ServerTls {
                            cert_file: "/nowhere".into(),
                            key_file: "/nowhere".into(),
                        });
                    }
                    1 => config.upstreams[0].name = "another".to_owned(),
                    2 => only(&mut config).slots = slots(1 + i % 8),
                    _ => only(&mut config).timeouts.idle = ms(1),
                }
                assert_eq!(
                    stage.gate.gateway.reload(config).is_err(),
                    i % 4 == 0,
                    "{stage}, {i}"
                );
            }
            stage
                .gate
                .gateway
                .reload(stage.gate.config())
                .expect("as before");
            for mut caller in callers {
                assert!(caller.rest().await.whole, "{stage}");
            }
            assert!(stage.up.truth().max_running <= 8, "{stage}");
        },
    )
    .await;
}

/// Waits that end do not leave sockets or slots behind, though the upstream works on and does not hear.
#[tokio::test]
async fn c121_c122_no_slot_is_free_before_its_exchange_is_gone() {
    for leave in [false, true] {
        on_each(
            |c| {
                far(c).response_head = ms(if leave { 60_000 } else { 200 });
                only(c).slots = slots(2);
                only(c).queue = 40;
            },
            async |stage: &Stage| {
                let deaf = whole(json!({"delay_ms": 2000, "on_close": "never"}));
                let mut callers = Vec::new();
                for n in 0..8 {
                    callers.push(stage.post(STREAMS[n % 4], &deaf).await);
                }
                let mut rests = Vec::new();
                for (n, mut caller) in callers.into_iter().enumerate() {
                    let open = stage.gate.metric("upstream_connections", &[]);
                    let running = stage.gate.metric("running", &[]);
                    // A shared connection that was too slow carries its last call beside the one that follows it.
                    let room = if stage.back == Http::One { 2.0 } else { 4.0 };
                    assert!(
                        running <= 2.0 && open <= room,
                        "{stage}: {running} run, {open} open"
                    );
                    if leave {
                        rests.push(caller.leave(stage.down.ways()[n % 3]).await);
                    } else {
                        assert_eq!(caller.answer().await.0.status, 504, "{stage}");
                    }
                }
                stage
                    .gate
                    .eventually("the gateway holds nothing", |g| g.counted().is_empty())
                    .await;
            },
        )
        .await;
    }
}

/// A crowd of calls that time out leaves no thread behind.
#[tokio::test]
async fn c123_waits_that_end_leave_no_thread() {
    let up = upstream(tidegate_rig::Script::default()).await;
    let rest = "slots = 200\nqueue = 200\ntimeouts = { response_head = \"200ms\" }\n[[upstreams]]\nname = \"dns\"\nurl = \"http://no-such-host.invalid:9\"\nmodels = [\"dns\"]";
    let program = Program::configured(&file(
        &up,
        &format!("name = \"up\"\nmodels = [\"tiny\"]\n{rest}"),
    ));
    let addr = program.address("listen=").await;
    let mut first = Caller::connect(Http::One, addr).await;
    first.post(CHAT, &whole(json!({}))).await;
    assert_eq!(first.answer().await.0.status, 200);
    let before = program.threads();
    for _ in 0..3 {
        let mut callers = Vec::new();
        for n in 0..100 {
            let down = if n % 2 == 0 { Http::One } else { Http::Two };
            let mut caller = Caller::connect(down, addr).await;
            let mut body = stream(json!({"stall": {"at": "head"}}));
            if n % 5 == 0 {
                body["model"] = json!("dns");
            }
            caller.post(STREAMS[n % 4], &body).await;
            callers.push(caller);
        }
        for mut caller in callers {
            assert!(caller.answer().await.0.status >= 502);
        }
    }
    // Name lookups have threads, and they are few.
    let after = program.threads();
    assert!(
        after <= before + 16,
        "{before} threads before, {after} after"
    );
}
