//! What the scanner reads: usage, content, ends, errors.

mod common;

use bytes::Bytes;
use common::{DONE, EVENT_BYTES, chat, joined, scan, scan_chunks, totals, usage};
use tidegate_wire::{Dialect, StreamScanner, Terminal};

#[test]
fn must_13_a_stream_cut_cleanly_shows_no_end_and_has_room_for_an_error_event() {
    let mut scanner = StreamScanner::new(Dialect::OpenAi, EVENT_BYTES);
    scanner.push(Bytes::from(chat("a") + &chat("b")));
    let piece = scanner.pop().unwrap();
    assert_eq!((piece.facts.terminal, piece.facts.finished), (None, false));
    assert!(scanner.finish().is_none());
    assert!(scanner.at_boundary());
}

#[test]
fn must_57_usage_comes_from_its_places_only() {
    let text = "{\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":9}} data: [DONE] \n\n event: error \"error\":{";
    let nested = "data: {\"choices\":[{\"delta\":{\"content\":\"x\",\"usage\":{\"prompt_tokens\":8}}}],\"usage\":null}\n\n";
    let sum = totals(&scan(Dialect::OpenAi, (chat(text) + nested).as_bytes()));
    assert_eq!(
        (sum.usage, sum.terminals, sum.errors.len(), sum.events),
        (None, vec![], 0, 2)
    );
    let details = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":22,\"completion_tokens\":4,\"prompt_tokens_details\":\
        {\"cached_tokens\":21},\"completion_tokens_details\":{\"reasoning_tokens\":3}}}\n\n";
    let found = totals(&scan(Dialect::OpenAi, details.as_bytes()))
        .usage
        .unwrap();
    assert_eq!((found.cached_input, found.reasoning), (Some(21), Some(3)));
}

#[test]
fn must_57_anthropic_usage_is_cumulative_and_counts_the_cache() {
    let text = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":11,\
        \"cache_read_input_tokens\":6,\"cache_creation_input_tokens\":2,\"output_tokens\":1}}}\n\n\
        event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\
        \"usage\":{\"input_tokens\":11,\"output_tokens\":40}}\n\n";
    let sum = totals(&scan(Dialect::Anthropic, text.as_bytes()));
    let found = sum.usage.unwrap();
    assert_eq!(
        (found.input, found.output, found.cached_input),
        (Some(19), Some(40), Some(6))
    );
    assert!(sum.finished);
}

#[test]
fn must_57_continuous_usage_is_known_when_the_stream_is_cut() {
    let chunk = |n: u64| {
        format!(
            "data: {{\"choices\":[{{\"delta\":{{\"content\":\"x\"}}}}],\"usage\":{{\"prompt_tokens\":22,\"completion_tokens\":{n}}}}}\n\n"
        )
    };
    let pieces = scan(
        Dialect::OpenAi,
        (chunk(1) + &chunk(2) + &chunk(3)).as_bytes(),
    );
    assert_eq!(pieces.len(), 1, "usage beside choices is no reason to cut");
    assert_eq!(pieces[0].facts.usage, Some(usage(22, 3)));
}

#[test]
fn must_58_the_extra_usage_chunk_is_a_piece_of_its_own() {
    let extra =
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2}}\n\n";
    let text = chat("a") + extra + DONE;
    let pieces = scan(Dialect::OpenAi, text.as_bytes());
    let seen: Vec<(&[u8], bool)> = pieces
        .iter()
        .map(|p| (&p.bytes[..], p.facts.usage_only))
        .collect();
    assert_eq!(
        seen,
        [
            (chat("a").as_bytes(), false),
            (extra.as_bytes(), true),
            (DONE.as_bytes(), false)
        ]
    );
    for not in [
        "data: {\"choices\":[],\"prompt_filter_results\":[]}\n\n",
        "data: {\"choices\":[],\"usage\":null}\n\n",
        "data: {\"usage\":{\"prompt_tokens\":3}}\n\n",
        "data: {\"choices\":[{\"delta\":{}}],\"usage\":{\"prompt_tokens\":3}}\n\n",
        "data: {\"choices\":null,\"usage\":{\"prompt_tokens\":3}}\n\n",
    ] {
        assert_eq!(
            totals(&scan(Dialect::OpenAi, not.as_bytes())).usage_only,
            0,
            "{not}"
        );
    }
}

