//! The limiter, and the count of the threads that work under it.

use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tidegate_limiter::{Ask, Class, Limiter, Limits, Snapshot};

use crate::entry::{Entry, Refusal};

/// The numbers of calls that have something to hear: a slot, or why there is none.
#[derive(Debug, Clone, Default)]
pub(crate) struct Woken(Arc<Mutex<Vec<u64>>>);

struct Number {
    number: u64,
    woken: Woken,
}

/// The ledger of one limiter.
#[pyclass(frozen, module = "tidegate._core")]
#[derive(Debug)]
pub(crate) struct Ledger {
    limiter: Limiter,
    woken: Woken,
}

/// How many threads there are, and how many have work.
#[pyclass(frozen, module = "tidegate._core")]
#[derive(Debug, Default)]
pub(crate) struct Crew(Mutex<CrewCounts>);

#[derive(Debug, Default)]
struct CrewCounts {
    threads: usize,
    /// Jobs handed out whose work is not over.
    busy: usize,
}

/// What an offer brings: a call's entry, or why it was turned down.
#[derive(IntoPyObject)]
pub(crate) enum Offer {
    Taken((Entry, bool)),
    Rejected(Refusal),
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn seconds(setting: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value).map_err(|_| {
        PyValueError::new_err(format!(
            "{setting} must be a number of seconds, not {value}"
        ))
    })
}

// === impl Woken ===

impl Woken {
    pub(crate) fn take(&self) -> Vec<u64> {
        std::mem::take(&mut *lock(&self.0))
    }

    pub(crate) fn waker(&self, number: u64) -> Waker {
        let woken = self.clone();
        Arc::new(Number { number, woken }).into()
    }
}

impl Wake for Number {
    fn wake(self: Arc<Self>) {
        lock(&self.woken.0).push(self.number);
    }
}

// === impl Ledger ===

#[pymethods]
impl Ledger {
    #[new]
    fn new(
        calls: (usize, usize, usize),
        queue_timeout: Option<f64>,
        target_delay: Option<f64>,
        flow_limit: Option<usize>,
    ) -> PyResult<Self> {
        let (limit, hard_limit, queue) = calls;
        let mut limits = bounds(limit, hard_limit)?.with_queue(queue);
        limits.queue_time = queue_timeout
            .map(|time| seconds("queue_timeout", time))
            .transpose()?;
        limits.target_delay = target_delay
            .map(|time| seconds("target_delay", time))
            .transpose()?;
        if let Some(calls) = flow_limit {
            limits.flow_limit = above_zero("flow_limit", calls)?;
        }
        let limiter =
            Limiter::new(limits).map_err(|error| PyValueError::new_err(error.to_string()))?;
        let woken = Woken::default();
        Ok(Self { limiter, woken })
    }

    /// Asks for a slot for the call of this number: its entry, and whether it has the slot already; or why it gets
    /// none. `deadline` in seconds from now.
    fn offer(&self, number: u64, terms: (u32, u64, i8), deadline: Option<f64>) -> PyResult<Offer> {
        let (weight, flow, class) = terms;
        let mut ask = Ask::default().with_flow(flow);
        ask.weight = NonZeroU32::new(weight)
            .ok_or_else(|| PyValueError::new_err("weight must be at least 1"))?;
        ask.class = match class {
            1.. => Class::High,
            0 => Class::Normal,
            _ => Class::Low,
        };
        if let Some(deadline) = deadline {
            ask.deadline = Instant::now().checked_add(seconds("timeout", deadline)?);
        }
        Ok(match self.limiter.offer(ask) {
            Ok(place) => Entry::offered(place, number, self.woken.clone()),
            Err(rejected) => Offer::Rejected(rejected.into()),
        })
    }

    /// Sets limit, hard limit and queue; returns the numbers of the calls that start now.
    fn resize(&self, limit: usize, hard_limit: usize, queue: usize) -> PyResult<Vec<u64>> {
        let new = bounds(limit, hard_limit)?;
        let mut limits = self.limiter.limits();
        (limits.limit, limits.hard_limit, limits.queue) = (new.limit, new.hard_limit, queue);
        let resized = self.limiter.resize(limits);
        resized.map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(self.woken.take())
    }

    /// Takes no more offers and sends the queue away.
    fn close(&self) -> Vec<u64> {
        self.limiter.close();
        self.woken.take()
    }

    /// Takes no more offers, serves the queue.
    fn seal(&self) {
        self.limiter.seal();
    }

    /// Whether nothing is queued and no slot is held.
    fn is_idle(&self) -> bool {
        let now = self.limiter.snapshot();
        now.queued == 0 && now.running == 0 && now.lingering == 0
    }

