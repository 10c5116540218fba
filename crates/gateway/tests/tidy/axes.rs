//! What the tests of a case run on, read out of the tests: which routes, and which versions of HTTP on either side.

use std::collections::{BTreeMap, BTreeSet};

use crate::text::all_crates;

/// Client's and upstream's version.
type Pairs = BTreeSet<(u8, u8)>;

/// The functions of each file, by name. A test's own text and that of the functions of its file that it calls.
pub(crate) struct Texts {
    files: Vec<BTreeMap<String, String>>,
}

impl Texts {
    pub(crate) fn read() -> Self {
        let functions = |text: &str| {
            let parts = text.split("fn ").skip(1);
            let named = parts.filter_map(|part| {
                let name = part.split(['(', '<']).next()?;
                let word = name.chars().all(|c| c.is_alphanumeric() || c == '_');
                // A function at the margin ends at the margin.
                let body = part.split("\n}\n").next()?;
                word.then(|| (name.to_owned(), body.to_owned()))
            });
            named.collect()
        };
        let files = all_crates();
        let files = files.iter().map(|file| functions(&file.text)).collect();
        Self { files }
    }

    /// What this test runs, if it is one of ours.
    fn of(&self, test: &str) -> Option<String> {
        let file = self.files.iter().find(|file| file.contains_key(test))?;
        let (mut taken, mut todo) = (BTreeSet::new(), vec![test]);
        let mut all = String::new();
        while let Some(name) = todo.pop() {
            if !taken.insert(name) {
                continue;
            }
            let text = &file[name];
            all.push_str(text);
            let called = |other: &&String| text.contains(&format!("{other}("));
            todo.extend(file.keys().filter(called).map(String::as_str));
        }
        Some(all)
    }

    /// In the words of the page; empty where a test has no such axis.
    pub(crate) fn runs_on<'a>(&self, tests: impl Iterator<Item = &'a String>) -> String {
        let (mut routes, mut pairs) = (None, Pairs::new());
        for text in tests.filter_map(|test| self.of(test)) {
            pairs.extend(pairs_of(&text));
            let here = if text.contains("forms()") || text.contains("routes()") {
                Some("routes")
            } else {
                text.contains("STREAMS").then_some("streams")
            };
            // "routes" comes before "streams".
            routes = match (routes, here) {
                (Some(a), Some(b)) => Some(std::cmp::min(a, b)),
                (a, b) => a.or(b),
            };
        }
        let words = [routes, versions(&pairs)];
        words.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

fn pairs_of(text: &str) -> Pairs {
    const EACH: &str = "[Http::One, Http::Two]";
    let both = [1, 2];
    let mut pairs = Pairs::new();
    let mut add = |downs: &[u8], backs: &[u8]| {
        for down in downs {
            pairs.extend(backs.iter().map(|back| (*down, *back)));
        }
    };
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let said = |words: &str| text.contains(words);
    if said("on_each(") || said("PAIRINGS") {
        add(&both, &both);
    }
    for (version, name) in [(1, "Http::One"), (2, "Http::Two")] {
        if said(&format!("on_both( {name}")) || said(&format!("on_both({name}")) {
            add(&both, &[version]);
        }
        if said(&format!("on_backs( {name}")) || said(&format!("on_backs({name}")) {
            add(&[version], &both);
        }
    }
    let downs = said(&format!("down in {EACH}")) || said("{ Http::One } else { Http::Two }");
    let backs = said(&format!("back in {EACH}"));
    match (downs, backs) {
        (true, true) => add(&both, &both),
        (true, false)
            if text
                .replace(EACH, "")
                .replace("else { Http::Two }", "")
                .contains("Http::Two") =>
        {
            add(&both, &[2]);
        }
        (true, false) => add(&both, &[1]),
        (false, true) => add(&[1], &both),
        (false, false) => {}
    }
    pairs
}

fn versions(pairs: &Pairs) -> Option<&'static str> {
    let pairs: Vec<_> = pairs.iter().copied().collect();
    match pairs[..] {
        [] => None,
        [_, _, _, _] => Some("versions"),
        [(1, 1), (2, 1)] => Some("versions of the client"),
        [(1, 1), (1, 2)] => Some("versions of the upstream"),
        [(1, 2), (2, 2)] => Some("versions of the client, HTTP/2 upstream"),
        [(2, 1), (2, 2)] => Some("HTTP/2 client, versions of the upstream"),
        _ => Some("three of the versions"),
    }
}
