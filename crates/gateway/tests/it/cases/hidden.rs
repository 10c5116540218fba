//! What a client may hide in HTTP/2: a second request, another target, a connection that says nothing. And refusals that have to arrive.

use serde_json::json;

use super::stage::{Http, STREAMS, Stage, forms, ms, on_backs, on_both, on_each, routes};
use crate::frames::{Answer, END_HEADERS, Frames, HEADERS, PING, SETTINGS, block, frame};
use crate::security::key;
use crate::support::{Gate, SOON, ask, only, upstream, whole};

type Fields<'a> = Vec<(&'a str, &'a str)>;

fn fields<'a>(path: &'a str, length: &'a str) -> Fields<'a> {
    vec![
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", "localhost"),
        (":path", path),
        ("content-type", "application/json"),
        ("content-length", length),
    ]
}

const HIDDEN: &str = "POST /v1/hidden HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n";

/// The control of what follows: written by hand, a request is a request.
#[tokio::test]
async fn frames_by_hand_are_answered() {
    on_backs(
        Http::Two,
        |_| {},
        async |stage: &Stage| {
            for form in forms() {
                let body = form.ask(json!({})).to_string();
                let length = body.len().to_string();
                let mut frames = Frames::connect(stage.gate.addr()).await;
                frames
                    .request(&fields(form.path, &length), body.as_bytes())
                    .await;
                assert_eq!(
                    frames.answer().await,
                    Answer::Status(200),
                    "{stage}, {form:?}"
                );
            }
        },
    )
    .await;
}

/// A length that is none, fields of a connection, line ends in names and values, pseudo-fields twice: what HTTP/2 frames well and HTTP/1.1
/// would read in two ways is refused before anything of it goes on.
#[tokio::test]
#[expect(clippy::too_many_lines, reason = "one scene, told in its order")]
async fn c117_no_request_hides_in_the_fields_of_another() {
    on_backs(
        Http::Two,
        |_| {},
        async |stage: &Stage| {
            let value = format!("a\r\nContent-Length: 0\r\n\r\n{HIDDEN}");
            let name = format!("x: a\r\n\r\n{HIDDEN}");
            let line = format!("{} HTTP/1.1\r\nHost: x\r\n\r\n{HIDDEN}", STREAMS[0]);
            let added = [
                ("content-length", "1"),
                ("transfer-encoding", "chunked"),
                ("connection", "x"),
                ("keep-alive", "timeout=5"),
                ("proxy-connection", "keep-alive"),
                ("upgrade", "h2c"),
                ("te", "gzip"),
                ("X-Upper", "a"),
                ("x y", "a"),
                ("x:y", "a"),
                (&name, "a"),
                ("x", &value),
                ("x", "a\rb"),
                ("x", "a\nb"),
                ("x", "a\0b"),
                (":path", STREAMS[0]),
                (":status", "200"),
                (":other", "a"),
            ];
            let replaced = [
                ("content-length", "1"),
                ("content-length", "9999"),
                ("content-length", "+1"),
                ("content-length", "0x10"),
                ("content-length", "1, 1"),
                ("content-length", ""),
                (":path", ""),
                (":path", "v1/messages"),
                (":path", "/v1/x y"),
                (":path", &line),
                (":method", HIDDEN),
                (":method", ""),
                (":method", "CONNECT"),
                (":authority", "a b"),
                (":authority", "x\r\nContent-Length: 0"),
            ];
            for (n, change) in added.iter().chain(&replaced).enumerate() {
                let path = routes()[n % routes().len()];
                let body = whole(json!({})).to_string();
                let length = body.len().to_string();
                let mut fields = fields(path, &length);
                match fields
                    .iter_mut()
                    .find(|f| n >= added.len() && f.0 == change.0)
                {
                    Some(field) => *field = *change,
                    None => fields.push(*change),
                }
                let mut frames = Frames::connect(stage.gate.addr()).await;
                frames.request(&fields, body.as_bytes()).await;
                let answer = frames.answer().await;
                let refused = !matches!(answer, Answer::Status(200..=399 | 500..));
                assert!(refused, "{stage}, {path}, {change:?}: {answer:?}");
            }
            assert_eq!(
                stage.up.truth().calls_begun,
                0,
                "{stage}: {:?}",
                stage.up.calls()
            );
        },
    )
    .await;
}

