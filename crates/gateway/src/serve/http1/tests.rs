use std::sync::Arc;
use std::task::Waker;

use bytes::BytesMut;
use http::StatusCode;
use http_body_util::BodyExt;
use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::TaskTracker;

use super::*;
use crate::call::answer::AnswerHead;
use crate::call::downstream::Client;
use crate::fields::{Field, Fields, list};
use crate::serve::socket::{IoState, Tcp, Transport};

const MAX: usize = 64 * 1024;

fn parsed(text: &str) -> Result<Option<RequestHead>, Bad> {
    head::parse(&mut BytesMut::from(text), &mut 0, MAX)
}

#[test]
fn a_head_says_how_its_body_is_framed_and_what_follows() {
    for (fields, version, length, keeps) in [
        ("", "1.1", Some(0), true),
        ("", "1.0", Some(0), false),
        ("Connection: keep-alive\r\n", "1.0", Some(0), true),
        ("Connection: TE, Close\r\n", "1.1", Some(0), false),
        (
            "Connection: close\r\nConnection: keep-alive\r\n",
            "1.1",
            Some(0),
            false,
        ),
        ("Content-Length: 12\r\n", "1.1", Some(12), true),
        (
            "Content-Length: 12\r\ncontent-length: 12\r\n",
            "1.1",
            Some(12),
            true,
        ),
        ("Transfer-Encoding: CHUNKED\r\n", "1.1", None, true),
    ] {
        let text = format!("POST /v1/x?y HTTP/{version}\r\nHost: a\r\n{fields}\r\n");
        let head = parsed(&text).expect("well-formed").expect("whole");
        assert_eq!((head.length, head.keeps), (length, keeps), "{text}");
        assert_eq!(head.target, "/v1/x?y");
        assert_eq!(head.fields.get(Field::Host).unwrap(), b"a");
        assert!(!head.fields.repeats(Field::ContentLength));
    }
}

#[test]
fn what_can_be_read_in_two_ways_is_refused() {
    for fields in [
        "Content-Length: 1\r\nContent-Length: 2\r\n",
        "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 1\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: +1\r\n",
        "Content-Length: 1,1\r\n",
        "Content-Length:\r\n",
        "Content-Length: 99999999999999999999\r\n",
        "Content-Length : 1\r\n",
        "X: a\r\n b\r\n",
        "X: a\rb\r\n",
        "X: a\0b\r\n",
    ] {
        let text = format!("POST / HTTP/1.1\r\nHost: a\r\n{fields}\r\n");
        assert_eq!(parsed(&text).expect_err(fields), Bad::Malformed);
    }
    let old = "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert_eq!(parsed(old).expect_err("no chunks"), Bad::Malformed);
}

#[test]
fn a_head_that_is_too_large_is_told_so_before_it_is_whole() {
    let fields = |n: usize| "X: y\r\n".repeat(n);
    let many = format!("GET / HTTP/1.1\r\n{}\r\n", fields(101));
    assert_eq!(parsed(&many).expect_err("many"), Bad::TooLarge);
    let long = format!("GET / HTTP/1.1\r\nX: {}", "y".repeat(MAX));
    assert_eq!(parsed(&long).expect_err("long"), Bad::TooLarge);
    let whole = format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "y".repeat(MAX));
    assert_eq!(parsed(&whole).expect_err("long"), Bad::TooLarge);
    let target = format!("GET /{} HTTP/1.1\r\n\r\n", "y".repeat(65_534));
    let target = head::parse(&mut BytesMut::from(&*target), &mut 0, 2 * MAX);
    assert_eq!(target.expect_err("target"), Bad::TargetTooLong);
}

