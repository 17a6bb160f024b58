//! A client of a router, over a real socket.

use axum::Router;
use axum::body::Bytes;
use axum::http::{Request, StatusCode, header};
use ebb_api::{ApiErrorBody, Event};
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

    /// Opens a stream of events.
    pub async fn events(&self, query: &str, last: Option<u64>) -> Events {
        let mut request = request(&format!("GET /v1/events{query}"));
        if let Some(last) = last {
            request = request.header("Last-Event-ID", last.to_string());
        }
        let response = self.send(request.body(Full::default()).unwrap()).await;
        assert_eq!(response.status(), StatusCode::OK, "{query}");
        assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
        Events { body: response.into_body(), text: String::new() }
    }
}

/// A request of this line, as `GET /v1/version`.
pub fn request(line: &str) -> axum::http::request::Builder {
    let (method, path) = line.split_once(' ').unwrap();
    Request::builder().method(method).uri(path).header(header::HOST, "ebbd")
}

/// A stream of events.
pub struct Events {
    body: Incoming,
    text: String,
}

impl Events {
    /// The next event, whose id is its number; none: the stream has ended.
    pub async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some((frame, rest)) = self.text.split_once("\n\n") {
                let line = |name: &str| frame.lines().find_map(|line| line.strip_prefix(name));
                let found = line("data: ").map(|data| serde_json::from_str::<Event>(data).unwrap());
                let id = line("id: ").map(str::to_owned);
                self.text = rest.to_owned();
                match found {
                    Some(event) => {
                        assert_eq!(id, Some(event.number.to_string()));
                        return Some(event);
                    }
                    None => continue,
                }
            }
            let frame = self.body.frame().await?.unwrap();
            let Ok(bytes) = frame.into_data() else { continue };
            self.text += std::str::from_utf8(&bytes).unwrap();
        }
    }
}
