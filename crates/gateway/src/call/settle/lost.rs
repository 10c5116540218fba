//! Calls and the journal: what is noted of one, and the record of one whose process was killed.

use std::time::{Duration, UNIX_EPOCH};

use tidegate_wire::UsageSource;

use super::Record;
use crate::call::outcome::{EndKnown, Outcome, WaitEnd, WorkEnd};
use crate::telemetry::access_log::{AccessLog, LostLine, Word};
use crate::telemetry::journal::{FoundAtStart, Journal, Noted};
use crate::telemetry::metrics::{CallLabels, Metrics};

/// Says of each call that was in flight when an earlier process was killed that it was lost: a line and a count. `is_known`: a name of an
/// upstream that may be a label.
pub fn report(
    found: FoundAtStart,
    (log, metrics): (&AccessLog, &Metrics),
    is_known: impl Fn(&str) -> bool,
) {
    for (noted, place) in found.lost {
        let known = Some(noted.upstream.as_str()).filter(|name| is_known(name));
        let labels = CallLabels {
            upstream: known.unwrap_or_default().into(),
            route: "unknown",
            outcome: Outcome::Lost.name(),
        };
        metrics.calls.get_or_create(&labels).add(1);
        let given = |text: &'_ str| !text.is_empty();
        let unknown = if noted.sent {
            (WorkEnd::Unknown, Some(EndKnown::Unknown.name()))
        } else {
            (WorkEnd::None, None)
        };
        let line = LostLine {
            time: UNIX_EPOCH + Duration::from_micros(noted.began),
            id: &noted.id,
            principal: &noted.principal,
            model: Some(noted.model.as_str()).filter(|text| given(text)),
            upstream: Some(noted.upstream.as_str()).filter(|text| given(text)),
            endpoint: Some(noted.endpoint.as_str()).filter(|text| given(text)),
            outcome: Word(Outcome::Lost.name()),
            wait_end: Word(WaitEnd::Unknown.name()),
            work_end: Word(unknown.0.name()),
            end_known: unknown.1.map(Word),
            usage: Word(UsageSource::Unknown.as_str()),
        };
        log.write_lost(&line, place);
    }
}

impl Record {
    /// Gives the call its place in the journal.
    pub(super) fn begin_note(&mut self, journal: Option<&Journal>) {
        self.place = journal.and_then(|journal| journal.begin(&self.noted()));
    }

    /// More is known of the call.
    pub(super) fn note(&self) {
        if let Some(place) = &self.place {
            // One that cannot be written is counted, and the call goes on.
            let _ = place.note(&self.noted());
        }
    }

    fn noted(&self) -> Noted {
        let began = self.began_at.duration_since(UNIX_EPOCH);
        let call = self.entry();
        let text = |text: Option<&str>| text.unwrap_or_default().to_owned();
        Noted {
            began: u64::try_from(began.unwrap_or_default().as_micros()).unwrap_or(u64::MAX),
            sent: self.worked,
            id: call.id.text().to_owned(),
            principal: call.principal.name().to_owned(),
            model: text(call.model()),
            upstream: text(call.upstream().map(|at| &*at.name)),
            endpoint: text(call.endpoint().map(|at| &*at.authority)),
        }
    }
}