/// Byte by byte there is no head before its end, and then the same one.
#[test]
fn a_head_that_trickles_is_the_same_head() {
    for end in ["\r\n\r\n", "\n\n", "\n\r\n"] {
        let text = format!("GET /a HTTP/1.1\r\nHost: b{end}rest");
        let whole = text.len() - "rest".len();
        let (mut unread, mut looked) = (BytesMut::new(), 0);
        for (n, byte) in text.bytes().take(whole).enumerate() {
            unread.extend_from_slice(&[byte]);
            let head = head::parse(&mut unread, &mut looked, MAX).expect("well-formed");
            assert_eq!(head.is_some(), n + 1 == whole, "{n} of {text:?}");
        }
        assert!(unread.is_empty() && looked == 0);
    }
}

#[test]
fn line_ends_before_a_request_are_not_kept() {
    let (mut unread, mut looked) = (BytesMut::new(), 0);
    for byte in b"\r\n\n\r\n" {
        unread.extend_from_slice(&[*byte]);
        let head = head::parse(&mut unread, &mut looked, MAX).expect("nothing yet");
        assert!(head.is_none() && unread.len() == usize::from(*byte == b'\r'));
    }
    unread.extend_from_slice(b"\r\nGET / HTTP/1.1\r\n\r\n");
    let head = head::parse(&mut unread, &mut looked, MAX).expect("well-formed");
    assert!(head.is_some() && unread.is_empty());
    assert_eq!(parsed("\r\rGET").expect_err("no line end"), Bad::Malformed);
}

/// A client of HTTP/1.0 would take it for its answer.
#[test]
fn only_who_knows_the_word_is_told_to_go_on() {
    for (version, expects) in [("1.0", false), ("1.1", true)] {
        let text =
            format!("POST / HTTP/{version}\r\nExpect: 100-Continue\r\nContent-Length: 1\r\n\r\n");
        let head = parsed(&text).expect("well-formed").expect("whole");
        assert_eq!(head.expects, expects, "{version}");
    }
}

#[test]
fn an_answer_without_content_has_no_length() {
    for (status, told) in [(204, false), (304, true)] {
        let status = StatusCode::from_u16(status).expect("a status");
        let head = AnswerHead {
            status,
            fields: list(&[("content-length", "5")]),
        };
        let (mut out, asked) = (
            OutgoingAnswer::default(),
            AnswerTo::new(&Method::HEAD, Version::HTTP_11),
        );
        let framing = asked.framing(status, Some(5));
        out.head(&head, framing, (asked, Some(5), true));
        let mut io = Few {
            at_once: MAX,
            ready: false,
            taken: Vec::new(),
        };
        while out
            .poll_write(&mut io, &mut Context::from_waker(Waker::noop()))
            .is_pending()
        {}
        let text = String::from_utf8(io.taken).expect("text");
        assert_eq!(text.contains("\r\ncontent-length: 5\r\n"), told, "{text}");
    }
}

/// Takes so many bytes at once, and every other time none.
struct Few {
    at_once: usize,
    ready: bool,
    taken: Vec<u8>,
}

