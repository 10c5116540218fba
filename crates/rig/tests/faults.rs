//! Each fault of the fake upstream, looked at with raw sockets.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};
use tidegate_rig::script::Accept;
use tidegate_rig::{
    BlackHole, BodyEnd, Closed, Event, FakeUpstream, PeerEnd, RawClient, ResponseHead, Script,
};

const SOON: Duration = Duration::from_secs(5);
const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

async fn start() -> FakeUpstream {
    FakeUpstream::start(ANY, Script::default())
        .await
        .expect("a loopback port")
}

async fn ask(upstream: &FakeUpstream, stream: bool, rig: Value) -> RawClient {
    let mut client = RawClient::connect(upstream.addr()).await.expect("connect");
    let body = json!({"model": "tiny", "stream": stream, "rig": rig}).to_string();
    client
        .post("/v1/chat/completions", &body)
        .await
        .expect("send");
    client
}

async fn whole(stream: bool, rig: Value) -> (ResponseHead, Vec<u8>, BodyEnd) {
    let upstream = start().await;
    let mut client = ask(&upstream, stream, rig).await;
    let head = client.final_head().await.expect("head");
    let (body, end) = client.rest().await.expect("body");
    (head, body, end)
}

#[tokio::test]
async fn streams_end_as_scripted() {
    for (end, seen) in [
        ("clean", BodyEnd::Clean),
        ("fin", BodyEnd::Fin),
        ("rst", BodyEnd::Rst),
        ("bad_chunk", BodyEnd::Garbage),
        ("extra", BodyEnd::Clean),
    ] {
        let rig = json!({"tokens": 20, "end": end, "end_at": 5});
        let (_, body, how) = whole(true, rig).await;
        assert_eq!(how, seen, "{end}");
        if end != "rst" {
            assert_eq!(Event::all(&body).len(), 5, "{end}");
        }
    }
    let rig = json!({"tokens": 20, "end": "fin", "end_at": 5, "end_mid_event": true});
    let (_, body, _) = whole(true, rig).await;
    assert!(!body.ends_with(b"\n\n") && body.len() > 1000);
}

#[tokio::test]
async fn answers_in_one_piece_break_as_scripted() {
    for (end, seen) in [
        ("fin", BodyEnd::Fin),
        ("rst", BodyEnd::Rst),
        ("short_length", BodyEnd::Fin),
    ] {
        let (head, body, how) = whole(false, json!({"end": end})).await;
        assert_eq!(how, seen, "{end}");
        assert!(head.header("content-length").is_some());
        if end == "fin" {
            assert!(serde_json::from_slice::<Value>(&body).is_err());
        }
    }
}

#[tokio::test]
async fn a_stream_may_hang_open_after_its_last_event() {
    let upstream = start().await;
    let mut client = ask(&upstream, true, json!({"tokens": 2, "end": "hang"})).await;
    client.head().await.expect("head");
    let events = client.events(4).await.expect("events");
    assert_eq!(events[3].data, "[DONE]");
    upstream
        .wait_for_call(|c| c.terminal_ns.is_some() && c.ended.is_none(), SOON)
        .await
        .expect("open");
    client.leave_fin();
    upstream
        .wait_for(|t| t.ended_peer_fin == 1, SOON)
        .await
        .expect("ended by the peer");
}

#[tokio::test]
async fn a_stream_may_never_end() {
    let upstream = start().await;
    let rig = json!({"tokens": 2, "end": "never"});
    let mut client = ask(&upstream, true, rig).await;
    client.head().await.expect("head");
    assert_eq!(client.events(100).await.expect("events").len(), 100);
}

#[tokio::test]
async fn framings_are_as_scripted() {
    for (framing, length, chunked, end) in [
        ("chunked", false, true, BodyEnd::Clean),
        ("length", true, false, BodyEnd::Clean),
        ("close", false, false, BodyEnd::Closed),
        ("http10", false, false, BodyEnd::Closed),
        ("both", true, true, BodyEnd::Clean),
    ] {
        for stream in [false, true] {
            let (head, body, how) = whole(stream, json!({"framing": framing})).await;
            assert_eq!(how, end, "{framing}");
            assert_eq!(head.header("content-length").is_some(), length, "{framing}");
            assert_eq!(
                head.header("transfer-encoding").is_some(),
                chunked,
                "{framing}"
            );
            assert_eq!(head.version == "HTTP/1.0", framing == "http10");
            if stream {
                assert_eq!(Event::all(&body).last().expect("events").data, "[DONE]");
            }
        }
    }
}

