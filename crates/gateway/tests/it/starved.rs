//! The program where the machine gives it too little, or keeps it waiting: it says so, and can be ended.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tidegate_rig::{RawClient, Script};

use crate::binary::{PROGRAM, Program, file, folder};
use crate::support::{eventually, upstream};

/// Whatever a start lacks descriptors for, it says so and ends with code 1. From some number on it starts.
#[tokio::test]
async fn too_few_descriptors_are_said_with_code_1() {
    let mut started = 0;
    for limit in 4..40 {
        let mut command = Command::new("sh");
        command
            .arg("-c")
            .arg(format!("ulimit -n {limit}; exec \"$@\""))
            .args(["sh", PROGRAM, "serve"])
            .args(["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"])
            .args(["--upstream", "http://127.0.0.1:1"])
            .stdin(Stdio::null());
        let mut program = Program::start(command, folder());
        let ready = program.starts().await;
        if ready {
            program.signal("TERM");
            started += 1;
        }
        let (code, said) = (program.exit().await, program.err());
        assert_eq!(code, i32::from(!ready), "{limit}: {said}");
        assert!(!said.contains("panicked"), "{limit}: {said}");
        if !ready {
            assert!(said.contains("Too many open files"), "{limit}: {said}");
            assert!(said.contains("ulimit -n"), "{limit}: {said}");
        }
    }
    assert!((1..36).contains(&started), "both are seen: {started}");
}

fn served(config: &Path) -> Program {
    let mut command = Command::new(PROGRAM);
    command.arg("serve").arg("--config").arg(config);
    Program::start(command, folder())
}

/// A file that cannot be opened for reading for as long as this lives, as on a mount whose server is gone.
struct Hanging(Child);

impl Hanging {
    fn new(file: &Path) -> Self {
        let script = "import fcntl, os, signal, sys\n\
            signal.signal(signal.SIGIO, signal.SIG_IGN)\n\
            held = os.open(sys.argv[1], os.O_RDWR)\n\
            fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n\
            print('held', flush=True)\n\
            sys.stdin.read()";
        let mut child = Command::new("python3")
            .args(["-c", script])
            .arg(file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3");
        let mut said = String::new();
        let out = child.stdout.as_mut().expect("piped");
        BufReader::new(out).read_line(&mut said).expect("a line");
        assert_eq!(said.trim(), "held");
        Self(child)
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn serves(program: &Program) {
    let at = program.address("listen=").await;
    let mut client = RawClient::connect(at).await.expect("accepted");
    client
        .request("GET", "/v1/models", &[], b"")
        .await
        .expect("sent");
    assert_eq!(client.final_head().await.expect("a head").status, 200);
}

/// Signalled until one reload stands in the file and another waits behind it.
async fn stuck(program: &Program) {
    eventually("a reload waits", || {
        program.signal("HUP");
        program.err().contains("still being read")
    })
    .await;
}

/// Whatever a reload waits for, what is signalled meanwhile is heard; a drain and its end wait for no file.
#[tokio::test]
async fn signals_are_heard_while_a_reload_waits_for_a_file() {
    let up = upstream(Script::default()).await;
    for end in ["TERM", "INT"] {
        let config = folder().join("tidegate.toml");
        std::fs::write(&config, file(&up, "")).expect("written");
        let mut program = served(&config);
        serves(&program).await;
        let hanging = Hanging::new(&config);
        stuck(&program).await;
        // What the log marks as a warning does not say so twice.
        let kind = "the kind is not given";
        assert!(program.err().contains(kind) && !program.err().contains("warning: "));
        serves(&program).await;
        program.signal(end);
        assert_eq!(program.exit().await, 0, "{}", program.err());
        drop(hanging);
    }
}

/// Once it can be read, what was asked for is done: one reload after the other.
#[tokio::test]
async fn a_reload_that_waited_goes_on_and_the_next_follows() {
    let up = upstream(Script::default()).await;
    let config = folder().join("tidegate.toml");
    std::fs::write(&config, file(&up, "")).expect("written");
    let program = served(&config);
    serves(&program).await;
    let hanging = Hanging::new(&config);
    stuck(&program).await;
    assert!(!program.err().contains("reloaded"), "{}", program.err());
    drop(hanging);
    program.says("reloaded generation=2").await;
    program.says("reloaded generation=3").await;
    serves(&program).await;
}

fn fifo() -> PathBuf {
    let path = folder().join("fifo");
    let made = Command::new("mkfifo").arg(&path).status();
    assert!(made.expect("mkfifo").success());
    path
}

/// A configuration can come through a pipe, once. A reload does not wait for somebody to write it again.
#[tokio::test]
async fn a_configuration_out_of_a_pipe_is_read_once() {
    let up = upstream(Script::default()).await;
    let text = file(&up, "");
    let fifo = fifo();
    let shell = format!("exec {PROGRAM} serve -c <(printf '%s' \"$0\")");
    let mut substituted = Command::new("bash");
    substituted.arg("-c").arg(shell).arg(&text);
    let mut piped = Command::new(PROGRAM);
    piped.args(["serve", "-c", "/dev/stdin"]);
    let (reads, mut writes) = std::io::pipe().expect("a pipe");
    piped.stdin(reads);
    writes.write_all(text.as_bytes()).expect("written");
    drop(writes);
    let by_name = served(&fifo);
    std::fs::write(&fifo, &text).expect("it is read");
    for mut program in [
        by_name,
        Program::start(substituted, folder()),
        Program::start(piped, folder()),
    ] {
        serves(&program).await;
        program.signal("HUP");
        program.says("cannot be read: not a second time").await;
        program.says("start the gateway anew").await;
        serves(&program).await;
        program.signal("TERM");
        assert_eq!(program.exit().await, 0, "{}", program.err());
    }
}
