//! What proves that a request on a reused connection was accepted by nobody. Plain blocking servers, so that each step has its place.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream as StdStream};
use std::thread::JoinHandle;
use std::time::Duration;

use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use tokio::io::{AsyncRead as _, ReadBuf};

use super::*;
use crate::config::Endpoint;
use crate::fields::{Fields, Sent};
use crate::telemetry::metrics::Metrics;
use crate::upstream::exchange::UpstreamBody;
use crate::upstream::socket::Socket;

const SMALL: usize = 300;
/// More than the sockets' buffers hold.
const LARGE: usize = 16 * 1024 * 1024;

/// Sends a call with a body of so many bytes.
async fn send(conn: &mut Http1, body: usize) -> Result<Box<UpstreamHead>, SendError> {
    let head = SentHead {
        method: &Method::POST,
        target: "/v1/chat/completions",
        host: "test",
        fields: &Sent::new(Fields::default(), true, None),
        body: &[],
    };
    let body = RequestBody::Whole(Some(vec![b'x'; body].into()));
    conn.send(head, body).await
}

fn read_request(stream: &mut StdStream, body: usize) {
    let mut read = Vec::new();
    let mut space = [0; 4096];
    loop {
        let n = stream.read(&mut space).unwrap();
        assert_ne!(n, 0, "the request ended early");
        read.extend_from_slice(&space[..n]);
        let head = read.windows(4).position(|w| w == b"\r\n\r\n");
        if head.is_some_and(|end| read.len() == end + 4 + body) {
            return;
        }
    }
}

/// Runs the server's part beside ours.
fn server<T: Send + 'static>(part: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    std::thread::spawn(part)
}

/// A connection that has carried three calls, and the server's side of it. Nothing is left on the way in either direction.
async fn reused() -> (Box<Http1>, StdStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let tcp = TcpStream::connect(address).await.unwrap();
    tcp.set_nodelay(true).unwrap();
    let (mut theirs, _) = listener.accept().unwrap();
    theirs.set_nodelay(true).unwrap();
    let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
    let socket = Socket::new(tcp, Default::default(), permit);
    let endpoint = Endpoint::from(address);
    let endpoint = EndpointState::new(&"u".into(), endpoint, 1, &Arc::new(Metrics::new()));
    let io = UpstreamIo::Plain(socket);
    let conn = Http1::new(io, Arc::new(endpoint), 65_536);
    let mut conn = Box::new(conn);
    for _ in 0..3 {
        let part = server(move || {
            read_request(&mut theirs, SMALL);
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
            theirs.write_all(answer).unwrap();
            theirs
        });
        send(&mut conn, SMALL).await.unwrap();
        let mut body = UpstreamBody::Http1(conn);
        while let Some(data) = body.data().await {
            data.unwrap();
        }
        conn = body.into_idle().expect("it can carry another");
        theirs = part.join().unwrap();
    }
    (conn, theirs)
}

#[tokio::test]
async fn a_small_body_goes_out_behind_its_head_and_its_length_is_told() {
    let (mut conn, mut theirs) = reused().await;
    let part = server(move || {
        let mut read = [0; 4096];
        let n = theirs.read(&mut read).unwrap();
        let answer = b"HTTP/1.1 204 No Content\r\n\r\n";
        theirs.write_all(answer).unwrap();
        String::from_utf8_lossy(&read[..n]).into_owned()
    });
    let head = SentHead {
        method: &Method::POST,
        target: "/v1/embeddings",
        host: "test",
        fields: &Sent::new(Fields::default(), true, None),
        body: b"{}\n",
    };
    let head = conn.send(head, RequestBody::Whole(None)).await.unwrap();
    assert_eq!(head.status, 204);
    let sent = part.join().unwrap();
    assert!(
        sent.ends_with("\r\ncontent-length: 3\r\n\r\n{}\n"),
        "{sent}"
    );
}

