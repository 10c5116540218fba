//! What is written down about a call: usage, both ends, and that it is written once.

use std::time::Duration;

use serde_json::{Value, json};
use tidegate_rig::{Event, PeerEnd, Script};

use crate::support::{
    CHAT, Gate, MESSAGES, RESPONSES, SOON, ask, eventually, gateway, only, slots, stream, upstream,
    whole,
};

async fn run(gate: &Gate, path: &str, body: &Value) -> Vec<Event> {
    let mut client = gate.post(path, body).await;
    client.final_head().await.expect("head");
    client.all_events().await.expect("events").0
}

#[tokio::test]
async fn usage_that_we_asked_for_is_not_shown_to_the_client() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| only(c).ask_usage = true);
    for path in [CHAT, "/v1/completions"] {
        for segment in [
            json!("event"),
            json!("byte"),
            json!("once"),
            json!({"events": 3}),
        ] {
            for line_end in ["lf", "crlf", "cr"] {
                let script = json!({"tokens": 4, "segment": segment, "line_end": line_end});
                let events = run(&gate, path, &stream(script)).await;
                for event in &events {
                    assert!(!event.data.contains("\"choices\":[]"), "{path}: {event:?}");
                }
                assert_eq!(events.last().expect("an end").data, "[DONE]");
                let asked = events.len();
                let mut direct = stream(json!({"tokens": 4, "usage": "no"}));
                direct["stream_options"] = json!({"include_usage": true});
                assert_eq!(
                    run(&gate, path, &direct).await.len(),
                    asked,
                    "only that one is left out"
                );
            }
        }
    }
    // Whoever asks for it gets it.
    let mut body = stream(json!({"tokens": 4}));
    body["stream_options"] = json!({"include_usage": true});
    let events = run(&gate, CHAT, &body).await;
    assert!(events.iter().any(|e| e.data.contains("\"choices\":[]")));
    gate.settled(&up).await;
    for call in up.calls() {
        let sent: Value = serde_json::from_slice(&call.body.expect("kept")).expect("json");
        assert_eq!(sent["stream_options"]["include_usage"], true);
        assert_eq!(sent["messages"][0]["content"], "hi");
    }
    let known = gate.stop().into_iter().filter(|l| l["usage"] == "reported");
    assert_eq!(known.count(), 25);
}

#[tokio::test]
async fn nothing_is_asked_for_where_it_is_not_wanted() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    run(&gate, CHAT, &stream(json!({"tokens": 2}))).await;
    let sent = up.calls()[0].body.clone().expect("kept");
    assert_eq!(
        sent,
        stream(json!({"tokens": 2})).to_string().into_bytes(),
        "not a byte was changed"
    );
    gate.settled(&up).await;
    let line = &gate.stop()[0];
    assert_eq!(
        (&line["usage"], &line["output_tokens"]),
        (&json!("counted"), &json!(2))
    );
}

#[tokio::test]
async fn usage_is_read_where_each_dialect_puts_it() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for path in [CHAT, "/v1/completions", MESSAGES, RESPONSES] {
        for usage in ["yes", "continuous"] {
            run(
                &gate,
                path,
                &stream(json!({"tokens": 5, "prompt_tokens": 31, "usage": usage})),
            )
            .await;
        }
        let mut client = gate
            .post(
                path,
                &whole(json!({"tokens": 5, "prompt_tokens": 31, "usage": "yes"})),
            )
            .await;
        client.final_head().await.expect("head");
        client.rest().await.expect("body");
    }
    gate.settled(&up).await;
    let lines = gate.stop();
    assert_eq!(lines.len(), 12);
    for line in lines {
        assert_eq!(
            (&line["input_tokens"], &line["output_tokens"]),
            (&json!(31), &json!(5)),
            "{line}"
        );
        assert_eq!(line["usage"], "reported");
    }
}

