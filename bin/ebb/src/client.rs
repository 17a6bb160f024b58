//! One HTTP/1.1 exchange with the daemon over its UNIX socket, or a stream of its events.

use std::fmt;
use std::ops::ControlFlow;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use ebb_api::{ApiErrorBody, ErrorCode, Version, advice, route};
use rustix::net::sockopt::socket_peercred;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::{Builder, Runtime};

use crate::events::Frames;

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
    let request = request(method, path, body)?;
    let daemon = Daemon::of(&stream);
    let runtime = Builder::new_current_thread().enable_io().build()?;
    let (status, answer) =
        runtime.block_on(local(stream, request)).with_context(|| unanswered(log))?;
    let restart = || restart(&daemon.pid, runtime.block_on(daemon.version()).as_deref());
    if !status.is_success() {
        bail!(refusal(status, &answer, restart));
    }
    serde_json::from_slice(&answer)
        .with_context(|| format!("this ebb does not understand ebbd's answer; {}", restart()))
}

/// Asks for a stream of events at `path`, and calls `each` with the JSON of each of them. Returns
/// whether the stream has ended; else `each` has broken off.
///
/// # Errors
/// The daemon refuses, the stream breaks off in the middle of an event, or `each` fails.
pub fn follow(
    (stream, log): (UnixStream, Option<PathBuf>),
    path: &str,
    each: impl FnMut(&str) -> anyhow::Result<ControlFlow<()>>,
) -> anyhow::Result<bool> {
    let request = request(Method::GET, path, Vec::new())?;
    let daemon = Daemon::of(&stream);
    let runtime = Builder::new_current_thread().enable_io().build()?;
    let response = runtime
        .block_on(send_local(stream, request))
        .with_context(|| unanswered(log.as_deref()))?;
    let version = || runtime.block_on(daemon.version());
    read_events(&runtime, response, None, || restart(&daemon.pid, version().as_deref()), each)
}

/// Calls `each` with the JSON of each event of an answer. Returns whether the stream has ended; else
/// `each` has broken off. Waits for a part of the answer as long as `patience`, if it is given, for
/// which the runtime needs a clock.
///
/// # Errors
/// Those of [`follow`]; the daemon is silent.
pub fn read_events(
    runtime: &Runtime,
    mut response: Response<Incoming>,
    patience: Option<Duration>,
    restart: impl FnOnce() -> String,
    mut each: impl FnMut(&str) -> anyhow::Result<ControlFlow<()>>,
) -> anyhow::Result<bool> {
    if !response.status().is_success() {
        let (status, answer) = runtime.block_on(collect(response))?;
        bail!(refusal(status, &answer, restart));
    }
    let mut frames = Frames::default();
    while let Some(frame) = runtime.block_on(next_frame(response.body_mut(), patience))? {
        let Ok(bytes) = frame.into_data() else { continue };
        for event in frames.take(&bytes)? {
            if each(&event)?.is_break() {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Returns the next part of a stream of events. `None`: it has ended.
async fn next_frame<B>(
    body: &mut B,
    patience: Option<Duration>,
) -> anyhow::Result<Option<Frame<Bytes>>>
where
    B: Body<Data = Bytes, Error: Into<anyhow::Error>> + Unpin,
{
    let frame = match patience {
        None => body.frame().await,
        // A host that has lost its power or its network does not say so.
        Some(patience) => timeout(patience, body.frame()).await.map_err(|_| {
            let seconds = patience.as_secs();
            anyhow!("the other host is silent for {seconds} s: it, or the network, is gone")
        })?,
    };
    let broken = "ebbd ended the connection in the middle of the events";
    frame.transpose().map_err(Into::into).context(broken)
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
    let request = request(method, path, body)?;
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let asking = async {
        // Does not wait, even for a daemon that is stopped.
        let stream = tokio::net::UnixStream::connect(socket).await;
        let stream = stream.with_context(|| format!("no ebbd listens at {}", socket.display()))?;
        local(stream.into_std()?, request).await
    };
    let answered = runtime.block_on(async { timeout(patience, asking).await });
    let (status, answer) =
        answered.with_context(|| format!("ebbd is silent for {} s", patience.as_secs()))??;
    if !status.is_success() {
        bail!(refusal(status, &answer, || restart("PID", None)));
    }
    serde_json::from_slice(&answer).context("this ebb does not understand ebbd's answer")
}

fn request(method: Method, path: &str, body: Vec<u8>) -> hyper::http::Result<Request<Full<Bytes>>> {
    Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "ebbd")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(body)))
}

fn unanswered(log: Option<&Path>) -> String {
    let place = match log {
        Some(log) => format!("its log, {},", log.display()),
        None => "its messages on standard error".into(),
    };
    format!("ebbd ended the connection without an answer; {place} may say why")
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
        let (_, answer) = local(stream, request.body(Full::default()).ok()?).await.ok()?;
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

async fn local(
    stream: UnixStream,
    request: Request<Full<Bytes>>,
) -> anyhow::Result<(StatusCode, Bytes)> {
    collect(send_local(stream, request).await?).await
}

/// Returns the status and all of the body.
///
/// # Errors
/// The connection ends before.
pub async fn collect(response: Response<Incoming>) -> anyhow::Result<(StatusCode, Bytes)> {
    let status = response.status();
    Ok((status, response.into_body().collect().await?.to_bytes()))
}

async fn send_local(
    stream: UnixStream,
    request: Request<Full<Bytes>>,
) -> anyhow::Result<Response<Incoming>> {
    stream.set_nonblocking(true)?;
    send(tokio::net::UnixStream::from_std(stream)?, request).await
}

/// Sends a request, and returns the answer before its body has come.
///
/// # Errors
/// The connection ends before.
pub async fn send(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
) -> anyhow::Result<Response<Incoming>> {
    let stream = TokioIo::new(stream);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await?;
    tokio::spawn(connection);
    Ok(sender.send_request(request).await?)
}

/// A request that the daemon has refused.
#[derive(Debug)]
pub struct Refusal {
    /// Why, for programs; none: the answer is not understood, or is of another release.
    code: Option<ErrorCode>,
    line: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.line)
    }
}

