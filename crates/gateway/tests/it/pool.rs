//! Upstream connections: kept while they are good, closed when they are not, never used for two calls at once, never retried into a second
//! generation.

use std::time::Duration;

use serde_json::{Value, json};
use tidegate::config::{Config, Kind, UnknownModels, Upstream};
use tidegate_rig::{BodyEnd, FakeUpstream, RawClient, Script};

use crate::support::{
    CHAT, Gate, MESSAGES, RESPONSES, SOON, ask, endpoint, eventually, gateway, only, slots, stream,
    upstream, whole,
};

async fn answered(client: &mut RawClient) -> (u16, Vec<u8>, BodyEnd) {
    let head = client.final_head().await.expect("head");
    let (body, end) = client.rest().await.expect("body");
    (head.status, body, end)
}

async fn call(gate: &Gate, body: &Value) -> (u16, Vec<u8>, BodyEnd) {
    answered(&mut gate.post(CHAT, body).await).await
}

fn one_worker(config: &mut Config) {
    config.server.workers = slots(1);
}

#[tokio::test]
async fn c80_one_connection_carries_call_after_call() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, one_worker);
    let mut client = gate.client().await;
    for i in 0..100 {
        let body = if i % 2 == 0 {
            stream(json!({}))
        } else {
            whole(json!({}))
        };
        client.post(CHAT, &body.to_string()).await.expect("sent");
        assert_eq!(answered(&mut client).await.0, 200);
    }
    assert!(up.truth().connections_accepted <= 2, "{:?}", up.truth());
    gate.settled(&up).await;
}

/// The client has its end with the last event. A connection that ends properly soon after is kept; one that does not is closed, not awaited.
#[tokio::test]
async fn c80_an_end_that_comes_late_does_not_hold_the_client() {
    for (delay, kept) in [(Some(1), true), (Some(30), true), (None, false)] {
        let up = upstream(Script::default()).await;
        let gate = gateway(&up, one_worker);
        let rig = match delay {
            Some(ms) => json!({"stall": {"at": "terminator", "ms": ms}}),
            None => json!({"stall": {"at": "terminator"}}),
        };
        for i in 0..10 {
            let (status, _, end) = call(&gate, &stream(rig.clone())).await;
            assert_eq!((status, end), (200, BodyEnd::Clean));
            if kept {
                // The next call comes when the connection is back.
                eventually("the upstream is done", || {
                    up.truth().ended_complete == i + 1
                })
                .await;
            }
        }
        let opened = up.truth().connections_accepted;
        if kept {
            assert!(opened <= 4, "{delay:?}: {opened}");
        } else {
            assert_eq!(opened, 10);
        }
        gate.settled_with(&up, usize::from(kept) * 4).await;
        for line in gate.stop() {
            assert_eq!(line["outcome"], "ok");
        }
    }
}

#[tokio::test]
async fn error_answers_give_their_connection_back() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        one_worker(c);
        only(c).pool.connections_max = 2;
        only(c).timeouts.pool = Duration::from_secs(5);
    });
    let error = |bytes: usize| {
        json!({"status": 429, "headers": [["content-type", "application/json"]],
               "body": {"pieces": [{"text": format!("{{\"error\":{{\"message\":\"{}\"}}}}", "x".repeat(bytes))}]}})
    };
    for _ in 0..30 {
        assert_eq!(call(&gate, &stream(error(2000))).await.0, 429);
    }
    assert!(up.truth().connections_accepted <= 2, "{:?}", up.truth());
    for _ in 0..4 {
        let (status, body, end) = call(&gate, &stream(error(5 * 1024 * 1024))).await;
        assert_eq!((status, end), (429, BodyEnd::Clean));
        assert!(body.len() > 5 * 1024 * 1024);
    }
    // Endless: whoever leaves it sets it free.
    for _ in 0..4 {
        let rig = json!({"status": 429, "body": {"pieces": [{"text": "x".repeat(50_000), "times": 100_000_000}]}});
        let mut client = gate.post(CHAT, &stream(rig)).await;
        assert_eq!(client.final_head().await.expect("head").status, 429);
        client.body_bytes(3_000_000).await.expect("it flows");
        client.leave_rst().expect("left");
    }
    assert_eq!(call(&gate, &stream(json!({"tokens": 2}))).await.0, 200);
    gate.settled(&up).await;
}

