//! Header fields: what crosses, what does not, and what the gateway says itself.

use serde_json::{Value, json};
use tidegate::config::Secret;
use tidegate_rig::ResponseHead;

use super::caller::Rest;
use super::stage::{Http, STREAMS, Stage, forms, ms, on_each, routes};
use crate::security::key;
use crate::support::{CHAT, only, stream, whole};

async fn send(
    stage: &Stage,
    path: &str,
    fields: &[(&str, &str)],
    body: &Value,
) -> (ResponseHead, Rest) {
    let mut caller = stage.caller().await;
    caller
        .request("POST", path, fields, body.to_string().as_bytes())
        .await;
    caller.answer().await
}

/// What keeps proxies on the way from holding events back, without overruling the upstream where it says the same.
#[tokio::test]
async fn c97_event_streams_say_that_they_are_not_to_be_buffered() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            for path in STREAMS {
                for (headers, cache) in [
                    (json!([]), "no-cache"),
                    (json!([["cache-control", "no-store"]]), "no-store"),
                    (json!([["cache-control", "public"]]), "no-cache"),
                ] {
                    let (head, rest) =
                        send(stage, path, &[], &stream(json!({"headers": headers}))).await;
                    assert_eq!(head.header("cache-control"), Some(cache), "{stage}, {path}");
                    assert_eq!(
                        head.header("x-accel-buffering"),
                        Some("no"),
                        "{stage}, {path}"
                    );
                    assert!(
                        rest.whole && head.header("content-length").is_none(),
                        "{stage}, {path}"
                    );
                }
            }
        },
    )
    .await;
}

/// Whatever the client would take, a stream is not compressed here, and its head does not wait for its first event.
#[tokio::test]
async fn c98_no_compression_and_no_late_head() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            for path in STREAMS {
                let mut caller = stage.caller().await;
                let script = json!({"first_ms": 60_000, "headers": [["content-type", "Text/Event-Stream; charset=UTF-8"]]});
                let fields = [("accept-encoding", "gzip, br, zstd")];
                caller.request("POST", path, &fields, stream(script).to_string().as_bytes()).await;
                // The first event never comes.
                let head = caller.accepted().await;
                assert_eq!(head.header("content-encoding"), None, "{stage}, {path}");
                assert_eq!(head.header("content-type"), Some("Text/Event-Stream; charset=UTF-8"));
                let rest = caller.leave(stage.down.reset()).await;
                stage.running(0).await;
                drop(rest);
            }
        },
    )
    .await;
}

/// The gateway reads the answer, so it says what it can read; what comes compressed all the same keeps its label and its bytes.
#[tokio::test]
async fn c99_the_upstream_is_asked_for_plain_bytes() {
    on_each(
        |c| only(c).heartbeat = Some(ms(100)),
        async |stage: &Stage| {
            for path in STREAMS {
                for accept in ["gzip", "gzip;q=0", "br, gzip"] {
                    let fields = [("accept-encoding", accept)];
                    let script = json!({"compress": "if_accepted", "tokens": 3, "usage": "yes"});
                    let (head, rest) = send(stage, path, &fields, &stream(script)).await;
                    assert_eq!(head.header("content-encoding"), None, "{stage}, {path}");
                    assert!(rest.whole && rest.events().len() > 2, "{stage}, {path}");
                }
                let script = json!({"compress": "gzip", "tokens": 4, "pace_ms": 120.0});
                let (head, rest) =
                    send(stage, path, &[("accept-encoding", "gzip")], &stream(script)).await;
                assert_eq!(
                    head.header("content-encoding"),
                    Some("gzip"),
                    "{stage}, {path}"
                );
                assert!(
                    rest.whole && rest.body.starts_with(b"\x1f\x8b"),
                    "{stage}, {path}"
                );
                assert!(
                    !rest.text().contains(": keep-alive"),
                    "{stage}, {path}: a comment inside gzip"
                );
            }
            for path in routes() {
                let script = json!({"compress": "if_accepted", "tokens": 3});
                let fields = [("accept-encoding", "gzip")];
                let (head, rest) = send(stage, path, &fields, &whole(script)).await;
                assert_eq!(head.header("content-encoding"), None, "{stage}, {path}");
                assert!(rest.whole && rest.json().is_object(), "{stage}, {path}");
            }
            for call in stage.up.calls() {
                assert_eq!(call.header("accept-encoding"), Some("identity"), "{stage}");
            }
            let lines = stage.gate.logged(16 + routes().len()).await;
            let usages = &lines[..16];
            let known = usages.iter().filter(|l| l["usage"] == "reported").count();
            let unknown = usages.iter().filter(|l| l["usage"] == "unknown").count();
            assert_eq!((known, unknown), (12, 4), "{stage}");
        },
    )
    .await;
}

