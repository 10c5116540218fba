//! The end of abandoned work by the server's own count: slots come back when it shows that nothing runs on, and not before.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tidegate::config::{Config, Confirm, Contract, Endpoint, HttpVersion};
use tidegate_rig::{CallTruth, FakeUpstream, H2Front, H2Options, RawClient, Script};
use tokio::task::JoinSet;

use crate::binary::Program;
use crate::support::{
    CHAT, Gate, LOCALHOST, SOON, gateway, gateway_at, only, slots, stream, upstream, whole,
};

const HOUR: Duration = Duration::from_secs(3600);
const PAGES: [(&str, Confirm); 2] = [
    ("vllm", Confirm::VllmMetrics),
    ("llama_cpp", Confirm::LlamaSlots),
];

async fn showing(script: Value) -> FakeUpstream {
    upstream(Script::from_json(&script.to_string()).expect("a script")).await
}

/// Asked here; without a count the slot would be kept for an hour.
fn asks(c: &mut Config, confirm: Confirm) {
    only(c).abandon.confirm = confirm;
    only(c).abandon.contract = Contract::Linger;
    only(c).abandon.time = HOUR;
}

/// As [`asks`], under a contract that believes in so much time.
fn settles(c: &mut Config, confirm: Confirm, settle: Duration) {
    only(c).abandon.confirm = confirm;
    only(c).abandon.contract = Contract::Cancel;
    only(c).settle = settle;
}

/// A stream that never ends, a second old. Its client.
async fn streaming(gate: &Gate, script: Value) -> RawClient {
    let mut client = gate.post(CHAT, &stream(script)).await;
    client.final_head().await.expect("head");
    // A token that is a few events old was counted.
    client.events(40).await.expect("events");
    client
}

fn endless(on_close: &Value) -> Value {
    json!({"end": "never", "pace_ms": 10.0, "on_close": on_close})
}

/// Leaves, and waits for the call's line.
async fn left(gate: &Gate, client: RawClient) -> Value {
    let peer: SocketAddr = client.local_addr().expect("an address");
    client.leave_fin();
    gate.line_of(peer).await
}

fn confirmed(gate: &Gate, result: &str) -> f64 {
    gate.metric("confirmations_total", &[("result", result)])
}

#[tokio::test]
async fn a_server_that_stops_gives_the_slot_back_at_once() {
    for (pages, confirm) in PAGES {
        let up = showing(json!({"pages": pages, "slots": 4})).await;
        let gate = gateway(&up, |c| asks(c, confirm));
        let client = streaming(&gate, endless(&json!("stop"))).await;
        let line = left(&gate, client).await;
        let seen = (&line["work_end"], &line["end_known"], &line["outcome"]);
        let right = (
            &json!("cancelled"),
            &json!("confirmed"),
            &json!("client_closed"),
        );
        assert_eq!(seen, right, "{line}");
        let kept = line["slot_kept_ms"].as_f64().expect("a time");
        assert!(kept < 5000.0, "{line}");
        assert!(line["wasted_ms"].as_f64() >= Some(kept), "{line}");
        assert_eq!(confirmed(&gate, "confirmed"), 1.0);
        assert!(gate.metric("confirm_polls_total", &[("result", "read")]) >= 1.0);
        gate.settled(&up).await;
    }
}

/// Before its first token a call may not be in vLLM's gauges yet; a llama.cpp with a free slot hides none.
#[tokio::test]
async fn a_call_without_a_token_is_believed_gone_where_it_cannot_be_hidden() {
    for (pages, confirm, time, known) in [
        ("vllm", Confirm::VllmMetrics, 3000, "settled"),
        ("llama_cpp", Confirm::LlamaSlots, 60_000, "confirmed"),
    ] {
        let up = showing(json!({"pages": pages, "slots": 4})).await;
        let gate = gateway(&up, |c| settles(c, confirm, Duration::from_millis(time)));
        let client = gate
            .post(CHAT, &stream(json!({"stall": {"at": "head"}})))
            .await;
        up.wait_for(|t| t.running == 1, SOON)
            .await
            .expect("running");
        let line = left(&gate, client).await;
        assert_eq!(line["end_known"], known, "{line}");
        let kept = line["slot_kept_ms"].as_f64().expect("a time");
        assert!((3000.0..9000.0).contains(&kept), "{line}");
        gate.settled(&up).await;
    }
}