#[test]
fn must_58_left_out_the_stream_is_as_if_it_had_never_been_there() {
    let extra = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3}}\r\n\r\n";
    let (before, after) = ("data: {\"choices\":[{}]}\r\n\r\n", "data: [DONE]\r\n\r\n");
    let text = format!("{before}{extra}{after}");
    for cut in 0..=text.len() {
        let (a, b) = text.as_bytes().split_at(cut);
        let mut pieces = scan_chunks(Dialect::OpenAi, EVENT_BYTES, [a, b]);
        pieces.retain(|piece| !piece.facts.usage_only);
        assert_eq!(
            joined(&pieces),
            format!("{before}{after}").as_bytes(),
            "cut at {cut}"
        );
    }
}

#[test]
fn must_60_content_is_the_first_delta_that_says_something() {
    let silent = [
        r#"{"choices":[]}"#,
        r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
        r#"{"choices":[{"delta":{"role":"assistant","content":null}}]}"#,
        r#"{"choices":[{"delta":{"tool_calls":[]}}]}"#,
        r#"{"choices":[{"finish_reason":"stop","index":0,"delta":{}}]}"#,
    ];
    for text in silent {
        let sum = totals(&scan(
            Dialect::OpenAi,
            format!("data: {text}\n\n").as_bytes(),
        ));
        assert_eq!((sum.events, sum.content, sum.deltas), (1, 0, 0), "{text}");
    }
    let says = [
        r#"{"choices":[{"delta":{"content":"x"}}]}"#,
        r#"{"choices": [{"delta": {"content": " "}}]}"#,
        r#"{"choices":[{"delta":{"reasoning":"x"}}]}"#,
        r#"{"choices":[{"delta":{"content":null,"reasoning_content":"x"}}]}"#,
        r#"{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}"#,
        r#"{"choices":[{"delta":{"content":[{"type":"text"}]}}]}"#,
        r#"{"choices":[{"delta":{"refusal":"x"}}]}"#,
        r#"{"choices":[{"delta":{"function_call":{"name":"f"}}}]}"#,
        r#"{"choices":[{"delta":{"audio":{"data":"x"}}}]}"#,
        r#"{"choices":[{"delta":{"reasoning_details":[{}]}}]}"#,
        r#"{"choices":[{"delta":{"thinking":"x"}}]}"#,
        r#"{"choices":[{"text":"x","finish_reason":null}]}"#,
    ];
    for text in says {
        let event = format!("data: {text}\n\n");
        let sum = totals(&scan(Dialect::OpenAi, event.repeat(3).as_bytes()));
        assert_eq!((sum.events, sum.content, sum.deltas), (3, 1, 3), "{text}");
    }
}

