//! What a call used, and how that is known.

use tidegate_wire::{Facts, Usage, UsageSource};

/// Reads usage off the answer as it passes.
// In this order: what each chunk touches stands first.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Meter {
    events: u64,
    deltas: u64,
    /// Of those, the ones that came after the last report of output.
    unreported: u64,
    /// Deltas seen when the wait ended.
    at_left: Option<u64>,
    reported: Option<Usage>,
}

/// The numbers and their standing.
#[derive(Clone, Debug, PartialEq)]
pub struct Settled {
    pub usage: Usage,
    pub source: UsageSource,
}

impl Meter {
    pub fn see(&mut self, facts: &Facts) {
        self.events += u64::from(facts.events);
        self.deltas += u64::from(facts.deltas);
        self.unreported += u64::from(facts.deltas);
        if let Some(usage) = &facts.usage {
            self.report(usage);
        }
    }

    /// The upstream's own numbers; a later report completes an earlier one.
    pub fn report(&mut self, usage: &Usage) {
        if usage.output.is_some() {
            self.unreported = 0;
        }
        match &mut self.reported {
            Some(known) => known.merge(usage),
            None => self.reported = Some(*usage),
        }
    }

    /// The wait has ended: what comes from now on is for nobody. The first word stands.
    pub fn left(&mut self) {
        self.at_left.get_or_insert(self.deltas);
    }

    /// Somebody waits again, and gets what came meanwhile.
    pub fn back(&mut self) {
        self.at_left = None;
    }

    pub fn deltas(&self) -> u64 {
        self.deltas
    }

    /// Deltas that came for nobody.
    pub fn since_left(&self) -> u64 {
        self.at_left.map_or(0, |before| self.deltas - before)
    }

    pub fn events(&self) -> u64 {
        self.events
    }

    /// Reported numbers win. Without them the deltas seen are counted, and said to be counted: a delta is at least one token, and one
    /// delta may hold several (measured on vLLM under load), so the count is a lower bound. The same holds for a stream that was cut after an
    /// early report (Anthropic's first event has one). No delta, no report: unknown, not zero.
    pub fn settle(&self) -> Settled {
        match &self.reported {
            Some(usage) if usage.output.is_some() && self.unreported == 0 => Settled {
                usage: *usage,
                source: UsageSource::Reported,
            },
            _ if self.deltas > 0 => {
                let mut usage = self.reported.unwrap_or_default();
                usage.output = usage.output.max(Some(self.deltas));
                Settled {
                    usage,
                    source: UsageSource::Counted,
                }
            }
            Some(usage) => Settled {
                usage: *usage,
                source: UsageSource::Reported,
            },
            None => Settled {
                usage: Usage::default(),
                source: UsageSource::Unknown,
            },
        }
    }
}
