//! What people read.

use std::collections::BTreeSet;
use std::path::Path;

use crate::text::{all_crates, files_under, first_word, none, pages, read, root};

#[test]
fn links_between_pages_lead_somewhere() {
    let mut breaches = Vec::new();
    for page in pages() {
        let folder = Path::new(&page.path).parent().unwrap().to_owned();
        let markdown = page
            .text
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split(')').next());
        let html = page
            .text
            .split("src=\"")
            .skip(1)
            .filter_map(|rest| rest.split('"').next());
        for target in markdown.chain(html) {
            let file = target.split('#').next().unwrap_or_default();
            if file.is_empty() || target.contains("://") || target.contains(char::is_whitespace) {
                continue;
            }
            if !root().join(&folder).join(file).exists() {
                breaches.push(format!("{}: {target}", page.path));
            }
        }
    }
    none(&breaches, "a page links only to what is there");
}

#[test]
fn every_decision_is_linked_from_the_architecture() {
    let architecture = read("ARCHITECTURE.md");
    let missing: Vec<_> = files_under("docs/decisions", "md")
        .into_iter()
        .filter(|page| !architecture.contains(&page.path))
        .map(|page| page.path)
        .collect();
    none(&missing, "a decision that nobody finds is made again");
    assert!(
        architecture.lines().count() <= 250,
        "ARCHITECTURE.md is read in one go: at most 250 lines"
    );
}

#[test]
fn decisions_that_the_code_names_exist() {
    let decisions = files_under("docs/decisions", "md");
    let mut breaches = Vec::new();
    for file in all_crates().iter().filter(|file| !file.is_test()) {
        for rest in file.text.split("docs/decisions/").skip(1) {
            let number = first_word(rest).unwrap_or_default();
            let start = format!("docs/decisions/{number}-");
            if !decisions.iter().any(|page| page.path.starts_with(&start)) {
                breaches.push(format!("{}: docs/decisions/{number}", file.path));
            }
        }
    }
    none(&breaches, "a reason that is given can be read");
}

/// `Self::X => "name"` in a file: what its closed sets are called in logs and metrics.
fn names_in(path: &str) -> BTreeSet<String> {
    read(path)
        .lines()
        .filter(|line| line.trim_start().starts_with("Self::"))
        .filter_map(|line| {
            line.split("=> \"")
                .nth(1)?
                .split('"')
                .next()
                .map(str::to_owned)
        })
        .filter(|name| name.chars().all(|c| c.is_ascii_lowercase() || c == '_'))
        .collect()
}

#[test]
fn operations_explains_every_name_that_an_operator_meets() {
    let page = read("docs/operations.md");
    let mut names = names_in("crates/gateway/src/call/outcome.rs");
    names.extend(names_in("crates/gateway/src/call/deadline.rs"));
    names.extend(names_in("crates/gateway/src/serve/guard.rs"));
    assert!(names.len() > 50, "{names:?}");
    names.extend(log_fields());
    let missing: Vec<_> = names
        .into_iter()
        .filter(|name| !page.contains(&format!("`{name}`")))
        .collect();
    none(
        &missing,
        "docs/operations.md says what each outcome, reason, tier, phase and log field means",
    );
}

/// The fields of an access-log line: those of `Line`, and of `Times` within it.
fn log_fields() -> BTreeSet<String> {
    let source = read("crates/gateway/src/telemetry/access_log.rs");
    let mut fields = BTreeSet::new();
    for of in ["pub struct Line<'a> {", "pub struct Times {"] {
        let (_, part) = source.split_once(of).expect("the struct");
        for line in part.lines().take_while(|line| *line != "}") {
            let name = line
                .trim()
                .strip_prefix("pub ")
                .and_then(|l| l.split(':').next());
            if let Some(name) = name.filter(|_| !line.ends_with(": Times,")) {
                fields.insert(name.to_owned());
            }
        }
    }
    assert!(fields.len() > 25, "{fields:?}");
    fields
}
