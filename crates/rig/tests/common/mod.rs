//! The judge's own programs, run by its tests.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

pub(crate) const RIG: &str = env!("CARGO_BIN_EXE_rig");

/// A server of ours, ended with the test.
pub(crate) struct Server {
    pub(crate) child: Child,
    pub(crate) addr: SocketAddr,
}

impl Server {
    pub(crate) fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(RIG)
            .args(arguments)
            .args(["--listen", "127.0.0.1:0"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped"))
            .read_line(&mut line)
            .expect("a line");
        let addr = line.trim().rsplit([' ', '/']).next().expect("a word");
        let addr = addr.parse().expect("an address");
        Self { child, addr }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
