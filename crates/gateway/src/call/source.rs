//! How the bytes of an answer are understood while they pass.

use std::collections::VecDeque;

use bytes::Bytes;
use tidegate_wire::{Dialect, Piece, StreamScanner, answer_facts};

use crate::usage::Meter;

/// How the bytes are understood.
#[derive(Debug)]
pub enum Source {
    Events {
        scanner: Box<StreamScanner>,
        /// What the head was held back for. Boxed: the relay asks for it at each chunk.
        first: Option<Box<Piece>>,
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
            first: first.map(Box::new),
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

    /// What is left of a source that was handed on.
    pub fn nothing() -> Self {
        Self::plain(Vec::new(), None, false)
    }

    /// Looks at what was read for nobody; true at the terminal event.
    pub fn see(&mut self, data: Bytes, meter: &mut Meter) -> bool {
        let (scanner, first) = match self {
            Self::Events { scanner, first, .. } => (scanner, first),
            Self::Plain { ready, .. } => {
                ready.push_back(data);
                self.see_ready();
                return false;
            }
        };
        scanner.push(data);
        let mut ended = false;
        while let Some(piece) = first.take().map(|first| *first).or_else(|| scanner.pop()) {
            meter.see(&piece.facts);
            ended |= piece.facts.terminal.is_some();
        }
        ended
    }

    /// Looks at what had come and was not passed on.
    fn see_ready(&mut self) {
        while let Self::Plain { ready, .. } = self {
            let Some(bytes) = ready.pop_front() else {
                return;
            };
            self.observe(&bytes);
        }
    }

    /// The body has ended: what was used, if it says so.
    pub fn see_end(&mut self, dialect: Dialect, meter: &mut Meter) {
        self.see_ready();
        match self {
            Self::Events { scanner, .. } => {
                if let Some(rest) = scanner.finish() {
                    meter.see(&rest.facts);
                }
            }
            Self::Plain { .. } => {
                if let Some(usage) = answer_facts(dialect, &self.observed()).usage {
                    meter.report(&usage);
                }
            }
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
