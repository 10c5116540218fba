//! TLS on either side.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use serde_json::json;
use tidegate::config::{Config, Endpoint, HttpVersion, ServerTls};
use tidegate_rig::{Closed, FakeUpstream, Script};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::http2::Client;
use crate::support::{
    CHAT, Gate, LOCALHOST, SOON, endpoint, gateway, only, stream, upstream, whole,
};

/// A certificate for `localhost` and its key, as files.
pub(crate) struct Pair {
    pub(crate) cert: PathBuf,
    key: PathBuf,
}

fn folder() -> PathBuf {
    let path =
        PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("tls-{:016x}", fastrand::u64(..)));
    std::fs::create_dir_all(&path).expect("a folder");
    path
}

pub(crate) fn pair() -> Pair {
    let folder = folder();
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let pair = Pair {
        cert: folder.join("cert.pem"),
        key: folder.join("key.pem"),
    };
    std::fs::write(&pair.cert, made.cert.pem()).expect("written");
    std::fs::write(&pair.key, made.signing_key.serialize_pem()).expect("written");
    pair
}

fn serve_tls(config: &mut Config, pair: &Pair) {
    config.server.tls = Some(ServerTls {
        cert_file: pair.cert.clone(),
        key_file: pair.key.clone(),
    });
}

fn cert(path: &Path) -> CertificateDer<'static> {
    CertificateDer::from_pem_file(path).expect("PEM")
}

async fn connect(gate: &Gate, trusted: &Path, alpn: &str) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(cert(trusted)).expect("a root");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![alpn.as_bytes().to_vec()];
    let tcp = TcpStream::connect(gate.addr()).await?;
    let name = ServerName::try_from("localhost").expect("a name");
    TlsConnector::from(Arc::new(config))
        .connect(name, tcp)
        .await
}

