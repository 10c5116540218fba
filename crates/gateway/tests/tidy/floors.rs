//! Which module may import which.

use std::collections::BTreeSet;

use crate::text::{File, first_word, found, gateway, module_of, none, read};

/// From the top down. A module imports from floors below its own.
const FLOORS: [&[&str]; 5] = [
    &["main", "cli", "app", "reload", "probe"],
    &["serve", "front", "admin"],
    &["call"],
    &["admission", "upstream", "usage", "auth"],
    &["telemetry", "config", "fields", "signal", "warm"],
];

const SAME_FLOOR: [(&str, &str, &str); 7] = [
    ("main", "app", "the binary starts the gateway"),
    ("main", "cli", "the binary runs the commands"),
    ("main", "reload", "the binary hears SIGHUP"),
    ("main", "probe", "the binary runs the prober"),
    ("cli", "probe", "the command line is read into its settings"),
    ("reload", "app", "a reload goes into the running gateway"),
    (
        "telemetry",
        "config",
        "the log takes its section of the configuration",
    ),
];

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
fn the_judge_is_known_to_the_command_line_and_to_tests_only() {
    let breaches: Vec<_> = gateway()
        .iter()
        .filter(|file| {
            let path = file.path.as_str();
            path != "crates/gateway/src/main.rs" && !path.starts_with("crates/gateway/src/cli/")
        })
        .flat_map(|file| found(file, "tidegate_rig"))
        .collect();
    none(
        &breaches,
        "tidegate_rig judges the gateway, which must run without it",
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
