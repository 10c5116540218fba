//! Retries that are given the answer of their call, on every route and over each pairing of versions; and what else can happen to them:
//! silence, a reader that stops, a key's share, the server's own count.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tidegate::config::{Attach, ClientKey, Confirm, Contract};
use tidegate_rig::{CallTruth, RawClient, Script};

use crate::attach::{LONG, answer, endless, graced, named, normal, post, post_with, stuck};
use crate::cases::caller::Caller;
use crate::cases::stage::{Http, Stage, Way, on_each, routes};
use crate::heartbeats::without_beats;
use crate::support::{CHAT, Gate, SOON, gateway, only, room_for, slots, stream, upstream, whole};

/// Long enough for all of a pairing's clients to leave and come back.
const PAUSE_MS: u64 = 4000;

/// Of a stream whose form nobody knows.
const EVENT: &str = "data: {\"x\":1}\n\n";
const END: &str = "data: [DONE]\n\n";

/// Where a call is when its client leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Head,
    Middle,
}

/// On the routes that stream, streams; on all, answers in one piece.
fn body(path: &str, at: At, streaming: bool, id: &str) -> Value {
    let event = EVENT;
    let unknown = path.ends_with("/else");
    let script = match (at, streaming) {
        (At::Head, true) if unknown => json!({"delay_ms": PAUSE_MS,
            "headers": [["content-type", "text/event-stream"]],
            "body": {"pieces": [{"text": event, "times": 5}, {"text": END}]}}),
        (At::Middle, true) if unknown => json!({
            "headers": [["content-type", "text/event-stream"]],
            "body": {"pieces": [{"text": event}, {"text": event, "pause_ms": PAUSE_MS}, {"text": event}, {"text": END}]}}),
        (At::Head, false) if unknown => json!({"delay_ms": PAUSE_MS,
            "headers": [["content-type", "application/json"]],
            "body": {"pieces": [{"text": "{\"text\":\"word\"}"}]}}),
        (At::Head, _) => json!({"tokens": 9, "usage": "yes", "delay_ms": PAUSE_MS}),
        (At::Middle, true) => {
            json!({"tokens": 9, "usage": "yes", "stall": {"at": {"event": 4}, "ms": PAUSE_MS}})
        }
        (At::Middle, false) => json!({
            "headers": [["content-type", "application/json"]],
            "body": {"pieces": [{"text": "{\"text\":\"", "pause_ms": PAUSE_MS}, {"text": "word\"}"}]}}),
    };
    let mut body = if streaming {
        stream(script)
    } else {
        whole(script)
    };
    body["test_id"] = json!(id);
    body
}

async fn ask(stage: &Stage, path: &str, key: &str, body: &Value) -> Caller {
    let mut caller = stage.caller().await;
    let fields = [("idempotency-key", key)];
    caller
        .request("POST", path, &fields, body.to_string().as_bytes())
        .await;
    caller
}

struct Cell {
    id: String,
    path: &'static str,
    at: At,
    streaming: bool,
    way: Way,
}

/// Every route that a call of whole JSON goes by, one of them not known, in every way of leaving.
fn cells(down: Http) -> Vec<Cell> {
    let mut cells = Vec::new();
    for path in routes().into_iter().filter(|p| !p.contains("/audio/")) {
        let streams = crate::cases::stage::STREAMS.contains(&path) || path.ends_with("/else");
        for at in [At::Head, At::Middle] {
            for way in down.ways() {
                for streaming in [true, false] {
                    if streaming && !streams {
                        continue;
                    }
                    let id = format!("{path} {at:?} {way:?} {streaming}");
                    cells.push(Cell {
                        id,
                        path,
                        at,
                        streaming,
                        way,
                    });
                }
            }
        }
    }
    cells
}

