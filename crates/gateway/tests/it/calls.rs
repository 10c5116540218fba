//! The calls in flight: seen on the admin port, ended by the operator, ended by their clients.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};
use tidegate::config::{ClientKey, Config, Contract};
use tidegate_rig::{FakeUpstream, RawClient, Script};

use crate::h2::Client as H2Client;
use crate::support::{
    CANCEL, CHAT, Gate, LOCALHOST, MESSAGES, RESPONSES, SOON, ask, endpoint, gateway, only, slots,
    stream, upstream, whole,
};

/// A request on the admin port: status and body.
pub(crate) async fn admin(gate: &Gate, method: &str, path: &str) -> (u16, Value) {
    let address: SocketAddr = gate.gateway.admin_addr().expect("an admin port");
    let mut client = RawClient::connect(address).await.expect("connected");
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nx-tidegate-admin: 1\r\nConnection: close\r\n\r\n"
    );
    client.send(request).await.expect("sent");
    let head = client.final_head().await.expect("head");
    let (body, _) = client.rest().await.expect("body");
    (
        head.status,
        serde_json::from_slice(&body).unwrap_or(Value::Null),
    )
}

pub(crate) async fn listed(gate: &Gate) -> Vec<Value> {
    let (status, body) = admin(gate, "GET", "/admin/calls").await;
    assert_eq!(status, 200);
    body["calls"].as_array().expect("a list").clone()
}

/// The one call in flight, once `holds`.
pub(crate) async fn the_call(gate: &Gate, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
    let end = tokio::time::Instant::now() + SOON;
    loop {
        let calls = listed(gate).await;
        if let [call] = &calls[..]
            && holds(call)
        {
            return call.clone();
        }
        assert!(
            tokio::time::Instant::now() < end,
            "never {what}: {calls:#?}"
        );
        tokio::task::yield_now().await;
    }
}

/// At three in the morning: one look says which server is gone, since when and why, and who waits for the other.
#[tokio::test]
async fn upstreams_and_endpoints_are_shown_with_what_they_last_failed_with() {
    let up = upstream(Script::default()).await;
    let gone = tidegate_rig::free_port().expect("a port");
    let gate = gateway(&up, |c| {
        with_admin(c);
        only(c).slots = slots(2);
        only(c).queue = 3;
        only(c).endpoints.push(endpoint(gone));
    });
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut client = gate.post(CHAT, &endless()).await;
        client.final_head().await.expect("head");
        held.push(client);
    }
    held.push(gate.post(CHAT, &endless()).await);
    gate.eventually("one waits", |g| g.metric("queued", &[]) == 1.0)
        .await;
    for path in ["/admin/upstreams", "/admin/calls"] {
        let (status, body) = admin(&gate, "GET", path).await;
        assert_eq!(status, 200);
        let [row] = &body["upstreams"].as_array().expect("a list")[..] else {
            panic!("{body}")
        };
        let name = only(&mut gate.config()).name.clone();
        assert_eq!(row["name"], name);
        for (what, is) in [
            ("slots", 2),
            ("running", 2),
            ("queue", 3),
            ("queued", 1),
            ("lingering", 0),
        ] {
            assert_eq!(row[what], is, "{what}: {row}");
        }
        let [here, away] = &row["endpoints"].as_array().expect("a list")[..] else {
            panic!("{row}")
        };
        assert_eq!(here["endpoint"], up.addr().to_string());
        assert_eq!(
            (&here["connections"], &here["last_error"]),
            (&json!(2), &json!(null))
        );
        assert_eq!(away["endpoint"], gone.to_string());
        assert_eq!(away["last_error"]["reason"], "refused");
        let why = away["last_error"]["error"].as_str().expect("words");
        assert!(why.contains("Connection refused"), "{why}");
        let (out, last) = (&away["left_out_seconds"], &away["last_error"]["seconds"]);
        assert!(out.as_f64() >= last.as_f64() && last.is_number(), "{away}");
    }
    drop(held);
    gate.settled(&up).await;
}

