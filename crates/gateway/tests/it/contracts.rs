//! What becomes of the work when nobody waits for it any more: every contract, and what an upstream that does not keep it cannot do.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tidegate::config::{ClientKey, Config, Contract};
use tidegate_rig::{CallTruth, FakeUpstream, RawClient, Script};
use tokio::task::JoinSet;

use crate::leave::{WAYS, Way, leave};
use crate::support::{
    CANCEL, CHAT, Gate, MESSAGES, RESPONSES, SOON, ask, gateway, only, room_for, slots, stream,
    upstream, whole,
};

const ROUTES: [&str; 6] = [
    CHAT,
    "/v1/completions",
    RESPONSES,
    MESSAGES,
    "/v1/embeddings",
    "/v1/something/else",
];

/// Long enough for a client to leave in the middle, on a busy machine too.
const PAUSE_MS: u64 = 3000;

/// Where a call is when its client leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Head,
    Silence,
    Streaming,
}

const MOMENTS: [At; 3] = [At::Head, At::Silence, At::Streaming];

impl At {
    fn script(self) -> Value {
        match self {
            Self::Head => json!({"tokens": 7, "usage": "yes", "delay_ms": PAUSE_MS}),
            Self::Silence => json!({"tokens": 7, "usage": "yes", "first_ms": PAUSE_MS}),
            Self::Streaming => {
                json!({"tokens": 7, "usage": "yes", "stall": {"at": {"event": 3}, "ms": PAUSE_MS}})
            }
        }
    }

    fn phase(self) -> &'static str {
        match self {
            Self::Head => "waiting_head",
            Self::Silence => "waiting_first_event",
            Self::Streaming => "streaming",
        }
    }
}

fn contract(c: &mut Config, contract: Contract) {
    only(c).abandon.contract = contract;
    only(c).abandon.at_once = 1000;
}

/// Posts, waits until the call is where it is to be left, and leaves it.
async fn one(gate: &Gate, up: &FakeUpstream, cell: (&str, At, Way, bool)) -> std::net::SocketAddr {
    let (path, at, way, streaming) = cell;
    let id = format!("{path} {at:?} {way:?} {streaming}");
    let script = at.script();
    let mut body = if streaming {
        stream(script)
    } else {
        whole(script)
    };
    body["test_id"] = json!(id);
    let mut client = gate.client().await;
    client.set_limit(SOON);
    let peer = client.local_addr().expect("an address");
    client.post(path, &body.to_string()).await.expect("sent");
    let there = |c: &CallTruth| c.test_id.as_deref() == Some(&id) && c.body_ns.is_some();
    up.wait_for_call(there, SOON).await.expect("the call came");
    match at {
        At::Head => {}
        At::Silence => {
            // After the hold the head goes on alone.
            let head = client.final_head().await.expect("head");
            assert_eq!(head.status, 200, "{id}");
        }
        At::Streaming => {
            client.final_head().await.expect("head");
            client.events(2).await.expect("events");
        }
    }
    drop(leave(client, way).await);
    peer
}

/// The cells that a route can be in: what does not stream has its head with its answer.
fn cells() -> Vec<(&'static str, At, Way, bool)> {
    let mut cells = Vec::new();
    for path in ROUTES {
        let streams = path != "/v1/embeddings" && path != "/v1/something/else";
        for at in MOMENTS {
            for way in WAYS {
                for streaming in [true, false] {
                    if streaming && streams || !streaming && at == At::Head {
                        cells.push((path, at, way, streaming));
                    }
                }
            }
        }
    }
    cells
}

