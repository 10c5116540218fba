//! Handshake, credit and keeping of a shared HTTP/2 connection, over a real socket.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::{SendStream, server};
use http::{Request, Response};
use http_body_util::BodyExt as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::EndpointState;
use super::exchange::{Http2, RequestBody};
use super::pool::{Pool, STREAMS_PER_CONNECTION};
use super::socket::{Socket, UpstreamIo};
use crate::config::Endpoint;
use crate::telemetry::metrics::Metrics;

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

async fn open(io: UpstreamIo) -> std::io::Result<Http2> {
    let shake = Http2::new(io, WINDOW, |driver| {
        tokio::spawn(driver);
    });
    tokio::time::timeout(Duration::from_secs(10), shake)
        .await
        .expect("it ends")
}

fn endpoint() -> Arc<EndpointState> {
    let address = Endpoint::from(std::net::SocketAddr::from(([127, 0, 0, 1], 1)));
    Arc::new(EndpointState::new(
        &"u".into(),
        address,
        1,
        &Arc::new(Metrics::new()),
    ))
}

#[tokio::test]
async fn a_server_without_settings_is_no_http2_server() {
    for says in ["", "HTTP/1.1 400 Bad Request\r\n\r\n"] {
        let (io, mut theirs) = pair().await;
        theirs.write_all(says.as_bytes()).await.unwrap();
        theirs.shutdown().await.unwrap();
        open(io).await.expect_err(says);
    }
}

/// A connection on a shelf holds its endpoint, so that no other can come to lie at the address that is the shelf's key.
#[tokio::test]
async fn a_shared_connection_holds_its_endpoint() {
    let (io, theirs) = pair().await;
    tokio::spawn(serve(theirs));
    let (pool, endpoint) = (Pool::default(), endpoint());
    let place = pool.share(&endpoint, open(io).await.unwrap(), Duration::from_secs(5));
    drop(place);
    assert_eq!(Arc::strong_count(&endpoint), 2);
    pool.sweep(Instant::now());
    pool.sweep(Instant::now() + Duration::from_secs(6));
    assert_eq!(Arc::strong_count(&endpoint), 1);
}

#[tokio::test]
async fn an_idle_shared_connection_gives_way_and_a_busy_one_does_not() {
    let (io, theirs) = pair().await;
    tokio::spawn(serve(theirs));
    let (pool, endpoint) = (Pool::default(), endpoint());
    let place = pool.share(&endpoint, open(io).await.unwrap(), Duration::from_secs(600));
    pool.sweep(Instant::now());
    drop(place);
    pool.sweep(Instant::now());
    assert!(
        pool.checkout(&endpoint, Instant::now()).is_some(),
        "nobody waits"
    );
    let _waiting = endpoint.wait();
    let place = pool
        .checkout(&endpoint, Instant::now())
        .expect("it is there");
    pool.sweep(Instant::now());
    drop(place);
    assert!(
        pool.checkout(&endpoint, Instant::now()).is_some(),
        "it had a stream"
    );
    pool.sweep(Instant::now());
    assert!(pool.checkout(&endpoint, Instant::now()).is_none());
}

/// All the streams that a connection takes, and only the last is read: it has its whole credit.
#[tokio::test]
async fn streams_that_nobody_reads_do_not_starve_the_one_that_is_read() {
    let (io, theirs) = pair().await;
    tokio::spawn(serve(theirs));
    let mut conn = open(io).await.unwrap();
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
