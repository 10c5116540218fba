//! The program itself: arguments, signals, exit codes, and what it prints.

use std::fs::File;
use std::io::Write as _;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tidegate_rig::{BodyEnd, FakeUpstream, RawClient, Script};

use crate::support::{CHAT, SOON, eventually, stream, tick, upstream, whole};

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_tidegate");

/// A folder of its own for each test.
pub(crate) fn folder() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!(
        "it-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    );
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&path).expect("a folder");
    path
}

/// The running program and what it has printed.
pub(crate) struct Program {
    child: Child,
    folder: PathBuf,
}

impl Program {
    pub(crate) fn start(mut command: Command, folder: PathBuf) -> Self {
        let out = File::create(folder.join("out")).expect("a file");
        let err = File::create(folder.join("err")).expect("a file");
        command.stdout(out).stderr(err);
        let child = command.spawn().expect("it starts");
        Self { child, folder }
    }

    fn serve(arguments: &[&str]) -> Self {
        let mut command = Command::new(PROGRAM);
        command.arg("serve").args(arguments).stdin(Stdio::null());
        Self::start(command, folder())
    }

    /// `serve` with this file.
    pub(crate) fn configured(text: &str) -> Self {
        let folder = folder();
        std::fs::write(folder.join("tidegate.toml"), text).expect("written");
        let mut command = Command::new(PROGRAM);
        command
            .arg("serve")
            .arg("--config")
            .arg(folder.join("tidegate.toml"))
            .stdin(Stdio::null());
        Self::start(command, folder)
    }

    pub(crate) fn rewrite(&self, text: &str) {
        std::fs::write(self.folder.join("tidegate.toml"), text).expect("written");
    }

    pub(crate) fn out(&self) -> String {
        std::fs::read_to_string(self.folder.join("out")).expect("a file")
    }

    pub(crate) fn err(&self) -> String {
        std::fs::read_to_string(self.folder.join("err")).expect("a file")
    }

    /// The address after `name=` in the line that says that it is ready.
    pub(crate) async fn address(&self, name: &str) -> SocketAddr {
        let find = || -> Option<SocketAddr> {
            let text = self.err();
            let (_, rest) = text.split_once(name)?;
            rest.split_whitespace().next()?.parse().ok()
        };
        eventually("it is ready", || find().is_some()).await;
        find().expect("seen")
    }

    pub(crate) async fn says(&self, what: &str) {
        eventually(what, || self.err().contains(what)).await;
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("kill")
            .arg(format!("-{name}"))
            .arg(self.child.id().to_string())
            .status();
        assert!(status.expect("kill").success());
    }

    /// Waits until it serves, or has ended; whether it serves.
    pub(crate) async fn starts(&mut self) -> bool {
        let end = tokio::time::Instant::now() + SOON;
        loop {
            if self.err().contains("ready listen=") {
                return true;
            }
            if self.child.try_wait().expect("waited").is_some() {
                return false;
            }
            assert!(tokio::time::Instant::now() < end, "{}", self.err());
            tick().await;
        }
    }

