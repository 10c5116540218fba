//! A brown-out, simulated: what becomes of a limit of 8 when the upstream loses three quarters of its
//! capacity for half a minute, by who owns the slot and how long the queue is.
//!
//! `cargo run --release -p tidegate-limiter --example brownout [picture.svg]`
//!
//! Fails if the default does not recover to [`RECOVERED`] answers a second.
//!
//! 7 calls a second, one second of work each on average, 3 s of patience, two retries. The real limiter
//! runs on a clock of the simulation's. "The waiter owns the slot" is played by giving the slot back
//! when the waiter leaves, as most limiters do.
#![expect(clippy::print_stdout, reason = "the result of the simulation")]

use std::error::Error;
use std::fmt::Write as _;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tidegate_limiter::{
    Ask, Clock, Ended, Limiter, Limits, ManualClock, Place, Slot, Started, Waiter,
};

const STEP: Duration = Duration::from_millis(5);
const SECONDS: usize = 300;
const LIMIT: usize = 8;
const CALLS_PER_SECOND: f64 = 7.0;
const WORK_SECONDS: f64 = 1.0;
const PATIENCE_SECONDS: f64 = 3.0;
const RETRIES: u32 = 2;
const BROWN_OUT: std::ops::Range<f64> = 100.0..130.0;
const SEEDS: u64 = 5;

/// The parts of the picture whose rates are told, in seconds.
const BEFORE: std::ops::Range<usize> = 20..100;
const DURING: std::ops::Range<usize> = 100..130;
const AFTER: std::ops::Range<usize> = 160..SECONDS;

/// Nine tenths of what is offered, in answers a second.
const RECOVERED: f64 = 6.3;

#[derive(Clone, Copy)]
struct Policy {
    name: &'static str,
    waiter_owns_the_slot: bool,
    limits: Limits,
    tell_deadline: bool,
    color: &'static str,
}

/// Somebody who wants an answer, and tries again.
struct Caller {
    retries: u32,
    attempt: Attempt,
}

enum Attempt {
    Waiting {
        place: Place,
        until: f64,
    },
    Running {
        work: usize,
        waiter: Waiter,
        until: f64,
    },
    Resting {
        until: f64,
    },
    Over,
}

/// What really runs upstream, whoever waits.
struct Work {
    left: f64,
    slot: Option<Slot>,
    done: bool,
    ended: bool,
}

struct World {
    policy: Policy,
    limiter: Limiter,
    clock: Arc<ManualClock>,
    now: f64,
    callers: Vec<Caller>,
    work: Vec<Work>,
    random: Random,
    outcome: Outcome,
}

#[derive(Clone)]
struct Outcome {
    answered: Vec<f64>,
    running: Vec<f64>,
    /// The worst and the best seed after the brown-out, in answers a second.
    after: (f64, f64),
    most_running: usize,
    wasted: f64,
    worked: f64,
}

struct Random(u64);

fn main() -> Result<(), Box<dyn Error>> {
    let mut curves = Vec::new();
    println!(
        "{:<44} {:>7} {:>6} {:>27}",
        "", "most", "work", "answered a second"
    );
    println!(
        "{:<44} {:>7} {:>6} {:>8} {:>9} {:>8} {:>12}",
        "policy", "running", "wasted", "before", "brown-out", "after", "worst..best"
    );
    for policy in policies()? {
        let outcome = average(policy)?;
        println!(
            "{:<44} {:>7} {:>5.0}% {:>8.2} {:>9.2} {:>8.2} {:>12}",
            policy.name,
            outcome.most_running,
            100.0 * outcome.wasted / outcome.worked,
            outcome.rate(BEFORE),
            outcome.rate(DURING),
            outcome.rate(AFTER),
            format!("{:.2}..{:.2}", outcome.after.0, outcome.after.1),
        );
        curves.push((policy, outcome));
    }
    if let Some(path) = std::env::args().nth(1) {
        std::fs::write(&path, picture(&curves)?)?;
        println!("drawn to {path}");
    }
    let default = curves.last().map(|(_, outcome)| outcome.rate(AFTER));
    if default.is_none_or(|after| after < RECOVERED) {
        return Err(format!("the default does not recover to {RECOVERED}/s").into());
    }
    Ok(())
}

