//! Upstreams that break, tell of errors or answer something else: the true status, one error, and never an end that looks whole.

use serde_json::{Value, json};
use tidegate_rig::PeerEnd;

use super::caller::{Caller, Rest};
use super::framing::ends;
use super::stage::{Http, STREAMS, Stage, forms, ms, on_each, routes};
use super::waits::told;
use crate::ends::{assert_error, assert_no_end, errors};
use crate::support::{Gate, gateway_at, only, room_for, slots, stream, upstream, whole};

async fn run(stage: &Stage, path: &str, script: Value) -> Rest {
    let mut caller = stage.post(path, &stream(script)).await;
    caller.accepted().await;
    caller.rest().await
}

/// Whether it is broken, with one error event at its end, in this route's form.
fn assert_broken(stage: &Stage, path: &str, rest: &Rest, what: &Value) {
    assert!(!rest.whole, "{stage}, {path}, {what}: {}", rest.text());
    let events = rest.events();
    assert_eq!(errors(&events), 1, "{stage}, {path}, {what}: {events:#?}");
    let last = events.last().expect("one");
    let code = if rest.text().contains("no_end_event") {
        "no_end_event"
    } else {
        "transport"
    };
    assert_error(path, last, code);
    assert_no_end(path, &events);
}

#[tokio::test]
async fn c41_c47_a_cut_stream_never_looks_complete() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            let cuts = [
                json!({"end": "fin"}),
                json!({"end": "short_length", "framing": "length"}),
                json!({"end": "bad_chunk"}),
                // Proper for HTTP, and yet cut: no event has said that it is over.
                json!({"end": "clean"}),
                json!({"end": "fin", "framing": "close"}),
                json!({"end": "fin", "end_mid_event": true}),
            ];
            for path in STREAMS {
                for cut in &cuts {
                    let mut script = cut.clone();
                    script["end_at"] = json!(5);
                    let rest = run(stage, path, script).await;
                    assert_broken(stage, path, &rest, cut);
                    // The front of the rig may lose events that came together with a broken frame.
                    let events = if stage.back == Http::One { 6 } else { 2 };
                    assert!(
                        rest.events().len() >= events,
                        "{stage}, {path}, {cut}: {}",
                        rest.text()
                    );
                }
            }
            let lines = stage.gate.logged(24).await;
            for line in lines {
                assert_eq!(line["outcome"], "upstream_truncated", "{stage}: {line}");
            }
            assert_eq!(
                stage.up.truth().calls_begun,
                24,
                "{stage}: nothing was tried again"
            );
        },
    )
    .await;
}

/// The server dies: reset in one moment.
#[tokio::test]
async fn c41_c50_streams_that_are_all_reset_at_once() {
    on_each(
        |c| room_for(c, 40),
        async |stage: &Stage| {
            let mut callers = Vec::new();
            for n in 0..40 {
                let ask = stream(json!({"stall": {"at": {"event": 5}}}));
                callers.push((STREAMS[n % 4], stage.post(STREAMS[n % 4], &ask).await));
            }
            for (path, caller) in &mut callers {
                caller.accepted().await;
                assert_eq!(caller.events(5).await.len(), 5, "{stage}, {path}");
            }
            stage.up.cut_all(PeerEnd::Rst);
            for (path, caller) in &mut callers {
                assert_broken(stage, path, &caller.rest().await, &json!("reset"));
            }
            for path in STREAMS {
                assert!(
                    run(stage, path, json!({"tokens": 2})).await.whole,
                    "{stage}, {path}"
                );
            }
            stage.settled().await;
        },
    )
    .await;
}