#[tokio::test]
async fn a_server_that_runs_on_keeps_the_slot_beyond_its_settle_time() {
    for (pages, confirm) in PAGES {
        let up = showing(json!({"pages": pages, "slots": 4})).await;
        let gate = gateway(&up, |c| settles(c, confirm, Duration::from_millis(100)));
        let client = streaming(&gate, endless(&json!({"late_ms": 1500}))).await;
        let peer = client.local_addr().expect("an address");
        client.leave_rst().expect("left");
        up.wait_for(|t| t.unattended == 1, SOON)
            .await
            .expect("it runs on");
        gate.eventually("the slot is kept", |g| g.metric("lingering", &[]) == 1.0)
            .await;
        while up.truth().running > 0 {
            assert_eq!(gate.metric("lingering", &[]), 1.0, "as long as it runs");
            tokio::task::yield_now().await;
        }
        let line = gate.line_of(peer).await;
        assert_eq!(line["end_known"], "late", "{line}");
        assert!(line["slot_kept_ms"].as_f64() >= Some(1000.0), "{line}");
        assert_eq!(confirmed(&gate, "late"), 1.0);
        gate.settled(&up).await;
    }
}

#[tokio::test]
async fn a_server_that_never_stops_is_given_up_at_the_bound() {
    for (pages, confirm) in PAGES {
        let up = showing(json!({"pages": pages, "slots": 4})).await;
        let gate = gateway(&up, |c| {
            settles(c, confirm, Duration::from_millis(100));
            only(c).abandon.confirm_within = Duration::from_millis(900);
        });
        let client = streaming(&gate, endless(&json!("never"))).await;
        let line = left(&gate, client).await;
        assert_eq!(line["end_known"], "given_up", "{line}");
        let kept = line["slot_kept_ms"].as_f64().expect("a time");
        assert!((1000.0..3000.0).contains(&kept), "{line}");
        assert_eq!(confirmed(&gate, "given_up"), 1.0);
        assert_eq!(up.truth().running, 1, "it does run on");
        up.cut_all(tidegate_rig::PeerEnd::Fin);
    }
}

/// What others run at the server cannot be told from ours: no slot comes back early for it.
#[tokio::test]
async fn where_others_use_the_server_the_count_frees_nothing() {
    let up = showing(json!({"pages": "vllm"})).await;
    let gate = gateway(&up, |c| {
        settles(c, Confirm::VllmMetrics, Duration::from_millis(1200));
        only(c).abandon.confirm_within = Duration::ZERO;
    });
    let mut other = RawClient::connect(up.addr()).await.expect("connected");
    let body = stream(endless(&json!("stop"))).to_string();
    other.post(CHAT, &body).await.expect("sent");
    other.final_head().await.expect("head");
    let client = streaming(&gate, endless(&json!("stop"))).await;
    let line = left(&gate, client).await;
    assert!(line["slot_kept_ms"].as_f64() >= Some(1200.0), "{line}");
    assert_eq!(line["end_known"], "given_up", "{line}");
    drop(other);
}

/// Calls that certainly run account for their part of the count.
#[tokio::test]
async fn on_a_busy_server_what_certainly_runs_is_not_taken_for_what_was_left() {
    let up = showing(json!({"pages": "vllm"})).await;
    let gate = gateway(&up, |c| asks(c, Confirm::VllmMetrics));
    let mut others = JoinSet::new();
    for n in 0..3 {
        let mut client = streaming(&gate, endless(&json!("stop"))).await;
        others.spawn(async move {
            let read = async { while client.events(1).await.is_ok() {} };
            let _ = tokio::time::timeout(SOON + SOON, read).await;
            n
        });
    }
    let client = streaming(&gate, endless(&json!("stop"))).await;
    let line = left(&gate, client).await;
    assert_eq!(line["end_known"], "confirmed", "{line}");
    assert_eq!(up.truth().running, 3);
    others.abort_all();
}

