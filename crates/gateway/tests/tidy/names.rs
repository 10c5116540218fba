//! Names and sizes.

use crate::text::{all_crates, none, pages, words};

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
