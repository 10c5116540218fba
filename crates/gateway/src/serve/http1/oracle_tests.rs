//! The same bytes to hyper's server and to ours: what ours takes for a request is one for hyper too, and the same one. Where ours is stricter,
//! that is on purpose: `docs/decisions/0018` says where.
//!
//! Streams are made from a grammar by a seed, well-formed or with some bytes changed, and cut into pieces. `ORACLE_SEEDS=100000` runs more.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use fastrand::Rng;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;

use super::tests::{client, connection};
use super::*;
use crate::call::answer::AnswerHead;
use crate::call::downstream::Client;
use crate::fields::Fields;

/// A request as a server saw it. `body`: as far as it came, and whether it was whole.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    head: String,
    body: String,
    whole: bool,
}

type Notes = Arc<Mutex<Vec<Seen>>>;

/// Answers with what the path says, after it has noted the request.
async fn note<B: http_body::Body<Data = Bytes> + Unpin>(
    notes: Notes,
    request: Request<B>,
) -> Response<Bytes> {
    let (parts, mut body) = request.into_parts();
    let fields: BTreeSet<String> = parts
        .headers
        .keys()
        .map(|name| format!("{name}={:?}", Vec::from_iter(parts.headers.get_all(name))))
        .collect();
    let head = format!(
        "{} {} {:?} {fields:?}",
        parts.method, parts.uri, parts.version
    );
    let at = {
        let mut notes = notes.lock().expect("sound");
        notes.push(Seen {
            head,
            body: String::new(),
            whole: false,
        });
        notes.len() - 1
    };
    let whole = loop {
        match body.frame().await {
            None => break true,
            Some(Err(_)) => break false,
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    notes.lock().expect("sound")[at].body += &String::from_utf8_lossy(&data);
                }
            }
        }
    };
    notes.lock().expect("sound")[at].whole = whole;
    let status = match parts.uri.path() {
        "/204" => StatusCode::NO_CONTENT,
        "/304" => StatusCode::NOT_MODIFIED,
        _ => StatusCode::OK,
    };
    let body = match status {
        StatusCode::OK => format!("HTTP {}", parts.uri.path()).into(),
        _ => Bytes::new(),
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response
}

#[derive(Clone, Debug)]
struct Noting(Notes);

impl Answers for Noting {
    fn answer(&self, request: super::Request, client: Client) -> Handover<Answer> {
        let (notes, client) = (Arc::clone(&self.0), Arc::new(client));
        let reader = Arc::clone(&client);
        let answer = || async move {
            let mut asked = Request::new(request.body);
            *asked.method_mut() = request.method;
            *asked.uri_mut() = request.target;
            *asked.version_mut() = request.version;
            *asked.headers_mut() = request.fields.to_map();
            let (head, body) = note(notes, asked).await.into_parts();
            let (status, fields) = (head.status, Fields::default());
            let mut answer = Answer::whole(AnswerHead { status, fields }, body);
            answer.body = answer.body.holding(reader);
            answer
        };
        Handover::new(answer, client)
    }
}

async fn ours(pieces: &[&[u8]]) -> (Vec<Seen>, String) {
    let notes = Notes::default();
    let (tcp, conn) = connection(HalfClose::Serve, Noting(Arc::clone(&notes))).await;
    tcp.set_nodelay(true).expect("set");
    let (_, read) = tokio::join!(conn, client(tcp, pieces));
    let seen = notes.lock().expect("sound").clone();
    (seen, read)
}

async fn hypers(pieces: &[&[u8]]) -> (Vec<Seen>, String) {
    let notes = Notes::default();
    let (io, server) = tokio::io::duplex(64 * 1024);
    let of = Arc::clone(&notes);
    let service = service_fn(move |request| {
        let response = note(Arc::clone(&of), request);
        async move { Ok::<_, Infallible>(response.await.map(Full::new)) }
    });
    let conn = async {
        let mut builder = hyper::server::conn::http1::Builder::new();
        let conn = builder.half_close(true);
        let _ = conn.serve_connection(TokioIo::new(server), service).await;
    };
    let ((), read) = tokio::join!(conn, client(io, pieces));
    let seen = notes.lock().expect("sound").clone();
    (seen, read)
}

fn one<'a>(rng: &mut Rng, of: &[&'a str]) -> &'a str {
    of[rng.usize(..of.len())]
}

