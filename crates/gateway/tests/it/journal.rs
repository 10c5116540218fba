//! A gateway that is killed: the calls it had in flight have their lines after the next start.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use tidegate::config::Config;
use tidegate_rig::{FakeUpstream, RawClient, Script};

use crate::binary::{PROGRAM, Program, folder};
use crate::support::{CHAT, SOON, eventually, gateway, stream, upstream, whole};

fn config(up: &FakeUpstream, journal: &Path) -> String {
    format!(
        "[server]\nlisten = \"127.0.0.1:0\"\n[admin]\nlisten = \"127.0.0.1:0\"\n[log]\njournal = {:?}\n[[keys]]\nname = \"ci\"\nkey = \"sk-secret\"\n[[upstreams]]\nname = \"gpu\"\nurl = \"http://{}\"\nslots = 2\n",
        journal.display().to_string(),
        up.addr()
    )
}

async fn post(program: &Program, body: &Value) -> RawClient {
    let address = program.address("listen=").await;
    let mut client = RawClient::connect(address).await.expect("connected");
    let headers = [
        ("authorization", "Bearer sk-secret"),
        ("content-type", "application/json"),
    ];
    let body = body.to_string();
    client
        .request("POST", CHAT, &headers, body.as_bytes())
        .await
        .expect("sent");
    client
}

fn lines(program: &Program) -> Vec<Value> {
    let text = program.out();
    let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
    whole
        .lines()
        .map(|line| serde_json::from_str(line).expect("a line is JSON"))
        .collect()
}

async fn logged(program: &Program, n: usize) -> Vec<Value> {
    eventually(&format!("{n} lines"), || lines(program).len() >= n).await;
    let lines = lines(program);
    assert_eq!(lines.len(), n, "{lines:#?}");
    lines
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "one scene, told in its order")]
async fn each_call_that_a_kill_cut_off_has_its_line_after_the_next_start() {
    let up = upstream(Script::default()).await;
    let journal = folder().join("calls");
    let text = config(&up, &journal);
    let first = Program::configured(&text);
    // One that ends, one that streams, one that waits for its head, and one that waits for a slot.
    let mut ended = post(&first, &whole(json!({}))).await;
    ended.final_head().await.expect("head");
    ended.rest().await.expect("body");
    let before = logged(&first, 1).await;
    let mut streams = post(&first, &stream(json!({"end": "never", "pace_ms": 5.0}))).await;
    let head = streams.final_head().await.expect("head");
    streams.events(3).await.expect("events");
    let _waits = post(&first, &stream(json!({"stall": {"at": "head"}}))).await;
    up.wait_for(|t| t.running == 2, SOON)
        .await
        .expect("two run");
    let mut prompt = whole(json!({}));
    prompt["messages"][0]["content"] = json!("the secret of the prompt");
    let _queued = post(&first, &prompt).await;
    let noted = || {
        std::fs::read(&journal).map_or(0, |bytes| bytes.windows(3).filter(|w| w == b"gpu").count())
    };
    eventually("all are noted", || noted() == 3).await;
    first.kill();

    let bytes = std::fs::read(&journal).expect("it is there");
    for secret in ["sk-secret", "the secret of the prompt"] {
        let found = bytes.windows(secret.len()).any(|w| w == secret.as_bytes());
        assert!(!found, "{secret}");
    }
    let second = Program::configured(&text);
    let lost = logged(&second, 3).await;
    let ids: BTreeSet<_> = lost.iter().map(|line| line["id"].to_string()).collect();
    assert_eq!(ids.len(), 3);
    assert!(
        !ids.contains(&before[0]["id"].to_string()),
        "it had its line"
    );
    let id = head.header("x-request-id").or(head.header("x-tidegate-id"));
    assert!(ids.contains(&json!(id.expect("an id")).to_string()));
    let mut works = BTreeMap::new();
    for line in &lost {
        assert_eq!(
            (
                &line["outcome"],
                &line["wait_end"],
                &line["principal"],
                &line["upstream"],
                &line["model"]
            ),
            (
                &json!("lost"),
                &json!("unknown"),
                &json!("ci"),
                &json!("gpu"),
                &json!("tiny")
            ),
            "{line}"
        );
        assert!(
            line["time"].is_string() && line["usage"] == "unknown",
            "{line}"
        );
        let work = line["work_end"].as_str().expect("a word");
        assert_eq!(line["end_known"].is_string(), work == "unknown", "{line}");
        *works.entry(work).or_insert(0) += 1;
    }
    let right = BTreeMap::from([("none", 1), ("unknown", 2)]);
    assert_eq!(works, right, "the queued one was never sent");
    second.says("killed with calls in flight").await;
    let admin = second.address("admin=").await;
    let mut scrape = RawClient::connect(admin).await.expect("connected");
    scrape
        .request("GET", "/metrics", &[], b"")
        .await
        .expect("sent");
    scrape.final_head().await.expect("head");
    let (page, _) = scrape.rest().await.expect("a page");
    let page = String::from_utf8_lossy(&page).into_owned();
    let counted = "tidegate_calls_total{upstream=\"gpu\",route=\"unknown\",outcome=\"lost\"} 3";
    assert!(page.contains(counted), "{page}");

    // A second gateway may not have the file, and a killed one tells once.
    let mut other = Program::configured(&text);
    assert_ne!(other.exit().await, 0);
    assert!(
        other.err().contains("in use by another process"),
        "{}",
        other.err()
    );
    second.kill();
    let mut third = Program::configured(&text);
    let mut again = post(&third, &whole(json!({}))).await;
    again.final_head().await.expect("head");
    assert_eq!(logged(&third, 1).await[0]["outcome"], "ok");
    third.signal("TERM");
    assert_eq!(third.exit().await, 0);
    let left = std::fs::metadata(&journal).expect("it is there").len();
    assert_eq!(left, 512, "a clean end leaves nothing but the head");

    let report = Command::new(PROGRAM)
        .args(["report", "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .and_then(|mut child| {
            use std::io::Write as _;
            let text: String = lost.iter().map(|line| format!("{line}\n")).collect();
            child
                .stdin
                .take()
                .expect("a pipe")
                .write_all(text.as_bytes())?;
            child.wait_with_output()
        });
    let report: Value = serde_json::from_slice(&report.expect("a report").stdout).expect("JSON");
    assert_eq!(report["rows"][0]["lost"], 3, "{report}");
}