    /// Kills it and waits until it is gone.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("waited");
    }

    pub(crate) async fn exit(&mut self) -> i32 {
        let end = tokio::time::Instant::now() + SOON;
        loop {
            if let Some(status) = self.child.try_wait().expect("waited") {
                return status.code().expect("a code, not a signal");
            }
            assert!(
                tokio::time::Instant::now() < end,
                "it does not end:\n{}",
                self.err()
            );
            tick().await;
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

pub(crate) fn file(up: &FakeUpstream, rest: &str) -> String {
    format!(
        "[server]\nlisten = \"127.0.0.1:0\"\ndrain = \"400ms\"\n[admin]\nlisten = \"127.0.0.1:0\"\n[[upstreams]]\nurl = \"http://{}\"\n{rest}\n",
        up.addr()
    )
}

pub(crate) async fn post(addr: SocketAddr, body: &Value) -> RawClient {
    let mut client = RawClient::connect(addr).await.expect("accepted");
    client.post(CHAT, &body.to_string()).await.expect("sent");
    client
}

pub(crate) fn endless() -> Value {
    stream(json!({"end": "never", "pace_ms": 10}))
}

#[tokio::test]
async fn the_smallest_start_serves_and_a_signal_ends_it() {
    let up = upstream(Script::default()).await;
    for signal in ["TERM", "INT"] {
        let url = format!("http://{}", up.addr());
        let mut program = Program::serve(&[
            "--upstream",
            &url,
            "--listen",
            "127.0.0.1:0",
            "--admin",
            "127.0.0.1:0",
        ]);
        let addr = program.address("listen=").await;
        let mut client = post(addr, &stream(json!({"tokens": 3}))).await;
        assert_eq!(client.final_head().await.expect("head").status, 200);
        assert_eq!(client.all_events().await.expect("events").1, BodyEnd::Clean);
        program.says("config=\"from flags\" upstreams=1").await;
        program.signal(signal);
        assert_eq!(program.exit().await, 0);
        let line: Value = serde_json::from_str(program.out().trim()).expect("one line");
        assert_eq!(line["outcome"], "ok");
    }
}

#[tokio::test]
async fn a_drain_ends_endless_streams_with_a_word_and_code_3() {
    let up = upstream(Script::default()).await;
    let mut program = Program::configured(&file(&up, ""));
    let addr = program.address("listen=").await;
    let mut client = post(addr, &endless()).await;
    client.final_head().await.expect("head");
    client.events(3).await.expect("events");
    program.signal("TERM");
    let (events, end) = client.all_events().await.expect("events");
    assert!(!end.looks_whole());
    assert!(events.last().expect("an event").data.contains("\"drain\""));
    assert_eq!(program.exit().await, 3, "not all calls came to their end");
    assert!(program.out().contains("\"outcome\":\"drained\""));
    up.wait_for(|t| t.running == 0, SOON).await.expect("let go");
}

#[tokio::test]
async fn c110_a_second_signal_ends_at_once() {
    let up = upstream(Script::default()).await;
    let text = file(&up, "").replace("400ms", "600s");
    let mut program = Program::configured(&text);
    let addr = program.address("listen=").await;
    let mut client = post(addr, &endless()).await;
    client.final_head().await.expect("head");
    program.signal("TERM");
    program.says("draining").await;
    let began = tokio::time::Instant::now();
    program.signal("INT");
    assert_eq!(program.exit().await, 1);
    assert!(began.elapsed() < Duration::from_secs(30));
    assert!(program.err().contains("second signal"));
    let (events, end) = client.all_events().await.expect("events");
    assert!(!end.looks_whole());
    assert!(events.last().expect("an event").data.contains("\"drain\""));
    let line: Value = serde_json::from_str(program.out().trim()).expect("one line");
    assert_eq!(line["outcome"], "drained");
}

#[tokio::test]
async fn a_reload_by_signal_or_by_file_and_a_bad_one_that_says_why() {
    let up = upstream(Script::default()).await;
    let program = Program::configured(&file(&up, ""));
    let addr = program.address("listen=").await;
    let status = async |model: &str| {
        let mut client = post(addr, &crate::support::ask(json!({"model": model}))).await;
        client.final_head().await.expect("head").status
    };
    assert_eq!(status("x").await, 200);
    program.rewrite(&file(&up, "slotz = 3\nmodels = [\"only-this\"]"));
    program.signal("HUP");
    program.says("not reloaded").await;
    let said = program.err();
    assert!(
        said.contains("slotz") && said.contains("slots") && said.contains(".toml:8"),
        "{said}"
    );
    assert_eq!(status("x").await, 200, "the old one goes on");
    // Without a signal: the file is looked at.
    program.rewrite(&file(&up, "slots = 3\nmodels = [\"only-this\"]"));
    program
        .says("configuration reloaded generation=2 cause=\"file change\"")
        .await;
    assert_eq!(status("x").await, 404);
    assert_eq!(status("only-this").await, 200);
}

/// What mends a broken configuration may be a file that only that one names.
#[tokio::test]
async fn the_files_of_a_broken_configuration_are_looked_at_too() {
    let up = upstream(Script::default()).await;
    let program = Program::configured(&file(&up, ""));
    program.address("listen=").await;
    program.rewrite(&file(&up, "api_key_file = \"late.key\""));
    program.signal("HUP");
    program.says("not reloaded").await;
    std::fs::write(program.folder.join("late.key"), "sk-late").expect("written");
    program.says("configuration reloaded generation=2").await;
    program.signal("HUP");
    program
        .says("configuration reloaded generation=3 cause=\"signal\"")
        .await;
}

/// The socket is opened by somebody else and is ours on descriptor 3.
#[tokio::test]
async fn a_socket_from_systemd_is_used() {
    let up = upstream(Script::default()).await;
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = listener.local_addr().expect("an address");
    let command = with_passed(listener.into(), &format!("http://{}", up.addr()));
    let mut program = Program::start(command, folder());
    assert_eq!(program.address("listen=").await, addr);
    let mut client = post(addr, &whole(json!({}))).await;
    assert_eq!(client.final_head().await.expect("head").status, 200);
    program.signal("TERM");
    assert_eq!(program.exit().await, 0);
}

/// `serve` with this on descriptor 3.
fn with_passed(passed: OwnedFd, url: &str) -> Command {
    let mut command = Command::new("sh");
    let script = "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" \"$@\"";
    command.args(["-c", script, PROGRAM, "serve", "--upstream", url]);
    command.args(["--listen", "127.0.0.1:1", "--admin", "off"]);
    command.stdin(Stdio::from(passed));
    command
}

/// What it says when it does not start, and its exit code.
async fn refused_passed(passed: OwnedFd) -> (i32, String) {
    let command = with_passed(passed, "http://127.0.0.1:9");
    let mut program = Program::start(command, folder());
    (program.exit().await, program.err())
}

#[tokio::test]
async fn a_socket_from_systemd_that_is_not_as_it_must_be_is_an_error() {
    let public = TcpListener::bind("0.0.0.0:0").expect("a port");
    let (code, said) = refused_passed(public.into()).await;
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("allow_unauthenticated"), "{said}");
    let datagrams = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let stream = std::net::TcpStream::connect(address).expect("connected");
    for wrong in [OwnedFd::from(datagrams), OwnedFd::from(stream)] {
        let (code, said) = refused_passed(wrong).await;
        assert_eq!(code, 1, "{said}");
        assert!(said.contains("socket number 1"), "{said}");
    }
}

/// A pipe that is full and that nobody reads.
fn full_pipe() -> (std::io::PipeReader, std::io::PipeWriter) {
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    writer.write_all(&[b'.'; 65_536]).expect("it fits");
    (reader, writer)
}

/// Whoever reads the logs may stop reading: calls go on, and the end comes all the same.
#[tokio::test]
async fn c124_full_pipes_hold_up_neither_calls_nor_the_end() {
    let up = upstream(Script::default()).await;
    for (signals, expected) in [(&["TERM"][..], 0), (&["TERM", "INT"][..], 1)] {
        let free = TcpListener::bind("127.0.0.1:0").expect("a port");
        let addr = free.local_addr().expect("an address");
        drop(free);
        let ((_unread, out), (_unread_too, err)) = (full_pipe(), full_pipe());
        let mut command = Command::new(PROGRAM);
        command.args(["serve", "--admin", "off", "--listen", &addr.to_string()]);
        command.args(["--upstream", &format!("http://{}", up.addr())]);
        command.stdin(Stdio::null()).stdout(out).stderr(err);
        let child = command.spawn().expect("it starts");
        let folder = folder();
        let mut program = Program { child, folder };
        eventually("it listens", || std::net::TcpStream::connect(addr).is_ok()).await;
        let mut client = post(addr, &whole(json!({}))).await;
        assert_eq!(client.final_head().await.expect("head").status, 200);
        drop(client);
        for signal in signals {
            program.signal(signal);
            // The second one comes while the first is at work: the listener is gone, the process is not.
            eventually("it drains", || std::net::TcpStream::connect(addr).is_err()).await;
        }
        assert_eq!(program.exit().await, expected);
    }
}

pub(crate) fn run(arguments: &[&str], environment: &[(&str, &str)]) -> (i32, String, String) {
    let mut command = Command::new(PROGRAM);
    command
        .args(arguments)
        .envs(environment.iter().copied())
        .stdin(Stdio::null());
    let output = command.output().expect("it runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.code().expect("a code"),
        text(&output.stdout),
        text(&output.stderr),
    )
}

#[test]
fn without_keys_it_serves_loopback_only_unless_told_so() {
    let serve = [
        "serve",
        "--upstream",
        "http://127.0.0.1:9",
        "--admin",
        "off",
        "--listen",
    ];
    for listen in ["0.0.0.0:0", "[::]:0"] {
        let (code, _, err) = run(&[&serve[..], &[listen]].concat(), &[]);
        assert_eq!(code, 2, "{err}");
        assert!(err.contains("allow"), "{err}");
    }
    let (code, ..) = run(
        &[
            "check",
            "--upstream",
            "http://127.0.0.1:9",
            "--listen",
            "0.0.0.0:8080",
            "--allow-unauthenticated",
        ],
        &[],
    );
    assert_eq!(code, 0);
}

#[test]
fn a_port_that_is_taken_is_said_with_code_1() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = taken.local_addr().expect("an address").to_string();
    for (listen, admin) in [(addr.as_str(), "off"), ("127.0.0.1:0", addr.as_str())] {
        let (code, _, err) = run(
            &[
                "serve",
                "--upstream",
                "http://127.0.0.1:9",
                "--listen",
                listen,
                "--admin",
                admin,
            ],
            &[],
        );
        assert_eq!(code, 1, "{err}");
        assert!(err.contains(&addr), "{err}");
    }
}

