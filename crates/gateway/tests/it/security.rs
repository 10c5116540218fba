//! Requests that want to be more than one, or to go elsewhere, and keys that must not be seen.

use serde_json::{Value, json};
use tidegate::config::{AuthStyle, ClientKey, Config, Secret};
use tidegate_rig::{BodyEnd, Closed, RawClient, Script};

use crate::cases::caller::Caller;
use crate::cases::stage::{Http, Stage, forms, on_backs, on_each, over, routes};
use crate::support::{
    CHAT, Gate, MESSAGES, RESPONSES, SOON, ask, gateway, gateway_at, only, stream, upstream, whole,
};

/// What one connection answers to these bytes: the statuses in order, and that it was closed after them.
async fn statuses(gate: &Gate, bytes: &[u8]) -> Vec<u16> {
    let mut client = gate.client().await;
    client.send(bytes).await.expect("sent");
    client.half_close().await.expect("closed");
    let mut statuses = Vec::new();
    while let Ok(head) = client.final_head().await {
        statuses.push(head.status);
        if client.rest().await.is_err() {
            break;
        }
    }
    statuses
}

const HIDDEN: &str = "POST /v1/hidden HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n";

/// No second request is ever found in the body of a first one, whatever two parties could disagree about.
#[tokio::test]
async fn c117_no_request_hides_in_another() {
    let change = |c: &mut Config| {
        c.limits.request_body_bytes = 5000;
        c.server.half_close = tidegate::config::HalfClose::Serve;
    };
    on_backs(Http::One, change, async |stage: &Stage| {
    let (gate, up) = (&stage.gate, &stage.up);
    let n = HIDDEN.len();
    let refused = [
        format!("Content-Length: 0\r\nContent-Length: {n}\r\n\r\n{HIDDEN}"),
        format!("Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n{HIDDEN}"),
        format!("Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n{HIDDEN}"),
        format!("Transfer-Encoding: identity\r\n\r\n{HIDDEN}"),
        format!("Content-Length: +0\r\n\r\n{HIDDEN}"),
        format!("Content-Length: 0x0\r\n\r\n{HIDDEN}"),
        format!("Content-Length: -1\r\n\r\n{HIDDEN}"),
        format!("Content-Length: 0,{n}\r\n\r\n{HIDDEN}"),
        format!("Content-Length : 0\r\n\r\n{HIDDEN}"),
        format!("X-Folded: a\r\n b\r\nContent-Length: 0\r\n\r\n{HIDDEN}"),
        format!("X-Bare: a\rContent-Length: 0\r\n\r\n{HIDDEN}"),
        format!("X-Nul: a\0b\r\nContent-Length: 0\r\n\r\n{HIDDEN}"),
        format!("Transfer-Encoding: chunked\r\n\r\n0x0\r\n\r\n{HIDDEN}"),
        format!("Transfer-Encoding: chunked\r\n\r\n+0\r\n\r\n{HIDDEN}"),
        format!("Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n{HIDDEN}"),
        format!("Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n\r\n{HIDDEN}"),
        format!("Transfer-Encoding: chunked\r\n\r\n1\r\nxx0\r\n\r\n{HIDDEN}"),
        format!("Transfer-Encoding: chunked\r\n\r\n\r\n\r\n{HIDDEN}"),
        format!("Content-Length: 9999\r\n\r\n{}{HIDDEN}", " ".repeat(9999)),
    ];
    for (rest, path) in refused.iter().zip(routes().into_iter().cycle()) {
        let bytes = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{rest}"
        );
        let seen = statuses(gate, bytes.as_bytes()).await;
        assert_eq!(seen.len(), 1, "{rest:?}: {seen:?}");
        assert!(matches!(seen[0], 400 | 413), "{rest:?}: {seen:?}");
    }
    // Two framings are none (RFC 9112 §11.2), whatever each of them says.
    let both = [
        format!("Content-Length: {n}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{HIDDEN}"),
        format!("Transfer-Encoding: chunked\r\nContent-Length: {n}\r\n\r\n0\r\n\r\n{HIDDEN}"),
        format!("Transfer-Encoding:\tchunked\r\nContent-Length: {n}\r\n\r\n0\r\n\r\n{HIDDEN}"),
    ];
    for (rest, path) in both.iter().zip(routes().into_iter().cycle()) {
        let bytes = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{rest}"
        );
        assert_eq!(statuses(gate, bytes.as_bytes()).await, [400], "{rest:?}");
    }
    assert!(up.calls().iter().all(|c| !c.path.contains("hidden")));
    assert_eq!(up.truth().calls_begun, 0);
    })
    .await;
}