#[tokio::test]
async fn an_idle_connection_is_closed_before_the_server_would() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| only(c).pool.idle = Duration::from_millis(200));
    assert_eq!(call(&gate, &whole(json!({}))).await.0, 200);
    up.wait_for(|t| t.connections_open == 0, SOON)
        .await
        .expect("closed by its own limit");
    gate.eventually("it is known", |g| {
        g.metric("upstream_connections", &[]) == 0.0
    })
    .await;
}

/// `Keep-Alive: timeout=1` shortens a long limit: the connection is out of use half a second before the server's second is over.
#[tokio::test]
async fn the_servers_keep_alive_shortens_the_idle_limit() {
    let up = upstream(Script {
        keep_alive_s: Some(1),
        ..Script::default()
    })
    .await;
    let gate = gateway(&up, |c| only(c).pool.idle = Duration::from_secs(600));
    assert_eq!(call(&gate, &whole(json!({}))).await.0, 200);
    up.wait_for(|t| t.connections_open == 0, SOON)
        .await
        .expect("closed before the server's limit");
}

/// An idle connection that the server closes is not kept half-closed.
#[tokio::test]
async fn c85_an_idle_connection_that_the_server_closes_is_let_go() {
    for script in [
        Script {
            idle_close_ms: Some(50),
            ..Script::default()
        },
        Script {
            idle_408_ms: Some(50),
            ..Script::default()
        },
    ] {
        let up = upstream(script).await;
        let gate = gateway(&up, |c| only(c).pool.idle = Duration::from_secs(600));
        assert_eq!(call(&gate, &whole(json!({}))).await.0, 200);
        gate.eventually("it is let go", |g| {
            g.metric("upstream_connections", &[]) == 0.0
        })
        .await;
        gate.settled_with(&up, 0).await;
        // Nothing of what the server said to nobody reaches the next call.
        let (status, _, end) = call(&gate, &whole(json!({}))).await;
        assert_eq!((status, end), (200, BodyEnd::Clean));
        assert_eq!(gate.metric("retries_total", &[]), 0.0);
    }
}

#[tokio::test]
async fn c85_a_connection_with_surplus_bytes_is_not_used_again() {
    for end in ["extra", "short_length"] {
        let up = upstream(Script::default()).await;
        let gate = gateway(&up, one_worker);
        for _ in 0..5 {
            call(&gate, &whole(json!({"end": end}))).await;
            let (status, body, end) = call(&gate, &whole(json!({}))).await;
            assert_eq!((status, end), (200, BodyEnd::Clean));
            let body: Value = serde_json::from_slice(&body).expect("its own answer");
            assert_eq!(body["object"], "chat.completion");
        }
        gate.settled(&up).await;
    }
}

/// The upstream had the request: whatever becomes of it, it is generated once, and the client learns that it may have run.
#[tokio::test]
async fn a_lost_answer_is_never_generated_twice() {
    let lost = [
        json!({"body": {"wire": []}, "end": "rst"}),
        json!({"body": {"wire": []}, "end": "fin"}),
        json!({"body": {"wire": [{"text": "HTTP/1.1 2"}]}, "end": "fin"}),
        json!({"body": {"wire": [{"text": "nonsense\r\n\r\n"}]}}),
    ];
    for warm in [false, true] {
        for (i, rig) in lost.iter().enumerate() {
            let up = upstream(Script::default()).await;
            let gate = gateway(&up, one_worker);
            if warm {
                for _ in 0..3 {
                    assert_eq!(call(&gate, &whole(json!({}))).await.0, 200);
                }
            }
            let before = up.truth().calls_begun;
            let mut client = gate.post(CHAT, &stream(rig.clone())).await;
            let head = client.final_head().await.expect("head");
            assert_eq!(head.status, 502, "{warm} {rig}");
            assert_eq!(head.header("x-tidegate-started"), Some("true"));
            gate.settled(&up).await;
            assert_eq!(up.truth().calls_begun, before + 1, "warm {warm}, case {i}");
            assert_eq!(gate.metric("retries_total", &[]), 0.0);
        }
    }
}