#[tokio::test]
async fn the_first_token_is_the_first_delta_that_says_something() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let text = |text: &str, pause: u64| json!({"text": text, "pause_ms": pause});
    let pieces = json!([
        text(": hello\n\n", 60),
        text("data: {\"choices\":[]}\n\n", 0),
        text(
            "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":null}}]}\n\n",
            0
        ),
        text(
            "data: {\"choices\":[{\"delta\":{\"content\":\"\"}}]}\n\n",
            1500
        ),
        text(
            "data: {\"choices\":[{\"delta\":{\"reasoning_content\":\"hm\"}}]}\n\n",
            0
        ),
        text(
            "data: {\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n",
            0
        ),
    ]);
    run(&gate, CHAT, &stream(json!({"body": {"pieces": pieces}}))).await;
    gate.settled(&up).await;
    let line = &gate.stop()[0];
    let at = |name: &str| {
        line[name]
            .as_f64()
            .unwrap_or_else(|| panic!("{name}: {line}"))
    };
    assert!(at("first_byte_ms") >= at("head_ms"));
    assert!(
        at("first_token_ms") >= at("first_byte_ms") + 500.0,
        "{line}"
    );
    assert!(at("work_ended_ms") >= at("first_token_ms"));
}

#[tokio::test]
async fn both_ends_of_a_call_are_written_in_their_order() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut client = gate.client().await;
    let body = stream(json!({"tokens": 3, "usage": "yes"})).to_string();
    let headers = [("x-stainless-retry-count", "2")];
    client
        .request(
            "POST",
            "/v1/chat/completions?x=1",
            &headers,
            body.as_bytes(),
        )
        .await
        .expect("sent");
    let head = client.final_head().await.expect("head");
    let (answer, _) = client.rest().await.expect("body");
    gate.settled(&up).await;
    let peer = client.local_addr().expect("an address").to_string();
    let line = &gate.stop()[0];
    let expected = json!({
        "id": head.header("x-request-id"), "principal": "anonymous", "peer": peer, "method": "POST",
        "path": CHAT, "dialect": "openai", "model": "tiny", "stream": true, "status": 200, "outcome": "ok",
        "phase": "done", "wait_end": "answered", "work_end": "complete", "attempts": 1, "client_retry": 2,
        "request_bytes": body.len(), "response_bytes": answer.len(), "input_tokens": 22, "output_tokens": 3,
        "usage": "reported", "endpoint": up.addr().to_string(), "generation": 1,
    });
    for (name, value) in expected.as_object().expect("fields") {
        assert_eq!(&line[name], value, "{name}");
    }
    let order = [
        "admitted_ms",
        "sent_ms",
        "head_ms",
        "first_byte_ms",
        "first_token_ms",
        "work_ended_ms",
    ];
    for pair in order.windows(2) {
        assert!(
            line[pair[0]].as_f64() <= line[pair[1]].as_f64(),
            "{pair:?}: {line}"
        );
    }
    assert!(!line.to_string().contains("\"hi\""), "no prompt in the log");
}

/// Steps that happen at once share a moment; those that something was waited for between do not.
#[tokio::test]
async fn each_step_of_a_whole_answer_has_its_own_moment() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| only(c).slots = slots(1));
    let body = json!({"text": "{\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":1}}"});
    let pieces = json!([{"text": " ", "pause_ms": 30}, body]);
    let json = json!([["content-type", "application/json"]]);
    let slow = whole(json!({"delay_ms": 300, "body": {"pieces": pieces}, "headers": json}));
    let mut one = gate.post(CHAT, &slow).await;
    let mut two = gate.post(CHAT, &slow).await;
    eventually("one is queued", || gate.metric("queued", &[]) == 1.0).await;
    for client in [&mut one, &mut two] {
        client.final_head().await.expect("head");
        client.rest().await.expect("body");
    }
    gate.settled(&up).await;
    let lines = gate.stop();
    let at = |line: &Value, name: &str| {
        let at = line[name].as_f64();
        at.unwrap_or_else(|| panic!("{name}: {line}"))
    };
    let (mut queued_for, mut in_one_piece) = (Vec::new(), 0);
    for line in &lines {
        let at = |name| at(line, name);
        let order = [
            "received_ms",
            "queued_ms",
            "admitted_ms",
            "sent_ms",
            "head_ms",
            "first_byte_ms",
            "work_ended_ms",
            "wait_ended_ms",
            "settled_ms",
        ];
        for pair in order.windows(2) {
            assert!(at(pair[0]) <= at(pair[1]), "{pair:?}: {line}");
        }
        assert!(at("head_ms") - at("sent_ms") >= 299.0, "{line}");
        assert!(at("work_ended_ms") - at("sent_ms") >= 329.0, "{line}");
        // Later than that its head may have gone on before its end was here.
        if at("work_ended_ms") - at("head_ms") < 200.0 {
            assert_eq!(at("work_ended_ms"), at("settled_ms"), "{line}");
            in_one_piece += 1;
        }
        queued_for.push(at("admitted_ms") - at("queued_ms"));
    }
    assert!(in_one_piece > 0, "{lines:?}");
    queued_for.sort_by(f64::total_cmp);
    assert_eq!(queued_for[0], 0.0, "it had its slot at once: {lines:?}");
    assert!(queued_for[1] > 0.0, "it waited for the other: {lines:?}");
}