/// Refused early, with a body that nobody read and that looks like a request.
#[tokio::test]
async fn c117_an_unread_body_is_never_a_request() {
    let change = |c: &mut Config| c.keys = vec![key("ci", "sk-good")];
    on_backs(Http::One, change, async |stage: &Stage| {
    let (gate, up) = (&stage.gate, &stage.up);
    let refused = routes().into_iter().map(|path| (path, "", 401));
    for (path, header, status) in refused.chain([
        ("/nowhere", "Authorization: Bearer sk-good\r\n", 404),
        ("/v1/../x", "Authorization: Bearer sk-good\r\n", 400),
    ]) {
        let body = HIDDEN.repeat(2000);
        let bytes = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\n{header}Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let mut client = gate.client().await;
        // It may be cut off in the middle.
        let _ = client.send(bytes).await;
        assert_eq!(client.final_head().await.expect("head").status, status);
        client.rest().await.expect("body");
        assert!(client.head().await.is_err(), "{path}: a second answer");
    }
    assert_eq!(up.truth().calls_begun, 0);
    })
    .await;
}

/// Nothing in a request moves it to another server or out of its path.
#[tokio::test]
#[expect(clippy::too_many_lines, reason = "one scene, told in its order")]
async fn c115_a_client_does_not_choose_the_target() {
    let other = upstream(Script::default()).await;
    let evil = other.addr();
    let change = |c: &mut Config| {
        c.server.allow_unauthenticated = true;
        only(c).endpoints[0].base_path = "/base".to_owned();
    };
    on_backs(Http::One, change, async |stage: &Stage| {
    let (gate, up) = (&stage.gate, &stage.up);
    let body = ask(json!({"api_base": format!("http://{evil}"), "base_url": format!("http://{evil}/v1"), "url": format!("http://{evil}")})).to_string();
    let good = routes().into_iter().flat_map(|path| [
        path.to_owned(),
        format!("http://{evil}{path}"),
        format!("http://user:pass@{evil}{path}"),
        format!("{path}?target=http://{evil}"),
    ]);
    for target in &good.collect::<Vec<_>>() {
        for host in ["x".to_owned(), evil.to_string()] {
            let mut client = gate.client().await;
            client
                .request(
                    "POST",
                    target,
                    &[
                        ("host", &host),
                        ("x-forwarded-host", &evil.to_string()),
                        ("forwarded", "host=evil"),
                    ],
                    body.as_bytes(),
                )
                .await
                .expect("sent");
            assert_eq!(
                client.final_head().await.expect("head").status,
                200,
                "{target}"
            );
        }
    }
    for call in up.calls() {
        assert!(call.path.starts_with("/base/v1/"), "{}", call.path);
        // The front of the rig writes a host of its own.
        let own = stage.back == Http::Two || call.header("host") == Some(&up.addr().to_string());
        assert!(own && call.header("host") != Some(&evil.to_string()), "{call:?}");
        assert_eq!(call.header("x-forwarded-host"), None);
        assert_eq!(call.header("forwarded"), None);
    }
    let begun = up.truth().calls_begun;
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
    for target in bad {
        for path in [target.to_owned(), format!("http://{evil}{target}")] {
            let mut client = gate.client().await;
            client
                .request("POST", &path, &[], body.as_bytes())
                .await
                .expect("sent");
            let status = client.final_head().await.expect("head").status;
            assert!(matches!(status, 400 | 404 | 405), "{path}: {status}");
        }
    }
    for model in ["a/../../b", "x?y=z", "m#f", "http://evil/", "\u{0}"] {
        let mut client = gate.post(CHAT, &ask(json!({"model": model}))).await;
        assert_eq!(
            client.final_head().await.expect("head").status,
            200,
            "a name is a name"
        );
    }
    assert_eq!(up.truth().calls_begun, begun + 5);
    })
    .await;
    assert_eq!(other.truth().connections_accepted, 0);
}

