//! The judge as a program: exit codes and clear words.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Output, Stdio};

const RIG: &str = env!("CARGO_BIN_EXE_rig");

/// A server of ours, ended with the test.
struct Server(Child, String);

impl Server {
    fn start(args: &[&str]) -> Self {
        let mut child = Command::new(RIG)
            .args(args)
            .args(["--listen", "127.0.0.1:0"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped"))
            .read_line(&mut line)
            .expect("a line");
        let addr = line.trim().rsplit([' ', '/']).next().expect("an address");
        Self(child, addr.to_owned())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn storm(target: &str, upstream: &str, pid: u32) -> Output {
    Command::new(RIG)
        .args(["load", "storm", "--users", "20", "--calls", "40"])
        .args(["--target", target, "--upstream", upstream])
        .args(["--pid", &pid.to_string()])
        .args(["--no-undisturbed", "--json"])
        .args(["--max-waste", "10%", "--max-running-after", "0"])
        .args(["--max-errors", "0", "--max-close-wait", "0"])
        .output()
        .expect("runs")
}

#[test]
fn bars_decide_the_exit_code() {
    let upstream = Server::start(&["fake-upstream"]);
    let direct = storm(&upstream.1, &upstream.1, upstream.0.id());
    assert_eq!(direct.status.code(), Some(0), "{direct:?}");
    let json: serde_json::Value = serde_json::from_slice(&direct.stdout).expect("json");
    assert_eq!(json["calls"], 40);
    assert!(json["peak"]["rss_kib"].as_u64().expect("sampled") > 0);
    let naive = Server::start(&["naive-proxy", "--upstream", &upstream.1]);
    let judged = storm(&naive.1, &upstream.1, naive.0.id());
    assert_eq!(judged.status.code(), Some(1), "{judged:?}");
    let words = String::from_utf8_lossy(&judged.stderr);
    assert!(words.contains("FAILED waste"), "{words}");
}

#[test]
fn bad_input_is_said_in_clear_words() {
    for (args, word) in [
        (&["load", "calls", "--target", "127.0.0.1:1"][..], "refused"),
        (&["load", "calls", "--pid", "999999999"], "no such process"),
        (&["load", "calls", "--header", "nonsense"], "name: value"),
        (&["fake-upstream", "--script", "{\"tokenz\":1}"], "tokenz"),
        (&["bench", "--only", "nothing"], "scenarios are"),
    ] {
        let output = Command::new(RIG).args(args).output().expect("runs");
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(words.contains(word), "{args:?}: {words}");
    }
}
