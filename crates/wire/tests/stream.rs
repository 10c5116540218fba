//! The scanner, rule by rule.

mod common;

use bytes::Bytes;
use common::{DONE, EVENT_BYTES, chat, joined, scan, scan_chunks, totals, usage};
use tidegate_wire::{Dialect, StreamScanner, Terminal};

/// Ten events in the shapes a stream may have, with this line end.
fn ten_events(end: &str) -> String {
    let mut text = format!(": hello{end}{end}");
    for n in 0..6 {
        text += &format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{n}\"}}}}]}}{end}{end}");
    }
    text += &format!("id: 7{end}retry: 10{end}data:{{\"choices\":[]}}{end}{end}");
    text += &format!("event: x{end}unknown: y{end}data: {{\"choices\":[]}}{end}{end}");
    text += &format!(
        "data: {{\"choices\":{end}: within{end}data:[{{\"delta\":{{\"content\":\"z\"}}}}]}}{end}{end}"
    );
    text + &format!("data: [DONE]{end}{end}")
}

#[test]
fn must_1_every_line_end_gives_the_same_bytes_and_ten_events_wherever_it_is_cut() {
    for end in ["\n", "\r\n", "\r"] {
        let text = ten_events(end);
        let text = text.as_bytes();
        let whole = scan(Dialect::OpenAi, text);
        let sum = totals(&whole);
        assert_eq!(
            (sum.events, sum.deltas, sum.malformed),
            (10, 7, 0),
            "{end:?}"
        );
        assert_eq!(sum.terminals, [Terminal::Done]);
        assert_eq!(joined(&whole), text);
        for cut in 0..=text.len() {
            let (a, b) = text.split_at(cut);
            let pieces = scan_chunks(Dialect::OpenAi, EVENT_BYTES, [a, b]);
            assert_eq!(joined(&pieces), text);
            assert_eq!(totals(&pieces), sum, "{end:?} cut at {cut}");
        }
        let pieces = scan_chunks(Dialect::OpenAi, EVENT_BYTES, text.chunks(1));
        assert_eq!(joined(&pieces), text);
        assert_eq!(totals(&pieces), sum, "{end:?} byte by byte");
    }
}

#[test]
fn must_1_any_unicode_and_a_byte_order_mark_pass_unchanged() {
    let text = "\u{feff}".to_owned()
        + &chat("é€𝄞e\u{301}\u{7f}")
        + "data: {\"choices\":[{\"delta\":{\"content\":\"\u{2028}\u{2029}\u{85}\\u2028\"}}]}\n\n"
        + DONE;
    let text = text.as_bytes();
    for size in 1..40 {
        let pieces = scan_chunks(Dialect::OpenAi, EVENT_BYTES, text.chunks(size));
        assert_eq!(joined(&pieces), text);
        let sum = totals(&pieces);
        assert_eq!((sum.events, sum.deltas, sum.malformed), (3, 2, 0));
    }
}

#[test]
fn must_2_an_event_is_given_out_when_it_is_complete() {
    let mut scanner = StreamScanner::new(Dialect::OpenAi, EVENT_BYTES);
    let event = chat("a");
    scanner.push(Bytes::from(event.clone() + "data: {\"cho"));
    assert_eq!(scanner.pop().unwrap().bytes, event);
    assert!(scanner.pop().is_none());
    assert!(scanner.at_boundary());
    assert_eq!(scanner.held_bytes(), 11);
}

#[test]
fn must_2_whole_events_of_one_chunk_are_one_piece_of_the_same_memory() {
    let text = Bytes::from(chat("a") + &chat("b") + ": c\n\n");
    let mut scanner = StreamScanner::new(Dialect::OpenAi, EVENT_BYTES);
    scanner.push(text.clone());
    let piece = scanner.pop().unwrap();
    assert_eq!(piece.bytes.as_ptr(), text.as_ptr());
    assert_eq!(piece.bytes.len(), text.len());
    assert_eq!((piece.facts.events, piece.facts.deltas), (2, 2));
    assert!(scanner.pop().is_none());
}

#[test]
fn must_4_a_16_mib_line_is_never_held() {
    let mut scanner = StreamScanner::new(Dialect::OpenAi, EVENT_BYTES);
    let chunk = Bytes::from(vec![b'x'; 16 * 1024]);
    scanner.push(Bytes::from_static(
        b"data: {\"choices\":[{\"delta\":{\"content\":\"",
    ));
    let mut passed = 0;
    for _ in 0..1024 {
        scanner.push(chunk.clone());
        while let Some(piece) = scanner.pop() {
            passed += piece.bytes.len();
            assert!(!scanner.at_boundary(), "in the middle of an event");
        }
        assert!(scanner.held_bytes() <= EVENT_BYTES);
    }
    assert!(passed >= 16 << 20);
    scanner.push(Bytes::from_static(b"\"}}]}\n\ndata: [DONE]\n\n"));
    let end = scanner.pop().unwrap();
    assert_eq!(end.facts.events, 1);
    assert!(scanner.at_boundary());
    assert_eq!(scanner.pop().unwrap().facts.terminal, Some(Terminal::Done));
    assert!(scanner.finish().is_none());
}

