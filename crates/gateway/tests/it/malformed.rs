//! Heads that are no HTTP: the status, a body that an SDK can read, and the end of the connection.

use serde_json::{Value, json};
use tidegate_rig::{BodyEnd, Closed, RawClient, Script};

use crate::support::{CHAT, SOON, gateway, stream, upstream};

async fn refused(client: &mut RawClient, status: u16, what: &str) {
    let head = client.final_head().await.expect("head");
    assert_eq!(head.status, status, "{what}");
    assert_eq!(
        head.header("content-type"),
        Some("application/json"),
        "{what}"
    );
    assert_eq!(head.header("x-should-retry"), Some("false"), "{what}");
    assert!(head.header("x-request-id").is_some(), "{what}");
    let date = head.header("date").map(httpdate::parse_http_date);
    assert!(date.is_some_and(|date| date.is_ok()), "{what}");
    let (body, end) = client.rest().await.expect("body");
    assert_eq!(end, BodyEnd::Clean, "{what}");
    let json: Value = serde_json::from_slice(&body).expect("json");
    assert!(
        json["error"]["message"].is_string() && json["type"] == "error",
        "{json}"
    );
    assert_eq!(client.closed(SOON).await, Closed::Fin, "{what}");
}

#[tokio::test]
async fn a_malformed_head_is_told_so_in_json() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for head in [
        "NOT HTTP AT ALL\r\n\r\n".to_owned(),
        format!("POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nX : a\r\n\r\n"),
        format!(
            "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"
        ),
        format!("POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: xchunked\r\n\r\n"),
    ] {
        let mut client = gate.client().await;
        client.send(&head).await.expect("sent");
        refused(&mut client, 400, &head).await;
    }
    let mut client = gate.client().await;
    let field = format!("X-Long: {}\r\n", "y".repeat(8000));
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{}\r\n",
        field.repeat(20)
    );
    client.send(head).await.expect("sent");
    refused(&mut client, 431, "too large").await;
    assert_eq!(up.truth().connections_accepted, 0);
    gate.settled(&up).await;
}

#[tokio::test]
async fn a_malformed_head_after_a_good_request_is_told_so_too() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for body in [stream(json!({"tokens": 3})), json!([])] {
        let mut client = gate.post(CHAT, &body).await;
        client.final_head().await.expect("head");
        client.rest().await.expect("body");
        client.send("GET nowhere\r\n\r\n").await.expect("sent");
        refused(&mut client, 400, "second").await;
    }
    gate.settled(&up).await;
}

/// Each of its words would be compared with each field.
#[tokio::test]
async fn a_connection_field_of_too_many_words_is_refused() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let head = |words: usize| {
        let words = vec!["x-hop"; words].join(", ");
        format!("GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: {words}\r\n\r\n")
    };
    let mut client = gate.client().await;
    client.send(head(64)).await.expect("sent");
    assert_eq!(client.final_head().await.expect("head").status, 200);
    client.rest().await.expect("body");
    client.send(head(65)).await.expect("sent");
    refused(&mut client, 400, "65 words").await;
}