impl std::error::Error for Refusal {}

/// Whether the daemon has refused because there are so many already.
pub fn is_too_many(error: &anyhow::Error) -> bool {
    let refusal = error.downcast_ref::<Refusal>();
    refusal.is_some_and(|refusal| refusal.code == Some(ErrorCode::TooMany))
}

/// Why a request was refused, in the daemon's words. If these are not understood: what `restart`
/// returns, too.
pub fn refusal(status: StatusCode, answer: &[u8], restart: impl FnOnce() -> String) -> Refusal {
    if let Ok(ApiErrorBody { code, error, hint }) = serde_json::from_slice(answer) {
        let hint = match code {
            // This program sends no such request to a daemon of its own release.
            Some(ErrorCode::BadRequest | ErrorCode::UnknownRoute | ErrorCode::WrongMethod) => {
                hint.map(|_| restart())
            }
            _ => hint,
        };
        let line = error + &hint.map(|hint| format!("; {hint}")).unwrap_or_default();
        return Refusal { code, line };
    }
    let text = String::from_utf8_lossy(answer);
    let text = if text.is_empty() { text } else { format!(": {text}").into() };
    Refusal { code: None, line: format!("ebbd answered {status}{text}; {}", restart()) }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::pin::Pin;
    use std::task::{self, Poll};

    use super::*;

    /// A host that says this, and then nothing any more.
    struct Gone(Option<&'static str>);

    impl Body for Gone {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut task::Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            match self.0.take() {
                Some(said) => Poll::Ready(Some(Ok(Frame::data(said.into())))),
                None => Poll::Pending,
            }
        }
    }

    #[test]
    fn a_host_that_has_vanished_is_waited_for_no_longer_than_patience() {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let (mut body, patience) = (Gone(Some(": alive")), Some(Duration::from_millis(1)));
        let mut next = || runtime.block_on(next_frame(&mut body, patience));
        let alive = next().unwrap().unwrap().into_data().unwrap();
        assert_eq!(alive, ": alive");
        let why = next().unwrap_err().to_string();
        assert!(why.starts_with("the other host is silent for "), "{why}");
        let mut ended = Full::new(Bytes::new());
        assert!(runtime.block_on(next_frame(&mut ended, patience)).unwrap().is_none());
    }
}
