//! Every tier: its limit ends the wait, with its own status or in-band error, label and reason, and the upstream is let go.

use std::time::Duration;

use serde_json::{Value, json};
use tidegate::config::{Config, Endpoint, Timeouts};
use tidegate_rig::{BlackHole, BodyEnd, Closed, FakeUpstream, RawClient, Script};

use crate::support::{
    CHAT, Gate, LOCALHOST, MESSAGES, RESPONSES, SOON, ask, gateway, gateway_at, only, slots,
    stream, upstream, whole,
};

/// The tier under test; the others are far away.
const SHORT: Duration = Duration::from_millis(400);
const FAR: Duration = Duration::from_secs(60);

fn far(config: &mut Config) -> &mut Timeouts {
    let timeouts = &mut only(config).timeouts;
    *timeouts = Timeouts {
        request_head: FAR,
        request_body: FAR,
        queue: FAR,
        pool: FAR,
        connect: FAR,
        tls: FAR,
        response_head: FAR,
        first_event: FAR,
        silence: FAR,
        idle: FAR,
        write: FAR,
        total: None,
    };
    timeouts
}

async fn reset_at(up: &FakeUpstream) {
    up.wait_for(|t| t.running == 0 && t.ended_peer_rst == 1, SOON)
        .await
        .expect("the upstream is let go by a reset");
}

/// Status and `code` of an error that is the whole answer.
async fn refused(client: &mut RawClient) -> (u16, Value) {
    let head = client.final_head().await.expect("head");
    assert_eq!(head.header("content-type"), Some("application/json"));
    let (body, end) = client.rest().await.expect("body");
    assert_eq!(end, BodyEnd::Clean);
    let body: Value = serde_json::from_slice(&body).expect("an error is JSON");
    (head.status, body)
}

/// What the last event of a broken stream says.
async fn told(client: &mut RawClient) -> Value {
    let head = client.final_head().await.expect("head");
    assert_eq!(head.status, 200);
    let (events, end) = client.all_events().await.expect("events");
    assert!(!end.looks_whole(), "a broken stream ended cleanly");
    let last = events.last().expect("an error event");
    assert!(!events.iter().any(|e| e.data.contains("[DONE]")));
    serde_json::from_str(&last.data).expect("an error event is JSON")
}

async fn timed_out(gate: &Gate, tier: &str) -> Value {
    let line = gate.logged(1).await.remove(0);
    assert_eq!(line["outcome"], "timeout", "{line}");
    assert_eq!(line["reason"], tier, "{line}");
    assert_eq!(gate.metric("timeouts_total", &[("tier", tier)]), 1.0);
    assert_eq!(gate.metric("timeouts_total", &[]), 1.0, "one label only");
    line
}

#[tokio::test]
async fn response_head_of_a_server_that_never_answers() {
    for stall in ["head", "header_line"] {
        for streaming in [true, false] {
            let up = upstream(Script::default()).await;
            let gate = gateway(&up, |c| far(c).response_head = SHORT);
            let body = ask(json!({"stream": streaming, "rig": {"stall": {"at": stall}}}));
            let mut client = gate.post(CHAT, &body).await;
            let (status, error) = refused(&mut client).await;
            assert_eq!(
                (status, &error["error"]["code"]),
                (504, &json!("response_head"))
            );
            reset_at(&up).await;
            let line = timed_out(&gate, "response_head").await;
            assert_eq!(line["status"], 504);
            assert_eq!(line["attempts"], 1);
            assert_eq!(line["work_end"], "cancelled");
            assert_eq!(up.truth().calls_begun, 1);
            gate.settled(&up).await;
        }
    }
}

#[tokio::test]
async fn c17_response_head_of_a_server_that_only_accepts() {
    let up = upstream(Script {
        accept: serde_json::from_value(json!("hang")).expect("a word"),
        ..Script::default()
    })
    .await;
    let gate = gateway(&up, |c| far(c).response_head = SHORT);
    let mut client = gate.post(CHAT, &stream(json!({}))).await;
    assert_eq!(refused(&mut client).await.0, 504);
    timed_out(&gate, "response_head").await;
    gate.settled_with(&up, 0).await;
}

