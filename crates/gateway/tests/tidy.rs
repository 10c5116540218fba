//! The rules of this repository, as tests. They read the source as text; each failure says where, and what the rule is for.
//!
//! An exception stands in a list beside its rule, with its reason, and fails when it is no longer needed.

#![expect(clippy::unwrap_used, reason = "a panic is how a test says no")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

// === the repository as text ===

/// A file, by its path from the root of the repository.
struct File {
    path: String,
    text: String,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn files_under(folder: &str, extension: &str) -> Vec<File> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        for path in entries.map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == extension) {
                let text = fs::read_to_string(&path).unwrap();
                let path = path.strip_prefix(root()).unwrap().display().to_string();
                found.push(File { path, text });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

impl File {
    /// `(number, line)` of what the compiler sees: no comments, no inline test module.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        self.lines()
            .filter(|(_, line)| !line.trim_start().starts_with("//"))
            .map(|(number, line)| (number, line.split(" // ").next().unwrap_or(line)))
    }

    /// `(number, line)` without the inline test module.
    fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let tests = self.text.find("\n#[cfg(test)]\nmod tests {");
        let text = self.text.get(..tests.unwrap_or(self.text.len()));
        (1..).zip(text.unwrap_or_default().lines())
    }

    fn is_test(&self) -> bool {
        self.path.contains("/tests/")
            || self.path.ends_with("/tests.rs")
            || self.path.ends_with("_tests.rs")
    }
}

/// Source of the gateway without its tests.
fn gateway() -> Vec<File> {
    let mut files = files_under("crates/gateway/src", "rs");
    files.retain(|file| !file.is_test());
    assert!(files.len() > 40, "{} files are few", files.len());
    files
}

fn all_crates() -> Vec<File> {
    files_under("crates", "rs")
}

/// Pages that people read.
fn pages() -> Vec<File> {
    let mut pages = files_under("docs", "md");
    let top = fs::read_dir(root()).unwrap().map(|entry| entry.unwrap());
    for name in top.map(|entry| entry.file_name().into_string().unwrap()) {
        if name.ends_with(".md") {
            pages.push(File {
                text: read(&name),
                path: name,
            });
        }
    }
    pages
}

/// The maximal runs of `[A-Za-z0-9_]`.
fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| !word.is_empty())
}

/// Fails with every breach at once.
fn none(breaches: &[String], rule: &str) {
    assert!(breaches.is_empty(), "\n{}\n\n{rule}\n", breaches.join("\n"));
}

// === floors ===

/// From the top down. A module imports from floors below its own.
const FLOORS: [&[&str]; 5] = [
    &["main", "cli", "app", "reload"],
    &["serve", "front", "admin"],
    &["call"],
    &["admission", "upstream", "usage", "auth"],
    &["telemetry", "config", "signal"],
];

const SAME_FLOOR: [(&str, &str, &str); 5] = [
    ("main", "app", "the binary starts the gateway"),
    ("main", "cli", "the binary runs the commands"),
    ("main", "reload", "the binary hears SIGHUP"),
    ("reload", "app", "a reload goes into the running gateway"),
    (
        "telemetry",
        "config",
        "the log takes its section of the configuration",
    ),
];

fn module_of(path: &str) -> &str {
    let inner = path.strip_prefix("crates/gateway/src/").unwrap();
    let end = inner.find(['/', '.']).unwrap();
    &inner[..end]
}

fn floor(module: &str) -> Option<usize> {
    FLOORS.iter().position(|floor| floor.contains(&module))
}

/// `(line, module)` for each path from the root (`crate::`, or `tidegate::` in the binary), also in `use crate::{a, b}`.
fn imports(file: &File) -> Vec<(usize, String)> {
    let mut lines = Vec::new();
    let mut code = String::new();
    for (number, line) in file.code() {
        lines.push((code.len(), number));
        code += line;
        code.push('\n');
    }
    let mut found = Vec::new();
    for start in ["crate::", "tidegate::"] {
        for (at, _) in code.match_indices(start) {
            if code[..at].ends_with(|c: char| c.is_ascii_alphanumeric() || c == '_') {
                continue;
            }
            let before = lines.partition_point(|(begins, _)| *begins <= at);
            let number = lines[before - 1].1;
            let rest = &code[at + start.len()..];
            let names = match rest.strip_prefix('{') {
                Some(rest) => rest.split('}').next().unwrap().split(',').collect(),
                None => vec![rest],
            };
            found.extend(
                names
                    .into_iter()
                    .filter_map(|name| Some((number, first_word(name)?))),
            );
        }
    }
    found
}

fn first_word(text: &str) -> Option<String> {
    words(text).next().map(str::to_owned)
}