/// A slow reader's call may have ended at the server long ago: it accounts for nothing.
#[tokio::test]
async fn a_slow_readers_call_is_not_taken_for_one_that_runs() {
    let up = showing(json!({"pages": "vllm"})).await;
    let gate = gateway(&up, |c| {
        asks(c, Confirm::VllmMetrics);
        only(c).timeouts.write = HOUR;
    });
    let mut slow = RawClient::connect_slow(gate.addr(), 4096)
        .await
        .expect("connected");
    // More than one side's sockets hold, and less than those of both.
    let long = json!({"tokens": 900, "event_bytes": 4000});
    slow.post(CHAT, &stream(long).to_string())
        .await
        .expect("sent");
    slow.final_head().await.expect("head");
    up.wait_for(|t| t.ended_complete == 1, SOON)
        .await
        .expect("the server has done its part");
    assert_eq!(gate.metric("attended", &[]), 1.0, "its client has not");
    let client = streaming(&gate, endless(&json!({"late_ms": 3000}))).await;
    let peer = client.local_addr().expect("an address");
    client.leave_rst().expect("left");
    up.wait_for(|t| t.unattended == 1, SOON)
        .await
        .expect("it runs on");
    gate.eventually("kept", |g| g.metric("lingering", &[]) == 1.0)
        .await;
    while up.truth().running > 0 {
        assert_eq!(gate.metric("lingering", &[]), 1.0, "as long as it runs");
        tokio::task::yield_now().await;
    }
    let line = gate.line_of(peer).await;
    assert_eq!(line["end_known"], "confirmed", "{line}");
    assert_eq!(gate.metric("attended", &[]), 1.0, "and all the time");
    drop(slow);
}

/// Pages that are none: the time of the contract stands, and nothing is asked more often than is bearable.
#[tokio::test]
async fn without_a_readable_page_the_settle_time_stands() {
    for (result, page) in [
        ("unreadable", json!({"body": "html"})),
        ("status", json!({"status": 404})),
        ("too_long", json!({"body": "endless_line"})),
        ("broken", json!({"end": "rst", "end_at": 0})),
    ] {
        let up = showing(page.clone()).await;
        let gate = gateway(&up, |c| {
            settles(c, Confirm::VllmMetrics, Duration::from_millis(700));
        });
        for n in 1..=2 {
            let healthy = json!({"end": "never", "pace_ms": 5.0, "status": 200, "body": "auto",
                "tokens": null, "event_bytes": 0, "end_at": null});
            let client = streaming(&gate, healthy).await;
            let line = left(&gate, client).await;
            assert_eq!(line["end_known"], "settled", "{result}: {line}");
            let kept = line["slot_kept_ms"].as_f64().expect("a time");
            assert!((700.0..4000.0).contains(&kept), "{result}: {line}");
            assert_eq!(confirmed(&gate, "settled"), f64::from(n));
        }
        let polls = |label: &str| gate.metric("confirm_polls_total", &[("result", label)]);
        assert_eq!(polls(result), 1.0, "a page that fails has its rest: {page}");
        assert_eq!(polls("read"), 0.0);
        assert_eq!(gate.counted(), [""; 0]);
    }
}

/// A page that hangs is waited for once; there is one poll at a time, however many calls are left.
#[tokio::test]
async fn a_page_that_hangs_is_asked_for_once_at_a_time() {
    let up = showing(json!({"stall": {"at": "head"}})).await;
    let gate = gateway(&up, |c| {
        settles(c, Confirm::VllmMetrics, Duration::from_millis(100));
        only(c).abandon.confirm_within = Duration::from_secs(2);
    });
    let mut clients = Vec::new();
    for _ in 0..6 {
        clients.push(
            streaming(
                &gate,
                json!({"end": "never", "pace_ms": 5.0, "stall": null}),
            )
            .await,
        );
    }
    let mut lines = JoinSet::new();
    let gate = Arc::new(gate);
    for client in clients {
        let gate = Arc::clone(&gate);
        lines.spawn(async move { left(&gate, client).await });
    }
    let is_page = |c: &CallTruth| c.path == "/metrics";
    up.wait_for_call(is_page, SOON).await.expect("it is asked");
    for line in lines.join_all().await {
        assert_eq!(line["end_known"], "settled", "{line}");
        let kept = line["slot_kept_ms"].as_f64().expect("a time");
        assert!(kept >= 2000.0, "it may still answer: {line}");
    }
    let pages = up.calls().into_iter().filter(is_page).count();
    assert_eq!(pages, 1);
    up.wait_for(|t| t.running == 0, SOON)
        .await
        .expect("nobody waits for its answer any more");
}

