//! A retry that is given the answer of the call it tries again: every route, moment and way of leaving; who may, and what bounds it.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tidegate::config::{Attach, ClientKey, Config, Contract};
use tidegate_rig::{BodyEnd, CallTruth, FakeUpstream, RawClient, ResponseHead, Script};
use tokio::task::JoinSet;

use crate::calls::{admin, listed, with_admin};
use crate::leave::{Way, leave};
use crate::support::{
    CANCEL, CHAT, Gate, MESSAGES, RESPONSES, SOON, gateway, only, room_for, stream, upstream, whole,
};

const ROUTES: [&str; 4] = [CHAT, "/v1/completions", RESPONSES, MESSAGES];

/// Long enough for a client to leave in the middle, on a busy machine too.
const PAUSE_MS: u64 = 3000;
pub(crate) const LONG: Duration = Duration::from_secs(600);

pub(crate) fn graced(c: &mut Config, grace: Duration) {
    room_for(c, 100);
    only(c).abandon.at_once = 1000;
    only(c).attach = Some(Attach {
        grace,
        bytes: 1024 * 1024,
    });
}

/// A key that cannot be guessed, as this test's clients have none of the gateway's.
pub(crate) fn named(name: &str) -> String {
    format!("key-of-sixteen-and-more {name}")
}

/// Posts with this idempotency key.
pub(crate) async fn post(gate: &Gate, path: &str, key: &str, body: &Value) -> RawClient {
    post_with(gate, path, &[("idempotency-key", key)], body).await
}

pub(crate) async fn post_with(
    gate: &Gate,
    path: &str,
    headers: &[(&str, &str)],
    body: &Value,
) -> RawClient {
    let mut client = gate.client().await;
    client.set_limit(SOON);
    let body = body.to_string();
    let sent = client.request("POST", path, headers, body.as_bytes());
    sent.await.expect("sent");
    client
}

pub(crate) async fn answer(client: &mut RawClient) -> (ResponseHead, String, BodyEnd) {
    let head = client.final_head().await.expect("head");
    let (body, end) = client.rest().await.expect("body");
    (head, String::from_utf8(body).expect("text"), end)
}

/// Without ids and times.
pub(crate) fn normal(text: &str) -> String {
    let mut out = String::new();
    let mut run = String::new();
    for c in text.chars().chain([' ']) {
        if c.is_ascii_hexdigit() {
            run.push(c);
            continue;
        }
        out.push_str(if run.len() >= 10 { "#" } else { &run });
        run.clear();
        out.push(c);
    }
    out
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Head,
    Prefill,
    Streaming,
    /// It leaves in mid-stream and comes back after the end.
    End,
}

impl At {
    fn script(self) -> Value {
        match self {
            Self::Head => json!({"tokens": 9, "usage": "yes", "delay_ms": PAUSE_MS}),
            Self::Prefill => json!({"tokens": 9, "usage": "yes", "first_ms": PAUSE_MS}),
            Self::Streaming | Self::End => {
                json!({"tokens": 9, "usage": "yes", "stall": {"at": {"event": 4}, "ms": PAUSE_MS}})
            }
        }
    }
}

fn cells() -> Vec<(&'static str, At, Way, bool)> {
    let mut cells = Vec::new();
    for path in ROUTES {
        for at in [At::Head, At::Prefill, At::Streaming, At::End] {
            for way in [Way::Fin, Way::Rst] {
                cells.extend([true, false].map(|streaming| (path, at, way, streaming)));
            }
        }
    }
    cells
}

