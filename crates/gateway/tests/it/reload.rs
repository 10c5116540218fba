//! A new configuration: whole or not at all, and running calls keep what they began with.

use std::time::Duration;

use serde_json::json;
use tidegate::config::{Config, Kind, ServerTls, UnknownModels, Upstream};
use tidegate_rig::{BodyEnd, FakeUpstream, Script};

use crate::support::{
    CHAT, Gate, LOCALHOST, SOON, ask, endpoint, eventually, gateway, only, slots, stream, upstream,
    whole,
};

fn config_of(up: &FakeUpstream) -> Config {
    let mut config = Config::one_upstream(endpoint(up.addr()));
    config.server.listen = LOCALHOST;
    config.server.workers = slots(2);
    config.admin.listen = None;
    config
}

fn named(name: &str, up: &FakeUpstream, model: &str) -> Upstream {
    let mut upstream = Upstream::new(name, Kind::Other, vec![endpoint(up.addr())]);
    upstream.models = vec![model.to_owned()];
    upstream
}

async fn status(gate: &Gate, model: &str) -> u16 {
    let mut client = gate.post(CHAT, &ask(json!({"model": model}))).await;
    let head = client.final_head().await.expect("head");
    client.rest().await.expect("body");
    head.status
}

/// Good ones, bad ones, ones that remove the upstream in use, ones that change the limits: no stream notices, and the limit holds in sum.
#[tokio::test]
async fn c112_a_hundred_reloads_cut_nothing_and_exceed_nothing() {
    let (up, other) = (
        upstream(Script::default()).await,
        upstream(Script::default()).await,
    );
    let gate = gateway(&up, |c| {
        only(c).slots = slots(10);
        only(c).queue = 200;
    });
    let body = stream(json!({"tokens": 60, "pace_ms": 5}));
    let mut clients = Vec::new();
    for _ in 0..10 {
        let mut client = gate.post(CHAT, &body).await;
        client.final_head().await.expect("head");
        clients.push(client);
    }
    for i in 0..100 {
        let mut config = config_of(&up);
        only(&mut config).slots = slots(10);
        only(&mut config).queue = 200;
        match i % 5 {
            0 => {
                config.server.tls = Some(ServerTls {
                    cert_file: "/nowhere".into(),
                    key_file: "/nowhere".into(),
                })
            }
            1 => {
                config.upstreams = vec![Upstream::new(
                    "other",
                    Kind::Other,
                    vec![endpoint(other.addr())],
                )]
            }
            2 => only(&mut config).slots = slots(1 + i % 10),
            _ => only(&mut config).timeouts.idle = Duration::from_millis(1),
        }
        assert_eq!(
            gate.gateway.reload(config).is_err(),
            i % 5 == 0,
            "reload {i}"
        );
        if i % 10 == 4 {
            clients.push(gate.post(CHAT, &stream(json!({"tokens": 3}))).await);
        }
    }
    assert_eq!(
        gate.metric("config_reloads_total", &[("result", "ok")]),
        80.0
    );
    assert_eq!(
        gate.metric("config_reloads_total", &[("result", "failed")]),
        20.0
    );
    assert_eq!(gate.metric("config_generation", &[]), 81.0);
    for client in &mut clients[..10] {
        let (events, end) = client.all_events().await.expect("events");
        assert_eq!(end, BodyEnd::Clean);
        assert_eq!(events.last().expect("events").data, "[DONE]");
    }
    assert!(up.truth().max_running <= 10);
    drop(clients);
    gate.settled(&up).await;
}

#[tokio::test]
async fn running_calls_keep_their_settings() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut running = gate
        .post(
            CHAT,
            &stream(json!({"tokens": 6, "stall": {"at": {"event": 3}, "ms": 4000}})),
        )
        .await;
    running.final_head().await.expect("head");
    running.events(2).await.expect("events");
    let mut config = config_of(&up);
    only(&mut config).timeouts.silence = Duration::from_millis(1000);
    gate.gateway.reload(config).expect("it is good");
    let mut new = gate
        .post(
            CHAT,
            &stream(json!({"tokens": 6, "stall": {"at": {"event": 3}}})),
        )
        .await;
    new.final_head().await.expect("head");
    assert!(
        !new.all_events().await.expect("events").1.looks_whole(),
        "the new limit"
    );
    assert_eq!(
        running.all_events().await.expect("events").1,
        BodyEnd::Clean,
        "the old one"
    );
    gate.logged(2).await;
    for (client, generation) in [(&running, 1), (&new, 2)] {
        let line = gate.line_of(client.local_addr().expect("an address")).await;
        assert_eq!(line["generation"], generation, "{line}");
    }
}