/// Who got no slot has asked for it when it came, not when it gave up.
#[tokio::test]
async fn the_queue_of_a_call_without_a_slot_begins_when_it_asks() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).slots = slots(1);
        only(c).timeouts.queue = Duration::from_millis(200);
    });
    let holds = gate.post(CHAT, &stream(json!({"end": "never"}))).await;
    eventually("it has the slot", || gate.metric("running", &[]) == 1.0).await;
    let mut waits = gate.post(CHAT, &whole(json!({}))).await;
    assert_eq!(waits.final_head().await.expect("head").status, 503);
    let line = gate.line_of(waits.local_addr().expect("an address")).await;
    let at = |name: &str| {
        line[name]
            .as_f64()
            .unwrap_or_else(|| panic!("{name}: {line}"))
    };
    assert!(at("wait_ended_ms") - at("queued_ms") >= 199.0, "{line}");
    drop(holds);
}

#[tokio::test]
async fn a_cancelled_stream_leaves_one_record_with_what_was_seen() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    // Anthropic's stream begins with the prompt's usage.
    for (path, usage, input) in [
        (MESSAGES, "auto", json!(22)),
        (CHAT, "continuous", json!(22)),
        (CHAT, "no", Value::Null),
    ] {
        let script = json!({"tokens": 20, "usage": usage, "stall": {"at": {"event": 12}}});
        let mut client = gate.post(path, &stream(script)).await;
        client.final_head().await.expect("head");
        client.events(12).await.expect("events");
        let peer = client.local_addr().expect("an address");
        client.leave_fin();
        let line = gate.line_of(peer).await;
        assert_eq!(
            (&line["outcome"], &line["phase"]),
            (&json!("client_closed"), &json!("streaming"))
        );
        assert_eq!(line["input_tokens"], input, "{line}");
        assert!(
            line["output_tokens"]
                .as_u64()
                .is_some_and(|n| (8..=12).contains(&n)),
            "{line}"
        );
        assert_eq!(line["work_end"], "cancelled");
    }
    gate.settled_with(&up, 0).await;
    assert_eq!(gate.stop().len(), 3);
}

#[tokio::test]
async fn leaving_before_the_first_token_costs_nothing() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    for at in [json!("head"), json!({"event": 1})] {
        let client = gate.post(CHAT, &stream(json!({"stall": {"at": at}}))).await;
        up.wait_for_call(
            |c| {
                c.ended.is_none()
                    && c.body_ns.is_some()
                    && (at == "head" || c.events > 0 || c.first_write_ns.is_some())
            },
            SOON,
        )
        .await
        .expect("there");
        let peer = client.local_addr().expect("an address");
        client.leave_fin();
        let line = gate.line_of(peer).await;
        assert_eq!(line["outcome"], "client_closed");
        assert_eq!(line["output_tokens"], Value::Null, "{line}");
        assert_eq!(line["usage"], "unknown");
        assert_eq!(line["first_token_ms"], Value::Null);
    }
    gate.settled_with(&up, 0).await;
}

#[tokio::test]
async fn the_text_of_an_error_is_no_output() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let page = json!({
        "status": 500, "headers": [["content-type", "text/html"]],
        "body": {"pieces": [{"text": "<p>many words</p>".repeat(3000)}]},
    });
    let mut client = gate.post(CHAT, &stream(page)).await;
    assert_eq!(client.final_head().await.expect("head").status, 500);
    client.rest().await.expect("body");
    let words = "many words ".repeat(2000);
    run(
        &gate,
        CHAT,
        &stream(json!({"error_at": 0, "message": words, "end_at": 2})),
    )
    .await;
    gate.settled_with(&up, 1).await;
    for line in gate.stop() {
        assert_eq!(line["outcome"], "upstream_error", "{line}");
        assert_eq!(line["output_tokens"], Value::Null, "{line}");
    }
}