const CLIENT: &str = "sk-marker-client-5f2a";
const UPSTREAM: &str = "sk-marker-upstream-77c1";

pub(crate) fn key(name: &str, key: &str) -> ClientKey {
    use sha2::Digest as _;
    ClientKey {
        name: name.to_owned(),
        sha256: sha2::Sha256::digest(key).into(),
    }
}

fn with_keys(config: &mut Config) {
    config.keys = vec![key("ci", CLIENT)];
    only(config).api_key = Some(Secret::new(UPSTREAM));
}

/// In whatever goes wrong, neither key comes out: not in an answer, a log line, a metric or a debug text.
#[tokio::test]
async fn c114_keys_are_never_shown() {
    on_each(with_keys, async |stage: &Stage| {
        let nobody = tidegate_rig::free_port().expect("a port");
        let mut shown = String::new();
        for at in [stage.upstream_addr(), nobody] {
            let gate = gateway_at(at, |c| {
                with_keys(c);
                over(c, stage.back);
            });
            let rigs = [
                json!({}),
                json!({"status": 401}),
                json!({"status": 302, "headers": [["location", "http://evil/"]]}),
                json!({"body": {"wire": []}, "end": "rst"}),
                json!({"body": "html"}),
                json!({"end": "rst", "end_at": 1}),
                json!({"body": {"wire": [{"text": "garbage\r\n\r\n"}]}}),
            ];
            for path in routes().into_iter().chain(["/nowhere", "/v1/../x"]) {
                for (n, rig) in rigs.iter().enumerate() {
                    let ways = [
                        ("authorization", format!("Bearer {CLIENT}")),
                        ("x-api-key", CLIENT.to_owned()),
                        ("authorization", format!("Bearer {CLIENT}-wrong")),
                        ("x-api-key", format!("{CLIENT}-wrong")),
                    ];
                    for (name, value) in &ways[n % 2 * 2..][..2] {
                        let target = format!("{path}?key={CLIENT}");
                        let mut caller = Caller::connect(stage.down, gate.addr()).await;
                        let body = stream(rig.clone()).to_string();
                        caller
                            .request("POST", &target, &[(name, value)], body.as_bytes())
                            .await;
                        let (head, rest) = caller.answer().await;
                        shown.push_str(&format!("{head:?}{}", rest.text()));
                    }
                }
            }
            shown.push_str(&gate.gateway.metrics.encode());
            shown.push_str(&format!("{:?}", gate.gateway));
            for line in gate.stop() {
                shown.push_str(&line.to_string());
            }
        }
        for marker in [CLIENT, UPSTREAM, "c2stbWFya2Vy", "marker%2D"] {
            let at = shown.find(marker);
            assert!(
                at.is_none(),
                "{marker}: {}",
                at.map_or("", |at| &shown
                    [at.saturating_sub(200)..(at + 60).min(shown.len())])
            );
        }
        for call in stage.up.calls() {
            for (name, value) in &call.headers {
                assert!(!value.contains(CLIENT), "{name} went upstream");
            }
        }
    })
    .await;
}

async fn status_with(gate: &Gate, path: &str, headers: &[(&str, &str)]) -> (u16, Value) {
    let mut client = gate.client().await;
    client
        .request(
            "POST",
            path,
            headers,
            whole(json!({})).to_string().as_bytes(),
        )
        .await
        .expect("sent");
    let head = client.final_head().await.expect("head");
    let (body, end) = client.rest().await.expect("body");
    assert_eq!(end, BodyEnd::Clean);
    (head.status, serde_json::from_slice(&body).expect("JSON"))
}

