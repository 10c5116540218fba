//! The fake upstream behind HTTP/2.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use h2::client::{self, SendRequest};
use h2::{Reason, RecvStream};
use serde_json::{Value, json};
use tidegate_rig::{Ended, Event, FakeUpstream, H2Front, H2Options, Script};
use tokio::net::TcpStream;

const SOON: Duration = Duration::from_secs(5);
const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

struct Fixture {
    upstream: FakeUpstream,
    front: H2Front,
    client: SendRequest<Bytes>,
}

async fn start(options: H2Options) -> Fixture {
    let upstream = FakeUpstream::start(ANY, Script::default())
        .await
        .expect("a loopback port");
    let front = H2Front::start(ANY, upstream.addr(), options)
        .await
        .expect("a loopback port");
    let stream = TcpStream::connect(front.addr()).await.expect("connect");
    let (client, connection) = client::handshake(stream).await.expect("handshake");
    tokio::spawn(connection);
    Fixture {
        upstream,
        front,
        client,
    }
}

async fn ask(
    client: &SendRequest<Bytes>,
    rig: Value,
) -> Result<http::Response<RecvStream>, h2::Error> {
    let mut client = client.clone().ready().await?;
    let request = http::Request::post("http://rig/v1/chat/completions")
        .body(())
        .expect("a request");
    let (response, mut body) = client.send_request(request, false)?;
    let json = json!({"model": "tiny", "stream": true, "rig": rig}).to_string();
    body.send_data(Bytes::from(json), true)?;
    response.await
}

async fn read(body: &mut RecvStream) -> (Vec<u8>, Option<Reason>) {
    let mut bytes = Vec::new();
    while let Some(data) = body.data().await {
        match data {
            Ok(data) => {
                body.flow_control()
                    .release_capacity(data.len())
                    .expect("room");
                bytes.extend_from_slice(&data);
            }
            Err(e) => return (bytes, e.reason()),
        }
    }
    (bytes, None)
}

#[tokio::test]
async fn streams_are_whole_and_broken_ones_are_reset() {
    let fixture = start(H2Options::default()).await;
    for (end, reason) in [("clean", None), ("fin", Some(Reason::INTERNAL_ERROR))] {
        let rig = json!({"tokens": 20, "end": end, "end_at": 5});
        let response = ask(&fixture.client, rig).await.expect("head");
        assert_eq!(response.status(), 200);
        let (bytes, seen) = read(&mut response.into_body()).await;
        assert_eq!(seen, reason, "{end}");
        assert_eq!(Event::all(&bytes).len(), 5, "{end}");
    }
    assert_eq!(fixture.front.truth().connections_accepted, 1);
}

#[tokio::test]
async fn a_reset_by_the_peer_reaches_the_book() {
    let fixture = start(H2Options::default()).await;
    let rig = json!({"tokens": 9, "stall": {"at": {"event": 3}}});
    let response = ask(&fixture.client, rig).await.expect("head");
    let mut body = response.into_body();
    body.data().await.expect("data").expect("sound");
    drop(body);
    let call = fixture
        .upstream
        .wait_for_call(|c| c.ended.is_some(), SOON)
        .await
        .expect("ends");
    assert_eq!(call.ended, Some(Ended::PeerRst));
    let truth = fixture
        .front
        .wait_for(|t| t.streams_running == 0, SOON)
        .await
        .expect("no stream left");
    assert_eq!(truth.streams_reset, 1);
}

#[tokio::test]
async fn streams_may_be_refused() {
    let options = H2Options {
        refuse_after: Some(1),
        ..H2Options::default()
    };
    let fixture = start(options).await;
    let response = ask(&fixture.client, json!({})).await.expect("head");
    read(&mut response.into_body()).await;
    let refused = ask(&fixture.client, json!({})).await.expect_err("refused");
    assert_eq!(refused.reason(), Some(Reason::REFUSED_STREAM));
}