#[test]
fn must_4_the_end_and_the_usage_of_a_long_event_are_not_missed() {
    let answer = "\\\"usage\\\":{x} ".repeat(10_000);
    let text = format!(
        "event: response.completed\ndata: {{\"response\":{{\"output\":[{{\"text\":\"{answer}\"}}],\"usage\":{{\"input_tokens\":17,\
         \"output_tokens\":5}},\"error\":null}},\"type\":\"response.completed\"}}\n\n"
    );
    for size in [text.len(), 4096, 7] {
        let pieces = scan_chunks(
            Dialect::Responses,
            EVENT_BYTES,
            text.as_bytes().chunks(size),
        );
        assert_eq!(joined(&pieces), text.as_bytes());
        let sum = totals(&pieces);
        assert_eq!(
            (sum.events, sum.usage, sum.finished),
            (1, Some(usage(17, 5)), true)
        );
        assert_eq!(sum.terminals, [Terminal::Done]);
    }
    let rest = scan_chunks(
        Dialect::Responses,
        EVENT_BYTES,
        text.trim_end().as_bytes().chunks(4096),
    );
    assert_eq!(joined(&rest), text.trim_end().as_bytes());
    assert_eq!(totals(&rest).terminals, [Terminal::Done]);
    let long = chat(&"x".repeat(100_000));
    let pieces = scan_chunks(Dialect::OpenAi, EVENT_BYTES, long.as_bytes().chunks(4096));
    assert_eq!((totals(&pieces).content, totals(&pieces).deltas), (1, 1));
    let error = format!(
        "data: {{\"error\":{{\"message\":\"m\",\"x\":\"{}\"}}}}\n\n",
        "x".repeat(100_000)
    );
    let pieces = scan_chunks(Dialect::OpenAi, EVENT_BYTES, error.as_bytes().chunks(4096));
    assert_eq!(
        (totals(&pieces).errors.len(), totals(&pieces).deltas),
        (1, 0)
    );
}

#[test]
fn must_5_comments_pings_and_empty_blocks_are_no_events() {
    let text = ": x\n\n:\n\n\n\n\r\n\r\nevent: x\n\ndata:\n\ndata: \n\nretry: 3\n\nevent: ping\ndata: {}\n\n";
    let pieces = scan(Dialect::OpenAi, text.as_bytes());
    assert_eq!(joined(&pieces), text.as_bytes());
    assert_eq!(totals(&pieces), common::Totals::default());
    let ping = b"event: ping\ndata: {\"type\": \"ping\"}\n\ndata: {\"type\":\"ping\"}\n\n";
    assert_eq!(
        totals(&scan(Dialect::Anthropic, ping)),
        common::Totals::default()
    );
    let keepalive = b"event: keepalive\ndata: {\"type\":\"keepalive\",\"sequence_number\":3}\n\n";
    assert_eq!(
        totals(&scan(Dialect::Responses, keepalive)),
        common::Totals::default()
    );
}

#[test]
fn must_6_a_comment_may_go_in_only_between_events() {
    let text =
        "event: a\r\ndata: {\"x\":\r\ndata: \"é\"}\r\n\r\nevent: b\r\ndata: {}\r\n\r\n".as_bytes();
    for cut in 1..text.len() {
        let mut scanner = StreamScanner::new(Dialect::Anthropic, 8);
        assert!(scanner.at_boundary());
        let mut sent = Vec::new();
        for chunk in [&text[..cut], &text[cut..]] {
            scanner.push(Bytes::copy_from_slice(chunk));
            while let Some(piece) = scanner.pop() {
                sent.extend_from_slice(&piece.bytes);
            }
            let whole = sent.is_empty() || sent.ends_with(b"\r\n\r\n");
            assert_eq!(scanner.at_boundary(), whole, "cut at {cut}");
        }
        assert_eq!(sent, text);
    }
}