#[tokio::test]
async fn client_keys_work_in_both_fields_on_every_dialect_and_stop_here() {
    for style in [AuthStyle::Bearer, AuthStyle::XApiKey] {
        let up = upstream(Script::default()).await;
        let gate = gateway(&up, |c| {
            with_keys(c);
            only(c).auth = style;
        });
        let bearer = format!("Bearer {CLIENT}");
        for path in [
            CHAT,
            MESSAGES,
            RESPONSES,
            "/v1/embeddings",
            "/v1/completions",
            "/v1/messages/count_tokens",
        ] {
            for headers in [
                vec![("authorization", bearer.as_str())],
                vec![("x-api-key", CLIENT)],
                vec![
                    ("authorization", "Bearer sdk-default"),
                    ("x-api-key", CLIENT),
                ],
            ] {
                let (status, body) = status_with(&gate, path, &headers).await;
                assert_eq!(status, 200, "{path} {headers:?}: {body}");
                let call = up.calls().pop().expect("a call");
                let sent = (call.header("authorization"), call.header("x-api-key"));
                let replaced = format!("Bearer {UPSTREAM}");
                match style {
                    AuthStyle::Bearer => assert_eq!(sent, (Some(replaced.as_str()), None)),
                    AuthStyle::XApiKey => assert_eq!(sent, (None, Some(UPSTREAM))),
                }
            }
            for headers in [
                vec![],
                vec![("authorization", "Bearer no")],
                vec![("x-api-key", "no")],
                vec![("authorization", "Basic c2s6")],
                vec![("x-api-key", UPSTREAM)],
            ] {
                let (status, body) = status_with(&gate, path, &headers).await;
                assert_eq!(status, 401, "{path} {headers:?}");
                assert_eq!(body["error"]["type"], "authentication_error");
                assert_eq!(
                    body["type"] == "error",
                    path.starts_with(MESSAGES),
                    "{body}"
                );
            }
        }
        assert_eq!(up.truth().calls_begun, 18);
        // Those that were turned away leave a line too.
        for line in gate.logged(18 + 30).await {
            let known = line["status"] == 200;
            assert_eq!(line["principal"], if known { "ci" } else { "none" });
            assert_eq!(line["outcome"], if known { "ok" } else { "refused" });
        }
    }
}

/// With client keys but no upstream key, the client's credentials still end here. Without any keys the gateway has no part in them.
#[tokio::test]
async fn client_credentials_pass_only_where_the_gateway_has_no_part_in_them() {
    let up = upstream(Script::default()).await;
    let bearer = format!("Bearer {CLIENT}");
    let fields = [
        ("authorization", bearer.as_str()),
        ("x-api-key", CLIENT),
        ("api-key", CLIENT),
        ("cookie", "c=1"),
    ];
    let gate = gateway(&up, |c| c.keys = vec![key("ci", CLIENT)]);
    assert_eq!(status_with(&gate, CHAT, &fields).await.0, 200);
    let gate = gateway(&up, |c| only(c).api_key = Some(Secret::new(UPSTREAM)));
    assert_eq!(status_with(&gate, CHAT, &fields).await.0, 200);
    let gate = gateway(&up, |_| {});
    assert_eq!(status_with(&gate, CHAT, &fields).await.0, 200);
    let calls = up.calls();
    let sent = |i: usize, name| calls[i].header(name);
    for name in ["authorization", "x-api-key", "api-key"] {
        assert_eq!(sent(0, name), None, "{name}");
        assert_ne!(sent(1, name), Some(CLIENT), "{name}");
        assert!(sent(2, name).is_some_and(|v| v.ends_with(CLIENT)), "{name}");
    }
    assert!((0..3).all(|i| sent(i, "cookie").is_none()));
}

