//! The contract for abandoned calls: the kind's defaults, and what contradicts it.

use std::num::NonZeroUsize;

use super::file;
use super::findings::Findings;
use super::units::{Size, Time};
use super::{Abandon, Confirm, Contract, Kind, Upstream};

/// Bytes that may be read for nobody.
const BYTES: Size = Size::mib(16);
/// How much longer a slot is kept where the server still shows the work.
const CONFIRM_WITHIN: Time = Time::secs(30);

impl Abandon {
    /// What the kind says, for so many slots and one client key.
    pub fn of(kind: Kind, slots: NonZeroUsize) -> Self {
        let row = kind.row();
        Self {
            contract: row.on_abandon,
            time: row.abandon_time,
            bytes: BYTES.0 as u64,
            tokens: None,
            at_once: half(slots).get(),
            per_key: None,
            confirm: Confirm::Off,
            confirm_within: CONFIRM_WITHIN.0,
        }
    }
}

fn half(slots: NonZeroUsize) -> NonZeroUsize {
    NonZeroUsize::new(slots.get().div_ceil(2)).unwrap_or(slots)
}

/// `upstream`: built as far as its slots and kind.
pub(super) fn build(
    written: &file::Upstream,
    upstream: &Upstream,
    several_keys: bool,
    path: &str,
    findings: &mut Findings,
) -> Abandon {
    let bounds = &written.abandon;
    let default = Abandon::of(upstream.kind, upstream.slots);
    let share = several_keys.then(|| half(upstream.slots));
    let built = Abandon {
        contract: written.on_abandon.unwrap_or(default.contract),
        time: bounds.time.map_or(default.time, |time| time.0),
        bytes: bounds.bytes.map_or(default.bytes, |size| size.0 as u64),
        tokens: bounds.tokens.map(u64::from),
        at_once: bounds.at_once.unwrap_or(default.at_once),
        per_key: bounds.per_key.or(share),
        confirm: bounds.confirm.unwrap_or(default.confirm),
        confirm_within: bounds
            .confirm_within
            .map_or(default.confirm_within, |time| time.0),
    };
    check_confirm(&built, upstream, path, findings);
    check(&built, upstream, path, findings);
    built
}

/// Refuses what was written and could never act.
fn check(built: &Abandon, upstream: &Upstream, path: &str, findings: &mut Findings) {
    let drains = built.contract == Contract::Drain;
    let contract = built.contract.name();
    for (name, acts) in [
        ("time", drains || built.contract == Contract::Linger),
        ("bytes", drains),
        ("tokens", drains),
        ("at_once", drains),
    ] {
        let at = format!("{path}.abandon.{name}");
        if !acts && findings.is_given(&at) {
            let needs = if name == "time" {
                "\"drain\" or \"linger\""
            } else {
                "\"drain\""
            };
            findings.wrong(
                &at,
                format!("bounds nothing where on_abandon is \"{contract}\""),
                format!("leave it out, or write on_abandon = {needs}"),
            );
        }
    }
    let settle = format!("{path}.settle");
    if built.contract == Contract::Linger && findings.is_given(&settle) {
        findings.wrong(
            &settle,
            "is never used where on_abandon is \"linger\"",
            format!(
                "say it with abandon.time ({} now), or write on_abandon = \"cancel\"",
                Time(built.time)
            ),
        );
    }
    let slots = upstream.slots.get();
    for (name, most) in [
        ("at_once", Some(built.at_once).filter(|_| drains)),
        ("per_key", built.per_key.map(NonZeroUsize::get)),
    ] {
        let at = format!("{path}.abandon.{name}");
        if let Some(most) = most.filter(|most| *most > slots && findings.is_given(&at)) {
            findings.warn(
                &at,
                format!("{most} is more than {slots} slots, so it never acts"),
                "",
            );
        }
    }
}

/// Refuses a count that the server does not keep, and a bound of nothing.
fn check_confirm(built: &Abandon, upstream: &Upstream, path: &str, findings: &mut Findings) {
    let row = upstream.kind.row();
    let shown = row.shows.confirm();
    if built.confirm != Confirm::Off && shown != Confirm::Off && shown != built.confirm {
        findings.wrong(
            &format!("{path}.abandon.confirm"),
            format!(
                "\"{}\" is not what a server of kind \"{}\" shows",
                built.confirm.name(),
                row.name
            ),
            format!("write confirm = \"{}\"", shown.name()),
        );
    }
    let within = format!("{path}.abandon.confirm_within");
    if built.confirm == Confirm::Off && findings.is_given(&within) {
        findings.wrong(
            &within,
            "bounds nothing where confirm is \"off\"",
            "leave it out, or write confirm = \"vllm-metrics\" or \"llama-slots\"",
        );
    }
}
