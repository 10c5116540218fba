//! Readers that stop or are slow: bounded, cut in time, and felt by nobody else.

use serde_json::json;
use tidegate_rig::RawClient;

use super::caller::Caller;
use super::stage::{Http, STREAMS, Stage, forms, ms, on_each};
use crate::bounds::stuck;
use crate::calls::{admin, with_admin};
use crate::support::{SOON, ask, only, room_for, slots, stream};

const LIMIT: u64 = 700;

/// A caller whose kernel takes little for it.
async fn slow(stage: &Stage) -> Caller {
    match stage.down {
        Http::One => Caller::One(
            RawClient::connect_slow(stage.gate.addr(), 16_384)
                .await
                .expect("accepted"),
        ),
        // Its window is what it has not read.
        Http::Two => stage.caller().await,
    }
}

/// They stop reading and never close: each is cut at its limit, whether its upstream goes on or has long ended.
#[tokio::test]
async fn c89_a_reader_that_stops_is_cut_though_it_never_closes() {
    on_each(
        |c| only(c).timeouts.write = ms(LIMIT),
        async |stage: &Stage| {
            let mut callers = Vec::new();
            for path in STREAMS {
                for script in [
                    json!({"end": "never", "event_bytes": 16_384}),
                    // Ends while the gateway still holds what is not taken.
                    json!({"tokens": 600, "event_bytes": 16_384}),
                ] {
                    let mut caller = slow(stage).await;
                    caller.post(path, &stream(script)).await;
                    caller.accepted().await;
                    caller.events(2).await;
                    callers.push(caller);
                }
            }
            stage.running(0).await;
            for caller in &callers {
                let line = stage.gate.line_of(caller.peer()).await;
                let ends = (&line["outcome"], &line["wait_end"]);
                assert_eq!(
                    ends,
                    (&json!("client_stalled"), &json!("stalled")),
                    "{stage}: {line}"
                );
            }
            let cut = stage.gate.metric("timeouts_total", &[("tier", "write")]);
            assert_eq!(cut, 8.0, "{stage}");
            let written = stage.up.truth().bytes_written;
            assert!(
                written < 8 * 16 * (1 << 20),
                "{stage}: held back: {written}"
            );
            stage.settled().await;
            drop(callers);
        },
    )
    .await;
}

/// The upstream writes no more: what is on its way to a client that has stopped reading has filled up.
async fn held_back(stage: &Stage) {
    let mut looks = tokio::time::interval(ms(100));
    let mut before = u64::MAX;
    loop {
        looks.tick().await;
        let written = stage.up.truth().bytes_written;
        if written == before {
            return;
        }
        before = written;
    }
}

/// Whoever ends a call ends its work, though the client takes nothing that could tell it so.
#[tokio::test]
async fn c89_a_call_ended_from_outside_ends_though_its_client_has_stopped_reading() {
    for by_client in [false, true] {
        on_each(with_admin, async |stage: &Stage| {
            let mut caller = slow(stage).await;
            let body = stream(json!({"end": "never", "event_bytes": 16_384})).to_string();
            let fields = [("x-tidegate-call", "mine")];
            caller
                .request("POST", STREAMS[0], &fields, body.as_bytes())
                .await;
            caller.accepted().await;
            caller.events(2).await;
            held_back(stage).await;
            if by_client {
                let mut other = stage.caller().await;
                other
                    .request("POST", "/v1/calls/mine/cancel", &[], b"")
                    .await;
                other.accepted().await;
            } else {
                let (status, _) =
                    admin(&stage.gate, "DELETE", "/admin/upstreams/default/calls").await;
                assert_eq!(status, 200, "{stage}");
            }
            // Long before the limit of a reader that has stopped.
            stage.running(0).await;
            stage.settled().await;
            let line = stage.gate.line_of(caller.peer()).await;
            let reason = if by_client {
                "cancelled_by_client"
            } else {
                "killed"
            };
            let seen = (&line["outcome"], &line["reason"], &line["work_end"]);
            let right = (&json!("stopped"), &json!(reason), &json!("cancelled"));
            assert_eq!(seen, right, "{stage}: {line}");
            let rest = caller.rest().await;
            assert!(!rest.whole, "{stage}: a broken end");
        })
        .await;
    }
}

