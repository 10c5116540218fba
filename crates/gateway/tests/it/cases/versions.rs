//! Every pairing of versions: bodies of each kind, their ends, and what clients may choose.

use serde_json::{Value, json};
use tidegate::config::UnknownModels;

use super::stage::{Stage, on_each, routes};
use crate::support::{CHAT, ask, only, whole};

/// Bodies of every kind, each followed by a second request on the same connection.
#[tokio::test]
async fn c108_versions_are_converted_without_a_lost_or_doubled_end() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            let rigs = [
                (json!({"tokens": 3}), 200, true),
                (json!({"framing": "length"}), 200, true),
                (json!({"framing": "chunked"}), 200, true),
                (json!({"status": 204, "body": "empty"}), 204, false),
                (json!({"status": 304, "body": "empty"}), 304, false),
                (json!({"body": "empty", "framing": "length"}), 200, false),
                (json!({"body": "empty", "framing": "chunked"}), 200, false),
                (
                    json!({"trailers": [["x-trailer", "1"]], "framing": "chunked"}),
                    200,
                    true,
                ),
                (json!({"interim": [{"status": 103}]}), 200, true),
                (json!({"status": 500}), 500, true),
            ];
            let mut caller = stage.caller().await;
            for path in routes() {
                for (rig, status, full) in &rigs {
                    for (rig, status, full) in [(rig, *status, *full), (&json!({}), 200, true)] {
                        caller.post(path, &whole(rig.clone())).await;
                        let (head, rest) = caller.answer().await;
                        assert_eq!(head.status, status, "{stage}, {path}, {rig}");
                        assert!(rest.whole, "{stage}, {path}, {rig}");
                        assert_eq!(!rest.body.is_empty(), full, "{stage}, {path}, {rig}");
                    }
                }
            }
            for _ in 0..2 {
                caller.request("HEAD", "/v1/models", &[], b"").await;
                assert_eq!(caller.head().await.status, 200, "{stage}");
                assert!(caller.nothing().await, "{stage}: HEAD has no body");
            }
        },
    )
    .await;
}

/// Thousands of calls, each with names of its own: nothing of them is kept.
#[tokio::test]
async fn c95_c133_names_that_clients_choose_leave_nothing_behind() {
    on_each(
        |c| {
            c.unknown_models = UnknownModels::Refuse;
            only(c).models = vec!["known-*".to_owned()];
        },
        async |stage: &Stage| {
            let mut caller = stage.caller().await;
            let series = || stage.gate.gateway.metrics.encode().lines().count();
            let mut after_first = 0;
            for i in 0..700 {
                let known = routes()[i % 7];
                let (path, model) = match i % 5 {
                    0 => (CHAT.to_owned(), format!("nobody-{i}")),
                    1 => (format!("/v1/thing-{i}"), format!("known-{i}")),
                    2 | 3 => (known.to_owned(), format!("known-{i}")),
                    _ => (format!("/elsewhere-{i}"), format!("known-{i}")),
                };
                let body: Value = ask(json!({"model": model, "user": format!("user-{i}")}));
                let key = format!("Bearer sk-{i}");
                let fields = [("authorization", key.as_str())];
                let body = body.to_string();
                caller
                    .request("POST", &path, &fields, body.as_bytes())
                    .await;
                caller.answer().await;
                if i == 200 {
                    after_first = series();
                }
            }
            // A phase that none of the first calls was counted in may still come.
            let now = series();
            assert!(
                now <= after_first + 60,
                "{stage}: {now} series, {after_first} before"
            );
            let text = stage.gate.gateway.metrics.encode();
            for chosen in ["nobody-", "known-", "thing-", "elsewhere-", "user-", "sk-"] {
                assert!(!text.contains(chosen), "{stage}: {chosen}");
            }
        },
    )
    .await;
}
