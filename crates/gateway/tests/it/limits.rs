//! Clients that send too much, too slowly or nothing, and clients that do not read: each is bounded, and nobody else feels it.

use std::time::Duration;

use serde_json::{Value, json};
use tidegate_rig::{BodyEnd, Closed, RawClient, Script};

use crate::cases::stage::{Http, Stage, on_backs, routes};
use crate::support::{
    CHAT, Gate, MESSAGES, SOON, ask, eventually, gateway, only, slots, stream, upstream, whole,
};

const SHORT: Duration = Duration::from_millis(400);

async fn served(gate: &Gate) {
    let mut client = gate.post(CHAT, &whole(json!({}))).await;
    assert_eq!(client.final_head().await.expect("head").status, 200);
    assert_eq!(client.rest().await.expect("body").1, BodyEnd::Clean);
}

async fn ended(gate: &Gate, reason: &str, n: usize) {
    gate.eventually(reason, |g| {
        g.metric("connections_ended_total", &[("reason", reason)]) as usize == n
    })
    .await;
}

#[tokio::test]
async fn c118_connections_that_send_no_whole_head_are_closed_by_the_head_limit() {
    let change = |c: &mut tidegate::config::Config| {
        only(c).timeouts.request_head = SHORT;
        c.server.keep_alive = Duration::from_secs(60);
    };
    on_backs(Http::One, change, async |stage: &Stage| {
        let (gate, up) = (&stage.gate, &stage.up);
        let begun = |path| format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nX-Slow: ");
        let mut starts = ["", "P", "PRI * HT"].map(str::to_owned).to_vec();
        starts.extend(routes().into_iter().map(begun));
        let mut clients = Vec::new();
        for i in 0..40 {
            let mut client = gate.client().await;
            client.send(&starts[i % starts.len()]).await.expect("sent");
            clients.push(client);
        }
        served(gate).await;
        for mut client in clients {
            assert_ne!(client.closed(SOON).await, Closed::Open);
        }
        ended(gate, "request_head", 40).await;
        assert_eq!(up.truth().calls_begun, 1);
    })
    .await;
}

/// A byte now and then feeds nothing.
#[tokio::test]
async fn c118_a_head_that_trickles_is_closed_by_the_head_limit() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| only(c).timeouts.request_head = SHORT);
    for first in [true, false] {
        let mut client = gate.client().await;
        if !first {
            client
                .post(CHAT, &whole(json!({})).to_string())
                .await
                .expect("sent");
            client.final_head().await.expect("head");
            client.rest().await.expect("body");
        }
        client
            .send("GET /v1/models HTTP/1.1\r\nX-Slow: ")
            .await
            .expect("sent");
        let mut closed = false;
        for _ in 0..1000 {
            client.set_limit(Duration::from_millis(20));
            let sent = client.send("x").await;
            closed =
                sent.is_err() || client.closed(Duration::from_millis(10)).await != Closed::Open;
            if closed {
                break;
            }
        }
        assert!(closed, "first {first}");
    }
    ended(&gate, "request_head", 2).await;
}

#[tokio::test]
async fn c118_connections_above_the_limit_are_told_so() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| c.server.connections_max = 5);
    let mut open = Vec::new();
    for i in 1..=5 {
        open.push(gate.client().await);
        gate.eventually("it is open", |g| {
            g.metric("connections", &[("side", "downstream")]) as usize == i
        })
        .await;
    }
    let mut sixth = gate.client().await;
    let head = sixth.final_head().await.expect("head");
    assert_eq!((head.status, head.header("retry-after")), (503, Some("1")));
    let (body, end) = sixth.rest().await.expect("body");
    assert_eq!(end, BodyEnd::Clean);
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    assert_eq!(body["error"]["code"], "connections_max");
    drop(open);
    gate.eventually("they are closed", |g| {
        g.metric("connections", &[("side", "downstream")]) == 0.0
    })
    .await;
    served(&gate).await;
}

#[tokio::test]
async fn a_head_that_is_too_large_is_a_431() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let large = |bytes: usize| {
        format!(
            "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nX-Large: {}\r\nContent-Length: 0\r\n\r\n",
            "x".repeat(bytes)
        )
    };
    let mut client = gate.client().await;
    client.send(large(60_000)).await.expect("sent");
    assert_eq!(
        client.final_head().await.expect("head").status,
        400,
        "64 KiB are within the limit; the empty body is not"
    );
    let mut client = gate.client().await;
    // The answer may come before all is sent.
    let _ = client.send(large(200_000)).await;
    assert_eq!(client.final_head().await.expect("head").status, 431);
    assert_ne!(client.closed(SOON).await, Closed::Open);
    assert_eq!(up.truth().calls_begun, 0);
}

