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
    // Each has been let in or turned away: none comes later.
    for client in &mut crowd[..149] {
        let _ = client.final_head().await;
    }
    drop(crowd);
    // The places of the crowd come free one by one.
    let alone = "tidegate_connections{side=\"downstream\"} 1\n";
    let end = tokio::time::Instant::now() + SOON;
    while !metrics(&program).await.contains(alone) {
        assert!(tokio::time::Instant::now() < end, "places are still taken");
    }
    for n in 0..10 {
        let mut client = post(addr, &whole(json!({}))).await;
        let head = client.final_head().await.expect("head");
        assert_eq!(head.status, 200, "{n}");
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

/// The names are those of every other program, so that one page shows all.
#[tokio::test]
async fn a_process_shows_what_it_uses() {
    let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let before = now().expect("after 1970").as_secs_f64();
    let up = upstream(Script::default()).await;
    let mut program = with_few(&up);
    let addr = program.address("listen=").await;
    let version = concat!("version=\"", env!("CARGO_PKG_VERSION"), "\" config=\"");
    program.says(version).await;
    program.says("/tidegate.toml\" upstreams=1").await;
    let value = |text: &str, name: &str| -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let line = line.unwrap_or_else(|| panic!("no {name} in\n{text}"));
        line.trim().parse().expect("a number")
    };
    let text = metrics(&program).await;
    assert!(text.contains(concat!(
        "\ntidegate_build_info{version=\"",
        env!("CARGO_PKG_VERSION"),
        "\"} 1\n"
    )));
    assert_eq!(value(&text, "process_max_fds "), 64.0);
    let start = value(&text, "process_start_time_seconds ");
    let after = now().expect("after 1970").as_secs_f64();
    // The kernel tells its own start in whole seconds.
    assert!(
        before - 2.0 < start && start < after + 2.0,
        "{before} {start} {after}"
    );
    let memory = value(&text, "process_resident_memory_bytes ");
    assert!(memory > 1e6 && memory < value(&text, "process_virtual_memory_bytes "));
    assert!(value(&text, "process_cpu_seconds_total ") < after - before + 2.0);
    let open = value(&text, "process_open_fds ");
    assert!(open > 5.0 && open < 64.0, "{open}");
    let held = [post(addr, &endless()).await, post(addr, &endless()).await];
    up.wait_for(|t| t.running == 2, SOON)
        .await
        .expect("both run");
    // Theirs, and those upstream; an earlier look at this page may have one for a moment more.
    let end = tokio::time::Instant::now() + SOON;
    while value(&metrics(&program).await, "process_open_fds ") != open + 4.0 {
        assert!(tokio::time::Instant::now() < end);
    }
    drop(held);
    program.signal("TERM");
    assert_eq!(program.exit().await, 0);
}

/// Where the table has to grow, everything that opens a socket waits for it. The kernel says how large it is.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn the_table_is_made_once_for_all_that_may_come() {
    let up = upstream(Script::default()).await;
    let folder = folder();
    let mut command = Command::new(PROGRAM);
    command
        .args(["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"])
        .args(["--slots", "300", "--upstream"])
        .arg(format!("http://{}", up.addr()))
        .stdin(Stdio::null());
    let program = Program::start(command, folder);
    program.address("listen=").await;
    let status = std::fs::read_to_string(format!("/proc/{}/status", program.pid()));
    let status = status.expect("it runs");
    let size = status.lines().find_map(|line| line.strip_prefix("FDSize:"));
    let size: u64 = size.and_then(|n| n.trim().parse().ok()).expect("a number");
    let limit = rlimit::Resource::NOFILE.get_hard().expect("a limit");
    assert!(size >= limit.min(10_300), "{size} places, limit {limit}");
}

/// An address of somebody else's is not cured by another port.
#[test]
fn an_address_that_is_not_this_machines_is_said_so() {
    let given = ["--upstream", "http://127.0.0.1:9", "--listen"];
    let output = Command::new(PROGRAM)
        .arg("serve")
        .args(given)
        .args(["192.0.2.1:8080", "--allow-unauthenticated"])
        .output()
        .expect("it runs");
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(
        err.contains("192.0.2.1:8080") && err.contains("no such address"),
        "{err}"
    );
    assert!(!err.contains("free the port"), "{err}");
}
