//! How the bytes of an answer are understood while they pass.

use std::collections::VecDeque;

use bytes::Bytes;
use tidegate_wire::{Piece, StreamScanner};

/// How the bytes are understood.
#[derive(Debug)]
pub enum Source {
    Events {
        scanner: Box<StreamScanner>,
        first: Option<Piece>,
        strip_usage: bool,
        finished: bool,
    },
    Plain {
        ready: VecDeque<Bytes>,
        observed: Vec<Bytes>,
        observed_bytes: usize,
        json: bool,
        length: Option<u64>,
    },
}

/// Up to this much of a plain answer is kept to read usage from.
const OBSERVED_BYTES: usize = 1024 * 1024;

impl Source {
    pub fn events(scanner: StreamScanner, first: Option<Piece>, strip_usage: bool) -> Self {
        Self::Events {
            scanner: Box::new(scanner),
            first,
            strip_usage,
            finished: false,
        }
    }

    /// Looks at bytes that pass, as long as they may be JSON with usage in it and are not too many.
    pub fn observe(&mut self, bytes: &Bytes) {
        let Self::Plain {
            observed,
            observed_bytes,
            json: true,
            ..
        } = self
        else {
            return;
        };
        *observed_bytes += bytes.len();
        if *observed_bytes <= OBSERVED_BYTES {
            observed.push(bytes.clone());
        } else {
            *observed = Vec::new();
        }
    }

    /// All that was seen; nothing if it was too much.
    pub fn observed(&mut self) -> Vec<u8> {
        match self {
            Self::Plain { observed, .. } => std::mem::take(observed).concat(),
            Self::Events { .. } => Vec::new(),
        }
    }

    /// `rest`: how many bytes the server still announces. `json`: they may say what was used.
    pub fn plain(gathered: Vec<Bytes>, rest: Option<u64>, json: bool) -> Self {
        let gathered_bytes: usize = gathered.iter().map(Bytes::len).sum();
        let length = rest.map(|rest| rest + gathered_bytes as u64);
        Self::Plain {
            ready: gathered.into(),
            observed: Vec::new(),
            observed_bytes: 0,
            json,
            length,
        }
    }
}
