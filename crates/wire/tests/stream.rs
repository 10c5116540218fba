//! How the scanner cuts: bytes, boundaries, bounds.

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

/// The LF of this stream's blank lines may come late, however alike its events are.
#[test]
fn an_event_like_the_one_before_may_end_in_half_a_line_end() {
    let mut scanner = StreamScanner::new(Dialect::OpenAi, EVENT_BYTES);
    for end in ["\r\n\r\n", "\r\r", "\r\r", "\r\r"] {
        let event = format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"x\"}}}}]}}{end}");
        scanner.push(Bytes::from(event));
        while scanner.pop().is_some() {}
        assert_eq!(scanner.at_boundary(), end.ends_with('\n'));
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
fn must_4_an_event_of_just_the_bound_is_still_read() {
    let text = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3}}\r\n\r\n";
    for (bound, read) in [(text.len() - 1, 1), (text.len() - 2, 0)] {
        for size in [1, text.len()] {
            let pieces = scan_chunks(Dialect::OpenAi, bound, text.as_bytes().chunks(size));
            assert_eq!(
                totals(&pieces).usage_only,
                read,
                "bound {bound}, chunks of {size}"
            );
        }
    }
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
