//! A relay that goes on although its client has left, for a retry that may take the call up.

use tokio::time::Instant;

use super::{Relay, RelayState};
use crate::call::attach::orphan::{Who, Writer};
use crate::call::deadline::Tier;
use crate::call::outcome::{Rejection, WaitEnd};
use crate::call::settle::Record;

/// What is different there.
#[derive(Debug, Default)]
pub(super) struct Alone {
    /// No connection polls it any more.
    pub(super) detached: bool,
    /// The client had stopped reading.
    stalled: bool,
    /// What was handed last is a sign of life and no part of the answer.
    pub(super) beat: bool,
    /// The work is over, and who has its answer is not known yet.
    kept: Option<(WaitEnd, Box<Record>)>,
}

impl Relay {
    /// What puts the answer down for a retry.
    pub fn take_writer(&mut self) -> Option<Box<Writer>> {
        self.running.as_mut()?.attendance_mut().take_writer()
    }

    /// There is work that can go on.
    pub fn is_running(&self) -> bool {
        self.running.is_some() && self.state == RelayState::Flowing
    }

    pub(super) fn is_stalled(&self) -> bool {
        self.downstream.is_stalled() || self.reader.is_stalled()
    }

    /// From here on another task polls it.
    pub fn detach(&mut self) {
        self.alone.detached = true;
        self.alone.stalled = self.is_stalled();
        self.stop_armed = false;
        self.clock.moved();
        if let Some(running) = &self.running {
            self.cut = running.cut().watch();
        }
        if self.alone.stalled {
            self.record_mut(|record| record.timed_out(Tier::Write));
        }
    }

    /// Goes by who waits now.
    ///
    /// # Errors
    ///
    /// [`Rejection::Gone`]: nobody does, and the contract lets the call go on no longer.
    pub fn follow(&mut self) -> Result<Who, Rejection> {
        let (Some(running), Some(record)) = (&mut self.running, &mut self.record) else {
            return Ok(Who::Nobody);
        };
        let who = running
            .attendance_mut()
            .follow(record.listed_entry().map(|entry| &**entry))?;
        match running.attendance().left_at() {
            Some(at) if self.alone.stalled => record.away(at, WaitEnd::Stalled),
            _ => record.left(running.attendance()),
        }
        self.alone.stalled &= who == Who::Nobody;
        Ok(who)
    }

    /// Until when it may go on for nobody.
    pub fn until(&self) -> Option<Instant> {
        self.running.as_ref()?.attendance().until()
    }

    /// It has had its time.
    pub fn late(&mut self) {
        if let Some(running) = &mut self.running {
            running.attendance_mut().late();
        }
    }

    /// So many bytes came for nobody. Whether they are too many, or too many tokens.
    pub fn read_alone(&mut self, bytes: usize) -> bool {
        let (Some(running), Some(record)) = (&mut self.running, &self.record) else {
            return false;
        };
        running.read_alone(bytes);
        running.is_past_bound(record.meter.since_left())
    }

    /// No retry can take it up: from here on it is as any that is left.
    pub fn no_orphan(&mut self) {
        if let Some(running) = &mut self.running {
            running.attendance_mut().no_orphan();
        }
    }

    /// What was handed last is no part of the answer.
    pub fn was_beat(&mut self) -> bool {
        std::mem::take(&mut self.alone.beat)
    }

    /// The record of work that is over, and how the wait for it ends once the answer is delivered.
    pub fn take_kept(&mut self) -> Option<(WaitEnd, Box<Record>)> {
        self.alone.kept.take()
    }

    /// The work is over, and the wait too, unless the answer is still to be delivered.
    pub(super) fn wait_ended(&mut self, why: WaitEnd, mut record: Box<Record>) {
        if self.alone.detached {
            self.alone.kept = Some((why, record));
            return;
        }
        record.wait_ended(why);
        record.settle();
    }
}
