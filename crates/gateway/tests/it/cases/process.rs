//! The process: what it does when nobody is left, how it ends, and what a new configuration does to what runs.

use serde_json::json;
use tidegate_rig::{FakeUpstream, H2Front, H2Options};

use super::caller::Caller;
use super::stage::{Http, STREAMS, Stage, far, forms, ms, on_each, routes};
use super::waits::told;
use crate::binary::{Program, file};
use crate::support::{CHAT, Gate, LOCALHOST, only, room_for, slots, stream, upstream, whole};

/// The program in front of `up` in this version, with this at the end of its configuration; the front has to be kept.
async fn serves(up: &FakeUpstream, back: Http, rest: &str) -> (Program, Option<H2Front>) {
    let text = file(up, rest);
    if back == Http::One {
        return (Program::configured(&text), None);
    }
    let front = H2Front::start(LOCALHOST, up.addr(), H2Options::default()).await;
    let front = front.expect("a port");
    let there = format!(
        "url = \"http://{}\"\npool = {{ http = \"http2\" }}",
        front.addr()
    );
    let text = text.replacen(&format!("url = \"http://{}\"", up.addr()), &there, 1);
    (Program::configured(&text), Some(front))
}

/// Nothing spins for clients that have gone: from big streams, from silent ones, after the end and after an error.
#[tokio::test]
async fn c11_no_work_is_left_when_all_have_gone() {
    for back in [Http::One, Http::Two] {
        let up = upstream(tidegate_rig::Script::default()).await;
        let (program, _front) = serves(&up, back, "slots = 200").await;
        let addr = program.address("listen=").await;
        let mut rests = Vec::new();
        for n in 0..48 {
            let down = if n % 2 == 0 { Http::One } else { Http::Two };
            let mut caller = Caller::connect(down, addr).await;
            let form = forms()[n % forms().len()];
            let script = match n % 6 {
                _ if !form.streaming => json!({"stall": {"at": "head"}}),
                0 | 1 => json!({"end": "never", "event_bytes": 16_384}),
                2 => json!({"stall": {"at": "head"}}),
                3 => json!({"stall": {"at": {"event": 2}}}),
                4 => json!({"tokens": 2}),
                _ => json!({"error_at": 2, "tokens": 9}),
            };
            caller.post(form.path, &form.ask(script)).await;
            if n % 6 != 2 && form.streaming {
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
        assert!(spent < 250, "{back:?}: {spent} ms of CPU in a quiet second");
        drop(rests);
    }
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
                let script = if n < 4 {
                    json!({"end": "never", "pace_ms": 10})
                } else {
                    // Their upstreams are silent.
                    json!({"stall": {"at": {"event": 3}}})
                };
                callers.push((path, stage.post(path, &stream(script)).await));
            }
            // Whoever has no head when the drain begins is refused, and not told in band.
            let begun = [("phase", "waiting_head")];
            let heads = |g: &Gate| g.metric("phase_duration_seconds_count", &begun) >= 8.0;
            stage.gate.eventually("all have their heads", heads).await;
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

/// Whoever has had nothing yet is told whether its work had begun: to try again doubles it, or does not.
#[tokio::test]
async fn a_drain_tells_which_calls_had_begun() {
    let forms = forms();
    on_each(
        |c| {
            c.server.drain = ms(300);
            only(c).slots = slots(forms.len());
        },
        async |stage: &Stage| {
            let silent = json!({"stall": {"at": "head"}});
            let mut callers = Vec::new();
            for begun in ["true", "false"] {
                for form in &forms {
                    let asked = form.ask(silent.clone());
                    callers.push((begun, stage.post(form.path, &asked).await));
                }
                stage.running(forms.len() as u64).await;
            }
            let queued = |g: &Gate| g.metric("queued", &[]) == forms.len() as f64;
            stage.gate.eventually("the others wait", queued).await;
            let clients = async {
                for (begun, caller) in &mut callers {
                    let (head, _) = caller.answer().await;
                    let told = (head.status, head.header("x-tidegate-started"));
                    assert_eq!(told, (503, Some(*begun)), "{stage}");
                }
            };
            let (_, ()) = tokio::join!(stage.gate.gateway.drain(), clients);
        },
    )
    .await;
}

/// Streams that run when the end begins are let finish, and nobody begins another.
#[tokio::test]
async fn c111_a_drain_lets_the_streams_finish_and_takes_no_more() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            let mut callers = Vec::new();
            for path in STREAMS {
                let flows = stream(json!({"tokens": 20, "pace_ms": 20}));
                let mut caller = stage.post(path, &flows).await;
                caller.accepted().await;
                callers.push(caller);
            }
            let clients = async {
                for caller in &mut callers {
                    assert!(caller.rest().await.whole, "{stage}");
                }
            };
            let (drained, ()) = tokio::join!(stage.gate.gateway.drain(), clients);
            assert_eq!((drained.cut, drained.left), (0, 0), "{stage}");
            for caller in &mut callers {
                assert!(!caller.takes_more().await, "{stage}: no new calls");
            }
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
                for path in routes() {
                    callers.push(stage.post(path, &deaf).await);
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
    for back in [Http::One, Http::Two] {
        let up = upstream(tidegate_rig::Script::default()).await;
        let rest = "slots = 200\nqueue = 200\ntimeouts = { response_head = \"200ms\" }\n[[upstreams]]\nname = \"dns\"\nurl = \"http://no-such-host.invalid:9\"\nmodels = [\"dns\"]";
        let rest = format!("name = \"up\"\nmodels = [\"tiny\"]\n{rest}");
        let (program, _front) = serves(&up, back, &rest).await;
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
                let form = forms()[n % forms().len()];
                let mut body = form.ask(json!({"stall": {"at": "head"}}));
                if n % 5 == 0 {
                    body["model"] = json!("dns");
                }
                caller.post(form.path, &body).await;
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
            "{back:?}: {before} threads before, {after} after"
        );
    }
}