fn policies() -> Result<Vec<Policy>, Box<dyn Error>> {
    let defaults = Limits::new(NonZeroUsize::new(LIMIT).ok_or("zero")?);
    let long = defaults.with_queue(100_000);
    let policy = |name, limits, color| Policy {
        name,
        waiter_owns_the_slot: false,
        limits,
        tell_deadline: false,
        color,
    };
    Ok(vec![
        Policy {
            waiter_owns_the_slot: true,
            ..policy("the waiter owns the slot, endless queue", long, "#c0392b")
        },
        Policy {
            waiter_owns_the_slot: true,
            ..policy("the waiter owns the slot, queue of 8", defaults, "#e67e22")
        },
        policy("the work owns the slot, endless queue", long, "#8e44ad"),
        Policy {
            tell_deadline: true,
            ..policy("the same, deadlines known to the queue", long, "#2980b9")
        },
        policy(
            "the same, controlled delay of 0.1 s",
            long.with_target_delay(Duration::from_millis(100)),
            "#34495e",
        ),
        policy(
            "the work owns the slot, queue of 8: default",
            defaults,
            "#27ae60",
        ),
    ])
}

fn average(policy: Policy) -> Result<Outcome, Box<dyn Error>> {
    let mut sum = Outcome::empty();
    for seed in 1..=SEEDS {
        let one = World::new(policy, seed)?.run()?;
        let share = 1.0 / SEEDS as f64;
        let after = one.rate(AFTER);
        sum.after = (sum.after.0.min(after), sum.after.1.max(after));
        for second in 0..SECONDS {
            sum.answered[second] += one.answered[second] * share;
            sum.running[second] += one.running[second] * share;
        }
        sum.most_running = sum.most_running.max(one.most_running);
        sum.wasted += one.wasted;
        sum.worked += one.worked;
    }
    Ok(sum)
}

// === impl World ===

impl World {
    fn new(policy: Policy, seed: u64) -> Result<Self, Box<dyn Error>> {
        let clock = Arc::new(ManualClock::new());
        Ok(Self {
            policy,
            limiter: Limiter::with_clock(policy.limits, clock.clone())?,
            clock,
            now: 0.0,
            callers: Vec::new(),
            work: Vec::new(),
            random: Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15)),
            outcome: Outcome::empty(),
        })
    }

    fn run(mut self) -> Result<Outcome, Box<dyn Error>> {
        let steps = SECONDS * 1_000 / usize::try_from(STEP.as_millis())?;
        let mut next_arrival = 0.0;
        for _ in 0..steps {
            while next_arrival <= self.now {
                next_arrival += self.random.exponential(1.0 / CALLS_PER_SECOND);
                let attempt = self.attempt();
                let retries = RETRIES;
                self.callers.push(Caller { retries, attempt });
            }
            self.work_on();
            let mut callers = std::mem::take(&mut self.callers);
            for caller in &mut callers {
                self.look_after(caller);
            }
            callers.retain(|caller| !matches!(caller.attempt, Attempt::Over));
            self.callers = callers;
            self.clock.advance(STEP);
            self.now += STEP.as_secs_f64();
        }
        if let Some(broken) = self.limiter.snapshot().broken_identity() {
            return Err(broken.into());
        }
        Ok(self.outcome)
    }

    fn second(&self) -> usize {
        (self.now as usize).min(SECONDS - 1)
    }

    fn attempt(&mut self) -> Attempt {
        let mut ask = Ask::default();
        if self.policy.tell_deadline {
            let patience = Duration::from_secs_f64(PATIENCE_SECONDS);
            ask = ask.with_deadline(self.clock.now() + patience);
        }
        let until = self.now + PATIENCE_SECONDS;
        match self.limiter.offer(ask) {
            Ok(place) => Attempt::Waiting { place, until },
            Err(_) => self.rest(),
        }
    }

    fn rest(&mut self) -> Attempt {
        let until = self.now + 0.2 + self.random.exponential(0.3);
        Attempt::Resting { until }
    }

    /// All running work shares the capacity there is.
    fn work_on(&mut self) {
        let capacity = LIMIT as f64
            * if BROWN_OUT.contains(&self.now) {
                0.25
            } else {
                1.0
            };
        let running = self.work.iter().filter(|work| !work.done).count();
        let second = self.second();
        self.outcome.running[second] += running as f64 * STEP.as_secs_f64();
        self.outcome.most_running = self.outcome.most_running.max(running);
        let progress = STEP.as_secs_f64() * (capacity / running.max(1) as f64).min(1.0);
        for work in self.work.iter_mut().filter(|work| !work.done) {
            work.left -= progress;
            self.outcome.worked += progress;
            if work.ended {
                self.outcome.wasted += progress;
            }
            if work.left <= 0.0 {
                work.done = true;
                if let Some(slot) = work.slot.take() {
                    slot.finish(Ended::Ok);
                }
            }
        }
    }

    fn look_after(&mut self, caller: &mut Caller) {
        let attempt = std::mem::replace(&mut caller.attempt, Attempt::Over);
        caller.attempt = match attempt {
            Attempt::Waiting { place, until } => match self.poll(place, until) {
                Some(attempt) => attempt,
                None => self.again(caller),
            },
            Attempt::Running { work, waiter, .. } if self.work[work].done => {
                waiter.done();
                let second = self.second();
                self.outcome.answered[second] += 1.0;
                Attempt::Over
            }
            Attempt::Running { work, until, .. } if self.now >= until => {
                self.work[work].ended = true;
                if self.policy.waiter_owns_the_slot {
                    self.work[work].slot = None;
                }
                self.again(caller)
            }
            Attempt::Resting { until } if self.now >= until => {
                if caller.retries == 0 {
                    Attempt::Over
                } else {
                    caller.retries -= 1;
                    self.attempt()
                }
            }
            other => other,
        };
    }

    fn again(&mut self, caller: &Caller) -> Attempt {
        if caller.retries == 0 {
            return Attempt::Over;
        }
        self.rest()
    }

    fn poll(&mut self, mut place: Place, until: f64) -> Option<Attempt> {
        match Pin::new(&mut place).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(Started { slot, waiter, .. })) => {
                let work = self.work.len();
                self.work.push(Work {
                    left: self.random.exponential(WORK_SECONDS),
                    slot: Some(slot),
                    done: false,
                    ended: false,
                });
                Some(Attempt::Running {
                    work,
                    waiter,
                    until,
                })
            }
            Poll::Ready(Err(_)) => None,
            Poll::Pending if self.now >= until => None,
            Poll::Pending => Some(Attempt::Waiting { place, until }),
        }
    }
}