/// Whoever writes on without reading still finds the refusal, because the socket is not closed over unread input.
#[tokio::test]
async fn c120_a_413_can_be_read_by_those_who_write_first() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| c.limits.request_body_bytes = 100_000);
    let body = vec![b' '; 3 * 1024 * 1024];
    let mut read = 0;
    for i in 0..100 {
        let mut client = gate.client().await;
        let framing = if i % 2 == 0 {
            format!("Content-Length: {}", body.len())
        } else {
            "Transfer-Encoding: chunked".to_owned()
        };
        let expect = if i % 4 == 0 {
            "Expect: 100-continue\r\n"
        } else {
            ""
        };
        client.send(format!("POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{expect}Content-Type: application/json\r\n{framing}\r\n\r\n")).await.expect("sent");
        // It may be cut off: what counts is what can be read after it.
        if i % 2 == 0 {
            let _ = client.send(&body).await;
        } else {
            let _ = client.send(format!("{:x}\r\n", body.len())).await;
            let _ = client.send(&body).await;
        }
        let head = client.final_head().await;
        if head.is_ok_and(|head| head.status == 413) {
            let (body, end) = client.rest().await.expect("body");
            let body: Value = serde_json::from_slice(&body).expect("JSON");
            assert_eq!(body["error"]["code"], "body_too_large");
            read += usize::from(end == BodyEnd::Clean);
        }
    }
    assert!(read >= 99, "{read} of 100");
    assert_eq!(up.truth().connections_accepted, 0);
    gate.settled(&up).await;
}

#[tokio::test]
async fn a_body_of_the_full_size_passes_unchanged() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let body = ask(json!({"padding": "y".repeat(20 * 1024 * 1024)})).to_string();
    let mut client = gate.client().await;
    client.post(CHAT, &body).await.expect("sent");
    assert_eq!(client.final_head().await.expect("head").status, 200);
    let call = up.calls().pop().expect("a call");
    assert_eq!(call.body_len as usize, body.len());
    let mut again = gate.client().await;
    again.post(CHAT, &body).await.expect("sent");
    again.final_head().await.expect("head");
    assert_eq!(up.calls().pop().expect("a call").body_hash, call.body_hash);
    gate.settled(&up).await;
}

async fn stalled(gate: &Gate, n: usize) -> Vec<RawClient> {
    let body = stream(json!({"end": "never", "event_bytes": 16_384})).to_string();
    let mut clients = Vec::new();
    for i in 0..n {
        let mut client = RawClient::connect_slow(gate.addr(), 4096)
            .await
            .expect("accepted");
        client
            .post([CHAT, MESSAGES][i % 2], &body)
            .await
            .expect("sent");
        assert_eq!(client.final_head().await.expect("head").status, 200);
        client.events(1).await.expect("it reads one");
        clients.push(client);
    }
    clients
}

/// They stop reading and keep their sockets: each is cut at the limit, its upstream with it, though they never close.
#[tokio::test]
async fn readers_that_stop_are_cut() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).timeouts.write = Duration::from_millis(800);
        only(c).slots = slots(100);
    });
    let clients = stalled(&gate, 30).await;
    up.wait_for(|t| t.running == 0, SOON)
        .await
        .expect("each upstream is let go");
    let written = up.truth().bytes_written;
    assert!(
        written < 30 * 8 * 1024 * 1024,
        "the upstream was held back: {written}"
    );
    gate.settled_with(&up, 0).await;
    for line in gate.logged(30).await {
        assert_eq!(
            (&line["outcome"], &line["wait_end"]),
            (&json!("client_stalled"), &json!("stalled"))
        );
    }
    assert_eq!(gate.metric("timeouts_total", &[("tier", "write")]), 30.0);
    ended(&gate, "write", 30).await;
    drop(clients);
}

#[tokio::test]
async fn a_reader_that_is_slow_but_moves_is_not_cut() {
    let up = upstream(Script::default()).await;
    let limit = Duration::from_secs(3);
    let gate = gateway(&up, |c| only(c).timeouts.write = limit);
    let body = stream(json!({"tokens": 200, "event_bytes": 16_384, "send_buffer": 65_536}));
    let mut client = RawClient::connect_slow(gate.addr(), 65_536)
        .await
        .expect("accepted");
    client.post(CHAT, &body.to_string()).await.expect("sent");
    client.final_head().await.expect("head");
    let mut read = 0;
    let mut pause = tokio::time::interval(limit / 6);
    // Three megabytes in pieces of 256 KiB, one each sixth of the limit: twice the limit in all.
    loop {
        pause.tick().await;
        let now = client.body_bytes(read + 262_144).await.expect("it goes on");
        if now < read + 262_144 {
            break;
        }
        read = now;
    }
    let (body, end) = client.rest().await.expect("body");
    assert_eq!(end, BodyEnd::Clean);
    assert!(body.len() > 3_000_000 && body.ends_with(b"data: [DONE]\n\n"));
    gate.settled(&up).await;
}

