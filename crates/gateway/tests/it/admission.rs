//! Slots, queue and refusals: nothing runs without a slot, nothing waits without a bound, and every slot comes back.

use std::time::Duration;

use serde_json::{Value, json};
use tidegate::config::Timeouts;
use tidegate_rig::{Closed, RawClient, Script};

use crate::support::{
    CHAT, Gate, MESSAGES, RESPONSES, SOON, ask, eventually, gateway, only, slots, stream, upstream,
    whole,
};

const ENDLESS: &str = r#"{"end": "never", "pace_ms": 5}"#;

fn endless() -> Value {
    stream(serde_json::from_str(ENDLESS).expect("JSON"))
}

async fn running(gate: &Gate, n: usize) -> Vec<RawClient> {
    let mut clients = Vec::new();
    for _ in 0..n {
        let mut client = gate.post(CHAT, &endless()).await;
        assert_eq!(client.final_head().await.expect("head").status, 200);
        clients.push(client);
    }
    clients
}

async fn queued(gate: &Gate, path: &str, n: usize) -> Vec<RawClient> {
    let mut clients = Vec::new();
    for i in 1..=n {
        clients.push(gate.post(path, &whole(json!({}))).await);
        gate.eventually("it waits", |g| g.metric("queued", &[]) as usize == i)
            .await;
    }
    clients
}

/// Two run, three wait, the rest is told at once, in its own dialect, when to come again.
#[tokio::test]
async fn a_full_queue_refuses_at_once_in_each_dialect() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).slots = slots(2);
        only(c).queue = 3;
    });
    let run = running(&gate, 2).await;
    let wait = queued(&gate, CHAT, 3).await;
    for round in 0..45 {
        let path = [CHAT, MESSAGES, RESPONSES][round % 3];
        let mut client = gate.post(path, &stream(json!({}))).await;
        let head = client.final_head().await.expect("head");
        assert_eq!(head.status, 503, "{path}");
        let after: u32 = head
            .header("retry-after")
            .expect("a hint")
            .parse()
            .expect("seconds");
        assert!((1..=60).contains(&after));
        let (body, _) = client.rest().await.expect("body");
        let body: Value = serde_json::from_slice(&body).expect("JSON");
        assert_eq!(body["error"]["type"], "overloaded_error", "{path}");
        assert_eq!(body["type"] == "error", path == MESSAGES, "{path}: {body}");
        if path != MESSAGES {
            assert_eq!(body["error"]["code"], "queue_full");
        }
    }
    assert_eq!(gate.metric("queued", &[]), 3.0);
    assert_eq!(
        gate.metric("refusals_total", &[("reason", "queue_full")]),
        45.0
    );
    drop(run);
    for mut client in wait {
        assert_eq!(client.final_head().await.expect("head").status, 200);
    }
    assert_eq!(up.truth().max_running, 2);
    assert_eq!(up.truth().calls_begun, 5);
    gate.settled(&up).await;
    let lines = gate.stop();
    assert_eq!(
        lines.iter().filter(|l| l["outcome"] == "refused").count(),
        45
    );
    assert_eq!(lines.len(), 50, "one line for each call");
}

/// A body that nobody has room for is not read.
#[tokio::test]
async fn a_refusal_comes_before_the_body_is_read() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).slots = slots(1);
        only(c).queue = 0;
    });
    let _run = running(&gate, 1).await;
    let mut client = gate.client().await;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
    );
    client.send(head).await.expect("sent");
    assert_eq!(client.final_head().await.expect("head").status, 503);
    assert_ne!(
        client.closed(SOON).await,
        Closed::Open,
        "the unread body is not taken for a request"
    );
    assert_eq!(gate.metric("request_bodies_bytes", &[]), 0.0);
}