/// Leaves at that moment and comes back. What the retry got, and what came before.
async fn there_and_back(
    gate: &Gate,
    up: &FakeUpstream,
    (path, at, way, streaming): (&str, At, Way, bool),
) {
    let id = format!("{path} {at:?} {way:?} {streaming}");
    let key = named(&id);
    let script = at.script();
    let mut body = if streaming {
        stream(script)
    } else {
        whole(script)
    };
    body["test_id"] = json!(id);
    let mut undisturbed = post(gate, path, &named(&format!("other {id}")), &body).await;
    let expected = answer(&mut undisturbed).await;
    assert!(expected.2.looks_whole(), "{id}");

    let mut client = post(gate, path, &key, &body).await;
    let peer = client.local_addr().expect("an address");
    let second = |c: &CallTruth| c.test_id.as_deref() == Some(&id) && c.attempt == 2;
    let sent = |c: &CallTruth| second(c) && c.body_ns.is_some();
    up.wait_for_call(sent, SOON).await.expect("the call came");
    if streaming && at != At::Head {
        client.final_head().await.expect("head");
        if at != At::Prefill {
            client.events(3).await.expect("events");
            let begun = client.body_so_far().to_vec();
            let begun = normal(&String::from_utf8_lossy(&begun));
            assert!(normal(&expected.1).starts_with(begun.trim_end()), "{id}");
        }
    }
    drop(leave(client, way).await);
    if at == At::End {
        let ended = |c: &CallTruth| second(c) && c.ended_ns.is_some();
        let ended = up.wait_for_call(ended, SOON).await;
        ended.expect("it goes on to its end");
    }
    let mut retry = post(gate, path, &key, &body).await;
    let own = retry.local_addr().expect("an address");
    let got = answer(&mut retry).await;
    assert_eq!(got.0.status, 200, "{id}");
    assert_eq!(normal(&got.1), normal(&expected.1), "{id}");
    assert_eq!(got.2, expected.2, "{id}");
    assert_eq!(
        got.0.header("content-type"),
        expected.0.header("content-type"),
        "{id}"
    );
    let (first, second) = (gate.line_of(peer).await, gate.line_of(own).await);
    assert_eq!(
        got.0.header("x-tidegate-attached"),
        first["id"].as_str(),
        "{id}: {first}"
    );
    assert_eq!(
        (&first["outcome"], &first["wait_end"], &first["attaches"]),
        (&json!("ok"), &json!("answered"), &json!(1)),
        "{id} {first}"
    );
    assert_eq!(first["wasted_tokens"], Value::Null, "{id} {first}");
    assert_eq!(first["work_end"], "complete", "{id} {first}");
    assert_eq!(
        (
            &second["outcome"],
            &second["attached_to"],
            &second["work_end"]
        ),
        (&json!("attached"), &first["id"], &json!("none")),
        "{id} {second}"
    );
    assert_eq!(second["output_tokens"], Value::Null, "{id} {second}");
    assert_eq!(second["response_bytes"], json!(got.1.len()), "{id}");
}

/// Every route, streaming and not, wherever it is left and however.
#[tokio::test]
async fn a_retry_gets_the_answer_of_the_call_it_tries_again() {
    for contract in [Contract::Cancel, Contract::Drain] {
        let up = Arc::new(upstream(Script::default()).await);
        let gate = Arc::new(gateway(&up, |c| {
            graced(c, LONG);
            only(c).abandon.contract = contract;
            only(c).abandon.time = LONG;
            only(c).ask_stream = true;
        }));
        let mut running = JoinSet::new();
        let cells = cells();
        for cell in cells.clone() {
            let (up, gate) = (Arc::clone(&up), Arc::clone(&gate));
            running.spawn(async move { there_and_back(&gate, &up, cell).await });
        }
        running.join_all().await;
        gate.settled(&up).await;
        let n = cells.len() as f64;
        assert_eq!(
            up.truth().calls_begun as f64,
            2.0 * n,
            "nothing was started again"
        );
        assert_eq!(gate.metric("attaches_total", &[]), n);
        assert_eq!(gate.metric("disconnects_total", &[]), n);
        assert_eq!(gate.metric("wasted_tokens_total", &[]), 0.0);
        assert_eq!(gate.metric("calls_total", &[]), 3.0 * n);
        assert_eq!(gate.metric("calls_total", &[("outcome", "attached")]), n);
        for gauge in ["attach_bytes", "attach_kept"] {
            assert_eq!(gate.metric(gauge, &[]), 0.0, "{gauge}");
        }
        let reattached = gate.metric("reattached_calls_total", &[]);
        assert!(reattached > 0.0 && reattached <= n, "{reattached}");
    }
}

