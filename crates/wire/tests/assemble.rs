//! Streams put together again, beside the whole answers that the same servers gave to the same requests.

use bytes::Bytes;
use proptest::prelude::*;
use serde_json::{Value, json};
use tidegate_wire::{AssembleError, Assembler, Dialect, Form};

const LIMIT: usize = 1024 * 1024;

fn assemble<'a>(
    dialect: Dialect,
    form: Form,
    limit: usize,
    chunks: impl IntoIterator<Item = &'a [u8]>,
) -> Result<String, AssembleError> {
    let mut assembler = Assembler::new(dialect, form, limit);
    for chunk in chunks {
        assembler.push(Bytes::copy_from_slice(chunk));
        while assembler.take()?.is_some() {}
    }
    let whole = assembler.finish()?;
    Ok(String::from_utf8(whole.to_vec()).expect("JSON is UTF-8"))
}

fn standard(dialect: Dialect, stream: &str) -> Result<Value, AssembleError> {
    let whole = assemble(dialect, Form::Standard, LIMIT, [stream.as_bytes()])?;
    Ok(serde_json::from_str(&whole).unwrap_or_else(|error| panic!("{error}: {whole}")))
}

fn events(events: &[Value]) -> String {
    events
        .iter()
        .map(|event| format!("data: {event}\n\n"))
        .collect()
}

// --- recorded pairs ----------------------------------------------------------------------------------------------

/// Without what a server makes anew for each call: ids, times, timings.
fn steady(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    let keys = [
        "\"id\":\"",
        "\"call_id\":\"",
        "\"created\":",
        "\"created_at\":",
        "\"completed_at\":",
        "\"timings\":{",
    ];
    while let Some((at, key)) = keys
        .iter()
        .filter_map(|key| Some((rest.find(key)?, *key)))
        .min()
    {
        let end = at + key.len();
        out += &rest[..end];
        out += "…";
        let close = match key.as_bytes()[key.len() - 1] {
            b'"' => rest[end..].find('"').map(|n| n + 1),
            b'{' => rest[end..].find('}').map(|n| n + 1),
            _ => rest[end..].find([',', '}']),
        };
        rest = &rest[end + close.expect("the value ends")..];
    }
    out + rest
}

/// What a server's stream says otherwise than its whole answer; why nothing here can mend it is
/// [`what_is_told_differently_is_in_no_event`].
///
/// - A tool call that `max_tokens` cuts off before its name is complete is text in the whole answer, and no event of the stream (both
///   servers: their parser holds back what may become a call, and does not let go of it at the end).
/// - vLLM reads whole answers with another parser than streams: of calls that are no valid JSON in the model's output, of which
///   the last is cut off, the one takes none and says all of it as text, the other takes each that it could read.
/// - An echo brings the prompt's tokens along in vLLM's streams. Such a call is never asked for as one (`Peek::one_piece`).
const TOLD_DIFFERENTLY: [&str; 6] = [
    "vllm-completions-echo",
    "llamacpp-chat-tools-cut",
    "vllm-chat-tools",
    "vllm-chat-tools-cut",
    "vllm-messages-tools",
    "vllm-responses-tools",
];

fn pairs() -> Vec<(String, String, Vec<u8>)> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/pairs");
    let mut pairs = Vec::new();
    for entry in std::fs::read_dir(folder).expect("the recordings are there") {
        let path = entry.expect("a recording").path();
        if path.extension().is_some_and(|end| end == "json") {
            let name = path.file_stem().and_then(|name| name.to_str());
            let name = name.expect("a name").to_owned();
            let whole = std::fs::read_to_string(&path).expect("an answer");
            let stream = std::fs::read(path.with_extension("sse")).expect("its stream");
            pairs.push((name, whole, stream));
        }
    }
    assert!(pairs.len() > 45, "{} pairs", pairs.len());
    pairs.sort();
    pairs
}

fn ways(name: &str) -> (Dialect, Form) {
    let dialect = match () {
        () if name.contains("-messages") => Dialect::Anthropic,
        () if name.contains("-responses") => Dialect::Responses,
        () => Dialect::OpenAi,
    };
    let form = if name.starts_with("vllm") {
        Form::Vllm
    } else {
        Form::LlamaCpp
    };
    (dialect, form)
}

