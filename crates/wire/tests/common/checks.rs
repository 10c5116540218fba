//! What must hold for any bytes. Run by the fuzz targets and, over a small corpus, by `tests/smoke.rs`.
#![allow(dead_code, reason = "each user runs its part")]

use bytes::Bytes;
use serde_json::Value;
use tidegate_wire::{
    Assembler, Dialect, Edit, Facts, Form, StreamScanner, Wrapped, answer_facts,
    anthropic_models_body, models_body, parse_models, peek, splice, wrap_error,
};

const DIALECTS: [Dialect; 3] = [Dialect::OpenAi, Dialect::Responses, Dialect::Anthropic];

/// Pops everything, checking the bytes; gives the facts added up.
fn scan(
    dialect: Dialect,
    event_bytes: usize,
    text: &[u8],
    sizes: &mut dyn FnMut() -> usize,
) -> (Vec<u8>, Facts) {
    let mut scanner = StreamScanner::new(dialect, event_bytes);
    let (mut out, mut sum) = (Vec::new(), Facts::default());
    let mut take = |piece: tidegate_wire::Piece| {
        let facts = piece.facts;
        out.extend_from_slice(&piece.bytes);
        sum.events += facts.events;
        sum.deltas += facts.deltas;
        sum.malformed += facts.malformed;
        assert!(!(facts.content && sum.content), "content is first once");
        sum.content |= facts.content;
        sum.finished |= facts.finished;
        sum.terminal = sum.terminal.or(facts.terminal);
        if let Some(usage) = facts.usage {
            sum.usage.get_or_insert_default().merge(&usage);
        }
        assert!(
            !(facts.usage_only || facts.error.is_some()) || facts.events <= 1,
            "a piece of its own"
        );
        sum.usage_only |= facts.usage_only && facts.events == 1;
        sum.error = sum.error.take().or(facts.error);
    };
    let mut rest = Bytes::copy_from_slice(text);
    while !rest.is_empty() {
        let size = sizes().clamp(1, rest.len());
        scanner.push(rest.split_to(size));
        while let Some(piece) = scanner.pop() {
            take(piece);
        }
        assert!(scanner.held_bytes() <= event_bytes, "bounded");
    }
    while let Some(piece) = scanner.finish() {
        take(piece);
    }
    assert_eq!(scanner.held_bytes(), 0);
    (out, sum)
}

/// Two bytes of choices, then a stream.
pub(crate) fn sse_scan(data: &[u8]) {
    let [how, seed, text @ ..] = data else { return };
    let event_bytes = [0, 1, 7, 40, 200, 1000, 65_536][usize::from(how >> 2) % 7];
    let mut state = u32::from(*seed) + 1;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        1 + (state >> 24) as usize % if seed % 2 == 0 { 4 } else { 60 }
    };
    for dialect in [DIALECTS[usize::from(how % 3)], Dialect::OpenAi] {
        let (whole, facts) = scan(dialect, event_bytes, text, &mut || usize::MAX);
        assert_eq!(whole, text);
        let (cut, cut_facts) = scan(dialect, event_bytes, text, &mut random);
        assert_eq!(cut, text);
        assert_eq!(cut_facts, facts);
    }
}

