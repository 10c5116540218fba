//! Error shapes, out and in; model lists.

mod common;

use serde_json::{Value, json};
use tidegate_wire::{
    Dialect, ErrorText, ModelEntry, Wrapped, anthropic_models_body, error_body, error_event,
    models_body, parse_models, wrap_error,
};

const TEXT: ErrorText<'_> = ErrorText {
    message: "line\r\none \u{2028} \"two\"",
    kind: "server_error",
    code: Some("upstream_truncated"),
    param: None,
    anthropic_kind: "api_error",
    request_id: Some("req_1"),
};

fn data(event: &[u8]) -> Value {
    let text = std::str::from_utf8(event).expect("UTF-8");
    assert!(
        text.ends_with("\n\n") && !text.contains(['\r', '\u{2028}']),
        "{text:?}"
    );
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("data: "))
        .expect("a data line");
    serde_json::from_str(line).expect("JSON")
}

#[test]
fn must_14_an_openai_error_event_is_an_object_with_all_four_keys() {
    let event = error_event(Dialect::OpenAi, &TEXT, None);
    assert!(event.starts_with(b"data: {\"error\":{"));
    assert_eq!(event.iter().filter(|b| **b == b'\n').count(), 2);
    assert_eq!(
        data(&event),
        json!({"error": {"message": TEXT.message, "type": "server_error", "param": null, "code": "upstream_truncated"}})
    );
}

#[test]
fn must_5_what_is_added_to_an_openai_stream_is_one_data_line() {
    let event = error_event(Dialect::OpenAi, &TEXT, None);
    let text = std::str::from_utf8(&event).unwrap();
    let lines: Vec<&str> = text.split('\n').collect();
    assert_eq!((lines.len(), &lines[1..]), (3, &["", ""][..]));
    assert!(lines[0].starts_with("data: {") && lines[0].is_ascii());
}

#[test]
fn must_15_an_anthropic_error_event_has_its_name() {
    let event = error_event(
        Dialect::Anthropic,
        &ErrorText {
            request_id: None,
            ..TEXT
        },
        None,
    );
    assert!(event.starts_with(b"event: error\ndata: {\"type\":\"error\","));
    assert_eq!(
        data(&event),
        json!({"type": "error", "error": {"type": "api_error", "message": TEXT.message}})
    );
}

#[test]
fn must_16_a_responses_error_event_is_flat_and_numbered() {
    let event = error_event(Dialect::Responses, &TEXT, Some(12));
    assert!(event.starts_with(b"event: error\ndata: "));
    assert_eq!(
        data(&event),
        json!({"type": "error", "code": "upstream_truncated", "message": TEXT.message, "param": null, "sequence_number": 12})
    );
}

#[test]
fn must_17_no_error_event_ends_in_done_and_each_is_read_back_as_an_error() {
    for dialect in [Dialect::OpenAi, Dialect::Responses, Dialect::Anthropic] {
        let event = error_event(dialect, &TEXT, Some(1));
        assert!(!event.windows(6).any(|w| w == b"[DONE]"));
        let sum = common::totals(&common::scan(dialect, &event));
        assert_eq!(
            (sum.events, sum.errors.len(), sum.terminals.len()),
            (1, 1, 0)
        );
        assert_eq!(
            (sum.errors[0].message.as_str(), sum.errors[0].native),
            (TEXT.message, true)
        );
    }
}

#[test]
fn error_bodies_have_the_shape_of_their_dialect() {
    let parsed = |dialect| serde_json::from_slice::<Value>(&error_body(dialect, &TEXT)).unwrap();
    let openai = json!({"error": {"message": TEXT.message, "type": "server_error", "param": null, "code": "upstream_truncated"}});
    assert_eq!(parsed(Dialect::OpenAi), openai);
    assert_eq!(parsed(Dialect::Responses), openai);
    assert_eq!(
        parsed(Dialect::Anthropic),
        json!({"type": "error", "error": {"type": "api_error", "message": TEXT.message}, "request_id": "req_1"})
    );
}