#[tokio::test]
async fn an_answer_lost_after_its_head_is_never_generated_twice() {
    for rig in [
        json!({"end": "rst", "end_at": 0}),
        json!({"end": "rst", "end_at": 1}),
        json!({"end": "fin", "end_at": 2}),
        json!({"status": 502}),
    ] {
        let up = upstream(Script::default()).await;
        let gate = gateway(&up, one_worker);
        assert_eq!(call(&gate, &whole(json!({}))).await.0, 200);
        let (status, _, end) = call(&gate, &stream(rig.clone())).await;
        assert!(status == 502 || !end.looks_whole(), "{rig}");
        gate.settled(&up).await;
        assert_eq!(up.truth().calls_begun, 2, "{rig}");
    }
}

/// A kept connection that is cut when the next request comes: the request may have been read, so it is not sent again.
#[tokio::test]
async fn c54_a_kept_connection_that_dies_with_the_request_in_hand_is_not_retried() {
    for next in ["rst", "close"] {
        let up = upstream(Script::default()).await;
        let gate = gateway(&up, one_worker);
        assert_eq!(call(&gate, &whole(json!({"next": next}))).await.0, 200);
        let (status, body, _) = call(&gate, &whole(json!({}))).await;
        assert_eq!(status, 502, "{next}");
        let body: Value = serde_json::from_slice(&body).expect("JSON");
        assert_eq!(body["error"]["code"], "broken");
        assert_eq!(up.truth().calls_begun, 1);
        assert_eq!(
            call(&gate, &whole(json!({}))).await.0,
            200,
            "the next is served"
        );
        gate.settled(&up).await;
    }
}

/// A connection that the server has reset while it was idle took nothing: the call is made on a new one, once.
#[tokio::test]
async fn c54_a_dead_idle_connection_costs_nobody_a_call() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| only(c).pool.idle = Duration::from_secs(600));
    for i in 0..20 {
        let (status, ..) = call(&gate, &whole(json!({}))).await;
        assert_eq!(status, 200, "call {i}");
        up.cut_all(if i % 2 == 0 {
            tidegate_rig::PeerEnd::Rst
        } else {
            tidegate_rig::PeerEnd::Fin
        });
        up.wait_for(|t| t.connections_open == 0, SOON)
            .await
            .expect("cut");
    }
    assert_eq!(up.truth().calls_begun, 20, "each was generated once");
}

/// All streams reset at once: the gateway answers on, and nothing is left half-closed.
#[tokio::test]
async fn a_hundred_resets_at_once_do_not_wedge_it() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).slots = slots(200);
        only(c).pool.connections_max = 200;
    });
    let body = stream(json!({"end": "never", "pace_ms": 20}));
    let mut clients = Vec::new();
    for _ in 0..100 {
        clients.push(gate.post(CHAT, &body).await);
    }
    for client in &mut clients {
        client.final_head().await.expect("head");
    }
    up.cut_all(tidegate_rig::PeerEnd::Rst);
    for client in &mut clients {
        let (events, end) = client.all_events().await.expect("an end");
        assert!(!end.looks_whole(), "{end:?} {:?}", events.last());
    }
    for _ in 0..20 {
        assert_eq!(call(&gate, &whole(json!({}))).await.0, 200);
    }
    gate.settled(&up).await;
    assert_eq!(
        gate.metric("calls_total", &[("outcome", "upstream_truncated")]),
        100.0
    );
}