impl AsyncWrite for Few {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.ready = !self.ready;
        if !self.ready {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let n = buf.len().min(self.at_once);
        self.taken.extend_from_slice(&buf[..n]);
        Poll::Ready(Ok(n))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let joined: Vec<u8> = bufs.iter().flat_map(|buf| buf.to_vec()).collect();
        self.poll_write(cx, &joined)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

fn pieces() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let sizes = prop_oneof![0..40_usize, 4090..4100_usize, 16_000..17_000_usize];
    prop::collection::vec((any::<u8>(), sizes), 0..6).prop_map(|of| {
        of.into_iter()
            .map(|(byte, size)| vec![byte; size])
            .collect()
    })
}

proptest! {
    /// However the socket takes it, what is written is the body in its framing.
    #[test]
    fn a_body_arrives_as_it_is(
        pieces in pieces(),
        chunked in any::<bool>(),
        at_once in 1..9000_usize,
        greedy in any::<bool>(),
    ) {
        let body = pieces.concat();
        let length = (!chunked).then_some(body.len() as u64);
        let mut framing = AnswerTo::new(&Method::POST, Version::HTTP_11).framing(StatusCode::OK, length);
        let mut io = Few { at_once, ready: false, taken: Vec::new() };
        let mut cx = Context::from_waker(Waker::noop());
        let mut out = OutgoingAnswer::default();
        let mut write = |out: &mut OutgoingAnswer| {
            while out.poll_write(&mut io, &mut cx).is_pending() {}
        };
        for piece in pieces {
            if out.is_full() || !greedy {
                write(&mut out);
            }
            out.data(&mut framing, piece.into()).expect("as announced");
        }
        out.end(framing).expect("as announced");
        write(&mut out);
        prop_assert!(out.is_empty());
        let mut decoder = Decoder::of_request(length);
        let (mut unread, mut read) = (BytesMut::from(&*io.taken), Vec::new());
        while let Decoded::Data(bytes) = decoder.decode(&mut unread).expect("well-formed") {
            read.extend_from_slice(&bytes);
        }
        prop_assert!(decoder.is_done() && unread.is_empty());
        prop_assert_eq!(read, body);
    }
}

#[test]
fn a_body_that_is_not_as_announced_is_an_error() {
    for sent in [b"abc".as_slice(), b"abcde"] {
        let (mut out, mut framing) = (OutgoingAnswer::default(), Framing::Length(4));
        let sent = out.data(&mut framing, Bytes::from_static(sent));
        assert!(sent.and_then(|()| out.end(framing)).is_err());
    }
}

/// More than the kernel holds between two ends.
const LONG: &[u8] = &[b'x'; 32 * 1024 * 1024];

/// Answers with what it was asked.
#[derive(Clone, Debug)]
struct Echo;

impl Answers for Echo {
    fn answer(&self, request: Request, client: Client) -> Handover<Answer> {
        let client = Arc::new(client);
        let reader = Arc::clone(&client);
        let answer = || async move {
            let path = request.target.path();
            let (status, body) = match path {
                "/unread" => (200, "unread".into()),
                "/early" => {
                    tokio::spawn(request.body.collect());
                    (200, LONG.into())
                }
                _ => match request.body.collect().await {
                    Ok(body) => (
                        200,
                        [path.as_bytes(), b"=", &body.to_bytes()].concat().into(),
                    ),
                    Err(Cut::Left | Cut::Broken) => {
                        (400, [path.as_bytes(), b"=cut"].concat().into())
                    }
                },
            };
            let status = StatusCode::from_u16(status).expect("a status");
            let fields = Fields::default();
            let mut answer = Answer::whole(AnswerHead { status, fields }, body);
            answer.body = answer.body.holding(reader);
            answer
        };
        Handover::new(answer, client)
    }
}

pub(super) async fn connection<F: Answers>(
    half_close: HalfClose,
    front: F,
) -> (TcpStream, Connection<F>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let client = TcpStream::connect(listener.local_addr().expect("an address"));
    let (client, accepted) = tokio::join!(client, listener.accept());
    let (tcp, peer) = accepted.expect("accepted");
    let (state, downstream) = (
        Arc::new(IoState::default()),
        Arc::new(Downstream::new(peer, false, TaskTracker::new())),
    );
    let transport = Transport::Plain(Tcp::new(tcp, Arc::clone(&state)));
    let io = DownstreamIo::new(transport, BytesMut::new(), state, Arc::clone(&downstream));
    let rules = Rules {
        head_bytes: MAX,
        half_close,
    };
    (
        client.expect("connected"),
        Connection::new(io, downstream, front, rules),
    )
}

/// Sends the pieces and the FIN, and reads to the end.
pub(super) async fn client(io: impl AsyncRead + AsyncWrite, pieces: &[&[u8]]) -> String {
    let (mut reads, mut writes) = tokio::io::split(io);
    let write = async {
        for piece in pieces {
            // A connection that is closed takes no more.
            if writes.write_all(piece).await.is_err() {
                return;
            }
            tokio::task::yield_now().await;
        }
        let _ = writes.shutdown().await;
    };
    let read = async {
        let mut read = Vec::new();
        // What came before a reset counts.
        let _ = reads.read_to_end(&mut read).await;
        String::from_utf8(read).expect("text")
    };
    tokio::join!(write, read).1
}

/// What a client reads that sends this, in pieces of so many bytes, and its FIN.
async fn answers(sent: &[u8], at_once: usize) -> String {
    let (tcp, conn) = connection(HalfClose::Serve, Echo).await;
    tcp.set_nodelay(true).expect("set");
    let pieces: Vec<_> = sent.chunks(at_once).collect();
    let (_, read) = tokio::join!(conn, client(tcp, &pieces));
    read
}

/// Status and body of each answer, in their order.
fn told(answers: &str) -> Vec<(u16, String)> {
    let mut told = Vec::new();
    let mut rest = answers;
    while let Some((head, after)) = rest.split_once("\r\n\r\n") {
        let status = head
            .get(9..12)
            .expect("a status")
            .parse()
            .expect("a number");
        let length = head.split("content-length: ").nth(1).expect("a length");
        let length: usize = length
            .lines()
            .next()
            .expect("a line")
            .parse()
            .expect("a number");
        told.push((status, after.get(..length).expect("all of it").to_owned()));
        rest = after.get(length..).unwrap_or_default();
    }
    assert_eq!(rest, "");
    told
}

const THREE: &str = "POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc\
    POST /b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nde\r\n1\r\nf\r\n0\r\nT: u\r\n\r\n\
    \r\nGET /c HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\nGET /d HTTP/1.1\r\nHost: x\r\n\r\n";

#[tokio::test]
async fn requests_are_the_same_however_they_are_cut() {
    for at_once in [1, 2, 3, 5, 7, 16, 50, 1000] {
        let read = answers(THREE.as_bytes(), at_once).await;
        let expected = [(200, "/a=abc"), (200, "/b=def"), (200, "/c=")];
        let expected = expected.map(|(status, body)| (status, body.to_owned()));
        assert_eq!(told(&read), expected, "{at_once}");
        assert_eq!(
            read.matches("\r\nconnection: close\r\n").count(),
            1,
            "{read}"
        );
        assert_eq!(read.matches("\r\ndate: ").count(), 3);
    }
}

#[tokio::test]
async fn a_body_that_nobody_reads_is_no_request() {
    let hidden = "GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n";
    // All of it is here: it is stepped over.
    let sent = format!(
        "POST /unread HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{hidden}GET /next HTTP/1.1\r\nHost: x\r\n\r\n",
        hidden.len()
    );
    let read = answers(sent.as_bytes(), 1000).await;
    assert_eq!(
        told(&read),
        [(200, "unread".into()), (200, "/next=".into())]
    );
    // It is not: the connection ends, and says so.
    let sent = format!(
        "POST /unread HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n999999\r\n{}",
        hidden.repeat(1000)
    );
    let read = answers(sent.as_bytes(), sent.len()).await;
    assert_eq!(told(&read), [(200, "unread".into())]);
    assert!(read.contains("\r\nconnection: close\r\n"), "{read}");
}

#[tokio::test]
async fn a_body_with_a_broken_framing_ends_the_connection() {
    for chunks in [
        "zz\r\n",
        "\r\n",
        "1\r\nxx0\r\n\r\n",
        "1;a\nb\r\nx\r\n0\r\n\r\n",
        "-1\r\n",
    ] {
        let sent = format!(
            "POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}GET /b HTTP/1.1\r\nHost: x\r\n\r\n"
        );
        for at_once in [1, 1000] {
            let read = answers(sent.as_bytes(), at_once).await;
            let told = told(&read);
            assert!(matches!(&told[..], [(400, _)]), "{chunks:?}: {told:?}");
        }
    }
}

#[tokio::test]
async fn an_old_client_keeps_its_connection_if_it_asks_for_that() {
    let asked = "GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET /b HTTP/1.0\r\n\r\nGET /c HTTP/1.0\r\n\r\n";
    let read = answers(asked.as_bytes(), 1000).await;
    assert_eq!(told(&read), [(200, "/a=".into()), (200, "/b=".into())]);
    assert_eq!(read.matches("HTTP/1.0 200 OK").count(), 2);
    assert_eq!(read.matches("\r\nconnection: keep-alive\r\n").count(), 1);
}

/// A FIN while a request is answered is the client's leaving, unless it may only have closed its half.
#[tokio::test]
async fn a_fin_in_mid_request_ends_the_connection() {
    let (mut client, conn) = connection(HalfClose::Gone, Echo).await;
    let part = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 30\r\n\r\nabc";
    client.write_all(part).await.expect("sent");
    client.shutdown().await.expect("closed");
    let left = conn.await.expect_err("left");
    assert_eq!(left.kind(), io::ErrorKind::ConnectionAborted);

    let read = answers(part, 1000).await;
    assert_eq!(told(&read), [(400, "/a=cut".into())]);
}

/// The answer begins before the upload ends, and its reader reads nothing of it before that: each would wait for the other.
#[tokio::test]
async fn an_upload_goes_on_while_its_answer_waits() {
    let head = "POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 33554432\r\n\r\n";
    let (mut client, conn) = connection(HalfClose::Serve, Echo).await;
    let uploads = async {
        client.write_all(head.as_bytes()).await.expect("sent");
        client.write_all(LONG).await.expect("sent");
        client.shutdown().await.expect("closed");
        let mut read = Vec::new();
        client.read_to_end(&mut read).await.expect("read");
        read.len()
    };
    let both = async { tokio::join!(conn, uploads).1 };
    let read = tokio::time::timeout(std::time::Duration::from_secs(20), both).await;
    assert!(read.expect("no standstill") > LONG.len());
}

#[tokio::test]
async fn nobody_is_told_to_go_on_in_the_midst_of_an_answer() {
    let head =
        "POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n";
    let (mut client, mut conn) = connection(HalfClose::Serve, Echo).await;
    client.write_all(head.as_bytes()).await.expect("sent");
    // Until the call has asked for the upload, and the kernel takes no more.
    while conn
        .upload
        .as_ref()
        .is_none_or(|u| !u.feed.poll_asked(&mut Context::from_waker(Waker::noop())))
    {
        std::future::poll_fn(|cx| {
            assert!(Pin::new(&mut conn).poll(cx).is_pending());
            Poll::Ready(())
        })
        .await;
        tokio::task::yield_now().await;
    }
    client.set_nodelay(true).expect("set");
    let reads = async {
        let mut read = vec![0; LONG.len()];
        client.read_exact(&mut read).await.expect("read");
        let _ = client.shutdown().await;
        let _ = client.read_to_end(&mut read).await;
        read
    };
    let (_, read) = tokio::join!(conn, reads);
    let at = memchr::memmem::find(&read, b"\r\n\r\n").expect("a head") + 4;
    assert!(read.starts_with(b"HTTP/1.1 200 OK") && &read[at..] == LONG);
}

#[tokio::test]
async fn a_connection_at_rest_keeps_little() {
    let (mut client, mut conn) = connection(HalfClose::Serve, Echo).await;
    let sent = format!(
        "POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{}0\r\n\r\n",
        "5\r\nabcde\r\n".repeat(4000)
    );
    let asks = async {
        client.write_all(sent.as_bytes()).await.expect("sent");
        let mut read = vec![0; 20_000];
        client.read_exact(&mut read).await.expect("an answer");
    };
    tokio::select! {
        ended = &mut conn => panic!("{ended:?}"),
        () = asks => {}
    }
    assert!(matches!(conn.state, ConnectionState::Rest) && conn.unread.capacity() <= KEPT);
}
