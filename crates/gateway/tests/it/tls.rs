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
    CHAT, Gate, LOCALHOST, SOON, ask, endpoint, gateway, only, stream, upstream, whole,
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

/// One whose time is up at the third of February of `year`.
fn pair_until(year: i32) -> Pair {
    let pair = pair();
    let names = ["localhost".to_owned()];
    let mut params = rcgen::CertificateParams::new(names).expect("a name");
    params.not_after = rcgen::date_time_ymd(year, 2, 3);
    let key = rcgen::KeyPair::generate().expect("a key");
    let cert = params.self_signed(&key).expect("a certificate");
    std::fs::write(&pair.cert, cert.pem()).expect("written");
    std::fs::write(&pair.key, key.serialize_pem()).expect("written");
    pair
}

pub(crate) fn serve_tls(config: &mut Config, pair: &Pair) {
    config.server.tls = Some(ServerTls {
        cert_file: pair.cert.clone(),
        key_file: pair.key.clone(),
    });
}

fn cert(path: &Path) -> CertificateDer<'static> {
    CertificateDer::from_pem_file(path).expect("PEM")
}

pub(crate) async fn connect(
    gate: &Gate,
    trusted: &Path,
    alpn: &str,
) -> std::io::Result<TlsStream<TcpStream>> {
    over(TcpStream::connect(gate.addr()).await?, trusted, alpn).await
}

pub(crate) async fn over(
    tcp: TcpStream,
    trusted: &Path,
    alpn: &str,
) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(cert(trusted)).expect("a root");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![alpn.as_bytes().to_vec()];
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

/// The end of the certificate that is served is in the scrape, and follows a reload that is taken.
#[tokio::test]
async fn the_end_of_the_certificate_is_shown() {
    const NAME: &str = "certificate_expiry_timestamp_seconds";
    let up = upstream(Script::default()).await;
    let plain = gateway(&up, |_| {});
    let shown = plain.gateway.metrics.encode();
    assert!(!shown.contains(&format!("{NAME}{{")), "none is served");
    let (old, new) = (pair(), pair_until(2031));
    let mut running = None;
    let gate = gateway(&up, |c| {
        serve_tls(c, &old);
        running = Some(c.clone());
    });
    let file = |pair: &Pair| pair.cert.display().to_string();
    // What `date -u +%s` says for the end of year 4095, which is what `pair` has, and for the one above.
    assert_eq!(
        gate.metric(NAME, &[("file", &file(&old))]),
        67_090_118_400.0
    );
    let mut config = running.expect("configured");
    serve_tls(&mut config, &new);
    gate.gateway.reload(config.clone()).expect("it is good");
    let later = 1_927_843_200.0;
    assert_eq!(gate.metric(NAME, &[("file", &file(&new))]), later);
    assert_eq!(gate.metric(NAME, &[]), later, "the old one is not served");
    serve_tls(
        &mut config,
        &Pair {
            cert: old.cert,
            key: new.key,
        },
    );
    gate.gateway
        .reload(config)
        .expect_err("they do not go together");
    assert_eq!(gate.metric(NAME, &[]), later, "nor is a bad one");
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
}

/// It is told in the words that it understands, and nothing of it is served.
#[tokio::test]
async fn plain_http_on_the_tls_port_is_told_to_use_https() {
    let (up, pair) = (upstream(Script::default()).await, pair());
    let gate = gateway(&up, |c| serve_tls(c, &pair));
    let long = ask(json!({"padding": "x".repeat(300_000)}));
    for body in [whole(json!({})), long] {
        let mut plain = gate.post(CHAT, &body).await;
        let head = plain.final_head().await.expect("a head");
        assert_eq!(head.status, 400);
        let (said, _) = plain.rest().await.expect("a body");
        let said: serde_json::Value = serde_json::from_slice(&said).expect("JSON");
        assert_eq!(said["error"]["code"], "tls_required");
        let words = said["error"]["message"].as_str().expect("words");
        assert!(words.contains("use https://"), "{words}");
        assert_eq!(plain.closed(SOON).await, Closed::Fin);
    }
    gate.eventually("counted", |g| {
        g.metric("connections_ended_total", &[("reason", "plain_http")]) == 2.0
    })
    .await;
    assert_eq!(up.truth().calls_begun, 0);
}

/// What is said above the limit is said in clear text, or not at all.
#[tokio::test]
async fn a_tls_client_above_the_limit_is_sent_nothing_in_clear_text() {
    let (up, pair) = (upstream(Script::default()).await, pair());
    let gate = gateway(&up, |c| {
        serve_tls(c, &pair);
        c.server.connections_max = 1;
    });
    let first = connect(&gate, &pair.cert, "http/1.1").await.expect("in");
    let mut second = TcpStream::connect(gate.addr()).await.expect("accepted");
    let mut read = Vec::new();
    let end = tokio::time::timeout(SOON, second.read_to_end(&mut read)).await;
    end.expect("in time").expect("closed");
    assert!(read.is_empty(), "{}", String::from_utf8_lossy(&read));
    let refused = gate.metric(
        "connections_refused_total",
        &[("reason", "connections_max")],
    );
    assert_eq!(refused, 1.0);
    drop(first);
}

