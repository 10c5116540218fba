//! TLS of the data plane. A reload puts a new configuration in place; connections that are open keep theirs.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::config::ServerTls;

/// Why certificate and key cannot be used.
#[derive(Debug)]
pub enum TlsError {
    Cert { path: PathBuf, why: String },
    Key { path: PathBuf, why: String },
    Pair(rustls::Error),
}

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cert { path, why } => write!(f, "server.tls.cert_file {}: {why}", path.display()),
            Self::Key { path, why } => write!(f, "server.tls.key_file {}: {why}", path.display()),
            Self::Pair(error) => write!(
                f,
                "server.tls: certificate and key do not go together: {error}"
            ),
        }
    }
}

impl std::error::Error for TlsError {}

/// Reads the PEM files. ALPN offers HTTP/2 and HTTP/1.1.
pub fn load(tls: &ServerTls) -> Result<Arc<ServerConfig>, TlsError> {
    let bad_cert = |why: String| TlsError::Cert {
        path: tls.cert_file.clone(),
        why,
    };
    let certs: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(&tls.cert_file)
        .map_err(|e| bad_cert(e.to_string()))?
        .collect::<Result<_, _>>()
        .map_err(|e| bad_cert(e.to_string()))?;
    if certs.is_empty() {
        return Err(bad_cert("it holds no certificate".into()));
    }
    let key = PrivateKeyDer::from_pem_file(&tls.key_file).map_err(|e| TlsError::Key {
        path: tls.key_file.clone(),
        why: e.to_string(),
    })?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Pair)?
        .with_no_client_auth()
        .with_single_cert(certs, key)
        .map_err(TlsError::Pair)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