/// Whatever stands at the path, the gateway starts, and the file is kept.
#[tokio::test]
async fn a_file_that_is_no_journal_is_set_aside_with_a_warning() {
    let up = upstream(Script::default()).await;
    let folder = folder();
    let journal = folder.join("calls");
    std::fs::write(&journal, "my diary").expect("written");
    let program = Program::configured(&config(&up, &journal));
    program.says("it was set aside").await;
    program.address("listen=").await;
    let names: Vec<_> = std::fs::read_dir(&folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.display().to_string().contains("set-aside"))
        .collect();
    assert_eq!(names.len(), 1);
    assert_eq!(std::fs::read(&names[0]).expect("a file"), b"my diary");
}

/// A reload leaves the journal as it is, and says that another path needs a restart.
#[tokio::test]
async fn a_reload_keeps_the_journal() {
    let up = upstream(Script::default()).await;
    let folder = folder();
    let journal = folder.join("calls");
    let gate = gateway(&up, |c| c.log.journal = Some(journal.clone()));
    let mut client = gate
        .post(CHAT, &stream(json!({"end": "never", "pace_ms": 5.0})))
        .await;
    client.final_head().await.expect("head");
    let noted = || std::fs::metadata(&journal).expect("a file").len();
    assert_eq!(noted(), 1024, "the head and one call");
    let new = Config {
        log: tidegate::config::Log {
            journal: Some(folder.join("other")),
            ..gate.config().log
        },
        ..gate.config()
    };
    let done = gate.gateway.reload(new).expect("reloaded");
    assert_eq!(done.needs_restart, ["log.journal"]);
    assert!(!folder.join("other").exists());
    client.leave_fin();
    gate.settled(&up).await;
    // The place is free when the line is written.
    let taken = || std::fs::read(&journal).expect("a file")[512] != 0;
    eventually("its place is free", || !taken()).await;
    let mut next = gate.post(CHAT, &whole(json!({}))).await;
    next.final_head().await.expect("head");
    gate.logged(2).await;
    assert_eq!(noted(), 1024, "places are used again");
    assert_eq!(gate.metric("journal_missed_total", &[]), 0.0);
    gate.stop();
    assert_eq!(noted(), 512);
}