/// For who wants his balancer to know; who does not ask for it is told of the gateway alone.
#[tokio::test]
async fn readiness_can_be_asked_with_the_model_servers() {
    let up = upstream(Script::default()).await;
    let gone = tidegate_rig::free_port().expect("a port");
    let dead = gateway(&up, |c| {
        with_admin(c);
        only(c).endpoints = vec![endpoint(gone)];
    });
    assert_eq!(admin(&dead, "GET", "/readyz").await.0, 200);
    let address = dead.gateway.admin_addr().expect("an admin port");
    let mut client = RawClient::connect(address).await.expect("connected");
    client
        .request("GET", "/readyz?upstreams", &[], b"")
        .await
        .expect("sent");
    assert_eq!(client.final_head().await.expect("head").status, 503);
    let (body, _) = client.rest().await.expect("body");
    let body = String::from_utf8_lossy(&body);
    assert!(
        body.contains(&format!("{gone}: Connection refused")),
        "{body}"
    );
    let half = gateway(&up, |c| {
        with_admin(c);
        only(c).endpoints.insert(0, endpoint(gone));
    });
    assert_eq!(admin(&half, "GET", "/readyz?upstreams").await.0, 200);
}

pub(crate) fn with_admin(c: &mut Config) {
    c.admin.listen = Some(LOCALHOST);
}

fn endless() -> Value {
    stream(json!({"end": "never", "pace_ms": 5.0}))
}

#[tokio::test]
async fn a_call_is_seen_in_every_phase_until_its_slot_is_back() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        with_admin(c);
        only(c).slots = slots(1);
        only(c).abandon.contract = Contract::Linger;
        only(c).abandon.time = Duration::from_secs(3600);
    });
    assert!(listed(&gate).await.is_empty());
    let mut client = gate.post(CHAT, &endless()).await;
    let call = the_call(&gate, "streaming", |c| {
        c["phase"] == "streaming" && c["tokens"].as_u64() > Some(3)
    })
    .await;
    assert_eq!(
        (
            &call["key"],
            &call["model"],
            &call["upstream"],
            &call["state"]
        ),
        (
            &json!("anonymous"),
            &json!("tiny"),
            &json!("default"),
            &json!("attended")
        )
    );
    assert_eq!(
        (&call["waiting"], &call["on_abandon"]),
        (&json!(true), &json!("linger"))
    );
    assert_eq!(call["endpoint"], up.addr().to_string());
    let queued = gate.post(CHAT, &whole(json!({}))).await;
    gate.eventually("queued", |g| g.metric("queued", &[]) == 1.0)
        .await;
    let phases: Vec<_> = listed(&gate)
        .await
        .iter()
        .map(|c| c["phase"].clone())
        .collect();
    assert_eq!(phases, ["streaming", "queued"], "the oldest first");
    queued.leave_fin();
    gate.eventually("left", |g| g.metric("queued", &[]) == 0.0)
        .await;
    client.final_head().await.expect("head");
    client.events(3).await.expect("events");
    client.leave_rst().expect("left");
    let call = the_call(&gate, "lingering", |c| c["state"] == "lingering").await;
    assert_eq!(call["waiting"], false);
    assert!(call["left_seconds"].is_f64(), "{call}");
    // Nothing but the operator gives this slot back within an hour.
    let (status, told) = admin(
        &gate,
        "DELETE",
        &format!("/admin/calls/{}", call["id"].as_str().expect("an id")),
    )
    .await;
    assert_eq!((status, &told["ended"]), (200, &json!(1)));
    gate.settled(&up).await;
    assert!(listed(&gate).await.is_empty());
}

/// A call that is read on for nobody says so from the moment its client leaves, before its answer has begun too. Nobody waits for it, so
/// its client cannot end it any more.
#[tokio::test]
async fn a_call_that_runs_on_is_not_shown_as_attended() {
    let drain: fn(&mut Config) = |c| {
        only(c).abandon.contract = Contract::Drain;
        only(c).abandon.time = Duration::from_secs(3600);
    };
    for path in [CHAT, RESPONSES, MESSAGES] {
        for (stream, at) in [
            (true, json!("head")),
            (true, json!({"event": 2})),
            (false, json!("head")),
        ] {
            left_and_read_on(path, json!({"stream": stream}), at, drain).await;
        }
    }
    for stream in [true, false] {
        let fields = json!({"stream": stream, "background": true});
        left_and_read_on(RESPONSES, fields, json!("head"), |_| {}).await;
    }
}

