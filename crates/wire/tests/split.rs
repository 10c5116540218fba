//! Any input, cut anywhere: the same bytes, the same facts.

mod common;

use bytes::Bytes;
use common::{Totals, joined, scan_chunks, scan_with, totals};
use proptest::prelude::*;
use tidegate_wire::{Dialect, StreamScanner};

const WORDS: [&[u8]; 34] = [
    b"\n", b"\n", b"\n", b"\r", b"\r\n", b"\r\n", b"\n\n", b"data: ", b"data:", b"data", b"event: ", b"event: error",
    b"event: ping", b"event: message_stop", b"event: response.completed", b": comment", b"id: 1", b"retry: 5",
    b"[DONE]", b"\xEF\xBB\xBF", "\u{2028}".as_bytes(), "\u{85}é".as_bytes(), b"\xFF", b"{}", b"{\"choices\":",
    b"[{\"delta\":{\"content\":\"x\"},\"finish_reason\":\"stop\"}]", b"[],\"usage\":{\"prompt_tokens\":1}", b"}",
    b"{\"choices\":[],\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":5}}",
    b"{\"choices\":[{\"delta\":{\"content\":\"y\"}}]}",
    b"{\"error\":{\"message\":\"m\"}}",
    b"{\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"x\"},\"usage\":{\"output_tokens\":3}}",
    b"{\"type\":\"content_block_delta\",\"delta\":{\"text\":\"t\"}}",
    b"{\"type\":\"response.completed\",\"sequence_number\":3,\"response\":{\"usage\":{\"input_tokens\":1}}}",
];

fn stream() -> impl Strategy<Value = Vec<u8>> {
    let word = prop_oneof![
        8 => (0..WORDS.len()).prop_map(|at| WORDS[at].to_vec()),
        1 => proptest::collection::vec(any::<u8>(), 0..6),
        3 => (7..9usize, 23..WORDS.len(), 0..7usize, 0..7usize).prop_map(|(field, value, a, b)| {
            [WORDS[field], WORDS[value], WORDS[a], WORDS[b]].concat()
        }),
    ];
    proptest::collection::vec(word, 0..30).prop_map(|words| words.concat())
}

/// Events with a text (`$`) and something else (`#`) in them.
const SHAPES: [(Dialect, &str); 8] = [
    (
        Dialect::OpenAi,
        r##"data: {"id":"a","choices":[{"delta":{"content":$},"finish_reason":null}],"stamp":#}"##,
    ),
    (
        Dialect::OpenAi,
        r##"data: {"choices":[],"delta":$,"x" : # }"##,
    ),
    (
        Dialect::OpenAi,
        "id: 1\ndata:{\"choices\":[{\"text\":$}],\"created\":#}\n: and a comment",
    ),
    (
        Dialect::OpenAi,
        "data: {\"x\":#,\"choices\":[{\"delta\":{\"content\":$,\ndata: \"role\":\"x\"}}]}",
    ),
    (
        Dialect::OpenAi,
        r##"data: {"choices":[{"delta":{"content":"a","audio":$},"finish_reason":""}],"object":#}"##,
    ),
    (
        Dialect::Anthropic,
        "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":$},\"index\":#}",
    ),
    (
        Dialect::Responses,
        r##"data: {"type":"response.output_text.delta","sequence_number":#,"delta":$}"##,
    ),
    (
        Dialect::Responses,
        r##"data: {"sequence_number":#,"x":#,"delta":$,"obfuscation":$,"type":"response.output_text.delta"}"##,
    ),
];
const TEXTS: [&str; 20] = [
    "123",
    "0",
    r#""a""#,
    r#""a""#,
    r#""b""#,
    r#""c""#,
    r#""""#,
    r#"" and on, with more in it than fits a word""#,
    r#""\n""#,
    r#""\"""#,
    r#""\x""#,
    r#""\"#,
    r#""c"}"#,
    "\"\t\"",
    r#""é""#,
    "null",
    "[]",
    "[1]",
    "[1]",
    r#"[{"a":"b"}]"#,
];
const OTHERS: [&str; 15] = [
    "1",
    "2",
    "17",
    "18",
    "1796082208602670230",
    "99999999999999999999",
    "007",
    "1.5",
    "-3",
    "3e2",
    r#""x""#,
    r#""""#,
    "null",
    "{}",
    "1 ",
];

/// Events of one shape, one line end, and some values; where each begins. Now and then a blank line is not there.
fn alike() -> impl Strategy<Value = (Dialect, Vec<u8>, Vec<usize>)> {
    let end = prop_oneof![Just("\n"), Just("\r\n"), Just("\r")];
    let value = (0..TEXTS.len(), 0..OTHERS.len(), 0..20usize);
    let few = (0..4usize, 0..4usize, Just(1));
    let values = proptest::collection::vec(prop_oneof![value, few], 1..12);
    (0..SHAPES.len(), end, values).prop_map(|(shape, end, values)| {
        let (dialect, shape) = SHAPES[shape];
        let (mut stream, mut begins) = (String::new(), Vec::new());
        for (text, other, odd) in values {
            begins.push(stream.len());
            let event = shape.replace('$', TEXTS[text]).replace('#', OTHERS[other]) + "\n";
            stream += &event.replace('\n', end);
            stream += if odd == 0 { "" } else { end };
        }
        (dialect, stream.into_bytes(), begins)
    })
}