/// What a well-formed request may consist of, and what none that we take may.
fn request(rng: &mut Rng, odd: bool) -> String {
    let mut version = one(rng, &["1.1", "1.1", "1.1", "1.0"]);
    let end = if odd && rng.u8(..8) == 0 {
        "\n"
    } else {
        "\r\n"
    };
    let mut fields = format!("Host: a{end}");
    for _ in 0..rng.usize(..4) {
        fields += one(
            rng,
            &[
                "X: y",
                "x:",
                "X-Long:  \t a b\tc  ",
                "Accept: */*",
                "Connection: keep-alive",
                "Connection: TE, close",
                "connection: x",
                "Expect: 100-continue",
                "Upgrade: h2c",
                "TE: trailers",
                "X: \u{e9}",
                "Keep-Alive: timeout=5",
            ],
        );
        fields += end;
    }
    let body = match rng.u8(..4) {
        0 => String::new(),
        1 => {
            let body = "GET /hidden HTTP/1.1\r\n\r\n".repeat(rng.usize(..3));
            fields += &format!("Content-Length: {}{end}", body.len());
            if rng.u8(..4) == 0 {
                fields += &format!("content-length: {}{end}", body.len());
            }
            body
        }
        _ => {
            version = "1.1";
            fields += &format!(
                "Transfer-Encoding: {}{end}",
                one(rng, &["chunked", "Chunked"])
            );
            chunks(rng)
        }
    };
    if odd && rng.u8(..4) == 0 {
        fields += one(
            rng,
            &[
                "Content-Length: 5",
                "Content-Length: +5",
                "Content-Length: 5, 5",
                "Content-Length:",
                "Transfer-Encoding: chunked",
                "Transfer-Encoding: gzip, chunked",
                "Transfer-Encoding: chunked, identity",
                "Transfer-Encoding: \u{b}chunked",
                "Transfer-Encoding : chunked",
                "Transfer-Encoding:\r\n chunked",
                "X: a\r\n b",
                "Host: b",
                "X\0: y",
                "X: \0",
                ": x",
                "X: a\rContent-Length: 5",
                "Connection: content-length",
                "Connection: host",
                "Expect: 100-continue, x",
            ],
        );
        fields += end;
        if rng.bool() {
            version = one(rng, &["1.0", "1.2", "2.0", "0.9", "1.10", "01.1"]);
        }
    }
    let targets = [
        "/",
        "/a?b=c",
        "/204",
        "/304",
        "http://b/c",
        "*",
        "/%00",
        "/a//..;/b",
        "b:80",
    ];
    format!(
        "{}{} {} HTTP/{version}{end}{fields}{end}{body}",
        one(rng, &["", "", "", "\r\n", "\r\n\r\n"]),
        one(
            rng,
            &["GET", "POST", "HEAD", "PUT", "OPTIONS", "TRACE", "M-SEARCH"]
        ),
        one(rng, &targets),
    )
}

fn chunks(rng: &mut Rng) -> String {
    let mut body = String::new();
    for _ in 0..rng.usize(..4) {
        let data = one(
            rng,
            &[
                "x",
                "0\r\n\r\n",
                "abcdefghijklmnopq",
                "POST / HTTP/1.1\r\n\r\n",
            ],
        );
        let ext = one(rng, &["", "", "", ";a", ";a=b", " ;a=\"b c\"", ";"]);
        let size = format!("{:x}", data.len());
        let zeros = one(rng, &["", "0", "00"]);
        body += &format!(
            "{zeros}{}{ext}\r\n{data}\r\n",
            if rng.bool() {
                size.to_uppercase()
            } else {
                size
            }
        );
    }
    body + one(rng, &["0", "000", "0;x=y"])
        + "\r\n"
        + one(rng, &["", "", "T: u\r\n", "T: u\r\nV:\r\n"])
        + "\r\n"
}

/// Some bytes changed for such as have a meaning.
fn mutated(rng: &mut Rng, bytes: &mut Vec<u8>) {
    const MEANT: &[u8] = b"\r\n\n\0 \t:;,/0159afFgG+-_\"\x7f\x80\xff";
    for _ in 0..rng.usize(1..4) {
        let at = rng.usize(..bytes.len());
        let byte = MEANT[rng.usize(..MEANT.len())];
        match rng.u8(..4) {
            0 => bytes[at] = byte,
            1 => bytes.insert(at, byte),
            2 => bytes.truncate(at + 1),
            _ => drop(bytes.remove(at)),
        }
        if bytes.is_empty() {
            return;
        }
    }
}

/// Status lines, fields and bodies of the answers, sorted within each answer. Not their dates, nor that the connection ends where it does so
/// anyway: hyper does not tell that to a client of HTTP/1.0.
fn answered(read: &str) -> Vec<BTreeSet<String>> {
    let head = |of: &str| {
        let lines = of.lines().map(str::to_ascii_lowercase);
        let old = of.starts_with('0');
        let told = |line: &String| {
            let ends = old && line == "connection: close";
            !line.is_empty() && !line.starts_with("date:") && !ends
        };
        lines.filter(told).collect()
    };
    let last = |of: &&str| !of.starts_with("1 100");
    read.split("HTTP/1.")
        .skip(1)
        .filter(last)
        .map(head)
        .collect()
}

async fn compared(seed: u64) -> Option<String> {
    let mut rng = Rng::with_seed(seed);
    let kind = rng.u8(..3);
    let mut bytes = Vec::new();
    for _ in 0..rng.usize(1..5) {
        bytes.extend_from_slice(request(&mut rng, kind == 1).as_bytes());
    }
    if kind == 2 {
        mutated(&mut rng, &mut bytes);
    }
    let at_once = [1, 2, 7, 30, 100, 10_000][rng.usize(..6)];
    let pieces: Vec<&[u8]> = bytes.chunks(at_once).collect();
    let ((ours, told), (theirs, theirs_told)) = (ours(&pieces).await, hypers(&pieces).await);
    let whole = |(our, their): (&Seen, &Seen)| {
        our.head == their.head && (!our.whole || (their.whole && our.body == their.body))
    };
    let mut same = ours.len() <= theirs.len() && ours.iter().zip(&theirs).all(whole);
    if kind == 0 {
        same &= ours == theirs && answered(&told) == answered(&theirs_told);
    }
    (!same).then(|| {
        let text = String::from_utf8_lossy(&bytes);
        format!("seed {seed}, kind {kind}, {at_once} at once: {text:?}\nours: {ours:#?}\n{told}\nhyper's: {theirs:#?}\n{theirs_told}")
    })
}

#[tokio::test]
async fn what_is_a_request_for_us_is_the_same_request_for_hyper() {
    let seeds = std::env::var("ORACLE_SEEDS")
        .ok()
        .and_then(|n| n.parse().ok());
    let mut differ = Vec::new();
    for seed in 0..seeds.unwrap_or(600) {
        differ.extend(compared(seed).await);
    }
    let some = differ
        .iter()
        .take(3)
        .map(String::as_str)
        .collect::<Vec<_>>();
    assert!(
        differ.is_empty(),
        "{} differ: {}",
        differ.len(),
        some.join("\n\n")
    );
}
