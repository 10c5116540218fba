//! Case C134: wrong key, wrong unit, wrong place. Every mistake is named with its place and a way out.

use super::*;

const CASES: &str = include_str!("mistakes.txt");
const UPSTREAM: &str = "\n[[upstreams]]\nurl = \"http://127.0.0.1:8000\"\n";

struct Case {
    title: &'static str,
    text: &'static str,
    said: &'static str,
}

fn cases() -> Vec<Case> {
    let blocks = CASES.split("\n=== ").skip(1);
    let case = |block: &'static str| {
        let (title, rest) = block.split_once('\n')?;
        let (text, said) = rest.split_once("\n---\n")?;
        Some(Case {
            title,
            text,
            said: said.trim_end(),
        })
    };
    blocks
        .map(|block| case(block).unwrap_or_else(|| panic!("not a case:\n{block}")))
        .collect()
}

fn answer(case: &Case) -> String {
    let complete = case.text.contains("[[upstreams]]") || case.title.contains("nothing added");
    let text = if complete {
        case.text.to_owned()
    } else {
        case.text.to_owned() + UPSTREAM
    };
    refused(&text)
}

#[test]
fn c134_every_mistake_is_named_with_its_place_and_a_way_out() {
    let cases = cases();
    assert!(cases.len() > 90);
    let head = CASES.split("\n=== ").next().unwrap_or_default();
    let page = cases.iter().fold(head.to_owned(), |page, case| {
        page + &format!(
            "\n=== {}\n{}\n---\n{}\n",
            case.title,
            case.text,
            answer(case)
        )
    });
    docs::up_to_date("crates/gateway/src/config/tests/mistakes.txt", &page);
}

#[test]
fn every_answer_has_a_line_and_most_a_way_out() {
    for Case { title, text, said } in cases() {
        let mistakes: Vec<_> = said
            .lines()
            .filter(|line| line.starts_with("tidegate.toml:"))
            .collect();
        let helps = said.lines().filter(|line| line.starts_with("    ")).count();
        assert!(!mistakes.is_empty(), "{title}\n{text}\n{said}");
        assert!(
            helps == mistakes.len() || said.contains("not valid TOML"),
            "{title}\n{text}\n{said}"
        );
        let total = format!("{} mistake", mistakes.len());
        assert!(
            said.lines()
                .next_back()
                .is_some_and(|last| last.starts_with(&total)),
            "{said}"
        );
    }
}

/// A default that is longer than a written `total` is no mistake.
#[test]
fn c134_only_what_was_written_can_contradict_itself() {
    assert_eq!(
        loaded(&format!(
            "[timeouts]\ntotal = \"5m\"{UPSTREAM}kind = \"vllm\""
        ))
        .warnings,
        []
    );
}

#[test]
fn a_file_of_another_kind_is_not_quoted_to_its_end() {
    let text: String = (0..5_000).map(|n| format!("name{n} = {n}\n")).collect();
    let said = refused(&text);
    assert!(
        said.contains("configuration: only the first 200 mistakes are shown"),
        "{said}"
    );
    assert!(said.lines().count() < 450);
    let long = refused(&format!("{} = 1\n", "a".repeat(100_000)));
    assert!(long.len() < 1_000, "{}", long.len());
}