/// A stream that stands still in its middle, for good or for a while.
pub(crate) fn stuck(ms: Option<u64>) -> Value {
    let mut stall = json!({"at": {"event": 4}});
    if let Some(ms) = ms {
        stall["ms"] = json!(ms);
    }
    stream(json!({"tokens": 9, "usage": "yes", "stall": stall}))
}

/// One that never ends.
pub(crate) fn endless() -> Value {
    stream(json!({"end": "never", "pace_ms": 1.0}))
}

pub(crate) async fn left(gate: &Gate, key: &str, body: &Value) -> std::net::SocketAddr {
    let mut client = post(gate, CHAT, key, body).await;
    let peer = client.local_addr().expect("an address");
    client.final_head().await.expect("head");
    client.events(3).await.expect("events");
    client.leave_rst().expect("left");
    gate.eventually("it is abandoned", |g| g.metric("abandoned", &[]) == 1.0)
        .await;
    peer
}

/// Waits until the calls in flight are such.
async fn seen(gate: &Gate, what: &str, holds: impl Fn(&[Value]) -> bool) -> Vec<Value> {
    let end = tokio::time::Instant::now() + SOON;
    loop {
        let calls = listed(gate).await;
        if holds(&calls) {
            return calls;
        }
        let now = tokio::time::Instant::now();
        assert!(now < end, "never {what}: {calls:#?}");
    }
}

/// What is killed, or cancelled by its id, waits for no retry; in the grace as before.
#[tokio::test]
async fn a_call_that_somebody_ended_is_not_taken_up() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        with_admin(c);
        graced(c, LONG);
    });
    let body = stuck(None);
    let ended = |name: &'static str| {
        let (gate, up, body) = (&gate, &up, &body);
        async move {
            up.wait_for(|t| t.running == 0, CANCEL).await.expect("told");
            gate.settled(up).await;
            let key = named(name);
            let asks = [("idempotency-key", &*key), ("x-tidegate-resume", "1")];
            let mut retry = post_with(gate, CHAT, &asks, body).await;
            assert_eq!(answer(&mut retry).await.0.status, 410, "{name}");
        }
    };
    let kill = |calls: Vec<Value>| format!("/admin/calls/{}", calls[0]["id"].as_str().expect("id"));

    left(&gate, &named("killed in the grace"), &body).await;
    let calls = seen(&gate, "it waits", |c| c[0]["attachable"] == true).await;
    assert_eq!(
        (&calls[0]["state"], &calls[0]["waiting"]),
        (&json!("abandoned"), &json!(false))
    );
    assert_eq!(admin(&gate, "DELETE", &kill(calls)).await.0, 200);
    ended("killed in the grace").await;

    let key = named("cancelled in the grace");
    let headers = [("idempotency-key", &*key), ("x-tidegate-call", "mine")];
    let mut client = post_with(&gate, CHAT, &headers, &body).await;
    client.final_head().await.expect("head");
    client.leave_rst().expect("left");
    seen(&gate, "it waits", |c| c[0]["attachable"] == true).await;
    let mut cancel = post(&gate, "/v1/calls/mine/cancel", "", &json!({})).await;
    assert_eq!(answer(&mut cancel).await.0.status, 200);
    ended("cancelled in the grace").await;

    // Whoever ends the retry means the work, too.
    let key = named("killed with its retry");
    left(&gate, &key, &body).await;
    let mut retry = post(&gate, CHAT, &key, &body).await;
    retry.final_head().await.expect("head");
    retry.events(3).await.expect("events");
    let peer = retry.local_addr().expect("an address");
    let two = |c: &[Value]| c.len() == 2 && c[0]["waiting"] == true;
    let calls = seen(&gate, "two", two).await;
    assert_eq!(calls[1]["attached_to"], calls[0]["id"]);
    assert_eq!(
        (&calls[0]["state"], &calls[0]["waiting"]),
        (&json!("attended"), &json!(true))
    );
    assert_eq!(
        admin(&gate, "DELETE", &kill(calls[1..].to_vec())).await.0,
        200
    );
    let (events, end) = retry.all_events().await.expect("events");
    let last = events.last().expect("an event");
    assert!(last.data.contains("ended by the operator"), "{last:?}");
    assert!(!end.looks_whole());
    ended("killed with its retry").await;
    let line = gate.line_of(peer).await;
    assert_eq!(
        (&line["outcome"], &line["reason"]),
        (&json!("stopped"), &json!("killed"))
    );
}

