//! A client of a router, over a real socket.

use axum::Router;
use axum::body::Bytes;
use axum::http::{Request, StatusCode, header};
use ebb_api::ApiErrorBody;
use http_body_util::{BodyExt, Full};
use hyper::Response;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tempfile::TempDir;
use tokio::net::{UnixListener, UnixStream};

/// Where a router is served.
pub struct Served(TempDir);

impl Served {
    /// Serves a router until the runtime ends.
    pub fn new(router: Router) -> Served {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("socket")).unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await });
        Served(directory)
    }

    /// Sends a request as it is, and returns the answer before its body has come.
    pub async fn send(&self, request: Request<Full<Bytes>>) -> Response<Incoming> {
        let stream = UnixStream::connect(self.0.path().join("socket")).await.unwrap();
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.unwrap();
        tokio::spawn(connection);
        sender.send_request(request).await.unwrap()
    }

    /// Sends JSON, or what is to pass for it. Returns the status and the JSON of the answer.
    pub async fn ask(&self, line: &str, body: impl Into<Bytes>) -> (StatusCode, Value) {
        let request = request(line).header(header::CONTENT_TYPE, "application/json");
        let response = self.send(request.body(Full::new(body.into())).unwrap()).await;
        let (status, body) = (response.status(), response.into_body().collect().await.unwrap());
        let body = body.to_bytes();
        let json = serde_json::from_slice(&body);
        (status, json.unwrap_or_else(|_| panic!("{line}: no JSON: {body:?}")))
    }

    /// The same for what is refused.
    pub async fn refused(&self, line: &str, body: impl Into<Bytes>) -> (u16, ApiErrorBody) {
        let (status, json) = self.ask(line, body).await;
        let body = serde_json::from_value(json.clone());
        (status.as_u16(), body.unwrap_or_else(|_| panic!("{line}: {json}")))
    }
}

/// A request of this line, as `GET /v1/version`.
pub fn request(line: &str) -> axum::http::request::Builder {
    let (method, path) = line.split_once(' ').unwrap();
    Request::builder().method(method).uri(path).header(header::HOST, "ebbd")
}