/// The limit is one limit: what runs under the old number counts against the new one.
#[tokio::test]
async fn a_lower_limit_counts_what_already_runs() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| only(c).slots = slots(4));
    let mut running = Vec::new();
    for _ in 0..4 {
        let mut client = gate
            .post(CHAT, &stream(json!({"end": "never", "pace_ms": 5})))
            .await;
        client.final_head().await.expect("head");
        running.push(client);
    }
    let mut config = config_of(&up);
    only(&mut config).slots = slots(2);
    gate.gateway.reload(config).expect("it is good");
    let mut waits = gate.post(CHAT, &whole(json!({}))).await;
    gate.eventually("it waits", |g| g.metric("queued", &[]) == 1.0)
        .await;
    for left in [3, 2] {
        running.pop().expect("one").leave_rst().expect("left");
        up.wait_for(|t| t.running == left, SOON)
            .await
            .expect("gone");
        gate.eventually("it is counted", |g| g.metric("running", &[]) as u64 == left)
            .await;
        assert_eq!(gate.metric("queued", &[]), 1.0, "{left} still run");
    }
    running.pop().expect("one").leave_rst().expect("left");
    assert_eq!(waits.final_head().await.expect("head").status, 200);
    drop(running);
    gate.settled(&up).await;
}

/// More slots are worth nothing without the connections for them.
#[tokio::test]
async fn a_higher_limit_brings_its_connections() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).slots = slots(1);
        only(c).pool.connections_max = 1;
    });
    let run = async || {
        let mut client = gate
            .post(CHAT, &stream(json!({"end": "never", "pace_ms": 5})))
            .await;
        assert_eq!(client.final_head().await.expect("head").status, 200);
        client
    };
    let mut running = vec![run().await];
    let resize = |n: usize| {
        let mut config = config_of(&up);
        only(&mut config).slots = slots(8);
        only(&mut config).pool.connections_max = n;
        only(&mut config).timeouts.pool = Duration::from_millis(300);
        gate.gateway.reload(config).expect("it is good");
    };
    resize(3);
    running.push(run().await);
    running.push(run().await);
    let mut fourth = gate.post(CHAT, &stream(json!({}))).await;
    assert_eq!(fourth.final_head().await.expect("head").status, 504);
    drop(running);
    gate.settled(&up).await;
    assert_eq!(status(&gate, "tiny").await, 200);
}

/// A call that arrived before its upstream was taken out and put back shares the limit with those that came after.
#[tokio::test]
async fn an_upstream_that_is_taken_out_and_put_back_has_one_limit() {
    let (one, two) = (
        upstream(Script::default()).await,
        upstream(Script::default()).await,
    );
    let with = || {
        let mut config = config_of(&one);
        let mut first = named("one", &one, "a");
        first.slots = slots(1);
        config.upstreams = vec![first, named("two", &two, "b")];
        config.unknown_models = UnknownModels::Refuse;
        config
    };
    let gate = Gate::start(with());
    // Its body is on the way: it belongs to the first generation.
    let body = ask(json!({"model": "a", "stream": true, "rig": {"end": "never", "pace_ms": 5}}))
        .to_string();
    let mut early = gate.client().await;
    early.send(format!("POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n", body.len())).await.expect("sent");
    early.send(&body[..20]).await.expect("sent");
    gate.eventually("it is being read", |g| {
        g.metric("request_bodies_bytes", &[]) > 0.0
    })
    .await;
    let mut without = with();
    without.upstreams.remove(0);
    gate.gateway.reload(without).expect("it is good");
    assert_eq!(status(&gate, "a").await, 404);
    gate.gateway.reload(with()).expect("it is good");
    let mut late = gate
        .post(
            CHAT,
            &ask(json!({"model": "a", "stream": true, "rig": {"end": "never", "pace_ms": 5}})),
        )
        .await;
    assert_eq!(late.final_head().await.expect("head").status, 200);
    early.send(&body[20..]).await.expect("sent");
    gate.eventually("it waits for the one slot", |g| {
        g.metric("queued", &[]) == 1.0
    })
    .await;
    assert_eq!(one.truth().running, 1);
    late.leave_rst().expect("left");
    assert_eq!(early.final_head().await.expect("head").status, 200);
    assert_eq!(one.truth().max_running, 1);
    drop(early);
    gate.settled(&one).await;
}