async fn leave_everywhere(
    contract_is: Contract,
    time: Duration,
) -> (Arc<FakeUpstream>, Vec<Value>) {
    let up = Arc::new(upstream(Script::default()).await);
    let gate = Arc::new(gateway(&up, |c| {
        room_for(c, 200);
        contract(c, contract_is);
        only(c).abandon.time = time;
    }));
    let mut running = JoinSet::new();
    let cells = cells();
    for cell in cells.clone() {
        let (up, gate) = (Arc::clone(&up), Arc::clone(&gate));
        running.spawn(async move { (cell, one(&gate, &up, cell).await) });
    }
    let left = running.join_all().await;
    assert_eq!(left.len(), cells.len());
    if contract_is == Contract::Cancel {
        up.wait_for(|t| t.running == 0, CANCEL)
            .await
            .expect("all were told");
    } else {
        let kept = gate.metric("abandoned", &[]) + gate.metric("lingering", &[]);
        assert!(kept > 0.0, "what is left behind is shown");
        gate.eventually("none is attended", |g| g.metric("attended", &[]) == 0.0)
            .await;
    }
    gate.settled(&up).await;
    let mut lines = Vec::new();
    for ((path, at, _, streaming), peer) in left {
        let line = gate.line_of(peer).await;
        let seen = (&line["outcome"], &line["wait_end"], &line["phase"]);
        let right = (&json!("client_closed"), &json!("left"), &json!(at.phase()));
        assert_eq!(seen, right, "{path} {at:?} {streaming}: {line}");
        lines.push(line);
    }
    let abandoned = gate.metric("abandoned_calls_total", &[]);
    assert_eq!(abandoned as usize, cells.len());
    (up, lines)
}

#[tokio::test]
async fn under_drain_every_call_runs_to_its_end_and_is_metered() {
    let (up, lines) = leave_everywhere(Contract::Drain, Duration::from_secs(60)).await;
    let truth = up.truth();
    assert_eq!(truth.ended_complete as usize, lines.len(), "{truth:?}");
    for line in lines {
        assert_eq!(line["work_end"], "complete", "{line}");
        assert!(line["work_ended_ms"].as_f64() > line["wait_ended_ms"].as_f64());
        if line["path"] != "/v1/something/else" {
            assert_eq!(line["usage"], "reported", "{line}");
        }
    }
}

#[tokio::test]
async fn under_cancel_every_call_is_ended_at_once() {
    let (up, lines) = leave_everywhere(Contract::Cancel, Duration::from_secs(60)).await;
    assert_eq!(up.truth().ended_complete, 0);
    for line in lines {
        assert_eq!(line["work_end"], "cancelled", "{line}");
    }
}

#[tokio::test]
async fn under_linger_every_call_is_closed_and_its_slot_kept() {
    let (up, lines) = leave_everywhere(Contract::Linger, Duration::from_secs(4)).await;
    assert_eq!(up.truth().ended_complete, 0);
    for line in lines {
        assert_eq!(line["work_end"], "cancelled", "{line}");
    }
}

/// A connection that breaks says of the server what one says that is closed: nothing. What an answer says of itself is believed.
#[tokio::test]
async fn under_linger_an_exchange_that_breaks_keeps_its_slot_too() {
    for (end, ask_stream, kept) in [
        ("rst", false, true),
        ("fin", false, true),
        ("rst", true, true),
        ("clean", false, false),
        ("error_event", false, false),
    ] {
        let up = upstream(Script::default()).await;
        let gate = gateway(&up, |c| {
            contract(c, Contract::Linger);
            only(c).ask_stream = ask_stream;
            only(c).abandon.time = Duration::from_secs(2);
        });
        let script = match end {
            "error_event" => json!({"tokens": 9, "error_at": 3}),
            _ => json!({"tokens": 9, "end": end, "end_at": 3}),
        };
        let body = if ask_stream {
            whole(script)
        } else {
            stream(script)
        };
        let mut client = gate.post(CHAT, &body).await;
        client.final_head().await.expect("head");
        client.rest().await.expect("body");
        up.wait_for(|t| t.running == 0, SOON).await.expect("over");
        gate.eventually("nothing runs", |g| g.metric("running", &[]) == 0.0)
            .await;
        let lingering = gate.metric("lingering", &[]);
        assert_eq!(lingering, f64::from(u8::from(kept)), "{end} {ask_stream}");
        assert_eq!(gate.metric("abandoned_calls_total", &[]), 0.0, "{end}");
        let line = gate.logged(1).await.remove(0);
        let known = if kept { "settled" } else { "seen" };
        assert_eq!(
            (&line["work_end"], &line["end_known"]),
            (&json!("failed"), &json!(known)),
            "{end} {ask_stream}: {line}"
        );
        gate.settled(&up).await;
    }
}

