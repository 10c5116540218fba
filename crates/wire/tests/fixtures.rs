//! Bytes recorded from real servers, cut at every place.

mod common;

use common::{EVENT_BYTES, Totals, joined, scan, scan_chunks, totals, usage};
use tidegate_wire::{Dialect, Terminal, Usage, answer_facts};

fn replay(dialect: Dialect, bytes: &[u8]) -> Totals {
    let sum = totals(&scan(dialect, bytes));
    assert_eq!(sum.malformed, 0);
    for cut in 0..=bytes.len() {
        let (a, b) = bytes.split_at(cut);
        for event_bytes in [EVENT_BYTES, 700] {
            if event_bytes == 700 && cut % 9 > 0 {
                continue;
            }
            let pieces = scan_chunks(dialect, event_bytes, [a, b]);
            assert_eq!(joined(&pieces), bytes);
            if event_bytes == EVENT_BYTES {
                assert_eq!(totals(&pieces), sum, "cut at {cut}");
            }
        }
    }
    let pieces = scan_chunks(dialect, EVENT_BYTES, bytes.chunks(1));
    assert_eq!(
        (joined(&pieces), totals(&pieces)),
        (bytes.to_vec(), sum.clone())
    );
    // Every event too long to hold: what must not be missed is not missed.
    let watched = totals(&scan_chunks(dialect, 16, bytes.chunks(50)));
    assert_eq!(
        (
            watched.events,
            watched.usage,
            &watched.terminals,
            &watched.errors
        ),
        (sum.events, sum.usage, &sum.terminals, &sum.errors)
    );
    sum
}

#[track_caller]
fn check(sum: &Totals, events: u32, deltas: u32, usage: Option<Usage>) {
    assert_eq!((sum.events, sum.deltas, sum.content), (events, deltas, 1));
    assert_eq!(sum.usage, usage);
    assert!(sum.finished && sum.errors.is_empty());
    assert_eq!(sum.terminals, [Terminal::Done]);
}

#[test]
fn vllm_chat() {
    check(
        &replay(Dialect::OpenAi, include_bytes!("data/vllm-chat.sse")),
        8,
        6,
        None,
    );
    let sum = replay(Dialect::OpenAi, include_bytes!("data/vllm-chat-usage.sse"));
    check(&sum, 9, 6, Some(usage(22, 6)));
    assert_eq!(sum.usage_only, 1);
    let sum = replay(
        Dialect::OpenAi,
        include_bytes!("data/vllm-chat-continuous.sse"),
    );
    check(&sum, 9, 6, Some(usage(22, 6)));
    assert_eq!(sum.usage_only, 1);
}

#[test]
fn llamacpp_chat() {
    check(
        &replay(Dialect::OpenAi, include_bytes!("data/llamacpp-chat.sse")),
        7,
        4,
        None,
    );
    let sum = replay(
        Dialect::OpenAi,
        include_bytes!("data/llamacpp-chat-usage.sse"),
    );
    check(
        &sum,
        8,
        4,
        Some(Usage {
            cached_input: Some(21),
            ..usage(22, 4)
        }),
    );
    assert_eq!(sum.usage_only, 1);
}

#[test]
fn anthropic_of_both() {
    check(
        &replay(
            Dialect::Anthropic,
            include_bytes!("data/vllm-anthropic.sse"),
        ),
        10,
        5,
        Some(usage(17, 5)),
    );
    let cached = Usage {
        cached_input: Some(6),
        ..usage(17, 3)
    };
    check(
        &replay(
            Dialect::Anthropic,
            include_bytes!("data/llamacpp-anthropic.sse"),
        ),
        8,
        3,
        Some(cached),
    );
}

#[test]
fn responses_of_both() {
    let sum = replay(
        Dialect::Responses,
        include_bytes!("data/vllm-responses.sse"),
    );
    let found = sum.usage.unwrap();
    assert_eq!(
        (found.input, found.output, found.reasoning),
        (Some(17), Some(5), Some(0))
    );
    assert_eq!((sum.terminals, sum.content), (vec![Terminal::Done], 1));
    let sum = replay(
        Dialect::Responses,
        include_bytes!("data/llamacpp-responses-error.sse"),
    );
    assert_eq!(
        (sum.errors.len(), sum.terminals.len(), sum.events),
        (1, 0, 3)
    );
    assert_eq!(sum.errors[0].code.as_deref(), Some("500"));
}

#[test]
fn whole_answers() {
    let vllm = answer_facts(Dialect::OpenAi, include_bytes!("data/vllm-chat.json"));
    assert_eq!(
        (vllm.usage, vllm.finished, vllm.is_error),
        (Some(usage(22, 6)), true, false)
    );
    let llamacpp = answer_facts(Dialect::OpenAi, include_bytes!("data/llamacpp-chat.json"));
    assert_eq!(
        llamacpp.usage,
        Some(Usage {
            cached_input: Some(21),
            ..usage(22, 4)
        })
    );
    let embeddings = br#"{"object":"list","data":[{"embedding":[0.1]}],"usage":{"prompt_tokens":5,"total_tokens":5}}"#;
    let facts = answer_facts(Dialect::OpenAi, embeddings);
    assert_eq!((facts.usage, facts.finished), (Some(usage(5, 0)), true));
    let anthropic = br#"{"type":"message","stop_reason":"end_turn","usage":{"input_tokens":2,"output_tokens":3}}"#;
    let facts = answer_facts(Dialect::Anthropic, anthropic);
    assert_eq!((facts.usage, facts.finished), (Some(usage(2, 3)), true));
    let responses = br#"{"object":"response","status":"incomplete","error":null,"usage":{"input_tokens":2,"output_tokens":3}}"#;
    let facts = answer_facts(Dialect::Responses, responses);
    assert_eq!(
        (facts.usage, facts.finished, facts.is_error),
        (Some(usage(2, 3)), true, false)
    );
}

#[test]
fn answers_that_are_none() {
    for (dialect, body) in [
        (Dialect::OpenAi, &b"{\"error\":{\"message\":\"m\"}}"[..]),
        (Dialect::OpenAi, b"{\"error\":\"m\"}"),
        (Dialect::OpenAi, b"{\"object\":\"error\",\"message\":\"m\"}"),
        (Dialect::Anthropic, b"{\"type\":\"error\"}"),
        (
            Dialect::Responses,
            b"{\"status\":\"failed\",\"error\":{\"code\":\"x\"}}",
        ),
    ] {
        let facts = answer_facts(dialect, body);
        assert!(facts.is_error && !facts.finished);
    }
    for body in [
        &b""[..],
        b"<html>",
        b"{\"choices\":[",
        b"{\"choices\":[{\"finish_reason\":null}]}",
        &[b'['; 100_000],
    ] {
        assert!(!answer_facts(Dialect::OpenAi, body).finished);
    }
}