#[tokio::test]
async fn c112_a_removed_upstream_finishes_its_streams_and_is_gone() {
    let (one, two) = (
        upstream(Script::default()).await,
        upstream(Script::default()).await,
    );
    let mut config = config_of(&one);
    config.upstreams = vec![named("one", &one, "a"), named("two", &two, "b")];
    config.unknown_models = UnknownModels::Refuse;
    let gate = Gate::start(config.clone());
    let body = ask(json!({"model": "b", "stream": true, "rig": {"tokens": 100, "pace_ms": 30}}));
    let mut client = gate.post(CHAT, &body).await;
    client.final_head().await.expect("head");
    config.upstreams.pop();
    gate.gateway.reload(config).expect("it is good");
    assert_eq!(status(&gate, "b").await, 404);
    assert_eq!(
        gate.metric("running", &[("upstream", "two")]),
        1.0,
        "it is still counted"
    );
    let (_, end) = client.all_events().await.expect("events");
    assert_eq!(end, BodyEnd::Clean);
    gate.eventually("it is over", |g| {
        g.metric("running", &[("upstream", "two")]) == 0.0
    })
    .await;
    two.wait_for(|t| t.connections_open == 0, SOON)
        .await
        .expect("its connections are closed by the idle limit");
    let gauges = [
        "limit",
        "running",
        "oldest_running_seconds",
        "upstream_connections",
        "endpoint_ejected",
    ];
    gate.eventually("nothing of it stands still in the scrape", |g| {
        let text = g.gateway.metrics.encode();
        let is_left = |line: &str| {
            let named = |name: &&str| line.starts_with(&format!("tidegate_{name}{{"));
            line.contains("upstream=\"two\"") && gauges.iter().any(named)
        };
        !text.lines().any(is_left)
    })
    .await;
}

/// Measured against what runs, not against the file of the last reload.
#[tokio::test]
async fn what_needs_a_restart_is_said() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut config = config_of(&up);
    config.server.connections_max += 1;
    config.server.keep_alive *= 2;
    config.limits.request_head_bytes += 1;
    for generation in 2..=3 {
        let done = gate.gateway.reload(config.clone()).expect("it is good");
        assert_eq!(done.generation, generation);
        assert_eq!(
            done.needs_restart,
            ["server.keep_alive", "limits.request_head"]
        );
    }
    let done = gate.gateway.reload(config_of(&up)).expect("it is good");
    assert!(done.needs_restart.is_empty(), "{done:?}");
    eventually("counted", || gate.metric("config_generation", &[]) == 4.0).await;
}

/// Whoever is there stays; the next one needs a place under the new number.
#[tokio::test]
async fn fewer_client_connections_take_effect_as_places_become_free() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(gate.client().await);
    }
    let open = |n: f64| move |g: &Gate| g.metric("connections", &[("side", "downstream")]) == n;
    gate.eventually("all are in", open(4.0)).await;
    let mut config = config_of(&up);
    config.server.connections_max = 3;
    gate.gateway.reload(config).expect("it is good");
    for n in [4.0, 3.0] {
        let mut next = gate.client().await;
        assert_eq!(next.final_head().await.expect("head").status, 503, "{n}");
        clients.pop().expect("one").leave_fin();
        gate.eventually("it is out", open(n - 1.0)).await;
    }
    assert_eq!(status(&gate, "tiny").await, 200);
}

#[tokio::test]
async fn new_keys_hold_at_once() {
    use crate::security::key;
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| c.keys = vec![key("old", "sk-old")]);
    let answers = async |secret: &str| {
        let mut client = gate.client().await;
        client
            .request(
                "POST",
                CHAT,
                &[("x-api-key", secret)],
                whole(json!({})).to_string().as_bytes(),
            )
            .await
            .expect("sent");
        client.final_head().await.expect("head").status
    };
    assert_eq!(
        (answers("sk-old").await, answers("sk-new").await),
        (200, 401)
    );
    let mut config = config_of(&up);
    config.keys = vec![key("new", "sk-new")];
    gate.gateway.reload(config).expect("it is good");
    assert_eq!(
        (answers("sk-old").await, answers("sk-new").await),
        (401, 200)
    );
}

/// What counts is the socket that is open, not the address that the new file names.
#[tokio::test]
async fn a_public_socket_is_not_opened_by_a_reload() {
    use crate::security::key;
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        c.server.listen.set_ip([0, 0, 0, 0].into());
        c.keys = vec![key("one", "sk-one")];
    });
    let error = gate.gateway.reload(config_of(&up)).expect_err("refused");
    let said = error.to_string();
    assert!(
        said.contains("0.0.0.0") && said.contains("allow_unauthenticated"),
        "{said}"
    );
    assert_eq!(status(&gate, "tiny").await, 401, "the old one goes on");
    let mut told = config_of(&up);
    told.server.allow_unauthenticated = true;
    gate.gateway.reload(told).expect("it is said");
    assert_eq!(status(&gate, "tiny").await, 200);
    gate.gateway.reload(config_of(&up)).expect_err("refused");
}