#[tokio::test]
async fn first_event_before_the_head_is_committed_is_a_504() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| far(c).first_event = Duration::from_millis(100));
    let body = stream(json!({"first_ms": 60_000}));
    let mut client = gate.post(CHAT, &body).await;
    let (status, error) = refused(&mut client).await;
    assert_eq!(
        (status, &error["error"]["code"]),
        (504, &json!("first_event"))
    );
    reset_at(&up).await;
    timed_out(&gate, "first_event").await;
    gate.settled_with(&up, 0).await;
}

/// Nothing that is sent to keep the client or the upstream's connection alive extends the wait.
#[tokio::test]
async fn c18_first_event_after_the_commit_is_told_in_band_whatever_beats_meanwhile() {
    for (upstream_beats, own_beats) in [(false, false), (true, false), (false, true), (true, true)]
    {
        let up = upstream(Script::default()).await;
        let gate = gateway(&up, |c| {
            far(c).first_event = SHORT + SHORT;
            only(c).heartbeat = own_beats.then_some(Duration::from_millis(50));
        });
        let mut rig = json!({"first_ms": 60_000});
        if upstream_beats {
            rig["heartbeat_ms"] = json!(30);
        }
        let mut client = gate.post(CHAT, &stream(rig)).await;
        assert_eq!(told(&mut client).await["error"]["code"], "first_event");
        reset_at(&up).await;
        timed_out(&gate, "first_event").await;
        gate.settled_with(&up, 0).await;
    }
}

/// Three waits, three budgets (first event, gap, first event again).
#[tokio::test]
async fn first_event_and_gap_are_different_budgets() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        let timeouts = far(c);
        timeouts.first_event = Duration::from_secs(6);
        timeouts.silence = Duration::from_secs(2);
    });
    // Longer than a gap may be, shorter than a first event.
    let body = stream(json!({"first_ms": 4000, "pace_ms": 5, "tokens": 5}));
    let mut late = gate.post(CHAT, &body).await;
    let body = stream(json!({"stall": {"at": {"event": 2}, "ms": 4000}, "tokens": 5}));
    let mut gap = gate.post(CHAT, &body).await;
    let body = stream(json!({"first_ms": 60_000}));
    let mut never = gate.post(CHAT, &body).await;
    late.final_head().await.expect("head");
    assert_eq!(late.all_events().await.expect("events").1, BodyEnd::Clean);
    assert_eq!(told(&mut gap).await["error"]["code"], "silence");
    assert_eq!(told(&mut never).await["error"]["code"], "first_event");
    gate.settled(&up).await;
}

#[tokio::test]
async fn silence_between_events_is_told_in_each_dialect() {
    for path in [CHAT, MESSAGES, RESPONSES] {
        let up = upstream(Script::default()).await;
        let gate = gateway(&up, |c| far(c).silence = SHORT);
        let body = stream(json!({"stall": {"at": {"event": 3}}, "tokens": 9}));
        let mut client = gate.post(path, &body).await;
        let error = told(&mut client).await;
        if path == MESSAGES {
            assert_eq!(error["type"], "error");
            assert_eq!(error["error"]["type"], "timeout_error");
        } else if path == RESPONSES {
            assert_eq!(
                (&error["type"], &error["code"]),
                (&json!("error"), &json!("silence"))
            );
        } else {
            assert_eq!(error["error"]["code"], "silence");
        }
        reset_at(&up).await;
        let line = timed_out(&gate, "silence").await;
        assert_eq!(
            (&line["status"], &line["wait_end"]),
            (&json!(200), &json!("failed"))
        );
        gate.settled_with(&up, 0).await;
    }
}

/// In mid-event nothing can be said any more: the break is all there is.
#[tokio::test]
async fn silence_inside_an_event_or_its_framing_breaks_off() {
    for at in [
        json!({"mid_event": 3}),
        json!({"chunk_size": 3}),
        json!({"mid_lines": 3}),
    ] {
        let up = upstream(Script::default()).await;
        let gate = gateway(&up, |c| far(c).silence = SHORT);
        let mut client = gate
            .post(MESSAGES, &stream(json!({"stall": {"at": at}, "tokens": 9})))
            .await;
        client.final_head().await.expect("head");
        let (_, end) = client.all_events().await.expect("events");
        assert!(!end.looks_whole(), "{at}: {end:?}");
        reset_at(&up).await;
        timed_out(&gate, "silence").await;
        gate.settled_with(&up, 0).await;
    }
}