async fn get_over(tls: &mut TlsStream<TcpStream>) -> String {
    let body = whole(json!({})).to_string();
    let request = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    tls.write_all(request.as_bytes()).await.expect("sent");
    let mut answer = Vec::new();
    let read = tls.read_to_end(&mut answer);
    tokio::time::timeout(SOON, read)
        .await
        .expect("in time")
        .expect("closed with a goodbye");
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn the_front_speaks_both_versions_by_alpn() {
    let (up, pair) = (upstream(Script::default()).await, pair());
    let gate = gateway(&up, |c| serve_tls(c, &pair));
    let mut tls = connect(&gate, &pair.cert, "http/1.1")
        .await
        .expect("a handshake");
    assert!(get_over(&mut tls).await.starts_with("HTTP/1.1 200"));
    let tls = connect(&gate, &pair.cert, "h2").await.expect("a handshake");
    assert_eq!(tls.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let mut client = Client::over(tls).await;
    assert_eq!(client.post(CHAT, &stream(json!({}))).await.0, 200);
    drop(client);
    gate.settled(&up).await;
}

/// A new certificate is for new connections; a bad one changes nothing.
#[tokio::test]
async fn the_certificate_is_replaced_by_a_reload() {
    let (up, old, new) = (upstream(Script::default()).await, pair(), pair());
    let mut running = None;
    let gate = gateway(&up, |c| {
        serve_tls(c, &old);
        running = Some(c.clone());
    });
    let mut config = running.expect("configured");
    let mut before = connect(&gate, &old.cert, "http/1.1")
        .await
        .expect("a handshake");
    serve_tls(&mut config, &new);
    gate.gateway.reload(config.clone()).expect("it is good");
    assert!(connect(&gate, &old.cert, "http/1.1").await.is_err());
    connect(&gate, &new.cert, "http/1.1")
        .await
        .expect("the new one");
    assert!(
        get_over(&mut before).await.starts_with("HTTP/1.1 200"),
        "open ones go on"
    );
    std::fs::write(&new.key, std::fs::read(&old.key).expect("read")).expect("written");
    let why = gate
        .gateway
        .reload(config)
        .expect_err("they do not go together")
        .to_string();
    assert!(why.contains("certificate and key"), "{why}");
    connect(&gate, &new.cert, "http/1.1")
        .await
        .expect("as before");
}

#[tokio::test]
async fn c118_a_handshake_that_stops_is_ended_by_its_own_limit() {
    let (up, pair) = (upstream(Script::default()).await, pair());
    let gate = gateway(&up, |c| {
        serve_tls(c, &pair);
        c.server.tls_handshake = Duration::from_millis(300);
        only(c).timeouts.request_head = Duration::from_secs(60);
    });
    for start in [&b""[..], b"\x16\x03\x01"] {
        let mut client = gate.client().await;
        client.send(start).await.expect("sent");
        assert_ne!(client.closed(SOON).await, Closed::Open);
    }
    gate.eventually("counted", |g| {
        g.metric("connections_ended_total", &[("reason", "tls")]) == 2.0
    })
    .await;
    let mut plain = gate.client().await;
    plain.send("GET / HTTP/1.1\r\n\r\n").await.expect("sent");
    assert_ne!(
        plain.closed(SOON).await,
        Closed::Open,
        "plain HTTP is no TLS"
    );
}

/// TLS in front of a fake upstream.
pub(crate) async fn tls_front(up: &FakeUpstream, pair: &Pair) -> (u16, AbortHandle) {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let key = PrivateKeyDer::from_pem_file(&pair.key).expect("PEM");
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![cert(&pair.cert)], key)
        .expect("a pair");
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind(LOCALHOST).await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let to = up.addr();
    let task = tokio::spawn(async move {
        let mut pipes = tokio::task::JoinSet::new();
        while let Ok((tcp, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            pipes.spawn(async move {
                let mut tls = acceptor.accept(tcp).await?;
                let mut plain = TcpStream::connect(to).await?;
                tokio::io::copy_bidirectional(&mut tls, &mut plain).await
            });
        }
    });
    (port, task.abort_handle())
}

#[tokio::test]
async fn an_upstream_is_trusted_by_its_ca_file_and_by_its_name() {
    let (up, known, other) = (upstream(Script::default()).await, pair(), pair());
    let (port, task) = tls_front(&up, &known).await;
    for (host, ca, name, status) in [
        ("localhost", Some(&known), None, 200),
        ("127.0.0.1", Some(&known), Some("localhost"), 200),
        ("127.0.0.1", Some(&known), None, 502),
        ("localhost", Some(&other), None, 502),
        ("localhost", None, None, 502),
    ] {
        for http in [HttpVersion::Auto, HttpVersion::Http1] {
            let gate = gateway(&up, |c| {
                let to = only(c);
                to.endpoints =
                    vec![Endpoint::parse(&format!("https://{host}:{port}")).expect("an endpoint")];
                to.tls.ca_file = ca.map(|pair| pair.cert.clone());
                to.tls.server_name = name.map(str::to_owned);
                to.pool.http = http;
            });
            let mut client = gate.post(CHAT, &whole(json!({}))).await;
            let head = client.final_head().await.expect("head");
            assert_eq!(head.status, status, "{host} {name:?}");
            let (body, _) = client.rest().await.expect("body");
            let text = String::from_utf8_lossy(&body).into_owned();
            assert_eq!(status == 502, text.contains("\"tls\""), "{text}");
        }
    }
    task.abort();
}

/// Calls share connections over TLS as well, and a client that leaves ends its own.
#[tokio::test]
async fn tls_connections_are_kept_and_cancelled_like_plain_ones() {
    let (up, pair) = (upstream(Script::default()).await, pair());
    let (port, task) = tls_front(&up, &pair).await;
    let gate = gateway(&up, |c| {
        c.server.workers = crate::support::slots(1);
        let to = only(c);
        to.endpoints =
            vec![Endpoint::parse(&format!("https://localhost:{port}")).expect("an endpoint")];
        to.tls.ca_file = Some(pair.cert.clone());
    });
    let mut client = gate.client().await;
    for _ in 0..20 {
        client
            .post(CHAT, &stream(json!({})).to_string())
            .await
            .expect("sent");
        assert_eq!(client.final_head().await.expect("head").status, 200);
        client.all_events().await.expect("events");
    }
    assert!(up.truth().connections_accepted <= 2, "{:?}", up.truth());
    let mut leaves = gate
        .post(CHAT, &stream(json!({"end": "never", "pace_ms": 5})))
        .await;
    leaves.final_head().await.expect("head");
    leaves.leave_rst().expect("left");
    up.wait_for(|t| t.running == 0, SOON)
        .await
        .expect("cancelled");
    gate.eventually("the slot is back", |g| g.metric("running", &[]) == 0.0)
        .await;
    task.abort();
}

/// What the start would refuse, `tidegate check` does.
#[test]
fn check_reads_certificates_and_keys() {
    let (one, other) = (pair(), pair());
    let rubbish = folder().join("rubbish.pem");
    std::fs::write(&rubbish, "rubbish").expect("written");
    let told = |cert: &PathBuf, key: &PathBuf| {
        let mut config = Config::one_upstream(endpoint("127.0.0.1:9".parse().expect("an address")));
        config.server.tls = Some(ServerTls {
            cert_file: cert.clone(),
            key_file: key.clone(),
        });
        tidegate::app::check(&config).map_err(|error| error.to_string())
    };
    assert_eq!(told(&one.cert, &one.key), Ok(()));
    for (cert, key, expected) in [
        (&rubbish, &one.key, "server.tls.cert_file"),
        (&one.cert, &rubbish, "server.tls.key_file"),
        (&one.cert, &other.key, "do not go together"),
    ] {
        let why = told(cert, key).expect_err("it cannot start");
        assert!(why.contains(expected), "{why}");
    }
}