/// Nothing in a request moves it to another server or out of its path.
#[tokio::test]
#[expect(clippy::too_many_lines, reason = "one scene, told in its order")]
async fn c115_no_pseudo_field_chooses_the_target() {
    let other = upstream(tidegate_rig::Script::default()).await;
    let evil = other.addr().to_string();
    on_backs(
        Http::Two,
        |c| {
            c.server.allow_unauthenticated = true;
            only(c).endpoints[0].base_path = "/base".to_owned();
        },
        async |stage: &Stage| {
            let url = format!("http://{evil}/v1");
            let body = ask(json!({"api_base": url, "base_url": url, "url": url})).to_string();
            let length = body.len().to_string();
            let send = async |fields: &Fields<'_>| {
                let mut frames = Frames::connect(stage.gate.addr()).await;
                frames.request(fields, body.as_bytes()).await;
                frames.answer().await
            };
            for path in routes() {
                for (name, value) in [
                    (":authority", evil.as_str()),
                    ("host", &evil),
                    ("x-forwarded-host", &evil),
                    ("forwarded", "host=evil"),
                ] {
                    let mut fields = fields(path, &length);
                    match fields.iter_mut().find(|f| f.0 == name) {
                        Some(field) => field.1 = value,
                        None => fields.push((name, value)),
                    }
                    let answer = send(&fields).await;
                    assert_eq!(answer, Answer::Status(200), "{stage}, {path}, {name}");
                }
            }
            let own = stage.upstream_addr().to_string();
            let calls = stage.up.calls();
            assert_eq!(calls.len(), 4 * routes().len(), "{stage}");
            for call in &calls {
                assert!(call.path.starts_with("/base/v1/"), "{stage}: {}", call.path);
                // The front of the rig writes a host of its own.
                let named = call.header("host");
                assert!(
                    stage.back == Http::Two || named == Some(&own),
                    "{stage}: {named:?}"
                );
                assert_ne!(named, Some(evil.as_str()), "{stage}");
                for gone in ["x-forwarded-host", "forwarded"] {
                    assert_eq!(call.header(gone), None, "{stage}");
                }
            }
            let bad = [
                "//evil/v1/x",
                "/v1/../admin",
                "/v1/%2e%2e/admin",
                "/v1/..%2fadmin",
                "/v1/a\\b",
                "/v1/..;/x/../..",
                "/v1/%00",
                "@evil/v1",
                "evil:80",
                "*",
                "/v1/a/./b",
            ];
            for path in bad {
                let whole = format!("http://{evil}{path}");
                for path in [path, &whole] {
                    let answer = send(&fields(path, &length)).await;
                    let refused = !matches!(answer, Answer::Status(200..=399 | 500..));
                    assert!(refused, "{stage}, {path}: {answer:?}");
                }
            }
            assert_eq!(stage.up.calls().len(), calls.len(), "{stage}");
        },
    )
    .await;
    assert_eq!(other.truth().connections_accepted, 0);
}