async fn left_and_read_on(path: &str, fields: Value, at: Value, change: fn(&mut Config)) {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        with_admin(c);
        change(c);
    });
    let mut body = ask(fields);
    body["rig"] = json!({"stall": {"at": at}});
    let mut client = gate.client().await;
    let headers = [("x-tidegate-call", "job:9")];
    let bytes = body.to_string();
    let sent = client.request("POST", path, &headers, bytes.as_bytes());
    sent.await.expect("sent");
    let waits = |c: &Value| c["waiting"] == true && c["state"] == "attended";
    up.wait_for(|t| t.running == 1, SOON)
        .await
        .expect("it runs");
    if body["stream"] == true && at != "head" {
        client.final_head().await.expect("head");
        client.events(2).await.expect("events");
    }
    the_call(&gate, "attended", waits).await;
    client.leave_rst().expect("left");
    is_abandoned(&gate).await;
    let mut cancel = gate.client().await;
    let none = cancel.request("POST", "/v1/calls/job:9/cancel", &[], b"");
    none.await.expect("sent");
    assert_eq!(cancel.final_head().await.expect("head").status, 404);
    assert_eq!(up.truth().running, 1, "{path} {at}: it runs on");
    kill_all(&gate, &up).await;
}

/// The same over HTTP/2: the stream is reset, and its connection stays.
#[tokio::test]
async fn a_reset_stream_that_runs_on_is_not_shown_as_attended() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        with_admin(c);
        only(c).abandon.contract = Contract::Drain;
    });
    for body in [stream as fn(Value) -> Value, whole] {
        let mut client = H2Client::connect_to(gate.addr()).await;
        let asked = client.post(CHAT, &body(json!({"stall": {"at": "head"}})));
        let asked = tokio::spawn(asked);
        up.wait_for(|t| t.running == 1, SOON)
            .await
            .expect("it runs");
        asked.abort();
        is_abandoned(&gate).await;
        kill_all(&gate, &up).await;
    }
}

/// The one call runs on for nobody, says its metric, and so does its row.
async fn is_abandoned(gate: &Gate) {
    gate.eventually("abandoned", |g| g.metric("abandoned", &[]) == 1.0)
        .await;
    let call = the_call(gate, "abandoned", |c| c["state"] == "abandoned").await;
    assert_eq!(call["waiting"], false, "{call}");
    assert!(call["left_seconds"].is_f64(), "{call}");
    assert_eq!(call["attachable"], false, "{call}");
}

async fn kill_all(gate: &Gate, up: &FakeUpstream) {
    let (status, _) = admin(gate, "DELETE", "/admin/upstreams/default/calls").await;
    assert_eq!(status, 200);
    gate.settled_with(up, 0).await;
}

/// In each phase, under each contract: the upstream is told at once, the slot is free, the client hears of it in its own dialect.
#[tokio::test]
async fn a_killed_call_ends_everywhere() {
    for contract in [Contract::Cancel, Contract::Drain, Contract::Linger] {
        for path in [CHAT, RESPONSES, MESSAGES] {
            for (at, script) in [
                ("head", json!({"stall": {"at": "head"}})),
                ("silence", json!({"stall": {"at": {"event": 2}}})),
                ("streaming", json!({"end": "never", "pace_ms": 5.0})),
            ] {
                let up = upstream(Script::default()).await;
                let gate = gateway(&up, |c| {
                    with_admin(c);
                    only(c).abandon.contract = contract;
                    only(c).settle = Duration::from_secs(3600);
                    only(c).abandon.time = Duration::from_secs(3600);
                });
                let mut client = gate.post(path, &stream(script)).await;
                client.set_limit(SOON);
                let reached = if at == "head" {
                    "waiting_head"
                } else {
                    "streaming"
                };
                let call = the_call(&gate, reached, |c| c["phase"] == reached).await;
                let path_of = format!("/admin/calls/{}", call["id"].as_str().expect("an id"));
                let (status, _) = admin(&gate, "DELETE", &path_of).await;
                assert_eq!(status, 200);
                up.wait_for(|t| t.running == 0, CANCEL).await.expect("told");
                let head = client.final_head().await.expect("head");
                if at == "head" {
                    assert_eq!(head.status, 410, "{path}");
                    assert_eq!(head.header("x-should-retry"), Some("false"));
                } else {
                    let (events, end) = client.all_events().await.expect("events");
                    let last = events.last().expect("an event");
                    assert!(
                        last.data.contains("ended by the operator"),
                        "{path} {at}: {last:?}"
                    );
                    assert!(!end.looks_whole(), "{path} {at}: a broken end");
                }
                gate.settled_with(&up, 0).await;
                let line = gate.logged(1).await.remove(0);
                assert_eq!(
                    (&line["outcome"], &line["reason"], &line["work_end"]),
                    (&json!("stopped"), &json!("killed"), &json!("cancelled")),
                    "{line}"
                );
                let (status, _) = admin(&gate, "DELETE", &path_of).await;
                assert_eq!(status, 404, "it is gone");
            }
        }
    }
}

