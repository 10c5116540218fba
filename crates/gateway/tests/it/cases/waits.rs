//! Waits: each has a limit of its own, armed where it begins, and none needs a byte to run out.

use serde_json::{Value, json};
use tidegate_rig::BlackHole;

use super::caller::Caller;
use super::stage::{Http, STREAMS, Stage, far, forms, ms, on_each, over, routes};
use crate::ends::{assert_no_end, errors};
use crate::support::{CHAT, LOCALHOST, MESSAGES, endpoint, gateway_at, only, stream, whole};

/// Callers with these requests, all under way at once.
async fn all(stage: &Stage, requests: &[(&'static str, Value)]) -> Vec<(&'static str, Caller)> {
    let mut callers = Vec::new();
    for (path, body) in requests {
        callers.push((*path, stage.post(path, body).await));
    }
    callers
}

/// A refusal as the whole answer: its status, and its code where the dialect has one.
async fn refused(stage: &Stage, path: &str, caller: &mut Caller) -> (u16, String) {
    let (head, rest) = caller.answer().await;
    assert!(rest.whole, "{stage}, {path}");
    assert_eq!(
        head.header("content-type"),
        Some("application/json"),
        "{stage}, {path}"
    );
    let error = &rest.json()["error"];
    assert!(error["message"].is_string(), "{error}");
    let code = error["code"].as_str().or(error["type"].as_str());
    (head.status, code.unwrap_or_default().to_owned())
}

/// The code of the one error event that a broken stream ends with.
pub(super) async fn told(stage: &Stage, path: &str, caller: &mut Caller) -> String {
    caller.accepted().await;
    let rest = caller.rest().await;
    assert!(
        !rest.whole,
        "{stage}, {path}: a broken stream ended cleanly"
    );
    let events = rest.events();
    assert!(
        !events
            .iter()
            .any(|e| e.data.contains("[DONE]") || e.data.contains("message_stop"))
    );
    let last = events
        .last()
        .unwrap_or_else(|| panic!("{stage}, {path}: no event"));
    let error = last.json().expect("an error event is JSON");
    let code = [
        &error["error"]["code"],
        &error["code"],
        &error["error"]["type"],
    ];
    let code = code.into_iter().find_map(Value::as_str);
    code.unwrap_or_else(|| panic!("{stage}, {path}: {error}"))
        .to_owned()
}

/// Waits for a line for each of so many calls; each has run into this tier.
async fn timed_out(stage: &Stage, n: usize, tier: &str) {
    for line in stage.gate.logged(n).await {
        let seen = (&line["outcome"], &line["reason"]);
        assert_eq!(seen, (&json!("timeout"), &json!(tier)), "{stage}: {line}");
        assert_eq!(line["attempts"], 1, "{stage}: {line}");
    }
    let counted = stage.gate.metric("timeouts_total", &[("tier", tier)]);
    assert_eq!(counted as usize, n, "{stage}");
    stage.running(0).await;
}

#[tokio::test]
async fn c17_an_upstream_that_never_answers_is_a_504() {
    on_each(
        |c| far(c).response_head = ms(400),
        async |stage: &Stage| {
            let mut requests = Vec::new();
            for form in forms() {
                for at in ["head", "header_line"] {
                    requests.push((form.path, form.ask(json!({"stall": {"at": at}}))));
                }
            }
            for (path, mut caller) in all(stage, &requests).await {
                let (status, code) = refused(stage, path, &mut caller).await;
                let expected = if path.starts_with(MESSAGES) {
                    "timeout_error"
                } else {
                    "response_head"
                };
                assert_eq!((status, code.as_str()), (504, expected), "{stage}, {path}");
            }
            timed_out(stage, requests.len(), "response_head").await;
            assert_eq!(
                stage.up.truth().calls_begun as usize,
                requests.len(),
                "{stage}"
            );
        },
    )
    .await;
}

/// Whatever is sent to keep a connection alive, on either side, does not count as an event.
#[tokio::test]
async fn c18_no_wrapper_and_no_heartbeat_extends_the_wait() {
    for (own_beats, asks) in [(false, false), (true, false), (true, true)] {
        on_each(
            |c| {
                far(c).first_event = ms(800);
                only(c).heartbeat = own_beats.then_some(ms(100));
                only(c).ask_usage = asks;
            },
            async |stage: &Stage| {
                let mut requests = Vec::new();
                for path in STREAMS {
                    requests.push((path, stream(json!({"first_ms": 60_000}))));
                    requests.push((
                        path,
                        stream(json!({"first_ms": 60_000, "heartbeat_ms": 50})),
                    ));
                }
                for (path, mut caller) in all(stage, &requests).await {
                    let code = told(stage, path, &mut caller).await;
                    assert!(
                        ["first_event", "timeout_error"].contains(&code.as_str()),
                        "{code}"
                    );
                }
                timed_out(stage, requests.len(), "first_event").await;
            },
        )
        .await;
    }
}

#[tokio::test]
async fn c19_a_stall_after_the_head_is_ended_and_told() {
    on_each(
        |c| far(c).silence = ms(500),
        async |stage: &Stage| {
            let mut requests = Vec::new();
            for path in STREAMS {
                for at in [
                    json!({"event": 3}),
                    json!({"mid_event": 3}),
                    json!({"chunk_size": 3}),
                ] {
                    requests.push((path, stream(json!({"stall": {"at": at}, "tokens": 9}))));
                }
            }
            for (n, (path, mut caller)) in all(stage, &requests).await.into_iter().enumerate() {
                caller.accepted().await;
                let rest = caller.rest().await;
                assert!(!rest.whole, "{stage}, {path}: {}", rest.text());
                let (events, between) = (rest.events(), n % 3 == 0);
                assert!(
                    errors(&events) == 1 || !between,
                    "{stage}, {path}: {}",
                    rest.text()
                );
                assert_no_end(path, &events);
            }
            timed_out(stage, requests.len(), "silence").await;
        },
    )
    .await;
}

#[tokio::test]
async fn c19_half_a_json_answer_is_a_504() {
    on_each(
        |c| far(c).silence = ms(100),
        async |stage: &Stage| {
            // Head and half in one: the time for which it is held back begins with the silence.
            let head =
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n";
            let text = format!("{head}{}", "x".repeat(450));
            let half = whole(json!({"body": {"wire": [{"text": text, "pause_ms": 60_000}]}}));
            let requests: Vec<_> = routes()
                .into_iter()
                .map(|path| (path, half.clone()))
                .collect();
            for (path, mut caller) in all(stage, &requests).await {
                assert_eq!(
                    refused(stage, path, &mut caller).await.0,
                    504,
                    "{stage}, {path}"
                );
            }
            timed_out(stage, requests.len(), "silence").await;
        },
    )
    .await;
}

/// The wait for the first event, a gap, and the wait for a first event that never comes.
#[tokio::test]
async fn c21_first_event_and_gap_have_budgets_of_their_own() {
    on_each(
        |c| {
            let timeouts = far(c);
            timeouts.first_event = ms(5000);
            timeouts.idle = ms(1500);
        },
        async |stage: &Stage| {
            let mut callers = Vec::new();
            for path in STREAMS {
                let late = stream(json!({"first_ms": 3000, "pace_ms": 5, "tokens": 5}));
                let gap = stream(json!({"stall": {"at": {"event": 2}}, "tokens": 5}));
                let never = stream(json!({"first_ms": 60_000}));
                let three = [
                    stage.post(path, &late).await,
                    stage.post(path, &gap).await,
                    stage.post(path, &never).await,
                ];
                callers.push((path, three));
            }
            for (path, [mut late, mut gap, mut never]) in callers {
                late.accepted().await;
                assert!(late.rest().await.whole, "{stage}, {path}");
                told(stage, path, &mut gap).await;
                told(stage, path, &mut never).await;
                for (caller, reason) in [(gap, "idle"), (never, "first_event")] {
                    let line = stage.gate.line_of(caller.peer()).await;
                    assert_eq!(line["reason"], reason, "{stage}, {path}: {line}");
                }
            }
        },
    )
    .await;
}

/// No limit of a single wait, on either side, is taken for one of the whole exchange. A total is off unless it is set.
#[tokio::test]
async fn c22_c23_no_limit_but_the_total_ends_a_stream_that_flows() {
    let limit = ms(2000);
    on_each(
        |c| {
            assert_eq!(only(c).timeouts.total, None, "off by default");
            c.server.keep_alive = limit;
            let timeouts = &mut only(c).timeouts;
            timeouts.request_head = limit;
            timeouts.request_body = limit;
            timeouts.queue = limit;
            timeouts.pool = limit;
            timeouts.connect = limit;
            timeouts.response_head = limit;
            timeouts.first_event = limit;
            timeouts.silence = limit;
            timeouts.idle = limit;
            timeouts.write = limit;
        },
        async |stage: &Stage| {
            // Three times as long as any limit.
            let flows = stream(json!({"tokens": 60, "pace_ms": 100, "role_chunk": false}));
            let requests: Vec<_> = STREAMS.map(|path| (path, flows.clone())).into();
            for (path, mut caller) in all(stage, &requests).await {
                caller.accepted().await;
                let rest = caller.rest().await;
                assert!(
                    rest.whole && rest.events().len() >= 60,
                    "{stage}, {path}: {}",
                    rest.text()
                );
            }
            for line in stage.gate.logged(4).await {
                assert_eq!(line["outcome"], "ok", "{stage}: {line}");
            }
        },
    )
    .await;
}

#[tokio::test]
async fn c22_c23_the_total_is_told_in_band_and_is_nobodys_leaving() {
    on_each(
        |c| far(c).total = Some(ms(3000)),
        async |stage: &Stage| {
            let endless = stream(json!({"end": "never", "pace_ms": 10}));
            let requests: Vec<_> = STREAMS.map(|path| (path, endless.clone())).into();
            for (path, mut caller) in all(stage, &requests).await {
                let code = told(stage, path, &mut caller).await;
                assert!(
                    ["total", "timeout_error"].contains(&code.as_str()),
                    "{stage}: {code}"
                );
            }
            timed_out(stage, 4, "total").await;
        },
    )
    .await;
}

/// One dead address does not take the call with it: nothing was sent there, so another may have it.
#[tokio::test]
async fn c25_a_connect_that_never_completes_goes_elsewhere() {
    let hole = BlackHole::start(LOCALHOST).expect("a port");
    for down in [Http::One, Http::Two] {
        for back in [Http::One, Http::Two] {
            let stage = Stage::new((down, back), |_| {}).await;
            let gate = gateway_at(hole.addr(), |c| {
                over(c, back);
                far(c).connect = ms(300);
                only(c).endpoints.push(endpoint(stage.upstream_addr()));
            });
            // In flight at the live one, so that the dead one is next, unless this call has met it already.
            let mut holds = Caller::connect(down, gate.addr()).await;
            let flows = stream(json!({"end": "never", "pace_ms": 50}));
            holds.post(STREAMS[0], &flows).await;
            let first = holds.accepted().await;
            let mut twice = usize::from(first.header("x-tidegate-attempts").is_some());
            for form in forms() {
                let mut caller = Caller::connect(down, gate.addr()).await;
                caller
                    .post(form.path, &form.ask(json!({"tokens": 2})))
                    .await;
                let head = caller.accepted().await;
                assert!(caller.rest().await.whole, "{stage}, {form:?}");
                let line = gate.line_of(caller.peer()).await;
                let more = line["attempts"].as_u64().filter(|tried| *tried > 1);
                let told = head.header("x-tidegate-attempts");
                assert_eq!(
                    told,
                    more.map(|n| n.to_string()).as_deref(),
                    "{stage}: {line}"
                );
                twice += usize::from(more.is_some());
            }
            assert!(twice >= 1, "{stage}: the dead one had its turn");
            let begun = 1 + forms().len() as u64;
            assert_eq!(stage.up.truth().calls_begun, begun, "{stage}");
            let tried = gate.metric("upstream_connect_errors_total", &[("reason", "connect")]);
            assert!(tried >= 1.0, "{stage}");
        }
    }
}

/// The wait for the head begins when the request is sent, not when it begins to come.
#[tokio::test]
async fn c27_a_slow_upload_is_no_slow_upstream() {
    on_each(
        |c| {
            let timeouts = far(c);
            timeouts.response_head = ms(1500);
            timeouts.request_body = ms(1500);
        },
        async |stage: &Stage| {
            const PARTS: usize = 32;
            let mut callers = Vec::new();
            for form in forms() {
                let body = form.ask(json!({"tokens": 2, "delay_ms": 50})).to_string();
                let body = format!("{}{body}", " ".repeat(PARTS * 2048));
                let mut caller = stage.caller().await;
                caller.announce(form.path, body.len()).await;
                callers.push((caller, body));
            }
            let mut pause = tokio::time::interval(ms(60));
            for n in 0..PARTS {
                pause.tick().await;
                for (caller, body) in &mut callers {
                    let (from, last) = (n * 2048, n + 1 == PARTS);
                    let to = if last { body.len() } else { from + 2048 };
                    let sent = caller.part(&body.as_bytes()[from..to], last).await;
                    assert!(sent, "{stage}");
                }
            }
            for (mut caller, _) in callers {
                caller.accepted().await;
                assert!(caller.rest().await.whole, "{stage}");
            }
        },
    )
    .await;
}

#[tokio::test]
async fn c27_an_upload_that_stops_is_a_408_and_no_call() {
    on_each(
        |c| far(c).request_body = ms(400),
        async |stage: &Stage| {
            let mut callers = Vec::new();
            for path in routes() {
                let mut caller = stage.caller().await;
                caller.announce(path, 5000).await;
                assert!(caller.part(b"{\"model\":", false).await);
                callers.push((path, caller));
            }
            for (path, mut caller) in callers {
                assert_eq!(
                    refused(stage, path, &mut caller).await.0,
                    408,
                    "{stage}, {path}"
                );
            }
            for line in stage.gate.logged(routes().len()).await {
                assert_eq!(
                    (&line["outcome"], &line["reason"]),
                    (&json!("timeout"), &json!("request_body"))
                );
            }
            assert_eq!(stage.up.truth().calls_begun, 0, "{stage}");
            // A call in its ordinary time.
            assert_eq!(
                stage
                    .post(CHAT, &whole(json!({})))
                    .await
                    .answer()
                    .await
                    .0
                    .status,
                200
            );
        },
    )
    .await;
}
