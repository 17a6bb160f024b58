//! One HTTP/1.1 exchange with the daemon over its UNIX socket.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use ebb_api::{ApiErrorBody, Version, advice, route};
use rustix::net::sockopt::socket_peercred;

/// This program's release.
const OWN: &str = env!("CARGO_PKG_VERSION");

/// Sends `body`, which is JSON or empty, to `path`, and returns the answer, parsed from JSON. `log`
/// is the file with the daemon's messages, if it is known.
///
/// There is no time limit: a detach may have to bring back a terabyte.
///
/// # Errors
/// The daemon refuses, in its own words, or the exchange fails.
pub fn call<A: DeserializeOwned>(
    (stream, log): (UnixStream, Option<&Path>),
    method: Method,
    path: &str,
    body: Vec<u8>,
) -> anyhow::Result<A> {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "ebbd")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(body)))?;
    let daemon = Daemon::of(&stream);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let (status, answer) =
        runtime.block_on(exchange(stream, request)).with_context(|| match log {
            Some(log) => format!(
                "ebbd ended the connection without an answer; its log, {}, may say why",
                log.display()
            ),
            None => {
                "ebbd ended the connection without an answer; its messages on standard error may \
                     say why"
                    .into()
            }
        })?;
    let restart = || restart(&daemon.pid, runtime.block_on(daemon.version()).as_deref());
    if !status.is_success() {
        bail!(refusal(status, &answer, restart));
    }
    serde_json::from_slice(&answer)
        .with_context(|| format!("this ebb does not understand ebbd's answer; {}", restart()))
}

/// Sends as [`call`] does to the daemon that listens at this socket, and waits no longer than
/// `patience`. It starts no daemon.
///
/// # Errors
/// Those of [`call`]; nobody listens, or the answer does not come in time.
pub fn call_within<A: DeserializeOwned>(
    socket: &Path,
    patience: Duration,
    method: Method,
    path: &str,
    body: Vec<u8>,
) -> anyhow::Result<A> {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "ebbd")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(body)))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let asking = async {
        // Does not wait, even for a daemon that is stopped.
        let stream = tokio::net::UnixStream::connect(socket).await;
        let stream = stream.with_context(|| format!("no ebbd listens at {}", socket.display()))?;
        exchange(stream.into_std()?, request).await
    };
    let answered = runtime.block_on(async { timeout(patience, asking).await });
    let (status, answer) =
        answered.with_context(|| format!("ebbd is silent for {} s", patience.as_secs()))??;
    if !status.is_success() {
        bail!(refusal(status, &answer, || restart("PID", None)));
    }
    serde_json::from_slice(&answer).context("this ebb does not understand ebbd's answer")
}

/// The daemon that answers.
struct Daemon {
    pid: String,
    socket: Option<PathBuf>,
}

impl Daemon {
    fn of(stream: &UnixStream) -> Daemon {
        let peer = socket_peercred(stream);
        let address = stream.peer_addr().ok();
        Daemon {
            pid: peer.map_or("PID".into(), |peer| peer.pid.as_raw_pid().to_string()),
            socket: address.and_then(|address| address.as_pathname().map(Path::to_owned)),
        }
    }

    /// Returns the daemon's release, if it tells.
    async fn version(&self) -> Option<String> {
        let stream = UnixStream::connect(self.socket.as_ref()?).ok()?;
        let request = Request::builder().uri(route::VERSION).header(header::HOST, "ebbd");
        let (_, answer) = exchange(stream, request.body(Full::default()).ok()?).await.ok()?;
        Some(serde_json::from_slice::<Version>(&answer).ok()?.version)
    }
}

/// Says what to do about a daemon that speaks otherwise than this program.
fn restart(pid: &str, version: Option<&str>) -> String {
    let why = match version {
        Some(version) if version != OWN => format!("ebbd is {version} and ebb is {OWN}:"),
        _ => "if both are not from one release,".into(),
    };
    let end = advice::end(pid);
    format!("{why} {end}, and the next ebb command starts its own; no VM is lost")
}

async fn exchange(
    stream: UnixStream,
    request: Request<Full<Bytes>>,
) -> anyhow::Result<(StatusCode, Bytes)> {
    stream.set_nonblocking(true)?;
    let stream = TokioIo::new(tokio::net::UnixStream::from_std(stream)?);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await?;
    tokio::spawn(connection);
    let response = sender.send_request(request).await?;
    let status = response.status();
    Ok((status, response.into_body().collect().await?.to_bytes()))
}

fn refusal(status: StatusCode, answer: &[u8], restart: impl FnOnce() -> String) -> String {
    if let Ok(refused) = serde_json::from_slice::<ApiErrorBody>(answer) {
        return refused.error;
    }
    let text = String::from_utf8_lossy(answer);
    let text = if text.is_empty() { text } else { format!(": {text}").into() };
    format!("ebbd answered {status}{text}; {}", restart())
}
