//! Upstream connections: kept while they are good, closed when they are not, never used for two calls at once, never retried into a second
//! generation.

use std::time::Duration;

use serde_json::{Value, json};
use tidegate::config::{Config, Kind, UnknownModels, Upstream};
use tidegate_rig::{BodyEnd, FakeUpstream, RawClient, Script};

use crate::support::{
    CHAT, Gate, MESSAGES, RESPONSES, SOON, ask, endpoint, eventually, gateway, gateway_at, only,
    slots, stream, upstream, whole,
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
    let closed = || tidegate_rig::free_port().expect("a port");
    let gate = gateway_at(closed(), |c| {
        only(c).endpoints.push(endpoint(closed()));
        only(c).pool.eject = Duration::from_secs(5);
    });
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
    let one = upstream(Script::default()).await;
    let closed = tidegate_rig::free_port().expect("a port");
    let gate = gateway(&one, |c| {
        let mut two = Upstream::new("two", Kind::Other, vec![endpoint(closed)]);
        two.models = vec!["big".to_owned()];
        c.upstreams = vec![named("one", &one, &["tiny"]), two];
    });
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
