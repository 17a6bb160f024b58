//! The listener over real sockets, with routes that do nothing.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Extension, Json};
use axum::http::{HeaderMap, Method, Request, StatusCode, header};
use axum::routing::{any, get, post};
use clap::Parser;
use ebb_api::{ApiErrorBody, Role, route};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use tempfile::TempDir;
use testkit::certificate::{Certificate, write_private};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::listener::Patience;
use super::visitors::EACH_MOST;
use super::{Listener, Options};

const READ: &str = "11111111111111111111111111111111";
const CONTROL: &str = "22222222222222222222222222222222";
/// Longer than any test.
const LONG: Duration = Duration::from_secs(600);
const SHORT: Duration = Duration::from_millis(50);
const PATIENT: Patience = Patience { handshake: LONG, head: LONG, write: LONG };

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    options: Options,
}

/// A directory with a certificate and tokens.
struct Files {
    directory: TempDir,
    certificate: Certificate,
    tokens: PathBuf,
}

impl Files {
    fn new() -> Files {
        let directory = tempfile::tempdir().expect("a directory");
        let certificate = Certificate::new(directory.path(), "ebbd", &["127.0.0.1"]);
        let tokens = directory.path().join("tokens");
        write_private(&tokens, &format!("read {READ}\ncontrol {CONTROL}\n"));
        Files { directory, certificate, tokens }
    }

    fn options(&self) -> Vec<(&'static str, PathBuf)> {
        vec![
            ("--listen", "127.0.0.1:0".into()),
            ("--tls-cert", self.certificate.certificate.clone()),
            ("--tls-key", self.certificate.key.clone()),
            ("--tokens", self.tokens.clone()),
        ]
    }
}

fn open(options: &[(&str, PathBuf)]) -> anyhow::Result<Option<Listener>> {
    let words = options.iter().flat_map(|(name, value)| [(*name).into(), value.clone()]);
    let line = Line::try_parse_from(std::iter::once("ebbd".into()).chain(words))?;
    line.options.open()
}

fn refused(options: &[(&str, PathBuf)]) -> String {
    let why = crate::chain(&open(options).err().expect("a refusal"));
    assert!(!why.contains('\n'), "{why}");
    why
}

/// A listener in this process.
struct Served {
    address: SocketAddr,
    client: TlsConnector,
    end: Option<oneshot::Sender<()>>,
    serving: tokio::task::JoinHandle<std::io::Result<()>>,
}

impl Served {
    fn new(router: Router, patience: Patience) -> Served {
        let files = Files::new();
        let listener = open(&files.options()).expect("good options").expect("a listener");
        let listener = Listener { patience, ..listener };
        let address = listener.socket.local_addr().expect("an address");
        let mut roots = rustls::RootCertStore::empty();
        let pem = std::fs::read(&files.certificate.certificate).expect("a certificate");
        roots.add(CertificateDer::from_pem_slice(&pem).expect("PEM")).expect("an authority");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(roots)
            .with_no_client_auth();
        let (end, ended) = oneshot::channel();
        let ended = async move {
            let _ = ended.await;
        };
        let serving = tokio::spawn(listener.serve_apart(router, ended, std::future::pending()));
        Served { address, client: TlsConnector::from(Arc::new(config)), end: Some(end), serving }
    }

    async fn tcp(&self) -> TcpStream {
        TcpStream::connect(self.address).await.expect("a connection")
    }

    async fn tls(&self) -> std::io::Result<TlsStream<TcpStream>> {
        let name = ServerName::from(self.address.ip());
        self.client.connect(name, self.tcp().await).await
    }

    async fn ask(&self, request: Request<Full<Bytes>>) -> hyper::Response<Incoming> {
        let stream = TokioIo::new(self.tls().await.expect("TLS"));
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(stream).await.expect("HTTP");
        tokio::spawn(connection);
        sender.send_request(request).await.expect("an answer")
    }

    /// Asks, and returns the status and the refusal.
    async fn status(&self, method: Method, path: &str, token: Option<&str>) -> (u16, String) {
        let answer = self.ask(request(method, path, token, "{}".into())).await;
        let status = answer.status().as_u16();
        let body = answer.into_body().collect().await.expect("a body").to_bytes();
        let refusal = serde_json::from_slice::<ApiErrorBody>(&body);
        (status, refusal.map(|refusal| refusal.error).unwrap_or_default())
    }
}

