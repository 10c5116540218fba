//! Clients that leave: every route, every phase, every way. Whoever leaves takes the upstream's work along, and the log says where they were.

use std::net::SocketAddr;
use std::sync::Arc;

use serde_json::{Value, json};
use tidegate::front::route::KNOWN;
use tidegate_rig::clock::now_ns;
use tidegate_rig::{BlackHole, FakeUpstream, RawClient, Script};
use tokio::task::JoinSet;

use crate::support::{
    CANCEL, CHAT, Gate, LOCALHOST, SOON, ask, deaf, gateway, gateway_at, only, room_for, slots,
    stream, upstream, whole,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Fin,
    Rst,
    HalfClose,
}

pub(crate) const WAYS: [Way; 3] = [Way::Fin, Way::Rst, Way::HalfClose];

/// Leaves; what is left of the client must be kept until the call has ended.
pub(crate) async fn leave(mut client: RawClient, how: Way) -> Option<RawClient> {
    match how {
        Way::Fin => client.leave_fin(),
        Way::Rst => client.leave_rst().expect("a reset"),
        Way::HalfClose => {
            client.half_close().await.expect("a FIN");
            return Some(client);
        }
    }
    None
}

/// Where a call is when its client leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Head,
    Silence,
    Streaming,
    Stalled,
    ErrorBody,
}

impl At {
    fn phase(self) -> &'static str {
        match self {
            Self::Head => "waiting_head",
            Self::Silence => "waiting_first_event",
            Self::Streaming | Self::Stalled | Self::ErrorBody => "streaming",
        }
    }

    fn script(self, streaming: bool) -> Value {
        let (kind, start, more) = if streaming {
            let event = "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n";
            ("text/event-stream", event, event)
        } else {
            ("application/json", "{\"text\":\"", "word ")
        };
        let hours = 3_600_000;
        match self {
            Self::Head => json!({"stall": {"at": "head"}}),
            Self::Silence => json!({
                "headers": [["content-type", kind]], "first_ms": hours,
                "body": {"pieces": [{"text": start}]},
            }),
            Self::Streaming => json!({
                "headers": [["content-type", kind]],
                "body": {"pieces": [{"text": start}, {"text": more, "times": 1_000_000, "pause_ms": 5}]},
            }),
            Self::Stalled => json!({
                "headers": [["content-type", kind]],
                "body": {"pieces": [{"text": start}, {"text": more, "pause_ms": hours}]},
            }),
            Self::ErrorBody => json!({
                "status": 429, "headers": [["content-type", "application/json"]],
                "body": {"pieces": [{"text": "{\"error\":{\"message\":\"", "pause_ms": hours}]},
            }),
        }
    }

    /// Waits until a call is there.
    async fn reached(self, up: &FakeUpstream, id: &str, client: &mut RawClient) {
        let there = |c: &tidegate_rig::CallTruth| {
            let answering = self == Self::Head || c.first_write_ns.is_some();
            c.test_id.as_deref() == Some(id) && c.body_ns.is_some() && answering
        };
        up.wait_for_call(there, SOON).await.expect("the call came");
        if matches!(self, Self::Streaming | Self::Stalled | Self::ErrorBody) {
            let head = client.final_head().await.expect("head");
            let status = if self == Self::ErrorBody { 429 } else { 200 };
            assert_eq!(head.status, status, "{id}");
            client.body_bytes(5).await.expect("bytes");
        }
    }
}

/// Every route that has a body of its own, and one that is passed through.
fn routes() -> Vec<&'static str> {
    let known = KNOWN.iter().map(|known| known.path);
    known.chain(["/v1/something/else"]).collect()
}

