//! Few descriptors: what cannot be carried is turned away with a word, nothing that runs is hurt, and no server is blamed.

use std::process::{Command, Stdio};

use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tidegate_rig::{FakeUpstream, RawClient, Script};

use crate::binary::{PROGRAM, Program, endless, folder, post};
use crate::h2;
use crate::support::{CHAT, SOON, stream, upstream, whole};

/// `serve` in front of `up`, with 64 descriptors.
fn with_few(up: &FakeUpstream) -> Program {
    let folder = folder();
    let file = folder.join("tidegate.toml");
    let text = format!(
        "[server]\nlisten = \"127.0.0.1:0\"\nworkers = 2\n[admin]\nlisten = \"127.0.0.1:0\"\n[[upstreams]]\nurl = \"http://{}\"\n",
        up.addr()
    );
    std::fs::write(&file, text).expect("written");
    let mut command = Command::new("sh");
    command.args([
        "-c",
        "ulimit -n 64; exec \"$0\" serve --config \"$1\"",
        PROGRAM,
    ]);
    command.arg(file).stdin(Stdio::null());
    Program::start(command, folder)
}

async fn metrics(program: &Program) -> String {
    let mut client = RawClient::connect(program.address("admin=").await)
        .await
        .expect("accepted");
    client
        .request("GET", "/metrics", &[], b"")
        .await
        .expect("sent");
    client.final_head().await.expect("head");
    let (text, _) = client.rest().await.expect("body");
    String::from_utf8(text).expect("text")
}

#[tokio::test]
async fn c93_clients_beyond_the_descriptors_are_told_so() {
    let up = upstream(Script::default()).await;
    let mut program = with_few(&up);
    let addr = program.address("listen=").await;
    program
        .says("connections_max=10000 descriptors=64 cut_to=16")
        .await;
    let mut first = post(addr, &endless()).await;
    first.final_head().await.expect("head");
    let mut crowd = Vec::new();
    for _ in 0..150 {
        crowd.push(post(addr, &endless()).await);
    }
    let last = crowd.last_mut().expect("many");
    assert_eq!(last.final_head().await.expect("head").status, 503);
    let (body, _) = last.rest().await.expect("body");
    assert!(String::from_utf8_lossy(&body).contains("connections_max"));
    assert!(
        metrics(&program)
            .await
            .contains("reason=\"connections_max\""),
        "the operator has a place"
    );
    let before = first.body_so_far().len();
    first
        .body_bytes(before + 2000)
        .await
        .expect("a running stream goes on");
    drop(crowd);
    let end = tokio::time::Instant::now() + SOON;
    let mut answered = 0;
    while answered < 10 {
        let mut client = post(addr, &whole(json!({}))).await;
        match client.final_head().await.expect("head").status {
            200 => answered += 1,
            // The places of the crowd come free one by one.
            503 if answered == 0 => assert!(tokio::time::Instant::now() < end),
            other => panic!("{other} after {answered}"),
        }
    }
    program.signal("TERM");
    drop(first);
    assert_eq!(program.exit().await, 0);
    assert!(
        !program.err().contains("cannot accept"),
        "{}",
        program.err()
    );
}

/// One client with many streams needs more connections upstream than there are descriptors.
#[tokio::test]
async fn c93_no_socket_for_an_upstream_is_our_own_lack() {
    let up = upstream(Script::default()).await;
    let mut program = with_few(&up);
    let addr = program.address("listen=").await;
    let mut client = h2::Client::connect_to(addr).await;
    let mut streams = Vec::new();
    let refused = loop {
        assert!(streams.len() < 64, "there are only so many descriptors");
        let asked = client.post(CHAT, &stream(json!({"end": "never", "pace_ms": 10})));
        let answer = tokio::time::timeout(SOON, asked).await.expect("in time");
        let answer = answer.expect("an answer");
        if answer.status() != 200 {
            break answer;
        }
        streams.push(answer);
    };
    assert_eq!(refused.status(), 503);
    assert!(refused.headers().contains_key("retry-after"));
    let body = refused
        .into_body()
        .collect()
        .await
        .expect("body")
        .to_bytes();
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    assert_eq!(body["error"]["code"], "out_of_sockets", "{body}");
    for stream in &mut streams {
        let frame = tokio::time::timeout(SOON, stream.body_mut().frame()).await;
        frame
            .expect("in time")
            .expect("a frame")
            .expect("it goes on");
    }
    drop(streams);
    up.wait_for(|t| t.running == 0, SOON).await.expect("let go");
    let again = client
        .post(CHAT, &whole(json!({})))
        .await
        .expect("an answer");
    assert_eq!(again.status(), 200, "the endpoint was not left out");
    let metrics = metrics(&program).await;
    let ejected = metrics
        .lines()
        .find(|l| l.starts_with("tidegate_endpoint_ejected{"));
    assert!(ejected.expect("a gauge").ends_with(" 0"), "{ejected:?}");
    assert!(metrics.contains("reason=\"out_of_sockets\""));
    drop(client);
    program.signal("TERM");
    assert_eq!(program.exit().await, 0);
    assert_eq!(program.err().matches("no socket left").count(), 1);
}