#[tokio::test]
async fn bodies_in_memory_are_bounded_in_sum() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        c.limits.request_bodies_total_bytes = 150_000;
        only(c).slots = slots(64);
    });
    let body =
        ask(json!({"stream": true, "padding": "x".repeat(100_000), "rig": {"delay_ms": 60_000}}));
    let first = gate.post(CHAT, &body).await;
    gate.eventually("the first is held", |g| {
        g.metric("request_bodies_bytes", &[]) > 100_000.0
    })
    .await;
    let mut second = gate.post(CHAT, &body).await;
    let head = second.final_head().await.expect("head");
    assert_eq!(head.status, 503);
    assert_eq!(head.header("retry-after"), Some("1"));
    first.leave_rst().expect("left");
    gate.settled(&up).await;
}

/// The body is needed no more once the answer has begun.
#[tokio::test]
async fn a_body_is_let_go_when_the_answer_begins() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let body = ask(
        json!({"stream": true, "padding": "x".repeat(500_000), "rig": {"end": "never", "pace_ms": 10}}),
    );
    let mut client = gate.post(CHAT, &body).await;
    client.final_head().await.expect("head");
    client.events(2).await.expect("events");
    gate.eventually("it is let go", |g| {
        g.metric("request_bodies_bytes", &[]) == 0.0
    })
    .await;
    client.leave_rst().expect("left");
    gate.settled(&up).await;
}

/// The slot is the work's: it comes back with the last byte, not with the head.
#[tokio::test]
async fn a_slot_is_held_to_the_last_byte_over_all_workers() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        c.server.workers = slots(4);
        only(c).slots = slots(4);
        only(c).queue = 100;
    });
    let body = stream(json!({"tokens": 20, "pace_ms": 4}));
    let begun = async || {
        let mut clients = Vec::new();
        for _ in 0..40 {
            clients.push(gate.post(CHAT, &body).await);
        }
        clients
    };
    for mut client in begun().await {
        client.final_head().await.expect("head");
        client.all_events().await.expect("events");
    }
    assert_eq!(up.truth().max_running, 4);
    for (i, mut client) in begun().await.into_iter().enumerate() {
        client.final_head().await.expect("head");
        // Every fifth leaves in the middle: its slot goes to another, perhaps before the upstream has looked at its end.
        if i % 5 == 0 {
            client.events(2).await.expect("events");
            client.leave_rst().expect("left");
        } else {
            client.all_events().await.expect("events");
        }
    }
    gate.settled(&up).await;
    assert_eq!(gate.metric("started_total", &[]), 80.0);
    assert_eq!(gate.metric("ended_total", &[]), 80.0);
}

/// Every way to end gives the slot back: three run after all of them, and a fourth waits.
#[tokio::test]
async fn every_way_to_end_gives_the_slot_back() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).slots = slots(3);
        only(c).queue = 3;
        only(c).timeouts.silence = Duration::from_millis(100);
        only(c).timeouts.response_head = Duration::from_millis(300);
        c.limits.request_body_bytes = 100_000;
    });
    let ends = [
        json!({"tokens": 2}),
        json!({"end": "rst", "tokens": 3}),
        json!({"end": "fin", "tokens": 3}),
        json!({"stall": {"at": "head"}}),
        json!({"stall": {"at": {"event": 2}}}),
        json!({"status": 500}),
        json!({"status": 429, "retry_after": "1"}),
        json!({"body": "html"}),
        json!({"error_at": 2}),
        json!({"end": "bad_chunk", "tokens": 3}),
    ];
    for path in [CHAT, MESSAGES, RESPONSES] {
        for end in &ends {
            let mut client = gate.post(path, &stream(end.clone())).await;
            client.final_head().await.expect("head");
            client.rest().await.expect("an end");
        }
    }
    // The short limits have done their part: what is left and what runs at the end is ended by nothing else.
    let mut config = gate.config();
    only(&mut config).timeouts = Timeouts::default();
    gate.gateway.reload(config).expect("it is good");
    for path in [CHAT, MESSAGES, RESPONSES] {
        for bad in ["{", "[]", &"x".repeat(200_000)] {
            let mut client = gate.client().await;
            client
                .request("POST", path, &[], bad.as_bytes())
                .await
                .expect("sent");
            assert!(client.final_head().await.expect("head").status >= 400);
        }
        for rig in [
            json!({"stall": {"at": "head"}}),
            json!({"first_ms": 60_000}),
            json!({"end": "never", "pace_ms": 5}),
        ] {
            let before = up.truth().calls_begun;
            let client = gate.post(path, &stream(rig)).await;
            up.wait_for(|t| t.calls_begun > before, SOON)
                .await
                .expect("begun");
            client.leave_rst().expect("left");
        }
    }
    gate.settled(&up).await;
    let run = running(&gate, 3).await;
    let fourth = gate.post(CHAT, &endless()).await;
    gate.eventually("the fourth waits", |g| g.metric("queued", &[]) == 1.0)
        .await;
    assert_eq!(gate.metric("running", &[]), 3.0);
    drop((run, fourth));
    gate.settled(&up).await;
}

