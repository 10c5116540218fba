//! Bodies that are passed on while they come: files and audio. They hold a slot, so a client that stops sending must not keep it.

use std::time::Duration;

use serde_json::{Value, json};
use tidegate_rig::{BodyEnd, RawClient, Script};

use crate::support::{CHAT, Gate, SOON, deaf, gateway, gateway_at, only, slots, upstream, whole};

const SHORT: Duration = Duration::from_millis(300);

async fn begin(gate: &Gate) -> RawClient {
    let mut client = gate.client().await;
    let head = "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\n\
                Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 100000\r\n\r\n--b\r\n";
    client.send(head).await.expect("sent");
    client
}

#[tokio::test]
async fn an_upload_that_stops_is_a_408_and_gives_its_slot_back() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).slots = slots(1);
        only(c).timeouts.request_body = SHORT;
    });
    let mut client = begin(&gate).await;
    let head = client.final_head().await.expect("head");
    assert_eq!(head.status, 408);
    let (body, _) = client.rest().await.expect("body");
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    assert_eq!(body["error"]["code"], "request_body");
    // The only slot is free for the next.
    let mut next = gate.post(CHAT, &whole(json!({}))).await;
    assert_eq!(next.final_head().await.expect("head").status, 200);
    let lines = gate.logged(2).await;
    assert_eq!(
        (&lines[0]["outcome"], &lines[0]["reason"]),
        (&json!("timeout"), &json!("request_body"))
    );
    drop((client, next));
    gate.settled_with(&up, 1).await;
}

/// The server's time begins when it has all of the request; what the client takes to send it is not the server's.
#[tokio::test]
async fn the_time_for_the_head_begins_with_the_end_of_the_body() {
    let up = upstream(Script::default()).await;
    let limit = Duration::from_secs(2);
    let gate = gateway(&up, |c| only(c).timeouts.response_head = limit);
    let mut client = begin(&gate).await;
    // Twelve of them.
    let pause = limit / 6;
    let rest = vec![b'x'; 100_000 - 5];
    client.dribble(&rest, 9_000, pause).await.expect("sent");
    assert_eq!(client.final_head().await.expect("head").status, 200);
    gate.settled(&up).await;
    assert_eq!(gate.logged(1).await[0]["outcome"], "ok");
}

#[tokio::test]
async fn a_server_that_does_not_answer_a_body_has_its_own_time() {
    let (_deaf, address) = deaf();
    let gate = gateway_at(address, |c| only(c).timeouts.response_head = SHORT);
    let mut client = begin(&gate).await;
    let rest = vec![b'x'; 100_000 - 5];
    client.dribble(rest, 50_000, SHORT / 5).await.expect("sent");
    assert_eq!(client.final_head().await.expect("head").status, 504);
    // Also where it stops reading in the middle.
    let mut client = gate.client().await;
    let head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: audio/wav\r\nContent-Length: 60000000\r\n\r\n";
    client.send(head).await.expect("sent");
    client.set_limit(2 * SHORT);
    while client.send(&[b'x'; 20_000]).await.is_ok() {}
    for line in gate.logged(2).await {
        assert_eq!(line["reason"], "response_head", "{line}");
    }
}

#[tokio::test]
async fn leaving_in_mid_upload_is_the_clients_doing() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for by_reset in [false, true] {
        let client = begin(&gate).await;
        up.wait_for(|t| t.connections_open == 1, SOON)
            .await
            .expect("sent on");
        if by_reset {
            client.leave_rst().expect("left");
        } else {
            client.leave_fin();
        }
        gate.settled(&up).await;
    }
    for line in gate.logged(2).await {
        assert_eq!(line["outcome"], "client_closed", "{line}");
    }
}

/// HTTP does not say where such a body ends; JSON does.
#[tokio::test]
async fn half_a_json_answer_that_ends_with_its_connection_is_no_answer() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let cut = json!({"framing": "close", "end_at": 2, "end": "fin"});
    let mut client = gate.post(CHAT, &whole(cut)).await;
    assert_eq!(client.final_head().await.expect("head").status, 502);
    let mut client = gate.post(CHAT, &whole(json!({"framing": "close"}))).await;
    assert_eq!(client.final_head().await.expect("head").status, 200);
    assert_eq!(client.rest().await.expect("body").1, BodyEnd::Clean);
    gate.settled(&up).await;
}

/// A path that is passed on must not be a way around the models that are served.
#[tokio::test]
async fn a_model_that_is_hidden_in_odd_json_reaches_no_upstream() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut client = gate.client().await;
    let body = "{\"model\":\"cheap\",\"model\":\"dear\"}";
    client.post("/v1/x", body).await.expect("sent");
    assert_eq!(client.final_head().await.expect("head").status, 400);
    assert_eq!(up.truth().calls_begun, 0);
}