// === impl Outcome ===

impl Outcome {
    fn empty() -> Self {
        Self {
            answered: vec![0.0; SECONDS],
            running: vec![0.0; SECONDS],
            after: (f64::MAX, 0.0),
            most_running: 0,
            wasted: 0.0,
            worked: 0.0,
        }
    }

    fn rate(&self, seconds: std::ops::Range<usize>) -> f64 {
        let length = seconds.len() as f64;
        self.answered[seconds].iter().sum::<f64>() / length
    }
}

// === impl Random ===

impl Random {
    fn uniform(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.uniform()).ln()
    }
}

/// Answered calls a second over time, one line a policy.
fn picture(curves: &[(Policy, Outcome)]) -> Result<String, std::fmt::Error> {
    let (x0, y0, width, height) = (60.0, 40.0, 880.0, 320.0);
    let mut svg = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"980\" height=\"540\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"980\" height=\"540\" fill=\"white\"/>\n",
    );
    let x = |second: f64| x0 + width * second / SECONDS as f64;
    let y = |rate: f64| y0 + height * (1.0 - rate / 9.0);
    let (from, to) = (x(BROWN_OUT.start), x(BROWN_OUT.end));
    writeln!(
        svg,
        "<rect x=\"{from}\" y=\"{y0}\" width=\"{}\" height=\"{height}\" fill=\"#eeeeee\"/>\n\
         <text x=\"{x0}\" y=\"24\">answered calls a second; 7 offered; grey: a quarter of the capacity</text>",
        to - from
    )?;
    for rate in [0, 3, 6, 9] {
        let at = y(f64::from(rate));
        writeln!(
            svg,
            "<path d=\"M{x0} {at}H{}\" stroke=\"#cccccc\"/><text x=\"30\" y=\"{}\">{rate}</text>",
            x0 + width,
            at + 4.0
        )?;
    }
    for second in (0..=SECONDS).step_by(50) {
        let at = x(second as f64);
        writeln!(
            svg,
            "<path d=\"M{at} {}v5\" stroke=\"#888888\"/>\
             <text x=\"{at}\" y=\"{}\" text-anchor=\"middle\">{second} s</text>",
            y0 + height,
            y0 + height + 20.0
        )?;
    }
    for (line, (policy, outcome)) in curves.iter().enumerate() {
        let mut path = String::new();
        for second in 5..SECONDS - 5 {
            let around = &outcome.answered[second - 5..second + 5];
            let rate = around.iter().sum::<f64>() / around.len() as f64;
            let command = if second == 5 { 'M' } else { 'L' };
            write!(path, "{command}{:.1} {:.1}", x(second as f64), y(rate))?;
        }
        let (color, name) = (policy.color, policy.name);
        let at = y0 + height + 50.0 + 22.0 * line as f64;
        writeln!(
            svg,
            "<path d=\"{path}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"{}\"/>\n\
             <rect x=\"{x0}\" y=\"{}\" width=\"24\" height=\"4\" fill=\"{color}\"/>\n\
             <text x=\"94\" y=\"{at}\">{name}</text>",
            if line + 1 == curves.len() { 4 } else { 2 },
            at - 6.0
        )?;
    }
    svg.push_str("</svg>\n");
    Ok(svg)
}