#[tokio::test]
async fn cutting_changes_no_byte() {
    let text = json!({"token_text": "é\u{2028}🙂"});
    let merged = |more: Value| {
        let mut rig = text.clone();
        rig.as_object_mut()
            .expect("object")
            .extend(more.as_object().expect("object").clone());
        rig
    };
    let masked = |body: Vec<u8>| {
        let mut events = Event::all(&body);
        for event in &mut events {
            if let Some(mut json) = event.json() {
                json["id"] = Value::Null;
                json["created"] = Value::Null;
                event.data = json.to_string();
            }
        }
        events
    };
    let (_, plain, _) = whole(true, text.clone()).await;
    let plain = masked(plain);
    for segment in [
        json!("byte"),
        json!("once"),
        json!({"size": 7}),
        json!({"cut_at": [1, 100, 300, 301]}),
        json!({"wire": 3}),
        json!({"events": 4}),
    ] {
        let (_, body, end) = whole(true, merged(json!({"segment": segment}))).await;
        assert_eq!(end, BodyEnd::Clean, "{segment}");
        assert_eq!(masked(body), plain, "{segment}");
    }
}

#[tokio::test]
async fn line_ends_and_clothes_keep_the_events() {
    let (_, plain, _) = whole(true, json!({})).await;
    let plain = Event::all(&plain).len();
    for (rig, mark) in [
        (json!({"line_end": "crlf"}), "}\r\n\r\n"),
        (json!({"line_end": "cr"}), "}\r\r"),
        (json!({"line_end": "mixed"}), "}\r\n\r\n"),
        (json!({"no_space": true}), "data:{"),
        (json!({"bom": true}), "\u{feff}data"),
        (json!({"comment": ": hi\n\n"}), ": hi\n\ndata"),
    ] {
        let (_, body, _) = whole(true, rig.clone()).await;
        assert_eq!(Event::all(&body).len(), plain, "{rig}");
        let text = String::from_utf8(body).expect("text");
        assert!(text.contains(mark), "{rig}");
    }
    for (newlines, tail) in [(0, "[DONE]"), (1, "[DONE]\n"), (2, "[DONE]\n\n")] {
        let (_, body, _) = whole(true, json!({"final_newlines": newlines})).await;
        assert!(body.ends_with(tail.as_bytes()) && !body.ends_with(b"\n\n\n"));
    }
}

#[tokio::test]
async fn stalls_are_where_they_are_scripted() {
    for (at, bytes) in [
        (json!("head"), 0_usize),
        (json!("header_line"), 1),
        (json!({"event": 1}), 400),
        (json!({"mid_event": 1}), 250),
        (json!({"mid_lines": 1}), 400),
        (json!({"chunk_size": 1}), 150),
        (json!("terminator"), 1000),
    ] {
        let upstream = start().await;
        let rig = json!({"stall": {"at": at, "ms": 150}});
        let started = std::time::Instant::now();
        let mut client = ask(&upstream, true, rig).await;
        let stalled = upstream
            .wait_for(
                |t| t.bytes_written >= bytes as u64 && t.calls_begun == 1,
                SOON,
            )
            .await;
        stalled.expect("up to the stall");
        client.final_head().await.expect("head");
        let (events, end) = client.all_events().await.expect("events");
        assert_eq!((events.len(), end), (18, BodyEnd::Clean), "{at}");
        assert!(started.elapsed() >= Duration::from_millis(150), "{at}");
    }
}

#[tokio::test]
async fn heartbeats_fill_the_silence() {
    let rig = json!({"first_ms": 400, "heartbeat_ms": 20, "heartbeat": ": beat\n\n"});
    let (_, body, _) = whole(true, rig).await;
    let text = String::from_utf8(body).expect("text");
    assert!(text.matches(": beat\n\n").count() >= 2, "{text}");
}

