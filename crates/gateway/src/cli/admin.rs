//! `tidegate calls` and `tidegate kill`: the admin port, from the command line.
//!
//! A few bytes of HTTP over a blocking socket: no runtime for one request.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use clap::Args;
use serde_json::Value;

use super::{Exit, Output};

/// Longest wait for the port and for its answer.
const TIME: Duration = Duration::from_secs(5);
/// Longest answer that is read: some hundred thousand calls.
const ANSWER_BYTES: u64 = 64 << 20;

const ADMIN: &str = "127.0.0.1:9090";

/// Where the admin port is.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct At {
    /// Address and port of the running gateway's admin port, or its URL
    #[arg(long, value_name = "ADDRESS", default_value = ADMIN)]
    pub admin: String,
}

/// How the calls in flight are shown.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct Calls {
    #[command(flatten)]
    pub at: At,
    /// As the admin port gives it
    #[arg(long)]
    pub json: bool,
}

/// Which calls are to end.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
#[command(group(clap::ArgGroup::new("which").required(true)))]
pub struct Kill {
    /// Id of the call, as `tidegate calls` shows it
    #[arg(value_name = "ID", group = "which")]
    pub id: Option<String>,
    /// All calls of this upstream
    #[arg(long, value_name = "NAME", group = "which")]
    pub upstream: Option<String>,
    #[command(flatten)]
    pub at: At,
}

/// `tidegate calls`. Blocks on the network.
pub fn calls(args: &Calls) -> Output {
    let body = match ask(&args.at.admin, "GET", "/admin/calls") {
        Ok((200, body)) => body,
        Ok((status, body)) => return failed(&format!("{status}: {}", body.trim())),
        Err(why) => return failed(&why),
    };
    if args.json {
        return said(body);
    }
    match serde_json::from_str::<Value>(&body) {
        Ok(value) => said(table(value["calls"].as_array().map_or(&[], Vec::as_slice))),
        Err(_) => failed("the answer is no list of calls: is this a gateway's admin port?"),
    }
}