/// What the client of this call would have had if it had stayed.
async fn undisturbed(stage: &Stage, cell: &Cell) -> String {
    match (cell.at, cell.streaming) {
        (At::Middle, false) => "{\"text\":\"word\"}".to_owned(),
        (At::Middle, true) if cell.path.ends_with("/else") => EVENT.repeat(3) + END,
        _ => {
            let mut quick = body(cell.path, At::Head, cell.streaming, "alone");
            quick["rig"]["delay_ms"] = json!(0);
            let mut direct = stage.post(cell.path, &quick).await;
            direct.answer().await.1.text()
        }
    }
}

/// Whoever comes back has the answer from its first byte, as if nothing had been: on each route, over each pairing.
#[tokio::test]
async fn a_retry_is_given_its_call_on_every_route_and_over_both_versions() {
    let change = |c: &mut tidegate::config::Config| {
        graced(c, LONG);
        room_for(c, 300);
    };
    on_each(change, async |stage: &Stage| {
        let cells = cells(stage.down);
        let mut callers = Vec::new();
        for cell in &cells {
            let body = body(cell.path, cell.at, cell.streaming, &cell.id);
            callers.push(ask(stage, cell.path, &named(&cell.id), &body).await);
        }
        let mut rests = Vec::new();
        for (cell, mut caller) in cells.iter().zip(callers) {
            let there = |c: &CallTruth| {
                let begun = cell.at == At::Head || c.first_write_ns.is_some();
                c.test_id.as_deref() == Some(&*cell.id) && c.body_ns.is_some() && begun
            };
            stage.up.wait_for_call(there, SOON).await.expect("it came");
            if cell.at == At::Middle {
                caller.accepted().await;
                caller.bytes(5).await;
            }
            rests.push(caller.leave(cell.way).await);
        }
        let n = cells.len();
        let left = |g: &Gate| g.metric("attended", &[]) == 0.0;
        stage.gate.eventually("all have left", left).await;
        let mut retries = Vec::new();
        for cell in &cells {
            let body = body(cell.path, cell.at, cell.streaming, &cell.id);
            retries.push(ask(stage, cell.path, &named(&cell.id), &body).await);
        }
        for (cell, retry) in cells.iter().zip(&mut retries) {
            let (head, rest) = retry.answer().await;
            let what = format!("{stage}: {}", cell.id);
            assert_eq!(
                (head.status, rest.whole),
                (200, true),
                "{what} {head:?} {}",
                rest.text()
            );
            assert!(head.header("x-tidegate-attached").is_some(), "{what}");
            let expected = undisturbed(stage, cell).await;
            assert_eq!(normal(&rest.text()), normal(&expected), "{what}");
            let line = stage.gate.line_of(retry.peer()).await;
            assert_eq!(line["outcome"], "attached", "{what}: {line}");
        }
        drop(rests);
        let attached = [("outcome", "attached")];
        assert_eq!(
            stage.gate.metric("calls_total", &attached) as usize,
            n,
            "{stage}"
        );
        assert_eq!(
            stage.gate.metric("wasted_tokens_total", &[]),
            0.0,
            "{stage}"
        );
    })
    .await;
}

/// A client of one version comes back over the other: a call is no connection's.
#[tokio::test]
async fn a_retry_may_come_over_the_other_version() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| graced(c, LONG));
    for (first, then) in [(Http::One, Http::Two), (Http::Two, Http::One)] {
        let key = named(&format!("{first:?}"));
        let body = stuck(Some(1500)).to_string();
        let fields = [("idempotency-key", &*key)];
        let mut caller = Caller::connect(first, gate.addr()).await;
        caller.request("POST", CHAT, &fields, body.as_bytes()).await;
        caller.accepted().await;
        caller.events(3).await;
        let rest = caller.leave(first.reset()).await;
        gate.eventually("abandoned", |g| g.metric("abandoned", &[]) == 1.0)
            .await;
        let mut retry = Caller::connect(then, gate.addr()).await;
        retry.request("POST", CHAT, &fields, body.as_bytes()).await;
        let (head, answer) = retry.answer().await;
        assert!(head.header("x-tidegate-attached").is_some(), "{head:?}");
        assert!(
            answer.whole && answer.text().contains("[DONE]"),
            "{}",
            answer.text()
        );
        drop(rest);
    }
    assert_eq!(up.truth().calls_begun, 2);
    gate.settled(&up).await;
}