/// The credentials of a request do not follow a redirect, because the gateway does not follow one.
#[tokio::test]
async fn c115_redirects_are_not_followed() {
    let other = upstream(Script::default()).await;
    let there = other.addr();
    on_each(with_keys, async |stage: &Stage| {
        for form in forms() {
            for status in [301, 302, 303, 307, 308] {
                let location = format!("http://{there}{}", form.path);
                let rig = json!({"status": status, "headers": [["location", location]]});
                let mut caller = stage.caller().await;
                let (fields, body) = ([("x-api-key", CLIENT)], form.ask(rig).to_string());
                caller
                    .request("POST", form.path, &fields, body.as_bytes())
                    .await;
                let (head, _) = caller.answer().await;
                assert_eq!(head.status, 502, "{stage}, {form:?}, {status}");
                assert_eq!(head.header("location"), None, "{stage}, {form:?}");
            }
        }
    })
    .await;
    assert_eq!(other.truth().connections_accepted, 0);
}

/// The operator's pages are on the operator's port only, and nothing else is there.
#[tokio::test]
async fn the_admin_port_and_the_data_port_share_nothing() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| c.admin.listen = Some(crate::support::LOCALHOST));
    let admin = gate.gateway.admin_addr().expect("on");
    for path in ["/metrics", "/healthz", "/readyz", "/"] {
        let mut client = gate.client().await;
        client.request("GET", path, &[], b"").await.expect("sent");
        assert_eq!(
            client.final_head().await.expect("head").status,
            404,
            "{path}"
        );
    }
    for path in [CHAT, "/v1/models"] {
        let mut client = RawClient::connect(admin).await.expect("accepted");
        client
            .request("POST", path, &[], b"{}")
            .await
            .expect("sent");
        let status = client.final_head().await.expect("head").status;
        assert!(matches!(status, 404 | 405), "{path}: {status}");
        assert_ne!(client.closed(SOON).await, Closed::Rst);
    }
    assert_eq!(up.truth().calls_begun, 0);
}

/// Two framings at once: the chunks count (RFC 9112 §6.3), one length goes upstream, and nothing after them is read.
#[tokio::test]
async fn a_request_with_two_framings_is_refused_and_two_equal_lengths_are_one() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        c.server.half_close = tidegate::config::HalfClose::Serve;
    });
    let body = whole(json!({})).to_string();
    let chunks = format!("{:x}\r\n{body}\r\n0\r\n\r\n{HIDDEN}", body.len());
    for framing in [
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 5",
    ] {
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{framing}\r\n\r\n"
        );
        let seen = statuses(&gate, format!("{head}{chunks}").as_bytes()).await;
        assert_eq!(seen, [400], "{framing}");
    }
    // Nor is a body that would be passed on while it comes.
    let head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n";
    let seen = statuses(&gate, format!("{head}{chunks}").as_bytes()).await;
    assert_eq!(seen, [400]);
    // The same length twice is one length (RFC 9110 §8.6), and the next request is a request.
    let n = body.len();
    let lengths = format!("Content-Length: {n}\r\nContent-Length: {n}");
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{lengths}\r\n\r\n"
    );
    let next = "GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    let seen = statuses(&gate, format!("{head}{body}{next}").as_bytes()).await;
    assert_eq!(seen, [200, 404]);
    for call in up.calls() {
        assert_eq!(call.path, CHAT);
        assert_eq!(call.body_len as usize, body.len());
        let framings = (
            call.header("content-length"),
            call.header("transfer-encoding"),
        );
        assert_eq!(framings, (Some(body.len().to_string().as_str()), None));
    }
}