/// Half of a short JSON is held back, so it can still be a 504; half of a long one breaks off.
#[tokio::test]
async fn c19_silence_inside_a_plain_answer() {
    let up = upstream(Script::default()).await;
    // Head and half in one: the time for which it is held back begins with the silence.
    let half = |bytes: usize| {
        let (length, half) = (2 * bytes, "x".repeat(bytes));
        let text = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{half}"
        );
        json!({"body": {"wire": [{"text": text, "pause_ms": 60_000}]}})
    };
    let gate = gateway(&up, |c| far(c).silence = Duration::from_millis(100));
    let mut client = gate.post(CHAT, &whole(half(500))).await;
    let (status, error) = refused(&mut client).await;
    assert_eq!((status, &error["error"]["code"]), (504, &json!("silence")));
    timed_out(&gate, "silence").await;
    gate.settled_with(&up, 0).await;
    let gate = gateway(&up, |c| far(c).silence = 3 * SHORT);
    let mut client = gate.post(CHAT, &whole(half(400_000))).await;
    assert_eq!(client.final_head().await.expect("head").status, 200);
    let (_, end) = client.rest().await.expect("body");
    assert!(!end.looks_whole(), "{end:?}");
    timed_out(&gate, "silence").await;
    gate.settled_with(&up, 0).await;
}

#[tokio::test]
async fn idle_is_not_fed_by_comments_or_pings() {
    let ping = "event: ping\ndata: {\"type\": \"ping\"}\n\n";
    for (path, beat) in [
        (CHAT, ": alive\n\n"),
        (MESSAGES, ping),
        (MESSAGES, ": alive\n\n"),
    ] {
        let up = upstream(Script::default()).await;
        let gate = gateway(&up, |c| far(c).idle = SHORT);
        let rig = json!({"stall": {"at": {"event": 3}}, "heartbeat_ms": 20, "heartbeat": beat, "tokens": 9});
        let mut client = gate.post(path, &stream(rig)).await;
        let error = told(&mut client).await;
        assert_eq!(
            error["error"]["message"],
            "the model server sent no meaningful event in time"
        );
        reset_at(&up).await;
        timed_out(&gate, "idle").await;
        gate.settled_with(&up, 0).await;
    }
}

/// An upstream that sends comments without a pause is never waited for, and must not get away with it.
#[tokio::test]
async fn idle_ends_a_flood_of_comments() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| far(c).idle = SHORT);
    let flood = ": x\n\n".repeat(2000);
    let rig = json!({"body": {"pieces": [{"text": "data: {\"choices\":[]}\n\n"}, {"text": flood, "times": 10_000_000}]}});
    let mut client = gate.post(CHAT, &stream(rig)).await;
    assert_eq!(client.final_head().await.expect("head").status, 200);
    let end = client.closed(SOON).await;
    assert_ne!(end, Closed::Open);
    timed_out(&gate, "idle").await;
    gate.settled_with(&up, 0).await;
}

#[tokio::test]
async fn silence_is_fed_by_comments() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| far(c).silence = Duration::from_secs(2));
    let rig = json!({"stall": {"at": {"event": 3}, "ms": 4000}, "heartbeat_ms": 50, "tokens": 9});
    let mut client = gate.post(CHAT, &stream(rig)).await;
    client.final_head().await.expect("head");
    assert_eq!(client.all_events().await.expect("events").1, BodyEnd::Clean);
    gate.settled(&up).await;
}

#[tokio::test]
async fn total_ends_a_stream_that_flows() {
    for pace_ms in [5, 0] {
        let up = upstream(Script::default()).await;
        let gate = gateway(&up, |c| far(c).total = Some(SHORT));
        let rig = json!({"end": "never", "pace_ms": pace_ms, "event_bytes": 2000});
        let mut client = gate.post(CHAT, &stream(rig)).await;
        assert_eq!(
            told(&mut client).await["error"]["code"],
            "total",
            "pace {pace_ms}"
        );
        reset_at(&up).await;
        let line = timed_out(&gate, "total").await;
        assert_eq!(line["work_end"], "cancelled");
        gate.settled_with(&up, 0).await;
    }
}

