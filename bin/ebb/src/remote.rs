//! Asks the daemon of another host: HTTP over TLS, with a token.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use ebb_sys::private_file;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::http::uri::{Scheme, Uri};
use hyper::{Method, Request, Response, StatusCode};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{CertificateError, ClientConfig, RootCertStore};
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::args::Command;
use crate::client;

/// Longest wait for a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);
/// Longest silence on a stream of events. The daemon sends a sign of life each 15 s.
const SILENCE_LIMIT: Duration = Duration::from_secs(45);
const TOKEN_FILE_MOST_BYTES: u64 = 4 << 10;
const CA_FILE_MOST_BYTES: u64 = 16 << 20;
const PORT: u16 = 443;

/// Which host to ask, and how.
#[derive(clap::Args)]
pub struct Options {
    /// Ask the daemon of another host, as https://web1:7443
    #[arg(long, global = true, env = "EBB_HOST", value_name = "URL")]
    host: Option<String>,
    /// With --host: a file with the token to show there
    #[arg(long, global = true, env = "EBB_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// With --host: a file with certificates, PEM; trust only hosts that these vouch for [default:
    /// those that this machine trusts]
    #[arg(long, global = true, env = "EBB_CA", value_name = "FILE")]
    ca: Option<PathBuf>,
}

impl Options {
    /// Prepares to ask the other host; none: this one is asked, or nobody.
    ///
    /// # Errors
    /// The command is only for this host, or an option is wrong.
    pub fn remote(&self, command: &Command) -> anyhow::Result<Option<Remote>> {
        let Some(url) = self.host.as_deref().filter(|url| !url.is_empty()) else {
            return Ok(None);
        };
        match command {
            Command::Simulate { .. } | Command::Completions { .. } | Command::Man { .. } => {
                return Ok(None);
            }
            Command::Run(_) | Command::Attach(_) => bail!(
                "a VM is started or attached only on its own host: use ebb there, without --host \
                 (EBB_HOST)"
            ),
            Command::Config(_)
            | Command::Doctor { .. }
            | Command::Observe(_)
            | Command::Discover { .. }
            | Command::Report { .. } => {
                bail!("this command looks at the host that it runs on: leave out --host (EBB_HOST)")
            }
            _ => {}
        }
        let token_file = self.token_file.as_deref().context(
            "--host needs a token: name the file that has it (--token-file, or EBB_TOKEN_FILE)",
        )?;
        let place = Place::parse(url)?;
        let token = token(token_file).context("--token-file")?;
        let tls = connector(self.ca.as_deref())?;
        Ok(Some(Remote { place, token, tls }))
    }
}

/// The daemon of another host.
pub struct Remote {
    place: Place,
    token: HeaderValue,
    tls: TlsConnector,
}

/// Where it listens.
struct Place {
    authority: String,
    host: String,
    port: u16,
}

impl Place {
    fn parse(url: &str) -> anyhow::Result<Place> {
        const FORM: &str = "write https://HOST:PORT";
        let uri: Uri = url.parse().with_context(|| format!("--host {url}: {FORM}"))?;
        match uri.scheme() {
            Some(scheme) if *scheme == Scheme::HTTPS => {}
            Some(scheme) if *scheme == Scheme::HTTP => {
                bail!("--host {url}: a token goes only over TLS: {FORM}")
            }
            _ => bail!("--host {url}: {FORM}"),
        }
        let (Some(authority), "" | "/", None) = (uri.authority(), uri.path(), uri.query()) else {
            bail!("--host {url}: {FORM}, and nothing behind it");
        };
        let port = match authority.as_str().strip_prefix(authority.host()) {
            Some("") => Some(PORT),
            Some(_) => authority.port_u16(),
            // A user stands before the host.
            None => None,
        };
        let port = port.with_context(|| format!("--host {url}: {FORM}"))?;
        // An IPv6 address stands in brackets.
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        Ok(Place { authority: authority.as_str().into(), host: host.into(), port })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "https://{}", self.authority)
    }
}

impl Remote {
    /// Does what [`client::call`] does.
    ///
    /// # Errors
    /// Those of [`client::call`], or there is no connection.
    pub fn call<A: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> anyhow::Result<A> {
        let runtime = runtime()?;
        let (status, answer) = runtime.block_on(async {
            let answer = client::collect(self.send(method, path, body).await?).await;
            answer.with_context(|| self.unanswered())
        })?;
        self.understood(status, &answer)
    }

    fn understood<A: DeserializeOwned>(
        &self,
        status: StatusCode,
        answer: &[u8],
    ) -> anyhow::Result<A> {
        if !status.is_success() {
            bail!(client::refusal(status, answer, || self.releases()));
        }
        serde_json::from_slice(answer).with_context(|| {
            format!("this ebb does not understand ebbd's answer; {}", self.releases())
        })
    }

