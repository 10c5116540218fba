//! The judge as a program: exit codes and clear words.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::{Command, Output, Stdio};

mod common;

use common::{RIG, Server};

fn storm(target: SocketAddr, upstream: SocketAddr, pid: u32) -> Output {
    Command::new(RIG)
        .args(["storm", "abort", "--users", "20", "--calls", "40"])
        .args(["--target", &format!("http://{target}")])
        .args(["--upstream", &upstream.to_string()])
        .args(["--pid", &pid.to_string()])
        .args(["--quiet", "--json", "-"])
        .args(["--max-waste", "10%", "--max-running-after", "0"])
        .args(["--max-errors", "0", "--max-close-wait", "0"])
        .output()
        .expect("runs")
}

#[test]
fn bars_decide_the_exit_code() {
    let upstream = Server::start(&["fake-upstream"]);
    let direct = storm(upstream.addr, upstream.addr, upstream.child.id());
    assert_eq!(direct.status.code(), Some(0), "{direct:?}");
    let json: serde_json::Value = serde_json::from_slice(&direct.stdout).expect("json");
    let report = &json["runs"][0]["report"];
    assert_eq!(report["calls"], 40);
    assert!(report["peak"]["rss_kib"].as_u64().expect("sampled") > 0);
    let naive = Server::start(&["naive-proxy", "--upstream", &upstream.addr.to_string()]);
    let judged = storm(naive.addr, upstream.addr, naive.child.id());
    assert_eq!(judged.status.code(), Some(1), "{judged:?}");
    let words = String::from_utf8_lossy(&judged.stderr);
    assert!(words.contains("FAILED gateway abort: waste"), "{words}");
}