/// Slow is not stopped.
#[tokio::test]
async fn c89_a_reader_that_is_slow_but_moves_is_served() {
    on_each(
        |c| only(c).timeouts.write = ms(LIMIT),
        async |stage: &Stage| {
            let body = stream(json!({"tokens": 120, "event_bytes": 16_384, "send_buffer": 65_536}));
            let mut caller = slow(stage).await;
            caller.post(STREAMS[0], &body).await;
            caller.accepted().await;
            let (mut read, mut pause) = (0, tokio::time::interval(ms(LIMIT / 7)));
            // In pieces of 64 KiB: three times the limit in all.
            loop {
                pause.tick().await;
                let now = caller.bytes(read + 65_536).await;
                if now < read + 65_536 {
                    break;
                }
                read = now;
            }
            let rest = caller.rest().await;
            assert!(
                rest.whole && rest.body.len() > 120 * 16_384,
                "{stage}: {}",
                rest.body.len()
            );
        },
    )
    .await;
}

/// Whoever stands still holds its own upstream back, after a bounded number of bytes, and nobody else.
#[tokio::test]
async fn c91_a_slow_reader_slows_its_own_upstream_and_nothing_else() {
    on_each(
        |c| room_for(c, 20),
        async |stage: &Stage| {
            let endless = stream(json!({"end": "never", "event_bytes": 16_384}));
            let mut readers = Vec::new();
            for path in STREAMS {
                let mut caller = slow(stage).await;
                caller.post(path, &endless).await;
                caller.accepted().await;
                readers.push(caller);
            }
            let written = stuck(&stage.up).await;
            let bound = 4 * 16 * (1 << 20);
            assert!(written < bound, "{stage}: {written} bytes for 4 readers");
            for form in forms() {
                let ask = form.ask(json!({"tokens": 50}));
                let mut other = stage.post(form.path, &ask).await;
                other.accepted().await;
                assert!(other.rest().await.whole, "{stage}, {form:?}");
            }
            // Whoever reads on gets on.
            let before = stage.up.truth().bytes_written;
            readers[0].bytes(1 << 24).await;
            let flows = stage.up.wait_for(|t| t.bytes_written > before, SOON).await;
            flows.expect("it flows again");
            for reader in readers {
                reader.leave(stage.down.ways()[1]).await;
            }
        },
    )
    .await;
}

/// The body is kept for as long as it could be sent again, and no longer.
#[tokio::test]
async fn c96_a_body_is_let_go_when_the_answer_begins() {
    on_each(
        |c| only(c).slots = slots(20),
        async |stage: &Stage| {
            let mut callers = Vec::new();
            for n in 0..8 {
                let script = json!({"end": "never", "pace_ms": 10});
                let body =
                    ask(json!({"stream": true, "padding": "x".repeat(200_000), "rig": script}));
                callers.push(stage.post(STREAMS[n % 4], &body).await);
            }
            for caller in &mut callers {
                caller.accepted().await;
                caller.events(2).await;
            }
            stage
                .gate
                .eventually("all are let go", |g| {
                    g.metric("request_bodies_bytes", &[]) == 0.0
                })
                .await;
            let mut rests = Vec::new();
            for caller in callers {
                rests.push(caller.leave(stage.down.reset()).await);
            }
            stage.running(0).await;
        },
    )
    .await;
}

/// Calls share a connection to the upstream; readers that stop hold up and end nobody else's.
#[tokio::test]
async fn c107_readers_that_stop_hold_up_no_neighbour() {
    for down in [Http::One, Http::Two] {
        let stage = Stage::new((down, Http::Two), |c| {
            c.server.workers = slots(1);
            room_for(c, 40);
        })
        .await;
        let mut stopped = Vec::new();
        for n in 0..12 {
            let mut caller = slow(&stage).await;
            let endless = json!({"end": "never", "event_bytes": 16_384});
            caller.post(STREAMS[n % 4], &stream(endless)).await;
            caller.accepted().await;
            stopped.push(caller);
        }
        // Until the upstream cannot write on to any of them.
        let (mut served, mut before) = (0, 0);
        while served < 20 || stage.up.truth().bytes_written > before + 1_000_000 {
            before = stage.up.truth().bytes_written;
            let path = STREAMS[served % 4];
            let mut caller = stage.post(path, &stream(json!({"tokens": 5}))).await;
            caller.accepted().await;
            assert!(caller.rest().await.whole, "{stage}, {path}, after {served}");
            served += 1;
        }
        assert_eq!(stage.upstream_connections(), 1, "{stage}: all on one");
        assert_eq!(stage.up.truth().running, 12, "{stage}: none was ended");
        for caller in stopped {
            caller.leave(down.ways()[1]).await;
        }
        stage.settled().await;
    }
}
