//! What bounds the calls that wait for a retry, and what goes wrong while they do.

use std::time::Duration;

use serde_json::{Value, json};
use tidegate::config::{Attach, ClientKey};
use tidegate_rig::{BodyEnd, RawClient, Script};

use crate::attach::{LONG, answer, endless, graced, left, named, post, post_with, stuck};
use crate::support::{CANCEL, CHAT, Gate, SOON, gateway, only, slots, stream, upstream};

/// Past a bound of bytes nobody can take a call up any more, and it ends as its contract says.
#[tokio::test]
async fn a_bound_of_bytes_ends_the_grace() {
    let up = upstream(Script::default()).await;
    for (own, total, bound) in [(8192, 1 << 20, "bytes"), (1 << 20, 8192, "total")] {
        for at_first in [true, false] {
            up.reset();
            let gate = gateway(&up, |c| {
                graced(c, LONG);
                only(c).attach = Some(Attach {
                    grace: LONG,
                    bytes: own,
                });
                c.limits.attach_total_bytes = total;
            });
            let key = named("bytes");
            let mut client = post(&gate, CHAT, &key, &endless()).await;
            client.final_head().await.expect("head");
            if at_first {
                client.body_bytes(9000).await.expect("bytes");
            }
            client.leave_rst().expect("left");
            up.wait_for(|t| t.running == 0, SOON).await.expect("closed");
            gate.settled(&up).await;
            let lost = gate.metric("attach_lost_total", &[("bound", bound)]);
            assert_eq!(lost, 1.0, "{bound} {at_first}");
            assert_eq!(gate.metric("attach_bytes", &[]), 0.0);
            let line = gate.logged(1).await.remove(0);
            assert_eq!(line["outcome"], "client_closed");
            assert_eq!(line["work_end"], "cancelled");
        }
    }
}

/// Nobody came back in time: the contract holds, and a retry is a new call, linked; one that asks for the old one is told.
#[tokio::test]
async fn after_the_grace_there_is_nothing_to_resume() {
    let up = upstream(Script::default()).await;
    for ends in [true, false] {
        up.reset();
        // One ends well within its grace, the other never does.
        let grace = if ends { 4000 } else { 300 };
        let gate = gateway(&up, |c| graced(c, Duration::from_millis(grace)));
        let body = stuck(ends.then_some(1500));
        let key = named("late");
        let mut client = post(&gate, CHAT, &key, &body).await;
        let peer = client.local_addr().expect("an address");
        client.final_head().await.expect("head");
        client.events(3).await.expect("events");
        client.leave_rst().expect("left");
        let first = gate.line_of(peer).await;
        assert_eq!(
            (&first["outcome"], &first["wait_end"], &first["work_end"]),
            (
                &json!("client_closed"),
                &json!("left"),
                &json!(if ends { "complete" } else { "cancelled" })
            ),
            "{first}"
        );
        if ends {
            assert!(first["wasted_tokens"].as_u64() > Some(0), "{first}");
        } else {
            assert_eq!(first["overrun"], "grace", "{first}");
            assert_eq!(gate.metric("overruns_total", &[("bound", "grace")]), 1.0);
        }
        let asks = [("idempotency-key", &*key), ("x-tidegate-resume", "1")];
        let mut told = post_with(&gate, CHAT, &asks, &body).await;
        assert_eq!(answer(&mut told).await.0.status, 410);
        let mut retry = post(&gate, CHAT, &key, &body).await;
        let peer = retry.local_addr().expect("an address");
        let head = retry.final_head().await.expect("head");
        assert_eq!(head.header("x-tidegate-attached"), None);
        assert_eq!(up.truth().calls_begun, 2);
        retry.leave_rst().expect("left");
        assert_eq!(gate.line_of(peer).await["retry_of"], first["id"]);
        gate.settled(&up).await;
        assert_eq!(gate.metric("attach_bytes", &[]), 0.0);
    }
}

