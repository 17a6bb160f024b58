//! HTTP with a VM's process, on the socket in the VM's directory.

use std::io;
use std::path::Path;

use axum::body::{Body, Bytes};
use axum::http::{Method, Request, StatusCode, header};
use axum::response::{IntoResponse, Response};
use ebb_api::{ApiErrorBody, ErrorCode};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use crate::model::api_error::refuse;

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
    /// The process answers with more than any answer has.
    #[error("its process answers with more than {} MiB", ANSWER_MOST_BYTES >> 20)]
    TooLong,
}

impl Reply {
    /// Parses the body.
    ///
    /// # Errors
    /// The body is something else.
    pub fn read<T: DeserializeOwned>(&self) -> serde_json::Result<T> {
        serde_json::from_slice(&self.body)
    }

    /// Why the process refused. A process of an earlier release gives no code, and may refuse in
    /// plain text.
    pub fn refusal(&self) -> ApiErrorBody {
        let refusal = self.read::<ApiErrorBody>().unwrap_or_else(|_| ApiErrorBody {
            code: None,
            error: format!("its process answers {}", self.status),
            hint: None,
        });
        let code = refusal.code.unwrap_or(ErrorCode::of_status(self.status.as_u16()));
        ApiErrorBody { code: Some(code), ..refusal }
    }
}

impl IntoResponse for Reply {
    fn into_response(self) -> Response {
        if !self.status.is_success() {
            return refuse(self.status, self.refusal());
        }
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
    let body = body.collect().await.map_err(|error| match error.is::<LengthLimitError>() {
        true => LinkError::TooLong,
        false => LinkError::Broken,
    })?;
    Ok(Reply { status, body: body.to_bytes() })
}

/// Closes the connection when nobody waits any more, so that the process drops the request.
struct Ends(tokio::task::AbortHandle);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};

    /// Asks a process that answers with so many bytes.
    fn answered(bytes: usize) -> Result<Reply, LinkError> {
        let home = tempfile::tempdir().expect("a directory");
        let socket = home.path().join("api.sock");
        let listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
        let process = std::thread::spawn(move || {
            let mut client = BufReader::new(listener.accept().expect("a client").0);
            let mut head = String::new();
            while client.read_line(&mut head).expect("a request") > "\r\n".len() {}
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {bytes}\r\n\r\n");
            let answer = [head.as_bytes(), &vec![b' '; bytes]].concat();
            // The client may not take all of it.
            let _ = client.get_mut().write_all(&answer);
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        let answer = runtime.block_on(ask(&socket, Method::GET, "/", Bytes::new()));
        drop(runtime);
        process.join().expect("it ends");
        answer
    }

    #[test]
    fn a_process_of_an_earlier_release_refuses_in_the_same_shape() {
        let refusal = |status, body: &'static str| {
            let status = StatusCode::from_u16(status).expect("a status");
            Reply { status, body: Bytes::from_static(body.as_bytes()) }.refusal()
        };
        let old = refusal(422, r#"{"error": "its memory is locked"}"#);
        assert_eq!((old.code, &*old.error), (Some(ErrorCode::NotAllowed), "its memory is locked"));
        let plain = refusal(405, "");
        assert_eq!(plain.code, Some(ErrorCode::WrongMethod));
        assert_eq!(plain.error, "its process answers 405 Method Not Allowed");
        let own = refusal(422, r#"{"error": "not yet", "code": "not_trusted", "hint": "wait"}"#);
        assert_eq!((own.code, own.hint.as_deref()), (Some(ErrorCode::NotTrusted), Some("wait")));
    }

    #[test]
    fn an_answer_that_is_too_long_is_no_end_of_the_process() {
        assert_eq!(answered(ANSWER_MOST_BYTES).ok().map(|reply| reply.body.len()), Some(4 << 20));
        assert!(matches!(answered(ANSWER_MOST_BYTES + 1), Err(LinkError::TooLong)));
    }
}
