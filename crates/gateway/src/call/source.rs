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
        length: Option<u64>,
    },
}

impl Source {
    pub fn events(scanner: StreamScanner, first: Option<Piece>, strip_usage: bool) -> Self {
        Self::Events {
            scanner: Box::new(scanner),
            first,
            strip_usage,
            finished: false,
        }
    }

    /// `rest`: how many bytes the server still announces.
    pub fn plain(gathered: Vec<Bytes>, rest: Option<u64>) -> Self {
        let gathered_bytes: usize = gathered.iter().map(Bytes::len).sum();
        let length = rest.map(|rest| rest + gathered_bytes as u64);
        Self::Plain {
            ready: gathered.into(),
            observed: Vec::new(),
            observed_bytes: 0,
            length,
        }
    }
}
