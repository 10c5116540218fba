//! The limiter as one would write it without thinking of cost: a list of calls, scanned for everything.

use std::time::Duration;

use tidegate_limiter::{
    Class, Ended, EndedCounts, LeftCounts, Limits, Reason, RejectedCounts, Split,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Left {
    Caller,
    Deadline,
    Overload,
    Closed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Queued,
    Running,
    Lingering,
    Ended,
    Left(Left),
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    pub(crate) bytes: u64,
    pub(crate) weight: usize,
    pub(crate) class: Class,
    pub(crate) flow: u64,
    pub(crate) deadline: Option<Duration>,
}

/// What was seen of the real limiter: the order of the queue is its own choice, within rules.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) holding: Vec<usize>,
    pub(crate) sent_away: Vec<usize>,
    pub(crate) next_weight: Option<usize>,
}

#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) ask: Asked,
    pub(crate) state: State,
    pub(crate) attended: bool,
    pub(crate) outcome: Option<Ended>,
    /// Slots held, once it has started.
    pub(crate) held: usize,
    pub(crate) came: Duration,
    pub(crate) began: Duration,
    pub(crate) away_since: Duration,
    pub(crate) lingers_since: Duration,
}

#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Totals {
    pub(crate) offered: u64,
    pub(crate) rejected: RejectedCounts,
    pub(crate) abandoned: u64,
    pub(crate) reattached: u64,
    pub(crate) unclaimed: u64,
    pub(crate) lingered: u64,
    pub(crate) confirmed: u64,
    pub(crate) queued_time: Duration,
    pub(crate) running_time: Duration,
    pub(crate) abandoned_time: Duration,
}

#[derive(Debug)]
pub(crate) struct Naive {
    pub(crate) limits: Limits,
    pub(crate) closed: bool,
    pub(crate) over_limit: bool,
    pub(crate) now: Duration,
    pub(crate) calls: Vec<Call>,
    pub(crate) totals: Totals,
}

impl Asked {
    fn is_flow_of(&self, other: &Self) -> bool {
        (self.class, self.flow) == (other.class, other.flow)
    }
}

