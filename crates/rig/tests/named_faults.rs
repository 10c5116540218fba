//! Each fault that has a name does on the wire what the name says.

use std::net::SocketAddr;
use std::time::Duration;

use clap::ValueEnum as _;
use tidegate_rig::script::Fault;
use tidegate_rig::{FakeUpstream, RawClient, Script};

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);
/// Long enough for a loopback answer that comes, short for one that does not.
const PATIENCE: Duration = Duration::from_secs(2);

/// What a client sees: the status or why there is none, the end of the body,
/// how many events, and the first bytes of what came.
async fn seen(fault: Fault) -> (String, String) {
    let mut script = Script {
        tokens: Some(6),
        ..Script::default()
    };
    fault.into_script(&mut script, 3);
    let refuses = fault == Fault::Refuse;
    let upstream = FakeUpstream::start(ANY, script).await.expect("a port");
    let mut client = loop {
        match RawClient::connect(upstream.addr()).await {
            // The listener goes a moment later.
            Ok(_) if refuses => tokio::task::yield_now().await,
            Ok(client) => break client,
            Err(_) => return ("refused".to_owned(), String::new()),
        }
    };
    client.set_limit(PATIENCE);
    let body = r#"{"model":"tiny","stream":true,"messages":[]}"#;
    let expects: &[(&str, &str)] = match fault {
        Fault::NoContinue | Fault::RefuseContinue => &[("expect", "100-continue")],
        _ => &[],
    };
    let sent = client
        .request("POST", "/v1/chat/completions", expects, body.as_bytes())
        .await;
    let head = match (sent, client.head().await) {
        (Ok(()), Ok(head)) => head,
        (_, Err(e)) if e.kind() == std::io::ErrorKind::TimedOut => {
            return ("silent".to_owned(), String::new());
        }
        _ => return ("closed".to_owned(), String::new()),
    };
    let rest = tokio::time::timeout(PATIENCE * 2, client.rest()).await;
    let so_far = || client.body_so_far().to_vec();
    let (bytes, end) = match rest {
        Ok(Ok((bytes, end))) => (bytes, format!("{end:?}")),
        Ok(Err(e)) if e.kind() == std::io::ErrorKind::TimedOut => (so_far(), "silent".to_owned()),
        Ok(Err(e)) => (so_far(), e.kind().to_string()),
        Err(_) => return (format!("{} goes on", head.status), text(&so_far())),
    };
    let after = head.header("retry-after").unwrap_or("-");
    let packed = head.header("content-encoding").unwrap_or("-");
    let facts = format!("{} {end} {after} {packed}", head.status);
    (facts, text(&bytes))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[tokio::test]
async fn each_shows_on_the_wire() {
    let faults = Fault::value_variants();
    // Beside each other: those that are silent take their time.
    let seen: Vec<_> = faults.iter().map(|f| tokio::spawn(seen(*f))).collect();
    let mut all = Vec::new();
    for (fault, seen) in faults.iter().zip(seen) {
        let (facts, text) = seen.await.expect("seen");
        let name = fault.to_possible_value().expect("named");
        let events = match facts.ends_with("goes on") {
            true => 0,
            false => text.matches("\n\n").count() + text.matches("\r\n\r\n").count(),
        };
        all.push(format!("{} | {facts} | {events}", name.get_name()));
    }
    let expected = include_str!("named_faults.txt");
    assert_eq!(all.join("\n") + "\n", expected);
}

#[tokio::test]
async fn the_odd_ones_look_odd() {
    for (fault, mark) in [
        (Fault::Crlf, "\r\n\r\ndata: "),
        (Fault::Cr, "\r\rdata: "),
        (Fault::OddLines, "\u{feff}data:{"),
        (Fault::SplitUtf8, "\u{e9}\u{4e16}\u{1f680}\u{2028}"),
        (Fault::EndlessLine, "xxxxxxxxxxxxxxxx"),
        (Fault::Html, "<html>"),
        (Fault::ErrorEvent, "data: {\"error\""),
        (Fault::NotAStream, "\"object\":\"chat.completion\""),
        (Fault::Gzip, "\u{1f}\u{fffd}"),
    ] {
        let (_, text) = seen(fault).await;
        assert!(text.contains(mark), "{fault:?}: {text:.300}");
    }
    let (_, text) = seen(Fault::NoBlankLine).await;
    assert!(text.ends_with("data: [DONE]\n"), "{text}");
    let (_, text) = seen(Fault::NoDone).await;
    assert!(!text.contains("[DONE]"), "{text}");
}