#[tokio::test]
async fn c41_half_an_answer_in_one_piece_is_a_502_or_a_break() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            for path in STREAMS {
                for end in [
                    json!({"end": "fin"}),
                    json!({"end": "rst", "end_delay_ms": 20}),
                    json!({"end": "short_length"}),
                    json!({"end": "bad_chunk", "framing": "chunked"}),
                ] {
                    let (head, rest) = stage.post(path, &whole(end.clone())).await.answer().await;
                    if head.status == 200 {
                        // Not all of it came in the time for which the head is held back.
                        assert!(!rest.whole, "{stage}, {path}, {end}");
                        continue;
                    }
                    assert_eq!(head.status, 502, "{stage}, {path}, {end}");
                    assert!(rest.whole && rest.json()["error"]["message"].is_string());
                    assert_eq!(
                        head.header("x-tidegate-started"),
                        Some("true"),
                        "{stage}, {end}"
                    );
                }
            }
            for line in stage.gate.logged(16).await {
                assert_eq!(line["outcome"], "upstream_truncated", "{stage}: {line}");
            }
        },
    )
    .await;
}

/// What the gateway cannot read is the gateway's trouble, not the stream's.
#[tokio::test]
async fn c42_what_cannot_be_read_passes_and_is_counted() {
    let deep = format!("{}1{}", "[".repeat(300), "]".repeat(300));
    let odd = format!(
        "data: {{broken\n\ndata: {{\"choices\":1e999,\"type\":1e999}}\n\ndata: {{\"choices\":\"text\",\"type\":[]}}\n\ndata: {{\"choices\":{deep}}}\n\n"
    );
    on_each(
        |c| only(c).ask_usage = true,
        async |stage: &Stage| {
            for path in STREAMS {
                let (first, end) = ends(path);
                // Not UTF-8 either, between two quotes.
                let pieces = json!([
                    {"text": first}, {"text": odd}, {"b64": "ZGF0YTogIv/+Igo="}, {"text": "\n"}, {"text": end},
                ]);
                let rest = run(stage, path, json!({"body": {"pieces": pieces}})).await;
                let mut sent = format!("{first}{odd}data: \"").into_bytes();
                sent.extend_from_slice(b"\xff\xfe\"\n\n");
                sent.extend_from_slice(end.as_bytes());
                assert!(rest.whole && rest.body == sent, "{stage}, {path}: {}", rest.text());
            }
            for line in stage.gate.logged(4).await {
                assert_eq!(line["outcome"], "ok", "{stage}: {line}");
            }
            assert!(stage.gate.metric("malformed_events_total", &[]) >= 4.0, "{stage}");
        },
    )
    .await;
}

/// At once or late, with heartbeats on: the status and the words are the upstream's.
#[tokio::test]
async fn c44_a_refusal_keeps_its_status_and_its_words() {
    on_each(
        |c| {
            only(c).heartbeat = Some(ms(100));
            room_for(c, 200);
        },
        async |stage: &Stage| {
            let mut callers = Vec::new();
            for (n, form) in forms().into_iter().enumerate() {
                let path = form.path;
                for (at, status) in [400, 401, 403, 404, 413, 429, 500, 503, 529].into_iter().enumerate() {
                    // Where it can be a stream, each at once and each late; else each in one of the two.
                    let both = [0, 500];
                    let delays = if form.streaming { &both[..] } else { &both[(n + at) % 2..][..1] };
                    for delay_ms in delays {
                        let ask = form.ask(json!({
                            "status": status, "delay_ms": delay_ms, "message": "its own words", "retry_after": "7",
                            "headers": [["x-request-id", "req_theirs"], ["request-id", "req_theirs"]],
                        }));
                        callers.push((path, status, stage.post(path, &ask).await));
                    }
                }
            }
            for (path, status, mut caller) in callers {
                let (head, rest) = caller.answer().await;
                assert_eq!(head.status, status, "{stage}, {path}");
                assert_eq!(head.header("content-type"), Some("application/json"));
                assert_eq!(head.header("retry-after"), Some("7"), "{stage}, {path}");
                let id = head.header("x-request-id").or(head.header("request-id"));
                assert_eq!(id, Some("req_theirs"), "{stage}, {path}");
                assert_eq!(rest.json()["error"]["message"], "its own words", "{stage}, {path}");
            }
        },
    )
    .await;
}