/// A storm of the program's own upstream, with everything written down.
#[test]
fn a_storm_leaves_a_table_a_document_and_a_page() {
    let upstream = Server::start(&["fake-upstream"]);
    let dir = std::env::temp_dir().join(format!("rig-storm-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder");
    let (json, html) = (dir.join("storm.json"), dir.join("storm.html"));
    let ran = |bar: &str| {
        Command::new(RIG)
            .args([
                "storm", "abort", "steady", "--users", "5", "--calls", "10", "--tokens", "20",
            ])
            .args([
                "--pace",
                "5ms",
                "--target",
                &format!("http://{}", upstream.addr),
            ])
            .args([
                "--upstream",
                &upstream.addr.to_string(),
                "--quiet",
                "--max-errors",
                bar,
            ])
            .args(["--max-running-after", "0", "--json"])
            .arg(&json)
            .arg("--html")
            .arg(&html)
            .output()
            .expect("runs")
    };
    let output = ran("0");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let table = String::from_utf8_lossy(&output.stdout);
    for word in [
        "scenario",
        "abort",
        "steady",
        "without a gateway",
        "first event",
        "upstream",
    ] {
        assert!(table.contains(word), "{word}: {table}");
    }
    let text = std::fs::read_to_string(&json).expect("written");
    let document: serde_json::Value = serde_json::from_str(&text).expect("json");
    assert_eq!(document["runs"][0]["report"]["attempts"], 10);
    assert!(document["ceiling"]["calls_per_second"].as_f64() > Some(0.0));
    assert!(
        document["runs"][0]["report"]["peak"]["rss_kib"].as_u64() > Some(0),
        "its process is found"
    );
    let page = std::fs::read_to_string(&html).expect("written");
    assert!(
        page.matches("<svg").count() >= 8,
        "{}",
        page.matches("<svg").count()
    );
    for outside in ["<script", "src=", "href=", "@import", "url("] {
        assert!(
            !page.contains(outside),
            "{outside}: the page stands by itself"
        );
    }
    std::fs::remove_dir_all(&dir).expect("ours");
}

/// The bench runs storms through the same turns, on contenders that it starts
/// itself.
#[test]
fn a_bench_writes_its_page() {
    let file = std::env::temp_dir().join(format!("rig-bench-{}.md", std::process::id()));
    let output = Command::new(RIG)
        .args([
            "bench", "--naive", "--quick", "--only", "steady", "--rounds", "1", "--out",
        ])
        .arg(&file)
        .output()
        .expect("runs");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let page = std::fs::read_to_string(&file).expect("written");
    std::fs::remove_file(&file).expect("ours");
    for word in [
        "- Load and upstream without a gateway: ",
        " chunks/s",
        "- naive: rig ",
        "## 200 users who read",
    ] {
        assert!(page.contains(word), "{word}: {page}");
    }
    let row = |name: &str| {
        let start = format!("| {name} |");
        let row = page.lines().find(|l| l.starts_with(&start));
        let cells = row.expect("a row").split('|').map(|c| c.trim().to_owned());
        cells.collect::<Vec<String>>()
    };
    // Name, CPU, two of the first event, delay, TIME_WAIT, errors.
    let (direct, naive) = (row("direct"), row("naive"));
    assert_eq!((&*direct[2], &*direct[6], &*direct[7]), ("–", "0", "0"));
    let waiting: f64 = naive[6].parse().expect("a number");
    assert!(waiting > 100.0 && naive[7] == "0", "{naive:?}");
}

/// Whoever has seen enough presses Ctrl-C, and has what was measured until then.
#[test]
fn an_interrupted_storm_keeps_what_it_has() {
    let upstream = Server::start(&["fake-upstream"]);
    let file = std::env::temp_dir().join(format!("rig-kept-{}.json", std::process::id()));
    let mut child = Command::new(RIG)
        .args(["storm", "steady", "abort", "--users", "5", "--tokens", "20"])
        .args(["--pace", "5ms", "--seconds", "600", "--limit", "700s"])
        .args(["--target", &format!("http://{}", upstream.addr)])
        .args(["--upstream", &upstream.addr.to_string(), "--json"])
        .arg(&file)
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("starts");
    // The second line of progress: it has run for a while.
    let lines = BufReader::new(child.stderr.take().expect("piped")).lines();
    let mut lines = lines.map_while(Result::ok);
    assert_eq!(
        lines.next().as_deref(),
        Some("gateway, steady, round 1 of 1")
    );
    let line = lines.next().expect("progress");
    assert!(
        line.contains("s  done ") && line.contains("running"),
        "{line}"
    );
    let asked = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status();
    assert!(asked.expect("kill").success());
    let said: Vec<String> = lines.collect();
    assert_eq!(child.wait().expect("ends").code(), Some(1), "{said:?}");
    let word = |w: &str| said.iter().any(|l| l.contains(w));
    assert!(
        word("FAILED gateway steady: stopped by a signal"),
        "{said:?}"
    );
    let text = std::fs::read_to_string(&file).expect("written");
    std::fs::remove_file(&file).expect("ours");
    let document: serde_json::Value = serde_json::from_str(&text).expect("json");
    let runs = document["runs"].as_array().expect("runs");
    assert_eq!(runs.len(), 1, "the next one is not begun");
    assert!(runs[0]["report"]["calls"].as_u64() > Some(0));
}

#[test]
fn bad_input_is_said_in_clear_words() {
    for (args, word) in [
        (&["load", "calls", "--target", "127.0.0.1:1"][..], "refused"),
        (&["load", "calls", "--pid", "999999999"], "no such process"),
        (&["load", "calls", "--header", "nonsense"], "name: value"),
        (&["fake-upstream", "--script", "{\"tokenz\":1}"], "tokenz"),
        (&["bench", "--only", "nothing"], "scenarios are"),
        (&["fake-upstream", "--pace", "fast"], "is no unit"),
        (&["fake-upstream", "--on-close", "halt"], "tokens:N"),
        (&["fake-upstream", "--fault", "all"], "cut-mid-event"),
        (&["storm", "tornado"], "leave-early"),
        (
            &["storm", "--target", "http://127.0.0.1:1"],
            "no gateway at",
        ),
        (
            &["storm", "--target", "https://127.0.0.1:1"],
            "https is not spoken",
        ),
        (&["storm", "--pid", "999999999"], "no such process"),
        (&["storm", "--compare", "nonsense"], "NAME=URL"),
        (&["storm", "--at", "300"], "--at less"),
        (&["storm", "--users", "0"], "1 or more"),
        (&["storm", "--rate", "inf"], "above 0"),
        (&["storm", "drain", "abort"], "last scenario"),
        (&["storm", "--max-waste", "1%"], "--upstream-listen"),
        (
            &["storm", "idle", "--max-waste", "1%"],
            "--max-waste: idle has no such figure",
        ),
        (
            &["storm", "--max-amplification", "1"],
            "--max-amplification: abort has no such figure",
        ),
        (
            &[
                "storm",
                "idle",
                "--target",
                "http://127.0.0.1:1",
                "--max-mib",
                "1",
            ],
            "give --pid",
        ),
        (
            &[
                "storm",
                "--compare",
                "a=http://127.0.0.1:1",
                "--compare",
                "a=http://127.0.0.1:2",
            ],
            "two gateways",
        ),
        (
            &["storm", "--upstream", "127.0.0.1:1"],
            "no fake upstream answers",
        ),
    ] {
        let output = Command::new(RIG).args(args).output().expect("runs");
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(words.contains(word), "{args:?}: {words}");
    }
}