/// One key's answers leave room for those of the others.
#[tokio::test]
async fn one_keys_answers_do_not_take_the_memory_of_all() {
    use sha2::Digest as _;
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        graced(c, LONG);
        c.limits.attach_total_bytes = 64 * 1024;
        c.keys = ["mine", "other"]
            .map(|name| ClientKey {
                name: name.into(),
                sha256: sha2::Sha256::digest(name).into(),
            })
            .into();
    });
    let called = async |who: &str, name: &str, body: &Value| {
        let (auth, name) = (format!("Bearer {who}"), named(name));
        let headers = [("authorization", &*auth), ("idempotency-key", &*name)];
        let mut client = post_with(&gate, CHAT, &headers, body).await;
        let head = client.final_head().await.expect("head");
        (client, head.header("x-tidegate-attached").is_some())
    };
    // Each takes one block of 4 KiB.
    for n in 0..20 {
        let (mut client, _) = called("other", &format!("{n}"), &stuck(None)).await;
        client.events(3).await.expect("events");
        client.leave_rst().expect("left");
    }
    let lost = |g: &Gate| g.metric("attach_lost_total", &[("bound", "total")]);
    gate.eventually("half is full", |g| lost(g) == 12.0).await;
    assert_eq!(gate.metric("attach_bytes", &[]), 32.0 * 1024.0);
    let (mut client, _) = called("mine", "own", &stuck(None)).await;
    client.events(3).await.expect("events");
    client.leave_rst().expect("left");
    let (client, attached) = called("mine", "own", &stuck(None)).await;
    assert!(attached, "there was room for its answer");
    drop(client);
    gate.gateway.drain().await;
    gate.settled(&up).await;
    assert_eq!(gate.metric("attach_bytes", &[]), 0.0);
}

/// How many may wait at once, and how many tokens may come meanwhile.
#[tokio::test]
async fn the_grace_stays_within_the_bounds_of_abandoned_work() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        graced(c, LONG);
        only(c).abandon.at_once = 1;
        only(c).abandon.tokens = Some(50);
    });
    left(&gate, &named("one"), &stuck(None)).await;
    let mut two = post(&gate, CHAT, &named("two"), &stuck(None)).await;
    two.final_head().await.expect("head");
    two.leave_rst().expect("left");
    up.wait_for(|t| t.running == 1, CANCEL).await.expect("one");
    gate.eventually("past the number", |g| {
        g.metric("overruns_total", &[("bound", "at_once")]) == 1.0
    })
    .await;
    let mut back = post(&gate, CHAT, &named("one"), &stuck(None)).await;
    back.final_head().await.expect("head");
    let mut three = post(&gate, CHAT, &named("three"), &endless()).await;
    three.final_head().await.expect("head");
    three.leave_rst().expect("left");
    gate.eventually("past its tokens", |g| {
        g.metric("overruns_total", &[("bound", "tokens")]) == 1.0
    })
    .await;
    back.leave_rst().expect("left");
    gate.gateway.drain().await;
    gate.settled(&up).await;
}

/// A retry that does not read holds the upstream up; memory stays within its bound.
#[tokio::test]
async fn a_slow_retry_holds_the_upstream_up_and_no_memory() {
    let fast = json!({"tokens": 400_000, "event_bytes": 400, "send_buffer": 16384,
        "stall": {"at": {"event": 4}, "ms": 400}});
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        graced(c, LONG);
        only(c).attach = Some(Attach {
            grace: LONG,
            bytes: 64 * 1024,
        });
    });
    let key = named("slow");
    let body = stream(fast);
    left(&gate, &key, &body).await;
    let mut retry = RawClient::connect_slow(gate.addr(), 8192)
        .await
        .expect("connected");
    retry.set_limit(SOON);
    let headers = [("idempotency-key", &*key)];
    let text = body.to_string();
    let sent = retry.request("POST", CHAT, &headers, text.as_bytes());
    sent.await.expect("sent");
    retry.final_head().await.expect("head");
    let full = |g: &Gate| g.metric("attach_bytes", &[]) == 65536.0;
    gate.eventually("the tape is full", full).await;
    let written = up.truth().bytes_written;
    retry.body_bytes(2_000_000).await.expect("it reads");
    assert!(up.truth().bytes_written > written);
    assert!(gate.metric("attach_bytes", &[]) <= 65536.0);
    // Its beginning was forgotten: nobody can take it up any more, and it ends with this one.
    retry.leave_rst().expect("left");
    gate.settled(&up).await;
    assert_eq!(gate.metric("attach_bytes", &[]), 0.0);
    let lines = gate.logged(2).await;
    assert!(
        lines.iter().all(|l| l["outcome"] == "client_closed"),
        "{lines:#?}"
    );
}

