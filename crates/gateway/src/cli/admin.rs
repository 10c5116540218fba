//! `tidegate calls` and `tidegate kill`: the admin port, from the command line.
//!
//! A few bytes of HTTP over a blocking socket: no runtime for one request.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use clap::Args;
use serde_json::Value;

use super::{Exit, Output};
use crate::config::Sources;

/// Longest wait for the port and for its answer.
const TIME: Duration = Duration::from_secs(5);
/// Longest answer that is read: some hundred thousand calls.
const ANSWER_BYTES: u64 = 64 << 20;

const ADMIN: &str = "127.0.0.1:9090";

/// Where the admin port is.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct At {
    /// Address and port of the running gateway's admin port, or its URL [env: TIDEGATE_ADMIN] [default: 127.0.0.1:9090]
    #[arg(long, value_name = "ADDRESS")]
    pub admin: Option<String>,
}

impl At {
    /// What no flag says, the variable does by which the gateway itself was told.
    pub(super) fn or(&mut self, sources: &Sources) {
        if self.admin.is_none() {
            let told = sources.env.get("TIDEGATE_ADMIN").map(str::trim);
            self.admin = told.filter(|told| !told.is_empty()).map(str::to_owned);
        }
    }

    /// Looks the name up. Blocks.
    ///
    /// # Errors
    ///
    /// What is wrong, and what to write.
    pub(super) fn resolve(&self) -> Result<SocketAddr, String> {
        let admin = self.admin.as_deref().unwrap_or(ADMIN);
        if admin == "off" {
            return Err(
                "the admin port is off (--admin, TIDEGATE_ADMIN): there is none to ask".to_owned(),
            );
        }
        let address = admin.strip_prefix("http://").unwrap_or(admin);
        let address = address.trim_end_matches('/');
        let resolved = address
            .to_socket_addrs()
            .ok()
            .and_then(|mut all| all.next());
        resolved.ok_or_else(|| {
            format!("{admin} is not the address of an admin port: write it like {ADMIN}")
        })
    }
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
    let body = match ask(&args.at, "GET", "/admin/calls") {
        Ok((200, body)) => body,
        // A gateway says so in a line of its own.
        Ok((403, body)) => return failed(body.trim()),
        Ok((status, _)) => return failed(&no_gateway(&args.at, &format!("it says {status}"))),
        Err(why) => return failed(&why),
    };
    let value = serde_json::from_str::<Value>(&body).unwrap_or_default();
    let Some(calls) = value["calls"].as_array() else {
        return failed(&no_gateway(&args.at, "its answer is no list of calls"));
    };
    if args.json {
        return said(body);
    }
    let upstreams = value["upstreams"].as_array().map_or(&[][..], Vec::as_slice);
    said(format!("{}\n{}", head(upstreams), table(calls)))
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
    match ask(&args.at, "DELETE", &path) {
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
fn ask(at: &At, method: &str, path: &str) -> Result<(u16, String), String> {
    let resolved = at.resolve()?;
    let exchange = || -> std::io::Result<Vec<u8>> {
        let mut tcp = TcpStream::connect_timeout(&resolved, TIME)?;
        tcp.set_read_timeout(Some(TIME))?;
        tcp.set_write_timeout(Some(TIME))?;
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: {resolved}\r\nx-tidegate-admin: 1\r\nconnection: close\r\n\r\n"
        );
        tcp.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        tcp.take(ANSWER_BYTES).read_to_end(&mut answer)?;
        Ok(answer)
    };
    let answer = exchange().map_err(|error| {
        format!("the admin port at {resolved} cannot be asked: {error}; is the gateway running, and is --admin right?")
    })?;
    read(&answer).ok_or_else(|| no_gateway(at, "it speaks no HTTP"))
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

fn no_gateway(at: &At, why: &str) -> String {
    let admin = at.admin.as_deref().unwrap_or(ADMIN);
    format!(
        "{admin} does not answer as a gateway's admin port does: {why}; --admin names another (clients have a port of their own)"
    )
}

/// A line for each endpoint; the counts of an upstream stand in its first.
fn head(upstreams: &[Value]) -> String {
    let mut rows = vec![
        [
            "UPSTREAM",
            "SLOTS",
            "RUNNING",
            "LINGERING",
            "QUEUED",
            "ENDPOINT",
            "STATE",
        ]
        .map(str::to_owned),
    ];
    for upstream in upstreams {
        let count = |name: &str| upstream[name].as_u64().unwrap_or(0).to_string();
        let mut counts = [
            shown(&upstream["name"]),
            count("slots"),
            count("running"),
            count("lingering"),
            format!("{} of {}", count("queued"), count("queue")),
        ];
        for endpoint in upstream["endpoints"].as_array().into_iter().flatten() {
            let [name, slots, running, lingering, queued] = std::mem::take(&mut counts);
            let (endpoint, state) = (shown(&endpoint["endpoint"]), state(endpoint));
            rows.push([name, slots, running, lingering, queued, endpoint, state]);
        }
    }
    aligned(&rows)
}

/// Whether it can be connected to, and what it last failed with.
fn state(endpoint: &Value) -> String {
    let error = &endpoint["last_error"];
    let last = format!(
        "{} ago: {} ({})",
        seconds(&error["seconds"]),
        shown(&error["error"]),
        shown(&error["reason"])
    );
    if endpoint["left_out_seconds"].is_number() {
        let since = seconds(&endpoint["left_out_seconds"]);
        format!("left out since {since}; last tried {last}")
    } else if error.is_object() {
        format!("ok; {last}")
    } else {
        "ok".to_owned()
    }
}

/// What others chose must not steer a terminal.
fn shown(value: &Value) -> String {
    let text = value.as_str().unwrap_or("-");
    text.replace(|c: char| c.is_control(), "?")
}

fn seconds(value: &Value) -> String {
    let seconds = value.as_f64().map(|seconds| format!("{seconds:.1}s"));
    seconds.unwrap_or_else(|| "-".to_owned())
}

/// A table for people, the oldest call first.
fn table(calls: &[Value]) -> String {
    let mut rows = vec![
        [
            "ID",
            "KEY",
            "MODEL",
            "UPSTREAM",
            "PHASE",
            "STATE",
            "AGE",
            "LEFT",
            "TOKENS",
            "ATTACHABLE",
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

fn cells(call: &Value) -> [String; 10] {
    let text = |name: &str| shown(&call[name]);
    let attachable = call["attachable"].as_bool() == Some(true);
    [
        text("id"),
        text("key"),
        text("model"),
        text("upstream"),
        text("phase"),
        text("state"),
        seconds(&call["age_seconds"]),
        seconds(&call["left_seconds"]),
        call["tokens"].as_u64().unwrap_or(0).to_string(),
        if attachable { "yes" } else { "-" }.to_owned(),
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
    fn a_retry_finds_its_call_in_the_table_only_where_it_says_so() {
        let call = |attachable| serde_json::json!({"id": "req_1", "attachable": attachable});
        let text = table(&[call(true), call(false)]);
        let ends: Vec<_> = text.lines().map(|line| line.rsplit(' ').next()).collect();
        assert_eq!(ends, [Some("ATTACHABLE"), Some("yes"), Some("-")], "{text}");
    }

    #[test]
    fn the_head_has_a_line_for_each_endpoint_and_says_which_is_left_out_and_why() {
        let error = serde_json::json!({"reason": "refused", "error": "Connection\n refused", "seconds": 2.04});
        let upstreams = serde_json::json!([
            {"name": "gpu", "slots": 8, "running": 3, "lingering": 1, "queued": 2, "queue": 16, "endpoints": [
                {"endpoint": "127.0.0.1:8000", "left_out_seconds": 12.25, "last_error": error},
                {"endpoint": "127.0.0.1:8001", "left_out_seconds": null, "last_error": error},
            ]},
            {"name": "cloud", "slots": 4, "running": 0, "lingering": 0, "queued": 0, "queue": 4, "endpoints": [
                {"endpoint": "a.example", "left_out_seconds": null, "last_error": null},
            ]},
        ]);
        let text = head(upstreams.as_array().unwrap());
        let lines: Vec<Vec<_>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        let tried = "2.0s ago: Connection? refused (refused)";
        let gpu =
            format!("gpu 8 3 1 2 of 16 127.0.0.1:8000 left out since 12.2s; last tried {tried}");
        assert_eq!(lines.len(), 4, "{text}");
        assert_eq!(lines[1].join(" "), gpu);
        assert_eq!(lines[2].join(" "), format!("127.0.0.1:8001 ok; {tried}"));
        assert_eq!(lines[3].join(" "), "cloud 4 0 0 0 of 4 a.example ok");
    }

    /// The commonest slip: the port of the clients, or of the model server.
    #[test]
    fn what_is_no_admin_port_is_named_and_so_is_the_flag() {
        let whose = |answer: &'static str| {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let admin = listener.local_addr().unwrap().to_string();
            let server = std::thread::spawn(move || {
                let (mut tcp, _) = listener.accept().unwrap();
                // All of it: what is unread when this is closed would be a reset.
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    let mut byte = [0];
                    tcp.read_exact(&mut byte).unwrap();
                    request.extend(byte);
                }
                tcp.write_all(answer.as_bytes()).unwrap();
            });
            let at = At {
                admin: Some(admin.clone()),
            };
            let output = calls(&Calls { at, json: true });
            server.join().unwrap();
            assert_eq!((output.exit, output.stdout.as_str()), (Exit::Failed, ""));
            let said = format!("{admin} does not answer as a gateway's admin port does");
            assert!(output.stderr.contains(&said), "{}", output.stderr);
            assert!(output.stderr.contains("--admin"), "{}", output.stderr);
        };
        whose("HTTP/1.1 404 Not Found\r\n\r\n{\"error\":{\"message\":\"File Not Found\"}}");
        whose("HTTP/1.1 200 OK\r\n\r\n{\"models\":[]}");
        whose("SSH-2.0-OpenSSH\r\n");
    }

    #[test]
    fn bad_input_is_told_apart() {
        let at = |admin: &str| At {
            admin: Some(admin.to_owned()),
        };
        assert!(at("off").resolve().unwrap_err().contains("is off"));
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