/// Nobody listens, no such name, no TLS: JSON with 502, whatever was asked for.
#[tokio::test]
async fn c44_no_connection_is_a_502_in_json() {
    let up = upstream(tidegate_rig::Script {
        accept: tidegate_rig::script::Accept::Close,
        ..tidegate_rig::Script::default()
    })
    .await;
    let plain = up.addr();
    let nobody = tidegate_rig::free_port().expect("a port");
    for url in [
        format!("http://{nobody}"),
        "http://no-such-host.invalid:9".to_owned(),
        format!("https://{plain}"),
    ] {
        for down in [Http::One, Http::Two] {
            let gate: Gate = gateway_at(nobody, |c| {
                let there = tidegate::config::Endpoint::parse(&url).expect("an endpoint");
                only(c).endpoints = vec![there];
            });
            for form in forms() {
                let mut caller = Caller::connect(down, gate.addr()).await;
                caller.post(form.path, &form.ask(json!({}))).await;
                let (head, rest) = caller.answer().await;
                assert_eq!(head.status, 502, "{url}, {down:?}, {form:?}");
                assert_eq!(head.header("content-type"), Some("application/json"));
                assert_eq!(head.header("x-tidegate-started"), Some("false"));
                assert!(rest.json()["error"]["message"].is_string());
            }
        }
    }
    assert_eq!(up.truth().calls_begun, 0);
}

#[tokio::test]
async fn c46_an_error_event_passes_once_and_ends_it() {
    on_each(
        |c| only(c).timeouts.silence = ms(500),
        async |stage: &Stage| {
            let mut callers = Vec::new();
            for path in STREAMS {
                for after in [
                    json!({"end_at": 10}),
                    json!({"end_at": 10, "end": "fin"}),
                    // It tells, goes on as if nothing had happened, and says that it is done.
                    json!({}),
                    // It tells and then stays.
                    json!({"stall": {"at": {"event": 10}}}),
                ] {
                    let mut script = after.clone();
                    script["tokens"] = json!(20);
                    script["error_at"] = json!(2);
                    script["message"] = json!("overloaded just now");
                    callers.push((path, after, stage.post(path, &stream(script)).await));
                }
            }
            for (path, after, mut caller) in callers {
                caller.accepted().await;
                let rest = caller.rest().await;
                assert!(!rest.whole, "{stage}, {path}, {after}");
                let events = rest.events();
                assert_eq!(errors(&events), 1, "{stage}, {path}, {after}: {events:#?}");
                assert!(
                    rest.text().contains("overloaded just now"),
                    "{stage}, {path}"
                );
                assert_no_end(path, &events);
            }
            for line in stage.gate.logged(16).await {
                assert_eq!(
                    (&line["outcome"], &line["status"]),
                    (&json!("upstream_error"), &json!(200))
                );
            }
        },
    )
    .await;
}

/// After its end nothing is added to a stream, and nothing is written to who has left.
#[tokio::test]
async fn c47_no_error_after_the_end_and_none_for_who_has_left() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            for path in STREAMS {
                for end in ["rst", "fin", "bad_chunk"] {
                    let script = json!({"tokens": 3, "end": end, "end_delay_ms": 20});
                    let rest = run(stage, path, script).await;
                    assert!(rest.whole, "{stage}, {path}, {end}");
                    assert_eq!(errors(&rest.events()), 0, "{stage}, {path}, {end}");
                }
                let mut caller = stage
                    .post(path, &stream(json!({"stall": {"at": {"event": 3}}})))
                    .await;
                caller.accepted().await;
                caller.events(3).await;
                let peer = caller.peer();
                let rest = caller.leave(stage.down.reset()).await;
                assert_eq!(
                    stage.gate.line_of(peer).await["outcome"],
                    "client_closed",
                    "{stage}"
                );
                stage.up.cut_all(PeerEnd::Rst);
                drop(rest);
            }
            stage.gate.logged(16).await;
        },
    )
    .await;
}