fn reset_on_close(stream: &StdStream) {
    SockRef::from(stream)
        .set_linger(Some(Duration::ZERO))
        .unwrap();
}

async fn unsent(conn: &mut Http1, body: usize) -> bool {
    send(conn, body).await.unwrap_err().unsent
}

/// The usual race with a server's idle limit: it has hung up, and we have not heard of it when we write.
#[tokio::test]
async fn a_server_that_had_closed_accepted_nothing() {
    for body in [SMALL, LARGE] {
        let (mut conn, theirs) = reused().await;
        drop(theirs);
        assert!(unsent(&mut conn, body).await, "{body} bytes");
    }
}

#[tokio::test]
async fn a_server_that_had_reset_accepted_nothing() {
    let (mut conn, theirs) = reused().await;
    reset_on_close(&theirs);
    drop(theirs);
    assert!(unsent(&mut conn, SMALL).await);
}

/// It may have begun to work; its acknowledgement can be later than its reset.
#[tokio::test]
async fn a_server_that_read_the_request_and_then_reset_proves_nothing() {
    let (mut conn, mut theirs) = reused().await;
    let part = server(move || {
        read_request(&mut theirs, SMALL);
        reset_on_close(&theirs);
    });
    assert!(!unsent(&mut conn, SMALL).await);
    part.join().unwrap();
}

#[tokio::test]
async fn a_server_that_read_the_request_and_then_closed_proves_nothing() {
    let (mut conn, mut theirs) = reused().await;
    let part = server(move || read_request(&mut theirs, SMALL));
    assert!(!unsent(&mut conn, SMALL).await);
    part.join().unwrap();
}

/// Here nothing was read, but it looks like the case where all was.
#[tokio::test]
async fn a_server_that_closed_on_an_unread_request_proves_nothing() {
    let (mut conn, theirs) = reused().await;
    let part = server(move || {
        theirs.peek(&mut [0; 16]).unwrap();
    });
    assert!(!unsent(&mut conn, SMALL).await);
    part.join().unwrap();
}

#[tokio::test]
async fn a_server_that_read_a_part_and_then_closed_proves_nothing() {
    let (mut conn, mut theirs) = reused().await;
    let part = server(move || {
        theirs.read_exact(&mut [0; 1024 * 1024]).unwrap();
    });
    assert!(!unsent(&mut conn, LARGE).await);
    part.join().unwrap();
}

const TIMED_OUT: &[u8] =
    b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 4\r\nconnection: close\r\n\r\nidle";

/// It had given up on the connection, said so, and closed: not an answer to what we send then.
#[tokio::test]
async fn a_408_from_before_the_request_is_no_answer_to_it() {
    for body in [SMALL, LARGE] {
        let (mut conn, mut theirs) = reused().await;
        theirs.write_all(TIMED_OUT).unwrap();
        drop(theirs);
        assert!(unsent(&mut conn, body).await, "{body} bytes");
    }
}

/// The request reached it between its words and its close: it could have read it.
#[tokio::test]
async fn a_408_with_a_later_close_is_taken_for_the_answer() {
    let (mut conn, mut theirs) = reused().await;
    theirs.write_all(TIMED_OUT).unwrap();
    let close = async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        drop(theirs);
    };
    let (sent, ()) = tokio::join!(send(&mut conn, SMALL), close);
    assert_eq!(sent.unwrap().status, 408);
}

#[tokio::test]
async fn a_408_to_the_request_is_its_answer() {
    for closes in [true, false] {
        let (mut conn, mut theirs) = reused().await;
        let part = server(move || {
            read_request(&mut theirs, SMALL);
            theirs.write_all(TIMED_OUT).unwrap();
            (!closes).then_some(theirs)
        });
        let head = send(&mut conn, SMALL).await.unwrap();
        assert_eq!(head.status, 408);
        let mut body = UpstreamBody::Http1(conn);
        assert_eq!(&body.data().await.unwrap().unwrap()[..], b"idle");
        assert!(body.data().await.is_none());
        assert!(body.into_idle().is_none());
        drop(part.join().unwrap());
    }
}