/// `abandon.bytes` counts what comes while nobody is there, not what the client had.
#[tokio::test]
async fn what_comes_in_the_grace_is_bounded_in_bytes() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        graced(c, LONG);
        only(c).abandon.bytes = 20_000;
    });
    let key = named("bytes");
    let mut client = post(&gate, CHAT, &key, &endless()).await;
    client.final_head().await.expect("head");
    client.body_bytes(40_000).await.expect("bytes");
    let peer = client.local_addr().expect("an address");
    client.leave_rst().expect("left");
    let line = gate.line_of(peer).await;
    let seen = (&line["overrun"], &line["outcome"], &line["work_end"]);
    let right = (
        &json!("bytes"),
        &json!("client_closed"),
        &json!("cancelled"),
    );
    assert_eq!(seen, right, "{line}");
    assert_eq!(gate.metric("overruns_total", &[("bound", "bytes")]), 1.0);
    let asks = [("idempotency-key", &*key), ("x-tidegate-resume", "1")];
    let mut told = post_with(&gate, CHAT, &asks, &endless()).await;
    assert_eq!(answer(&mut told).await.0.status, 410);
    gate.settled(&up).await;
}

/// Calls in their grace are their key's share; the retry of one needs no slot.
#[tokio::test]
async fn calls_in_the_grace_count_for_their_key_and_their_retries_do_not() {
    use sha2::Digest as _;
    let key = |name: &str| ClientKey {
        name: name.into(),
        sha256: sha2::Sha256::digest(name.as_bytes()).into(),
    };
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        graced(c, LONG);
        c.keys = vec![key("mine"), key("other")];
        only(c).slots = slots(4);
        only(c).queue = 2;
        only(c).abandon.per_key = Some(slots(2));
    });
    let ask = async |who: &str, name: &str, body: &Value| {
        let auth = format!("Bearer {who}");
        post_with(
            &gate,
            CHAT,
            &[("authorization", &auth), ("idempotency-key", name)],
            body,
        )
        .await
    };
    let body = stuck(Some(PAUSE_MS));
    for n in 1..=2 {
        let mut client = ask("mine", &format!("{n}"), &body).await;
        client.final_head().await.expect("head");
        client.events(3).await.expect("events");
        client.leave_rst().expect("left");
        gate.eventually("abandoned", |g| g.metric("abandoned", &[]) == f64::from(n))
            .await;
    }
    let waiting = ask("mine", "3", &body).await;
    gate.eventually("it waits", |g| g.metric("queued", &[]) == 1.0)
        .await;
    let mut other = ask("other", "1", &whole(json!({}))).await;
    assert_eq!(answer(&mut other).await.0.status, 200);
    assert_eq!(
        gate.metric("queued", &[]),
        1.0,
        "the key's own call still waits"
    );
    let mut retry = ask("mine", "1", &body).await;
    let (head, text, end) = answer(&mut retry).await;
    assert!(head.header("x-tidegate-attached").is_some(), "{text}");
    assert!(end.looks_whole(), "{text}");
    drop(waiting);
    gate.gateway.drain().await;
    gate.settled(&up).await;
}