#[test]
fn as_the_servers_whole_answers_byte_for_byte() {
    for (name, whole, stream) in pairs() {
        let (dialect, form) = ways(&name);
        let got = assemble(dialect, form, LIMIT, [&stream[..]]);
        let got = got.unwrap_or_else(|error| panic!("{name}: {error}"));
        if TOLD_DIFFERENTLY.contains(&name.as_str()) {
            assert_ne!(
                steady(&got),
                steady(&whole),
                "{name} is told the same by now"
            );
        } else {
            assert_eq!(steady(&got), steady(&whole), "{name}");
        }
    }
}

/// Five of the six say as text what no event of the stream says, so that no way of putting it together could know it.
#[test]
fn what_is_told_differently_is_in_no_event() {
    let mut found = 0;
    for (name, whole, stream) in pairs() {
        if !TOLD_DIFFERENTLY.contains(&name.as_str()) || name == "vllm-completions-echo" {
            continue;
        }
        let stream = String::from_utf8(stream).expect("text");
        assert!(whole.contains("<tool_call>"), "{name}: {whole}");
        assert!(!stream.contains("<tool_call"), "{name} can be mended");
        found += 1;
    }
    assert_eq!(found, TOLD_DIFFERENTLY.len() - 1);
}

#[test]
fn cuts_do_not_matter() {
    for (name, _, stream) in pairs() {
        let (dialect, form) = ways(&name);
        let whole = assemble(dialect, form, LIMIT, [&stream[..]]).unwrap();
        for size in [1, 2, 3, 7, 64, 1000] {
            let got = assemble(dialect, form, LIMIT, stream.chunks(size)).unwrap();
            assert_eq!(got, whole, "{name} in pieces of {size}");
        }
    }
}

// --- what no recording shows -------------------------------------------------------------------------------------

#[expect(clippy::needless_pass_by_value, reason = "the tests read better")]
fn chunk(delta: Value, finish: Option<&str>) -> Value {
    json!({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
           "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
}

fn chat(deltas: &[Value]) -> Value {
    let mut all: Vec<Value> = deltas
        .iter()
        .map(|delta| chunk(delta.clone(), None))
        .collect();
    all.push(chunk(json!({}), Some("stop")));
    let stream = events(&all) + "data: [DONE]\n\n";
    standard(Dialect::OpenAi, &stream).expect("a whole stream")["choices"][0]["message"].clone()
}

#[test]
fn a_message_of_every_part() {
    let message = chat(&[
        json!({"role": "assistant", "content": ""}),
        json!({"reasoning_content": "let "}),
        json!({"reasoning_content": "me", "reasoning": "see"}),
        json!({"content": "a\"\n"}),
        json!({"content": null, "refusal": "no"}),
        json!({"content": "\u{1f642}b", "refusal": "!"}),
        json!({"function_call": {"name": "old", "arguments": "{"}}),
        json!({"function_call": {"arguments": "}"}}),
        json!({"reasoning_details": [{"index": 0, "type": "reasoning.text", "text": "x"}]}),
        json!({"reasoning_details": [{"index": 0, "type": "reasoning.text", "text": "y"}]}),
        json!({"role": "assistant", "new_text": "un", "new_list": [1]}),
        json!({"new_text": "known", "new_list": [{"a": 2}], "new_flag": true}),
    ]);
    let expected = json!({
        "role": "assistant", "content": "a\"\n\u{1f642}b", "reasoning_content": "let me", "reasoning": "see", "refusal": "no!",
        "function_call": {"name": "old", "arguments": "{}"},
        "reasoning_details": [{"index": 0, "type": "reasoning.text", "text": "xy"}],
        "new_text": "unknown", "new_list": [1, {"a": 2}], "new_flag": true,
    });
    assert_eq!(message, expected);
}

#[test]
fn tool_calls_that_come_interleaved_and_say_their_name_again() {
    let message = chat(&[
        json!({"tool_calls": [{"index": 1, "id": "b", "type": "function", "function": {"name": "two", "arguments": ""}}]}),
        json!({"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "one", "arguments": "{\"x"}}]}),
        json!({"tool_calls": [{"index": 1, "id": "b", "function": {"name": "two", "arguments": "{"}},
                              {"index": 0, "id": "", "function": {"arguments": "\":1}"}}]}),
        json!({"tool_calls": [{"index": 1, "function": {"arguments": "}"}}]}),
    ]);
    let expected = json!([
        {"id": "a", "type": "function", "function": {"name": "one", "arguments": "{\"x\":1}"}},
        {"id": "b", "type": "function", "function": {"name": "two", "arguments": "{}"}},
    ]);
    assert_eq!(message["tool_calls"], expected);
}