/// A background response is the one call that a leaving client does not end.
#[tokio::test]
async fn background_responses_run_on_and_are_counted_as_abandoned() {
    for script in [
        json!({"tokens": 20, "pace_ms": 75.0}),
        json!({"tokens": 3, "delay_ms": 1500}),
        json!({"tokens": 3, "first_ms": 1500}),
    ] {
        for streaming in [true, false] {
            if !streaming && script["first_ms"].is_u64() {
                continue;
            }
            let up = upstream(Script::default()).await;
            let gate = gateway(&up, |_| {});
            let body = ask(json!({"background": true, "stream": streaming, "rig": script}));
            let mut client = gate.post(RESPONSES, &body).await;
            let peer = client.local_addr().expect("an address");
            up.wait_for(|t| t.running == 1, SOON)
                .await
                .expect("running");
            if streaming && script["pace_ms"] == 75.0 {
                client.final_head().await.expect("head");
                client.events(2).await.expect("events");
            }
            client.leave_fin();
            eventually(&format!("{script} {streaming} is abandoned"), || {
                gate.metric("abandoned", &[]) == 1.0 || gate.metric("running", &[]) == 0.0
            })
            .await;
            assert_eq!(
                gate.metric("abandoned_calls_total", &[]),
                1.0,
                "{script} {streaming}"
            );
            gate.settled(&up).await;
            assert_eq!(
                up.truth().ended_complete,
                1,
                "{script} {streaming}: {:?}",
                up.truth()
            );
            let line = gate.line_of(peer).await;
            let ends = (&line["wait_end"], &line["work_end"], &line["outcome"]);
            assert_eq!(
                ends,
                (&json!("left"), &json!("complete"), &json!("client_closed")),
                "{line}"
            );
            assert!(
                line["work_ended_ms"].as_f64() > line["wait_ended_ms"].as_f64(),
                "{line}"
            );
            assert_eq!(gate.stop().len(), 1);
        }
    }
}

#[tokio::test]
async fn what_belongs_to_background_responses_is_passed_through() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |_| {});
    let mut client = gate.client().await;
    for (method, path) in [
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/responses/resp_1?stream=true&starting_after=3"),
    ] {
        client.request(method, path, &[], b"").await.expect("sent");
        assert_eq!(client.final_head().await.expect("head").status, 200);
        let (body, _) = client.rest().await.expect("body");
        let echo: Value = serde_json::from_slice(&body).expect("json");
        assert_eq!(
            (&echo["method"], &echo["path"]),
            (&json!(method), &json!(path))
        );
    }
    gate.settled(&up).await;
}

#[tokio::test]
async fn each_call_is_in_exactly_one_outcome() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        let timeouts = &mut only(c).timeouts;
        timeouts.response_head = Duration::from_secs(2);
        timeouts.silence = Duration::from_secs(2);
    });
    run(&gate, CHAT, &stream(json!({"tokens": 2}))).await;
    run(
        &gate,
        CHAT,
        &stream(json!({"tokens": 9, "end": "fin", "end_at": 3})),
    )
    .await;
    run(&gate, CHAT, &stream(json!({"status": 429}))).await;
    run(&gate, CHAT, &stream(json!({"stall": {"at": "head"}}))).await;
    run(&gate, CHAT, &stream(json!({"stall": {"at": {"event": 2}}}))).await;
    run(&gate, CHAT, &stream(json!({"body": "html"}))).await;
    run(&gate, CHAT, &json!([])).await;
    run(&gate, CHAT, &stream(json!({"end": "rst", "end_at": 0}))).await;
    let mut client = gate
        .post(CHAT, &stream(json!({"stall": {"at": {"event": 2}}})))
        .await;
    client.final_head().await.expect("head");
    client.leave_fin();
    gate.logged(9).await;
    up.cut_all(PeerEnd::Fin);
    gate.settled(&up).await;
    for (outcome, n) in [
        ("ok", 1.0),
        ("upstream_truncated", 2.0),
        ("upstream_error", 1.0),
        ("timeout", 2.0),
        ("unexpected_content_type", 1.0),
        ("refused", 1.0),
        ("client_closed", 1.0),
    ] {
        assert_eq!(
            gate.metric("calls_total", &[("outcome", outcome)]),
            n,
            "{outcome}"
        );
    }
    assert_eq!(gate.metric("calls_total", &[]), 9.0);
    assert_eq!(
        gate.metric("started_total", &[]),
        gate.metric("ended_total", &[])
    );
    assert_eq!(gate.stop().len(), 9);
}