#[tokio::test]
async fn connections_are_closed_reset_or_refused_as_scripted() {
    let upstream = start().await;
    for (accept, seen) in [(Accept::Close, Closed::Fin), (Accept::Rst, Closed::Rst)] {
        upstream.set_default(Script {
            accept,
            ..Script::default()
        });
        let mut client = RawClient::connect(upstream.addr()).await.expect("connect");
        assert_eq!(client.closed(SOON).await, seen);
    }
    upstream.set_default(Script {
        accept: Accept::Refuse,
        ..Script::default()
    });
    while let Ok(mut client) = RawClient::connect(upstream.addr()).await {
        client.closed(SOON).await;
    }
    upstream.set_default(Script::default());
    loop {
        if RawClient::connect(upstream.addr()).await.is_ok() {
            break;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn an_answer_may_come_before_the_body() {
    let upstream = start().await;
    let mut client = RawClient::connect(upstream.addr()).await.expect("connect");
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\
                x-rig: {\"read\":\"head\",\"status\":413}\r\n\r\n";
    client.send(head).await.expect("send");
    assert_eq!(client.head().await.expect("head").status, 413);
    let (_, end) = client.rest().await.expect("body");
    assert_eq!(end, BodyEnd::Clean);
    assert_eq!(client.closed(SOON).await, Closed::Fin);
}

#[tokio::test]
async fn expectations_and_interim_answers() {
    let upstream = start().await;
    for (expect, first) in [("continue", 100), ("refuse", 417)] {
        let mut client = RawClient::connect(upstream.addr()).await.expect("connect");
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\
             Expect: 100-continue\r\nx-rig: {{\"expect\":\"{expect}\"}}\r\n\r\n"
        );
        client.send(head).await.expect("send");
        assert_eq!(client.head().await.expect("head").status, first);
        if first == 100 {
            client.send("{}").await.expect("send");
            assert_eq!(client.head().await.expect("head").status, 200);
        }
    }
    let rig = json!({"interim": [
        {"status": 102}, {"status": 103, "headers": [["link", "</x>"]], "pause_ms": 5},
    ]});
    let mut client = ask(&upstream, false, rig).await;
    for status in [102, 103, 200] {
        assert_eq!(client.head().await.expect("head").status, status);
    }
}

#[tokio::test]
async fn idle_connections_are_closed_or_told_so() {
    let upstream = start().await;
    upstream.set_default(Script {
        idle_close_ms: Some(50),
        keep_alive_s: Some(5),
        ..Script::default()
    });
    let mut client = ask(&upstream, false, json!({})).await;
    let head = client.head().await.expect("head");
    assert_eq!(head.header("keep-alive"), Some("timeout=5"));
    client.rest().await.expect("body");
    assert_eq!(client.closed(SOON).await, Closed::Fin);
    upstream.set_default(Script {
        idle_408_ms: Some(50),
        ..Script::default()
    });
    let mut client = ask(&upstream, false, json!({})).await;
    client.head().await.expect("head");
    client.rest().await.expect("body");
    assert_eq!(client.head().await.expect("head").status, 408);
}

#[tokio::test]
async fn compressed_streams_unpack_event_by_event() {
    use std::io::Read as _;
    let (head, body, _) = whole(true, json!({"compress": "gzip", "tokens": 3})).await;
    assert_eq!(head.header("content-encoding"), Some("gzip"));
    let mut text = Vec::new();
    flate2::read::GzDecoder::new(body.as_slice())
        .read_to_end(&mut text)
        .expect("gzip");
    assert_eq!(Event::all(&text).len(), 5);
    let (head, body, _) = whole(false, json!({"compress": "gzip"})).await;
    assert_eq!(head.header("content-encoding"), Some("gzip"));
    let mut text = Vec::new();
    flate2::read::GzDecoder::new(body.as_slice())
        .read_to_end(&mut text)
        .expect("gzip");
    assert!(serde_json::from_slice::<Value>(&text).is_ok());
}

#[tokio::test]
async fn raw_bytes_go_out_as_they_are() {
    let pieces = json!([{"text": "data: a\n\n", "times": 2}, {"b64": "/wA="}]);
    let (_, body, end) = whole(true, json!({"body": {"pieces": pieces}})).await;
    assert_eq!(body, b"data: a\n\ndata: a\n\n\xff\0");
    assert_eq!(end, BodyEnd::Clean);
    let wire = json!([{"text": "HTTP/1.1 200 Fine\r\nContent-Length: 3\r\n\r\nabcd"}]);
    let (head, body, end) = whole(true, json!({"body": {"wire": wire}})).await;
    assert_eq!((head.status, body.as_slice()), (200, b"abc".as_slice()));
    assert_eq!(end, BodyEnd::Clean);
}

#[tokio::test]
async fn an_endless_line_has_no_end() {
    let upstream = start().await;
    let mut client = ask(&upstream, true, json!({"body": "endless_line"})).await;
    client.head().await.expect("head");
    client.body_bytes(1 << 20).await.expect("bytes");
    assert_eq!(tidegate_rig::raw::find(client.body_so_far(), b"\n"), None);
}

#[tokio::test]
async fn errors_come_in_the_dialect_before_and_during_a_stream() {
    let upstream = start().await;
    for (path, field) in [
        ("/v1/chat/completions", "/error/message"),
        ("/v1/messages", "/error/type"),
    ] {
        let mut client = RawClient::connect(upstream.addr()).await.expect("connect");
        let body = json!({"stream": true, "rig": {"status": 429, "retry_after": "2"}});
        client.post(path, &body.to_string()).await.expect("send");
        let head = client.head().await.expect("head");
        assert_eq!(head.header("content-type"), Some("application/json"));
        let (body, _) = client.rest().await.expect("body");
        let json: Value = serde_json::from_slice(&body).expect("json");
        assert!(json.pointer(field).is_some(), "{json}");
    }
    for shape in ["dialect", "data", "event", "choices", "garbage"] {
        let rig = json!({"tokens": 4, "error_at": 2, "error_shape": shape, "end_at": 4});
        let (_, body, end) = whole(true, rig).await;
        let events = Event::all(&body);
        assert_eq!((events.len(), end), (4, BodyEnd::Clean), "{shape}");
        if shape != "garbage" {
            let json = events[3].json().expect("json");
            assert!(!json["error"].is_null(), "{shape}");
        }
    }
}

#[tokio::test]
async fn trailers_and_chunk_extensions_are_written() {
    let upstream = start().await;
    let rig = json!({
        "chunk_extension": true, "trailers": [["x-usage", "5"]], "tokens": 1, "close": true,
    });
    let mut client = ask(&upstream, true, rig).await;
    client.head().await.expect("head");
    let (events, end) = client.all_events().await.expect("events");
    assert_eq!((events.len(), end), (3, BodyEnd::Clean));
    assert_eq!(client.closed(SOON).await, Closed::Fin);
}

#[tokio::test]
async fn a_black_hole_neither_accepts_nor_refuses() {
    let hole = BlackHole::start(ANY).expect("a loopback port");
    let connect = RawClient::connect(hole.addr());
    let within = Duration::from_millis(500);
    assert!(tokio::time::timeout(within, connect).await.is_err());
}

#[tokio::test]
async fn a_kept_connection_may_break_at_the_next_request() {
    let upstream = start().await;
    for (next, seen) in [("rst", Closed::Rst), ("close", Closed::Fin)] {
        let mut client = ask(&upstream, false, json!({"next": next})).await;
        client.head().await.expect("head");
        client.rest().await.expect("body");
        client
            .post("/v1/chat/completions", "{}")
            .await
            .expect("send");
        assert_eq!(client.closed(SOON).await, seen, "{next}");
    }
    assert_eq!(upstream.truth().calls_begun, 2);
}

#[tokio::test]
async fn all_connections_may_be_cut_in_one_moment() {
    let upstream = start().await;
    let mut clients = Vec::new();
    for _ in 0..5 {
        let rig = json!({"tokens": 9, "stall": {"at": {"event": 2}}});
        let mut client = ask(&upstream, true, rig).await;
        client.head().await.expect("head");
        client.events(2).await.expect("events");
        clients.push(client);
    }
    upstream.cut_all(PeerEnd::Rst);
    for mut client in clients {
        assert_eq!(client.rest().await.expect("an end").1, BodyEnd::Rst);
    }
    let truth = upstream.wait_for(|t| t.connections_open == 0, SOON).await;
    assert_eq!(truth.expect("all closed").ended_script, 5);
}

#[tokio::test]
async fn an_unread_upload_still_shows_a_reset() {
    let upstream = start().await;
    upstream.set_default(Script {
        read: tidegate_rig::script::Read::Head,
        delay_ms: 60_000,
        ..Script::default()
    });
    let mut client = RawClient::connect(upstream.addr()).await.expect("connect");
    let head = "POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\nabc";
    client.send(head).await.expect("send");
    upstream
        .wait_for(|t| t.running == 1, SOON)
        .await
        .expect("begun");
    client.leave_rst().expect("reset");
    upstream
        .wait_for(|t| t.ended_peer_rst == 1, SOON)
        .await
        .expect("seen");
}

#[tokio::test]
async fn work_may_be_lost_before_the_head() {
    for (end, seen) in [("rst", Closed::Rst), ("fin", Closed::Fin)] {
        let upstream = start().await;
        let rig = json!({"body": {"wire": [{"tokens": 5}]}, "end": end});
        let mut client = ask(&upstream, true, rig).await;
        assert_eq!(client.closed(SOON).await, seen);
        let truth = upstream.wait_for(|t| t.ended_script == 1, SOON).await;
        let truth = truth.expect("ended");
        assert_eq!((truth.tokens, truth.bytes_written), (5, 0));
    }
}

#[tokio::test]
async fn upstreams_of_a_request_may_differ_by_name() {
    let body = json!({"stream": true, "rig": {"per_upstream": {
        "u1": {"end": "rst", "end_at": 0},
    }}});
    for (name, end) in [("u1", BodyEnd::Rst), ("u2", BodyEnd::Clean)] {
        let upstream = start().await;
        upstream.set_default(Script {
            name: Some(name.to_owned()),
            ..Script::default()
        });
        let mut client = RawClient::connect(upstream.addr()).await.expect("connect");
        client
            .request("POST", "/v1/messages", &[], body.to_string().as_bytes())
            .await
            .expect("send");
        client.head().await.expect("head");
        assert_eq!(client.rest().await.expect("body").1, end, "{name}");
    }
}