#[tokio::test]
async fn all_calls_of_an_upstream_are_killed_queued_and_drained_ones_too() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        with_admin(c);
        only(c).slots = slots(2);
        only(c).abandon.contract = Contract::Drain;
    });
    let mut gone = gate.post(CHAT, &endless()).await;
    gone.final_head().await.expect("head");
    gone.leave_fin();
    gate.eventually("drained", |g| g.metric("abandoned", &[]) == 1.0)
        .await;
    let running = gate
        .post(CHAT, &stream(json!({"stall": {"at": "head"}})))
        .await;
    gate.eventually("running", |g| g.metric("running", &[]) == 2.0)
        .await;
    let mut queued = gate.post(CHAT, &whole(json!({}))).await;
    gate.eventually("queued", |g| g.metric("queued", &[]) == 1.0)
        .await;
    let (status, told) = admin(&gate, "DELETE", "/admin/upstreams/other/calls").await;
    assert_eq!((status, told), (404, Value::Null));
    let (status, told) = admin(&gate, "DELETE", "/admin/upstreams/default/calls").await;
    assert_eq!((status, &told["ended"]), (200, &json!(3)));
    assert_eq!(queued.final_head().await.expect("head").status, 410);
    gate.settled_with(&up, 0).await;
    assert_eq!(up.truth().calls_begun, 2, "the queued one never ran");
    drop(running);
}

/// A request of a client with this key that names its call `job:7`.
async fn post_as(gate: &Gate, who: &str, path: &str, body: &str) -> RawClient {
    let mut client = gate.client().await;
    client.set_limit(SOON);
    let auth = format!("Bearer {who}");
    let headers = [("authorization", &*auth), ("x-tidegate-call", "job:7")];
    let sent = client.request("POST", path, &headers, body.as_bytes());
    sent.await.expect("sent");
    client
}

/// The synchronous SDK in another thread: its read ends because somebody said the call's id.
#[tokio::test]
async fn a_client_ends_its_own_blocked_call_and_nobody_elses() {
    let both = async |contract| {
        for at in [json!("head"), json!({"event": 2})] {
            cancelled_by_id(contract, at).await;
        }
    };
    tokio::join!(both(Contract::Cancel), both(Contract::Linger));
}