/// What was not sent is not drained.
#[tokio::test]
async fn under_drain_whoever_leaves_the_queue_never_touches_the_upstream() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).slots = slots(1);
        contract(c, Contract::Drain);
    });
    let holder = gate
        .post(CHAT, &stream(json!({"stall": {"at": "head"}})))
        .await;
    up.wait_for(|t| t.running == 1, SOON)
        .await
        .expect("running");
    for way in WAYS {
        let client = gate.post(CHAT, &stream(json!({}))).await;
        gate.eventually("queued", |g| g.metric("queued", &[]) == 1.0)
            .await;
        let rest = leave(client, way).await;
        gate.eventually("gone", |g| g.metric("queued", &[]) == 0.0)
            .await;
        drop(rest);
    }
    assert_eq!(up.truth().calls_begun, 1);
    drop(holder);
    gate.eventually("the first is drained", |g| {
        g.metric("abandoned", &[]) == 1.0
    })
    .await;
    up.cut_all(tidegate_rig::PeerEnd::Fin);
    gate.settled(&up).await;
}

/// Past each of its bounds a drain is a cancel, and said to be one.
#[tokio::test]
async fn past_a_bound_a_drain_is_a_cancel() {
    for bound in ["time", "bytes", "tokens", "at_once"] {
        for (phase, script) in [
            ("streaming", json!({"end": "never", "pace_ms": 2.0})),
            ("waiting_head", json!({"stall": {"at": "head"}})),
        ] {
            let in_head = phase == "waiting_head";
            if in_head && (bound == "bytes" || bound == "tokens") {
                continue;
            }
            let up = upstream(Script::default()).await;
            let gate = gateway(&up, |c| {
                contract(c, Contract::Drain);
                let abandon = &mut only(c).abandon;
                match bound {
                    "time" => abandon.time = Duration::from_millis(300),
                    "bytes" => abandon.bytes = 10_000,
                    "tokens" => abandon.tokens = Some(20),
                    _ => abandon.at_once = 0,
                }
            });
            let mut client = gate.post(CHAT, &stream(script)).await;
            up.wait_for(|t| t.running == 1, SOON)
                .await
                .expect("running");
            if !in_head {
                client.final_head().await.expect("head");
                client.events(2).await.expect("events");
            }
            let peer = client.local_addr().expect("an address");
            client.leave_fin();
            let line = gate.line_of(peer).await;
            assert_eq!(
                (&line["overrun"], &line["work_end"], &line["phase"]),
                (&json!(bound), &json!("cancelled"), &json!(phase)),
                "{line}"
            );
            assert_eq!(gate.metric("overruns_total", &[("bound", bound)]), 1.0);
            gate.settled_with(&up, 0).await;
        }
    }
}

/// A client that stopped reading has left, too: what it no longer takes is read on for nobody.
#[tokio::test]
async fn under_drain_a_client_that_stops_reading_does_not_stop_the_meter() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        contract(c, Contract::Drain);
        only(c).timeouts.write = Duration::from_millis(300);
        only(c).abandon.bytes = 1 << 30;
    });
    let script = json!({"tokens": 3000, "event_bytes": 4000, "usage": "yes"});
    let mut client = RawClient::connect_slow(gate.addr(), 4096)
        .await
        .expect("connected");
    client
        .post(CHAT, &stream(script).to_string())
        .await
        .expect("sent");
    client.final_head().await.expect("head");
    let peer = client.local_addr().expect("an address");
    let line = gate.line_of(peer).await;
    assert_eq!(
        (&line["outcome"], &line["work_end"], &line["output_tokens"]),
        (&json!("client_stalled"), &json!("complete"), &json!(3000)),
        "{line}"
    );
    gate.settled(&up).await;
}

