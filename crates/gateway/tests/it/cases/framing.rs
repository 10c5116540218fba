//! Event streams: bytes pass as they are, however they are cut, and what is read out of them does not depend on the cut.

use serde_json::{Value, json};
use tidegate_rig::clock::now_ns;

use super::caller::Caller;
use super::stage::{COMPLETIONS, STREAMS, Stage, ms, on_each};
use crate::heartbeats::without_beats;
use crate::streams::{bytes_in, odd};
use crate::support::{CHAT, MESSAGES, RESPONSES, only, stream};

/// The body of a stream on this route; it has to end well.
async fn body_of(stage: &Stage, path: &str, ask: &Value) -> Vec<u8> {
    let mut caller = stage.post(path, ask).await;
    caller.accepted().await;
    let rest = caller.rest().await;
    assert!(rest.whole, "{stage}, {path}: {}", rest.text());
    rest.body
}

fn same(got: &[u8], sent: &[u8], how: &str) {
    let text = String::from_utf8_lossy;
    assert!(
        got == sent,
        "{how}:\n got {:?}\nsent {:?}",
        text(got),
        text(sent)
    );
}

fn cuts() -> [Value; 8] {
    [
        json!("event"),
        json!("byte"),
        json!("once"),
        json!({"size": 2}),
        json!({"size": 3}),
        json!({"size": 7}),
        json!({"size": 64}),
        json!({"wire": 3}),
    ]
}

/// Every kind of character, line end and field, in every cut: the same bytes, ten events and one usage.
#[tokio::test]
async fn c29_c30_bytes_and_counts_do_not_depend_on_cuts_and_line_ends() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            let mut runs = 0;
            for line_end in ["\n", "\r\n", "\r"] {
                let sent = odd(line_end);
                for segment in cuts() {
                    let got = body_of(stage, CHAT, &bytes_in(&sent, &segment)).await;
                    same(&got, &sent, &format!("{stage}, {line_end:?} {segment}"));
                    runs += 1;
                }
            }
            for line in stage.gate.logged(runs).await {
                assert_eq!(
                    (&line["outcome"], &line["events"]),
                    (&json!("ok"), &json!(10)),
                    "{line}"
                );
                assert_eq!(
                    (&line["input_tokens"], &line["output_tokens"]),
                    (&json!(7), &json!(9))
                );
            }
        },
    )
    .await;
}

/// The same for the forms of the other routes, with line ends that change within a stream.
#[tokio::test]
async fn c29_c30_each_dialects_counts_do_not_depend_on_cuts_and_line_ends() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            let mut runs = 0;
            for path in STREAMS {
                for line_end in ["lf", "crlf", "cr", "mixed"] {
                    for segment in [json!("event"), json!("byte"), json!({"size": 5})] {
                        let script = json!({
                            "tokens": 5, "usage": "yes", "token_text": "ä€😀\u{2028}\u{85}",
                            "line_end": line_end, "segment": segment,
                        });
                        body_of(stage, path, &stream(script)).await;
                        runs += 1;
                    }
                }
            }
            let lines = stage.gate.logged(runs).await;
            for line in &lines {
                assert_eq!(line["output_tokens"], 5, "{stage}: {line}");
                let same = |other: &&Value| other["path"] == line["path"];
                let first = lines.iter().find(same).expect("at least itself");
                assert_eq!(line["events"], first["events"], "{stage}: {line}");
            }
        },
    )
    .await;
}

/// Cut at every position, and in many places at once: each position is the only cut near it.
#[tokio::test]
async fn c29_c30_bytes_pass_unchanged_cut_at_each_position() {
    const APART: usize = 41;
    on_each(
        |_| {},
        async |stage: &Stage| {
            let mut lanes = Vec::new();
            for path in STREAMS {
                let (first, end) = ends(path);
                let text = format!("{first}: ä\n\ndata: {{\"x\":\"ä€😀\u{2028}\"}}\n\n{end}");
                for line_end in ["\n", "\r\n"] {
                    let sent = text.replace('\n', line_end).into_bytes();
                    lanes.push((path, sent, stage.caller().await));
                }
            }
            for line_end in ["\n", "\r\n"] {
                lanes.push((CHAT, odd(line_end), stage.caller().await));
            }
            for from in 1..=APART {
                for (path, sent, caller) in &mut lanes {
                    let cuts: Vec<_> = (from..sent.len()).step_by(APART).collect();
                    let ask = bytes_in(sent, &json!({"cut_at": cuts}));
                    caller.post(path, &ask).await;
                }
                for (path, sent, caller) in &mut lanes {
                    caller.accepted().await;
                    let rest = caller.rest().await;
                    assert!(rest.whole, "{stage}, {path}");
                    same(&rest.body, sent, &format!("{stage}, {path}, {from}"));
                }
            }
        },
    )
    .await;
}

