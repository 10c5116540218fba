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
fn each_word_of_the_call_is_a_type_where_the_page_says() {
    let page = read("ARCHITECTURE.md");
    let (_, words) = page.split_once("## Words of the call").expect("its words");
    let (words, _) = words.split_once("\n## ").expect("its end");
    let paths: Vec<_> = words
        .split('`')
        .filter(|path| path.contains("::"))
        .collect();
    assert!(paths.len() > 20, "{paths:?}");
    let missing = paths.iter().filter(|path| {
        let (module, name) = path.rsplit_once("::").expect("a path");
        let file = format!("crates/gateway/src/{}", module.replace("::", "/"));
        let texts = [format!("{file}.rs"), format!("{file}/mod.rs")];
        let text = texts.iter().find(|file| root().join(file).exists());
        let kinds = ["struct", "enum"].map(|kind| format!("{kind} {name}"));
        let defines = |line: &str| {
            let ends = |rest: &str| !rest.starts_with(|c: char| c.is_alphanumeric());
            let is = |kind: &String| line.split_once(&**kind).is_some_and(|(_, rest)| ends(rest));
            kinds.iter().any(is)
        };
        !text.is_some_and(|file| read(file).lines().any(defines))
    });
    let missing: Vec<_> = missing.map(|path| (*path).to_owned()).collect();
    none(&missing, "a word of the call is a type where the page says");
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

/// Whoever is turned away for load is seen by somebody. A gateway that shuts down turns away on purpose.
#[test]
fn every_refusal_for_load_has_its_alert() {
    let page = read("docs/operations.md");
    let (_, load) = page.split_once("**Load**").expect("the table");
    let (table, _) = load.split_once("**Waiting").expect("its end");
    let (_, alert) = page.split_once("reason=~\"").expect("the alert");
    let (alert, _) = alert.split_once('"').expect("its end");
    let named: BTreeSet<_> = alert.split('|').collect();
    let rows = table.lines().filter(|line| line.starts_with("| `"));
    let reasons: Vec<_> = rows
        .filter_map(|row| row.strip_prefix("| `")?.split('`').next())
        .filter(|reason| *reason != "closed")
        .collect();
    assert!(reasons.len() > 4, "{reasons:?}");
    let missing: Vec<_> = reasons
        .into_iter()
        .filter(|reason| !named.contains(reason))
        .map(str::to_owned)
        .collect();
    none(&missing, "a refusal for load that no alert counts");
}