#[test]
fn must_60_content_of_the_other_dialects() {
    let count =
        |dialect, data: &str| totals(&scan(dialect, format!("data: {data}\n\n").as_bytes())).deltas;
    let anthropic = |data| count(Dialect::Anthropic, data);
    assert_eq!(
        anthropic(r#"{"type":"content_block_delta","delta":{"type":"text_delta","text":"x"}}"#),
        1
    );
    assert_eq!(
        anthropic(r#"{"delta":{"thinking":"x"},"type":"content_block_delta"}"#),
        1
    );
    assert_eq!(
        anthropic(r#"{"type":"content_block_delta","delta":{"partial_json":""}}"#),
        0
    );
    assert_eq!(
        anthropic(r#"{"type":"content_block_delta","delta":{"signature":"x"}}"#),
        0
    );
    assert_eq!(
        anthropic(
            r#"{"type":"content_block_start","content_block":{"type":"tool_use","name":"f"}}"#
        ),
        1
    );
    assert_eq!(
        anthropic(r#"{"type":"content_block_start","content_block":{"type":"text","text":""}}"#),
        0
    );
    let responses = |data| count(Dialect::Responses, data);
    assert_eq!(
        responses(r#"{"delta":"x","type":"response.output_text.delta"}"#),
        1
    );
    assert_eq!(
        responses(r#"{"type":"response.function_call_arguments.delta","delta":"{"}"#),
        1
    );
    assert_eq!(
        responses(r#"{"type":"response.output_text.delta","delta":""}"#),
        0
    );
    assert_eq!(
        responses(r#"{"type":"response.output_text.done","delta":"x"}"#),
        0
    );
    assert_eq!(
        responses(r#"{"type":"response.output_text.done","text":"x"}"#),
        0
    );
}

#[test]
fn finish_reasons_are_seen() {
    for (dialect, text) in [
        (
            Dialect::OpenAi,
            r#"{"choices":[{"delta":{},"finish_reason":"length"}]}"#,
        ),
        (
            Dialect::Anthropic,
            r#"{"type":"message_delta","delta":{"stop_reason":"max_tokens"}}"#,
        ),
        (Dialect::Responses, r#"{"type":"response.incomplete"}"#),
    ] {
        assert!(
            totals(&scan(dialect, format!("data: {text}\n\n").as_bytes())).finished,
            "{text}"
        );
    }
    let still = br#"data: {"type":"message_delta","delta":{"stop_reason":null},"usage":{"output_tokens":1}}"#;
    assert!(!totals(&scan(Dialect::Anthropic, still)).finished);
    for reason in ["error", "stop"] {
        let broken = format!(
            "data: {{\"error\":{{\"message\":\"m\"}},\"choices\":[{{\"delta\":{{\"content\":\"e\"}},\
             \"finish_reason\":\"{reason}\"}}]}}\n\n"
        );
        let sum = totals(&scan(Dialect::OpenAi, broken.as_bytes()));
        assert_eq!((sum.finished, sum.deltas, sum.errors.len()), (false, 0, 1));
    }
    let error = b"data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"error\"}]}\n\n";
    assert!(!totals(&scan(Dialect::OpenAi, error)).finished);
}

#[test]
fn errors_in_every_shape_are_pieces_of_their_own() {
    use Dialect::{Anthropic, OpenAi, Responses};
    let cases = [
        (
            OpenAi,
            "data: {\"error\":{\"message\":\"m\",\"type\":\"t\",\"code\":500}}\n\n",
            true,
        ),
        (OpenAi, "data: {\"error\":\"m\"}\n\n", true),
        (OpenAi, "event: error\ndata: {\"message\":\"m\"}\n\n", false),
        (OpenAi, "event: error\ndata: m\n\n", false),
        (
            OpenAi,
            "data: {\"object\":\"error\",\"message\":\"m\",\"code\":400}\n\n",
            false,
        ),
        (
            Anthropic,
            "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"m\"}}\n\n",
            true,
        ),
        (
            Anthropic,
            "data: {\"type\":\"error\",\"error\":{\"message\":\"m\"}}\n\n",
            false,
        ),
        (
            Anthropic,
            "data: {\"error\":{\"message\":\"m\"}}\n\n",
            false,
        ),
        (
            Responses,
            "event: error\ndata: {\"type\":\"error\",\"code\":\"c\",\"message\":\"m\",\"param\":null}\n\n",
            true,
        ),
        (
            Responses,
            "data: {\"error\":{\"code\":500,\"message\":\"m\"}}\n\n",
            true,
        ),
        (
            Responses,
            "data: {\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"c\",\"message\":\"m\"}}}\n\n",
            true,
        ),
    ];
    let other = "data: {}\n\n";
    for (dialect, text, native) in cases {
        let pieces = scan(dialect, format!("{other}{text}{other}").as_bytes());
        assert_eq!(pieces.len(), 3, "{text}");
        let error = pieces[1].facts.error.clone().unwrap();
        assert_eq!(
            (error.message.as_str(), error.native),
            ("m", native),
            "{text}"
        );
        assert_eq!(pieces[1].bytes, text);
    }
}

#[test]
fn an_error_field_that_says_nothing_is_no_error() {
    use Dialect::OpenAi;
    for not in [
        "{\"error\":null}",
        "{\"error\":{}}",
        "{\"error\":\"\"}",
        "{\"error\":false}",
        "{\"x\":{\"error\":{\"message\":\"m\"}}}",
    ] {
        assert_eq!(
            totals(&scan(OpenAi, format!("data: {not}\n\n").as_bytes())).errors,
            [],
            "{not}"
        );
    }
}

#[test]
fn an_error_keeps_its_type_and_code_and_a_bounded_text() {
    let text = format!(
        "data: {{\"error\":{{\"message\":\"{}\",\"type\":\"t\",\"code\":500}}}}\n\n",
        "ü".repeat(5000)
    );
    let error = totals(&scan(Dialect::OpenAi, text.as_bytes()))
        .errors
        .remove(0);
    assert_eq!(
        (error.kind.as_deref(), error.code.as_deref()),
        (Some("t"), Some("500"))
    );
    assert_eq!(error.message, "ü".repeat(512));
}

#[test]
fn what_cannot_be_read_is_counted_and_passed() {
    let deep = format!(
        "data: {{\"x\":{}1{}}}\n\n",
        "[".repeat(300),
        "]".repeat(300)
    );
    let hostile = format!("data: {{\"x\":{}\n\n", "[".repeat(50_000));
    let sum = |text: &str| {
        let pieces = scan(Dialect::OpenAi, text.as_bytes());
        assert_eq!(joined(&pieces), text.as_bytes());
        totals(&pieces)
    };
    assert_eq!(sum(&deep).malformed, 0);
    assert_eq!(sum(&hostile).malformed, 1);
    for bad in [
        "{\"choices\":7}",
        "{broken",
        "[1]",
        "{\"usage\":{\"prompt_tokens\":1}} x",
        "hello",
        "{\"usage\":{\"prompt_tokens\":-1}}",
        "{\"choices\":[7]}",
    ] {
        let found = sum(&format!("data: {bad}\n\n{}", chat("x")));
        assert_eq!(
            (found.events, found.malformed, found.deltas),
            (2, 1, 1),
            "{bad}"
        );
    }
    assert_eq!(
        sum("data: {\"usage\":{\"prompt_tokens\":1e999,\"completion_tokens\":5}}\n\n")
            .usage
            .unwrap()
            .output,
        Some(5)
    );
}

#[test]
fn sentinels_count_only_as_the_whole_data() {
    for text in [
        "data: [DONE] x\n\n",
        "data: \"[DONE]\"\n\n",
        "[DONE]\n\n",
        ": [DONE]\n\n",
        "event: [DONE]\n\n",
    ] {
        assert_eq!(
            totals(&scan(Dialect::OpenAi, text.as_bytes())).terminals,
            [],
            "{text}"
        );
    }
    for text in [
        "data:[DONE]\n\n",
        "data: [DONE] \n\n",
        "event: done\ndata: [DONE]\n\n",
    ] {
        assert_eq!(
            totals(&scan(Dialect::OpenAi, text.as_bytes())).terminals,
            [Terminal::Done],
            "{text}"
        );
    }
    assert_eq!(
        totals(&scan(Dialect::Anthropic, DONE.as_bytes())).terminals,
        []
    );
}

#[test]
fn the_next_sequence_number_is_known() {
    let mut scanner = StreamScanner::new(Dialect::Responses, EVENT_BYTES);
    assert_eq!(scanner.next_sequence(), None);
    scanner.push(Bytes::from_static(
        b"data: {\"type\":\"response.created\",\"sequence_number\":41}\n\n",
    ));
    assert!(scanner.pop().is_some());
    assert_eq!(scanner.next_sequence(), Some(42));
    scanner.push(Bytes::from_static(b"data: {\"type\":\"x\"}\n\n"));
    assert!(scanner.pop().is_some());
    assert_eq!(scanner.next_sequence(), Some(42));
}
