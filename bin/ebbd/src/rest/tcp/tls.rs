//! The certificate of the daemon, and its key.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ebb_sys::private_file::{self, PrivateFileError};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

/// Longest file.
const FILE_MOST_BYTES: u64 = 1 << 20;

/// Why there is no TLS.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The file of the certificate cannot be read.
    #[error("--tls-cert: {path}: {1}", path = .0.display())]
    Certificate(PathBuf, io::Error),
    /// It has no certificate.
    #[error(
        "--tls-cert {} has no certificate that can be read: give a file of PEM \
         (`-----BEGIN CERTIFICATE-----`) with the daemon's certificate first, and then those that \
         lead to its authority",
        .0.display()
    )]
    NoCertificate(PathBuf),
    /// The file of the key cannot be read, or others can.
    #[error("--tls-key: {0}")]
    Key(#[from] PrivateFileError),
    /// It has no key.
    #[error(
        "--tls-key {} has no key that can be read: give a file of PEM \
         (`-----BEGIN PRIVATE KEY-----`) without a passphrase",
        .0.display()
    )]
    NoKey(PathBuf),
    /// They do not belong together.
    #[error(
        "the key in {key} is not that of the first certificate in {certificate}: name both of one \
         certificate",
        key = .0.display(),
        certificate = .1.display()
    )]
    Mismatch(PathBuf, PathBuf),
    /// The library refuses them.
    #[error("--tls-cert and --tls-key cannot be used: {0}: make a new certificate with a new key")]
    Refused(rustls::Error),
}

/// Reads the certificate and its key. Connections use TLS 1.3.
///
/// # Errors
/// See [`TlsError`].
pub fn acceptor(certificate: &Path, key: &Path) -> Result<TlsAcceptor, TlsError> {
    let certificates = certificates(certificate)?;
    let private = private_file::read(key, FILE_MOST_BYTES)?;
    let private =
        PrivateKeyDer::from_pem_slice(&private).map_err(|_| TlsError::NoKey(key.into()))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(TlsError::Refused)?
        .with_no_client_auth()
        .with_single_cert(certificates, private)
        .map_err(|error| match error {
            rustls::Error::InconsistentKeys(_) => {
                TlsError::Mismatch(key.into(), certificate.into())
            }
            rustls::Error::InvalidCertificate(_) => TlsError::NoCertificate(certificate.into()),
            error => TlsError::Refused(error),
        })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let mut content = Vec::new();
    File::open(path)
        .and_then(|file| file.take(FILE_MOST_BYTES).read_to_end(&mut content))
        .map_err(|error| TlsError::Certificate(path.into(), error))?;
    let found = CertificateDer::pem_slice_iter(&content).collect::<Result<Vec<_>, _>>();
    found.ok().filter(|found| !found.is_empty()).ok_or_else(|| TlsError::NoCertificate(path.into()))
}
