//! A limit that finds itself, as an option.
//!
//! It is driven by how long the upstream takes to *begin* to answer and by what it reports, never by how
//! long a stream lives: that depends on the length of the answer, not on the load. Calls that have not
//! been answered yet count with their age, so an upstream that answers nobody looks slow, not silent.

use std::num::NonZeroUsize;
use std::time::Duration;

use crate::limiter::Limiter;
use crate::snapshot::Snapshot;

/// A window is judged after so many samples.
const WINDOW: usize = 16;

/// Slow is a median above so many times the baseline.
const SLOW: f64 = 2.0;

/// What is left of the limit after a slow window, and after one in which the upstream complained.
const AFTER_SLOW: f64 = 0.9;
const AFTER_COMPLAINTS: f64 = 0.7;

/// Above this share of complaints in a window the limit goes down.
const COMPLAINTS: f64 = 0.1;

/// How far the baseline follows an upstream that has become slower without our load, per window.
const FORGET: f64 = 1.01;

/// Above this share of abandoned calls the limit is not raised.
const LEFTOVERS: f64 = 0.25;

/// Finds a limit between a floor and a ceiling: one up after a good window, a tenth down after a slow
/// one, three tenths down when the upstream complains. Frozen while the callers do not use it.
///
/// Owns no limiter and no timer: feed it samples, and let [`apply`](Self::apply) set the limit now and
/// then.
///
/// ```
/// use std::num::NonZeroUsize;
/// use std::time::Duration;
/// use tidegate_limiter::{Adaptive, Limiter, Limits, Sample};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let at = |n| NonZeroUsize::new(n).ok_or("zero");
/// let limiter = Limiter::new(Limits::new(at(8)?))?;
/// let mut adaptive = Adaptive::new(at(2)?, at(64)?, at(8)?);
/// for _ in 0..16 {
///     adaptive.sample(Sample::Complaint); // a 429 or 503 of the upstream's own
/// }
/// adaptive.apply(&limiter);
/// assert_eq!(limiter.limits().limit, at(5)?);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Adaptive {
    floor: f64,
    ceiling: f64,
    limit: f64,
    /// What the upstream takes when it is not loaded, in seconds.
    baseline: Option<f64>,
    /// Of this window, in seconds; complaints apart.
    seconds: Vec<f64>,
    complaints: usize,
    /// The most attended calls seen in this window.
    used: usize,
}

/// One observation of the upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sample {
    /// It took so long from the slot to the first of the answer.
    Answered(Duration),
    /// It has not answered for so long, and still owes the answer.
    Unanswered(Duration),
    /// It said that it has too much to do.
    Complaint,
}

// === impl Adaptive ===

impl Adaptive {
    /// Begins at `start`, held between `floor` and `ceiling`. A ceiling below the floor is the floor.
    #[must_use]
    pub fn new(floor: NonZeroUsize, ceiling: NonZeroUsize, start: NonZeroUsize) -> Self {
        let floor = floor.get() as f64;
        let ceiling = (ceiling.get() as f64).max(floor);
        Self {
            floor,
            ceiling,
            limit: (start.get() as f64).clamp(floor, ceiling),
            baseline: None,
            seconds: Vec::with_capacity(WINDOW),
            complaints: 0,
            used: 0,
        }
    }

    /// Takes in one observation.
    pub fn sample(&mut self, sample: Sample) {
        if self.seconds.len() + self.complaints >= 4 * WINDOW {
            return; // nobody has asked for a judgement for long: the oldest will do
        }
        match sample {
            Sample::Answered(time) => self.seconds.push(time.as_secs_f64()),
            Sample::Complaint => self.complaints += 1,
            Sample::Unanswered(age) => {
                let age = age.as_secs_f64();
                // Not yet answered says something only once it is late.
                if self.baseline.is_none_or(|baseline| age > baseline) {
                    self.seconds.push(age);
                }
            }
        }
    }

    /// The limit it would set now, in calls.
    #[must_use]
    pub fn limit(&self) -> NonZeroUsize {
        // The floor is at least one and the ceiling fits a usize.
        NonZeroUsize::new(self.limit as usize).unwrap_or(NonZeroUsize::MIN)
    }

    /// Judges the window if there is enough in it. `now` says how much of the limit is used.
    pub fn judge(&mut self, now: &Snapshot) -> NonZeroUsize {
        self.used = self.used.max(now.attended + now.queued);
        let samples = self.seconds.len() + self.complaints;
        if samples < WINDOW {
            return self.limit();
        }
        let complaining = self.complaints as f64 > COMPLAINTS * samples as f64;
        let median = median(&mut self.seconds);
        let slow = median.is_some_and(|median| self.is_slow(median));
        let used = self.used as f64 >= self.limit.floor();
        if complaining {
            self.limit *= AFTER_COMPLAINTS;
        } else if slow {
            self.limit *= AFTER_SLOW;
        } else if used && !mostly_leftovers(now) {
            self.limit += 1.0;
        }
        self.limit = self.limit.clamp(self.floor, self.ceiling);
        if let Some(median) = median {
            self.learn(median, used);
        }
        self.seconds.clear();
        self.complaints = 0;
        self.used = 0;
        self.limit()
    }

