//! Credit and handshake of a shared HTTP/2 connection, over a real socket.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::{SendStream, server};
use http::{Request, Response};
use http_body_util::BodyExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use super::exchange::{Http2, RequestBody};
use super::pool::STREAMS_PER_CONNECTION;
use super::socket::{Socket, UpstreamIo};

const WINDOW: usize = 65_535;

async fn pair() -> (UpstreamIo, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let ours = TcpStream::connect(address).await.unwrap();
    let (theirs, _) = listener.accept().await.unwrap();
    let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
    let socket = Socket::new(ours, Default::default(), permit);
    (UpstreamIo::Plain(socket), theirs)
}

async fn send_all(body: &mut SendStream<Bytes>, mut left: usize) {
    while left > 0 {
        body.reserve_capacity(left);
        let room = std::future::poll_fn(|cx| body.poll_capacity(cx)).await;
        let room = room.unwrap().unwrap().min(left);
        body.send_data(vec![b'x'; room].into(), left == room)
            .unwrap();
        left -= room;
    }
}

/// Answers each request with as many bytes as its path says.
async fn serve(tcp: TcpStream) {
    let mut connection = server::handshake(tcp).await.unwrap();
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        let bytes = request.uri().path()[1..].parse().unwrap();
        tokio::spawn(async move {
            let mut body = respond.send_response(Response::new(()), false).unwrap();
            send_all(&mut body, bytes).await;
        });
    }
}

fn request(bytes: usize) -> Request<RequestBody> {
    Request::get(format!("http://test/{bytes}"))
        .body(RequestBody::Whole(None))
        .unwrap()
}

/// All the streams that a connection takes, and only the last is read: it has its whole credit.
#[tokio::test]
async fn streams_that_nobody_reads_do_not_starve_the_one_that_is_read() {
    let (io, theirs) = pair().await;
    tokio::spawn(serve(theirs));
    let mut conn = Http2::new(io, WINDOW, |driver| {
        tokio::spawn(driver);
    })
    .await
    .unwrap();
    let mut unread = Vec::new();
    for _ in 1..STREAMS_PER_CONNECTION {
        unread.push(conn.send(request(WINDOW * 2)).await.unwrap());
    }
    // What they may send is on its way.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let read = conn.send(request(WINDOW * 8)).await.unwrap();
    let all = tokio::time::timeout(Duration::from_secs(10), read.into_body().collect());
    let all = all.await.expect("it flows").unwrap();
    assert_eq!(all.to_bytes().len(), WINDOW * 8);
    drop(unread);
}
