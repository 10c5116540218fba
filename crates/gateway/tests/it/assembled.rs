//! Answers in one piece that are asked for as streams: the client gets what it would have got, and the work ends with its leaving.

use std::time::Duration;

use serde_json::{Value, json};
use tidegate::config::{Config, Kind, Timeouts};
use tidegate_rig::{BodyEnd, FakeUpstream, RawClient, Script};

use crate::leave::{WAYS, leave};
use crate::support::{CHAT, Gate, MESSAGES, RESPONSES, SOON, gateway, only, upstream, whole};

const COMPLETIONS: &str = "/v1/completions";
const PATHS: [&str; 4] = [CHAT, COMPLETIONS, MESSAGES, RESPONSES];

/// As for a vLLM, which the fake upstream imitates.
fn asks_for_streams(config: &mut Config) {
    only(config).kind = Kind::Vllm;
    only(config).ask_stream = true;
}

async fn answer(gate: &Gate, path: &str, body: &Value) -> (u16, Value, RawClient) {
    let mut client = gate.post(path, body).await;
    client.set_limit(SOON);
    let head = client.final_head().await.expect("head");
    let kind = head.header("content-type");
    assert_eq!(kind, Some("application/json"), "{path}");
    let (bytes, end) = client.rest().await.expect("body");
    assert_eq!(end, BodyEnd::Clean);
    let value = serde_json::from_slice(&bytes).expect("JSON");
    (head.status, value, client)
}

/// The body that the upstream got for this call.
fn sent(up: &FakeUpstream, call: usize) -> Value {
    let calls = up.calls();
    serde_json::from_slice(calls[call].body.as_deref().expect("kept")).expect("JSON")
}