/// A request body.
pub(crate) fn peek_splice(data: &[u8]) {
    let body = Bytes::copy_from_slice(data);
    let valid = std::str::from_utf8(data).ok().filter(|text| {
        text.trim_ascii_start().starts_with('{')
            && serde_json::from_str::<&serde_json::value::RawValue>(text).is_ok()
    });
    for dialect in DIALECTS {
        let found = match peek(&body, dialect) {
            Ok(found) => found,
            Err(error) => {
                let reason = error.param.is_some() || error.what.contains("nested");
                assert!(valid.is_none() || reason, "valid, but {error}");
                assert!(error.offset <= data.len() && error.line > 0 && error.column > 0);
                continue;
            }
        };
        assert!(valid.is_some(), "not JSON, but read");
        assert_eq!(splice(&body, &found, &[]), body);
        let out = splice(
            &body,
            &found,
            &[Edit::Model("n\"\u{e9}"), Edit::Stream, Edit::IncludeUsage],
        );
        let again = peek(&out, dialect);
        let again = again
            .as_ref()
            .map(|p| (p.model.as_deref(), p.include_usage, p.stream, p.max_tokens));
        let usage = (dialect == Dialect::OpenAi).then_some(true);
        assert_eq!(
            again,
            Ok((Some("n\"\u{e9}"), usage, true, found.max_tokens))
        );
        if let (Ok(mut before), Ok(mut after)) = (parsed(&body), parsed(&out)) {
            for value in [&mut before, &mut after] {
                let Value::Object(map) = value else { continue };
                map.remove("model");
                map.remove("stream");
                if let Some(Value::Object(options)) = map.get_mut("stream_options") {
                    options.remove("include_usage");
                }
                map.retain(|key, value| {
                    key != "stream_options" || value.as_object().is_some_and(|o| !o.is_empty())
                });
            }
            if dialect == Dialect::OpenAi {
                assert_eq!(before, after);
            }
        }
    }
}

fn parsed(text: &[u8]) -> serde_json::Result<Value> {
    serde_json::from_slice(text)
}

/// An answer, an error page, or a model list.
pub(crate) fn bodies(data: &[u8]) {
    let status = 400 + data.first().map_or(0, |byte| u16::from(*byte) % 200);
    for dialect in DIALECTS {
        let facts = answer_facts(dialect, data);
        assert!(!(facts.is_error && facts.finished));
        if let Wrapped::Replaced(body) = wrap_error(dialect, status, Some("text/x"), data) {
            let value = parsed(&body).unwrap_or_default();
            assert!(
                value["error"]["message"]
                    .as_str()
                    .is_some_and(|message| !message.is_empty()),
                "{value}"
            );
            assert_eq!(
                wrap_error(dialect, status, None, &body),
                Wrapped::AsIs,
                "wrapped once is enough"
            );
        }
    }
    if let Ok(entries) = parse_models(data) {
        let ids = |entries: &[tidegate_wire::ModelEntry]| {
            entries.iter().map(|e| e.id.clone()).collect::<Vec<_>>()
        };
        let again = parse_models(&models_body(entries.iter())).unwrap_or_default();
        assert_eq!(ids(&again), ids(&entries));
        let again = parse_models(&anthropic_models_body(entries.iter())).unwrap_or_default();
        assert_eq!(ids(&again), ids(&entries));
        for entry in &entries {
            let renamed = entry.renamed("r");
            let value: Result<Value, _> = serde_json::from_str(renamed.raw.get());
            assert!(value.is_err() || value.is_ok_and(|value| value["id"] == "r"));
        }
    }
}

/// A byte of choices, a size of pieces, then a stream.
pub(crate) fn assemble(data: &[u8]) {
    let [how, size, text @ ..] = data else { return };
    let dialect = DIALECTS[usize::from(how % 3)];
    let form = [Form::Standard, Form::LlamaCpp, Form::Vllm][usize::from(how / 3 % 3)];
    let run = |size: usize| {
        let mut assembler = Assembler::new(dialect, form, 2000);
        for chunk in text.chunks(size) {
            assembler.push(Bytes::copy_from_slice(chunk));
            while assembler.take().ok()?.is_some() {}
        }
        assembler.finish().ok()
    };
    let whole = run(text.len().max(1));
    assert_eq!(
        run(usize::from(*size).max(1)),
        whole,
        "the same however it is cut"
    );
    if let Some(whole) = whole {
        let text = String::from_utf8_lossy(&whole);
        let json = serde_json::from_str::<serde::de::IgnoredAny>(&text);
        assert!(json.is_ok(), "{text}");
    }
}