/// A retry that waits in a silence hears the same heartbeats as any client, between events, and they are not on the tape.
#[tokio::test]
async fn a_retry_in_a_silence_is_kept_alive() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        graced(c, LONG);
        only(c).heartbeat = Some(Duration::from_millis(100));
    });
    for script in [
        json!({"tokens": 9, "stall": {"at": {"event": 4}, "ms": 2500}}),
        json!({"tokens": 9, "first_ms": 2500}),
    ] {
        let key = named(&script.to_string());
        let body = stream(script.clone());
        let mut alone = post(&gate, CHAT, &named("alone"), &body).await;
        let mut client = post(&gate, CHAT, &key, &body).await;
        client.final_head().await.expect("head");
        // In the silence: it has had a heartbeat.
        while !String::from_utf8_lossy(client.body_so_far()).contains("keep-alive") {
            let now = client.body_so_far().len();
            client.body_bytes(now + 1).await.expect("bytes");
        }
        client.leave_rst().expect("left");
        gate.eventually("abandoned", |g| g.metric("abandoned", &[]) == 1.0)
            .await;
        let began = Instant::now();
        let mut retry = post(&gate, CHAT, &key, &body).await;
        retry.final_head().await.expect("head");
        let (bytes, end) = retry.rest().await.expect("body");
        // Its own, and no more than its time holds.
        let most = began.elapsed().as_millis() as usize / 100 + 1;
        let (kept, beats) = without_beats(&bytes);
        assert!((2..=most).contains(&beats), "{script}: {beats}, {most}");
        assert!(end.looks_whole(), "{script}");
        alone.final_head().await.expect("head");
        let (bytes, _) = alone.rest().await.expect("body");
        let (plain, _) = without_beats(&bytes);
        let text = |b: &[u8]| normal(&String::from_utf8_lossy(b));
        assert_eq!(text(&kept), text(&plain), "{script}");
        gate.settled(&up).await;
    }
}

/// A retry that stops reading has left: its call is in its grace again, or, where its beginning is forgotten, ends as its contract says.
#[tokio::test]
async fn a_retry_that_stops_reading_leaves_its_call_in_the_grace() {
    for (bytes, again) in [(64 << 20, true), (64 << 10, false)] {
        let up = upstream(Script::default()).await;
        let gate = gateway(&up, |c| {
            graced(c, LONG);
            only(c).attach = Some(Attach { grace: LONG, bytes });
            only(c).timeouts.write = Duration::from_millis(1500);
            only(c).abandon.bytes = 1 << 30;
            c.limits.attach_total_bytes = 128 << 20;
        });
        let key = named("stalls");
        let script = json!({"tokens": 3000, "event_bytes": 4000, "usage": "yes",
            "stall": {"at": {"event": 4}, "ms": 2500}});
        let body = stream(script);
        let mut client = post(&gate, CHAT, &key, &body).await;
        client.final_head().await.expect("head");
        client.events(3).await.expect("events");
        let first = client.local_addr().expect("an address");
        client.leave_rst().expect("left");
        gate.eventually("abandoned", |g| g.metric("abandoned", &[]) == 1.0)
            .await;
        let mut slow = RawClient::connect_slow(gate.addr(), 4096)
            .await
            .expect("connected");
        let text = body.to_string();
        let fields = [("idempotency-key", &*key)];
        let sent = slow.request("POST", CHAT, &fields, text.as_bytes());
        sent.await.expect("sent");
        slow.final_head().await.expect("head");
        let line = gate.line_of(slow.local_addr().expect("an address")).await;
        let seen = (&line["outcome"], &line["wait_end"], &line["work_end"]);
        let right = (&json!("client_stalled"), &json!("stalled"), &json!("none"));
        assert_eq!(seen, right, "{line}");
        if again {
            gate.eventually("it is kept", |g| g.metric("attach_kept", &[]) == 1.0)
                .await;
            let mut retry = post(&gate, CHAT, &key, &body).await;
            retry.set_limit(SOON * 3);
            let (head, text, end) = answer(&mut retry).await;
            assert!(head.header("x-tidegate-attached").is_some());
            assert!(end.looks_whole() && text.contains("[DONE]"));
            let line = gate.line_of(first).await;
            let seen = (&line["outcome"], &line["attaches"], &line["work_end"]);
            assert_eq!(
                seen,
                (&json!("ok"), &json!(2), &json!("complete")),
                "{line}"
            );
            assert_eq!(line["output_tokens"], 3000, "{line}");
        } else {
            let line = gate.line_of(first).await;
            assert_eq!(line["work_end"], "cancelled", "{line}");
            assert_eq!(up.truth().ended_complete, 0);
        }
        gate.settled(&up).await;
        assert_eq!(gate.metric("attach_bytes", &[]), 0.0);
    }
}

