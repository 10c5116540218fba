//! What the cursor reads is what a reader over `serde_json::Value` reads: the facts of answers, the fields of requests.

use bytes::Bytes;
use proptest::collection::btree_map;
use proptest::prelude::{Just, Strategy, any, prop_oneof, proptest};
use proptest::sample::select;
use proptest::{prop_assert, prop_assert_eq};
use serde_json::{Map, Value, json};
use tidegate_wire::{AnswerFacts, Dialect, Usage, answer_facts, peek};

const DIALECTS: [Dialect; 3] = [Dialect::OpenAi, Dialect::Responses, Dialect::Anthropic];

const ANSWER_KEYS: [&str; 10] = [
    "choices",
    "usage",
    "error",
    "object",
    "type",
    "status",
    "stop_reason",
    "id",
    "created",
    "a key of more than sixteen bytes",
];
const CHOICE_KEYS: [&str; 5] = ["finish_reason", "message", "index", "logprobs", "text"];
const USAGE_KEYS: [&str; 13] = [
    "prompt_tokens",
    "input_tokens",
    "completion_tokens",
    "output_tokens",
    "total_tokens",
    "cache_read_input_tokens",
    "prompt_cache_hit_tokens",
    "cache_creation_input_tokens",
    "prompt_tokens_details",
    "input_tokens_details",
    "completion_tokens_details",
    "output_tokens_details",
    "service_tier",
];
const DETAIL_KEYS: [&str; 3] = ["cached_tokens", "reasoning_tokens", "audio_tokens"];
const REQUEST_KEYS: [&str; 12] = [
    "model",
    "stream",
    "background",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "messages",
    "temperature",
    "best_of",
    "echo",
    "use_beam_search",
    "stream_options",
];

fn leaf() -> impl Strategy<Value = Value> {
    prop_oneof![
        3 => select(vec![json!(null), json!(true), json!(false), json!(""), json!([]), json!({}), json!(0), json!(0.0), json!(12.0), json!(-3), json!(1.5)]),
        3 => (0_u64..5000).prop_map(Value::from),
        1 => any::<u64>().prop_map(Value::from),
        3 => select(vec!["error", "stop", "failed", "completed", "incomplete", "message", "a \"quoted\" line\n of some length"]).prop_map(Value::from),
    ]
}

fn object(
    keys: &'static [&'static str],
    value: impl Strategy<Value = Value>,
) -> impl Strategy<Value = Value> {
    btree_map(select(keys), value, 0..keys.len())
        .prop_map(|map| Value::Object(map.into_iter().map(|(k, v)| (k.to_owned(), v)).collect()))
}

fn answer() -> impl Strategy<Value = Value> {
    let usage = || {
        object(
            &USAGE_KEYS,
            prop_oneof![4 => leaf(), 1 => object(&DETAIL_KEYS, leaf())],
        )
    };
    let choices = proptest::collection::vec(object(&CHOICE_KEYS, leaf()), 0..3);
    let value = prop_oneof![2 => leaf(), 1 => choices.prop_map(Value::Array), 1 => usage()];
    (object(&ANSWER_KEYS, value), usage(), any::<bool>()).prop_map(|(mut answer, usage, set)| {
        if set {
            answer["usage"] = usage;
        }
        answer
    })
}

/// Compact as servers write it, or with white space.
fn written(value: &Value, pretty: bool) -> String {
    if pretty {
        format!("{value:#}")
    } else {
        value.to_string()
    }
}

/// Later numbers win; what is no whole number is passed over.
fn number(into: &mut Option<u64>, value: &Value) {
    let whole = |float: f64| {
        let exact = (0.0..=9_007_199_254_740_992.0).contains(&float) && float.fract() == 0.0;
        exact.then_some(float as u64)
    };
    *into = value.as_u64().or(value.as_f64().and_then(whole)).or(*into);
}