#[tokio::test]
async fn c48_an_answer_of_another_kind_is_never_an_empty_stream() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            for path in STREAMS {
                for script in [
                    json!({"body": "chat"}),
                    json!({"body": "html"}),
                    json!({"body": "empty"}),
                ] {
                    let (head, rest) = stage
                        .post(path, &stream(script.clone()))
                        .await
                        .answer()
                        .await;
                    assert_eq!(head.status, 502, "{stage}, {path}, {script}");
                    assert!(
                        rest.json()["error"]["message"].is_string(),
                        "{stage}, {path}"
                    );
                }
                for script in [
                    json!({"headers": [["content-type", "application/json"]]}),
                    json!({"without_headers": ["content-type"]}),
                ] {
                    let (head, rest) = stage
                        .post(path, &stream(script.clone()))
                        .await
                        .answer()
                        .await;
                    let kind = head.header("content-type");
                    assert_eq!(
                        (head.status, kind),
                        (200, Some("text/event-stream")),
                        "{stage}, {script}"
                    );
                    assert!(
                        rest.whole && rest.events().len() > 3,
                        "{stage}, {path}, {script}"
                    );
                }
            }
            for path in routes() {
                let (first, end) = ends(path);
                let unasked = whole(json!({
                    "headers": [["content-type", "text/event-stream"]],
                    "body": {"pieces": [{"text": first}, {"text": end}]},
                }));
                let (head, rest) = stage.post(path, &unasked).await.answer().await;
                let kind = head.header("content-type").unwrap_or_default();
                assert!(
                    kind.starts_with("text/event-stream"),
                    "{stage}, {path}: {kind}"
                );
                assert!(
                    rest.whole && head.status == 200,
                    "{stage}, {path}: {}",
                    rest.text()
                );
            }
            let odd = [("outcome", "unexpected_content_type")];
            assert!(stage.gate.metric("calls_total", &odd) >= 8.0, "{stage}");
        },
    )
    .await;
}

/// In the queue, before the head, in mid-stream: an expired call is never answered as if it had finished.
#[tokio::test]
async fn c51_an_expired_call_is_no_finished_one() {
    on_each(
        |c| {
            only(c).slots = slots(STREAMS.len() + forms().len());
            only(c).queue = forms().len();
            let timeouts = &mut only(c).timeouts;
            timeouts.queue = ms(900);
            timeouts.response_head = ms(2100);
            timeouts.total = Some(ms(3600));
        },
        async |stage: &Stage| {
            let mut flows = Vec::new();
            for path in STREAMS {
                let endless = stream(json!({"end": "never", "pace_ms": 10}));
                flows.push((path, stage.post(path, &endless).await));
            }
            let mut silent = Vec::new();
            for form in forms() {
                let stalls = form.ask(json!({"stall": {"at": "head"}}));
                silent.push((form, stage.post(form.path, &stalls).await));
            }
            let begun = (flows.len() + silent.len()) as u64;
            stage.running(begun).await;
            let mut queued = Vec::new();
            for form in forms() {
                queued.push((form, stage.post(form.path, &form.ask(json!({}))).await));
            }
            for (form, mut caller) in queued {
                let (head, rest) = caller.answer().await;
                assert_eq!(head.status, 503, "{stage}, {form:?}: {}", rest.text());
            }
            assert_eq!(stage.up.truth().calls_begun, begun, "{stage}: untouched");
            for (form, mut caller) in silent {
                assert_eq!(caller.answer().await.0.status, 504, "{stage}, {form:?}");
            }
            for (path, mut caller) in flows {
                told(stage, path, &mut caller).await;
                let text = caller.rest().await.text();
                for finish in ["\"stop\"", "\"length\"", "end_turn", "max_tokens"] {
                    assert!(!text.contains(finish), "{stage}, {path}: {text}");
                }
            }
        },
    )
    .await;
}
