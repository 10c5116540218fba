//! Readers that stop or are slow: bounded, cut in time, and felt by nobody else.

use serde_json::{Value, json};
use tidegate::config::{Config, Kind};
use tidegate_rig::RawClient;

use super::caller::Caller;
use super::stage::{Http, STREAMS, Stage, far, forms, ms, on_each};
use crate::bounds::stuck;
use crate::calls::{admin, with_admin};
use crate::support::{Gate, SOON, ask, only, room_for, slots, stream, whole};

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
    const LIMIT: u64 = 3000;
    const PIECE: usize = 160 * 1024;
    on_each(
        |c| only(c).timeouts.write = ms(LIMIT),
        async |stage: &Stage| {
            let body = stream(json!({"tokens": 120, "event_bytes": 16_384, "send_buffer": 65_536}));
            let mut caller = slow(stage).await;
            caller.post(STREAMS[0], &body).await;
            caller.accepted().await;
            let (mut read, mut pause) = (0, tokio::time::interval(ms(LIMIT / 6)));
            // Twelve of them: twice the limit in all.
            loop {
                pause.tick().await;
                let now = caller.bytes(read + PIECE).await;
                if now < read + PIECE {
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

/// Asks for an answer in one piece of about so many bytes.
async fn whole_of(caller: &mut Caller, path: &str, bytes: usize) {
    caller.post(path, &of(bytes)).await;
}

fn of(bytes: usize) -> Value {
    whole(json!({"tokens": bytes / 1000, "event_bytes": 1000, "pace_ms": 0}))
}

/// Slots are given back long before slow readers have their answers: what is in memory for them is bounded all the same.
#[tokio::test]
async fn answers_in_one_piece_that_wait_for_slow_readers_are_bounded_in_sum() {
    const TOTAL: usize = 3_000_000;
    let change = |c: &mut Config| {
        c.limits.answers_total_bytes = TOTAL;
        c.limits.assembled_bytes = TOTAL;
        only(c).kind = Kind::Vllm;
        only(c).ask_stream = true;
        only(c).slots = slots(2);
        far(c);
    };
    on_each(change, async |stage: &Stage| {
        for path in STREAMS {
            let at = format!("{stage}, {path}");
            let held = || stage.gate.metric("answers_bytes", &[]) as usize;
            let calls = || stage.up.calls().len();
            let waits = async |more_than: usize| {
                let what = format!("{at}: in memory, and no slot taken");
                stage
                    .gate
                    .eventually(&what, |g| {
                        held() > more_than && g.metric("running", &[]) == 0.0
                    })
                    .await;
                assert!(held() <= TOTAL, "{at}: {}", held());
            };
            let refused = async |caller: &mut Caller, started: &str| {
                let (head, rest) = caller.answer().await;
                let said = rest.text();
                let fields = ["retry-after", "x-should-retry", "x-tidegate-started"];
                assert_eq!(head.status, 503, "{at}: {said}");
                assert_eq!(
                    fields.map(|name| head.header(name)),
                    [Some("1"), None, Some(started)],
                    "{at}: {said}"
                );
                assert!(said.contains("overloaded_error"), "{at}: {said}");
                assert!(said.contains("clients that read slowly"), "{at}: {said}");
                let line = stage.gate.line_of(caller.peer()).await;
                let seen = (&line["outcome"], &line["reason"]);
                assert_eq!(seen, (&json!("refused"), &json!("answers_full")), "{line}");
            };

            let mut first = slow(stage).await;
            whole_of(&mut first, path, 1_800_000).await;
            waits(1_500_000).await;
            // It no longer fits.
            let mut second = stage.caller().await;
            whole_of(&mut second, path, 1_800_000).await;
            refused(&mut second, "true").await;
            // It still does, and leaves no room to begin with another.
            let mut third = slow(stage).await;
            whole_of(&mut third, path, TOTAL - held() - 90_000).await;
            waits(TOTAL - TOTAL / 16).await;
            let begun = calls();
            let mut fourth = stage.caller().await;
            whole_of(&mut fourth, path, 100).await;
            refused(&mut fourth, "false").await;
            assert_eq!(calls(), begun, "{at}: nothing was sent");

            // What is read, and what is left, is room again.
            let (head, rest) = first.answer().await;
            assert!(head.status == 200 && rest.whole, "{at}");
            assert!(rest.body.len() > 1_500_000, "{at}: {}", rest.body.len());
            let other = third.leave(stage.down.reset()).await;
            stage
                .gate
                .eventually("all is let go", |_| held() == 0)
                .await;
            let mut fifth = stage.caller().await;
            whole_of(&mut fifth, path, 1_800_000).await;
            assert!(fifth.answer().await.1.whole, "{at}");
            drop(other);
        }
    })
    .await;
}

/// Of about the longest length at which an answer is passed on in one piece.
const PASSED_ON: usize = 200_000;

/// Asks for answers of that length and reads none of them. With HTTP/1 the kernel holds some of them, and one lies in memory. How many they are.
async fn unread(stage: &Stage, path: &str) -> (Caller, usize) {
    let mut caller = slow(stage).await;
    let n = match stage.down {
        Http::One => 6,
        Http::Two => 1,
    };
    for _ in 0..n {
        whole_of(&mut caller, path, PASSED_ON).await;
    }
    stuck(&stage.up).await;
    (caller, n)
}

/// As [`unread`], until so many bytes are held and no slot is taken. On a machine that is busy an answer is not here before its head has to go
/// on, and comes as a stream does.
async fn unread_until(stage: &Stage, path: &str, bytes: usize) -> (Caller, usize) {
    for _ in 0..10 {
        let (caller, n) = unread(stage, path).await;
        let held = stage.gate.metric("answers_bytes", &[]) as usize;
        if held >= bytes && stage.gate.metric("running", &[]) == 0.0 {
            return (caller, n);
        }
        let left = caller.leave(stage.down.reset()).await;
        let free = |g: &Gate| g.metric("running", &[]) == 0.0;
        stage.gate.eventually("its slot is free", free).await;
        drop(left);
    }
    panic!("{stage}, {path}: {bytes} are never held");
}

/// Leaves; whether all of its answer was there before. Then it was made for somebody.
async fn leaves_with_its_answer_here(stage: &Stage, caller: Caller) -> bool {
    let peer = caller.peer();
    let left = caller.leave(stage.down.reset()).await;
    let free = |g: &Gate| g.metric("running", &[]) == 0.0;
    stage.gate.eventually("its slot is free", free).await;
    let ends =
        |line: &Value| line["peer"] == *peer.to_string() && line["outcome"] == "client_closed";
    let find = || stage.gate.lines().into_iter().find(ends);
    let has_line = |_: &_| find().is_some();
    stage.gate.eventually("it has its line", has_line).await;
    let line = find().expect("seen");
    drop(left);
    line["work_end"] == "complete" && line["wasted_tokens"] == 0
}

/// As above, of those that come in one piece: one that finds no room is not refused, since it is there. It keeps its slot.
#[tokio::test]
async fn answers_passed_on_in_one_piece_that_wait_for_slow_readers_are_bounded_in_sum() {
    const TOTAL: usize = 4 * PASSED_ON;
    let change = |c: &mut Config| {
        c.limits.answers_total_bytes = TOTAL;
        only(c).ask_stream = false;
        only(c).slots = slots(2);
        far(c);
    };
    on_each(change, async |stage: &Stage| {
        for path in [STREAMS[0], STREAMS[2]] {
            let at = format!("{stage}, {path}");
            let held = || stage.gate.metric("answers_bytes", &[]) as usize;
            let keeps_slot = async || {
                let what = format!("{at}: one keeps its slot");
                let kept = |g: &Gate| g.metric("running", &[]) == 1.0;
                stage.gate.eventually(&what, kept).await;
                assert!(held() <= TOTAL, "{at}: {}", held());
            };
            let mut kept = Vec::new();
            for n in 1..=3 {
                kept.push(unread_until(stage, path, n * PASSED_ON).await);
                assert!(held() <= TOTAL, "{at}: {}", held());
            }
            let mut tries = 0..10;
            loop {
                let (caller, _) = unread(stage, path).await;
                keeps_slot().await;
                if leaves_with_its_answer_here(stage, caller).await {
                    break;
                }
                assert!(tries.next().is_some(), "{at}: it was here");
            }
            let (last, n) = unread(stage, path).await;
            keeps_slot().await;
            // There is another slot, and whoever reads is served.
            kept.extend([(stage.post(path, &of(PASSED_ON)).await, 1), (last, n)]);
            while let Some((mut caller, n)) = kept.pop() {
                for _ in 0..n {
                    let (head, rest) = caller.answer().await;
                    assert!(head.status == 200 && rest.whole, "{at}");
                    assert!(rest.body.len() >= PASSED_ON, "{at}: {}", rest.body.len());
                }
            }
            let none = |_: &_| held() == 0;
            stage.gate.eventually("all is let go", none).await;
        }
    })
    .await;
}