/// The total counts from the request, wherever it is spent.
#[tokio::test]
async fn total_counts_the_time_in_the_queue() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        far(c).total = Some(Duration::from_secs(3));
        only(c).slots = slots(1);
    });
    // Holds the only slot until its own total is over.
    let mut first = gate
        .post(CHAT, &stream(json!({"end": "never", "pace_ms": 50})))
        .await;
    first.final_head().await.expect("head");
    // For about half of it.
    first.events(30).await.expect("it runs");
    let mut second = gate.post(CHAT, &whole(json!({"delay_ms": 60_000}))).await;
    let peer = second.local_addr().expect("an address");
    assert_eq!(told_rest(&mut first).await, "total");
    let (status, error) = refused(&mut second).await;
    assert_eq!((status, &error["error"]["code"]), (504, &json!("total")));
    let line = gate.line_of(peer).await;
    let at = |name: &str| line[name].as_f64().expect("a number");
    let queued = at("admitted_ms") - at("queued_ms");
    let ran = at("wait_ended_ms") - at("admitted_ms");
    assert!(at("wait_ended_ms") >= 2999.0, "{line}");
    assert!(queued > 500.0 && ran < 2999.0 - 500.0, "{line}");
    assert_eq!(
        line["attempts"], 1,
        "it got the slot and was cut by the rest of its time"
    );
    gate.settled_with(&up, 0).await;
}

async fn told_rest(client: &mut RawClient) -> String {
    let (events, end) = client.all_events().await.expect("events");
    assert!(!end.looks_whole());
    let last: Value = serde_json::from_str(&events.last().expect("an event").data).expect("JSON");
    last["error"]["code"].as_str().expect("a code").to_owned()
}

#[tokio::test]
async fn queue_time_is_over_and_the_upstream_was_never_touched() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        far(c).queue = SHORT;
        only(c).slots = slots(1);
    });
    let mut first = gate
        .post(CHAT, &stream(json!({"end": "never", "pace_ms": 5})))
        .await;
    first.final_head().await.expect("head");
    let mut second = gate.post(MESSAGES, &stream(json!({}))).await;
    let head = second.final_head().await.expect("head");
    assert_eq!(head.status, 503);
    let wait: u32 = head
        .header("retry-after")
        .expect("a hint")
        .parse()
        .expect("seconds");
    assert!((1..=60).contains(&wait));
    assert_eq!(head.header("x-tidegate-started"), Some("false"));
    let (body, _) = second.rest().await.expect("body");
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    assert_eq!(
        body["error"]["type"], "overloaded_error",
        "the caller's dialect"
    );
    let line = timed_out(&gate, "queue").await;
    assert_eq!(
        (&line["attempts"], &line["work_end"]),
        (&json!(0), &json!("none"))
    );
    assert_eq!(up.truth().calls_begun, 1);
    first.leave_rst().expect("left");
    gate.settled_with(&up, 0).await;
}

#[tokio::test]
async fn pool_time_is_over_when_all_connections_are_busy() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        far(c).pool = SHORT;
        only(c).pool.connections_max = 1;
    });
    let mut first = gate
        .post(CHAT, &stream(json!({"end": "never", "pace_ms": 5})))
        .await;
    first.final_head().await.expect("head");
    let mut second = gate.post(CHAT, &stream(json!({}))).await;
    let (status, error) = refused(&mut second).await;
    assert_eq!((status, &error["error"]["code"]), (504, &json!("pool")));
    let line = timed_out(&gate, "pool").await;
    assert_eq!(line["work_end"], "none");
    assert_eq!(up.truth().connections_accepted, 1);
    first.leave_rst().expect("left");
    gate.settled_with(&up, 0).await;
}

#[tokio::test]
async fn c25_connect_to_a_port_that_does_not_accept() {
    let hole = BlackHole::start(LOCALHOST).expect("a port");
    let gate = gateway_at(hole.addr(), |c| far(c).connect = SHORT);
    let mut client = gate.post(CHAT, &stream(json!({}))).await;
    let (status, error) = refused(&mut client).await;
    assert_eq!((status, &error["error"]["code"]), (504, &json!("connect")));
    let line = timed_out(&gate, "connect").await;
    assert_eq!(line["work_end"], "none");
    assert_eq!(
        gate.metric("upstream_connect_errors_total", &[("reason", "connect")]),
        1.0
    );
    // A client that leaves in this phase ends the attempt with it.
    let gate = gateway_at(hole.addr(), |c| far(c).connect = FAR);
    let client = gate.post(CHAT, &stream(json!({}))).await;
    gate.eventually("it runs", |g| g.metric("running", &[]) == 1.0)
        .await;
    client.leave_rst().expect("left");
    let line = gate.logged(1).await.remove(0);
    assert_eq!(
        (&line["outcome"], &line["phase"]),
        (&json!("client_closed"), &json!("connecting"))
    );
    gate.eventually("the slot is back", |g| g.metric("running", &[]) == 0.0)
        .await;
}