/// What was left and came to the end of its grace is closed, and then asked after like any other; what a retry took up is not.
#[tokio::test]
async fn the_servers_own_count_is_asked_after_the_grace_and_not_within() {
    for (pages, confirm) in [
        ("vllm", Confirm::VllmMetrics),
        ("llama_cpp", Confirm::LlamaSlots),
    ] {
        let script = json!({"pages": pages, "slots": 4}).to_string();
        let up = upstream(Script::from_json(&script).expect("a script")).await;
        let gate = gateway(&up, |c| {
            graced(c, Duration::from_millis(1500));
            only(c).abandon.confirm = confirm;
            only(c).abandon.contract = Contract::Linger;
            only(c).abandon.time = Duration::from_secs(3600);
        });
        let polls = |g: &Gate| g.metric("confirm_polls_total", &[]);
        let ends = stream(json!({"tokens": 60, "pace_ms": 20.0, "on_close": {"late_ms": 1000}}));
        let key = named("taken up");
        let mut client = post(&gate, CHAT, &key, &ends).await;
        let first = client.local_addr().expect("an address");
        client.final_head().await.expect("head");
        client.events(10).await.expect("events");
        client.leave_rst().expect("left");
        gate.eventually("abandoned", |g| g.metric("abandoned", &[]) == 1.0)
            .await;
        let mut retry = post(&gate, CHAT, &key, &ends).await;
        let (head, _, end) = answer(&mut retry).await;
        assert!(head.header("x-tidegate-attached").is_some() && end.looks_whole());
        let line = gate.line_of(first).await;
        assert_eq!(
            (&line["outcome"], &line["end_known"]),
            (&json!("ok"), &json!("seen")),
            "{line}"
        );
        assert_eq!(polls(&gate), 0.0, "nothing was closed");

        let endless =
            stream(json!({"end": "never", "pace_ms": 10.0, "on_close": {"late_ms": 1000}}));
        let key = named("nobody came");
        let mut client = post(&gate, CHAT, &key, &endless).await;
        let first = client.local_addr().expect("an address");
        client.final_head().await.expect("head");
        client.events(40).await.expect("events");
        client.leave_rst().expect("left");
        let mut retry = post(&gate, CHAT, &key, &endless).await;
        retry.final_head().await.expect("head");
        retry.events(60).await.expect("events");
        retry.leave_rst().expect("left");
        up.wait_for(|t| t.unattended == 1, SOON)
            .await
            .expect("closed after the grace, and it runs on");
        loop {
            // In the order in which the call goes from one to the other.
            let kept = [gate.metric("abandoned", &[]), gate.metric("lingering", &[])];
            // Looked at afterwards: it ran when the slots were counted.
            if up.truth().running == 0 {
                break;
            }
            assert!(kept.contains(&1.0), "its slot is kept: {kept:?}");
            tokio::task::yield_now().await;
        }
        let line = gate.line_of(first).await;
        let seen = (&line["overrun"], &line["work_end"], &line["end_known"]);
        let right = (&json!("grace"), &json!("cancelled"), &json!("confirmed"));
        assert_eq!(seen, right, "{line}");
        assert!(line["slot_kept_ms"].as_f64() >= Some(800.0), "{line}");
        assert!(polls(&gate) > 0.0);
        gate.settled(&up).await;
    }
}