/// What a request must have in common with a call to take it up: key, idempotency key, path, body.
#[tokio::test]
async fn nobody_elses_request_takes_a_call_up() {
    use sha2::Digest as _;
    let key = |name: &str| ClientKey {
        name: name.into(),
        sha256: sha2::Sha256::digest(name.as_bytes()).into(),
    };
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        graced(c, LONG);
        c.keys = vec![key("mine"), key("other")];
    });
    let auth = |who: &str| format!("Bearer {who}");
    let body = stuck(None);
    let mine = auth("mine");
    let own = [("authorization", &*mine), ("idempotency-key", "short")];
    let mut client = post_with(&gate, CHAT, &own, &body).await;
    client.final_head().await.expect("head");
    client.events(3).await.expect("events");
    client.leave_fin();
    gate.eventually("abandoned", |g| g.metric("abandoned", &[]) == 1.0)
        .await;
    let quick = stream(json!({"tokens": 2}));
    let other = auth("other");
    for (what, path, who, named, body) in [
        ("another key", CHAT, &other, "short", &body),
        ("another name", CHAT, &mine, "shorter", &body),
        ("another path", "/v1/completions", &mine, "short", &body),
        ("another body", CHAT, &mine, "short", &quick),
    ] {
        let headers = [
            ("authorization", &**who),
            ("idempotency-key", named),
            ("x-tidegate-resume", "1"),
        ];
        let mut retry = post_with(&gate, path, &headers, body).await;
        let (head, text, _) = answer(&mut retry).await;
        assert_eq!(head.status, 410, "{what}: {text}");
        assert!(text.contains("nothing_to_resume"), "{what}: {text}");
        assert_eq!(head.header("x-should-retry"), Some("false"));
    }
    assert_eq!(up.truth().calls_begun, 1);
    let resume = [&own[..], &[("x-tidegate-resume", "1")]].concat();
    let mut retry = post_with(&gate, CHAT, &resume, &body).await;
    assert_eq!(retry.final_head().await.expect("head").status, 200);
    assert_eq!(retry.events(3).await.expect("events").len(), 3);
    retry.leave_fin();
    gate.gateway.drain().await;
    gate.settled(&up).await;
}

/// Without keys everybody is the same to the gateway: only a name that cannot be guessed counts.
#[tokio::test]
async fn without_client_keys_a_short_name_or_an_equal_body_is_not_enough() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| graced(c, LONG));
    let body = stuck(None);
    for headers in [
        [("idempotency-key", "fifteen-letters"), ("x-a", "b")],
        [("x-stainless-retry-count", "1"), ("x-a", "b")],
    ] {
        let mut client = post_with(&gate, CHAT, &headers, &body).await;
        client.final_head().await.expect("head");
        client.leave_fin();
        up.wait_for(|t| t.running == 0, CANCEL)
            .await
            .expect("it ends with its client");
    }
    assert_eq!(gate.metric("overruns_total", &[]), 0.0);
    gate.settled(&up).await;
}

