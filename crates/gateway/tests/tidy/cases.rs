//! `docs/cases.md` says what is tested, and says it of every case.

use std::collections::{BTreeMap, BTreeSet};

use crate::axes::Texts;
use crate::text::{all_crates, files_under, none, read};

/// The numbers of the list that the tests were written from.
const CASES: [u16; 94] = [
    1, 2, 3, 4, 5, 6, 9, 11, 12, 14, 16, 17, 18, 19, 21, 22, 23, 25, 26, 27, 29, 30, 33, 34, 36,
    37, 38, 40, 41, 42, 44, 46, 47, 48, 50, 51, 53, 54, 56, 57, 59, 61, 62, 64, 65, 67, 68, 69, 70,
    72, 73, 75, 76, 77, 80, 81, 83, 85, 86, 87, 89, 91, 93, 95, 96, 97, 98, 99, 101, 102, 103, 106,
    107, 108, 110, 111, 112, 114, 115, 117, 118, 120, 121, 122, 123, 124, 126, 128, 130, 131, 133,
    134, 136, 137,
];

/// A row of the page: what is said of a case, and the tests that are named for it.
struct Row {
    runs_on: String,
    state: String,
    tests: BTreeSet<String>,
}

fn rows() -> (BTreeMap<u16, Row>, Vec<String>) {
    let (mut rows, mut breaches) = (BTreeMap::new(), Vec::new());
    for line in read("docs/cases.md").lines() {
        let cells = line.strip_prefix("| C");
        let Some(cells) = cells.filter(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        else {
            continue;
        };
        let cells: Vec<&str> = cells.split('|').map(str::trim).collect();
        let [number, _, runs_on, state, tests, ""] = cells[..] else {
            breaches.push(format!("not a row: {line}"));
            continue;
        };
        let tests = tests.split('`').skip(1).step_by(2);
        let row = Row {
            runs_on: runs_on.to_owned(),
            state: state.to_owned(),
            tests: tests.map(str::to_owned).collect(),
        };
        if rows.insert(number.parse().unwrap(), row).is_some() {
            breaches.push(format!("C{number} is there twice"));
        }
    }
    (rows, breaches)
}

/// The numbers at the start of a test's name: `c01_c03_gone` is about two cases.
fn numbers(name: &str) -> Vec<u16> {
    let name = name.strip_prefix("test_").unwrap_or(name);
    let words = name.split('_');
    let numbers = words.map_while(|word| word.strip_prefix('c')?.parse().ok());
    numbers.collect()
}

/// Functions that are run as tests and whose names begin with a number, here and in Python.
fn numbered_tests() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let name_after = |text: &str| -> Option<String> {
        let name = text.split('(').next()?.trim();
        Some(name.to_owned()).filter(|name| !numbers(name).is_empty())
    };
    for file in all_crates() {
        for part in file.text.split("test]\n").skip(1) {
            let head = part.lines().find(|line| line.contains("fn "));
            found.extend(head.and_then(|line| name_after(line.split("fn ").nth(1)?)));
        }
    }
    for file in files_under("tests", "py") {
        let heads = file
            .text
            .lines()
            .filter_map(|line| line.strip_prefix("def "));
        found.extend(heads.filter_map(name_after));
    }
    found
}

#[test]
fn every_case_has_a_test_or_a_reason() {
    let (rows, mut breaches) = rows();
    for number in CASES {
        let Some(row) = rows.get(&number) else {
            breaches.push(format!("C{number:02} is not on the page"));
            continue;
        };
        let passes = row.state.starts_with("passes");
        let reason = ["by decision: ", "in part: ", "does not pass: ", "issue "]
            .iter()
            .any(|start| row.state.starts_with(start) && row.state.len() > start.len() + 20);
        if !passes && !reason {
            breaches.push(format!(
                "C{number:02}: neither passes nor says why: {}",
                row.state
            ));
        }
        let shown = row.tests.iter().any(|test| numbers(test).contains(&number));
        let absent = row.state.starts_with("does not pass") || row.state.starts_with("issue");
        if !shown && !absent {
            breaches.push(format!("C{number:02} names no test of its own"));
        }
    }
    for number in rows.keys().filter(|number| !CASES.contains(number)) {
        breaches.push(format!("C{number:02} is no case"));
    }
    none(
        &breaches,
        "a case is shown by a test, or the page says what is missing",
    );
}

/// All that a case can fit: what is less says why.
const WHOLE: [&str; 2] = ["routes, versions", "streams, versions"];

#[test]
fn every_case_runs_on_what_the_page_says() {
    let (rows, mut breaches) = rows();
    let texts = Texts::read();
    for (number, row) in &rows {
        let ran = texts.runs_on(row.tests.iter());
        let said = row.runs_on.as_str();
        let right = match said.strip_prefix(ran.as_str()) {
            Some("") => WHOLE.contains(&said),
            Some(why) if ran.is_empty() => why.len() > 20,
            Some(why) => why.starts_with(": ") && why.len() > 20,
            None => false,
        };
        if !right {
            breaches.push(format!(
                "C{number:02} runs on \"{ran}\", the page says \"{said}\""
            ));
        }
    }
    none(
        &breaches,
        "a case runs on what the page says, and where that is not all the page says why",
    );
}

#[test]
fn every_test_of_a_case_is_on_the_page() {
    let (rows, mut breaches) = rows();
    let tests = numbered_tests();
    assert!(tests.len() > 100, "{}", tests.len());
    for (number, row) in &rows {
        for test in row.tests.difference(&tests) {
            breaches.push(format!("C{number:02}: there is no test {test}"));
        }
    }
    for test in &tests {
        for number in numbers(test) {
            if !rows
                .get(&number)
                .is_some_and(|row| row.tests.contains(test))
            {
                breaches.push(format!("{test} is missing at C{number:02}"));
            }
        }
    }
    none(&breaches, "the page names the tests there are");
}