#[test]
fn arrows_point_down() {
    let mut breaches = Vec::new();
    let mut used = BTreeSet::new();
    for file in gateway() {
        let from = module_of(&file.path);
        if from == "lib" {
            continue;
        }
        let Some(own) = floor(from) else {
            breaches.push(format!("{}: `{from}` stands on no floor", file.path));
            continue;
        };
        breaches.extend(found(&file, "super::super"));
        for (number, to) in imports(&file) {
            let Some(other) = floor(&to) else { continue };
            let excepted = SAME_FLOOR.iter().find(|(a, b, _)| *a == from && *b == to);
            if let Some((a, b, _)) = excepted {
                used.insert((*a, *b));
            } else if to != from && other <= own {
                breaches.push(format!("{}:{number}: {from} → {to}", file.path));
            }
        }
    }
    for (a, b, why) in &SAME_FLOOR {
        if !used.contains(&(a, b)) {
            breaches.push(format!(
                "the exception {a} → {b} ({why}) is not used any more"
            ));
        }
    }
    none(
        &breaches,
        "a module imports only from floors below its own (ARCHITECTURE.md, code map)",
    );
}

#[test]
fn lib_names_every_module_that_stands_on_a_floor() {
    let lib = read("crates/gateway/src/lib.rs");
    let missing: Vec<_> = FLOORS
        .iter()
        .copied()
        .flatten()
        .filter(|module| **module != "main" && !lib.contains(&format!("pub mod {module};")))
        .map(|module| format!("{module} is on a floor and not in lib.rs"))
        .collect();
    none(&missing, "the table of floors names what exists");
}

#[test]
fn the_judge_is_known_to_the_binary_and_to_tests_only() {
    let breaches: Vec<_> = gateway()
        .iter()
        .filter(|file| file.path != "crates/gateway/src/main.rs")
        .flat_map(|file| found(file, "tidegate_rig"))
        .collect();
    none(
        &breaches,
        "tidegate_rig judges the gateway; the library must run without it",
    );
    let own = read("crates/rig/Cargo.toml");
    for ours in [
        "tidegate-limiter",
        "tidegate-wire",
        "tidegate =",
        "\"../gateway\"",
    ] {
        assert!(
            !own.contains(ours),
            "the rig shares no code with what it judges: {ours}"
        );
    }
}

/// `path:line: text` for every line of code that holds `what` as a whole word or path.
fn found(file: &File, what: &str) -> Vec<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    file.code()
        .filter(|(_, line)| {
            line.match_indices(what).any(|(at, _)| {
                !line[..at].ends_with(is_part) && !line[at + what.len()..].starts_with(is_part)
            })
        })
        .map(|(number, line)| format!("{}:{number}: {}", file.path, line.trim()))
        .collect()
}

// === one place for each thing ===

/// Compared with what an upstream answered, never sent.
const READ_STATUSES: [&str; 2] = [
    "crates/gateway/src/call/answer.rs",
    "crates/gateway/src/call/listing.rs",
];

#[test]
fn status_codes_are_chosen_at_the_edge() {
    let mut breaches = Vec::new();
    for file in gateway() {
        if ["front", "admin"].contains(&module_of(&file.path)) {
            continue;
        }
        for (number, line) in file.code() {
            let named = line.split("StatusCode::").skip(1).any(|rest| {
                let word = first_word(rest).unwrap_or_default();
                word.chars().all(|c| c.is_ascii_uppercase() || c == '_')
                    || word.starts_with("from_")
            });
            let read = READ_STATUSES.contains(&file.path.as_str())
                && (line.contains("== StatusCode::") || line.contains("!= StatusCode::"));
            if named && !read {
                breaches.push(format!("{}:{number}: {}", file.path, line.trim()));
            }
        }
    }
    none(
        &breaches,
        "only front/ and admin/ choose a status; the rest of the gateway says why with a `Rejection`",
    );
}

const METRICS: &str = "crates/gateway/src/telemetry/metrics.rs";

#[test]
fn metrics_are_named_in_one_file() {
    let mut breaches = Vec::new();
    let names = metric_names();
    for file in gateway().iter().filter(|file| file.path != METRICS) {
        for part in ["registry", "family", "collector", "encoding", "histogram"] {
            breaches.extend(found(file, &format!("prometheus_client::{part}")));
            breaches.extend(found(file, &format!("prometheus_client::metrics::{part}")));
        }
        for (number, line) in file.code() {
            let quoted = line.split('"').skip(1).step_by(2).flat_map(words);
            for word in quoted.filter(|word| names.contains(*word)) {
                breaches.push(format!("{}:{number}: {word}", file.path));
            }
        }
    }
    none(
        &breaches,
        "families are made and named in telemetry/metrics.rs alone",
    );
}

/// As they are scraped, from the page that a test keeps equal to the code.
fn metric_names() -> BTreeSet<String> {
    let page = read("docs/metrics.md");
    let names: BTreeSet<_> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
        .filter(|name| name.starts_with("tidegate_"))
        .map(str::to_owned)
        .collect();
    assert!(
        names.len() > 40,
        "docs/metrics.md lists {} families",
        names.len()
    );
    names
}

