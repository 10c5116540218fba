//! Token counts as the upstream reports them, in one meaning for all dialects.

use crate::Dialect;
use crate::json::{Cursor, Fault};

/// Tokens of one call. `None` is "not reported", never zero.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// All input tokens, those read from or written to a cache included.
    pub input: Option<u64>,
    /// All output tokens, reasoning included.
    pub output: Option<u64>,
    /// The part of `input` that came from a cache.
    pub cached_input: Option<u64>,
    /// The part of `output` that was reasoning.
    pub reasoning: Option<u64>,
}

impl Usage {
    /// Takes what `later` reports over what is known. Reports are cumulative: the latest of each field counts.
    pub const fn merge(&mut self, later: &Self) {
        later_wins(&mut self.input, later.input);
        later_wins(&mut self.output, later.output);
        later_wins(&mut self.cached_input, later.cached_input);
        later_wins(&mut self.reasoning, later.reasoning);
    }

    /// Nothing is reported.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

const fn later_wins(known: &mut Option<u64>, later: Option<u64>) {
    if later.is_some() {
        *known = later;
    }
}

/// How far a [`Usage`] can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UsageSource {
    /// The upstream said so.
    Reported,
    /// Deltas were counted on the way through. A delta may hold several tokens.
    Counted,
    /// Nobody knows.
    Unknown,
}

impl UsageSource {
    /// The word used in the ledger and in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Reported => "reported",
            Self::Counted => "counted",
            Self::Unknown => "unknown",
        }
    }
}

/// A usage object field by field, before the dialects' meanings are made one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RawUsage {
    input: Option<u64>,
    output: Option<u64>,
    total: Option<u64>,
    cache_read: Option<u64>,
    cache_write: Option<u64>,
    reasoning: Option<u64>,
}

impl RawUsage {
    pub(crate) const NONE: Self = Self {
        input: None,
        output: None,
        total: None,
        cache_read: None,
        cache_write: None,
        reasoning: None,
    };

    pub(crate) const fn merge(&mut self, later: &Self) {
        later_wins(&mut self.input, later.input);
        later_wins(&mut self.output, later.output);
        later_wins(&mut self.total, later.total);
        later_wins(&mut self.cache_read, later.cache_read);
        later_wins(&mut self.cache_write, later.cache_write);
        later_wins(&mut self.reasoning, later.reasoning);
    }

    /// In the common meaning. Anthropic counts cached input beside `input_tokens`, the others within.
    pub(crate) fn normal(&self, dialect: Dialect) -> Option<Usage> {
        let input = match dialect {
            Dialect::Anthropic => self.input.map(|input| {
                input
                    .saturating_add(self.cache_read.unwrap_or(0))
                    .saturating_add(self.cache_write.unwrap_or(0))
            }),
            Dialect::OpenAi | Dialect::Responses => self.input,
        };
        // Embeddings report a total and no output.
        let rest = self
            .total
            .zip(input)
            .and_then(|(total, input)| total.checked_sub(input));
        let output = self.output.or(rest);
        let usage = Usage {
            input,
            output,
            cached_input: self.cache_read,
            reasoning: self.reasoning,
        };
        (!usage.is_empty()).then_some(usage)
    }
}

/// Reads the object under a `usage` key; null and other types give nothing.
pub(crate) fn read_usage(cursor: &mut Cursor<'_>) -> Result<Option<RawUsage>, Fault> {
    let mut raw = RawUsage::default();
    let object = cursor.object_or_skip(|c, key| {
        let number = if key == b"prompt_tokens" || key == b"input_tokens" {
            &mut raw.input
        } else if key == b"completion_tokens" || key == b"output_tokens" {
            &mut raw.output
        } else if key == b"total_tokens" {
            &mut raw.total
        } else if key == b"cache_read_input_tokens" || key == b"prompt_cache_hit_tokens" {
            &mut raw.cache_read
        } else if key == b"cache_creation_input_tokens" {
            &mut raw.cache_write
        } else if key == b"prompt_tokens_details" || key == b"input_tokens_details" {
            return detail(c, b"cached_tokens", &mut raw.cache_read);
        } else if key == b"completion_tokens_details" || key == b"output_tokens_details" {
            return detail(c, b"reasoning_tokens", &mut raw.reasoning);
        } else {
            return c.skip();
        };
        later_wins(number, c.whole_number()?);
        Ok(())
    })?;
    Ok(object.then_some(raw))
}

fn detail(cursor: &mut Cursor<'_>, word: &[u8], into: &mut Option<u64>) -> Result<(), Fault> {
    cursor
        .object_or_skip(|c, key| {
            if key == word {
                later_wins(into, c.whole_number()?);
                return Ok(());
            }
            c.skip()
        })
        .map(|_| ())
}