    /// Does what [`client::call_within`] does.
    ///
    /// # Errors
    /// Those of [`Remote::call`], or the answer does not come in time.
    pub fn call_within<A: DeserializeOwned>(
        &self,
        patience: Duration,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> anyhow::Result<A> {
        let asking = async { client::collect(self.send(method, path, body).await?).await };
        let answered = runtime()?.block_on(async { timeout(patience, asking).await });
        let (status, answer) = answered
            .with_context(|| format!("{} is silent for {} s", self.place, patience.as_secs()))??;
        self.understood(status, &answer)
    }

    /// Does what [`client::follow`] does.
    ///
    /// # Errors
    /// Those of [`client::follow`]; there is no connection, or the host is silent.
    pub fn follow(
        &self,
        path: &str,
        each: impl FnMut(&str) -> anyhow::Result<ControlFlow<()>>,
    ) -> anyhow::Result<bool> {
        let runtime = runtime()?;
        let response = runtime.block_on(self.send(Method::GET, path, Vec::new()))?;
        client::read_events(&runtime, response, Some(SILENCE_LIMIT), || self.releases(), each)
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> anyhow::Result<Response<Incoming>> {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, &self.place.authority)
            .header(header::AUTHORIZATION, &self.token)
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)))?;
        let connected = timeout(CONNECT_LIMIT, self.connect()).await;
        let stream = connected
            .unwrap_or_else(|_| bail!("no connection after {} s", CONNECT_LIMIT.as_secs()))
            .with_context(|| self.place.to_string())?;
        client::send(stream, request).await.with_context(|| self.unanswered())
    }

    fn unanswered(&self) -> String {
        format!("{} ended the connection without an answer", self.place)
    }

    fn releases(&self) -> String {
        format!(
            "ebb is {}; look whether the ebbd of {} is of another release",
            env!("CARGO_PKG_VERSION"),
            self.place
        )
    }

    async fn connect(&self) -> anyhow::Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(self.place.host.clone())?;
        let stream = TcpStream::connect((self.place.host.as_str(), self.place.port)).await?;
        self.tls.connect(name, stream).await.map_err(|error| {
            let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
            match inner {
                Some(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer)) => {
                    anyhow!(
                        "no authority that is trusted vouches for its certificate: name the file of \
                         the one that does (--ca, or EBB_CA)"
                    )
                }
                Some(inner) => anyhow!("its TLS is refused: {inner}"),
                None => error.into(),
            }
        })
    }
}

fn runtime() -> std::io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

/// The header that shows the token.
fn token(file: &Path) -> anyhow::Result<HeaderValue> {
    let content = private_file::read(file, TOKEN_FILE_MOST_BYTES)?;
    let token = content.trim_ascii();
    let form = || format!("{} has one line, the token alone", file.display());
    if token.is_empty() || token.iter().any(u8::is_ascii_whitespace) {
        bail!(form());
    }
    let mut value = HeaderValue::from_bytes(&[b"Bearer ", token].concat()).with_context(form)?;
    value.set_sensitive(true);
    Ok(value)
}

fn connector(ca: Option<&Path>) -> anyhow::Result<TlsConnector> {
    let mut roots = RootCertStore::empty();
    match ca {
        Some(file) => {
            let certificates =
                certificates(file).with_context(|| format!("--ca {}", file.display()))?;
            certificates.into_iter().try_for_each(|certificate| roots.add(certificate))?;
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    if roots.is_empty() {
        bail!("this machine trusts no authority: name the file of one (--ca, or EBB_CA)");
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

fn certificates(file: &Path) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let mut content = Vec::new();
    File::open(file)?.take(CA_FILE_MOST_BYTES).read_to_end(&mut content)?;
    let found = CertificateDer::pem_slice_iter(&content).collect::<Result<Vec<_>, _>>();
    let form = "it has no certificate: give a file of PEM (`-----BEGIN CERTIFICATE-----`)";
    found.ok().filter(|found| !found.is_empty()).context(form)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_host_and_a_port() {
        for (url, host, port) in [
            ("https://web1:7443", "web1", 7443),
            ("https://web1.example/", "web1.example", 443),
            ("https://[2001:db8::1]:7443", "2001:db8::1", 7443),
        ] {
            let place = Place::parse(url).unwrap();
            assert_eq!((place.host.as_str(), place.port), (host, port), "{url}");
            assert!(ServerName::try_from(place.host).is_ok(), "{url}");
        }
        for url in [
            "web1:7443",
            "web1",
            "http://web1:7443",
            "https://web1:7443/v1",
            "https://web1:7443?a",
            "https://me@web1:7443",
            "https://",
            "https://web1:port",
        ] {
            let why = format!("{:#}", Place::parse(url).err().expect(url));
            assert!(why.contains(url) && why.contains("https://HOST:PORT"), "{why}");
        }
    }
}