/// What goes wrong while nobody is there is told to whoever comes back.
#[tokio::test]
async fn a_failure_in_the_grace_is_told_to_the_retry() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| graced(c, LONG));
    let mid = |fault: Value| {
        let mut rig = json!({"tokens": 9, "stall": {"at": {"event": 4}, "ms": 2500}});
        rig.as_object_mut()
            .expect("fields")
            .extend(fault.as_object().expect("fields").clone());
        stream(rig)
    };
    for (n, body) in [
        mid(json!({"end": "rst", "end_at": 6})),
        mid(json!({"error_at": 5})),
    ]
    .into_iter()
    .enumerate()
    {
        let key = named(&format!("fails {n}"));
        let peer = left(&gate, &key, &body).await;
        gate.eventually("it failed", |g| g.metric("attach_kept", &[]) == 1.0)
            .await;
        let mut retry = post(&gate, CHAT, &key, &body).await;
        let (head, text, end) = answer(&mut retry).await;
        assert_eq!(head.status, 200, "{text}");
        assert!(text.contains("\"error\""), "{text}");
        assert!(!text.contains("[DONE]") && !end.looks_whole(), "{text}");
        let first = gate.line_of(peer).await;
        assert_eq!(first["wait_end"], "failed", "{first}");
        assert_ne!(first["outcome"], "client_closed", "{first}");
    }
    // Before the head: its own status.
    let body = stream(json!({"delay_ms": 2500, "status": 418}));
    let mut client = post(&gate, CHAT, &named("refused"), &body).await;
    up.wait_for(|t| t.running == 1, SOON).await.expect("sent");
    client.send("").await.expect("still there");
    client.leave_fin();
    gate.eventually("it is kept", |g| g.metric("attach_kept", &[]) == 1.0)
        .await;
    let mut retry = post(&gate, CHAT, &named("refused"), &body).await;
    assert_eq!(answer(&mut retry).await.0.status, 418);
    gate.settled(&up).await;
}

/// A drain of the gateway ends what waits for a retry: nobody can come to it any more.
#[tokio::test]
async fn a_drain_ends_the_grace() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| graced(c, LONG));
    left(&gate, &named("running"), &stuck(None)).await;
    let body = stuck(Some(2000));
    let mut client = post(&gate, CHAT, &named("kept"), &body).await;
    client.final_head().await.expect("head");
    client.events(3).await.expect("events");
    client.leave_rst().expect("left");
    gate.eventually("kept", |g| g.metric("attach_kept", &[]) == 1.0)
        .await;
    let drained = tokio::time::timeout(SOON, gate.gateway.drain()).await;
    assert_eq!(drained.expect("no grace is waited for").cut, 0);
    gate.settled(&up).await;
    let lines = gate.stop();
    assert_eq!(lines.len(), 2);
    assert!(lines.iter().all(|l| l["outcome"] == "client_closed"));
}

/// A reload that takes the grace away leaves what waits alone: its own settings hold to its end, so its retry still finds it, and one that
/// is turned away for want of room too. What begins after it has no grace.
#[tokio::test]
async fn a_reload_leaves_what_waits_alone() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| graced(c, LONG));
    let (key, body) = (named("reload"), stuck(None));
    left(&gate, &key, &body).await;
    let mut without = gate.config();
    only(&mut without).attach = None;
    only(&mut without).slots = slots(1);
    only(&mut without).queue = 0;
    gate.gateway.reload(without).expect("it is used");
    for resume in [&[][..], &[("x-tidegate-resume", "1")]] {
        let headers = [&[("idempotency-key", &*key)], resume].concat();
        let mut retry = post_with(&gate, CHAT, &headers, &body).await;
        let head = retry.final_head().await.expect("head");
        assert!(head.header("x-tidegate-attached").is_some(), "{head:?}");
        assert_eq!(retry.events(3).await.expect("events").len(), 3);
        retry.leave_fin();
        gate.eventually("left again", |g| g.metric("abandoned", &[]) == 1.0)
            .await;
    }
    assert_eq!(up.truth().calls_begun, 1);
    let mut more_room = gate.config();
    only(&mut more_room).attach = None;
    gate.gateway.reload(more_room).expect("it is used");
    let mut new = post(&gate, CHAT, &named("new"), &body).await;
    new.final_head().await.expect("head");
    new.leave_rst().expect("left");
    up.wait_for(|t| t.calls_begun == 2 && t.running == 1, CANCEL)
        .await
        .expect("what began without a grace ends with its client");
    let resume = [("idempotency-key", "none"), ("x-tidegate-resume", "1")];
    let mut none = post_with(&gate, CHAT, &resume, &body).await;
    assert_eq!(none.final_head().await.expect("head").status, 410);
    gate.gateway.drain().await;
    gate.settled(&up).await;
}