impl Naive {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            closed: false,
            over_limit: false,
            now: Duration::ZERO,
            calls: Vec::new(),
            totals: Totals::default(),
        }
    }

    pub(crate) fn count(&self, is: impl Fn(&Call) -> bool) -> usize {
        self.calls.iter().filter(|call| is(call)).count()
    }

    pub(crate) fn in_state(&self, state: State) -> usize {
        self.count(|call| call.state == state)
    }

    pub(crate) fn attended(&self) -> usize {
        self.count(|call| call.state == State::Running && call.attended)
    }

    pub(crate) fn abandoned(&self) -> usize {
        self.count(|call| call.state == State::Running && !call.attended)
    }

    pub(crate) fn occupied(&self) -> usize {
        self.in_state(State::Running) + self.in_state(State::Lingering)
    }

    pub(crate) fn queued_bytes(&self) -> u64 {
        let queued = self.calls.iter().filter(|call| call.state == State::Queued);
        queued.map(|call| call.ask.bytes).sum()
    }

    fn weight(&self, is: impl Fn(&Call) -> bool) -> usize {
        let calls = self.calls.iter().filter(|call| is(call));
        calls.map(|call| call.held).sum()
    }

    pub(crate) fn attended_weight(&self) -> usize {
        self.weight(|call| call.state == State::Running && call.attended)
    }

    pub(crate) fn held_weight(&self) -> usize {
        self.weight(|call| matches!(call.state, State::Running | State::Lingering))
    }

    fn fits(&self, weight: usize) -> bool {
        let limit = self.limits.limit.get();
        let weight = weight.min(limit);
        self.attended_weight() + weight <= limit
            && self.held_weight() + weight <= self.limits.hard_limit.get()
    }

    /// Whether the flow has as many calls with slots, or abandoned ones, as it may.
    fn is_capped(&self, ask: &Asked) -> bool {
        let holds = |call: &Call| {
            matches!(call.state, State::Running | State::Lingering) && call.ask.is_flow_of(ask)
        };
        let held = self.count(holds);
        let abandoned = self.count(|call| holds(call) && !call.attended);
        held >= self.limits.flow_limit.get() || abandoned >= self.limits.flow_abandoned.get()
    }

    pub(crate) fn queued_capped(&self) -> usize {
        self.count(|call| call.state == State::Queued && self.is_capped(&call.ask))
    }

    /// Why an offer must be turned down, but for a predicted wait.
    pub(crate) fn reject(&self, ask: &Asked) -> Option<Reason> {
        if self.closed {
            return Some(Reason::Closed);
        }
        let limit = self.limits.limit.get();
        let passes = self.queued_capped() == self.in_state(State::Queued);
        if passes && self.fits(ask.weight) && !self.is_capped(ask) {
            return None;
        }
        if self.in_state(State::Queued) >= self.limits.queue {
            let leftovers = self.attended_weight() + ask.weight.min(limit) <= limit;
            return Some(if self.fits(ask.weight) && self.is_capped(ask) {
                Reason::FlowFull
            } else if leftovers {
                Reason::LeftoverFull
            } else {
                Reason::QueueFull
            });
        }
        if self.queued_bytes() + ask.bytes > self.limits.queue_bytes {
            return Some(Reason::QueueBytes);
        }
        let queued = |call: &Call| call.state == State::Queued && call.ask.is_flow_of(ask);
        if self.count(queued) >= self.limits.flow_queue {
            return Some(Reason::FlowFull);
        }
        let passed = ask.deadline.is_some_and(|deadline| deadline <= self.now);
        passed.then_some(Reason::Deadline)
    }

    pub(crate) fn rejected(&mut self, reason: Reason) {
        let rejected = &mut self.totals.rejected;
        match reason {
            Reason::QueueFull => rejected.queue_full += 1,
            Reason::QueueBytes => rejected.queue_bytes += 1,
            Reason::LeftoverFull => rejected.leftover_full += 1,
            Reason::FlowFull => rejected.flow_full += 1,
            Reason::Deadline => rejected.deadline += 1,
            Reason::Closed => rejected.closed += 1,
        }
    }

    pub(crate) fn admitted(&mut self, ask: Asked) {
        self.calls.push(Call {
            ask,
            state: State::Queued,
            attended: true,
            outcome: None,
            held: 0,
            came: self.now,
            began: self.now,
            away_since: self.now,
            lingers_since: self.now,
        });
    }

    /// Does what the limiter was seen to do with its free slots, if it may.
    pub(crate) fn serve(&mut self, seen: &Seen) {
        self.over_limit = self.over_limit
            && (self.attended_weight() > self.limits.limit.get()
                || self.held_weight() > self.limits.hard_limit.get());
        for call in &seen.sent_away {
            assert!(self.fits(1), "sent away without a slot to hand out");
            self.send_away(*call);
        }
        loop {
            let queued = |call: &&usize| self.calls[**call].state == State::Queued;
            // Of one flow the first, so that the check of the order holds for each in turn.
            let starts = seen.holding.iter().filter(queued).min();
            let Some(call) = starts.copied() else { break };
            let weight = self.calls[call].ask.weight;
            assert!(self.fits(weight), "started without a free slot");
            assert!(!self.is_capped(&self.calls[call].ask), "its flow is capped");
            self.check_order(call);
            self.calls[call].state = State::Running;
            self.calls[call].began = self.now;
            self.calls[call].held = weight.min(self.limits.limit.get());
        }
        let waiting = self.in_state(State::Queued) > self.queued_capped();
        assert_eq!(seen.next_weight.is_some(), waiting, "who is next");
        let fits = seen.next_weight.is_some_and(|weight| self.fits(weight));
        assert!(!fits, "a slot is free while a call is queued");
    }

    fn send_away(&mut self, call: usize) {
        let waited = self.now - self.calls[call].came;
        let late = self.calls[call].ask.deadline;
        let why = if late.is_some_and(|deadline| deadline <= self.now) {
            Left::Deadline
        } else {
            let target = self.limits.target_delay.expect("no reason to send it away");
            assert!(waited > 2 * target, "sent away after {waited:?}");
            Left::Overload
        };
        self.calls[call].state = State::Left(why);
    }

    /// First in, first out within a flow; under overload the newest first.
    fn check_order(&self, call: usize) {
        let ask = self.calls[call].ask;
        let same_flow = |other: &&usize| {
            let other = &self.calls[**other];
            other.state == State::Queued && other.ask.is_flow_of(&ask)
        };
        if self.limits.target_delay.is_some() {
            return;
        }
        let all: Vec<usize> = (0..self.calls.len()).collect();
        let first = all.iter().find(same_flow);
        assert_eq!(first, Some(&call), "jumped the queue of its flow");
    }

    pub(crate) fn leave(&mut self, call: usize, why: Left) {
        if self.calls[call].state == State::Queued {
            self.calls[call].state = State::Left(why);
        }
    }

    pub(crate) fn abandon(&mut self, call: usize) {
        let now = self.now;
        let call = &mut self.calls[call];
        if call.state == State::Running && call.attended {
            call.attended = false;
            call.away_since = now;
            self.totals.abandoned += 1;
        }
    }

    pub(crate) fn can_come_back(&self, call: usize) -> bool {
        let call = &self.calls[call];
        call.state == State::Running
            && (call.attended || self.attended_weight() + call.held <= self.limits.limit.get())
    }

    pub(crate) fn come_back(&mut self, call: usize) {
        if !std::mem::replace(&mut self.calls[call].attended, true) {
            self.totals.reattached += 1;
        }
    }

    pub(crate) fn end(&mut self, call: usize, outcome: Option<Ended>) {
        self.calls[call].state = State::Ended;
        self.calls[call].outcome = outcome;
    }

    pub(crate) fn linger(&mut self, call: usize, outcome: Ended) {
        self.calls[call].state = State::Lingering;
        self.calls[call].lingers_since = self.now;
        self.calls[call].outcome = Some(outcome);
        self.totals.lingered += 1;
    }

    pub(crate) fn end_linger(&mut self, call: usize, confirmed: bool) {
        self.calls[call].state = State::Ended;
        self.totals.confirmed += u64::from(confirmed);
    }

    pub(crate) fn resize(&mut self, limits: Limits) {
        self.limits = limits;
        self.over_limit = true;
    }

    pub(crate) fn close(&mut self) {
        self.closed = true;
        for call in &mut self.calls {
            if call.state == State::Queued {
                call.state = State::Left(Left::Closed);
            }
        }
    }

    pub(crate) fn advance(&mut self, by: Duration) {
        let times = |calls: usize| by * u32::try_from(calls).expect("a short list");
        let (queued, running) = (self.in_state(State::Queued), self.in_state(State::Running));
        self.totals.queued_time += times(queued);
        self.totals.running_time += times(running);
        self.totals.abandoned_time += times(self.abandoned());
        self.now += by;
    }

    pub(crate) fn left(&self) -> LeftCounts {
        let left = |why| self.in_state(State::Left(why)) as u64;
        LeftCounts {
            caller: left(Left::Caller),
            deadline: left(Left::Deadline),
            overload: left(Left::Overload),
            closed: left(Left::Closed),
        }
    }

    pub(crate) fn ended(&self) -> EndedCounts {
        let split = |outcome: Option<Ended>| {
            let count = |attended| {
                self.count(|call| {
                    call.state == State::Ended
                        && call.outcome == outcome
                        && call.attended == attended
                }) as u64
            };
            Split {
                attended: count(true),
                abandoned: count(false),
            }
        };
        EndedCounts {
            ok: split(Some(Ended::Ok)),
            error: split(Some(Ended::Error)),
            cancelled: split(Some(Ended::Cancelled)),
            panicked: split(Some(Ended::Panicked)),
            dropped: split(None),
        }
    }

    pub(crate) fn oldest(
        &self,
        is: impl Fn(&Call) -> bool,
        from: impl Fn(&Call) -> Duration,
    ) -> Option<Duration> {
        let ages = self.calls.iter().filter(|call| is(call));
        ages.map(|call| self.now - from(call)).max()
    }
}