/// What a scan gives: bytes, facts, and the number of an event that would follow.
fn said(
    dialect: Dialect,
    event_bytes: usize,
    chunks: Vec<&[u8]>,
) -> (Vec<u8>, Totals, Option<u64>) {
    let mut scanner = StreamScanner::new(dialect, event_bytes);
    let pieces = scan_with(&mut scanner, chunks);
    (joined(&pieces), totals(&pieces), scanner.next_sequence())
}

fn dialect() -> impl Strategy<Value = Dialect> {
    prop_oneof![
        Just(Dialect::OpenAi),
        Just(Dialect::Responses),
        Just(Dialect::Anthropic)
    ]
}

/// The chunks these cuts make.
fn chunks<'a>(text: &'a [u8], cuts: &[prop::sample::Index]) -> Vec<&'a [u8]> {
    chunks_at(text, cuts.iter().map(|cut| cut.index(text.len() + 1)))
}

fn chunks_at(text: &[u8], places: impl Iterator<Item = usize>) -> Vec<&[u8]> {
    let mut places: Vec<usize> = places.collect();
    places.extend([0, text.len()]);
    places.sort_unstable();
    places
        .windows(2)
        .map(|pair| &text[pair[0]..pair[1]])
        .collect()
}

/// Where events end, found the simple way: all line ends made LF, then double LF.
fn blank_lines(text: &[u8]) -> Vec<usize> {
    let (mut ends, mut at, mut line) = (vec![0], 0, 0);
    while at < text.len() {
        let end = match text[at] {
            b'\r' if text.get(at + 1) == Some(&b'\n') => at + 2,
            b'\r' | b'\n' => at + 1,
            _ => {
                at += 1;
                line += 1;
                continue;
            }
        };
        if line == 0 {
            ends.push(end);
        }
        (at, line) = (end, 0);
    }
    ends
}

/// Events with data that is not blank, found the simple way.
fn data_events(text: &[u8]) -> usize {
    let text = text.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(text);
    let lines = String::from_utf8_lossy(text)
        .replace("\r\n", "\n")
        .replace('\r', "\n");
    let (mut count, mut data, mut ping) = (0, String::new(), false);
    for line in lines.split('\n').chain([""]) {
        if line.is_empty() {
            count += usize::from(!data.trim_ascii().is_empty() && !ping);
            data.clear();
            ping = false;
        } else if let Some(value) = line.strip_prefix("data:") {
            data.push_str(value.strip_prefix(' ').unwrap_or(value));
        } else if let Some(value) = line.strip_prefix("event:") {
            ping = value.strip_prefix(' ').unwrap_or(value) == "ping";
        }
    }
    count
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn must_1_no_cut_changes_bytes_or_facts(
        text in stream(),
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..12),
        dialect in dialect(),
        event_bytes in prop_oneof![Just(0), 1..100usize, Just(65536)],
    ) {
        let whole = scan_chunks(dialect, event_bytes, [&text[..]]);
        prop_assert_eq!(joined(&whole), text.clone());
        let cut = scan_chunks(dialect, event_bytes, chunks(&text, &cuts));
        prop_assert_eq!(joined(&cut), text.clone());
        prop_assert_eq!(totals(&cut), totals(&whole));
        if dialect == Dialect::OpenAi && event_bytes == 65536 {
            prop_assert_eq!(totals(&whole).events as usize, data_events(&text));
        }
    }

    /// An event that is as the one before but for its text is not read again: those that are cut are, and say the same.
    #[test]
    fn events_that_are_alike_say_what_each_says_alone(
        (dialect, text, begins) in alike(),
        event_bytes in prop_oneof![40..160usize, Just(65536)],
    ) {
        let whole = said(dialect, event_bytes, vec![&text]);
        let cut = chunks_at(&text, begins.iter().map(|begin| begin + 3));
        prop_assert_eq!(said(dialect, event_bytes, cut), whole);
    }

    #[test]
    fn must_6_a_boundary_is_where_a_blank_line_ended(
        text in stream(),
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..12),
        event_bytes in prop_oneof![Just(0), 1..100usize, Just(65536)],
    ) {
        let ends = blank_lines(&text);
        let mut scanner = StreamScanner::new(Dialect::OpenAi, event_bytes);
        let (mut sent, mut pushed) = (0, 0);
        for chunk in chunks(&text, &cuts) {
            pushed += chunk.len();
            scanner.push(Bytes::copy_from_slice(chunk));
            while let Some(piece) = scanner.pop() {
                sent += piece.bytes.len();
                let special = piece.facts.usage_only || piece.facts.error.is_some();
                prop_assert!(!special || piece.facts.events <= 1);
            }
            prop_assert_eq!(scanner.held_bytes(), pushed - sent);
            prop_assert!(scanner.held_bytes() <= event_bytes);
            // The CR of a CRLF that is cut there is the one end of which the scanner may not be sure.
            let half = text[..sent].ends_with(b"\r");
            if scanner.at_boundary() {
                prop_assert!(ends.contains(&sent) || (half && ends.contains(&(sent + 1))), "{} of {:?}", sent, ends);
            } else {
                prop_assert!(half || !ends.contains(&sent), "{} of {:?}", sent, ends);
            }
        }
    }
}