/// What an answer says, wherever its dialect puts it.
fn said(answer: &Value) -> Value {
    let message = &answer["choices"][0]["message"];
    json!({
        "text": [&message["content"], &answer["choices"][0]["text"], &answer["content"], &answer["output"][0]["content"][0]["text"]],
        "reasoning": message["reasoning"],
        "tools": message["tool_calls"],
        "ended": [&answer["choices"][0]["finish_reason"], &answer["stop_reason"], &answer["status"]],
        "usage": [
            &answer["usage"]["completion_tokens"], &answer["usage"]["prompt_tokens"],
            &answer["usage"]["output_tokens"], &answer["usage"]["input_tokens"],
        ],
        "object": answer["object"],
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn the_answer_is_that_of_the_server_on_every_route() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, asks_for_streams);
    let plain = gateway(&up, |_| ());
    let scripts = [
        json!({"tokens": 12, "usage": "yes"}),
        json!({"tokens": 9, "usage": "yes", "segment": {"size": 7}, "line_end": "crlf"}),
        json!({"tokens": 8, "usage": "yes", "finish_reason": "stop", "token_text": "é🙂\"\\ "}),
    ];
    for path in PATHS {
        for script in &scripts {
            let (status, ours, _) = answer(&gate, path, &whole(script.clone())).await;
            let (_, theirs, _) = answer(&plain, path, &whole(script.clone())).await;
            assert_eq!(status, 200);
            assert_eq!(said(&ours), said(&theirs), "{path} {script}");
        }
    }
    let (_, tools, _) = answer(&gate, CHAT, &whole(json!({"tool_calls": 2}))).await;
    let calls = tools["choices"][0]["message"]["tool_calls"].clone();
    assert_eq!(
        calls[1]["function"]["arguments"], "{\"city\": \"Paris\"}",
        "{tools}"
    );
    let (_, thought, _) = answer(
        &gate,
        CHAT,
        &whole(json!({"reasoning_tokens": 3, "tokens": 5})),
    )
    .await;
    assert!(
        thought["choices"][0]["message"]["reasoning"].is_string(),
        "{thought}"
    );
    gate.settled(&up).await;
    plain.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_with_usage_is_asked_for_and_metered() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, asks_for_streams);
    for (call, path) in PATHS.into_iter().enumerate() {
        let (_, _, client) = answer(&gate, path, &whole(json!({"tokens": 7}))).await;
        let sent = sent(&up, call);
        assert_eq!(sent["stream"], true, "{path}");
        let usage = path == CHAT || path == COMPLETIONS;
        assert_eq!(sent.get("stream_options").is_some(), usage, "{path}");
        let line = gate.line_of(client.local_addr().unwrap()).await;
        assert_eq!(line["stream"], false, "what the client asked for");
        assert_eq!(
            (&line["output_tokens"], &line["usage"]),
            (&json!(7), &json!("reported")),
            "{line}"
        );
        assert_eq!(line["outcome"], "ok");
        assert!(line["events"].as_u64() > Some(7), "{line}");
        assert!(
            line["first_token_ms"].is_number() || line["times"]["first_token_ms"].is_number(),
            "{line}"
        );
    }
    assert_eq!(gate.metric("time_to_first_token_seconds_count", &[]), 4.0);
    gate.settled(&up).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_leaves_takes_the_work_along() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, asks_for_streams);
    for path in PATHS {
        for way in WAYS {
            let id = format!("{path} {way:?}");
            let mut body = whole(json!({"tokens": 100_000, "pace_ms": 5}));
            body["test_id"] = json!(id);
            let client = gate.post(path, &body).await;
            let peer = client.local_addr().unwrap();
            let mine = |c: &tidegate_rig::CallTruth| c.test_id.as_deref() == Some(&*id);
            up.wait_for_call(|c| mine(c) && c.tokens >= 5, SOON)
                .await
                .expect("it streams");
            let _half = leave(client, way).await;
            let call = up
                .wait_for_call(|c| mine(c) && c.ended_ns.is_some(), SOON)
                .await
                .expect("it ends");
            assert!(call.tokens_after_peer_left <= 1, "{call:?}");
            assert!(call.tokens < 2000, "{id}: {} tokens", call.tokens);
            let line = gate.line_of(peer).await;
            assert_eq!(
                (&line["outcome"], &line["work_end"]),
                (&json!("client_closed"), &json!("cancelled")),
                "{line}"
            );
            assert_eq!(
                (&line["phase"], &line["usage"]),
                (&json!("streaming"), &json!("counted")),
                "{line}"
            );
        }
    }
    gate.settled(&up).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_in_mid_stream_has_its_status() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, asks_for_streams);
    let event = |error: Value| {
        let text = format!(
            "data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"x\"}}}}]}}\n\ndata: {}\n\n",
            json!({"error": error})
        );
        whole(
            json!({"headers": [["content-type", "text/event-stream"]], "body": {"pieces": [{"text": text}]}}),
        )
    };
    for (error, status, again) in [
        (
            json!({"message": "gpu fell off", "type": "server_error", "code": 500}),
            500,
            true,
        ),
        (json!({"message": "gpu fell off", "code": 400}), 400, false),
        (
            json!({"message": "gpu fell off", "type": "invalid_request_error", "code": null}),
            400,
            false,
        ),
        (
            json!({"message": "gpu fell off", "type": "rate_limit_error"}),
            429,
            true,
        ),
        (
            json!({"message": "gpu fell off", "type": "overloaded_error"}),
            503,
            true,
        ),
        (json!({"message": "gpu fell off", "code": 200}), 502, true),
        (json!("gpu fell off"), 502, true),
    ] {
        let mut client = gate.post(CHAT, &event(error.clone())).await;
        let head = client.final_head().await.expect("head");
        let (body, _) = client.rest().await.expect("body");
        assert_eq!(head.status, status, "{error}");
        assert_eq!(head.header("x-should-retry").is_none(), again, "{error}");
        assert_eq!(head.header("x-tidegate-started"), Some("true"));
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert!(
            body["error"]["message"]
                .as_str()
                .unwrap()
                .contains("gpu fell off"),
            "{body}"
        );
        let line = gate.line_of(client.local_addr().unwrap()).await;
        assert_eq!(
            (&line["outcome"], &line["reason"]),
            (&json!("upstream_error"), &json!("error_event"))
        );
    }
    let (status, body, _) = answer(&gate, MESSAGES, &whole(json!({"error_at": 3}))).await;
    assert!(status >= 500 && body["type"] == "error", "{status} {body}");
    gate.settled(&up).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_is_no_answer() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, asks_for_streams);
    for path in PATHS {
        for script in [
            json!({"tokens": 20, "end": "fin", "end_at": 5}),
            json!({"tokens": 20, "end": "rst", "end_at": 5}),
            json!({"tokens": 20, "end": "clean", "end_at": 5}),
            json!({"tokens": 20, "end": "fin", "end_at": 5, "end_mid_event": true}),
            json!({"tokens": 20, "framing": "close", "end_at": 5}),
            json!({"headers": [["content-type", "text/event-stream"]], "body": {"pieces": []}}),
        ] {
            let (status, body, client) = answer(&gate, path, &whole(script.clone())).await;
            assert_eq!(status, 502, "{path} {script}");
            assert!(
                body["error"]["message"]
                    .as_str()
                    .unwrap()
                    .contains("broke off"),
                "{body}"
            );
            let line = gate.line_of(client.local_addr().unwrap()).await;
            assert_eq!(line["outcome"], "upstream_truncated", "{line}");
        }
    }
    let garbage = json!({"headers": [["content-type", "text/event-stream"]], "body": {"pieces": [{"text": "data: {oops\n\n"}]}});
    let (status, body, _) = answer(&gate, CHAT, &whole(garbage)).await;
    assert_eq!(status, 502);
    assert!(
        body["error"]["message"]
            .as_str()
            .unwrap()
            .contains("not JSON"),
        "{body}"
    );
    gate.settled(&up).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_does_not_stream_is_taken_at_its_word() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, asks_for_streams);
    for (path, body) in [
        (CHAT, "chat"),
        (MESSAGES, "anthropic"),
        (RESPONSES, "responses"),
    ] {
        let (status, answer, _) =
            answer(&gate, path, &whole(json!({"body": body, "tokens": 5}))).await;
        assert_eq!(status, 200);
        assert!(answer["usage"].is_object(), "{path} {answer}");
    }
    let refused = json!({"status": 400, "message": "stream is not supported here"});
    let (status, body, client) = answer(&gate, CHAT, &whole(refused)).await;
    assert_eq!(status, 400);
    assert!(
        body["error"]["message"]
            .as_str()
            .unwrap()
            .contains("not supported here"),
        "{body}"
    );
    let line = gate.line_of(client.local_addr().unwrap()).await;
    assert_eq!(
        (&line["attempts"], &line["outcome"]),
        (&json!(1), &json!("upstream_error")),
        "{line}"
    );
    gate.settled(&up).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_stream_cannot_honour_goes_as_it_is() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, asks_for_streams);
    for (call, field) in [
        json!({"best_of": 2}),
        json!({"echo": true}),
        json!({"stream_options": {"include_usage": true}}),
        json!({"modalities": ["text", "audio"]}),
    ]
    .into_iter()
    .enumerate()
    {
        let mut body = whole(json!({"tokens": 3}));
        body.as_object_mut()
            .unwrap()
            .extend(field.as_object().unwrap().clone());
        answer(&gate, COMPLETIONS, &body).await;
        let sent = sent(&up, call);
        assert_eq!(sent, body);
    }
    let mut background = whole(json!({"tokens": 3}));
    background["background"] = json!(true);
    answer(&gate, RESPONSES, &background).await;
    assert_eq!(sent(&up, 4)["stream"], false);
    gate.settled(&up).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_too_long_is_cut_off() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |config| {
        asks_for_streams(config);
        config.limits.assembled_bytes = 10_000;
    });
    for script in [
        json!({"tokens": 1_000_000, "pace_ms": 0.1, "event_bytes": 600}),
        json!({"body": "endless_line", "headers": [["content-type", "text/event-stream"]]}),
    ] {
        let mut client = gate.post(CHAT, &whole(script.clone())).await;
        client.set_limit(SOON);
        let head = client.final_head().await.expect("head");
        let (body, _) = client.rest().await.expect("body");
        assert_eq!(
            (head.status, head.header("x-should-retry")),
            (502, Some("false")),
            "{script}"
        );
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert!(
            body["error"]["message"]
                .as_str()
                .unwrap()
                .contains("limits.assembled"),
            "{body}"
        );
        assert_eq!(body["error"]["code"], "answer_too_large");
        let line = gate.line_of(client.local_addr().unwrap()).await;
        assert_eq!(line["work_end"], "cancelled", "{line}");
    }
    gate.settled(&up).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_tier_ends_the_wait() {
    let up = upstream(Script::default()).await;
    let hours = 3_600_000;
    let short = Duration::from_millis(300);
    let pings = json!({
        "headers": [["content-type", "text/event-stream"]],
        "body": {"pieces": [
            {"text": "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"}}]}\n\n"},
            {"text": ": ping\n\n", "times": 1_000_000, "pause_ms": 2},
        ]},
    });
    type Set = fn(&mut Timeouts, Duration);
    let tiers: [(&str, Set, Value); 4] = [
        (
            "first_event",
            |t, short| t.first_event = short,
            json!({"first_ms": hours}),
        ),
        (
            "silence",
            |t, short| t.silence = short,
            json!({"stall": {"at": {"event": 3}}}),
        ),
        ("idle", |t, short| t.idle = short, pings),
        (
            "total",
            |t, short| t.total = Some(short),
            json!({"tokens": 1_000_000, "pace_ms": 1}),
        ),
    ];
    for (tier, set, script) in tiers {
        let gate = gateway(&up, |config| {
            asks_for_streams(config);
            set(&mut only(config).timeouts, short);
        });
        let (status, body, client) = answer(&gate, CHAT, &whole(script)).await;
        assert_eq!((status, &body["error"]["code"]), (504, &json!(tier)));
        let line = gate.line_of(client.local_addr().unwrap()).await;
        assert_eq!(
            (&line["outcome"], &line["work_end"]),
            (&json!("timeout"), &json!("cancelled")),
            "{line}"
        );
        gate.settled(&up).await;
    }
}