/// Nothing is unbounded when nothing is written.
#[test]
fn c137_every_safety_default_is_finite() {
    let (code, out, err) = run(&["check", "--upstream", "http://127.0.0.1:9"], &[]);
    assert_eq!(code, 0, "{err}");
    for name in [
        "request_head",
        "request_body",
        "queue",
        "pool",
        "connect",
        "tls",
        "response_head",
        "first_event",
        "silence",
        "idle",
        "write",
        "drain",
        "keep_alive",
        "connections_max",
        "event",
        "request_bodies_total",
        "slots",
    ] {
        let set = out.lines().any(|line| {
            line.trim()
                .strip_prefix(name)
                .and_then(|rest| rest.trim_start().strip_prefix('='))
                .is_some_and(|value| value.contains(|c: char| c.is_ascii_digit()))
        });
        assert!(set, "{name} in\n{out}");
    }
}

const MARKERS: [&str; 3] = [
    "marker-upstream-9c1",
    "marker-client-4d2",
    "marker-wrong-7e3",
];

/// Every level, every failure: no key in any output.
#[tokio::test]
#[expect(clippy::too_many_lines, reason = "one scene, told in its order")]
async fn c114_no_key_is_printed_whatever_happens() {
    let up = upstream(Script::default()).await;
    let dead = upstream(Script::default()).await;
    let dead_addr = dead.addr();
    dead.stop();
    let [upstream_key, client_key, wrong] = MARKERS;
    let folder = folder();
    let text = format!(
        "[server]\nlisten = \"127.0.0.1:0\"\n[admin]\nlisten = \"127.0.0.1:0\"\n[log]\nlevel = \"trace\"\n[[keys]]\nname = \"ci\"\nkey = \"${{CLIENT_KEY}}\"\n\
         [[upstreams]]\nname = \"up\"\nurl = \"http://{}\"\nmodels = [\"tiny\"]\napi_key = \"${{UP_KEY}}\"\n\
         [[upstreams]]\nname = \"dead\"\nurl = \"http://{dead_addr}\"\nmodels = [\"dead\"]\napi_key = \"${{UP_KEY}}\"\n\
         [[upstreams]]\nname = \"tls\"\nurl = \"https://{0}\"\nmodels = [\"tls\"]\napi_key = \"${{UP_KEY}}\"\n\
         [[upstreams]]\nname = \"dns\"\nurl = \"http://no-such-host.invalid\"\nmodels = [\"dns\"]\napi_key = \"${{UP_KEY}}\"\n",
        up.addr()
    );
    std::fs::write(folder.join("tidegate.toml"), &text).expect("written");
    let config = folder.join("tidegate.toml");
    let environment = [("UP_KEY", upstream_key), ("CLIENT_KEY", client_key)];
    let (code, out, err) = run(
        &["check", "--config", config.to_str().expect("text")],
        &environment,
    );
    assert_eq!(code, 0, "{err}");
    let mut shown = out + &err;
    let mut command = Command::new(PROGRAM);
    command
        .arg("serve")
        .arg("--config")
        .arg(&config)
        .envs(environment)
        .stdin(Stdio::null());
    let mut program = Program::start(command, folder);
    let addr = program.address("listen=").await;
    let admin = program.address("admin=").await;
    for model in ["tiny", "dead", "tls", "dns", "unknown"] {
        for (rig, key) in [
            (json!({}), client_key),
            (json!({"status": 401}), client_key),
            (json!({"end": "rst", "end_at": 1}), client_key),
            (json!({}), wrong),
        ] {
            let body = crate::support::ask(json!({"model": model, "stream": true, "rig": rig}))
                .to_string();
            let mut client = RawClient::connect(addr).await.expect("accepted");
            let bearer = format!("Bearer {key}");
            client
                .request(
                    "POST",
                    &format!("{CHAT}?key={key}"),
                    &[("authorization", &bearer), ("x-api-key", key)],
                    body.as_bytes(),
                )
                .await
                .expect("sent");
            let head = client.final_head().await.expect("head");
            let (body, _) = client.rest().await.expect("body");
            shown += &format!("{head:?}{}", String::from_utf8_lossy(&body));
        }
    }
    let mut client = RawClient::connect(admin).await.expect("accepted");
    client
        .request("GET", "/metrics", &[], b"")
        .await
        .expect("sent");
    client.final_head().await.expect("head");
    shown += &String::from_utf8_lossy(&client.rest().await.expect("body").0);
    // A bad configuration must not be quoted back either.
    program.rewrite(&text.replace("models = [\"tiny\"]", &format!("api_kee = \"{wrong}\"")));
    program.signal("HUP");
    program.says("not reloaded").await;
    program.signal("TERM");
    assert_eq!(program.exit().await, 0);
    shown += &program.out();
    shown += &program.err();
    assert!(shown.len() > 10_000, "there is something to look at");
    for marker in MARKERS {
        let found = shown.find(marker);
        assert!(
            found.is_none(),
            "{marker}: {}",
            found.map_or("", |at| &shown[at.saturating_sub(300)..at + 40])
        );
    }
}