/// A call that is cancelled while it waits never touches the upstream; the next in line is not held up by it.
#[tokio::test]
async fn a_client_that_leaves_the_queue_costs_nothing() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).slots = slots(1);
        only(c).queue = 8;
    });
    let run = running(&gate, 1).await;
    let mut waiting = queued(&gate, CHAT, 4).await;
    let stays = waiting.pop().expect("four");
    for (i, client) in waiting.into_iter().enumerate() {
        if i % 2 == 0 {
            client.leave_rst().expect("left");
        } else {
            client.leave_fin();
        }
    }
    gate.eventually("they are out", |g| g.metric("queued", &[]) == 1.0)
        .await;
    drop(run);
    let mut stays = stays;
    assert_eq!(stays.final_head().await.expect("head").status, 200);
    stays.rest().await.expect("body");
    assert_eq!(up.truth().calls_begun, 2);
    gate.settled(&up).await;
    let left = gate.metric("disconnects_total", &[("phase", "queued")]);
    assert_eq!(left, 3.0);
}

/// The gateway never repeats a refusal of the upstream, so nobody waits for a repeat with a slot in hand.
#[tokio::test]
async fn a_refused_call_holds_no_slot_for_another_try() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| only(c).slots = slots(2));
    for _ in 0..2 {
        let body = stream(json!({"status": 503, "retry_after": "5"}));
        let mut client = gate.post(CHAT, &body).await;
        let head = client.final_head().await.expect("head");
        assert_eq!((head.status, head.header("retry-after")), (503, Some("5")));
    }
    let mut third = gate.post(CHAT, &stream(json!({"tokens": 2}))).await;
    assert_eq!(third.final_head().await.expect("head").status, 200);
    third.rest().await.expect("body");
    assert_eq!(up.truth().calls_begun, 3, "no second attempts");
    assert_eq!(gate.metric("retries_total", &[]), 0.0);
    gate.settled(&up).await;
}

/// Clients that leave say nothing about the upstream's health: the endpoint stays in, all is served afterwards.
#[tokio::test]
async fn clients_that_leave_do_not_poison_the_upstream() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for rig in [
        json!({"stall": {"at": "head"}}),
        json!({"first_ms": 60_000}),
        json!({"end": "never", "pace_ms": 5}),
        json!({"status": 500, "stall": {"at": {"event": 0}}}),
    ] {
        for _ in 0..10 {
            let before = up.truth().calls_begun;
            let client = gate.post(CHAT, &stream(rig.clone())).await;
            up.wait_for(|t| t.calls_begun > before, SOON)
                .await
                .expect("begun");
            client.leave_rst().expect("left");
        }
    }
    gate.settled(&up).await;
    assert_eq!(gate.metric("endpoint_ejected", &[]), 0.0);
    assert_eq!(
        gate.metric("calls_total", &[("outcome", "upstream_failed")]),
        0.0
    );
    for _ in 0..10 {
        let mut client = gate.post(CHAT, &whole(json!({}))).await;
        assert_eq!(client.final_head().await.expect("head").status, 200);
    }
}