    /// Judges, and sets the limiter's limit. The allowance for leftovers, `hard_limit - limit`, stays.
    pub fn apply(&mut self, limiter: &Limiter) {
        let old = limiter.limits();
        let limit = self.judge(&limiter.snapshot());
        if limit == old.limit {
            return;
        }
        let allowance = old.hard_limit.get() - old.limit.get();
        let mut new = old;
        new.limit = limit;
        new.hard_limit = limit.saturating_add(allowance);
        let _unless_above_the_largest = limiter.resize(new);
    }

    fn is_slow(&self, median: f64) -> bool {
        self.baseline
            .is_some_and(|baseline| median > SLOW * baseline)
    }

    /// While the limit is used, a slower upstream may be our doing, and the baseline stays. At the floor,
    /// or with room to spare, it is not, and the baseline follows.
    fn learn(&mut self, median: f64, used: bool) {
        let old = self.baseline.unwrap_or(median);
        let most = if self.limit <= self.floor {
            median
        } else if used {
            old
        } else {
            old * FORGET
        };
        self.baseline = Some(median.min(most));
    }
}

fn mostly_leftovers(now: &Snapshot) -> bool {
    (now.abandoned + now.lingering) as f64 > LEFTOVERS * (now.running + now.lingering) as f64
}

fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(all(test, not(any(loom, shuttle, protocol))))]
mod tests {
    use super::*;
    use crate::Limits;

    fn at(count: usize) -> NonZeroUsize {
        NonZeroUsize::new(count).expect("not zero")
    }

    /// A snapshot of a limiter with so many attended calls.
    fn busy(attended: usize) -> Snapshot {
        let limiter = Limiter::new(Limits::new(at(1))).expect("sound limits");
        let mut now = limiter.snapshot();
        now.attended = attended;
        now.running = attended;
        now
    }

    /// An upstream that answers in 100 ms up to its capacity and in proportion slower above.
    fn windows(adaptive: &mut Adaptive, capacity: usize, demand: usize, windows: usize) {
        for _ in 0..windows {
            let running = demand.min(adaptive.limit().get());
            let factor = (running as f64 / capacity as f64).max(1.0);
            for _ in 0..WINDOW {
                adaptive.sample(Sample::Answered(Duration::from_secs_f64(0.1 * factor)));
            }
            adaptive.judge(&busy(running));
        }
    }

    #[test]
    fn it_settles_where_the_upstream_gets_slow() {
        let mut adaptive = Adaptive::new(at(1), at(200), at(4));
        windows(&mut adaptive, 20, 1_000, 300);
        let limit = adaptive.limit().get();
        assert!((30..=45).contains(&limit), "{limit} of a capacity of 20");
    }

    #[test]
    fn it_follows_a_capacity_that_is_cut_and_comes_back() {
        let mut adaptive = Adaptive::new(at(2), at(200), at(20));
        windows(&mut adaptive, 20, 1_000, 100);
        windows(&mut adaptive, 5, 1_000, 20);
        let cut = adaptive.limit().get();
        assert!(cut <= 12, "{cut} of a capacity of 5");
        windows(&mut adaptive, 20, 1_000, 100);
        let back = adaptive.limit().get();
        assert!(back >= 25, "{back} of a capacity of 20");
    }

    #[test]
    fn it_is_frozen_while_the_callers_do_not_use_it() {
        let mut adaptive = Adaptive::new(at(1), at(200), at(10));
        windows(&mut adaptive, 20, 3, 100);
        assert_eq!(adaptive.limit().get(), 10);
    }

    #[test]
    fn an_upstream_that_answers_nobody_is_slow_and_not_silent() {
        let mut adaptive = Adaptive::new(at(2), at(200), at(10));
        windows(&mut adaptive, 100, 1_000, 20);
        for _ in 0..40 {
            for _ in 0..WINDOW {
                adaptive.sample(Sample::Unanswered(Duration::from_secs(30)));
            }
            adaptive.judge(&busy(30));
            if adaptive.limit().get() == 2 {
                return;
            }
        }
        panic!("{adaptive:?}");
    }

    #[test]
    fn it_keeps_between_floor_and_ceiling() {
        let mut adaptive = Adaptive::new(at(3), at(8), at(100));
        assert_eq!(adaptive.limit().get(), 8);
        windows(&mut adaptive, 100, 1_000, 50);
        assert_eq!(adaptive.limit().get(), 8);
        for _ in 0..50 * WINDOW {
            adaptive.sample(Sample::Complaint);
            adaptive.judge(&busy(8));
        }
        assert_eq!(adaptive.limit().get(), 3);
    }

    #[test]
    fn leftovers_keep_it_from_rising() {
        let mut adaptive = Adaptive::new(at(1), at(200), at(10));
        let mut now = busy(5);
        now.running = 10;
        now.abandoned = 5;
        now.queued = 10;
        for _ in 0..10 * WINDOW {
            adaptive.sample(Sample::Answered(Duration::from_millis(100)));
            adaptive.judge(&now);
        }
        assert_eq!(adaptive.limit().get(), 10);
    }

    #[test]
    fn it_keeps_the_allowance_for_leftovers() {
        let limits = Limits::new(at(10)).with_hard_limit(at(13));
        let limiter = Limiter::new(limits).expect("sound limits");
        let mut adaptive = Adaptive::new(at(1), at(200), at(10));
        for _ in 0..WINDOW {
            adaptive.sample(Sample::Complaint);
        }
        adaptive.apply(&limiter);
        let now = limiter.limits();
        assert_eq!((now.limit.get(), now.hard_limit.get()), (7, 10));
    }
}