    /// Every gauge and counter at one instant.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let now = self.limiter.snapshot();
        let all = PyDict::new(py);
        gauges(&all, &now)?;
        counters(&all, &now)?;
        all.set_item("broken_identity", now.broken_identity())?;
        Ok(all)
    }
}

fn above_zero(setting: &str, calls: usize) -> PyResult<NonZeroUsize> {
    NonZeroUsize::new(calls)
        .ok_or_else(|| PyValueError::new_err(format!("{setting} must be at least 1, not 0")))
}

fn bounds(limit: usize, hard_limit: usize) -> PyResult<Limits> {
    let limits = Limits::new(above_zero("limit", limit)?);
    Ok(limits.with_hard_limit(above_zero("hard_limit", hard_limit)?))
}

fn gauges(all: &Bound<'_, PyDict>, now: &Snapshot) -> PyResult<()> {
    for (name, calls) in [
        ("limit", now.limit),
        ("hard_limit", now.hard_limit),
        ("queue_limit", now.queue_limit),
        ("queued", now.queued),
        ("running", now.running),
        ("attended", now.attended),
        ("abandoned", now.abandoned),
        ("lingering", now.lingering),
    ] {
        all.set_item(name, calls)?;
    }
    for (name, holds) in [
        ("closed", now.closed),
        ("over_limit", now.over_limit),
        ("overloaded", now.overloaded),
        ("leftovers_block", now.leftovers_block()),
    ] {
        all.set_item(name, holds)?;
    }
    for (name, age) in [
        ("oldest_queued", now.oldest_queued),
        ("oldest_running", now.oldest_running),
        ("oldest_abandoned", now.oldest_abandoned),
    ] {
        all.set_item(name, age.map(|age| age.as_secs_f64()))?;
    }
    Ok(())
}

fn counters(all: &Bound<'_, PyDict>, now: &Snapshot) -> PyResult<()> {
    let ended = now.ended.sum();
    for (name, count) in [
        ("offered", now.offered),
        ("rejected", now.rejected.total()),
        ("started", now.started),
        ("finished", ended.total()),
        ("finished_abandoned", ended.abandoned),
        ("cancelled_before_start", now.left.total()),
        ("abandoned_total", now.abandoned_total),
        ("reattached_total", now.reattached_total),
        ("unclaimed_total", now.unclaimed_total),
    ] {
        all.set_item(name, count)?;
    }
    for (name, time) in [
        ("queued_seconds", now.queued_time),
        ("running_seconds", now.running_time),
        ("abandoned_seconds", now.abandoned_time),
    ] {
        all.set_item(name, time.as_secs_f64())?;
    }
    let py = all.py();
    let rejected = PyDict::new(py);
    for (reason, count) in now.rejected.by_reason() {
        rejected.set_item(reason, count)?;
    }
    let left = PyDict::new(py);
    for (reason, count) in now.left.by_reason() {
        left.set_item(reason, count)?;
    }
    let outcomes = PyDict::new(py);
    for (outcome, split) in now.ended.by_outcome() {
        outcomes.set_item(outcome, (split.attended, split.abandoned))?;
    }
    all.set_item("rejected_by_reason", rejected)?;
    all.set_item("left_by_reason", left)?;
    all.set_item("ended_by_outcome", outcomes)
}

// === impl Crew ===

#[pymethods]
impl Crew {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// One more job is handed out. Whether it needs a new thread, which is then counted.
    fn add(&self) -> bool {
        let mut crew = lock(&self.0);
        crew.busy += 1;
        let hire = crew.busy > crew.threads;
        crew.threads += usize::from(hire);
        hire
    }

    /// A job's work is over.
    fn done(&self) {
        let mut crew = lock(&self.0);
        crew.busy = crew.busy.saturating_sub(1);
    }

    /// An idle thread wants to end. Whether it may: not while there are as many jobs as threads. One whose start was
    /// interrupted may not be counted.
    fn retire(&self) -> bool {
        let mut crew = lock(&self.0);
        let may = crew.busy < crew.threads || crew.busy == 0;
        crew.threads = crew.threads.saturating_sub(usize::from(may));
        may
    }

    /// A thread that `add` counted could not be started. Whether there are others, of which one takes the job when it
    /// is free; if not, there is no such job.
    fn failed(&self) -> bool {
        let mut crew = lock(&self.0);
        crew.threads = crew.threads.saturating_sub(1);
        let others = crew.threads > 0;
        crew.busy -= usize::from(!others && crew.busy > 0);
        others
    }

    #[getter]
    fn threads(&self) -> usize {
        lock(&self.0).threads
    }
}