#[test]
fn must_6_a_stream_of_lone_crs_has_boundaries_too() {
    let mut scanner = StreamScanner::new(Dialect::OpenAi, EVENT_BYTES);
    scanner.push(Bytes::from_static(b"data: {}\r\r"));
    assert_eq!(scanner.pop().unwrap().facts.events, 1);
    assert!(scanner.at_boundary());
    scanner.push(Bytes::from_static(b"data: {}\r"));
    assert!(scanner.pop().is_none());
    assert!(
        scanner.at_boundary(),
        "nothing of the second event went out"
    );
    scanner.push(Bytes::from_static(b"\r"));
    assert_eq!(scanner.pop().unwrap().facts.events, 1);
}

#[test]
fn must_6_the_lf_of_a_split_crlf_goes_out_at_once_and_is_no_event() {
    let mut scanner = StreamScanner::new(Dialect::OpenAi, EVENT_BYTES);
    scanner.push(Bytes::from_static(b"data: {}\r\n\r"));
    assert_eq!(scanner.pop().unwrap().facts.events, 1);
    assert!(!scanner.at_boundary(), "half a line end");
    scanner.push(Bytes::from_static(b"\ndata: {"));
    let lf = scanner.pop().unwrap();
    assert_eq!((&lf.bytes[..], lf.facts.events), (&b"\n"[..], 0));
    assert!(scanner.at_boundary());
    assert!(scanner.pop().is_none());
}

#[test]
fn must_8_a_terminal_event_ends_its_piece() {
    let after = chat("AFTER");
    let pieces = scan(Dialect::OpenAi, (chat("a") + DONE + &after).as_bytes());
    assert_eq!(pieces[0].bytes, chat("a") + DONE);
    assert_eq!(pieces[0].facts.terminal, Some(Terminal::Done));
    assert_eq!(pieces[1].bytes, after);
    let cases = [
        (
            Dialect::Anthropic,
            "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
            Terminal::Done,
        ),
        (
            Dialect::Anthropic,
            "event: message_stop\ndata: {}\n\n",
            Terminal::Done,
        ),
        (
            Dialect::Responses,
            "data: {\"type\":\"response.completed\",\"response\":{}}\n\n",
            Terminal::Done,
        ),
        (
            Dialect::Responses,
            "event: response.incomplete\ndata: {\"response\":{}}\n\n",
            Terminal::Done,
        ),
        (
            Dialect::Responses,
            "event: response.failed\ndata: {\"type\":\"response.failed\"}\n\n",
            Terminal::Failed,
        ),
        (Dialect::Responses, DONE, Terminal::Done),
    ];
    for (dialect, text, terminal) in cases {
        let pieces = scan(dialect, (text.to_owned() + "data: {}\n\n").as_bytes());
        assert_eq!(pieces[0].bytes, text);
        assert_eq!(pieces[0].facts.terminal, Some(terminal), "{text}");
        assert_eq!(pieces.len(), 2);
    }
}

#[test]
fn must_11_the_unterminated_rest_is_given_out_last_and_read() {
    let text = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2}}";
    for (tail, whole) in [
        ("\n\n", true),
        ("\n", false),
        ("", false),
        ("\r", false),
        ("\r\n", false),
    ] {
        let mut scanner = StreamScanner::new(Dialect::OpenAi, EVENT_BYTES);
        scanner.push(Bytes::from(format!("{text}{tail}")));
        let popped = scanner.pop();
        assert_eq!(popped.is_some(), whole);
        let rest = scanner.finish();
        assert_eq!(rest.is_some(), !whole);
        assert_eq!(scanner.at_boundary(), whole, "a cut, not an end: {tail:?}");
        let piece = popped.or(rest).unwrap();
        assert_eq!(piece.facts.usage, Some(usage(3, 2)));
        assert_eq!(piece.bytes, format!("{text}{tail}"));
    }
    let half = scan(Dialect::OpenAi, b"data: {\"choices\":[{\"delta\":{\"con");
    assert_eq!((totals(&half).deltas, totals(&half).malformed), (0, 1));
}

#[test]
fn must_12_invalid_utf8_passes() {
    let text = b"data: {\"choices\":[{\"delta\":{\"content\":\"\xFF\xC3\"}}]}\n\n\xFE\xFF\n\ndata: \xC0\n\n";
    let pieces = scan(Dialect::OpenAi, text);
    assert_eq!(joined(&pieces), text);
    assert_eq!((totals(&pieces).deltas, totals(&pieces).malformed), (1, 1));
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
    let broken = b"data: {\"error\":{\"message\":\"m\"},\"choices\":[{\"delta\":{\"content\":\"e\"},\"finish_reason\":\"error\"}]}\n\n";
    let sum = totals(&scan(Dialect::OpenAi, broken));
    assert_eq!((sum.finished, sum.deltas, sum.errors.len()), (false, 0, 1));
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
}