/// A reader that is slow enough never to be waited for does not escape the total either.
#[tokio::test]
async fn total_holds_for_a_slow_reader_of_a_fast_upstream() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).timeouts.total = Some(Duration::from_millis(800))
    });
    let body = stream(json!({"end": "never", "event_bytes": 16_384}));
    let mut client = RawClient::connect_slow(gate.addr(), 65_536)
        .await
        .expect("accepted");
    client.post(CHAT, &body.to_string()).await.expect("sent");
    client.final_head().await.expect("head");
    let mut pause = tokio::time::interval(Duration::from_millis(20));
    let mut read = 0;
    while up.truth().running > 0 {
        pause.tick().await;
        read = client.body_bytes(read + 65_536).await.expect("read");
        assert!(read < 50_000_000, "never cut");
    }
    let line = gate.logged(1).await.remove(0);
    assert_eq!(
        (&line["outcome"], &line["reason"]),
        (&json!("timeout"), &json!("total"))
    );
    assert!(
        line["wait_ended_ms"].as_f64().expect("a number") < 2500.0,
        "{line}"
    );
    let (events, end) = client.all_events().await.expect("events");
    assert!(!end.looks_whole());
    assert!(events.last().expect("an error").data.contains("\"total\""));
    gate.settled_with(&up, 0).await;
}

/// Health and metrics have a thread of their own.
#[tokio::test]
async fn c126_health_answers_while_all_is_full() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        c.admin.listen = Some(crate::support::LOCALHOST);
        only(c).slots = slots(2);
        only(c).queue = 2;
    });
    let mut crowd = Vec::new();
    for _ in 0..300 {
        crowd.push(
            gate.post(CHAT, &stream(json!({"stall": {"at": "head"}})))
                .await,
        );
    }
    let admin = gate.gateway.admin_addr().expect("on");
    let mut times = Vec::new();
    for _ in 0..20 {
        for path in ["/healthz", "/readyz", "/metrics"] {
            let began = tokio::time::Instant::now();
            let mut probe = RawClient::connect(admin).await.expect("accepted");
            probe.request("GET", path, &[], b"").await.expect("sent");
            assert_eq!(
                probe.final_head().await.expect("head").status,
                200,
                "{path}"
            );
            probe.rest().await.expect("body");
            times.push(began.elapsed());
        }
    }
    times.sort_unstable();
    assert!(
        times[times.len() / 2] < Duration::from_millis(100),
        "{times:?}"
    );
    drop(crowd);
    gate.settled(&up).await;
}

/// Time to the head, to the first byte and to the first token are three things.
#[tokio::test]
async fn the_first_token_is_not_the_first_byte() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let chunk =
        |delta: &str| format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{delta}}}]}}\n\n");
    let rig = json!({"delay_ms": 50, "body": {"pieces": [
        {"text": ": comment\n\n", "pause_ms": 60},
        {"text": chunk("{\"role\":\"assistant\",\"content\":\"\"}"), "pause_ms": 1500},
        {"text": chunk("{\"content\":\"hi\"}"), "pause_ms": 1500},
        {"text": "data: [DONE]\n\n"}]}, "headers": [["content-type", "text/event-stream"]]});
    let mut client = gate.post(CHAT, &stream(rig)).await;
    client.final_head().await.expect("head");
    client.all_events().await.expect("events");
    let line = gate.logged(1).await.remove(0);
    let ms = |name: &str| {
        line[name]
            .as_f64()
            .unwrap_or_else(|| panic!("{name}: {line}"))
    };
    let (head, byte, token, end) = (
        ms("head_ms"),
        ms("first_byte_ms"),
        ms("first_token_ms"),
        ms("wait_ended_ms"),
    );
    assert!(
        head >= 49.0 && byte >= head && token >= byte + 500.0 && end >= token + 500.0,
        "{line}"
    );
    let mut client = gate.post(CHAT, &whole(json!({}))).await;
    client.final_head().await.expect("head");
    let lines = gate.logged(2).await;
    assert!(lines[1].get("first_token_ms").is_none(), "{}", lines[1]);
    eventually("one measured", || {
        gate.metric("time_to_first_token_seconds_count", &[]) == 1.0
    })
    .await;
}

/// The operator's port has few places. Clients that ask and read nothing, or send no head, cannot hold them.
#[tokio::test]
async fn whoever_does_not_read_holds_no_place_of_the_admin_port() {
    const PLACES: usize = 64;
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        c.admin.listen = Some(crate::support::LOCALHOST);
        c.server.tcp_user_timeout = Duration::from_secs(1);
    });
    let admin = gate.gateway.admin_addr().expect("on");
    let asks = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(400);
    let mut deaf = Vec::new();
    for _ in 0..PLACES {
        let mut client = RawClient::connect_slow(admin, 4096)
            .await
            .expect("accepted");
        client.send(asks.as_bytes()).await.expect("sent");
        deaf.push(client);
    }
    let answers = async || {
        let mut probe = RawClient::connect(admin).await.expect("accepted");
        if probe.request("GET", "/healthz", &[], b"").await.is_err() {
            return false;
        }
        probe
            .final_head()
            .await
            .is_ok_and(|head| head.status == 200)
    };
    let end = tokio::time::Instant::now() + SOON;
    while !answers().await {
        assert!(tokio::time::Instant::now() < end, "nobody else gets in");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(deaf);
}
