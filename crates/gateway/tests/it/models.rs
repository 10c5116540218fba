//! One model by its name: the answer of the upstream that has it, no slot, and no way to an upstream by a path.

use serde_json::{Value, json};
use tidegate::config::{Kind, UnknownModels, Upstream};
use tidegate_rig::{FakeUpstream, Script};

use crate::support::{CHAT, Gate, SOON, endpoint, gateway, only, slots, stream, upstream};

async fn lists(ids: &[&str]) -> FakeUpstream {
    let data: Vec<Value> = ids
        .iter()
        .map(|id| json!({"id": id, "object": "model", "owned_by": "rig", "max_model_len": 7}))
        .collect();
    let text = json!({"object": "list", "data": data}).to_string();
    let script = json!({"headers": [["content-type", "application/json"]], "body": {"pieces": [{"text": text}]}});
    upstream(Script::from_json(&script.to_string()).expect("a script")).await
}

async fn get(gate: &Gate, path: &str, fields: &[(&str, &str)]) -> (u16, Value) {
    let mut client = gate.client().await;
    client
        .request("GET", path, fields, b"")
        .await
        .expect("sent");
    let status = client.final_head().await.expect("head").status;
    let (body, _) = client.rest().await.expect("body");
    (status, serde_json::from_slice(&body).expect("JSON"))
}

#[tokio::test]
async fn a_model_is_described_by_the_upstream_that_has_it() {
    let (one, two) = (lists(&["tiny"]).await, lists(&["org/real", "big-7b"]).await);
    let gate = gateway(&one, |c| {
        only(c).models = vec!["tiny".into(), "named".into()];
        let mut second = Upstream::new("two", Kind::Other, vec![endpoint(two.addr())]);
        second.models = vec!["big-*".into()];
        second.aliases.insert("org/nick".into(), "org/real".into());
        c.upstreams.push(second);
        c.unknown_models = UnknownModels::Refuse;
    });
    for (path, id, length) in [
        ("/v1/models/tiny", "tiny", json!(7)),
        ("/v1/models/big-7b", "big-7b", json!(7)),
        ("/v1/models/org/nick", "org/nick", json!(7)),
        ("/v1/models/org%2Fnick", "org/nick", json!(7)),
        ("/v1/models/named", "named", Value::Null),
    ] {
        let (status, body) = get(&gate, path, &[]).await;
        assert_eq!(status, 200, "{path}: {body}");
        assert_eq!(
            (&body["id"], &body["object"]),
            (&json!(id), &json!("model"))
        );
        assert_eq!(body["max_model_len"], length, "{body}");
        let anthropic = [("anthropic-version", "2023-06-01")];
        let (status, body) = get(&gate, path, &anthropic).await;
        assert_eq!((status, &body["type"]), (200, &json!("model")), "{body}");
        assert_eq!(
            (&body["id"], body["display_name"].is_string()),
            (&json!(id), true)
        );
    }
    for path in [
        "/v1/models/org/real",
        "/v1/models/big-8b",
        "/v1/models/nobody",
    ] {
        let (status, body) = get(&gate, path, &[]).await;
        assert_eq!(
            (status, &body["error"]["code"]),
            (404, &json!("model_not_found"))
        );
        let (status, body) = get(&gate, path, &[("anthropic-version", "1")]).await;
        assert_eq!(
            (status, &body["error"]["type"]),
            (404, &json!("not_found_error"))
        );
        assert_eq!(body["type"], "error", "{body}");
    }
    assert_eq!(get(&gate, "/v1/models/%00", &[]).await.0, 400);
    for call in one.calls().into_iter().chain(two.calls()) {
        assert_eq!(call.path, "/v1/models");
    }
    two.stop();
    assert_eq!(
        get(&gate, "/v1/models/org/nick", &[]).await.0,
        200,
        "it is configured"
    );
    assert_eq!(get(&gate, "/v1/models/big-7b", &[]).await.0, 502);
}

#[tokio::test]
async fn a_model_is_described_while_all_slots_are_taken() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).slots = slots(1);
        only(c).queue = 0;
        only(c).models = vec!["tiny".into()];
    });
    let mut holder = gate
        .post(CHAT, &stream(json!({"end": "never", "pace_ms": 5})))
        .await;
    holder.final_head().await.expect("head");
    assert_eq!(get(&gate, "/v1/models/tiny", &[]).await.0, 200);
    assert_eq!(gate.metric("started_total", &[]), 1.0);
    holder.leave_fin();
    up.wait_for(|t| t.running == 0, SOON).await.expect("gone");
    gate.settled(&up).await;
}

/// What no list names goes to the upstream that has none, wherever it stands, and is listed there.
#[tokio::test]
async fn what_nobody_lists_goes_to_the_upstream_without_a_list() {
    for open_one in [0, 1] {
        let (one, two) = (
            upstream(Script::default()).await,
            upstream(Script::default()).await,
        );
        let gate = gateway(&one, |c| {
            let second = Upstream::new("two", Kind::Other, vec![endpoint(two.addr())]);
            c.upstreams.push(second);
            c.upstreams[1 - open_one].models = vec!["big-*".into()];
            c.unknown_models = UnknownModels::Refuse;
        });
        let ups = [&one, &two];
        for (model, goes_to) in [("tiny", open_one), ("big-7b", 1 - open_one)] {
            let before = ups[goes_to].truth().calls_begun;
            let mut body = stream(json!({"tokens": 1}));
            body["model"] = json!(model);
            let mut client = gate.post(CHAT, &body).await;
            assert_eq!(
                client.final_head().await.expect("head").status,
                200,
                "{model}"
            );
            assert_eq!(ups[goes_to].truth().calls_begun, before + 1, "{model}");
        }
        let (_, list) = get(&gate, "/v1/models", &[]).await;
        let ids: Vec<_> = list["data"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|m| m["id"].clone())
            .collect();
        assert_eq!(ids, ["tiny"]);
    }
}