/// The server answers before it has the whole request, and reads the rest while its answer is read.
#[tokio::test]
async fn an_early_answer_is_read_while_the_request_is_still_sent() {
    let (mut conn, mut theirs) = reused().await;
    let part = server(move || {
        let mut space = vec![0; 65_536];
        theirs.read_exact(&mut space).unwrap();
        theirs
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n")
            .unwrap();
        let mut left = LARGE - 65_536;
        while left > 0 {
            left = left.saturating_sub(theirs.read(&mut space).unwrap());
        }
        theirs.write_all(b"late").unwrap();
        theirs
    });
    assert_eq!(send(&mut conn, LARGE).await.unwrap().status, 200);
    assert_eq!(data(&mut conn).await.unwrap().unwrap(), "late");
    part.join().unwrap();
}

/// It refuses and closes without reading on: the client has its refusal, and the connection is not used again.
#[tokio::test]
async fn an_early_refusal_is_an_answer_and_ends_the_connection() {
    let (mut conn, mut theirs) = reused().await;
    let part = server(move || {
        theirs.read_exact(&mut [0; 1024]).unwrap();
        theirs
            .write_all(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
            .unwrap();
        theirs
    });
    assert_eq!(send(&mut conn, LARGE).await.unwrap().status, 413);
    assert!(conn.is_complete() && !conn.finish());
    drop(part.join().unwrap());
}

async fn data(conn: &mut Http1) -> Option<Result<Bytes, Failure>> {
    poll_fn(|cx| conn.poll_data(cx)).await
}

/// Waits until we have heard that the server has closed: the kernel knows before the runtime does, which hears of it between two polls.
async fn hung_up(conn: &mut Http1) {
    let mut byte = [0];
    let mut byte = ReadBuf::new(&mut byte);
    let end = poll_fn(|cx| Pin::new(&mut conn.io).poll_read(cx, &mut byte));
    end.await.unwrap();
    assert!(byte.filled().is_empty(), "it has said more");
}

#[tokio::test]
async fn an_end_inside_the_framing_is_never_a_clean_end() {
    const HEAD: &str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
    const BODY: &str = "2\r\nok\r\n0\r\nx: y\r\n\r\n";
    for cut in 0..=BODY.len() {
        let (mut conn, mut theirs) = reused().await;
        let part = server(move || {
            read_request(&mut theirs, SMALL);
            theirs.write_all(HEAD.as_bytes()).unwrap();
            theirs.write_all(&BODY.as_bytes()[..cut]).unwrap();
        });
        send(&mut conn, SMALL).await.unwrap();
        let end = loop {
            match data(&mut conn).await {
                Some(Ok(_)) => {}
                Some(Err(_)) => break false,
                None => break true,
            }
        };
        assert_eq!(end, cut == BODY.len(), "{cut}");
        part.join().unwrap();
        hung_up(&mut conn).await;
        assert!(!conn.finish(), "the server has closed");
    }
}

/// What comes behind an answer was asked for by nobody, whether it is read with the answer or after it.
#[tokio::test]
async fn a_connection_with_something_behind_its_answer_is_not_used_again() {
    for apart in [false, true] {
        let (mut conn, mut theirs) = reused().await;
        let part = server(move || {
            read_request(&mut theirs, SMALL);
            let rest = if apart { "" } else { "x" };
            let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok{rest}");
            theirs.write_all(answer.as_bytes()).unwrap();
            theirs
        });
        send(&mut conn, SMALL).await.unwrap();
        data(&mut conn).await.unwrap().unwrap();
        let mut theirs = part.join().unwrap();
        if apart {
            assert!(conn.finish());
            assert_eq!(conn.unread.capacity(), 0, "idle, it holds no buffer");
            theirs.write_all(b"x").unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
            assert!(!conn.is_usable());
        } else {
            assert!(!conn.finish());
        }
    }
}
