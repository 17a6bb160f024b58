//! The files over a real socket.

use axum::http::{StatusCode, header};
use ebb_api::ErrorCode;
use http_body_util::{BodyExt, Full};
use hyper::Response;
use hyper::body::Incoming;

use super::*;
use crate::rest::testing::{Served, request};

/// What a page can name that belongs to it.
const NAMES: [&str; 3] = ["from \"./", "src=\"", "href=\""];

fn served() -> Served {
    Served::new(beside(Router::new().route("/v1/version", get(|| async { "{}" }))))
}

async fn ask(served: &Served, line: &str) -> Response<Incoming> {
    served.send(request(line).body(Full::default()).unwrap()).await
}

async fn text(answer: Response<Incoming>) -> String {
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(body.to_vec()).unwrap()
}

#[tokio::test]
async fn each_file_is_served_as_what_it_is() {
    let served = served();
    for (path, kind) in [
        ("/dashboard/", "text/html; charset=utf-8"),
        ("/dashboard/index.html", "text/html; charset=utf-8"),
        ("/dashboard/style.css", "text/css; charset=utf-8"),
        ("/dashboard/main.js", "text/javascript; charset=utf-8"),
        ("/dashboard/ebb.svg", "image/svg+xml"),
    ] {
        let answer = ask(&served, &format!("GET {path}")).await;
        assert_eq!(answer.status(), StatusCode::OK, "{path}");
        let headers = answer.headers();
        assert_eq!(headers[header::CONTENT_TYPE], kind, "{path}");
        assert_eq!(headers[header::X_CONTENT_TYPE_OPTIONS], "nosniff", "{path}");
        assert_eq!(headers[header::REFERRER_POLICY], "no-referrer", "{path}");
        assert_eq!(headers[header::CACHE_CONTROL], "no-cache", "{path}");
        let policy = headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
        assert!(policy.starts_with("default-src 'none'; script-src 'self';"), "{policy}");
        assert!(!policy.contains("unsafe") && !policy.contains("  "), "{policy}");
        assert!(!text(answer).await.is_empty(), "{path}");
        let head = ask(&served, &format!("HEAD {path}")).await;
        assert_eq!(head.status(), StatusCode::OK, "{path}");
        assert_eq!(head.headers()[header::CONTENT_TYPE], kind, "{path}");
        assert!(text(head).await.is_empty(), "{path}");
    }
}

#[tokio::test]
async fn the_page_is_found_without_its_name() {
    let served = served();
    for path in ["/", "/dashboard"] {
        let answer = ask(&served, &format!("GET {path}")).await;
        assert_eq!(answer.status(), StatusCode::TEMPORARY_REDIRECT, "{path}");
        assert_eq!(answer.headers()[header::LOCATION], "dashboard/", "{path}");
    }
}

#[tokio::test]
async fn a_file_that_a_browser_has_is_not_sent_again() {
    let served = served();
    let answer = ask(&served, "GET /dashboard/main.js").await;
    let tag = answer.headers()[header::ETAG].clone();
    let again = |tag: header::HeaderValue| {
        let request = request("GET /dashboard/main.js").header(header::IF_NONE_MATCH, tag);
        served.send(request.body(Full::default()).unwrap())
    };
    let known = again(tag.clone()).await;
    assert_eq!((known.status(), &known.headers()[header::ETAG]), (StatusCode::NOT_MODIFIED, &tag));
    assert!(text(known).await.is_empty());
    let other = again(header::HeaderValue::from_static("\"0\"")).await;
    assert_eq!(other.status(), StatusCode::OK);
}

#[tokio::test]
async fn what_is_no_file_is_refused_as_everything_else_is() {
    let served = served();
    for (line, code) in [
        ("GET /dashboard/nothing.js", ErrorCode::UnknownRoute),
        ("GET /dashboard/..%2ftests.rs", ErrorCode::UnknownRoute),
        ("GET /dashboard/%ff", ErrorCode::UnknownRoute),
        ("GET /dashboard/tests.rs", ErrorCode::UnknownRoute),
        ("POST /dashboard/", ErrorCode::WrongMethod),
        ("PUT /", ErrorCode::WrongMethod),
    ] {
        let (status, refused) = served.refused(line, "").await;
        assert_eq!((status, refused.code), (code.status(), Some(code)), "{line}: {refused:?}");
    }
    assert_eq!(ask(&served, "GET /v1/version").await.status(), StatusCode::OK);
    assert_eq!(ask(&served, "GET /v1/nothing").await.status(), StatusCode::NOT_FOUND);
}

/// The policy lets a browser load nothing from elsewhere, and this says so before a browser does.
#[test]
fn the_page_consists_of_its_files_alone() {
    for File { name, text, .. } in &FILES {
        for (at, _) in NAMES.iter().flat_map(|begin| text.match_indices(begin)) {
            let named = text[at..].split('"').nth(1).unwrap_or_default();
            let named = named.trim_start_matches("./");
            let is_ours = named.starts_with('#') || FILES.iter().any(|file| file.name == named);
            assert!(is_ours, "{name} names {named:?}");
        }
        for forbidden in ["innerHTML", "insertAdjacentHTML", "document.write", "eval(", "style=\""]
        {
            assert!(!text.contains(forbidden), "{name} has {forbidden}");
        }
        let namespace = "http://www.w3.org/2000/svg";
        let text = text.replace(namespace, "");
        assert!(!text.contains("http://") && !text.contains("https://"), "{name}");
    }
}

#[test]
fn each_file_stands_once_in_the_list() {
    let mut names: Vec<&str> = FILES.iter().map(|file| file.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), FILES.len());
}