/// `tidegate kill`. Blocks on the network.
pub fn kill(args: &Kill) -> Output {
    let path = match (&args.id, &args.upstream) {
        (_, Some(upstream)) => format!("/admin/upstreams/{upstream}/calls"),
        (Some(id), None) => format!("/admin/calls/{id}"),
        (None, None) => return failed("say which call: an ID, or --upstream NAME"),
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.@/".contains(c);
    if !path.chars().all(plain) {
        return failed("that is neither an id nor a name; `tidegate calls` shows both");
    }
    match ask(&args.at.admin, "DELETE", &path) {
        Ok((200, body)) => {
            let ended = serde_json::from_str::<Value>(&body).ok();
            let ended = ended.and_then(|value| value["ended"].as_u64());
            said(format!("ended: {}\n", ended.unwrap_or(0)))
        }
        Ok((_, body)) => failed(body.trim()),
        Err(why) => failed(&why),
    }
}

fn said(stdout: String) -> Output {
    Output {
        stdout,
        stderr: String::new(),
        exit: Exit::Ok,
    }
}

fn failed(why: &str) -> Output {
    Output {
        stdout: String::new(),
        stderr: format!("tidegate: {why}\n"),
        exit: Exit::Failed,
    }
}

/// One request and its answer: status and body.
fn ask(admin: &str, method: &str, path: &str) -> Result<(u16, String), String> {
    let address = admin.strip_prefix("http://").unwrap_or(admin);
    let address = address.trim_end_matches('/');
    let resolved = address
        .to_socket_addrs()
        .ok()
        .and_then(|mut all| all.next())
        .ok_or_else(|| {
            format!("{admin} is not the address of an admin port: write it like {ADMIN}")
        })?;
    let exchange = || -> std::io::Result<Vec<u8>> {
        let mut tcp = TcpStream::connect_timeout(&resolved, TIME)?;
        tcp.set_read_timeout(Some(TIME))?;
        tcp.set_write_timeout(Some(TIME))?;
        write!(
            tcp,
            "{method} {path} HTTP/1.1\r\nhost: {resolved}\r\nx-tidegate-admin: 1\r\nconnection: close\r\n\r\n"
        )?;
        let mut answer = Vec::new();
        tcp.take(ANSWER_BYTES).read_to_end(&mut answer)?;
        Ok(answer)
    };
    let answer = exchange().map_err(|error| {
        format!("the admin port at {resolved} cannot be asked: {error}; is the gateway running, and is --admin right?")
    })?;
    read(&answer).ok_or_else(|| format!("what answers at {resolved} is no gateway's admin port"))
}

/// Status and body of an answer that ends with its connection.
fn read(answer: &[u8]) -> Option<(u16, String)> {
    let mut fields = [httparse::EMPTY_HEADER; 32];
    let mut head = httparse::Response::new(&mut fields);
    let Ok(httparse::Status::Complete(length)) = head.parse(answer) else {
        return None;
    };
    let status = head.code?;
    let body = answer.get(length..)?;
    Some((status, String::from_utf8_lossy(body).into_owned()))
}

/// A table for people, the oldest call first.
fn table(calls: &[Value]) -> String {
    let mut rows = vec![
        [
            "ID", "KEY", "MODEL", "UPSTREAM", "PHASE", "STATE", "AGE", "LEFT", "TOKENS",
        ]
        .map(str::to_owned),
    ];
    rows.extend(calls.iter().map(cells));
    aligned(&rows)
}

/// Columns of equal width.
pub(super) fn aligned<const N: usize>(rows: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(widths) {
            line += cell;
            line.extend(std::iter::repeat_n(' ', width + 2 - cell.chars().count()));
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

fn cells(call: &Value) -> [String; 9] {
    let text = |name: &str| {
        let shown = call[name].as_str().unwrap_or("-");
        // What a client chose must not steer a terminal.
        shown.replace(|c: char| c.is_control(), "?")
    };
    let seconds = |name: &str| match call[name].as_f64() {
        Some(seconds) => format!("{seconds:.1}s"),
        None => "-".to_owned(),
    };
    [
        text("id"),
        text("key"),
        text("model"),
        text("upstream"),
        text("phase"),
        text("state"),
        seconds("age_seconds"),
        seconds("left_seconds"),
        call["tokens"].as_u64().unwrap_or(0).to_string(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_a_line_for_each_call_and_no_control_characters() {
        let calls = serde_json::json!([
            {"id": "req_1", "key": "ci", "model": "m\u{1b}[2J", "upstream": "gpu", "phase": "streaming",
             "state": "attended", "age_seconds": 1.25, "left_seconds": null, "tokens": 7},
        ]);
        let text = table(calls.as_array().unwrap());
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 2);
        assert!(lines[0].starts_with("ID     KEY"), "{text}");
        assert!(
            lines[1].contains("m?[2J") && lines[1].contains("1.2s"),
            "{text}"
        );
    }

    #[test]
    fn bad_input_is_told_apart() {
        let at = |admin: &str| At {
            admin: admin.to_owned(),
        };
        let nowhere = calls(&Calls {
            at: at("nowhere"),
            json: false,
        });
        assert!(nowhere.stderr.contains("write it like 127.0.0.1:9090"));
        let closed = kill(&Kill {
            id: Some("req_1".into()),
            upstream: None,
            at: at("http://127.0.0.1:1"),
        });
        assert!(
            closed.stderr.contains("is the gateway running"),
            "{}",
            closed.stderr
        );
        let odd = kill(&Kill {
            id: Some("a b\r\n".into()),
            upstream: None,
            at: at(ADMIN),
        });
        assert!(odd.stderr.contains("neither an id nor a name"));
        assert_eq!(read(b"SSH-2.0-OpenSSH\r\n"), None);
    }
}
