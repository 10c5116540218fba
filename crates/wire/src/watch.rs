//! Watches an event too long to be held: the little that must not be missed, in bounded memory.

use crate::Dialect;
use crate::inspect::responses_terminal;
use crate::sse::Block;
use crate::stream::{Facts, Terminal};

const HEAD: usize = 256;

#[derive(Debug)]
pub(crate) struct Watch {
    head: Vec<u8>,
}

impl Watch {
    pub(crate) const fn new() -> Self {
        Self { head: Vec::new() }
    }

    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        let room = HEAD.saturating_sub(self.head.len()).min(bytes.len());
        self.head
            .extend_from_slice(bytes.get(..room).unwrap_or_default());
    }

    pub(crate) fn facts(self, dialect: Dialect) -> Facts {
        let block = Block::read(&self.head, true);
        let terminal = match dialect {
            Dialect::Responses => responses_terminal(block.name),
            Dialect::OpenAi | Dialect::Anthropic => None,
        };
        Facts {
            events: 1,
            finished: terminal == Some(Terminal::Done),
            terminal,
            ..Facts::default()
        }
    }
}
