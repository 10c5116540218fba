//! What is written down about calls that did not end well: once each, what was seen and no more.

use serde_json::{Value, json};
use tidegate_rig::PeerEnd;

use super::stage::{COMPLETIONS, STREAMS, Stage, forms, ms, on_each};
use crate::support::{CHAT, MESSAGES, RESPONSES, only, stream};

/// Left, cut or timed out after some events: one line, with the tokens that were seen.
#[tokio::test]
async fn c73_a_broken_off_stream_leaves_one_record_with_what_was_seen() {
    on_each(
        |c| only(c).timeouts.silence = ms(1500),
        async |stage: &Stage| {
            // Anthropic's stream begins with the prompt's usage, the others' end with it.
            for (path, usage) in [
                (MESSAGES, "auto"),
                (CHAT, "continuous"),
                (CHAT, "no"),
                (COMPLETIONS, "no"),
                (RESPONSES, "no"),
            ] {
                let mut peers = Vec::new();
                let mut rests = Vec::new();
                for (how, outcome) in ["client_closed", "timeout", "upstream_truncated"]
                    .into_iter()
                    .enumerate()
                {
                    let script =
                        json!({"tokens": 20, "usage": usage, "stall": {"at": {"event": 12}}});
                    let mut caller = stage.post(path, &stream(script)).await;
                    caller.accepted().await;
                    assert_eq!(caller.events(12).await.len(), 12, "{stage}, {path}");
                    peers.push((caller.peer(), outcome));
                    match how {
                        0 => rests.push(caller.leave(stage.down.reset()).await),
                        1 => {
                            caller.rest().await;
                        }
                        _ => {
                            stage.up.cut_all(PeerEnd::Rst);
                            caller.rest().await;
                        }
                    }
                }
                for (peer, outcome) in peers {
                    let line = stage.gate.line_of(peer).await;
                    assert_eq!(line["outcome"], outcome, "{stage}, {path}: {line}");
                    let tokens = line["output_tokens"].as_u64().unwrap_or(0);
                    assert!((7..=12).contains(&tokens), "{stage}, {path}: {line}");
                    let prompt = path == MESSAGES || usage == "continuous";
                    let right = if prompt { json!(22) } else { Value::Null };
                    assert_eq!(line["input_tokens"], right, "{stage}, {path}: {line}");
                }
            }
            assert_eq!(stage.gate.logged(15).await.len(), 15, "{stage}");
        },
    )
    .await;
}

/// Whoever has had the end and leaves at once has not left the call.
#[tokio::test]
async fn c75_leaving_after_the_end_is_completion() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            for n in 0..24_u64 {
                let script = json!({"tokens": 3, "usage": "yes", "end_delay_ms": n % 6, "close": n % 2 == 0});
                let path = STREAMS[n as usize % 4];
                let mut caller = stage.post(path, &stream(script)).await;
                caller.accepted().await;
                let last = |e: &tidegate_rig::Event| {
                    ["[DONE]", "message_stop", "response.completed"].iter().any(|end| e.data.contains(end))
                };
                while !last(&caller.events(1).await[0]) {}
                drop(caller.leave(stage.down.ways()[n as usize % 3]).await);
            }
            for line in stage.gate.logged(24).await {
                assert_eq!((&line["outcome"], &line["usage"]), (&json!("ok"), &json!("reported")), "{line}");
                assert_eq!(line["output_tokens"], 3, "{stage}: {line}");
            }
        },
    )
    .await;
}

#[tokio::test]
async fn c76_the_text_of_an_error_is_no_output() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            let page = json!({
                "status": 500, "headers": [["content-type", "text/html"]],
                "body": {"pieces": [{"text": "<p>many words</p>".repeat(3000)}]},
            });
            let told = json!({"error_at": 0, "message": "many words ".repeat(2000), "end_at": 6});
            for form in forms() {
                for script in [&page, &json!({"body": {"wire": []}, "end": "fin"})] {
                    let ask = form.ask(script.clone());
                    stage.post(form.path, &ask).await.answer().await;
                }
            }
            for path in STREAMS {
                stage.post(path, &stream(told.clone())).await.answer().await;
            }
            let calls = 2 * forms().len() + STREAMS.len();
            for line in stage.gate.logged(calls).await {
                assert_ne!(line["outcome"], "ok", "{stage}: {line}");
                // An Anthropic stream begins with a count of its own.
                let said = u64::from(line["path"] == MESSAGES);
                let tokens = line["output_tokens"].as_u64().unwrap_or(0);
                assert!(tokens <= said, "{stage}: {line}");
            }
        },
    )
    .await;
}

#[tokio::test]
async fn c77_leaving_before_the_first_token_is_no_output() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            for form in forms() {
                let path = form.path;
                for at in [json!("head"), json!({"event": 1})] {
                    if at != "head" && (path != CHAT || !form.streaming) {
                        // Only a chat's first event is a role and nothing more.
                        continue;
                    }
                    let ask = form.ask(json!({"stall": {"at": at}}));
                    let mut caller = stage.post(path, &ask).await;
                    if at == "head" {
                        stage.running(1).await;
                    } else {
                        caller.accepted().await;
                        caller.events(1).await;
                    }
                    let peer = caller.peer();
                    let rest = caller.leave(stage.down.reset()).await;
                    let line = stage.gate.line_of(peer).await;
                    assert_eq!(line["outcome"], "client_closed", "{stage}, {path}: {line}");
                    assert_eq!(
                        line["output_tokens"],
                        Value::Null,
                        "{stage}, {path}: {line}"
                    );
                    assert_eq!(
                        line["first_token_ms"],
                        Value::Null,
                        "{stage}, {path}: {line}"
                    );
                    stage.running(0).await;
                    drop(rest);
                }
            }
        },
    )
    .await;
}

/// Head, first byte and first token are three times.
#[tokio::test]
async fn c130_the_first_token_is_not_the_first_byte() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            let mut callers = Vec::new();
            for path in STREAMS {
                let (token, end) = super::framing::ends(path);
                let script = json!({"delay_ms": 50, "headers": [["content-type", "text/event-stream"]], "body": {"pieces": [
                    {"text": ": comment\n\n", "pause_ms": 1500}, {"text": token, "pause_ms": 1500}, {"text": end}]}});
                callers.push((path, stage.post(path, &stream(script)).await));
            }
            for (path, mut caller) in callers {
                caller.answer().await;
                let line = stage.gate.line_of(caller.peer()).await;
                let at = |name: &str| line[name].as_f64().unwrap_or_else(|| panic!("{name}: {line}"));
                assert!(at("head_ms") >= 49.0 && at("first_byte_ms") >= at("head_ms"), "{stage}: {line}");
                assert!(at("first_token_ms") >= at("first_byte_ms") + 500.0, "{stage}, {path}: {line}");
                assert!(at("wait_ended_ms") >= at("first_token_ms") + 500.0, "{stage}, {path}: {line}");
            }
        },
    )
    .await;
}