/// One client in one cell of the matrix.
async fn one(gate: &Gate, up: &FakeUpstream, cell: (&str, At, Way, bool)) -> SocketAddr {
    let (path, at, way, streaming) = cell;
    let id = format!("{path} {at:?} {way:?} {streaming}");
    let mut body = if streaming {
        stream(at.script(true))
    } else {
        whole(at.script(false))
    };
    body["test_id"] = json!(id);
    let mut client = gate.client().await;
    client.set_limit(SOON);
    let peer = client.local_addr().expect("an address");
    client.post(path, &body.to_string()).await.expect("sent");
    at.reached(up, &id, &mut client).await;
    if at == At::Silence {
        // The upstream has written its head; the gateway has to have seen it.
        let cells = (routes().len() * WAYS.len() * 2) as f64;
        let heads = [("phase", "waiting_head")];
        gate.eventually("all heads are there", |g| {
            g.metric("phase_duration_seconds_count", &heads) >= cells
        })
        .await;
    }
    let left = now_ns();
    let rest = leave(client, way).await;
    let gone =
        |c: &tidegate_rig::CallTruth| c.test_id.as_deref() == Some(&id) && c.peer_gone_ns.is_some();
    let call = up.wait_for_call(gone, SOON).await;
    let call = call.unwrap_or_else(|_| panic!("{id}: the upstream was not told"));
    let after = call.peer_gone_ns.unwrap_or(u64::MAX).saturating_sub(left);
    assert!(u128::from(after) < CANCEL.as_nanos(), "{id}: {after} ns");
    drop(rest);
    peer
}

async fn matrix(at: At) {
    let up = Arc::new(upstream(Script::default()).await);
    let gate = Arc::new(gateway(&up, |c| room_for(c, 100)));
    let mut cells = JoinSet::new();
    for path in routes() {
        for way in WAYS {
            for streaming in [true, false] {
                let (up, gate) = (Arc::clone(&up), Arc::clone(&gate));
                cells.spawn(async move { one(&gate, &up, (path, at, way, streaming)).await });
            }
        }
    }
    let peers = cells.join_all().await;
    gate.settled_with(&up, 0).await;
    for peer in &peers {
        let line = gate.line_of(*peer).await;
        let seen = (
            &line["outcome"],
            &line["phase"],
            &line["wait_end"],
            &line["work_end"],
        );
        let right = (
            &json!("client_closed"),
            &json!(at.phase()),
            &json!("left"),
            &json!("cancelled"),
        );
        assert_eq!(seen, right, "{line}");
    }
    let left = gate.metric("disconnects_total", &[("phase", at.phase())]);
    assert_eq!(left as usize, peers.len());
    let gate = Arc::into_inner(gate).expect("the cells are done");
    assert_eq!(gate.stop().len(), peers.len(), "one line for each call");
}

#[tokio::test]
async fn leaving_while_the_head_is_awaited() {
    matrix(At::Head).await;
}

#[tokio::test]
async fn leaving_in_the_silence_after_the_head() {
    matrix(At::Silence).await;
}

#[tokio::test]
async fn leaving_while_the_answer_streams() {
    matrix(At::Streaming).await;
}

#[tokio::test]
async fn leaving_while_the_answer_is_stalled() {
    matrix(At::Stalled).await;
}

#[tokio::test]
async fn leaving_in_an_errors_body() {
    matrix(At::ErrorBody).await;
}

#[tokio::test]
async fn whoever_leaves_the_queue_never_touches_the_upstream() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).slots = slots(1);
        only(c).queue = 100;
    });
    let holder = gate
        .post(CHAT, &stream(json!({"stall": {"at": "head"}})))
        .await;
    up.wait_for(|t| t.running == 1, SOON)
        .await
        .expect("running");
    let mut waiting = Vec::new();
    for path in routes() {
        for way in WAYS {
            for streaming in [true, false] {
                let body = ask(json!({"stream": streaming}));
                waiting.push((gate.post(path, &body).await, way));
            }
        }
    }
    let n = waiting.len();
    gate.eventually("all are queued", |g| g.metric("queued", &[]) == n as f64)
        .await;
    let mut halves = Vec::new();
    for (client, way) in waiting {
        halves.push(leave(client, way).await);
    }
    gate.eventually("none is queued", |g| g.metric("queued", &[]) == 0.0)
        .await;
    holder.leave_fin();
    gate.settled_with(&up, 0).await;
    assert_eq!(up.truth().calls_begun, 1, "only the first ever reached it");
    assert_eq!(up.truth().connections_accepted, 1);
    let lines = gate.stop();
    let queued = lines.iter().filter(|l| l["phase"] == "queued");
    for line in queued.clone() {
        assert_eq!(line["outcome"], "client_closed", "{line}");
        assert_eq!(
            (&line["attempts"], &line["work_end"]),
            (&json!(0), &json!("none"))
        );
    }
    assert_eq!((queued.count(), lines.len()), (n, n + 1));
    drop(halves);
}

