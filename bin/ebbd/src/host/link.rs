//! HTTP with a VM's process, on the socket in the VM's directory.

use std::io;
use std::path::Path;

use axum::body::{Body, Bytes};
use axum::http::{Method, Request, StatusCode, header};
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

/// Largest answer. A status has some KiB.
const ANSWER_MOST_BYTES: usize = 4 << 20;

/// Answer of a VM's process.
pub struct Reply {
    /// HTTP status.
    pub status: StatusCode,
    body: Bytes,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// Nobody listens there, so the request was not sent.
    #[error("its process does not listen: {0}")]
    Unreachable(io::Error),
    /// The process ended before it answered. What was asked may have been done.
    #[error("its process ended before it answered")]
    Broken,
}

impl Reply {
    /// Parses the body.
    ///
    /// # Errors
    /// The body is something else.
    pub fn read<T: DeserializeOwned>(&self) -> serde_json::Result<T> {
        serde_json::from_slice(&self.body)
    }
}

impl IntoResponse for Reply {
    fn into_response(self) -> Response {
        let json = [(header::CONTENT_TYPE, "application/json")];
        (self.status, json, Body::from(self.body)).into_response()
    }
}

/// Sends a request, and waits for the answer as long as the process lives.
///
/// # Errors
/// See [`LinkError`].
pub async fn ask(
    socket: &Path,
    method: Method,
    uri: &str,
    body: Bytes,
) -> Result<Reply, LinkError> {
    let stream = UnixStream::connect(socket).await.map_err(LinkError::Unreachable)?;
    let request = Request::builder()
        .method(method)
        .uri(uri)
        .header(header::HOST, "ebbd")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(body))
        .map_err(|error| LinkError::Unreachable(io::Error::other(error)))?;
    exchange(stream, request).await
}

async fn exchange(stream: UnixStream, request: Request<Full<Bytes>>) -> Result<Reply, LinkError> {
    let broken = |_| LinkError::Broken;
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(broken)?;
    // The connection ends with the answer, or when nobody waits for it any more.
    let connection = tokio::spawn(connection);
    let _ends = Ends(connection.abort_handle());
    let response = sender.send_request(request).await.map_err(broken)?;
    let status = response.status();
    let body = Limited::new(response.into_body(), ANSWER_MOST_BYTES);
    let body = body.collect().await.map_err(|_| LinkError::Broken)?.to_bytes();
    Ok(Reply { status, body })
}

/// Closes the connection when nobody waits any more, so that the process drops the request.
struct Ends(tokio::task::AbortHandle);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.abort();
    }
}