fn request(method: Method, path: &str, token: Option<&str>, body: Bytes) -> Request<Full<Bytes>> {
    let mut request = Request::builder().method(method).uri(path).header(header::HOST, "ebbd");
    if let Some(token) = token {
        request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
    }
    request.header(header::CONTENT_TYPE, "application/json").body(Full::new(body)).expect("parts")
}

fn routes() -> Router {
    Router::new()
        .route(route::VMS, get(|| async { "[]" }))
        .route(route::VM, any(|| async { "{}" }))
        .route(route::RUN, post(|| async { "started" }))
        .route(route::ATTACH, post(|| async { "attached" }))
        .route(route::LIMIT, post(|Json(_): Json<serde_json::Value>| async { "{}" }))
        .route(route::OBSERVE, get(|| async { "{}" }))
        .route(route::WHOAMI, get(|Extension(role): Extension<Role>| async move { Json(role) }))
}

#[tokio::test]
async fn a_token_allows_what_its_role_says() {
    let served = Served::new(routes(), PATIENT);
    let (get, post, delete) = (Method::GET, Method::POST, Method::DELETE);
    let (read, control) = (Some(READ), Some(CONTROL));
    for (method, path, token, status, why) in [
        (&get, "/v1/vms", None, 401, "a token is needed"),
        (&get, "/v1/vms", Some("00000000000000000000000000000000"), 401, "not known"),
        (&get, "/v1/nothing", None, 401, "a token is needed"),
        (&get, "/", None, 307, ""),
        (&get, "/dashboard/", None, 200, ""),
        (&get, "/dashboard/main.js", Some("unknown"), 200, ""),
        (&get, "/dashboard/nothing", None, 404, "there is no path"),
        (&get, "/dashboard/a/b", None, 401, "a token is needed"),
        (&post, "/dashboard/", None, 405, "has no method POST"),
        (&get, "/v1/vms", read, 200, ""),
        (&Method::HEAD, "/v1/vms", read, 200, ""),
        (&get, "/v1/vms/web", read, 200, ""),
        (&get, "/v1/observe", None, 401, "a token is needed"),
        (&get, "/v1/observe", read, 200, ""),
        (&get, "/v1/observe", control, 200, ""),
        (&delete, "/v1/vms/web", read, 403, "may only look"),
        (&post, "/v1/vms/web/limit", read, 403, "may only look"),
        (&post, "/v1/vms/run", read, 403, "may only look"),
        (&Method::OPTIONS, "/v1/vms", read, 403, "may only look"),
        (&get, "/v1/vms", control, 200, ""),
        (&delete, "/v1/vms/web", control, 200, ""),
        (&post, "/v1/vms/web/limit", control, 200, ""),
        (&post, "/v1/vms/run", control, 403, "only on the host itself"),
        (&post, "/v1/vms/attach", control, 403, "only on the host itself"),
        (&post, "/v1/vms/%72un", control, 200, ""),
        (&post, "http://ebbd/v1/vms/run", control, 403, "only on the host itself"),
        (&post, "/v1/vms/run/", control, 404, ""),
        (&post, "/v1/nothing", control, 404, ""),
    ] {
        let (found, refusal) = served.status(method.clone(), path, token).await;
        assert_eq!(found, status, "{method} {path} {token:?}: {refusal}");
        assert!(refusal.contains(why), "{method} {path} {token:?}: {refusal}");
    }
    let answer = served.ask(request(get, "/v1/vms", None, Bytes::new())).await;
    assert!(answer.headers().contains_key(header::WWW_AUTHENTICATE));
}

#[tokio::test]
async fn a_route_knows_the_role_of_the_token() {
    let served = Served::new(routes(), PATIENT);
    for (token, role) in [(READ, Role::Read), (CONTROL, Role::Control)] {
        let asked = request(Method::GET, route::WHOAMI, Some(token), Bytes::new());
        let body = served.ask(asked).await.into_body().collect().await.expect("a body").to_bytes();
        assert_eq!(serde_json::from_slice::<Role>(&body).expect("a role"), role);
    }
}

