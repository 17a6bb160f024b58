//! The options of the listener.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use super::listener::{Listener, Patience};
use super::tls;
use super::tokens::Tokens;

/// Whether and how other machines are served.
#[derive(clap::Args)]
pub struct Options {
    /// Serve the REST interface to other machines as well, at this IP address and port: with TLS,
    /// to clients that have a token.
    #[arg(long, env = "EBB_LISTEN", value_name = "ADDRESS:PORT", value_parser = address)]
    listen: Option<SocketAddr>,
    /// With --listen: the certificate of this host, PEM, and those that lead to its authority.
    #[arg(long, env = "EBB_TLS_CERT", value_name = "FILE")]
    tls_cert: Option<PathBuf>,
    /// With --listen: the key of the certificate, PEM.
    #[arg(long, env = "EBB_TLS_KEY", value_name = "FILE")]
    tls_key: Option<PathBuf>,
    /// With --listen: the tokens of clients, a line for each: `read TOKEN` or `control TOKEN`.
    #[arg(long, env = "EBB_TOKENS", value_name = "FILE")]
    tokens: Option<PathBuf>,
}

fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse()
        .map_err(|_| "give an IP address and a port, as in 192.0.2.7:7443 or [::]:7443".into())
}

impl Options {
    /// Reads the files and binds the socket; none: only this host is served.
    ///
    /// # Errors
    /// An option is missing, a file cannot be used, or the address cannot.
    pub fn open(&self) -> anyhow::Result<Option<Listener>> {
        let Some(address) = self.listen else {
            return match [&self.tls_cert, &self.tls_key, &self.tokens] {
                [None, None, None] => Ok(None),
                _ => bail!("--tls-cert, --tls-key and --tokens belong to --listen: give it, too"),
            };
        };
        let certificate = given(&self.tls_cert, "--tls-cert")?;
        let key = given(&self.tls_key, "--tls-key")?;
        let tokens = given(&self.tokens, "--tokens")?;
        let (tls, tokens) = (tls::acceptor(certificate, key)?, Tokens::read(tokens)?);
        let socket = TcpListener::bind(address).with_context(|| format!("--listen {address}"))?;
        Ok(Some(Listener { socket, tls, tokens, patience: Patience::default() }))
    }
}

fn given<'a>(option: &'a Option<PathBuf>, name: &str) -> anyhow::Result<&'a Path> {
    option.as_deref().with_context(|| {
        format!("--listen needs {name}: other machines are served only with TLS and with tokens")
    })
}