#[tokio::test]
async fn leaving_while_the_connection_is_opened() {
    let hole = BlackHole::start(LOCALHOST).expect("a black hole");
    let gate = gateway_at(hole.addr(), |_| {});
    let mut halves = Vec::new();
    for way in WAYS {
        for streaming in [true, false] {
            let client = gate.post(CHAT, &ask(json!({"stream": streaming}))).await;
            gate.eventually("it runs", |g| g.metric("running", &[]) == 1.0)
                .await;
            halves.push(leave(client, way).await);
            gate.eventually("it ended", |g| g.metric("running", &[]) == 0.0)
                .await;
        }
    }
    for line in gate.logged(6).await {
        assert_eq!(line["outcome"], "client_closed", "{line}");
        assert_eq!(
            (&line["phase"], &line["work_end"]),
            (&json!("connecting"), &json!("none"))
        );
    }
}

#[tokio::test]
async fn leaving_while_the_request_is_still_sent() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for way in WAYS {
        let mut client = gate.client().await;
        let head =
            format!("POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{");
        client.send(head).await.expect("sent");
        gate.eventually("the body is read", |g| {
            g.metric("request_bodies_bytes", &[]) == 1.0
        })
        .await;
        drop(leave(client, way).await);
        gate.settled(&up).await;
    }
    assert_eq!(up.truth().connections_accepted, 0);
    assert_eq!(gate.logged(3).await.len(), 3);
}

#[tokio::test]
async fn leaving_while_the_models_are_listed() {
    let script = r#"{"stall": {"at": "head"}}"#;
    let up = upstream(Script::from_json(script).expect("a script")).await;
    let gate = gateway(&up, |_| {});
    for (n, way) in (1..).zip(WAYS) {
        let mut client = gate.client().await;
        client
            .request("GET", "/v1/models", &[], b"")
            .await
            .expect("sent");
        up.wait_for(|t| t.running == 1 && t.calls_begun == n, SOON)
            .await
            .expect("asked");
        let rest = leave(client, way).await;
        up.wait_for(|t| t.running == 0 && t.connections_open == 0, CANCEL)
            .await
            .expect("told");
        drop(rest);
    }
    gate.settled_with(&up, 0).await;
}

/// A client that has sent more than its request is gone all the same when it leaves.
#[tokio::test]
async fn leaving_behind_pipelined_bytes() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let next = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n";
    for way in WAYS {
        for at in [json!("head"), json!({"event": 2})] {
            let mut client = gate.post(CHAT, &stream(json!({"stall": {"at": at}}))).await;
            client.send(next.repeat(20)).await.expect("sent");
            up.wait_for(|t| t.running == 1, SOON)
                .await
                .expect("running");
            let rest = leave(client, way).await;
            up.wait_for(|t| t.running == 0, CANCEL)
                .await
                .unwrap_or_else(|t| panic!("{way:?} {at}: not told: {t:?}"));
            drop(rest);
        }
    }
    gate.settled_with(&up, 0).await;
}

/// The end of a client that has sent more than is kept could not be seen: the call ends at once, with or without its leaving.
#[tokio::test]
async fn whoever_sends_too_much_behind_a_request_is_cut_off() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let next = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let much = next.repeat(400_000 / next.len());
    let mut ended = 0.0;
    for at in [json!("head"), json!({"event": 2})] {
        let mut client = gate.post(CHAT, &stream(json!({"stall": {"at": at}}))).await;
        up.wait_for(|t| t.running == 1, SOON)
            .await
            .expect("running");
        // Most of it may meet a closed connection.
        let _ = client.send(&much).await;
        up.wait_for(|t| t.running == 0, CANCEL)
            .await
            .unwrap_or_else(|t| panic!("{at}: not told: {t:?}"));
        ended += 1.0;
        let ends = [("reason", "pipelined")];
        gate.eventually("the connection ended for it", |g| {
            g.metric("connections_ended_total", &ends) == ended
        })
        .await;
    }
    for line in gate.logged(2).await {
        assert_eq!(line["outcome"], "client_closed", "{line}");
    }
    gate.settled_with(&up, 0).await;
}

