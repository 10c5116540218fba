//! What the stream tests share.
#![allow(dead_code, reason = "each test file uses its part")]

use bytes::Bytes;
use tidegate_wire::{Dialect, Facts, Piece, StreamError, StreamScanner, Terminal, Usage};

pub(crate) const EVENT_BYTES: usize = 64 * 1024;

/// Everything a scan showed, added up; independent of where pieces were cut.
#[derive(Debug, Default, PartialEq, Eq, Clone)]
pub(crate) struct Totals {
    pub(crate) events: u32,
    pub(crate) content: u32,
    pub(crate) deltas: u32,
    pub(crate) finished: bool,
    pub(crate) terminals: Vec<Terminal>,
    pub(crate) errors: Vec<StreamError>,
    pub(crate) usage: Option<Usage>,
    pub(crate) usage_only: u32,
    pub(crate) malformed: u32,
}

impl Totals {
    pub(crate) fn add(&mut self, facts: &Facts) {
        self.events += facts.events;
        self.content += u32::from(facts.content);
        self.deltas += facts.deltas;
        self.finished |= facts.finished;
        self.terminals.extend(facts.terminal);
        self.errors.extend(facts.error.as_deref().cloned());
        if let Some(usage) = &facts.usage {
            self.usage.get_or_insert_default().merge(usage);
        }
        self.usage_only += u32::from(facts.usage_only && facts.events > 0);
        self.malformed += facts.malformed;
    }
}

pub(crate) fn totals(pieces: &[Piece]) -> Totals {
    let mut totals = Totals::default();
    for piece in pieces {
        totals.add(&piece.facts);
    }
    totals
}

/// Pushes the chunks one by one, popping all there is after each, and finishes.
pub(crate) fn scan_chunks<'a>(
    dialect: Dialect,
    event_bytes: usize,
    chunks: impl IntoIterator<Item = &'a [u8]>,
) -> Vec<Piece> {
    let mut scanner = StreamScanner::new(dialect, event_bytes);
    let pieces = scan_with(&mut scanner, chunks);
    assert_eq!(scanner.held_bytes(), 0);
    pieces
}

pub(crate) fn scan_with<'a>(
    scanner: &mut StreamScanner,
    chunks: impl IntoIterator<Item = &'a [u8]>,
) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for chunk in chunks {
        scanner.push(Bytes::copy_from_slice(chunk));
        pieces.extend(std::iter::from_fn(|| scanner.pop()));
    }
    pieces.extend(std::iter::from_fn(|| scanner.finish()));
    pieces
}

pub(crate) fn scan(dialect: Dialect, bytes: &[u8]) -> Vec<Piece> {
    scan_chunks(dialect, EVENT_BYTES, [bytes])
}

pub(crate) fn joined(pieces: &[Piece]) -> Vec<u8> {
    pieces
        .iter()
        .flat_map(|piece| piece.bytes.iter().copied())
        .collect()
}

pub(crate) fn usage(input: u64, output: u64) -> Usage {
    Usage {
        input: Some(input),
        output: Some(output),
        ..Usage::default()
    }
}

/// A chat chunk with this text.
pub(crate) fn chat(text: &str) -> String {
    format!(
        "data: {{\"id\":\"c1\",\"object\":\"chat.completion.chunk\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":{}}},\"finish_reason\":null}}]}}\n\n",
        serde_json::Value::from(text)
    )
}

pub(crate) const DONE: &str = "data: [DONE]\n\n";
