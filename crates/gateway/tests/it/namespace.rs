//! What needs a network of one's own: a peer that vanishes without a word, and a name that moves.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};
use tidegate::config::Endpoint;
use tidegate_rig::{FakeUpstream, Script};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

use crate::network::ground::{inside, run};
use crate::support::{CHAT, Gate, SOON, ask, gateway, gateway_at, only, stream, upstream};

/// A dead connection is noticed by the second probe, 6 s after the last word; a byte that is not acknowledged, after 2 s.
const NOTICED: Duration = Duration::from_secs(20);

/// From now on no packet reaches this address, and nobody is told.
fn vanish(ip: &str) {
    run(&format!("ip route add blackhole {ip} table local"));
}

async fn eventually(what: &str, gate: &Gate, holds: impl Fn(&Gate) -> bool) {
    let end = tokio::time::Instant::now() + NOTICED;
    while !holds(gate) {
        assert!(tokio::time::Instant::now() < end, "never: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A client at an address of its own that has asked for this.
async fn asks(gate: &Gate, ip: &str, body: &Value) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket
        .bind(format!("{ip}:0").parse().expect("an address"))
        .expect("bound");
    let mut tcp = socket.connect(gate.addr()).await.expect("connected");
    let body = body.to_string();
    let request = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    tcp.write_all(request.as_bytes()).await.expect("sent");
    tcp
}

/// In silence only the probes tell; in mid-stream the bytes that are not acknowledged do.
#[tokio::test]
async fn a_client_that_vanishes_is_noticed() {
    if !inside(module_path!(), "a_client_that_vanishes_is_noticed") {
        return;
    }
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, impatient);
    let silent = stream(json!({"stall": {"at": "head"}}));
    let flowing = stream(json!({"end": "never", "pace_ms": 50}));
    let mut clients = Vec::new();
    for (n, (ip, body)) in [("127.0.1.1", &silent), ("127.0.1.2", &flowing)]
        .into_iter()
        .enumerate()
    {
        clients.push(asks(&gate, ip, body).await);
        up.wait_for(|t| t.running == n as u64 + 1, SOON)
            .await
            .expect("it runs");
    }
    let mut some = [0; 200];
    clients[1].read_exact(&mut some).await.expect("it flows");
    vanish("127.0.1.1");
    vanish("127.0.1.2");
    eventually("both are gone", &gate, |g| g.metric("running", &[]) == 0.0).await;
    up.wait_for(|t| t.running == 0, SOON)
        .await
        .expect("and their work too");
    for line in gate.logged(2).await {
        assert_eq!(line["outcome"], "client_closed", "{line}");
    }
    drop(clients);
}

#[tokio::test]
async fn a_server_that_vanishes_is_noticed() {
    if !inside(module_path!(), "a_server_that_vanishes_is_noticed") {
        return;
    }
    let at: SocketAddr = "127.0.2.1:0".parse().expect("an address");
    let up = FakeUpstream::start(at, Script::default())
        .await
        .expect("a port");
    let gate = gateway(&up, impatient);
    let mut silent = gate
        .post(CHAT, &stream(json!({"stall": {"at": "head"}})))
        .await;
    let mut flowing = gate
        .post(
            CHAT,
            &stream(json!({"tokens": 5, "stall": {"at": {"event": 3}}})),
        )
        .await;
    silent.set_limit(NOTICED);
    flowing.set_limit(NOTICED);
    flowing.final_head().await.expect("head");
    flowing.events(2).await.expect("events");
    up.wait_for(|t| t.running == 2, SOON)
        .await
        .expect("both run");
    vanish("127.0.2.1");
    let head = silent.final_head().await.expect("head");
    assert_eq!(
        (head.status, head.header("x-tidegate-started")),
        (502, Some("true"))
    );
    let (events, end) = flowing.all_events().await.expect("events");
    assert!(!end.looks_whole());
    assert!(
        events.last().expect("a word").data.contains("error"),
        "{events:?}"
    );
    let lines = gate.logged(2).await;
    let mut outcomes: Vec<&str> = lines.iter().filter_map(|l| l["outcome"].as_str()).collect();
    outcomes.sort_unstable();
    assert_eq!(outcomes, ["upstream_failed", "upstream_truncated"]);
    assert_eq!(gate.metric("running", &[]), 0.0);
}

fn impatient(config: &mut tidegate::config::Config) {
    config.server.tcp_keep_alive = Duration::from_secs(1);
    config.server.tcp_user_timeout = Duration::from_secs(2);
}

/// Names are looked up for each new connection, and never kept: a server that moves is found where it is now.
#[tokio::test]
async fn a_name_that_moves_is_followed() {
    if !inside(module_path!(), "a_name_that_moves_is_followed") {
        return;
    }
    let hosts = std::env::temp_dir().join(format!("tidegate-hosts-{}", std::process::id()));
    let moves_to =
        |ip: &str| std::fs::write(&hosts, format!("{ip} model.test\n")).expect("written");
    moves_to("127.0.3.1");
    run(&format!("mount --bind {} /etc/hosts", hosts.display()));
    let one = FakeUpstream::start(
        "127.0.3.1:0".parse().expect("an address"),
        Script::default(),
    )
    .await
    .expect("a port");
    let port = one.addr().port();
    let second = SocketAddr::new("127.0.3.2".parse().expect("an address"), port);
    let two = FakeUpstream::start(second, Script::default())
        .await
        .expect("a port");
    let gate = gateway_at(one.addr(), |c| {
        let name = format!("http://model.test:{port}");
        only(c).endpoints = vec![Endpoint::parse(&name).expect("an address")];
        only(c).pool.idle = Duration::ZERO;
    });
    for (ip, is_there, n) in [
        ("127.0.3.1", &one, 1),
        ("127.0.3.2", &two, 1),
        ("127.0.3.1", &one, 2),
    ] {
        moves_to(ip);
        let mut client = gate.post(CHAT, &ask(json!({}))).await;
        assert_eq!(client.final_head().await.expect("head").status, 200);
        assert_eq!(is_there.truth().calls_begun, n, "{ip}");
    }
    std::fs::remove_file(&hosts).expect("removed");
}