/// All that comes until the gateway has closed the connection with a goodbye: its end is not to look like a cut.
async fn to_its_end(tls: &mut TlsStream<TcpStream>) -> Vec<u8> {
    let mut read = Vec::new();
    let end = tokio::time::timeout(SOON, tls.read_to_end(&mut read)).await;
    end.expect("in time").expect("closed with a goodbye");
    read
}

/// Whichever limit of a connection ends it.
#[tokio::test]
async fn a_connection_that_the_gateway_ends_is_closed_with_a_goodbye() {
    let (up, pair) = (upstream(Script::default()).await, pair());
    let gate = gateway(&up, |c| {
        serve_tls(c, &pair);
        only(c).timeouts.request_head = Duration::from_millis(2000);
        c.server.keep_alive = Duration::from_millis(300);
    });
    let get = "GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    // GET / at localhost, of the static table.
    let head = b"\0\0\x0e\x01\x05\0\0\0\x01\x82\x84\x86\x41\x09localhost";
    let heads: [(&str, &[u8]); 5] = [
        ("http/1.1", b""),
        ("http/1.1", &get.as_bytes()[..20]),
        ("h2", b""),
        ("h2", &preface[..10]),
        ("h2", preface),
    ];
    let both = [&preface[..], head].concat();
    let served: [(&str, &[u8]); 2] = [("http/1.1", get.as_bytes()), ("h2", &both)];
    for (reason, cases) in [("request_head", &heads[..]), ("keep_alive", &served)] {
        let mut open = Vec::new();
        for (alpn, sent) in cases {
            let mut tls = connect(&gate, &pair.cert, alpn).await.expect("a handshake");
            tls.write_all(sent).await.expect("sent");
            open.push(tls);
        }
        for tls in &mut open {
            to_its_end(tls).await;
        }
        let n = open.len();
        gate.eventually("each by this limit", |g| ended_by(g, reason) == n)
            .await;
    }
    let all = heads.len() + served.len();
    assert_eq!(gate.metric("connections_ended_total", &[]) as usize, all);
}

fn ended_by(gate: &Gate, reason: &str) -> usize {
    gate.metric("connections_ended_total", &[("reason", reason)]) as usize
}

/// What is cut tells so by its framing.
#[tokio::test]
async fn an_answer_that_breaks_off_is_closed_with_a_goodbye() {
    let (up, pair) = (upstream(Script::default()).await, pair());
    let gate = gateway(&up, |c| serve_tls(c, &pair));
    let mut tls = connect(&gate, &pair.cert, "http/1.1")
        .await
        .expect("a handshake");
    let body = stream(json!({"end": "fin", "end_at": 5})).to_string();
    let request = tidegate_rig::raw::request_bytes("POST", CHAT, &[], body.as_bytes());
    tls.write_all(&request).await.expect("sent");
    let read = to_its_end(&mut tls).await;
    assert!(read.starts_with(b"HTTP/1.1 200") && !read.ends_with(b"0\r\n\r\n"));
}

