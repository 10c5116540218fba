//! TLS of the data plane. A reload puts a new configuration in place; connections that are open keep theirs.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::{CertifiedKey, SigningKey, SingleCertAndKey};
use rustls::{Error, ServerConfig};

use super::expiry;
use crate::config::ServerTls;

/// Why certificate and key cannot be used.
#[derive(Debug)]
pub enum TlsError {
    Cert { path: PathBuf, why: String },
    Key { path: PathBuf, why: String },
    Pair,
    Provider(Error),
}

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cert { path, why } => write!(f, "server.tls.cert_file {}: {why}", path.display()),
            Self::Key { path, why } => write!(f, "server.tls.key_file {}: {why}", path.display()),
            Self::Pair => f.write_str(
                "server.tls: certificate and key do not go together: key_file is not the key of the first certificate in cert_file; that one is the server's own, those that signed it follow",
            ),
            Self::Provider(error) => write!(f, "server.tls: {error}"),
        }
    }
}

impl std::error::Error for TlsError {}

const KEY_KINDS: &str = "use RSA of 2048 to 8192 bits, ECDSA on P-256 or P-384, or Ed25519, such as `openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256` makes, and a certificate for it";

/// What clients are shown.
#[derive(Debug)]
pub struct Identity {
    pub config: Arc<ServerConfig>,
    /// When the first of the certificates ends to be valid, in seconds since 1970.
    pub expires: Option<i64>,
}

/// Reads the PEM files. ALPN offers HTTP/2 and HTTP/1.1.
pub fn load(tls: &ServerTls) -> Result<Identity, TlsError> {
    let bad_cert = |why: String| TlsError::Cert {
        path: tls.cert_file.clone(),
        why,
    };
    let certs = certificates(&tls.cert_file).map_err(bad_cert)?;
    let expires = expiry::earliest(&certs);
    let provider = rustls::crypto::ring::default_provider();
    let key = signing_key(&tls.key_file, &provider).map_err(|why| TlsError::Key {
        path: tls.key_file.clone(),
        why,
    })?;
    let pair = CertifiedKey::new(certs, key);
    match pair.keys_match() {
        Ok(()) | Err(Error::InconsistentKeys(rustls::InconsistentKeys::Unknown)) => {}
        Err(Error::InconsistentKeys(_)) => return Err(TlsError::Pair),
        Err(error) => return Err(bad_cert(format!("the certificate cannot be read: {error}"))),
    }
    let mut config = ServerConfig::builder_with_provider(Arc::new(provider))
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Provider)?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(pair)));
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Identity {
        config: Arc::new(config),
        expires,
    })
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    let certs: Vec<_> = read.map_err(|error| error.to_string())?;
    if !certs.is_empty() {
        return Ok(certs);
    }
    Err(match Contents::of(path) {
        Contents::Binary => format!(
            "it is not PEM but a binary form (DER, or a .pfx or .p12 file); `openssl x509 -in {} -out cert.pem` converts it",
            path.display()
        ),
        Contents::Key | Contents::Encrypted => {
            "it holds a private key and no certificate; are cert_file and key_file in each other's place?".into()
        }
        Contents::Certificate | Contents::Other => "it holds no certificate".into(),
    })
}

fn signing_key(path: &Path, provider: &CryptoProvider) -> Result<Arc<dyn SigningKey>, String> {
    let contents = Contents::of(path);
    if contents == Contents::Encrypted {
        return Err(format!(
            "the key is encrypted, and nobody is there to be asked for its passphrase; write it without one: `openssl pkey -in {} -out key.pem`, for the gateway's user alone to read",
            path.display()
        ));
    }
    let key = PrivateKeyDer::from_pem_file(path).map_err(|error| match (error, contents) {
        (pem::Error::NoItemsFound, Contents::Binary) => format!(
            "it is not PEM but a binary form (DER, or a .pfx or .p12 file); `openssl pkey -in {} -out key.pem` converts it",
            path.display()
        ),
        (pem::Error::NoItemsFound, Contents::Certificate) => {
            "it holds a certificate and no private key; are cert_file and key_file in each other's place?".into()
        }
        (pem::Error::NoItemsFound, Contents::Key) => {
            format!("it holds a private key of a kind that cannot be used; {KEY_KINDS}")
        }
        (pem::Error::NoItemsFound, _) => {
            "it holds no private key in PEM (-----BEGIN PRIVATE KEY-----)".into()
        }
        (error, _) => error.to_string(),
    })?;
    let signing = provider.key_provider.load_private_key(key);
    signing.map_err(|_not_why| {
        format!("this kind or size of key cannot be used, or the key is damaged; {KEY_KINDS}")
    })
}

/// What a file seems to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contents {
    Encrypted,
    Key,
    Certificate,
    Binary,
    Other,
}

impl Contents {
    fn of(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_default();
        let has = |what: &str| bytes.windows(what.len()).any(|at| at == what.as_bytes());
        if has("ENCRYPTED PRIVATE KEY-----") || has("Proc-Type: 4,ENCRYPTED") {
            Self::Encrypted
        } else if has("PRIVATE KEY-----") {
            Self::Key
        } else if has("CERTIFICATE-----") {
            Self::Certificate
        } else if bytes.starts_with(&[0x30]) {
            // ASN.1: a sequence.
            Self::Binary
        } else {
            Self::Other
        }
    }
}
