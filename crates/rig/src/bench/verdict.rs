//! The bars the project has set itself.

use crate::compare::{Get, Run, after, ratio, spread, values};
use crate::load::{Report, float};

/// One bar and whether it was met.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// What is asked.
    pub bar: &'static str,
    /// The bar.
    pub limit: f64,
    /// The median; none if it was not measured.
    pub value: Option<f64>,
}

impl Verdict {
    /// Whether the bar is met. What was not measured is not met.
    #[must_use]
    pub fn met(&self) -> bool {
        self.value.is_some_and(|v| v <= self.limit)
    }
}

/// A bar on a median, or on the ratio to a rival's figure of the same round.
struct Bar {
    name: &'static str,
    limit: f64,
    scenario: &'static str,
    rival: Option<&'static str>,
    get: Get,
}

const fn bar(name: &'static str, limit: f64, scenario: &'static str, get: Get) -> Bar {
    Bar {
        name,
        limit,
        scenario,
        rival: None,
        get,
    }
}

impl Bar {
    const fn times(self, rival: &'static str) -> Self {
        Self {
            rival: Some(rival),
            ..self
        }
    }
}

const WASTED: Get = |r| Some(r.waste?.percent_of_planned);
const RUNNING: Get = |r| r.running_after.map(float);
const CLOSE_WAIT: Get = |r| after(r, "CLOSE_WAIT");
const TIME_WAIT: Get = |r| after(r, "TIME_WAIT");
const UNDISTURBED: Get = |r| Some(r.first_event?.p99_ms / r.first_event_undisturbed?.p99_ms);
const ERRORS: Get = |r| Some(float(r.error_count()));

const BARS: &[Bar] = &[
    bar("CPU a call, times nginx's", 1.3, "calls", |r| {
        r.cpu_us_per_call
    })
    .times("nginx"),
    bar("CPU a chunk, times nginx's", 1.0, "streams", |r| {
        r.cpu_us_per_chunk
    })
    .times("nginx"),
    bar("delay p50, times HAProxy's", 1.0, "streams", |r| {
        Some(r.delay?.p50_ms)
    })
    .times("HAProxy"),
    bar("delay p99, times HAProxy's", 1.0, "streams", |r| {
        Some(r.delay?.p99_ms)
    })
    .times("HAProxy"),
    bar("KiB per idle stream", 24.0, "idle", |r| r.kib_per_stream),
    bar("MiB for 200 slow readers", 64.0, "slow", |r| r.mib_taken),
    bar("idle: running after 1 s", 0.0, "idle", RUNNING),
    bar("slow: running after 1 s", 0.0, "slow", RUNNING),
    bar("steady: TIME_WAIT", 149.0, "steady", TIME_WAIT),
    bar("RST: wasted, % of planned", 0.1, "storm-rst", WASTED),
    bar("RST: running after 1 s", 0.0, "storm-rst", RUNNING),
    bar("RST: CLOSE_WAIT", 0.0, "storm-rst", CLOSE_WAIT),
    bar("RST: TIME_WAIT", 149.0, "storm-rst", TIME_WAIT),
    bar("RST: MiB left over", 8.0, "storm-rst", Report::memory_left),
    bar(
        "RST: first event p99, times the undisturbed",
        1.5,
        "storm-rst",
        UNDISTURBED,
    ),
    bar("RST: errors", 0.0, "storm-rst", ERRORS),
    bar("FIN: wasted, % of planned", 0.1, "storm-fin", WASTED),
    bar("FIN: running after 1 s", 0.0, "storm-fin", RUNNING),
    bar("FIN: CLOSE_WAIT", 0.0, "storm-fin", CLOSE_WAIT),
    bar("FIN: TIME_WAIT", 149.0, "storm-fin", TIME_WAIT),
    bar("FIN: MiB left over", 8.0, "storm-fin", Report::memory_left),
    bar(
        "FIN: first event p99, times the undisturbed",
        1.5,
        "storm-fin",
        UNDISTURBED,
    ),
    bar("FIN: errors", 0.0, "storm-fin", ERRORS),
];

/// A gateway's figures against the bars that the project has set itself, of the
/// scenarios that were run.
#[must_use]
pub fn verdicts(runs: &[Run], who: &str) -> Vec<Verdict> {
    let of = |bar: &Bar, who: &str| values(runs, bar.scenario, who, bar.get);
    let verdict = |bar: &Bar| {
        let mine = of(bar, who);
        let value = match bar.rival {
            Some(rival) => ratio(&mine, &of(bar, rival)),
            None => spread(&mine),
        };
        let value = value.map(|v| v.median);
        Verdict {
            bar: bar.name,
            limit: bar.limit,
            value,
        }
    };
    let ran = |bar: &&Bar| runs.iter().any(|r| r.scenario == bar.scenario);
    BARS.iter().filter(ran).map(verdict).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{Machine, markdown};

    fn run(round: usize, gateway: &str, cpu: f64) -> Run {
        Run {
            round,
            gateway: gateway.to_owned(),
            scenario: "calls".to_owned(),
            others_percent: None,
            report: Report {
                cpu_us_per_call: Some(cpu),
                ..Report::default()
            },
        }
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        let runs = [
            run(0, "nginx", 10.0),
            run(0, "Tidegate", 12.0),
            run(1, "nginx", 20.0),
            run(1, "Tidegate", 22.0),
            run(2, "nginx", 15.0),
            run(2, "Tidegate", 30.0),
        ];
        let verdicts = verdicts(&runs, "Tidegate");
        assert_eq!(verdicts[0].value, Some(1.2));
        assert!(verdicts[0].met());
        assert_eq!(verdicts.len(), 1, "of what was run");
        let streams = Run {
            scenario: "streams".to_owned(),
            ..runs[1].clone()
        };
        let missing = super::verdicts(&[streams], "Tidegate");
        assert_eq!(missing.len(), 3);
        assert!(missing.iter().all(|v| !v.met()), "not measured is not met");
        let page = markdown(&Machine::default(), None, &runs);
        assert!(page.contains("| Tidegate | 22.0 (12.0–30.0) |"), "{page}");
    }
}