/// Half a preface, a preface alone, half a frame, fields without their end, and frames that ask for nothing: all are held to the limit of a
/// request head, and a connection that has served a call to the limit of an idle one.
#[tokio::test]
async fn c118_frames_that_are_no_request_keep_no_connection() {
    on_backs(
        Http::Two,
        |c| {
            only(c).timeouts.request_head = ms(2000);
            c.server.keep_alive = ms(800);
        },
        async |stage: &Stage| {
            let begun = frame(HEADERS, END_HEADERS, 1, &block(&fields(STREAMS[0], "5")));
            let starts = [
                vec![],
                begun[..4].to_vec(),
                begun[..begun.len() - 5].to_vec(),
                // END_HEADERS is missing and nothing continues.
                frame(HEADERS, 0, 1, &block(&fields(STREAMS[0], "5"))),
            ];
            let mut deaf = Vec::new();
            for start in &starts {
                let mut frames = Frames::connect(stage.gate.addr()).await;
                frames.send(start).await;
                deaf.push(frames);
            }
            // Whatever is sent now and then.
            let feeds = [frame(PING, 0, 0, &[7; 8]), frame(SETTINGS, 0, 0, &[])];
            let fed = async |feed: &Vec<u8>| {
                let mut frames = Frames::connect(stage.gate.addr()).await;
                let mut pause = tokio::time::interval(ms(20));
                let fed = async {
                    while frames.send(feed).await {
                        pause.tick().await;
                    }
                };
                let fed = tokio::time::timeout(SOON, fed).await;
                fed.unwrap_or_else(|_| panic!("{stage}: fed for ever: {feed:?}"));
            };
            tokio::join!(fed(&feeds[0]), fed(&feeds[1]));
            for mut frames in deaf {
                frames.closed().await;
            }
            let heads = [("reason", "request_head")];
            let n = starts.len() + feeds.len();
            let ended = |g: &Gate| g.metric("connections_ended_total", &heads) as usize == n;
            stage
                .gate
                .eventually("ended by the limit of heads", ended)
                .await;
            let mut served = Vec::new();
            for path in routes() {
                for start in &starts {
                    let body = whole(json!({})).to_string();
                    let length = body.len().to_string();
                    let mut frames = Frames::connect(stage.gate.addr()).await;
                    frames
                        .request(&fields(path, &length), body.as_bytes())
                        .await;
                    assert_eq!(
                        frames.answer().await,
                        Answer::Status(200),
                        "{stage}, {path}"
                    );
                    let next: Vec<u8> = start.clone();
                    frames.send(&next).await;
                    served.push(frames);
                }
            }
            for mut frames in served {
                frames.closed().await;
            }
        },
    )
    .await;
}

/// Whoever writes on without reading still finds the refusal: too large, or without a key, on every route.
#[tokio::test]
async fn c120_a_refused_upload_can_be_read_by_those_who_write_first() {
    on_each(
        |c| {
            c.limits.request_body_bytes = 100_000;
            c.keys = vec![key("ci", "sk-good")];
        },
        async |stage: &Stage| {
            let body = vec![b' '; 1024 * 1024];
            for path in routes() {
                for (secret, status) in [("sk-good", 413), ("sk-wrong", 401)] {
                    let mut caller = stage.caller().await;
                    let fields = [("x-api-key", secret)];
                    caller.announce_with(path, body.len(), &fields).await;
                    // It may be cut off: what counts is what can be read after it.
                    caller.part(&body, true).await;
                    let (head, rest) = caller.answer().await;
                    assert_eq!(head.status, status, "{stage}, {path}");
                    assert!(rest.whole, "{stage}, {path}");
                    let error = &rest.json()["error"];
                    assert!(error["message"].is_string(), "{stage}, {path}: {error}");
                }
            }
            assert_eq!(stage.up.truth().connections_accepted, 0, "{stage}");
        },
    )
    .await;
}

/// A refused upload that goes on for ever is read for a moment and then cut: on HTTP/1.1 its connection, on HTTP/2 its stream.
#[tokio::test]
async fn c120_a_refused_upload_does_not_go_on() {
    on_both(
        Http::One,
        |c| c.limits.request_body_bytes = 1000,
        async |stage: &Stage| {
            let mut callers = Vec::new();
            for path in routes() {
                let mut caller = stage.caller().await;
                caller.announce(path, 100_000_000).await;
                assert_eq!(caller.head().await.status, 413, "{stage}, {path}");
                callers.push(caller);
            }
            let mut pause = tokio::time::interval(ms(5));
            let trickle = async {
                while !callers.is_empty() {
                    pause.tick().await;
                    let mut on = Vec::new();
                    for mut caller in callers.drain(..) {
                        if caller.part(b"x", false).await {
                            on.push(caller);
                        }
                    }
                    callers = on;
                }
            };
            let cut = tokio::time::timeout(SOON, trickle).await;
            cut.unwrap_or_else(|_| panic!("{stage}: read for ever"));
        },
    )
    .await;
}