/// A server that runs on after a cancel keeps its slot for the time that is set for it, and it is shown.
#[tokio::test]
async fn c121_a_cancelled_call_keeps_its_slot_for_the_settle_time() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).slots = slots(1);
        only(c).settle = Duration::from_millis(1500);
    });
    let mut client = gate.post(CHAT, &endless()).await;
    client.final_head().await.expect("head");
    client.leave_rst().expect("left");
    gate.eventually("it lingers", |g| g.metric("lingering", &[]) == 1.0)
        .await;
    let mut next = gate.post(CHAT, &whole(json!({}))).await;
    gate.eventually("the next waits", |g| g.metric("queued", &[]) == 1.0)
        .await;
    up.wait_for(|t| t.running == 0, SOON)
        .await
        .expect("the exchange is gone although the slot is held");
    assert_eq!(gate.metric("queued", &[]), 1.0);
    assert_eq!(next.final_head().await.expect("head").status, 200);
    gate.settled(&up).await;
}

/// Who waits in vain behind calls whose clients have gone is told so, and not that the server is busy.
#[tokio::test]
async fn the_end_of_the_wait_says_when_leftovers_hold_all_slots() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).slots = slots(2);
        only(c).settle = Duration::from_secs(60);
        only(c).timeouts.queue = Duration::from_millis(200);
    });
    let mut left = [
        gate.post(CHAT, &endless()).await,
        gate.post(CHAT, &endless()).await,
    ];
    for client in &mut left {
        client.final_head().await.expect("head");
    }
    let [first, second] = left;
    first.leave_rst().expect("left");
    gate.eventually("it lingers", |g| g.metric("lingering", &[]) == 1.0)
        .await;
    let turned_away = async |reason: &str, words: &str| {
        let mut next = gate.post(CHAT, &whole(json!({}))).await;
        assert_eq!(next.final_head().await.expect("head").status, 503);
        let (body, _) = next.rest().await.expect("body");
        let body: Value = serde_json::from_slice(&body).expect("JSON");
        assert_eq!(body["error"]["code"], reason, "{body}");
        let message = body["error"]["message"].as_str().expect("words");
        assert!(message.contains(words), "{message}");
        assert_eq!(gate.metric("refusals_total", &[("reason", reason)]), 1.0);
    };
    turned_away("queue", "no slot became free in time; nothing").await;
    second.leave_rst().expect("left");
    gate.eventually("both linger", |g| g.metric("lingering", &[]) == 2.0)
        .await;
    turned_away("leftover_queue", "calls whose clients have gone hold").await;
    assert_eq!(gate.metric("timeouts_total", &[("tier", "queue")]), 2.0);
    assert!(gate.metric("oldest_lingering_seconds", &[]) > 0.2);
}

/// SDKs say how often they have tried; it is in the log.
#[tokio::test]
async fn the_clients_retry_count_is_logged() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut client = gate.client().await;
    let body = whole(json!({})).to_string();
    client
        .request(
            "POST",
            CHAT,
            &[("x-stainless-retry-count", "2")],
            body.as_bytes(),
        )
        .await
        .expect("sent");
    client.final_head().await.expect("head");
    let line = gate.logged(1).await.remove(0);
    assert_eq!(line["client_retry"], 2);
}

/// Five hundred clients, far more than slots and queue: what is not taken is refused without being read, and all is as before afterwards.
#[tokio::test]
async fn a_crowd_before_a_silent_upstream_is_bounded() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).slots = slots(4);
        only(c).queue = 8;
    });
    let body = ask(
        json!({"stream": true, "padding": "x".repeat(100_000), "rig": {"stall": {"at": "head"}}}),
    )
    .to_string();
    let mut clients = Vec::new();
    for _ in 0..500 {
        let mut client = gate.client().await;
        // The answer can come before the body is sent.
        let _ = client.request("POST", CHAT, &[], body.as_bytes()).await;
        clients.push(client);
    }
    gate.eventually("all others are refused", |g| {
        g.metric("refusals_total", &[("reason", "queue_full")]) == 488.0
    })
    .await;
    assert!(gate.metric("request_bodies_bytes", &[]) <= 12.0 * 101_000.0);
    assert_eq!(up.truth().max_running, 4);
    drop(clients);
    gate.settled(&up).await;
    eventually("no client connection is left", || {
        gate.metric("connections", &[("side", "downstream")]) == 0.0
    })
    .await;
}