/// What belongs to one connection stays on it, in both directions; what is forged, secret or private does not cross either.
#[tokio::test]
async fn c101_c102_only_what_may_crosses() {
    on_each(
        |c| {
            c.keys = vec![key("ci", "sk-client")];
            only(c).api_key = Some(Secret::new("sk-upstream"));
        },
        async |stage: &Stage| {
            let hops = [
                ("connection", "keep-alive, x-secret-hop"),
                ("x-secret-hop", "1"),
                ("keep-alive", "timeout=9"),
                ("proxy-connection", "keep-alive"),
                ("upgrade", "h2c"),
            ];
            let private = [
                ("proxy-authorization", "Basic eDp5"),
                ("cookie", "a=b"),
                ("x-forwarded-for", "1.2.3.4"),
                ("forwarded", "for=1.2.3.4"),
                ("x-real-ip", "1.2.3.4"),
                ("te", "trailers"),
                ("x-api-key", "sk-client"),
            ];
            let kept = [("idempotency-key", "abc"), ("anthropic-beta", "x"), ("openai-organization", "org")];
            // HTTP/2 has no fields of a connection: a client that sends them is wrong by itself.
            let hops = if stage.down == Http::One { &hops[..] } else { &[] };
            let fields = [hops, &private, &kept].concat();
            let answer = json!({"headers": [
                ["set-cookie", "a=b"], ["location", "http://inner/"], ["access-control-allow-origin", "*"],
                ["proxy-authenticate", "Basic"], ["x-ratelimit-limit-tokens", "9"],
            ]});
            for path in routes() {
                let streams = STREAMS.contains(&path).then(|| stream(answer.clone()));
                for body in streams.into_iter().chain([whole(answer.clone())]) {
                    let (head, _) = send(stage, path, &fields, &body).await;
                    assert_eq!(head.status, 200, "{stage}, {path}");
                    for gone in ["set-cookie", "location", "access-control-allow-origin", "proxy-authenticate", "keep-alive"] {
                        assert_eq!(head.header(gone), None, "{stage}, {path}: {gone}");
                    }
                    assert_eq!(head.header("x-ratelimit-limit-tokens"), Some("9"), "{stage}, {path}");
                }
            }
            for call in stage.up.calls() {
                for (name, _) in hops.iter().chain(&private) {
                    // The front of the rig says `connection` itself.
                    let own = *name == "connection" && stage.back == Http::Two;
                    assert!(own || call.header(name).is_none(), "{stage}: {name} in {call:?}");
                }
                for (name, value) in kept {
                    assert_eq!(call.header(name), Some(value), "{stage}");
                }
                assert_eq!(call.header("authorization"), Some("Bearer sk-upstream"), "{stage}");
                assert!(!format!("{:?}", call.headers).contains("sk-client"), "{stage}");
            }
            for line in stage.gate.logged(11).await {
                let peer = line["peer"].as_str().expect("text");
                assert!(peer.starts_with("127."), "{stage}: {line}");
            }
        },
    )
    .await;
}

/// Preflights need no key, and every answer has the browser's fields, so that a page sees the error and not a failed fetch.
#[tokio::test]
#[expect(clippy::too_many_lines, reason = "one scene, told in its order")]
async fn c103_browsers_see_every_status() {
    const ORIGIN: &str = "https://app.example";
    on_each(
        |c| {
            c.cors.origins = vec![ORIGIN.to_owned()];
            c.keys = vec![key("ci", "sk-client")];
            c.limits.request_body_bytes = 20_000;
            only(c).timeouts.response_head = ms(2000);
        },
        async |stage: &Stage| {
            for path in routes() {
                let mut caller = stage.caller().await;
                let fields = [
                    ("origin", ORIGIN),
                    ("access-control-request-method", "POST"),
                ];
                caller.request("OPTIONS", path, &fields, b"").await;
                let head = caller.head().await;
                assert_eq!(head.status, 204, "{stage}, {path}");
                assert_eq!(
                    head.header("access-control-allow-origin"),
                    Some(ORIGIN),
                    "{stage}, {path}"
                );
            }
            assert_eq!(stage.up.truth().connections_accepted, 0, "{stage}");
            let mut callers = Vec::new();
            for form in forms() {
                let asked = |rig: Value| ("sk-client", form.ask(rig));
                let cut = json!({"body": {"wire": []}, "end": "fin"});
                // What a route is that we do not know, its upstream knows.
                let no_object = if routes().last() == Some(&form.path) {
                    200
                } else {
                    400
                };
                for ((secret, body), status) in [
                    (asked(json!({})), 200),
                    (("sk-client", json!([])), no_object),
                    (("sk-wrong", form.ask(json!({}))), 401),
                    (("sk-client", json!({"padding": "x".repeat(30_000)})), 413),
                    (asked(json!({"status": 429})), 429),
                    (asked(cut), 502),
                    (asked(json!({"stall": {"at": "head"}})), 504),
                ] {
                    let fields = [("origin", ORIGIN), ("x-api-key", secret)];
                    let mut caller = stage.caller().await;
                    let body = body.to_string();
                    caller
                        .request("POST", form.path, &fields, body.as_bytes())
                        .await;
                    callers.push((form, status, caller));
                }
            }
            for (form, status, mut caller) in callers {
                let head = caller.head().await;
                assert_eq!(head.status, status, "{stage}, {form:?}");
                let allowed = head.header("access-control-allow-origin");
                assert_eq!(allowed, Some(ORIGIN), "{stage}, {status}");
                let vary = head.header("vary").unwrap_or_default();
                let varies = vary.to_ascii_lowercase().contains("origin");
                assert!(varies, "{stage}, {status}");
                caller.rest().await;
            }
            for origin in ["https://evil.example", "null"] {
                let fields = [("origin", origin), ("x-api-key", "sk-client")];
                let (head, _) = send(stage, CHAT, &fields, &whole(json!({}))).await;
                assert_eq!(
                    head.header("access-control-allow-origin"),
                    None,
                    "{stage}, {origin}"
                );
            }
        },
    )
    .await;
}
