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

/// Whoever has seen enough presses Ctrl-C, and has what was measured until
/// then; so has whoever's time is up.
#[test]
fn an_interrupted_storm_keeps_what_it_has() {
    interrupted("-INT");
    interrupted("-TERM");
}

fn interrupted(signal: &str) {
    let upstream = Server::start(&["fake-upstream"]);
    let name = format!("rig-kept{signal}-{}.json", std::process::id());
    let file = std::env::temp_dir().join(name);
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
        .args([signal, &child.id().to_string()])
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
        refused(args, word);
    }
}

#[test]
fn figures_and_files_that_cannot_be_are_refused_before_anything_runs() {
    for (args, word) in [
        (&["storm", "--at", "0"][..], "1 or more"),
        (&["storm", "--calls", "0"], "1 or more"),
        (&["storm", "--limit", "0s"], "above 0"),
        (&["storm", "--rounds", "3"], "--compare"),
        (&["storm", "--max-waste", "NaN"], "0 or more"),
        (&["storm", "--max-mib=-1"], "0 or more"),
        (
            &["storm", "--compare", "=http://127.0.0.1:1"],
            "name is empty",
        ),
        (&["storm", "--html", "-"], "goes into a file"),
        (
            &["storm", "--html", "/proc/no/page.html"],
            "/proc/no/page.html: ",
        ),
        (
            &["storm", "--json", "/proc/no/all.json"],
            "/proc/no/all.json: ",
        ),
    ] {
        refused(args, word);
    }
}

fn refused(args: &[&str], word: &str) {
    let output = Command::new(RIG).args(args).output().expect("runs");
    assert_eq!(output.status.code(), Some(2), "{args:?}");
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(words.contains(word), "{args:?}: {words}");
}

/// A full disk takes neither, and says so; what fits is written.
#[test]
fn what_cannot_be_written_does_not_cost_the_rest() {
    let upstream = Server::start(&["fake-upstream"]);
    let html = std::env::temp_dir().join(format!("rig-rest-{}.html", std::process::id()));
    let output = Command::new(RIG)
        .args(["storm", "--users", "2", "--calls", "4", "--quiet"])
        .args(["--target", &format!("http://{}", upstream.addr)])
        .args(["--json", "/dev/full", "--html"])
        .arg(&html)
        .output()
        .expect("runs");
    assert_eq!(output.status.code(), Some(1), "it was run: {output:?}");
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(
        words.contains("not kept: /dev/full: No space left"),
        "{words}"
    );
    let page = std::fs::read_to_string(&html).expect("written");
    std::fs::remove_file(&html).expect("ours");
    assert!(page.contains("<svg"));
}

/// SIGTERM would go to whoever has started the storm.
#[test]
fn a_storm_does_not_end_who_started_it() {
    let upstream = Server::start(&["fake-upstream"]);
    let storm = format!(
        "{RIG} storm drain --quiet --users 2 --seconds 1 --pid $$ --target http://{0} --upstream {0}; echo $? >&2",
        upstream.addr
    );
    // A gateway of the shell's family, so that its port is the shell's too.
    let script = format!(
        "coproc {RIG} naive-proxy --listen 127.0.0.1:0 --upstream {}; read -ru \"${{COPROC[0]}}\" line; \
         {}; kill $COPROC_PID",
        upstream.addr,
        storm.replace(&format!("http://{}", upstream.addr), "http://${line##* }")
    );
    let output = Command::new("bash").args(["-c", &script]).output();
    let output = output.expect("runs");
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(
        words.contains("(bash): it has started this storm"),
        "{words}"
    );
    assert!(words.trim_end().ends_with('2'), "{words}");
}

/// Neither would have figures of its own.
#[test]
fn a_second_storm_on_one_upstream_is_refused() {
    let upstream = Server::start(&["fake-upstream", "--pace", "20ms", "--tokens", "2000"]);
    let mut held = std::net::TcpStream::connect(upstream.addr).expect("connects");
    let body = "{\"model\":\"m\",\"stream\":true,\"messages\":[]}";
    let call = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    std::io::Write::write_all(&mut held, call.as_bytes()).expect("sent");
    std::io::Read::read_exact(&mut held, &mut [0; 12]).expect("an answer");
    let output = storm(upstream.addr, upstream.addr, upstream.child.id());
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(
        words.contains(": 1 calls of somebody else run there"),
        "{words}"
    );
    // Its own script is not what a machine can do, and is left as it was.
    drop(held);
    let output = storm(upstream.addr, upstream.addr, upstream.child.id());
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("json");
    let calls = json["ceiling"]["calls_per_second"].as_f64();
    assert!(calls > Some(500.0), "{}", json["ceiling"]);
    let mut asks = std::net::TcpStream::connect(upstream.addr).expect("connects");
    let ask = b"GET /__rig/script HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    std::io::Write::write_all(&mut asks, ask).expect("sent");
    // The connection stays open.
    let mut script = Vec::new();
    while !script.ends_with(b"}") {
        let mut some = [0; 4096];
        let n = std::io::Read::read(&mut asks, &mut some).expect("an answer");
        assert!(n > 0, "{}", String::from_utf8_lossy(&script));
        script.extend_from_slice(&some[..n]);
    }
    let script = String::from_utf8_lossy(&script);
    assert!(script.contains("\"tokens\":2000"), "{script}");
}