fn usage(dialect: Dialect, usage: &Map<String, Value>) -> Option<Usage> {
    let (mut input, mut output, mut total) = (None, None, None);
    let (mut read, mut write, mut reasoning) = (None, None, None);
    for (key, value) in usage {
        match key.as_str() {
            "prompt_tokens" | "input_tokens" => number(&mut input, value),
            "completion_tokens" | "output_tokens" => number(&mut output, value),
            "total_tokens" => number(&mut total, value),
            "cache_read_input_tokens" | "prompt_cache_hit_tokens" => number(&mut read, value),
            "cache_creation_input_tokens" => number(&mut write, value),
            "prompt_tokens_details" | "input_tokens_details" => {
                number(&mut read, &value["cached_tokens"]);
            }
            "completion_tokens_details" | "output_tokens_details" => {
                number(&mut reasoning, &value["reasoning_tokens"]);
            }
            _ => {}
        }
    }
    if dialect == Dialect::Anthropic {
        input = input.map(|n: u64| {
            n.saturating_add(read.unwrap_or(0))
                .saturating_add(write.unwrap_or(0))
        });
    }
    let rest = total
        .zip(input)
        .and_then(|(total, input): (u64, u64)| total.checked_sub(input));
    let usage = Usage {
        input,
        output: output.or(rest),
        cached_input: read,
        reasoning,
    };
    (!usage.is_empty()).then_some(usage)
}

/// Not null, false, 0, or empty.
fn truthy(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(value) => *value,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(all) => !all.is_empty(),
        Value::Object(all) => !all.is_empty(),
    }
}

fn facts(dialect: Dialect, answer: &Value) -> AnswerFacts {
    let is_error = truthy(&answer["error"])
        || answer["object"] == "error"
        || (dialect == Dialect::Anthropic && answer["type"] == "error")
        || (dialect == Dialect::Responses && answer["status"] == "failed");
    let finish = |choice: &Value| choice["finish_reason"].is_string();
    let done = match dialect {
        Dialect::OpenAi => match answer.get("choices") {
            Some(choices) => choices.as_array().is_some_and(|all| all.iter().any(finish)),
            None => true,
        },
        Dialect::Responses => answer["status"] == "completed" || answer["status"] == "incomplete",
        Dialect::Anthropic => answer["stop_reason"].is_string(),
    };
    AnswerFacts {
        usage: answer["usage"]
            .as_object()
            .and_then(|all| usage(dialect, all)),
        is_error,
        finished: done && !is_error,
    }
}

/// `model`, `stream`, `background`, `max_tokens`, or `None` if one of them has the wrong type.
fn fields(dialect: Dialect, body: &Value) -> Option<(Option<String>, bool, bool, Option<u64>)> {
    let model = match &body["model"] {
        Value::Null => None,
        Value::String(model) => Some(model.clone()),
        _ => return None,
    };
    let flag = |value: &Value| match value {
        Value::Null => Some(false),
        other => other.as_bool(),
    };
    let count = |key: &str| match &body[key] {
        Value::Null => Some(None),
        value @ Value::Number(_) => {
            let mut count = None;
            number(&mut count, value);
            Some(count)
        }
        _ => None,
    };
    let max_tokens = match dialect {
        Dialect::OpenAi => {
            if !body["stream_options"].is_object() && !body["stream_options"].is_null() {
                return None;
            }
            count("max_completion_tokens")?.or(count("max_tokens")?)
        }
        Dialect::Responses => count("max_output_tokens")?,
        Dialect::Anthropic => count("max_tokens")?,
    };
    let background = match dialect {
        Dialect::Responses => flag(&body["background"])?,
        Dialect::OpenAi | Dialect::Anthropic => false,
    };
    Some((model, flag(&body["stream"])?, background, max_tokens))
}

proptest! {
    #[test]
    fn facts_of_answers(answer in answer(), pretty: bool) {
        for dialect in DIALECTS {
            let text = written(&answer, pretty);
            prop_assert_eq!(answer_facts(dialect, text.as_bytes()), facts(dialect, &answer), "{:?} {}", dialect, text);
        }
    }

    #[test]
    fn fields_of_requests(body in object(&REQUEST_KEYS, prop_oneof![2 => leaf(), 1 => Just(json!("tiny")), 1 => Just(json!(true)), 1 => Just(json!([{"role": "user", "content": "hi"}]))]), pretty: bool) {
        for dialect in DIALECTS {
            let text = written(&body, pretty);
            let read = peek(&Bytes::from(text.clone()), dialect);
            prop_assert!(read.is_ok() || read.as_ref().is_err_and(|error| error.param.is_some()));
            let read = read.ok().map(|peek| (peek.model, peek.stream, peek.background, peek.max_tokens));
            prop_assert_eq!(read, fields(dialect, &body), "{:?} {}", dialect, text);
        }
    }
}