/// Whoever reads the first, the last or none of them would serve another host than the next server on the way.
#[tokio::test]
async fn a_request_names_one_host() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        c.server.half_close = tidegate::config::HalfClose::Serve;
    });
    let keyed = gateway(&up, with_keys);
    for gate in [&gate, &keyed] {
        for hosts in [
            "",
            "Host: localhost\r\nHost: localhost\r\n",
            "Host: localhost\r\nHost: evil.example\r\n",
            "Host:\r\nHost: localhost\r\n",
        ] {
            for start in [
                format!("POST {CHAT} HTTP/1.1"),
                format!("POST http://localhost{CHAT} HTTP/1.1"),
                format!("OPTIONS {CHAT} HTTP/1.1"),
            ] {
                let head = format!("{start}\r\n{hosts}Content-Length: 0\r\n\r\n");
                let mut client = gate.client().await;
                client.send(format!("{head}{HIDDEN}")).await.expect("sent");
                let answer = client.final_head().await.expect("head");
                assert_eq!(answer.status, 400, "{head:?}");
                let (body, _) = client.rest().await.expect("body");
                let json: Value = serde_json::from_slice(&body).expect("JSON");
                assert_eq!(json["error"]["code"], "bad_host", "{json}");
                assert!(client.head().await.is_err(), "{head:?}: a second answer");
            }
        }
    }
    assert_eq!(up.truth().calls_begun, 0);
    assert_eq!(
        gate.metric("refusals_total", &[("reason", "bad_host")]),
        12.0
    );
    let lines = gate.stop();
    assert_eq!(lines.len(), 12);
    assert!(lines.iter().all(|l| l["reason"] == "bad_host"), "{lines:?}");
}

/// A page whose own name was made to point to 127.0.0.1 is of the same origin as the gateway: its name tells.
#[tokio::test]
async fn without_keys_a_rebound_name_is_refused() {
    let up = upstream(Script::default()).await;
    let answer = async |gate: &Gate, head: &str| {
        let mut client = gate.client().await;
        let head = format!("GET /v1/models {head}\r\n");
        client.send(head).await.expect("sent");
        let status = client.final_head().await.expect("head").status;
        let (body, _) = client.rest().await.expect("body");
        (status, String::from_utf8_lossy(&body).into_owned())
    };
    let gate = gateway(&up, |c| {
        c.cors.origins = vec!["https://app.example".into()];
    });
    for head in [
        "HTTP/1.1\r\nHost: localhost:8080\r\n",
        "HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        "HTTP/1.1\r\nHost: [::1]:1\r\n",
        "HTTP/1.1\r\nHost: app.example\r\n",
        "HTTP/1.0\r\n",
    ] {
        assert_eq!(answer(&gate, head).await.0, 200, "{head}");
    }
    for head in [
        "HTTP/1.1\r\nHost: evil.example:8080\r\n",
        "HTTP/1.1\r\nHost: evil.example\r\nOrigin: http://evil.example\r\n",
        "HTTP/1.0\r\nHost: evil.example\r\n",
    ] {
        let (status, body) = answer(&gate, head).await;
        assert_eq!(status, 403, "{head}");
        assert!(body.contains("allow_unauthenticated"), "{body}");
    }
    let own = "HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n";
    assert_eq!(answer(&gate, own).await.0, 403, "the gateway has no pages");
    assert_eq!(
        gate.metric("refusals_total", &[("reason", "host_not_allowed")]),
        3.0
    );
    let is_refused = |l: &&Value| l["reason"] == "host_not_allowed";
    gate.eventually("their lines", |g| {
        g.lines().iter().filter(is_refused).count() == 3
    })
    .await;
    let lines = gate.lines();
    let refused: Vec<_> = lines.iter().filter(is_refused).collect();
    for line in refused {
        let seen = (&line["status"], &line["outcome"], &line["path"]);
        assert_eq!(
            seen,
            (&json!(403), &json!("refused"), &json!("/v1/models")),
            "{line}"
        );
    }
    let told = gateway(&up, |c| c.server.allow_unauthenticated = true);
    let keyed = gateway(&up, with_keys);
    let foreign = "HTTP/1.1\r\nHost: models.example\r\nOrigin: https://models.example\r\n";
    assert_eq!(answer(&told, foreign).await.0, 200);
    assert_eq!(answer(&keyed, foreign).await.0, 401, "the key decides");
}