#[test]
fn fields_beside_the_message() {
    let stream = events(&[
        json!({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [],
               "prompt_filter_results": [{"prompt_index": 0}]}),
        json!({"object": "chat.completion.chunk", "service_tier": "default", "obfuscation": "xxxx",
               "choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [{"token": "a"}], "refusal": null}}]}),
        json!({"object": "chat.completion.chunk", "new_field": {"deep": [1.50]},
               "choices": [{"index": 0, "delta": {"content": "b"}, "logprobs": {"content": [{"token": "b"}]},
                            "finish_reason": "stop", "stop_reason": 7, "content_filter_results": {"hate": {"filtered": false}}}]}),
        json!({"object": "chat.completion.chunk", "choices": [], "system_fingerprint": "f", "usage": {"completion_tokens": 2}}),
    ]) + "data: [DONE]\n\n";
    let expected = json!({
        "id": "c", "object": "chat.completion", "created": 1, "model": "m", "service_tier": "default", "system_fingerprint": "f",
        "usage": {"completion_tokens": 2}, "new_field": {"deep": [1.50]}, "prompt_filter_results": [{"prompt_index": 0}],
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ab", "refusal": null}, "finish_reason": "stop",
                     "stop_reason": 7, "logprobs": {"content": [{"token": "a"}, {"token": "b"}], "refusal": null},
                     "content_filter_results": {"hate": {"filtered": false}}}],
    });
    assert_eq!(standard(Dialect::OpenAi, &stream).unwrap(), expected);
}

