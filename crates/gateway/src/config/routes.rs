//! Which upstream a model name goes to: no name may have two answers.

use std::collections::BTreeMap;

use super::findings::Findings;
use super::tree::join;
use super::{UnknownModels, Upstream};

/// A loop of aliases is followed this far.
const ALIAS_STEPS_MAX: usize = 32;

/// The index of the upstream that is named, or of the first.
pub(super) fn default_upstream(
    name: Option<&str>,
    upstreams: &[Upstream],
    findings: &mut Findings,
) -> usize {
    let Some(name) = name else { return 0 };
    upstreams
        .iter()
        .position(|upstream| upstream.name == name)
        .unwrap_or_else(|| {
            let names: Vec<_> = upstreams
                .iter()
                .map(|upstream| format!("{:?}", upstream.name))
                .collect();
            let near = super::near::nearest(
                name,
                upstreams.iter().map(|upstream| upstream.name.as_str()),
            );
            let help = near.map_or_else(
                || format!("the names are {}", names.join(", ")),
                |near| format!("did you mean {near:?}?"),
            );
            findings.wrong("default_upstream", "is not the name of an upstream", help);
            0
        })
}

pub(super) fn unknown_models(upstreams: &[Upstream]) -> UnknownModels {
    match upstreams {
        [one] if one.models.is_empty() => UnknownModels::Default,
        _ => UnknownModels::Refuse,
    }
}

pub(super) fn check(upstreams: &[Upstream], findings: &mut Findings) {
    let mut claimed: BTreeMap<&str, String> = BTreeMap::new();
    for (index, upstream) in upstreams.iter().enumerate() {
        let path = format!("upstreams[{index}]");
        for (i, pattern) in upstream.models.iter().enumerate() {
            let at = format!("{path}.models[{i}]");
            check_pattern(pattern, &at, findings);
            claim(&mut claimed, pattern, &at, findings);
        }
        if upstream.models.is_empty()
            && !findings.is_broken(&format!("{path}.models"))
            && upstreams.len() > 1
        {
            claim(&mut claimed, "*", &path, findings);
        }
        // An alias that stands among the models too says the same twice.
        for alias in upstream
            .aliases
            .keys()
            .filter(|alias| !upstream.models.contains(alias))
        {
            claim(
                &mut claimed,
                alias,
                &join(&format!("{path}.aliases"), alias),
                findings,
            );
        }
        check_aliases(upstream, &path, findings);
    }
}

fn claim<'a>(
    claimed: &mut BTreeMap<&'a str, String>,
    pattern: &'a str,
    at: &str,
    findings: &mut Findings,
) {
    let Some(first) = claimed.get(pattern) else {
        claimed.insert(pattern, at.to_owned());
        return;
    };
    let place = findings.place(first);
    let what = match pattern {
        "*" => format!("takes any model, and so does {first} ({place})"),
        _ => format!("the model {pattern:?} is claimed already by {first} ({place})"),
    };
    let help = match pattern {
        "*" => "give at least one of them a list of models",
        _ => {
            "a model may go to one upstream; several servers of one model are endpoints of one upstream"
        }
    };
    findings.wrong(at, what, help);
}

pub(super) fn check_pattern(pattern: &str, path: &str, findings: &mut Findings) {
    if pattern.is_empty() || pattern.chars().any(char::is_control) {
        findings.wrong(
            path,
            "is not a model name",
            "write the name as clients send it",
        );
    } else if pattern.strip_suffix('*').unwrap_or(pattern).contains('*') {
        findings.wrong(
            path,
            "has a * before its end",
            "only one * is allowed, as the last character",
        );
    }
}

fn check_aliases(upstream: &Upstream, path: &str, findings: &mut Findings) {
    for (alias, target) in &upstream.aliases {
        let at = join(&format!("{path}.aliases"), alias);
        if alias.is_empty() || target.is_empty() {
            findings.wrong(
                &at,
                "an alias or its model is empty",
                "write alias = \"model\"",
            );
        } else if alias.contains('*') || target.contains('*') {
            findings.wrong(&at, "an alias cannot have a *", "write both names in full");
        } else if loops(upstream, alias) {
            findings.wrong(
                &at,
                "this alias leads back to itself",
                "the right side is the name that the server knows",
            );
        } else if let Some(further) = upstream.aliases.get(target) {
            let what = format!("{target:?} is an alias itself, and aliases are applied once");
            findings.warn(
                &at,
                what,
                format!("the server is sent {target:?}; if {further:?} is meant, write that"),
            );
        }
    }
}

fn loops(upstream: &Upstream, alias: &str) -> bool {
    let mut name = alias;
    for _ in 0..ALIAS_STEPS_MAX {
        match upstream.aliases.get(name) {
            Some(next) if next == alias => return true,
            Some(next) => name = next,
            None => return false,
        }
    }
    false // a loop of other aliases, reported there, or a chain of which every link gives a warning
}
