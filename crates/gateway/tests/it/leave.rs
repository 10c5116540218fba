//! Clients that leave where it is told apart from other ends: queued, connecting, uploading, pipelined. For every route and phase see
//! [`cases`](crate::cases).

use serde_json::json;
use tidegate::config::UnknownModels;
use tidegate_rig::{BlackHole, RawClient, Script};

use crate::cases::stage::{Stage, on_each, routes};
use crate::support::{
    CANCEL, CHAT, LOCALHOST, SOON, STUCK, ask, deaf, gateway, gateway_at, only, room_for, slots,
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

#[tokio::test]
async fn c16_whoever_leaves_the_queue_never_touches_the_upstream() {
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

/// All who wait leave, then the one whose slot they wait for, in one breath: what it sets free is given to none of them. The workers have other
/// things to do, so that the kernel knows of it before they do.
#[tokio::test]
async fn c16_whoever_has_left_is_given_no_slot_by_the_one_that_leaves_next() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).slots = slots(1);
        only(c).queue = 100;
        only(c).models = vec!["tiny".into()];
        c.unknown_models = UnknownModels::Refuse;
    });
    let numbers = "1,".repeat(450_000);
    let unknown = format!("{{\"model\":\"none\",\"numbers\":[{numbers}1]}}");
    for _ in 0..4 {
        // A connection in each worker's pool, so that nothing has to be waited for once there is a slot.
        let mut warm = Vec::new();
        for _ in 0..4 {
            let mut client = gate.post(CHAT, &whole(json!({"tokens": 1}))).await;
            client.final_head().await.expect("head");
            client.rest().await.expect("body");
            warm.push(client);
        }
        let holder = gate
            .post(CHAT, &stream(json!({"stall": {"at": "head"}})))
            .await;
        up.wait_for(|t| t.running == 1, SOON)
            .await
            .expect("running");
        let mut waiting = Vec::new();
        for _ in 0..8 {
            waiting.push(gate.post(CHAT, &stream(json!({}))).await);
        }
        gate.eventually("all are queued", |g| g.metric("queued", &[]) == 8.0)
            .await;
        let begun = up.truth().calls_begun;
        let mut busy = Vec::new();
        for _ in 0..6 {
            let mut client = gate.client().await;
            client.post(CHAT, &unknown).await.expect("sent");
            busy.push(client);
        }
        waiting.into_iter().for_each(RawClient::leave_fin);
        holder.leave_fin();
        for mut client in busy {
            assert_eq!(client.final_head().await.expect("head").status, 404);
        }
        gate.eventually("all is over", |g| g.counted().is_empty())
            .await;
        // The next round counts its own holder.
        up.wait_for(|t| t.running == 0, SOON).await.expect("left");
        assert_eq!(up.truth().calls_begun, begun, "none of them reached it");
        drop(warm);
    }
}

#[tokio::test]
async fn c02_c16_leaving_while_the_connection_is_opened() {
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
async fn c02_leaving_while_the_request_is_still_sent() {
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

/// A client that has sent more than its request is gone all the same when it leaves.
#[tokio::test]
async fn c02_leaving_behind_pipelined_bytes() {
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
    client.set_limit(STUCK);
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
async fn c75_leaving_after_the_end_is_no_leaving() {
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

/// hyper asks for nothing more once the announced length is there: that is the end of the answer, and nobody has left.
#[tokio::test]
async fn c75_an_answer_of_known_length_that_takes_its_time_ends_with_its_last_byte() {
    on_each(
        |c| room_for(c, 100),
        async |stage: &Stage| {
            let halves = json!([{"text": "{\"text\":\"", "pause_ms": 600}, {"text": "word\"}"}]);
            let script = json!({
                "headers": [["content-type", "application/json"]],
                "framing": "length", "body": {"pieces": halves},
            });
            let mut callers = Vec::new();
            for path in routes() {
                callers.push(stage.post(path, &whole(script.clone())).await);
            }
            for caller in &mut callers {
                let (head, rest) = caller.answer().await;
                assert_eq!((head.status, rest.whole), (200, true), "{stage}");
                assert_eq!(
                    head.header("content-length"),
                    Some("15"),
                    "{stage}: {head:?}"
                );
                assert_eq!(rest.text(), "{\"text\":\"word\"}", "{stage}");
            }
            for caller in &callers {
                let line = stage.gate.line_of(caller.peer()).await;
                let seen = (&line["outcome"], &line["wait_end"], &line["work_end"]);
                let right = (&json!("ok"), &json!("answered"), &json!("complete"));
                assert_eq!(seen, right, "{stage}: {line}");
            }
            assert_eq!(stage.gate.metric("disconnects_total", &[]), 0.0, "{stage}");
            stage.running(0).await;
            let complete = stage.up.truth().ended_complete;
            assert_eq!(complete as usize, callers.len(), "{stage}");
        },
    )
    .await;
}