/// A storm of clients that leave is one line each on the one output, and none on the other.
#[tokio::test]
async fn c131_clients_that_leave_do_not_flood_the_log() {
    let up = upstream(Script::default()).await;
    let mut program = Program::configured(&file(&up, "slots = 400"));
    let addr = program.address("listen=").await;
    let before = program.err().lines().count();
    for _ in 0..300 {
        let client = post(addr, &endless()).await;
        client.leave_rst().expect("left");
    }
    for _ in 0..30 {
        let mut client = post(addr, &stream(json!({"end": "rst", "end_at": 1}))).await;
        client.final_head().await.expect("head");
        client.rest().await.expect("an end");
    }
    eventually("their lines", || program.out().lines().count() >= 30).await;
    program.signal("TERM");
    assert_eq!(program.exit().await, 0);
    assert!(program.out().lines().count() <= 330);
    let said = program.err().lines().count() - before;
    assert!(said <= 4, "{said} lines:\n{}", program.err());
}

#[test]
fn c134_mistakes_are_told_together_with_code_2() {
    let folder = folder();
    let path = folder.join("bad.toml");
    let mut file = File::create(&path).expect("a file");
    file.write_all(
        b"[server]\nlistn = \"x\"\n[timeouts]\nidle = 30\n[[upstreams]]\nurl = \"ftp://x\"\n",
    )
    .expect("written");
    for command in ["check", "serve"] {
        let (code, _, err) = run(&[command, "--config", path.to_str().expect("text")], &[]);
        assert_eq!(code, 2, "{err}");
        for word in ["listn", "listen", "idle", "http://"] {
            assert!(err.contains(word), "{word} in {err}");
        }
    }
    std::fs::remove_dir_all(folder).expect("removed");
}
