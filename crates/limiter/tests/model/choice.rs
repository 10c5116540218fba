//! What a sequence does, read from random words.

use std::num::NonZeroUsize;
use std::time::Duration;

use tidegate_limiter::{Class, Ended, Limits};

use crate::naive::Asked;

/// A source of choices, made from one random word.
pub(crate) struct Choice(pub(crate) u32);

impl Choice {
    pub(crate) fn of(&mut self, options: u32) -> u32 {
        let chosen = self.0 % options;
        self.0 /= options;
        chosen
    }

    pub(crate) fn below(&mut self, options: usize) -> usize {
        self.of(u32::try_from(options).expect("few")) as usize
    }

    pub(crate) fn ended(&mut self) -> Ended {
        [Ended::Ok, Ended::Error, Ended::Cancelled, Ended::Panicked][self.below(4)]
    }

    pub(crate) fn limits(&mut self) -> Limits {
        let limit = 1 + self.below(3);
        let hard_limit = limit + self.below(3);
        let calls = |count| NonZeroUsize::new(count).expect("not zero");
        let limits = Limits::new(calls(limit))
            .with_hard_limit(calls(hard_limit))
            .with_queue(self.below(6))
            .with_queue_bytes([10, 60, 1_000][self.below(3)])
            .with_flow_queue([1, 2, usize::MAX][self.below(3)])
            .with_flow_limit([calls(1), calls(2), NonZeroUsize::MAX][self.below(3)])
            .with_flow_abandoned([calls(1), calls(2), NonZeroUsize::MAX][self.below(3)]);
        let limits = match self.of(3) {
            0 => limits.with_queue_time(Duration::from_millis(200)),
            _ => limits,
        };
        if self.of(2) == 0 {
            limits.with_target_delay(Duration::from_millis(20))
        } else {
            limits
        }
    }

    pub(crate) fn ask(&mut self, now: Duration) -> Asked {
        let late = self.of(2) == 0;
        Asked {
            bytes: u64::from(self.of(4)) * 10,
            weight: [1, 1, 1, 2, 5][self.below(5)],
            class: Class::ALL[self.below(3)],
            flow: u64::from(self.of(3)),
            deadline: late.then(|| now + Duration::from_millis([0, 10, 300, 3_000][self.below(4)])),
        }
    }
}