fn wrapped(dialect: Dialect, status: u16, body: &[u8]) -> Option<Value> {
    match wrap_error(dialect, status, Some("application/json"), body) {
        Wrapped::AsIs => None,
        Wrapped::Replaced(body) => Some(serde_json::from_slice(&body).expect("JSON")),
    }
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "reads better where it is called"
)]
fn openai(message: &str, kind: &str, param: Value, code: Value) -> Option<Value> {
    Some(json!({"error": {"message": message, "type": kind, "param": param, "code": code}}))
}

#[test]
fn must_19_understood_bodies_pass() {
    for body in [
        &include_bytes!("data/vllm-context.json")[..],
        include_bytes!("data/llamacpp-context.json"),
        include_bytes!("data/vllm-anthropic-404.json"),
        br#"{"error":{"message":"m","type":"t","param":null,"code":null}}"#,
    ] {
        assert_eq!(wrapped(Dialect::OpenAi, 400, body), None);
        assert_eq!(wrapped(Dialect::Responses, 400, body), None);
    }
    assert_eq!(
        wrapped(
            Dialect::Anthropic,
            404,
            include_bytes!("data/vllm-anthropic-404.json")
        ),
        None
    );
}

#[test]
fn must_19_other_json_is_wrapped_with_its_text() {
    let wrap = |status, body: &str| wrapped(Dialect::OpenAi, status, body.as_bytes());
    let null = Value::Null;
    let detail = wrapped(Dialect::OpenAi, 404, include_bytes!("data/vllm-404.json"));
    assert_eq!(
        detail,
        openai("Not Found", "not_found_error", null.clone(), null.clone())
    );
    assert_eq!(
        wrap(422, r#"{"detail":[{"loc":["body","x"],"msg":"bad"}]}"#),
        openai(
            r#"[{"loc":["body","x"],"msg":"bad"}]"#,
            "invalid_request_error",
            null.clone(),
            null.clone()
        )
    );
    assert_eq!(
        wrap(
            400,
            r#"{"object":"error","message":"m","type":"BadRequestError","param":"p","code":400}"#
        ),
        openai("m", "BadRequestError", json!("p"), json!(400))
    );
    assert_eq!(
        wrap(400, r#"{"message":"m","code":"c"}"#),
        openai("m", "invalid_request_error", null.clone(), json!("c"))
    );
    assert_eq!(
        wrap(500, r#"{"error":"m"}"#),
        openai("m", "server_error", null.clone(), null.clone())
    );
    assert_eq!(
        wrap(500, r#""m\n""#),
        openai("m\n", "server_error", null.clone(), null.clone())
    );
    assert_eq!(
        wrap(429, r#"{"x":1}"#),
        openai(r#"{"x":1}"#, "rate_limit_error", null.clone(), null.clone())
    );
    assert_eq!(
        wrap(400, r#"{"error":{"code":7}}"#),
        openai(
            r#"{"code":7}"#,
            "invalid_request_error",
            null.clone(),
            json!(7)
        )
    );
    assert_eq!(
        wrap(
            400,
            r#"[{"error":{"code":400,"message":"m","status":"INVALID"}}]"#
        ),
        openai("m", "invalid_request_error", null, json!(400))
    );
}

#[test]
fn must_19_html_text_and_nothing_are_wrapped() {
    let wrap = |status, label, body: &[u8]| match wrap_error(Dialect::OpenAi, status, label, body) {
        Wrapped::Replaced(body) => {
            let value: Value = serde_json::from_slice(&body).unwrap();
            value["error"]["message"].as_str().unwrap().to_owned()
        }
        Wrapped::AsIs => String::new(),
    };
    let html = "<html>\r\n<h1>502 Bad Gateway</h1></html>\n";
    assert_eq!(wrap(502, Some("text/html"), html.as_bytes()), html.trim());
    assert_eq!(
        wrap(502, None, b"caf\xC3\xA9 \xFF closed, and more to say"),
        "café \u{fffd} closed, and more to say"
    );
    assert_eq!(
        wrap(502, None, b" \n"),
        "the upstream answered 502 with an empty body"
    );
    assert_eq!(
        wrap(500, Some("image/png"), &[0xFF, 0xFE, 0, 1, 0xFF]),
        "the upstream answered 500 with 5 bytes of image/png that are not text"
    );
    assert_eq!(
        wrap(500, None, "ü".repeat(50_000).as_bytes()).len(),
        16 * 1024
    );
    assert_eq!(
        wrap(500, None, br#"{"detail":"m"} trailing"#),
        r#"{"detail":"m"} trailing"#
    );
    assert!(!wrap(500, None, &[b'['; 100_000]).is_empty());
}

#[test]
fn must_19_what_is_kept_is_bounded() {
    let long = "k".repeat(100_000);
    let body = format!(r#"{{"detail":"{long}","type":"{long}","param":"{long}","code":"{long}"}}"#);
    let Wrapped::Replaced(body) = wrap_error(Dialect::OpenAi, 400, None, body.as_bytes()) else {
        panic!("not the shape of any client");
    };
    assert!(body.len() < 18 * 1024, "{}", body.len());
}

#[test]
fn must_19_anthropic_gets_its_own_shape_and_types() {
    let kinds = [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (504, "timeout_error"),
        (529, "overloaded_error"),
    ];
    for (status, kind) in kinds {
        assert_eq!(
            wrapped(
                Dialect::Anthropic,
                status,
                br#"{"error":{"message":"m","type":"BadRequestError","code":1}}"#
            ),
            Some(json!({"type": "error", "error": {"type": kind, "message": "m"}}))
        );
    }
    assert_eq!(
        wrapped(
            Dialect::Anthropic,
            400,
            br#"{"error":{"message":"m","type":"overloaded_error"}}"#
        ),
        Some(json!({"type": "error", "error": {"type": "overloaded_error", "message": "m"}}))
    );
}

#[test]
fn must_63_model_lists_keep_what_upstreams_say() {
    let entries = parse_models(include_bytes!("data/llamacpp-models.json")).unwrap();
    assert_eq!(
        entries
            .iter()
            .map(|entry| entry.id.as_str())
            .collect::<Vec<_>>(),
        ["tiny"]
    );
    let own = ModelEntry::named("alias \"x\"", "tidegate");
    let body: Value = serde_json::from_slice(&models_body(entries.iter().chain([&own]))).unwrap();
    assert_eq!(body["object"], "list");
    assert_eq!(body["data"][0]["meta"]["n_ctx"], 4096);
    assert_eq!(
        body["data"][1],
        json!({"id": "alias \"x\"", "object": "model", "created": 0, "owned_by": "tidegate"})
    );
    let renamed = entries[0].renamed("other");
    let value: Value = serde_json::from_str(renamed.raw.get()).unwrap();
    assert_eq!(
        (value["id"].as_str(), value["meta"]["n_vocab"].as_u64()),
        (Some("other"), Some(2000))
    );
}

#[test]
fn must_63_model_lists_in_anthropics_shape() {
    let native =
        parse_models(br#"{"data":[{"type":"model","id":"c","display_name":"C","x":1}]}"#).unwrap();
    let own = ModelEntry::named("m", "tidegate");
    let body: Value =
        serde_json::from_slice(&anthropic_models_body(native.iter().chain([&own]))).unwrap();
    assert_eq!(
        (&body["first_id"], &body["last_id"], &body["has_more"]),
        (&json!("c"), &json!("m"), &json!(false))
    );
    assert_eq!(body["data"][0]["x"], 1);
    assert_eq!(body["data"][1]["display_name"], "m");
    let none: Value = serde_json::from_slice(&anthropic_models_body([].into_iter())).unwrap();
    assert_eq!(
        none,
        json!({"data": [], "has_more": false, "first_id": null, "last_id": null})
    );
}

#[test]
fn model_lists_of_odd_shape() {
    assert_eq!(
        parse_models(br#"[{"id":"a"},{"name":"b"},7]"#)
            .unwrap()
            .len(),
        1
    );
    assert_eq!(parse_models(br#"{"data":[]}"#).unwrap().len(), 0);
    for bad in [
        &b""[..],
        b"{}",
        b"{\"data\":{}}",
        b"{\"data\":[",
        b"<html>",
        &[b'['; 100_000],
    ] {
        assert!(parse_models(bad).is_err());
    }
    assert_eq!(
        parse_models(b"{}").unwrap_err().to_string(),
        "the model list has no `data` list (byte 0)"
    );
}