#[tokio::test]
async fn c25_a_port_that_refuses_is_a_502_at_once() {
    let nobody = tidegate_rig::free_port().expect("a port");
    let gate = gateway_at(nobody, |c| {
        far(c);
    });
    let mut client = gate.post(CHAT, &stream(json!({}))).await;
    let (status, error) = refused(&mut client).await;
    assert_eq!((status, &error["error"]["code"]), (502, &json!("refused")));
    let line = gate.logged(1).await.remove(0);
    assert_eq!(line["outcome"], "upstream_failed");
    assert_eq!(line["work_end"], "none");
}

#[tokio::test]
async fn tls_handshake_that_a_server_does_not_answer() {
    let up = upstream(Script {
        accept: serde_json::from_value(json!("hang")).expect("a word"),
        ..Script::default()
    })
    .await;
    let gate = gateway(&up, |c| {
        far(c).tls = SHORT;
        let endpoint = Endpoint::parse(&format!("https://{}", up.addr())).expect("an endpoint");
        only(c).endpoints = vec![endpoint];
    });
    let mut client = gate.post(CHAT, &stream(json!({}))).await;
    let (status, error) = refused(&mut client).await;
    assert_eq!((status, &error["error"]["code"]), (504, &json!("tls")));
    timed_out(&gate, "tls").await;
    gate.settled_with(&up, 0).await;
}

#[tokio::test]
async fn a_request_body_that_stops_is_a_408_and_never_reaches_the_upstream() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| far(c).request_body = SHORT);
    for framing in ["Content-Length: 5000", "Transfer-Encoding: chunked"] {
        let mut client = gate.client().await;
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{framing}\r\n\r\n"
        );
        client.send(head).await.expect("sent");
        client.send("3e8\r\n{\"model\":").await.expect("sent");
        let (status, error) = refused(&mut client).await;
        assert_eq!(
            (status, &error["error"]["code"]),
            (408, &json!("request_body"))
        );
        assert_ne!(client.closed(SOON).await, Closed::Open, "{framing}");
    }
    for line in gate.logged(2).await {
        assert_eq!(
            (&line["outcome"], &line["reason"]),
            (&json!("timeout"), &json!("request_body"))
        );
    }
    assert_eq!(up.truth().connections_accepted, 0);
    assert_eq!(
        gate.metric("timeouts_total", &[("tier", "request_body")]),
        2.0
    );
}

/// One byte now and then keeps a connection busy but is no progress.
#[tokio::test]
async fn c27_a_request_body_that_trickles_is_a_408() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| far(c).request_body = SHORT);
    let mut client = gate.client().await;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n"
    );
    client.send(head).await.expect("sent");
    let mut head = None;
    for _ in 0..400 {
        client.set_limit(Duration::from_millis(20));
        // An error: the connection is closed already, what was said is there to be read.
        let _ = client.send(" ").await;
        if let Ok(said) = client.final_head().await {
            head = Some(said);
            break;
        }
    }
    assert_eq!(head.expect("an answer").status, 408);
}

/// The upload takes twice its window, and a response-head limit far below the upload's length does not see it.
#[tokio::test]
async fn a_slow_upload_that_moves_is_not_cut() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        let timeouts = far(c);
        timeouts.request_body = Duration::from_secs(2);
        timeouts.response_head = Duration::from_secs(2);
    });
    let body = ask(json!({"padding": "x".repeat(24 * 2048), "rig": {"delay_ms": 50}})).to_string();
    let mut client = gate.client().await;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    client.send(head).await.expect("sent");
    client
        .dribble(&body, 2048, Duration::from_millis(170))
        .await
        .expect("sent");
    assert_eq!(client.final_head().await.expect("head").status, 200);
    client.rest().await.expect("body");
    gate.settled(&up).await;
}