#[tokio::test]
async fn c29_bytes_that_are_no_text_pass_too() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            for path in STREAMS {
                let (first, end) = ends(path);
                let mut sent = format!("\u{feff}{first}data: \"").into_bytes();
                sent.extend_from_slice(b"\xff\xfe\"\n\ndata: \x00\n\n");
                sent.extend_from_slice(end.as_bytes());
                for segment in [json!("event"), json!("byte")] {
                    let got = body_of(stage, path, &bytes_in(&sent, &segment)).await;
                    same(&got, &sent, &format!("{stage}, {path}, {segment}"));
                }
            }
        },
    )
    .await;
}

/// A pause between two events is filled, with comments and nothing else, whatever the upstream's line ends are.
#[tokio::test]
async fn c34_a_pause_between_events_is_filled() {
    on_each(
        |c| only(c).heartbeat = Some(ms(40)),
        async |stage: &Stage| {
            let mut callers = Vec::new();
            for path in STREAMS {
                for line_end in ["lf", "crlf", "cr"] {
                    let script = json!({
                        "tokens": 4, "line_end": line_end, "stall": {"at": {"event": 2}, "ms": 2500},
                    });
                    callers.push((path, line_end, stage.post(path, &stream(script)).await));
                }
            }
            for (path, line_end, mut caller) in callers {
                caller.accepted().await;
                let rest = caller.rest().await;
                assert!(rest.whole, "{stage}, {path}, {line_end}");
                let (kept, beats) = without_beats(&rest.body);
                assert!(beats >= 2, "{stage}, {path}, {line_end}: {beats}");
                assert!(!String::from_utf8_lossy(&kept).contains("keep-alive"));
            }
        },
    )
    .await;
}

/// A comment of ours stands between two events and nowhere else, wherever the upstream pauses.
#[tokio::test]
async fn c33_no_heartbeat_inside_an_event() {
    let long = "x".repeat(50_000);
    let halves = [
        (format!("data: \"{long}"), format!("{long}\"\n\n")),
        ("data: {\"a\":".to_owned(), "1}\n\n".to_owned()),
        ("data: {}\n".to_owned(), "\n".to_owned()),
        ("event: message\n".to_owned(), "data: {}\n\n".to_owned()),
        ("data: {}\r\n\r".to_owned(), "\n".to_owned()),
        ("data: {}\r".to_owned(), "\n\r\n".to_owned()),
    ];
    on_each(
        |c| only(c).heartbeat = Some(ms(100)),
        async |stage: &Stage| {
            let mut callers: Vec<(Vec<u8>, Caller)> = Vec::new();
            for path in STREAMS {
                let (first, end) = ends(path);
                for (before, after) in &halves {
                    let pieces = json!([
                        {"text": first}, {"text": before, "pause_ms": 400}, {"text": after}, {"text": end},
                    ]);
                    let ask = stream(json!({"body": {"pieces": pieces}}));
                    let sent = format!("{first}{before}{after}{end}").into_bytes();
                    callers.push((sent, stage.post(path, &ask).await));
                }
            }
            for (sent, mut caller) in callers {
                caller.accepted().await;
                let rest = caller.rest().await;
                assert!(rest.whole, "{stage}");
                // Says where each comment may stand.
                same(&without_beats(&rest.body).0, &sent, &stage.to_string());
            }
        },
    )
    .await;
}

/// A first event with something in it, and the end, as this route's clients know them.
pub(super) fn ends(path: &str) -> (&'static str, &'static str) {
    match path {
        _ if path.starts_with(MESSAGES) => (
            "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"x\"}}\n\n",
            "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
        ),
        RESPONSES => (
            "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"x\"}\n\n",
            "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{}}\n\n",
        ),
        COMPLETIONS => (
            "data: {\"choices\":[{\"text\":\"x\"}]}\n\n",
            "data: [DONE]\n\n",
        ),
        _ => (
            "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n",
            "data: [DONE]\n\n",
        ),
    }
}