async fn cancelled_by_id(contract: Contract, at: Value) {
    use sha2::Digest as _;
    let key = |name: &str| ClientKey {
        name: name.into(),
        sha256: sha2::Sha256::digest(name.as_bytes()).into(),
    };
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        c.keys = vec![key("mine"), key("other")];
        only(c).slots = slots(4);
        only(c).abandon.contract = contract;
        only(c).abandon.time = Duration::from_secs(3);
    });
    let body = stream(json!({"stall": {"at": at}})).to_string();
    let mut blocked = post_as(&gate, "mine", CHAT, &body).await;
    up.wait_for(|t| t.running == 1, SOON)
        .await
        .expect("running");
    let sent = up.calls().pop().expect("a call");
    assert_eq!(sent.header("x-tidegate-call"), None, "it is the gateway's");
    for (who, id) in [("other", "job:7"), ("mine", "job:8")] {
        let mut refused = post_as(&gate, who, &format!("/v1/calls/{id}/cancel"), "").await;
        let head = refused.final_head().await.expect("head");
        assert_eq!(head.status, 404, "{who} {id}");
    }
    assert_eq!(up.truth().running, 1);
    let mut cancel = post_as(&gate, "mine", "/v1/calls/job:7/cancel", "").await;
    assert_eq!(cancel.final_head().await.expect("head").status, 200);
    up.wait_for(|t| t.running == 0, CANCEL).await.expect("told");
    if contract == Contract::Linger {
        gate.eventually("a client frees no slot that is not free", |g| {
            g.metric("lingering", &[]) == 1.0
        })
        .await;
    }
    let head = blocked.final_head().await.expect("the read ends");
    if at == "head" {
        assert_eq!(head.status, 410);
    } else {
        let (events, end) = blocked.all_events().await.expect("events");
        let last = events.last().expect("an event");
        assert!(last.data.contains("cancelled by its id"), "{last:?}");
        assert!(!end.looks_whole());
    }
    gate.settled_with(&up, 0).await;
    let mut again = post_as(&gate, "mine", "/v1/calls/job:7/cancel", "").await;
    assert_eq!(
        again.final_head().await.expect("head").status,
        404,
        "it is over"
    );
}

/// Under drain the work goes on, and is seen and counted as that of any client that has left.
#[tokio::test]
async fn a_call_that_its_client_has_ended_is_drained_as_abandoned() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        with_admin(c);
        only(c).abandon.contract = Contract::Drain;
    });
    let body = stream(json!({"tokens": 6, "usage": "yes", "stall": {"at": {"event": 3}}}));
    let mut client = post_as(&gate, "", CHAT, &body.to_string()).await;
    client.final_head().await.expect("head");
    client.events(2).await.expect("events");
    let mut cancel = post_as(&gate, "", "/v1/calls/job:7/cancel", "").await;
    assert_eq!(cancel.final_head().await.expect("head").status, 200);
    let call = the_call(&gate, "abandoned", |c| c["state"] == "abandoned").await;
    assert_eq!(call["waiting"], false, "{call}");
    assert!(call["left_seconds"].is_f64(), "{call}");
    assert_eq!(gate.metric("abandoned", &[]), 1.0);
    let mut again = post_as(&gate, "", "/v1/calls/job:7/cancel", "").await;
    let head = again.final_head().await.expect("head");
    assert_eq!(head.status, 404, "nobody waits for it");
    up.cut_all(tidegate_rig::PeerEnd::Fin);
    gate.settled(&up).await;
    let peer = client.local_addr().expect("an address");
    let line = gate.line_of(peer).await;
    assert_eq!(
        (&line["outcome"], &line["wait_end"], &line["waste"]),
        (&json!("stopped"), &json!("left"), &json!("counted")),
        "{line}"
    );
}

#[tokio::test]
async fn an_id_that_cannot_be_used_is_said_so() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for id in ["", "a b", "a/b", &"x".repeat(65)] {
        let mut client = gate.client().await;
        let body = ask(json!({})).to_string();
        let headers = [("x-tidegate-call", id)];
        client
            .request("POST", CHAT, &headers, body.as_bytes())
            .await
            .expect("sent");
        assert_eq!(
            client.final_head().await.expect("head").status,
            400,
            "{id:?}"
        );
        let (body, _) = client.rest().await.expect("body");
        assert!(
            String::from_utf8_lossy(&body).contains("x-tidegate-call"),
            "{id:?}"
        );
    }
    let mut client = gate.client().await;
    let (body, two) = (
        ask(json!({})).to_string(),
        [("x-tidegate-call", "a"), ("x-tidegate-call", "b")],
    );
    let sent = client.request("POST", CHAT, &two, body.as_bytes());
    sent.await.expect("sent");
    assert_eq!(client.final_head().await.expect("head").status, 400, "two");
    let mut client = gate.client().await;
    client
        .request("GET", "/v1/calls/a/cancel", &[], b"")
        .await
        .expect("sent");
    assert_eq!(client.final_head().await.expect("head").status, 405);
    assert_eq!(up.truth().calls_begun, 0);
}