/// An upstream that never stops, clients that give up and come again: it never runs more than its slots, whoever waits is told the
/// truth, and all of it ends.
#[tokio::test]
async fn an_upstream_that_never_stops_runs_no_more_than_its_slots() {
    let up = Arc::new(upstream(Script::default()).await);
    let gate = Arc::new(gateway(&up, |c| {
        only(c).slots = slots(8);
        only(c).queue = 8;
        contract(c, Contract::Linger);
        only(c).abandon.time = Duration::from_secs(3);
        only(c).pool.connections_max = 200;
    }));
    // Each runs for a second and a half, whatever its client does.
    let script = json!({"tokens": 15, "pace_ms": 100.0, "on_close": "never"});
    let mut clients = JoinSet::new();
    for _ in 0..64 {
        let (gate, body) = (Arc::clone(&gate), whole(script.clone()));
        clients.spawn(async move {
            let mut refused = Vec::new();
            for _ in 0..3 {
                let mut client = gate.client().await;
                client.set_limit(Duration::from_millis(200));
                if client.post(CHAT, &body.to_string()).await.is_err() {
                    continue;
                }
                if let Ok(head) = client.final_head().await {
                    refused.push(head);
                }
                client.leave_fin();
            }
            refused
        });
    }
    gate.eventually("abandoned work is visible, and holds every slot", |g| {
        g.metric("abandoned", &[]) + g.metric("lingering", &[]) == 8.0
    })
    .await;
    let mut refused = Vec::new();
    while let Some(heads) = clients.join_next().await {
        refused.extend(heads.expect("a client"));
        assert!(up.truth().max_running <= 8, "{:?}", up.truth());
    }
    assert!(!refused.is_empty(), "whoever could not wait was told");
    for head in &refused {
        assert_eq!(head.status, 503);
        let after = head.header("retry-after").expect("a time");
        assert!((1..=60).contains(&after.parse::<u64>().expect("seconds")));
    }
    let leftover = gate.metric("refusals_total", &[("reason", "leftover_full")]);
    assert!(leftover > 0.0, "and that leftovers are why");
    gate.settled(&up).await;
    let truth = up.truth();
    assert!(truth.max_running <= 8, "{truth:?}");
    assert!(
        truth.ended_ran_on > 0,
        "the upstream ignored the close: {truth:?}"
    );
    assert_eq!(gate.metric("lingering", &[]), 0.0);
}

/// One key's leftovers do not keep another from its slots.
#[tokio::test]
async fn one_keys_leftovers_are_not_all_slots() {
    use sha2::Digest as _;
    let key = |name: &str| ClientKey {
        name: name.into(),
        sha256: sha2::Sha256::digest(name.as_bytes()).into(),
    };
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        c.keys = vec![key("dead"), key("alive")];
        only(c).slots = slots(4);
        only(c).queue = 4;
        contract(c, Contract::Linger);
        only(c).abandon.time = Duration::from_secs(3600);
        only(c).abandon.per_key = Some(slots(2));
    });
    let post = async |who: &str, body: Value| {
        let mut client = gate.client().await;
        let auth = format!("Bearer {who}");
        let body = body.to_string();
        let headers = [
            ("authorization", auth.as_str()),
            ("content-type", "application/json"),
        ];
        client
            .request("POST", CHAT, &headers, body.as_bytes())
            .await
            .expect("sent");
        client
    };
    for n in 1..=2 {
        let mut client = post("dead", stream(json!({"end": "never", "pace_ms": 5.0}))).await;
        client.final_head().await.expect("head");
        client.leave_rst().expect("left");
        gate.eventually("it lingers", |g| g.metric("lingering", &[]) == f64::from(n))
            .await;
    }
    let mut waiting = Vec::new();
    for n in 1..=2 {
        waiting.push(post("dead", whole(json!({}))).await);
        gate.eventually("it waits", |g| g.metric("queued", &[]) == f64::from(n))
            .await;
    }
    let mut third = post("dead", whole(json!({}))).await;
    let head = third.final_head().await.expect("an answer");
    assert_eq!(head.status, 503);
    assert!(head.header("retry-after").is_some());
    assert_eq!(
        gate.metric("refusals_total", &[("reason", "share_full")]),
        1.0
    );
    for _ in 0..3 {
        let mut other = post("alive", whole(json!({}))).await;
        assert_eq!(other.final_head().await.expect("an answer").status, 200);
    }
    assert_eq!(
        gate.metric("queued", &[]),
        2.0,
        "the dead key's calls still wait"
    );
    drop(waiting);
    gate.stop();
}

