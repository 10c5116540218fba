//! Opening one upstream connection: name lookup, TCP, TLS. Each step is a future of its own, so that each can have its own limit.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{CertificateError, ClientConfig, RootCertStore};
use socket2::{Domain, SockRef, Socket as Socket2, Type};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio_rustls::TlsConnector;

use super::socket::{Socket, UpstreamIo, probes};
use super::{EndpointState, Upstream};
use crate::config::{self, HttpVersion};

/// Between the probes of a silent connection.
pub(super) const PROBE_AGAIN: Duration = Duration::from_secs(5);
/// How long one address of several is tried before the next one is.
const NEXT_ADDRESS_AFTER: Duration = Duration::from_millis(1_000);

/// TCP settings of one side; see `config::Server`.
#[derive(Clone, Copy, Debug)]
pub struct TcpOptions {
    pub user_timeout: Duration,
    pub keep_alive: Duration,
}

impl TcpOptions {
    /// No delay, keep-alive probes, and a limit for unacknowledged data, so that a peer that vanishes without FIN is noticed.
    pub fn apply(self, tcp: &impl AsFd) -> io::Result<()> {
        let socket = SockRef::from(tcp);
        socket.set_tcp_nodelay(true)?;
        socket.set_tcp_keepalive(&probes(self.keep_alive, PROBE_AGAIN))?;
        socket.set_tcp_user_timeout(Some(self.user_timeout))
    }
}

/// Looks the host up anew (names are never cached, so that a moved server is found) and connects to the first address that answers.
///
/// # Cancel safety
///
/// Dropping the future abandons the connect; a name lookup under way finishes on its thread and is discarded.
pub async fn tcp(endpoint: &EndpointState, options: TcpOptions) -> io::Result<TcpStream> {
    let address = &endpoint.address;
    let addresses = match address.host.parse::<IpAddr>() {
        Ok(ip) => vec![SocketAddr::new(ip, address.port)],
        Err(_) => {
            let (host, port) = (address.host.clone(), address.port);
            let resolve = move || Ok((host.as_str(), port).to_socket_addrs()?.collect());
            let found = endpoint.lookup.addresses(resolve).await;
            found.map_err(not_found)?
        }
    };
    let mut last: Option<io::Error> = None;
    let count = addresses.len();
    for (i, address) in addresses.into_iter().enumerate() {
        let connect = TcpStream::connect(address);
        let result = if i + 1 == count {
            connect.await
        } else {
            tokio::time::timeout(NEXT_ADDRESS_AFTER, connect)
                .await
                .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut)))
        };
        match result {
            Ok(tcp) => {
                options.apply(&tcp)?;
                return Ok(tcp);
            }
            // What another address said of itself tells more than that this machine has none of this family to call from.
            Err(error) if last.is_some() && is_out_of_sockets(&error) => {}
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the name has no address")))
}

/// A lookup that had no socket to ask with says "try again", not why.
fn not_found(error: io::Error) -> io::Error {
    let socket = Socket2::new(Domain::IPV4, Type::DGRAM, None);
    match socket {
        Err(own) if is_out_of_sockets(&own) => own,
        _ => io::Error::new(io::ErrorKind::NotFound, error),
    }
}

/// It is this machine that has no descriptor, local port or memory for one more connection.
pub fn is_out_of_sockets(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM | libc::EADDRNOTAVAIL)
    )
}

/// Wraps the connection in TLS if the endpoint wants it. The flag says whether the peer speaks HTTP/2.
pub async fn tls(
    upstream: &Upstream,
    endpoint: &EndpointState,
    tcp: TcpStream,
    permit: OwnedSemaphorePermit,
) -> io::Result<(UpstreamIo, bool)> {
    let socket = Socket::new(tcp, endpoint.open.clone(), permit);
    endpoint.opened.inc();
    if !endpoint.address.tls {
        let http2 = upstream.settings.pool.http == HttpVersion::Http2;
        return Ok((UpstreamIo::Plain(socket), http2));
    }
    let host = upstream
        .settings
        .tls
        .server_name
        .as_deref()
        .unwrap_or(&endpoint.address.host);
    let name = ServerName::try_from(host.to_owned())
        .map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
    let stream = TlsConnector::from(Arc::clone(&upstream.tls))
        .connect(name, socket)
        .await
        .map_err(in_words)?;
    let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    Ok((UpstreamIo::Tls(Box::new(stream)), http2))
}

/// What is wrong with a server's certificate, and what to do, where the library's text is for its own developers.
fn in_words(error: io::Error) -> io::Error {
    let inner = error
        .get_ref()
        .and_then(|e| e.downcast_ref::<rustls::Error>());
    let Some(rustls::Error::InvalidCertificate(why)) = inner else {
        return error;
    };
    let words = match why {
        CertificateError::UnknownIssuer => {
            "nobody whom this machine trusts signed the server's certificate; name a file with the certificate of who did: tls.ca_file"
        }
        CertificateError::Other(other) if other.to_string().contains("CaUsedAsEndEntity") => {
            "the server's certificate is that of an authority (self-signed?), not of a server; give it one that an authority has signed, or one without CA:TRUE, and name the authority's in tls.ca_file"
        }
        _ => return error,
    };
    io::Error::new(error.kind(), words)
}

/// Why an upstream's TLS settings cannot be used.
#[derive(Debug)]
pub enum TlsError {
    CaFile {
        path: std::path::PathBuf,
        why: String,
    },
    Provider(rustls::Error),
}

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CaFile { path, why } => write!(f, "cannot use ca_file {}: {why}", path.display()),
            Self::Provider(error) => write!(f, "TLS cannot be set up: {error}"),
        }
    }
}

impl std::error::Error for TlsError {}

/// The client side of TLS for one upstream: the system's roots, the extra ones, and the protocols to offer.
pub fn tls_config(upstream: &config::Upstream) -> Result<Arc<ClientConfig>, TlsError> {
    let mut roots = RootCertStore::empty();
    if upstream.endpoints.iter().any(|e| e.tls) {
        // A broken certificate in the system's store must not take the gateway down; the rest of the store is used.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    }
    if let Some(path) = &upstream.tls.ca_file {
        let bad = |why: String| TlsError::CaFile {
            path: path.clone(),
            why,
        };
        let certs = CertificateDer::pem_file_iter(path).map_err(|e| bad(e.to_string()))?;
        for cert in certs {
            let cert = cert.map_err(|e| bad(e.to_string()))?;
            roots.add(cert).map_err(|e| bad(e.to_string()))?;
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Provider)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    client.alpn_protocols = match upstream.pool.http {
        HttpVersion::Http1 => vec![b"http/1.1".to_vec()],
        HttpVersion::Http2 => vec![b"h2".to_vec()],
        HttpVersion::Auto => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
    };
    Ok(Arc::new(client))
}