/// The warning comes once, and the word that it is over.
#[tokio::test]
async fn the_log_says_once_that_a_server_does_not_show_its_work() {
    let up = showing(json!({"pages": "none", "status": 404})).await;
    let text = format!(
        "[server]\nlisten = \"127.0.0.1:0\"\n[admin]\nlisten = \"off\"\n[[upstreams]]\nurl = \"http://{}\"\nsettle = \"100ms\"\nabandon.confirm = \"vllm-metrics\"\n",
        up.addr()
    );
    let program = Program::configured(&text);
    let address = program.address("listen=").await;
    for _ in 0..3 {
        let mut client = RawClient::connect(address).await.expect("connected");
        let body = stream(json!({"end": "never", "pace_ms": 5.0, "status": 200}));
        client.post(CHAT, &body.to_string()).await.expect("sent");
        client.final_head().await.expect("head");
        client.events(3).await.expect("events");
        client.leave_fin();
        up.wait_for(|t| t.running == 0, SOON).await.expect("over");
    }
    program.says("the server does not show its work").await;
    let err = program.err();
    assert_eq!(err.matches("does not show its work").count(), 1, "{err}");
    assert!(err.contains("404") && err.contains("/metrics"), "{err}");
    program.signal("TERM");
    // Every call has its line, those that were being asked after, too.
    crate::support::eventually("three lines", || program.out().lines().count() == 3).await;
}

/// Slots that are kept are seen to be, with what they wait for; the operator has the last word, and so has the gateway's end.
#[tokio::test]
async fn what_is_overdue_is_seen_and_can_be_ended() {
    let up = showing(json!({"pages": "vllm"})).await;
    let gate = gateway(&up, |c| {
        c.admin.listen = Some(crate::support::LOCALHOST);
        settles(c, Confirm::VllmMetrics, Duration::from_millis(50));
        only(c).abandon.confirm_within = HOUR;
    });
    let client = streaming(&gate, endless(&json!("never"))).await;
    let peer = client.local_addr().expect("an address");
    client.leave_rst().expect("left");
    let call = crate::calls::the_call(&gate, "overdue", |c| c["state"] == "overdue").await;
    let path = format!("/admin/calls/{}", call["id"].as_str().expect("an id"));
    let (status, _) = crate::calls::admin(&gate, "DELETE", &path).await;
    assert_eq!(status, 200);
    let line = gate.line_of(peer).await;
    assert_eq!(line["end_known"], "killed", "{line}");
    assert_eq!(gate.counted(), [""; 0]);
    let client = streaming(&gate, endless(&json!("never"))).await;
    client.leave_rst().expect("left");
    crate::calls::the_call(&gate, "overdue", |c| c["state"] == "overdue").await;
    let lines = gate.stop();
    assert_eq!(lines.len(), 2, "no line is lost");
    assert_eq!(lines[1]["end_known"], "unknown", "{}", lines[1]);
    up.cut_all(tidegate_rig::PeerEnd::Fin);
}

/// A call that the gateway gave up, whose client is there and has its error, leaves work behind, too.
#[tokio::test]
async fn what_the_gateway_gives_up_is_asked_after() {
    let up = showing(json!({"pages": "vllm"})).await;
    let gate = gateway(&up, |c| {
        settles(c, Confirm::VllmMetrics, Duration::from_millis(100));
        only(c).timeouts.response_head = Duration::from_millis(300);
    });
    let body = whole(json!({"stall": {"at": "head"}, "on_close": {"late_ms": 1500}}));
    let mut client = gate.post(CHAT, &body).await;
    assert_eq!(client.final_head().await.expect("head").status, 504);
    while up.truth().running > 0 {
        assert_eq!(gate.metric("lingering", &[]), 1.0, "as long as it runs");
        tokio::task::yield_now().await;
    }
    let line = gate.logged(1).await.remove(0);
    assert_eq!(
        (&line["outcome"], &line["status"]),
        (&json!("timeout"), &json!(504))
    );
    assert_eq!(line["end_known"], "settled", "it never had a token: {line}");
    assert!(line["slot_kept_ms"].as_f64() >= Some(1000.0), "{line}");
    gate.settled(&up).await;
}