#[tokio::test]
async fn other_machines_are_served_on_a_thread_of_their_own() {
    let name = || std::thread::current().name().map(str::to_owned).expect("a name");
    let names = get(move || async move {
        let blocking = tokio::task::spawn_blocking(name).await.expect("no panic");
        Json([name(), blocking])
    });
    let served = Served::new(Router::new().route(route::VMS, names), PATIENT);
    let answer = served.ask(request(Method::GET, "/v1/vms", Some(READ), Bytes::new())).await;
    let body = answer.into_body().collect().await.expect("a body").to_bytes();
    let names: [String; 2] = serde_json::from_slice(&body).expect("names");
    assert_eq!(names, ["ebbd-tls", "ebbd-tls"]);
}

#[tokio::test]
async fn what_is_no_tls_gets_no_http() {
    let served = Served::new(routes(), PATIENT);
    for said in [&b"GET /v1/vms HTTP/1.1\r\nHost: ebbd\r\n\r\n"[..], &[0; 600], b"\x16\x03\x01"] {
        let mut stream = served.tcp().await;
        stream.write_all(said).await.expect("it is sent");
        stream.shutdown().await.expect("it is sent");
        let mut answer = Vec::new();
        // A reset is as good.
        let _ = stream.read_to_end(&mut answer).await;
        assert!(answer.len() < 16 && !answer.starts_with(b"HTTP"), "{answer:?}");
    }
    assert_eq!(served.status(Method::GET, "/v1/vms", Some(READ)).await.0, 200);
}

#[tokio::test]
async fn a_client_that_is_slow_to_ask_is_sent_away() {
    let served = Served::new(routes(), Patience { handshake: SHORT, ..PATIENT });
    let mut silent = served.tcp().await;
    assert_eq!(silent.read(&mut [0]).await.unwrap_or(0), 0);

    let served = Served::new(routes(), Patience { head: SHORT, ..PATIENT });
    for said in ["", "GET /v1/vms HTTP/1.1\r\nHost:"] {
        let mut stream = served.tls().await.expect("TLS");
        stream.write_all(said.as_bytes()).await.expect("it is sent");
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 408"), "{said}: {answer:?}");
    }
}

