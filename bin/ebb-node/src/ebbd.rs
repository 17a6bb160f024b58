//! Asks `ebbd` over its UNIX socket.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use ebb_api::{ApiErrorBody, PilotStatus, Top, route};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Longest wait for an answer. The daemon has the figures at hand.
const PATIENCE: Duration = Duration::from_secs(5);
/// Largest answer: thousands of VMs.
const ANSWER_MOST_BYTES: usize = 16 << 20;

/// Returns the VMs, and what the pilot knows of them.
///
/// # Errors
/// No daemon listens there, it refuses, or its answer does not come in time or makes no sense.
pub async fn ask(socket: &Path) -> anyhow::Result<(Top, PilotStatus)> {
    Ok((get(socket, route::TOP).await?, get(socket, route::PILOT).await?))
}

async fn get<A: DeserializeOwned>(socket: &Path, path: &str) -> anyhow::Result<A> {
    let answered = timeout(PATIENCE, exchange(socket, path)).await;
    let (status, answer) =
        answered.with_context(|| format!("ebbd is silent for {} s", PATIENCE.as_secs()))??;
    if !status.is_success() {
        let said = serde_json::from_slice(&answer).map(|body: ApiErrorBody| body.error);
        bail!("ebbd refuses {path}: {}", said.unwrap_or_else(|_| status.to_string()));
    }
    serde_json::from_slice(&answer).with_context(|| {
        format!("ebbd's answer to {path} is not understood: are ebbd and ebb-node of one release?")
    })
}

async fn exchange(socket: &Path, path: &str) -> anyhow::Result<(StatusCode, Bytes)> {
    let stream = UnixStream::connect(socket).await;
    let stream = stream.with_context(|| format!("no ebbd listens at {}", socket.display()))?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let request = Request::builder().uri(path).header(header::HOST, "ebbd");
    let request = request.body(Full::<Bytes>::default())?;
    let response = sender.send_request(request).await.context("ebbd does not answer")?;
    let status = response.status();
    let body = Limited::new(response.into_body(), ANSWER_MOST_BYTES).collect().await;
    let body = body.map_err(|error| anyhow!("ebbd's answer to {path}: {error}"))?;
    Ok((status, body.to_bytes()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tokio::runtime::Builder;

    use super::*;

    #[test]
    fn a_daemon_that_is_not_there_gets_one_line() {
        let place = std::env::temp_dir().join(format!("ebb-node-test-{}", std::process::id()));
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let why = runtime.block_on(ask(&place)).unwrap_err().to_string();
        assert_eq!(why, format!("no ebbd listens at {}", place.display()));
        assert!(!fs::exists(place).unwrap());
    }
}
