//! The first minutes with it: what `tidegate demo` shows is what the pages say.

use std::net::SocketAddr;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use tidegate_rig::RawClient;

use crate::binary::{PROGRAM, Program, folder};
use crate::support::{CHAT, eventually};

#[tokio::test]
async fn the_demo_lists_the_model_that_it_tells_of_and_whole_answers_have_usage() {
    let mut command = Command::new(PROGRAM);
    command
        .args(["demo", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"])
        .stdin(Stdio::null());
    let demo = Program::start(command, folder());
    let find = || -> Option<SocketAddr> {
        let text = demo.err();
        let (before, _) = text.split_once(CHAT)?;
        before.rsplit_once("http://")?.1.parse().ok()
    };
    eventually("it tells where it is", || find().is_some()).await;
    let at = find().expect("seen");
    let said = demo.err();
    let line = said.lines().find(|line| line.contains(" calls --admin "));
    // As it is printed: where it was built it is in no PATH.
    let mut words = line.expect("told").split_whitespace();
    let mut calls = Command::new(words.next().expect("a program"));
    let calls = calls.args(words).output().expect("it runs");
    let shown = String::from_utf8_lossy(&calls.stdout);
    assert!(
        shown.starts_with("UPSTREAM") && shown.contains("\nID "),
        "{shown}"
    );
    let ask = async |method: &str, path: &str, body: &str| -> Value {
        let mut client = RawClient::connect(at).await.expect("accepted");
        let sent = client.request(method, path, &[], body.as_bytes());
        sent.await.expect("sent");
        assert_eq!(client.final_head().await.expect("head").status, 200);
        let (body, _) = client.rest().await.expect("body");
        serde_json::from_slice(&body).expect("JSON")
    };
    let models = ask("GET", "/v1/models", "").await;
    let ids: Vec<_> = models["data"].as_array().expect("a list").iter().collect();
    assert_eq!(ids.len(), 1, "{models}");
    assert_eq!(ids[0]["id"], "demo");
    for model in ["demo", "any"] {
        let body = json!({"model": model, "messages": [], "rig": {"tokens": 2}});
        let answer = ask("POST", CHAT, &body.to_string()).await;
        assert_eq!(answer["usage"]["completion_tokens"], 2, "{answer}");
    }
}