/// Equal requests side by side are common: without a name only a call that was left is taken up, by what says that it is a retry.
#[tokio::test]
async fn an_sdks_retry_takes_up_what_was_left_and_nothing_else() {
    use sha2::Digest as _;
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        graced(c, LONG);
        c.keys = vec![ClientKey {
            name: "mine".into(),
            sha256: sha2::Sha256::digest(b"mine").into(),
        }];
    });
    let body = stuck(None);
    let nth = |n: &'static str| [("x-api-key", "mine"), ("x-stainless-retry-count", n)];
    let mut first = post_with(&gate, CHAT, &nth("0"), &body).await;
    first.final_head().await.expect("head");
    first.events(3).await.expect("events");
    let mut beside = post_with(&gate, CHAT, &nth("1"), &body).await;
    let head = beside.final_head().await.expect("head");
    assert_eq!(head.header("x-tidegate-attached"), None);
    first.leave_rst().expect("left");
    gate.eventually("abandoned", |g| g.metric("abandoned", &[]) == 1.0)
        .await;
    let mut another = post_with(&gate, CHAT, &nth("0"), &body).await;
    let head = another.final_head().await.expect("head");
    assert_eq!(head.header("x-tidegate-attached"), None, "a first try");
    let mut retry = post_with(&gate, CHAT, &nth("1"), &body).await;
    let head = retry.final_head().await.expect("head");
    assert!(head.header("x-tidegate-attached").is_some());
    assert_eq!(up.truth().calls_begun, 3);
    gate.eventually("attended again", |g| g.metric("attended", &[]) == 3.0)
        .await;
    drop((beside, another, retry));
    gate.eventually("all abandoned", |g| g.metric("abandoned", &[]) == 3.0)
        .await;
    gate.gateway.drain().await;
    gate.settled(&up).await;
}

/// A network that vanished looks like a client that is there. The newest has the answer, before its head and in its middle.
#[tokio::test]
async fn the_newest_retry_takes_over() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        with_admin(c);
        graced(c, LONG);
    });
    for (n, at_head) in [(1, true), (2, false)] {
        let key = named(&format!("{n}"));
        let body = if at_head {
            stream(json!({"tokens": 9, "delay_ms": PAUSE_MS}))
        } else {
            stuck(Some(PAUSE_MS))
        };
        let mut first = post(&gate, CHAT, &key, &body).await;
        let sent = |c: &CallTruth| c.id == n && c.body_ns.is_some();
        up.wait_for_call(sent, SOON).await.expect("sent");
        if !at_head {
            first.final_head().await.expect("head");
            first.events(3).await.expect("events");
        }
        let mut second = post(&gate, CHAT, &key, &body).await;
        if !at_head {
            second.final_head().await.expect("head");
            second.events(3).await.expect("events");
            let (_, end) = first.rest().await.expect("what is left");
            assert!(!end.looks_whole(), "the older one is broken off");
        } else {
            seen(&gate, "it waits", |calls| {
                calls.len() == 2 && calls[1]["attached_to"] == calls[0]["id"]
            })
            .await;
        }
        let mut third = post(&gate, CHAT, &key, &body).await;
        let (head, text, end) = answer(&mut third).await;
        assert_eq!((head.status, end), (200, BodyEnd::Clean), "{text}");
        assert!(text.contains("[DONE]"), "{text}");
        if at_head {
            let told = second.final_head().await.expect("head");
            assert_eq!(told.status, 409);
            assert_eq!(told.header("x-should-retry"), Some("false"));
            let broken = match first.final_head().await {
                Ok(_) => !first.rest().await.expect("a body").1.looks_whole(),
                Err(_) => true,
            };
            assert!(broken, "the oldest one has nothing");
        } else {
            let (_, end) = second.rest().await.expect("what is left");
            assert!(!end.looks_whole());
        }
        assert_eq!(up.truth().calls_begun, n);
        gate.settled(&up).await;
    }
    let lines = gate.logged(6).await;
    let outcomes = |outcome: &str| lines.iter().filter(|l| l["outcome"] == *outcome).count();
    assert_eq!((outcomes("ok"), outcomes("attached")), (2, 3), "{lines:#?}");
    assert_eq!(outcomes("refused"), 1, "{lines:#?}");
}