#[test]
fn escapes_and_digits_stay_as_they_were() {
    let stream = concat!(
        r#"data: {"choices":[{"index":0,"delta":{"content":"\u00e9\ud83d"},"score":1.2300E+2}]}"#,
        "\n\n",
        r#"data: {"choices":[{"index":0,"delta":{"content":"\ude42\/"},"finish_reason":"stop"}]}"#,
        "\n\n",
    );
    let whole = assemble(Dialect::OpenAi, Form::Standard, LIMIT, [stream.as_bytes()]).unwrap();
    assert!(
        whole.contains(r#""content":"\u00e9\ud83d\ude42\/""#),
        "{whole}"
    );
    assert!(whole.contains(r#""score":1.2300E+2"#), "{whole}");
}

#[test]
fn a_claude_message_of_every_block() {
    let stream = events(&[
        json!({"type": "message_start", "message": {"id": "m", "type": "message", "role": "assistant", "model": "c", "content": [],
               "stop_reason": null, "stop_sequence": null,
               "usage": {"input_tokens": 9, "cache_read_input_tokens": 3, "output_tokens": 1, "service_tier": "standard"}}}),
        json!({"type": "ping"}),
        json!({"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": "", "signature": ""}}),
        json!({"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}}),
        json!({"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "m"}}),
        json!({"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "c2ln"}}),
        json!({"type": "content_block_stop", "index": 0}),
        json!({"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": "", "citations": []}}),
        json!({"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "He"}}),
        json!({"type": "content_block_delta", "index": 1, "delta": {"type": "citations_delta", "citation": {"cited_text": "x"}}}),
        json!({"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "llo"}}),
        json!({"type": "content_block_delta", "index": 1, "delta": {"type": "citations_delta", "citation": {"cited_text": "y"}}}),
        json!({"type": "content_block_stop", "index": 1}),
        json!({"type": "content_block_start", "index": 2, "content_block": {"type": "tool_use", "id": "t", "name": "f", "input": {}}}),
        json!({"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": ""}}),
        json!({"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": "{ \"a\": \"x "}}),
        json!({"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": "\\\" y\" }"}}),
        json!({"type": "content_block_stop", "index": 2}),
        json!({"type": "content_block_start", "index": 3, "content_block": {"type": "redacted_thinking", "data": "zz"}}),
        json!({"type": "content_block_stop", "index": 3}),
        json!({"type": "content_block_start", "index": 4, "content_block": {"type": "tool_use", "id": "u", "name": "cut", "input": {}}}),
        json!({"type": "content_block_delta", "index": 4, "delta": {"type": "input_json_delta", "partial_json": "{\"a"}}),
        json!({"type": "content_block_stop", "index": 4}),
        json!({"type": "message_delta", "delta": {"stop_reason": "max_tokens", "stop_sequence": null, "container": {"id": "k"}},
               "context_management": {"applied_edits": []}, "usage": {"output_tokens": 30, "input_tokens": null}}),
        json!({"type": "message_stop"}),
    ]);
    let expected = json!({
        "id": "m", "type": "message", "role": "assistant", "model": "c", "stop_reason": "max_tokens", "stop_sequence": null,
        "container": {"id": "k"}, "context_management": {"applied_edits": []},
        "usage": {"input_tokens": 9, "cache_read_input_tokens": 3, "output_tokens": 30, "service_tier": "standard"},
        "content": [
            {"type": "thinking", "thinking": "hmm", "signature": "c2ln"},
            {"type": "text", "text": "Hello", "citations": [{"cited_text": "x"}, {"cited_text": "y"}]},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": "x \" y"}},
            {"type": "redacted_thinking", "data": "zz"},
            {"type": "tool_use", "id": "u", "name": "cut", "input": {}},
        ],
    });
    assert_eq!(standard(Dialect::Anthropic, &stream).unwrap(), expected);
}

#[test]
fn a_response_is_that_of_the_last_event_however_it_ended() {
    for status in ["completed", "incomplete", "failed", "cancelled"] {
        let response = json!({"id": "r", "object": "response", "status": status, "error": {"code": "server_error", "message": "m"},
                              "output": [{"type": "reasoning", "summary": []}, {"type": "message", "content": []}]});
        let kind = format!("response.{status}");
        let stream = events(&[
            json!({"type": "response.created", "sequence_number": 0, "response": {"id": "r", "status": "in_progress"}}),
            json!({"type": "response.output_text.delta", "delta": "x", "sequence_number": 1}),
            json!({"type": kind, "response": response, "sequence_number": 2}),
        ]);
        assert_eq!(standard(Dialect::Responses, &stream).unwrap(), response);
    }
}

// --- what is no answer -------------------------------------------------------------------------------------------

#[test]
fn an_error_in_mid_stream_is_told() {
    let begun = events(&[chunk(json!({"content": "a"}), None)]);
    let failed = |dialect, tail: &str| match standard(dialect, &(begun.clone() + tail)) {
        Err(AssembleError::Failed(error)) => (error.message, error.kind, error.code),
        other => panic!("{other:?}"),
    };
    let error = failed(
        Dialect::OpenAi,
        "data: {\"error\":{\"code\":500,\"message\":\"broke\",\"type\":\"server_error\"}}\n\n",
    );
    assert_eq!(
        error,
        (
            "broke".into(),
            Some("server_error".into()),
            Some("500".into())
        )
    );
    let anthropic = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"busy\"}}\n\n";
    let error = standard(Dialect::Anthropic, anthropic);
    assert!(
        matches!(error, Err(AssembleError::Failed(e)) if e.kind.as_deref() == Some("overloaded_error"))
    );
    let responses = "event: error\ndata: {\"type\":\"error\",\"code\":\"c\",\"message\":\"m\",\"param\":null,\"sequence_number\":1}\n\n";
    assert!(
        matches!(standard(Dialect::Responses, responses), Err(AssembleError::Failed(e)) if e.message == "m")
    );
}

#[test]
fn an_answer_without_its_end_is_no_answer() {
    let open = events(&[chunk(json!({"content": "a"}), None)]);
    assert_eq!(
        standard(Dialect::OpenAi, &open),
        Err(AssembleError::Truncated)
    );
    assert_eq!(standard(Dialect::OpenAi, ""), Err(AssembleError::Truncated));
    assert_eq!(
        standard(Dialect::OpenAi, "data: [DONE]\n\n"),
        Err(AssembleError::Truncated)
    );
    let half = events(&[chunk(json!({"content": "a"}), Some("stop"))]);
    assert_eq!(
        standard(Dialect::OpenAi, half.trim_end().trim_end_matches('}')),
        Err(AssembleError::Truncated)
    );
    // The end of each choice is enough; not all servers say `[DONE]`.
    assert!(standard(Dialect::OpenAi, &half).is_ok());
    let one_of_two = half.clone()
        + &events(&[
            json!({"choices": [{"index": 1, "delta": {"content": "b"}, "finish_reason": null}]}),
        ]);
    assert_eq!(
        standard(Dialect::OpenAi, &one_of_two),
        Err(AssembleError::Truncated)
    );
    let start =
        events(&[json!({"type": "message_start", "message": {"content": [], "usage": {}}})]);
    assert_eq!(
        standard(Dialect::Anthropic, &start),
        Err(AssembleError::Truncated)
    );
    let created = events(&[json!({"type": "response.created", "response": {}})]);
    assert_eq!(
        standard(Dialect::Responses, &created),
        Err(AssembleError::Truncated)
    );
}

#[test]
fn what_cannot_be_read_is_malformed() {
    let malformed = |dialect, stream: &str| match standard(dialect, stream) {
        Err(AssembleError::Malformed(what)) => what,
        other => panic!("{other:?}"),
    };
    assert_eq!(
        malformed(Dialect::OpenAi, "data: {oops\n\n"),
        "an event that is not JSON"
    );
    assert_eq!(
        malformed(Dialect::OpenAi, "data: 7\n\n"),
        "an event that is not JSON"
    );
    let changes = events(&[
        chunk(json!({"content": "a"}), None),
        chunk(json!({"content": ["b"]}), None),
    ]);
    assert_eq!(
        malformed(Dialect::OpenAi, &changes),
        "a field that changes its type"
    );
    let stray =
        events(&[json!({"type": "content_block_delta", "index": 3, "delta": {"text": "x"}})]);
    assert_eq!(
        malformed(Dialect::Anthropic, &stray),
        "a delta without its block"
    );
    let many: String = (0..600)
        .map(|n| events(&[chunk(json!({format!("field{n}"): 1}), None)]))
        .collect();
    assert_eq!(
        malformed(Dialect::OpenAi, &many),
        "an object with too many members"
    );
}

#[test]
fn memory_is_bounded() {
    let limit = 10_000;
    let run = |dialect, chunk: &str| {
        let mut assembler = Assembler::new(dialect, Form::Standard, limit);
        for _ in 0..20_000 {
            assembler.push(Bytes::copy_from_slice(chunk.as_bytes()));
            loop {
                match assembler.take() {
                    Ok(Some(_)) => {}
                    Ok(None) => break,
                    Err(error) => return error,
                }
            }
        }
        panic!("20000 times {chunk}");
    };
    let mut number = 0;
    let text = events(&[chunk(json!({"content": "word "}), None)]);
    assert_eq!(
        run(Dialect::OpenAi, &text),
        AssembleError::TooLarge { limit }
    );
    let logprobs =
        events(&[json!({"choices": [{"index": 0, "logprobs": {"content": [{"token": "x"}]}}]})]);
    assert_eq!(
        run(Dialect::OpenAi, &logprobs),
        AssembleError::TooLarge { limit }
    );
    // One event that never ends.
    assert_eq!(
        run(Dialect::OpenAi, "data: aaaaaaaaaaaaaaaaa"),
        AssembleError::TooLarge { limit }
    );
    let block = events(&[
        json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
        json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "word "}}),
    ]);
    assert_eq!(
        run(Dialect::Anthropic, &block),
        AssembleError::TooLarge { limit }
    );
    // Ever new choices, each almost empty.
    let mut assembler = Assembler::new(Dialect::OpenAi, Form::Standard, limit);
    let error = loop {
        number += 1;
        let choice = events(&[json!({"choices": [{"index": number, "delta": {}}]})]);
        assembler.push(Bytes::from(choice));
        if let Err(error) = assembler.take() {
            break error;
        }
        assert!(number < 1000);
    };
    assert_eq!(error, AssembleError::TooLarge { limit });
    // What is said again in each chunk takes no room.
    let again = events(&[
        json!({"id": "same", "timings": {"n": 1}, "usage": {"completion_tokens": 1}, "choices": []}),
    ]);
    let mut assembler = Assembler::new(Dialect::OpenAi, Form::Standard, limit);
    for _ in 0..1000 {
        assembler.push(Bytes::copy_from_slice(again.as_bytes()));
        while assembler.take().unwrap().is_some() {}
    }
}

// --- split and joined --------------------------------------------------------------------------------------------

fn text() -> impl Strategy<Value = String> {
    "[a-z\"\\\\\n\u{e9}\u{2028}\u{1f642} ]{0,12}"
}

fn pieces(text: &str, cuts: &[usize]) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    let mut at: Vec<usize> = cuts.iter().map(|cut| cut % (chars.len() + 1)).collect();
    at.extend([0, chars.len()]);
    at.sort_unstable();
    at.windows(2)
        .map(|ends| chars[ends[0]..ends[1]].iter().collect())
        .collect()
}

proptest! {
    /// Any answer, split into deltas in any way, is that answer again.
    #[test]
    fn split_and_joined_is_the_same(
        choices in proptest::collection::vec((text(), text(), proptest::collection::vec((text(), text()), 0..3)), 1..4),
        cuts in proptest::collection::vec(0usize..40, 0..4),
        size in 1usize..50,
    ) {
        let mut chunks = Vec::new();
        let mut whole = Vec::new();
        let delta = |index: usize, delta: Value| json!({"id": "i", "object": "chat.completion.chunk",
            "choices": [{"index": index, "delta": delta, "logprobs": null, "finish_reason": null}]});
        for (index, (content, reasoning, calls)) in choices.iter().enumerate() {
            chunks.push(delta(index, json!({"role": "assistant", "content": "", "reasoning": ""})));
            chunks.extend(pieces(reasoning, &cuts).into_iter().map(|part| delta(index, json!({"reasoning": part}))));
            chunks.extend(pieces(content, &cuts).into_iter().map(|part| delta(index, json!({"content": part}))));
            let mut message = json!({"role": "assistant", "content": content, "reasoning": reasoning, "refusal": null});
            for (call, (name, arguments)) in calls.iter().enumerate() {
                let start = json!({"index": call, "id": format!("c{call}"), "type": "function", "function": {"name": name, "arguments": ""}});
                chunks.push(delta(index, json!({"tool_calls": [start]})));
                chunks.extend(pieces(arguments, &cuts).into_iter().map(|part| {
                    delta(index, json!({"tool_calls": [{"index": call, "function": {"arguments": part}}]}))
                }));
            }
            if !calls.is_empty() {
                message["tool_calls"] = calls.iter().enumerate().map(|(call, (name, arguments))| {
                    json!({"id": format!("c{call}"), "type": "function", "function": {"name": name, "arguments": arguments}})
                }).collect();
            }
            whole.push(json!({"index": index, "message": message, "logprobs": null, "finish_reason": "stop"}));
        }
        for index in 0..choices.len() {
            chunks.push(json!({"choices": [{"index": index, "delta": {}, "finish_reason": "stop"}]}));
        }
        let stream = events(&chunks);
        let got = assemble(Dialect::OpenAi, Form::Standard, LIMIT, stream.as_bytes().chunks(size)).unwrap();
        let got: Value = serde_json::from_str(&got).unwrap();
        prop_assert_eq!(got, json!({"id": "i", "object": "chat.completion", "choices": whole}));
    }

    /// Whatever comes, in whatever pieces: no panic, no more than the limit, and what comes out is JSON.
    #[test]
    fn any_bytes_are_judged(
        bytes in proptest::collection::vec(proptest::sample::select(b"{}[]\":,datenulx0 \n\\".to_vec()), 0..200),
        size in 1usize..20,
    ) {
        for dialect in [Dialect::OpenAi, Dialect::Anthropic, Dialect::Responses] {
            let mut framed = b"data: ".to_vec();
            framed.extend(&bytes);
            framed.extend(b"\n\n");
            if let Ok(whole) = assemble(dialect, Form::Vllm, 500, framed.chunks(size)) {
                prop_assert!(serde_json::from_str::<Value>(&whole).is_ok(), "{}", whole);
            }
        }
    }
}