/// What is spent for nobody is told by model, upstream and key, with how it is known; and so is who comes again.
#[tokio::test]
async fn waste_is_counted_and_a_retry_is_linked_to_what_it_left() {
    for (contract_is, known) in [
        (Contract::Drain, "reported"),
        (Contract::Linger, "estimated"),
        (Contract::Cancel, "counted"),
    ] {
        let up = upstream(Script::default()).await;
        let gate = gateway(&up, |c| {
            contract(c, contract_is);
            only(c).models = vec!["ti*".into()];
            only(c).abandon.time = Duration::from_secs(4);
            let price = tidegate::config::Price {
                input: 1.0,
                output: 1e6,
            };
            c.prices.insert("ti*".into(), price);
        });
        let body = stream(json!({"tokens": 75, "pace_ms": 40.0, "usage": "yes"})).to_string();
        let post = async |retry: &str| {
            let mut client = gate.client().await;
            let headers = [("x-stainless-retry-count", retry)];
            let sent = client.request("POST", CHAT, &headers, body.as_bytes());
            sent.await.expect("sent");
            client.final_head().await.expect("head");
            client
        };
        let mut client = post("0").await;
        client.events(6).await.expect("events");
        let peer = client.local_addr().expect("an address");
        client.leave_fin();
        let first = gate.line_of(peer).await;
        assert_eq!(first["waste"], known, "{first}");
        assert!(first["retry_of"].is_null());
        let tokens = first["wasted_tokens"].as_f64().expect("a number");
        let millis = first["wasted_ms"].as_f64().expect("a number");
        match contract_is {
            Contract::Cancel => assert_eq!(tokens, 0.0, "{first}"),
            // 75 tokens in all, some of them before; 25 a second for three seconds.
            Contract::Drain => assert!((20.0..75.0).contains(&tokens), "{first}"),
            Contract::Linger => assert!(tokens > 0.0 && millis >= 4000.0, "{first}"),
        }
        assert_eq!(first["wasted_money"].as_f64(), Some(tokens), "one each");
        let labels = [("model", "ti*"), ("key", "anonymous"), ("source", known)];
        assert_eq!(gate.metric("wasted_tokens_total", &labels), tokens);
        assert_eq!(gate.metric("wasted_money_total", &labels[..2]), tokens);
        for moment in [
            "received_ms",
            "queued_ms",
            "admitted_ms",
            "sent_ms",
            "head_ms",
            "settled_ms",
        ] {
            assert!(first[moment].is_f64(), "{moment}: {first}");
        }
        let again = post("1").await;
        let peer = again.local_addr().expect("an address");
        again.leave_fin();
        let second = gate.line_of(peer).await;
        assert_eq!(second["retry_of"], first["id"], "{second}");
        assert_eq!(gate.metric("abandoned_retries_total", &[]), 1.0);
        gate.settled(&up).await;
    }
}

/// A background response needs no contract: it runs on under each.
#[tokio::test]
async fn background_is_read_on_under_every_contract() {
    for contract_is in [Contract::Cancel, Contract::Drain, Contract::Linger] {
        let up = upstream(Script::default()).await;
        let gate = gateway(&up, |c| {
            contract(c, contract_is);
            only(c).abandon.at_once = 0;
        });
        let script = json!({"tokens": 3, "delay_ms": 500});
        let body = ask(json!({"background": true, "stream": false, "rig": script}));
        let client = gate.post(RESPONSES, &body).await;
        up.wait_for(|t| t.running == 1, SOON)
            .await
            .expect("running");
        client.leave_fin();
        gate.settled(&up).await;
        assert_eq!(up.truth().ended_complete, 1, "{contract_is:?}");
    }
}

/// An answer that we put together for a client that has gone is read on like any other.
#[tokio::test]
async fn an_assembled_answer_obeys_the_contract_too() {
    for (contract_is, complete) in [(Contract::Cancel, 0), (Contract::Drain, 1)] {
        let up = upstream(Script::default()).await;
        let gate = gateway(&up, |c| {
            contract(c, contract_is);
            only(c).ask_stream = true;
        });
        let client = gate.post(CHAT, &whole(At::Streaming.script())).await;
        up.wait_for_call(|c| c.first_write_ns.is_some(), SOON)
            .await
            .expect("it streams");
        let peer = client.local_addr().expect("an address");
        client.leave_fin();
        gate.settled(&up).await;
        assert_eq!(up.truth().ended_complete, complete, "{contract_is:?}");
        let line = gate.line_of(peer).await;
        assert_eq!(
            (&line["outcome"], &line["wait_end"]),
            (&json!("client_closed"), &json!("left")),
            "{line}"
        );
        if complete == 1 {
            let seen = (&line["work_end"], &line["output_tokens"]);
            assert_eq!(seen, (&json!("complete"), &json!(7)), "{line}");
        }
    }
}