/// Clients that come, stay or leave at any moment, against every way of treating a close: by the server's own count there is never more
/// work than slots.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn there_is_never_more_work_than_slots() {
    let ways = [
        json!("stop"),
        json!("step"),
        json!({"late_ms": 500}),
        json!({"after_tokens": 30}),
        json!({"poll_ms": 400}),
        json!("never"),
    ];
    let mut servers = JoinSet::new();
    for (n, way) in ways.into_iter().enumerate() {
        let (pages, confirm) = PAGES[n % 2];
        servers.spawn(async move {
            let up =
                Arc::new(showing(json!({"pages": pages, "on_close": way, "pace_ms": 15.0})).await);
            let gate = Arc::new(gateway(&up, |c| {
                settles(c, confirm, Duration::from_millis(30));
                only(c).slots = slots(4);
                only(c).queue = 100;
                only(c).pool.connections_max = 100;
            }));
            let mut clients = JoinSet::new();
            for client in 0..12u64 {
                let gate = Arc::clone(&gate);
                clients.spawn(async move {
                    let mut dice = fastrand::Rng::with_seed(client);
                    for _ in 0..3 {
                        let tokens = dice.u64(20..60);
                        let mut client = gate.post(CHAT, &stream(json!({"tokens": tokens}))).await;
                        client.set_limit(SOON * 3);
                        if client.final_head().await.is_err() {
                            continue;
                        }
                        if dice.bool() {
                            let _ = client.all_events().await;
                        } else {
                            let _ = client.events(dice.usize(1..20)).await;
                            client.leave_fin();
                        }
                    }
                });
            }
            while let Some(done) = clients.join_next().await {
                done.expect("a client");
                assert!(up.truth().max_running <= 4, "{way}: {:?}", up.truth());
            }
            gate.settled(&up).await;
            let truth = up.truth();
            assert!(truth.max_running <= 4, "{way}: {truth:?}");
            assert!(
                truth.max_unattended > 0 || way == "stop",
                "{way}: {truth:?}"
            );
            let known = |result: &str| confirmed(&gate, result);
            assert!(known("confirmed") + known("late") > 0.0, "{way}");
            assert_eq!(known("given_up"), 0.0, "{way}");
        });
    }
    while let Some(done) = servers.join_next().await {
        done.expect("a server");
    }
}

/// The page comes over whatever the calls come over: HTTP/2 with prior knowledge, and TLS with a certificate of the operator's own.
#[tokio::test]
async fn a_server_is_asked_over_http2_and_over_tls_too() {
    for (pages, confirm) in PAGES {
        let up = showing(json!({"pages": pages, "slots": 4})).await;
        let front = H2Front::start(LOCALHOST, up.addr(), H2Options::default()).await;
        let front = front.expect("a port");
        let over_http2 = gateway_at(front.addr(), |c| {
            asks(c, confirm);
            only(c).pool.http = HttpVersion::Http2;
        });
        let pair = crate::tls::pair();
        let (port, task) = crate::tls::tls_front(&up, &pair).await;
        let over_tls = gateway(&up, |c| {
            asks(c, confirm);
            let url = format!("https://localhost:{port}");
            only(c).endpoints = vec![Endpoint::parse(&url).expect("an endpoint")];
            only(c).tls.ca_file = Some(pair.cert.clone());
        });
        for (what, gate) in [("HTTP/2", &over_http2), ("TLS", &over_tls)] {
            let late = json!({"late_ms": 1200});
            let client = streaming(gate, endless(&late)).await;
            let peer = client.local_addr().expect("an address");
            client.leave_rst().expect("left");
            up.wait_for(|t| t.unattended == 1, SOON)
                .await
                .expect("it runs on");
            gate.eventually("kept", |g| g.metric("lingering", &[]) == 1.0)
                .await;
            while up.truth().running > 0 {
                assert_eq!(
                    gate.metric("lingering", &[]),
                    1.0,
                    "{what}: as long as it runs"
                );
                tokio::task::yield_now().await;
            }
            let line = gate.line_of(peer).await;
            assert_eq!(line["end_known"], "confirmed", "{what}: {line}");
            let read = gate.metric("confirm_polls_total", &[("result", "read")]);
            let all = gate.metric("confirm_polls_total", &[]);
            assert!(read >= 2.0 && read == all, "{what}: {read} of {all}");
            assert_eq!(gate.counted(), [""; 0], "{what}");
        }
        task.abort();
    }
}