/// A body without an end. It tells when nobody wants more of it.
struct Endless(#[expect(dead_code, reason = "its end is what counts")] mpsc::Sender<()>);

impl hyper::body::Body for Endless {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<Bytes>, Self::Error>>> {
        static CHUNK: [u8; 1 << 16] = [0; 1 << 16];
        std::task::Poll::Ready(Some(Ok(hyper::body::Frame::data(Bytes::from_static(&CHUNK)))))
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_its_answer_is_sent_away() {
    let (alive, mut ended) = mpsc::channel(1);
    let alive = Arc::new(std::sync::Mutex::new(Some(alive)));
    let endless = get(move || {
        let alive = alive.lock().expect("no thread has died").take().expect("one request");
        async move { Body::new(Endless(alive)) }
    });
    let served =
        Served::new(Router::new().route(route::VMS, endless), Patience { write: SHORT, ..PATIENT });
    let mut stream = served.tls().await.expect("TLS");
    let head = format!("GET /v1/vms HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {READ}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.expect("it is sent");
    stream.read_exact(&mut [0; 12]).await.expect("the answer begins");
    // The answer has the only sender.
    assert_eq!(ended.recv().await, None);
    drop(stream);
}

#[tokio::test]
async fn a_request_has_a_bound() {
    let served = Served::new(routes(), PATIENT);
    let long = Bytes::from(format!("\"{}\"", "a".repeat(64 << 10)));
    let answer = served.ask(request(Method::POST, "/v1/vms/web/limit", Some(CONTROL), long)).await;
    assert_eq!(answer.status(), StatusCode::PAYLOAD_TOO_LARGE);
    let mut headers = request(Method::GET, "/v1/vms", Some(READ), Bytes::new());
    let value = "a".repeat(32 << 10).parse().expect("a value");
    headers.headers_mut().extend(HeaderMap::from_iter([(header::COOKIE, value)]));
    let answer = served.ask(headers).await;
    assert_eq!(answer.status(), StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE);
}

#[tokio::test]
async fn a_client_has_so_many_connections_and_no_more() {
    let served = Served::new(routes(), PATIENT);
    let mut open = Vec::new();
    for _ in 0..EACH_MOST {
        open.push(served.tls().await.expect("TLS"));
    }
    assert!(served.tls().await.is_err());
    drop(open);
    while served.tls().await.is_err() {}
}

#[tokio::test]
async fn at_the_end_requests_are_answered_and_idle_connections_close() {
    let (begun, mut has_begun) = mpsc::channel(1);
    let (finish, finished) = oneshot::channel::<()>();
    let finished = Arc::new(tokio::sync::Mutex::new(Some(finished)));
    let slow = get(move || {
        let (begun, finished) = (begun.clone(), Arc::clone(&finished));
        async move {
            begun.send(()).await.expect("the test waits");
            let finished = finished.lock().await.take().expect("one request");
            finished.await.expect("the test says so");
            "done"
        }
    });
    let mut served = Served::new(Router::new().route(route::VMS, slow), PATIENT);
    let mut idle = served.tls().await.expect("TLS");
    let stream = TokioIo::new(served.tls().await.expect("TLS"));
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(stream).await.expect("HTTP");
    tokio::spawn(connection);
    let asked = tokio::spawn(async move {
        sender.send_request(request(Method::GET, "/v1/vms", Some(READ), Bytes::new())).await
    });
    has_begun.recv().await.expect("it has begun");
    served.end.take().expect("one end").send(()).expect("it is served");
    assert_eq!(idle.read(&mut [0]).await.unwrap_or(0), 0);
    finish.send(()).expect("the route waits");
    assert_eq!(asked.await.expect("no panic").expect("an answer").status(), StatusCode::OK);
    served.serving.await.expect("no panic").expect("no error");
    assert!(TcpStream::connect(served.address).await.is_err());
}

#[test]
fn other_machines_are_served_only_with_all_options() {
    assert!(open(&[]).expect("nothing is wrong").is_none());
    let files = Files::new();
    for left_out in 1..4 {
        let mut options = files.options();
        let (name, _) = options.remove(left_out);
        let why = refused(&options);
        assert!(why.contains(&format!("--listen needs {name}: ")), "{why}");
    }
    assert!(refused(&files.options()[1..2]).contains("belong to --listen"));
    let mut options = files.options();
    options[0].1 = "localhost:7443".into();
    let why = open(&options).err().expect("a refusal").to_string();
    assert!(why.contains("as in 192.0.2.7:7443"), "{why}");
}

#[test]
fn files_that_cannot_be_used_are_named_with_what_to_do() {
    let files = Files::new();
    let in_place = |index: usize, path: PathBuf| {
        let mut options = files.options();
        options[index].1 = path;
        refused(&options)
    };
    let file = |name: &str, text: &str| {
        let path = files.directory.path().join(name);
        write_private(&path, text);
        path
    };
    let other = Certificate::new(files.directory.path(), "other", &["127.0.0.1"]);
    let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    for (index, path, why) in [
        (1, "/nowhere/ebbd.crt".into(), "--tls-cert: /nowhere/ebbd.crt: No such file"),
        (1, file("empty.crt", ""), "has no certificate that can be read"),
        (1, file("broken.crt", broken), "has no certificate that can be read"),
        (1, file("cut.crt", &broken[..40]), "has no certificate that can be read"),
        (1, "/".into(), "--tls-cert: /: Is a directory"),
        (2, "/nowhere/ebbd.key".into(), "--tls-key: /nowhere/ebbd.key: No such file"),
        (2, file("empty.key", ""), "has no key that can be read"),
        (2, files.certificate.certificate.clone(), "has no key that can be read"),
        (2, other.key, "is not that of the first certificate in"),
        (3, "/nowhere/tokens".into(), "--tokens: /nowhere/tokens: No such file"),
        (3, file("short", "read secret\n"), "can be guessed"),
        (3, "/dev/null".into(), "--tokens: /dev/null is no file"),
    ] {
        let found = in_place(index, path);
        assert!(found.contains(why), "{why}: {found}");
    }
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let why = in_place(0, address.clone().into());
    assert!(why.contains(&format!("--listen {address}: Address already in use")), "{why}");
}