/// Many short calls, errors among them, from many clients: few connections, none left behind.
#[tokio::test]
async fn many_short_calls_need_few_connections() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut tasks = tokio::task::JoinSet::new();
    for lane in 0..16 {
        let addr = gate.addr();
        tasks.spawn(async move {
            let mut client = RawClient::connect(addr).await.expect("accepted");
            let ok = whole(json!({})).to_string();
            let bad = whole(json!({"status": 500})).to_string();
            let key = format!("Bearer key-{}", lane % 3);
            for i in 0..60 {
                let body = if i % 4 == 0 { &bad } else { &ok };
                client
                    .request("POST", CHAT, &[("authorization", &key)], body.as_bytes())
                    .await
                    .expect("sent");
                answered(&mut client).await;
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.expect("served");
    }
    assert_eq!(up.truth().calls_begun, 960);
    assert!(up.truth().connections_accepted <= 32, "{:?}", up.truth());
    gate.settled_with(&up, 32).await;
}

fn pool_of(ups: &[&FakeUpstream], eject: Duration) -> impl FnOnce(&mut Config) {
    let endpoints = ups.iter().map(|u| endpoint(u.addr())).collect();
    move |config| {
        only(config).endpoints = endpoints;
        only(config).pool.eject = eject;
    }
}

#[tokio::test]
async fn the_endpoint_with_the_least_in_flight_is_taken() {
    let (one, two) = (
        upstream(Script::default()).await,
        upstream(Script::default()).await,
    );
    let gate = gateway(&one, pool_of(&[&one, &two], Duration::from_secs(5)));
    let mut clients = Vec::new();
    for _ in 0..20 {
        let mut client = gate
            .post(CHAT, &stream(json!({"end": "never", "pace_ms": 20})))
            .await;
        client.final_head().await.expect("head");
        clients.push(client);
    }
    assert_eq!((one.truth().running, two.truth().running), (10, 10));
    drop(clients);
    gate.settled(&one).await;
}

/// Refused there, so it is tried elsewhere; the endpoint is left out for a while and then comes back.
#[tokio::test]
async fn c25_c54_an_endpoint_that_refuses_is_left_out_and_comes_back() {
    let (one, two) = (
        upstream(Script::default()).await,
        upstream(Script::default()).await,
    );
    let refuse: tidegate_rig::script::Accept =
        serde_json::from_value(json!("refuse")).expect("a word");
    one.set_default(Script {
        accept: refuse,
        ..Script::default()
    });
    eventually("the port is closed", || {
        std::net::TcpStream::connect(one.addr()).is_err()
    })
    .await;
    let gate = gateway(&one, pool_of(&[&one, &two], Duration::from_millis(500)));
    for _ in 0..20 {
        let (status, ..) = call(&gate, &whole(json!({}))).await;
        assert_eq!(status, 200);
    }
    assert_eq!(two.truth().calls_begun, 20, "each was generated once");
    assert!(gate.metric("upstream_connect_errors_total", &[("reason", "refused")]) >= 1.0);
    let refused = gate.metric("retries_total", &[("reason", "refused")]);
    assert!(
        (1.0..20.0).contains(&refused),
        "left out after the first: {refused}"
    );
    one.set_default(Script::default());
    for i in 0.. {
        call(&gate, &whole(json!({}))).await;
        if one.truth().calls_begun > 0 {
            break;
        }
        assert!(i < 2000, "it never came back");
    }
    assert_eq!(gate.metric("endpoint_ejected", &[]), 0.0);
    gate.settled(&two).await;
}

#[tokio::test]
async fn all_endpoints_refuse_is_a_502_after_each_was_tried_once() {
    let (one, two) = (
        upstream(Script::default()).await,
        upstream(Script::default()).await,
    );
    let gate = gateway(&one, pool_of(&[&one, &two], Duration::from_secs(5)));
    let (a, b) = (one.addr(), two.addr());
    drop((one, two));
    eventually("both are gone", || {
        [a, b]
            .iter()
            .all(|p| std::net::TcpStream::connect(p).is_err())
    })
    .await;
    for _ in 0..2 {
        let (status, ..) = call(&gate, &whole(json!({}))).await;
        assert_eq!(
            status, 502,
            "tried although left out: better than to refuse"
        );
    }
    for line in gate.logged(2).await {
        assert_eq!(line["attempts"], 2);
    }
}

fn named(name: &str, up: &FakeUpstream, models: &[&str]) -> Upstream {
    let mut upstream = Upstream::new(name, Kind::Other, vec![endpoint(up.addr())]);
    upstream.models = models.iter().map(|m| (*m).to_owned()).collect();
    upstream
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "one scene, told in its order")]
async fn models_are_routed_renamed_listed_and_refused() {
    let (one, two) = (
        upstream(Script::default()).await,
        upstream(Script::default()).await,
    );
    let gate = gateway(&one, |c| {
        let mut second = named("two", &two, &["big-*"]);
        second
            .aliases
            .insert("nick".to_owned(), "big-real".to_owned());
        c.upstreams = vec![named("one", &one, &["tiny"]), second];
        c.unknown_models = UnknownModels::Refuse;
    });
    for (model, to, sent) in [
        ("tiny", &one, "tiny"),
        ("big-7b", &two, "big-7b"),
        ("nick", &two, "big-real"),
    ] {
        let before = to.truth().calls_begun;
        assert_eq!(
            call(&gate, &ask(json!({"model": model}))).await.0,
            200,
            "{model}"
        );
        assert_eq!(to.truth().calls_begun, before + 1, "{model}");
        let body = to.calls().pop().and_then(|c| c.body).expect("kept");
        let body: Value = serde_json::from_slice(&body).expect("JSON");
        assert_eq!(body["model"], sent);
    }
    for path in [CHAT, MESSAGES, RESPONSES, "/v1/embeddings"] {
        let mut client = gate
            .post(path, &ask(json!({"model": "nobody/knows?it#"})))
            .await;
        let (status, body, _) = answered(&mut client).await;
        let body: Value = serde_json::from_slice(&body).expect("JSON");
        assert_eq!(status, 404, "{path}");
        if path == MESSAGES {
            assert_eq!(
                (&body["type"], &body["error"]["type"]),
                (&json!("error"), &json!("not_found_error"))
            );
        } else {
            assert_eq!(
                (&body["error"]["code"], &body["error"]["param"]),
                (&json!("model_not_found"), &json!("model"))
            );
        }
    }
    let mut client = gate.client().await;
    client
        .request("GET", "/v1/models", &[], b"")
        .await
        .expect("sent");
    let (status, body, _) = answered(&mut client).await;
    assert_eq!(status, 200);
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    let ids: Vec<&str> = body["data"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|m| m["id"].as_str())
        .collect();
    assert!(ids.contains(&"tiny") && ids.contains(&"nick"), "{ids:?}");
    assert!(
        ids.iter().all(|id| *id != "big-*"),
        "a pattern is no model: {ids:?}"
    );
    assert_eq!(
        one.truth().calls_begun + two.truth().calls_begun,
        3 + 2,
        "refused ones never got there"
    );
}

/// The list is of what answers and what is configured; a dead upstream takes nothing away from the others.
#[tokio::test]
async fn the_list_of_models_outlives_an_upstream() {
    let (one, two) = (
        upstream(Script::default()).await,
        upstream(Script::default()).await,
    );
    let gate = gateway(&one, |c| {
        c.upstreams = vec![named("one", &one, &["tiny"]), named("two", &two, &["big"])]
    });
    two.stop();
    let mut client = gate.client().await;
    client
        .request(
            "GET",
            "/v1/models",
            &[("anthropic-version", "2023-06-01")],
            b"",
        )
        .await
        .expect("sent");
    let (status, body, _) = answered(&mut client).await;
    assert_eq!(status, 200);
    let text = String::from_utf8_lossy(&body);
    assert!(
        text.contains("\"tiny\"") && text.contains("\"big\""),
        "{text}"
    );
}