#[tokio::test]
async fn c36_event_names_keep_their_data() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            for path in [MESSAGES, RESPONSES] {
                let (first, end) = ends(path);
                // Name and data in writes of their own.
                let lines: Vec<_> = first
                    .split_inclusive('\n')
                    .chain(end.split_inclusive('\n'))
                    .collect();
                let pieces: Vec<_> = lines
                    .iter()
                    .map(|l| json!({"text": l, "pause_ms": 5}))
                    .collect();
                let got = body_of(stage, path, &stream(json!({"body": {"pieces": pieces}}))).await;
                same(&got, lines.concat().as_bytes(), &format!("{stage}, {path}"));
            }
            assert_eq!(stage.up.truth().calls_begun, 2, "{stage}");
        },
    )
    .await;
}

#[tokio::test]
async fn c37_a_last_event_without_its_blank_line_passes_and_is_read() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            let mut runs = 0;
            for path in STREAMS {
                for done in [true, false] {
                    if !done && [MESSAGES, RESPONSES].contains(&path) {
                        // There the last event is the end: without it the stream is cut.
                        continue;
                    }
                    for newlines in [2, 1, 0] {
                        let script = json!({"tokens": 3, "done": done, "final_newlines": newlines, "usage": "yes"});
                        let body = body_of(stage, path, &stream(script)).await;
                        let text = String::from_utf8(body).expect("text");
                        let tail = text.len() - text.trim_end_matches('\n').len();
                        assert_eq!(tail, newlines, "{stage}, {path}, {done}: {text:?}");
                        runs += 1;
                    }
                }
            }
            for line in stage.gate.logged(runs).await {
                assert_eq!((&line["outcome"], &line["output_tokens"]), (&json!("ok"), &json!(3)), "{line}");
                assert_eq!(line["usage"], "reported", "{stage}: {line}");
            }
        },
    )
    .await;
}

#[tokio::test]
async fn c38_sentinels_in_the_text_are_text() {
    let text = "data: [DONE]\n\nevent: error\n: ping \"error\":{\"message\":\"x\"} {\"choices\":[],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":999}}";
    on_each(
        |_| {},
        async |stage: &Stage| {
            for path in STREAMS {
                let ask = stream(json!({"tokens": 4, "token_text": text, "usage": "yes"}));
                let mut caller = stage.post(path, &ask).await;
                caller.accepted().await;
                let rest = caller.rest().await;
                assert!(rest.whole, "{stage}, {path}");
                let said = rest
                    .events()
                    .iter()
                    .filter(|e| e.data.contains("999"))
                    .count();
                assert!(said >= 4, "{stage}, {path}: {said}");
            }
            for line in stage.gate.logged(4).await {
                assert_eq!(
                    (&line["outcome"], &line["output_tokens"]),
                    (&json!("ok"), &json!(4)),
                    "{line}"
                );
            }
        },
    )
    .await;
}

/// How long a stream's small events were under way, in the middle.
async fn median_delay_ns(stage: &Stage, path: &str) -> u64 {
    let ask = stream(json!({"tokens": 40, "pace_ms": 5.0, "stamp": true}));
    let mut caller = stage.post(path, &ask).await;
    caller.accepted().await;
    let mut delays = Vec::new();
    while let [event] = &caller.events(1).await[..] {
        let stamp = event.json().and_then(|j| j["stamp"].as_u64());
        delays.extend(stamp.map(|at| now_ns().saturating_sub(at)));
    }
    delays.sort_unstable();
    assert!(delays.len() >= 30, "{stage}, {path}: {}", delays.len());
    delays[delays.len() / 2]
}

/// Nagle's algorithm against a delayed acknowledgement takes 40 ms, on either side, and on every stream. A machine that stands still spoils one.
#[tokio::test]
async fn c40_small_events_are_not_held_back() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            for path in STREAMS {
                let mut medians = Vec::new();
                while medians.last().is_none_or(|median| *median >= 20_000_000) {
                    assert!(medians.len() < 10, "{stage}, {path}: {medians:?} ns");
                    medians.push(median_delay_ns(stage, path).await);
                }
            }
        },
    )
    .await;
}

/// An event goes on when it is whole, not with the next one.
#[tokio::test]
async fn c40_no_event_waits_for_the_next() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            for path in STREAMS {
                for n in 1..4 {
                    let ask = stream(json!({"stall": {"at": {"event": n}}}));
                    let mut caller = stage.post(path, &ask).await;
                    caller.accepted().await;
                    assert_eq!(caller.events(n).await.len(), n, "{stage}, {path}");
                    let rest = caller.leave(stage.down.reset()).await;
                    stage.running(0).await;
                    drop(rest);
                }
            }
        },
    )
    .await;
}
