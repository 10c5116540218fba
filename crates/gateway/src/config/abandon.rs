//! The contract for abandoned calls: the kind's defaults, and what contradicts it.

use std::num::NonZeroUsize;

use super::file;
use super::findings::Findings;
use super::units::{Size, Time};
use super::{Abandon, Attach, Confirm, Contract, Kind, Limits, Upstream};

/// Bytes that may be read for nobody.
const BYTES: Size = Size::mib(16);
/// How much longer a slot is kept where the server still shows the work.
const CONFIRM_WITHIN: Time = Time::secs(30);
/// Bytes of one answer that are kept for a retry.
const KEPT: Size = Size::mib(1);

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

/// Whether, and how long, calls wait for a retry.
pub(super) fn attach(
    written: &file::Upstream,
    path: &str,
    findings: &mut Findings,
) -> Option<Attach> {
    let file::Attach { grace, bytes } = &written.attach;
    if grace.is_none() && bytes.is_some() {
        findings.wrong(
            &format!("{path}.attach.bytes"),
            "bounds nothing without attach.grace",
            "leave it out, or add attach.grace = \"30s\"",
        );
    }
    Some(Attach {
        grace: grace.as_ref()?.0,
        bytes: bytes.as_ref().unwrap_or(&KEPT).0,
    })
}

/// One answer's bound beside that of all.
pub(super) fn check_room(upstreams: &[Upstream], limits: &Limits, findings: &mut Findings) {
    for (index, upstream) in upstreams.iter().enumerate() {
        let bytes = upstream.attach.map_or(0, |attach| attach.bytes);
        if bytes > limits.attach_total_bytes {
            let (bytes, total) = (Size(bytes), Size(limits.attach_total_bytes));
            findings.warn(
                &format!("upstreams[{index}].attach.bytes"),
                format!("{bytes} is more than limits.attach_total ({total}), so it never acts"),
                "",
            );
        }
    }
}

/// Refuses what was written and could never act.
fn check(built: &Abandon, upstream: &Upstream, path: &str, findings: &mut Findings) {
    let drains = built.contract == Contract::Drain;
    let reads_on = drains || upstream.attach.is_some();
    let contract = built.contract.name();
    for (name, acts) in [
        ("time", drains || built.contract == Contract::Linger),
        ("bytes", reads_on),
        ("tokens", reads_on),
        ("at_once", reads_on),
    ] {
        let at = format!("{path}.abandon.{name}");
        if !acts && findings.is_given(&at) {
            let needs = if name == "time" {
                "on_abandon = \"drain\" or \"linger\""
            } else {
                "on_abandon = \"drain\" or attach.grace"
            };
            findings.wrong(
                &at,
                format!("bounds nothing where on_abandon is \"{contract}\""),
                format!("leave it out, or write {needs}"),
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
        ("at_once", Some(built.at_once).filter(|_| reads_on)),
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