/// An empty name is none, and two are none: nothing of two equal requests side by side is taken for the other's.
#[tokio::test]
async fn a_name_that_names_nothing_takes_nothing_up() {
    use sha2::Digest as _;
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        graced(c, LONG);
        c.keys = vec![ClientKey {
            name: "mine".into(),
            sha256: sha2::Sha256::digest("mine").into(),
        }];
    });
    let auth = ("authorization", "Bearer mine");
    let two = [auth, ("idempotency-key", "a"), ("idempotency-key", "b")];
    let (empty, blank) = (
        [auth, ("idempotency-key", "")],
        [auth, ("idempotency-key", "  ")],
    );
    let body = stuck(None);
    for headers in [&empty[..], &blank, &two] {
        up.reset();
        let mut first = post_with(&gate, CHAT, headers, &body).await;
        first.final_head().await.expect("head");
        first.events(3).await.expect("events");
        let mut second = post_with(&gate, CHAT, headers, &body).await;
        let head = second.final_head().await.expect("head");
        assert_eq!(head.header("x-tidegate-attached"), None, "{headers:?}");
        assert_eq!(up.truth().running, 2, "{headers:?}");
        first.leave_rst().expect("left");
        second.leave_rst().expect("left");
        up.wait_for(|t| t.running == 0, CANCEL)
            .await
            .expect("they end with their clients");
    }
    gate.settled(&up).await;
    let lines = gate.stop();
    assert!(
        lines.iter().all(|line| line["retry_of"].is_null()),
        "{lines:#?}"
    );
}

/// A header that says no asks for nothing.
#[tokio::test]
async fn a_resume_that_says_no_is_none() {
    let up = upstream(Script::default()).await;
    for grace in [true, false] {
        let gate = gateway(&up, |c| {
            if grace {
                graced(c, LONG);
            }
        });
        for (value, status) in [
            ("0", 200),
            ("false", 200),
            ("", 200),
            ("1", 410),
            ("yes", 410),
        ] {
            let headers = [("x-tidegate-resume", value)];
            let quick = stream(json!({"tokens": 1}));
            let mut client = post_with(&gate, CHAT, &headers, &quick).await;
            let head = client.final_head().await.expect("head");
            assert_eq!(head.status, status, "{value:?} {grace}");
        }
        gate.settled(&up).await;
    }
}

/// An answer of a known length that came slowly and was handed on in full has no client that left.
#[tokio::test]
async fn a_long_answer_in_one_piece_is_delivered_when_its_last_byte_is() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| graced(c, LONG));
    let text = "x".repeat(1000);
    let mut body = stream(json!({"framing": "length",
        "headers": [["content-type", "application/json"]],
        "body": {"pieces": [{"text": text, "times": 5, "pause_ms": 700}]}}));
    body["stream"] = json!(false);
    let key = named("slow");
    let mut client = post(&gate, CHAT, &key, &body).await;
    let (head, text, end) = answer(&mut client).await;
    assert_eq!((head.status, text.len(), end), (200, 5000, BodyEnd::Clean));
    assert_eq!(head.header("content-length"), Some("5000"));
    let first = gate.logged(1).await.remove(0);
    assert_eq!(first["outcome"], "ok", "{first}");
    // Left in its middle, it has the same length when it is taken up.
    let key = named("left");
    let mut client = post(&gate, CHAT, &key, &body).await;
    client.final_head().await.expect("head");
    client.leave_rst().expect("left");
    let mut retry = post(&gate, CHAT, &key, &body).await;
    let (head, text, end) = answer(&mut retry).await;
    assert_eq!((head.status, text.len(), end), (200, 5000, BodyEnd::Clean));
    assert_eq!(head.header("content-length"), Some("5000"));
    assert!(head.header("x-tidegate-attached").is_some());
    gate.settled(&up).await;
    let lines = gate.logged(3).await;
    let outcomes: Vec<_> = lines.iter().map(|l| l["outcome"].clone()).collect();
    assert!(!outcomes.contains(&json!("client_closed")), "{lines:#?}");
    assert_eq!(gate.metric("attach_bytes", &[]), 0.0);
}