#[test]
fn metrics_that_pages_and_dashboards_name_exist() {
    let names = metric_names();
    let mut texts = pages();
    for extension in ["json", "yaml", "yml", "toml"] {
        texts.append(&mut files_under("deploy", extension));
    }
    let crates = ["tidegate_limiter", "tidegate_wire", "tidegate_rig"];
    let mut breaches = Vec::new();
    for file in &texts {
        for (number, line) in (1..).zip(file.text.lines()) {
            for word in words(line).filter(|word| word.starts_with("tidegate_")) {
                let parts = ["_bucket", "_sum", "_count"];
                let family = parts.iter().find_map(|part| word.strip_suffix(part));
                let known = names.contains(word) || family.is_some_and(|f| names.contains(f));
                if !known && !word.ends_with('_') && !crates.contains(&word) {
                    breaches.push(format!("{}:{number}: {word}", file.path));
                }
            }
        }
    }
    none(
        &breaches,
        "a query for a metric that does not exist is silently empty",
    );
}

/// Detached work that is allowed, with its reason.
const DETACHED: [(&str, &str, &str); 1] = [(
    "crates/gateway/src/upstream/exchange.rs",
    "TokioExecutor",
    "hyper's HTTP/2 client writes request bodies in tasks that end with their connection",
)];

#[test]
fn every_task_is_tracked() {
    let mut breaches = Vec::new();
    for file in gateway() {
        for what in [
            "tokio::spawn",
            "task::spawn",
            "spawn_local",
            "TokioExecutor",
        ] {
            let excepted = DETACHED
                .iter()
                .any(|(path, which, _)| *path == file.path && *which == what);
            let found = found(&file, what);
            if excepted {
                assert!(
                    !found.is_empty(),
                    "the exception for {what} in {} is not used any more",
                    file.path
                );
            } else {
                breaches.extend(found);
            }
        }
    }
    none(
        &breaches,
        "spawn on a TaskTracker: a drain waits for what it knows",
    );
}

// === names and sizes ===

const BANNED: [&str; 8] = [
    "Manager", "Handler", "Helper", "Helpers", "Util", "Service", "Context", "Data",
];

#[test]
fn types_are_named_after_the_domain() {
    let mut breaches = Vec::new();
    for file in all_crates().iter().filter(|file| !file.is_test()) {
        for (number, line) in file.code() {
            // Types associated with traits of other crates stand indented.
            let free = line.trim_start() == line || !line.contains("type ");
            let mut words =
                words(line).skip_while(|word| !["struct", "enum", "trait", "type"].contains(word));
            let (Some(_), Some(name), true) = (words.next(), words.next(), free) else {
                continue;
            };
            if parts_of(name).any(|part| BANNED.contains(&part)) {
                breaches.push(format!("{}:{number}: {name}", file.path));
            }
        }
    }
    none(
        &breaches,
        "these words say nothing about what a type is; name what it holds or decides",
    );
}

/// `IoState` → `Io`, `State`.
fn parts_of(name: &str) -> impl Iterator<Item = &str> {
    let starts = name
        .match_indices(|c: char| c.is_ascii_uppercase())
        .map(|(at, _)| at);
    let ends = starts.clone().skip(1).chain([name.len()]);
    starts.zip(ends).map(|(start, end)| &name[start..end])
}

const LINES_MAX: usize = 600;

#[test]
fn files_are_short() {
    let breaches: Vec<_> = all_crates()
        .iter()
        .filter_map(|file| {
            let lines = file.lines().count();
            (lines > LINES_MAX).then(|| format!("{}: {lines} lines", file.path))
        })
        .collect();
    none(
        &breaches,
        "a file longer than 600 lines (its inline tests not counted) is two files",
    );
}

#[test]
fn nothing_is_left_to_do() {
    let marks = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("X", "XX"),
    ];
    let mut breaches = Vec::new();
    for file in all_crates().iter().chain(&pages()) {
        for (number, line) in (1..).zip(file.text.lines()) {
            if words(line).any(|word| marks.contains(&word)) {
                breaches.push(format!("{}:{number}: {}", file.path, line.trim()));
            }
        }
    }
    none(&breaches, "open work is an issue, not a comment");
}

// === pages ===

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

/// The fields of an access-log line: those of the structs that are serialized there.
fn log_fields() -> BTreeSet<String> {
    let source = read("crates/gateway/src/telemetry/access_log.rs");
    let mut fields = BTreeSet::new();
    for part in source.split("Serialize)]\npub struct ").skip(1) {
        let mut flattened = false;
        for line in part.lines().take_while(|line| *line != "}") {
            let name = line
                .trim()
                .strip_prefix("pub ")
                .and_then(|l| l.split(':').next());
            if let Some(name) = name.filter(|_| !flattened) {
                fields.insert(name.to_owned());
            }
            flattened = line.contains("serde(flatten)");
        }
    }
    assert!(fields.len() > 25, "{fields:?}");
    fields
}