/// Nothing is read on of an upload whose server has stopped reading. (A FIN would wait behind the client's own unsent bytes.)
#[tokio::test]
async fn leaving_in_an_upload_that_the_server_does_not_read() {
    let (_deaf, address) = deaf();
    let gate = gateway_at(address, |_| {});
    let mut client = gate.client().await;
    let head = "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\n\
                Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 60000000\r\n\r\n";
    client.send(head).await.expect("sent");
    client.set_limit(CANCEL);
    while client.send(&[b'x'; 20_000]).await.is_ok() {}
    assert_eq!(gate.metric("running", &[]), 1.0, "it is still being sent");
    client.leave_rst().expect("a reset");
    gate.eventually("it was noticed", |g| g.metric("running", &[]) == 0.0)
        .await;
    assert_eq!(gate.logged(1).await[0]["outcome"], "client_closed");
}

/// The bytes that were read ahead to notice an end are not lost.
#[tokio::test]
async fn pipelined_requests_are_answered_in_turn() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut client = gate.client().await;
    let mut all = Vec::new();
    for n in 1..=3 {
        let body = stream(json!({"tokens": n, "first_ms": 20})).to_string();
        all.extend(tidegate_rig::raw::request_bytes(
            "POST",
            CHAT,
            &[],
            body.as_bytes(),
        ));
    }
    client.send(all).await.expect("sent");
    for n in 1..=3 {
        assert_eq!(client.final_head().await.expect("head").status, 200);
        let (events, _) = client.all_events().await.expect("events");
        assert_eq!(events.len(), n + 2, "role, tokens, end");
    }
    gate.settled(&up).await;
}

#[tokio::test]
async fn leaving_after_the_end_is_no_leaving() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for n in 0..50_u64 {
        let script =
            json!({"tokens": 3, "usage": "yes", "end_delay_ms": n % 6, "close": n % 2 == 0});
        let mut client = gate.post(CHAT, &stream(script)).await;
        client.final_head().await.expect("head");
        while tidegate_rig::raw::find(client.body_so_far(), b"[DONE]").is_none() {
            let now = client.body_so_far().len();
            client.body_bytes(now + 1).await.expect("bytes");
        }
        // Some leave before they have seen the terminator, as an SDK does.
        leave(client, WAYS[(n % 2) as usize]).await;
    }
    gate.settled(&up).await;
    let lines = gate.stop();
    assert_eq!(lines.len(), 50);
    for line in lines {
        assert_eq!(
            (&line["outcome"], &line["usage"]),
            (&json!("ok"), &json!("reported")),
            "{line}"
        );
        assert_eq!(line["output_tokens"], 3);
    }
}

#[tokio::test]
async fn a_half_closed_client_is_served_if_so_configured() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        c.server.half_close = tidegate::config::HalfClose::Serve
    });
    let script = json!({"tokens": 10, "pace_ms": 10.0, "first_ms": 50});
    let mut client = gate.post(CHAT, &stream(script.clone())).await;
    client.half_close().await.expect("a FIN");
    assert_eq!(client.final_head().await.expect("head").status, 200);
    let (events, end) = client.all_events().await.expect("events");
    assert!(end.looks_whole());
    assert_eq!(events.last().expect("an end").data, "[DONE]");
    // Whoever closes fully is noticed at the next writes.
    let script = json!({"end": "never", "pace_ms": 5.0});
    let mut client = gate.post(CHAT, &stream(script)).await;
    client.final_head().await.expect("head");
    client.half_close().await.expect("a FIN");
    client.events(3).await.expect("still served");
    client.leave_fin();
    up.wait_for(|t| t.running == 0, 2 * CANCEL)
        .await
        .expect("told");
    gate.settled(&up).await;
}