/// A body that ends with its connection can only be broken by a reset.
#[tokio::test]
async fn an_answer_to_an_old_client_that_breaks_off_has_no_goodbye() {
    let (up, pair) = (upstream(Script::default()).await, pair());
    let gate = gateway(&up, |c| serve_tls(c, &pair));
    let mut tls = connect(&gate, &pair.cert, "http/1.1")
        .await
        .expect("a handshake");
    let long = json!({
        "headers": [["content-type", "application/json"]],
        "body": {"pieces": [{"text": "x".repeat(1000), "times": 1000}]},
        "end": "fin", "end_at": 800,
    });
    let body = whole(long).to_string();
    let request = tidegate_rig::raw::request_bytes("POST", CHAT, &[], body.as_bytes());
    let request = String::from_utf8(request)
        .expect("text")
        .replace("HTTP/1.1", "HTTP/1.0");
    tls.write_all(request.as_bytes()).await.expect("sent");
    let mut read = Vec::new();
    let end = tokio::time::timeout(SOON, tls.read_to_end(&mut read)).await;
    let end = end.expect("in time").expect_err("no goodbye");
    assert_eq!(end.kind(), std::io::ErrorKind::ConnectionReset);
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

/// What the operator reads is what to do, not what the library calls it.
#[tokio::test]
async fn a_server_whose_certificate_is_not_trusted_is_told_of_in_words() {
    let (up, plain, authority) = (upstream(Script::default()).await, pair(), pair());
    let mut params = rcgen::CertificateParams::new(["localhost".to_owned()]).expect("a name");
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate().expect("a key");
    let cert = params.self_signed(&key).expect("a certificate");
    std::fs::write(&authority.cert, cert.pem()).expect("written");
    std::fs::write(&authority.key, key.serialize_pem()).expect("written");
    for (server, trusted, words) in [
        (&plain, None, "nobody whom this machine trusts signed"),
        (
            &authority,
            Some(&authority),
            "that of an authority (self-signed?)",
        ),
    ] {
        let (port, task) = tls_front(&up, server).await;
        let gate = gateway(&up, |c| {
            crate::calls::with_admin(c);
            let to = only(c);
            to.endpoints =
                vec![Endpoint::parse(&format!("https://localhost:{port}")).expect("an endpoint")];
            to.tls.ca_file = trusted.map(|pair| pair.cert.clone());
        });
        let mut client = gate.post(CHAT, &whole(json!({}))).await;
        assert_eq!(client.final_head().await.expect("head").status, 502);
        let (_, shown) = crate::calls::admin(&gate, "GET", "/admin/upstreams").await;
        let error = &shown["upstreams"][0]["endpoints"][0]["last_error"];
        let why = error["error"].as_str().expect("words");
        assert!(why.contains(words) && why.contains("tls.ca_file"), "{why}");
        assert_eq!(error["reason"], "tls");
        task.abort();
    }
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

/// What `check` says.
fn told(cert: &Path, key: &Path) -> Result<(), String> {
    let mut config = Config::one_upstream(endpoint("127.0.0.1:9".parse().expect("an address")));
    config.server.tls = Some(ServerTls {
        cert_file: cert.to_owned(),
        key_file: key.to_owned(),
    });
    tidegate::app::check(&config).map_err(|error| error.to_string())
}

/// Keys and certificates as an operator makes them with OpenSSL.
const OPENSSL: [&str; 9] = [
    "req -x509 -newkey rsa:2048 -nodes -keyout good.key -out good.crt -subj /CN=a",
    "req -x509 -newkey rsa:1024 -nodes -keyout short.key -out short.crt -subj /CN=a",
    "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-521 -nodes -keyout p521.key -out p521.crt -subj /CN=a",
    "req -x509 -newkey ed448 -nodes -keyout ed448.key -out ed448.crt -subj /CN=a",
    "pkey -in good.key -aes256 -passout pass:x -out pkcs8.key",
    "rsa -in good.key -traditional -aes256 -passout pass:x -out old.key",
    "pkey -in good.key -outform DER -out der.key",
    "x509 -in good.crt -outform DER -out der.crt",
    "pkcs12 -export -in good.crt -inkey good.key -passout pass: -out both.p12",
];

/// What is wrong with a key or a certificate is said, and what to do.
#[test]
fn a_key_that_cannot_be_used_is_told_why() {
    let made = folder();
    for arguments in OPENSSL {
        let mut openssl = std::process::Command::new("openssl");
        openssl.args(arguments.split(' ')).current_dir(&made);
        let done = openssl.output().expect("openssl");
        assert!(done.status.success(), "openssl {arguments}: {done:?}");
    }
    let told = |cert: &str, key: &str| told(&made.join(cert), &made.join(key));
    assert_eq!(told("good.crt", "good.key"), Ok(()));
    for (cert, key, what) in [
        (
            "short.crt",
            "short.key",
            ["this kind or size of key", "2048 to 8192"],
        ),
        (
            "p521.crt",
            "p521.key",
            ["this kind or size of key", "P-256 or P-384"],
        ),
        (
            "ed448.crt",
            "ed448.key",
            ["this kind or size of key", "Ed25519"],
        ),
        ("good.crt", "pkcs8.key", ["is encrypted", "openssl pkey"]),
        ("good.crt", "old.key", ["is encrypted", "openssl pkey"]),
        ("good.crt", "der.key", ["not PEM", "openssl pkey"]),
        ("good.crt", "both.p12", ["not PEM", "openssl pkey"]),
        (
            "good.crt",
            "good.crt",
            ["no private key", "each other's place"],
        ),
        ("der.crt", "good.key", ["not PEM", "openssl x509"]),
        (
            "good.key",
            "good.key",
            ["no certificate", "each other's place"],
        ),
        (
            "good.crt",
            "short.key",
            ["this kind or size of key", "2048"],
        ),
    ] {
        let why = told(cert, key).expect_err("it cannot be used");
        assert!(
            what.iter().all(|what| why.contains(what)),
            "{cert} {key}: {why}"
        );
        let file = if why.contains("cert_file ") {
            cert
        } else {
            key
        };
        assert!(why.contains(file), "which file: {why}");
    }
}

/// What the start would refuse, `tidegate check` does.
#[test]
fn check_reads_certificates_and_keys() {
    let (one, other) = (pair(), pair());
    let rubbish = folder().join("rubbish.pem");
    std::fs::write(&rubbish, "rubbish").expect("written");
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
