//! The REST interface over a real socket: refusals.

use ebb_api::ErrorCode;
use http_body_util::Full;

use super::server::router;
use super::testing::{Served, request};
use crate::host::swap_dir::SwapDir;
use crate::host::testing;

struct Home {
    served: Served,
    _directory: tempfile::TempDir,
}

fn home() -> Home {
    let directory = tempfile::tempdir().unwrap();
    let swap_dir = SwapDir::new(directory.path(), None).unwrap();
    let daemon = testing::daemon(directory.path(), swap_dir);
    Home { served: Served::new(router(daemon)), _directory: directory }
}

#[tokio::test]
async fn every_refusal_has_one_shape() {
    let home = home();
    let bad = ErrorCode::BadRequest;
    let limit = r#"{"bytes": 1}"#;
    let cases = [
        ("GET /", "", ErrorCode::UnknownRoute, "there is no path /"),
        ("GET /v1/nothing", "", ErrorCode::UnknownRoute, "there is no path /v1/nothing"),
        ("DELETE /v1/pool", "", ErrorCode::WrongMethod, "/v1/pool has no method DELETE"),
        ("PUT /v1/pool", "{", bad, "the request's body: EOF while parsing an object"),
        ("PUT /v1/pool", r#"{"bytes": "1G"}"#, bad, "invalid type: string \"1G\", expected u64"),
        ("PUT /v1/pool", r#"{"size": 1}"#, bad, "unknown field `size`"),
        ("POST /v1/vms/attach", r#"{"name": "a b", "pid": 7}"#, bad, "\"a b\" is no VM name"),
        ("POST /v1/vms/attach", r#"{"name": "web", "pid": 0}"#, bad, "0 is the pid of no QEMU"),
        ("GET /v1/vms/-x", "", bad, "\"-x\" is no VM name"),
        ("GET /v1/vms/a%20b", "", bad, "\"a b\" is no VM name"),
        ("GET /v1/vms/%ff", "", bad, "UTF-8"),
        ("PUT /v1/vms/-x/limit", limit, bad, "\"-x\" is no VM name"),
        ("GET /v1/vms/web", "", ErrorCode::UnknownVm, "there is no VM web"),
        ("PUT /v1/vms/web/limit", limit, ErrorCode::UnknownVm, "there is no VM web"),
        ("GET /v1/pilot/sight", "", ErrorCode::NotSet, "the pilot is off"),
        ("GET /v1/calibration", "", ErrorCode::NotSet, "nothing was measured yet"),
    ];
    for (line, body, code, why) in cases {
        let (status, refused) = home.served.refused(line, body).await;
        assert_eq!((status, refused.code), (code.status(), Some(code)), "{line}: {refused:?}");
        assert!(refused.error.contains(why), "{line}: {}", refused.error);
        assert!(!refused.error.contains('\n'), "{line}: {}", refused.error);
    }
}

#[tokio::test]
async fn a_body_that_is_no_json_or_too_long_is_refused_as_such() {
    let home = home();
    let long = vec![b' '; (2 << 20) + 1];
    for line in ["PUT /v1/pool", "PUT /v1/vms/web/share"] {
        let (status, refused) = home.served.refused(line, long.clone()).await;
        assert_eq!((status, refused.code), (413, Some(ErrorCode::TooLarge)), "{line}");
        assert!(refused.error.contains("more than 2 MiB"), "{}", refused.error);
    }
    let plain = request("PUT /v1/pool").body(Full::from("{}")).unwrap();
    assert_eq!(home.served.send(plain).await.status(), 400, "a browser's form is no JSON");
}

#[tokio::test]
async fn the_methods_of_a_path_are_told() {
    let home = home();
    let wrong = request("PATCH /v1/pool").body(Full::default()).unwrap();
    let allow = home.served.send(wrong).await.headers()["allow"].clone();
    assert_eq!(allow, "GET,HEAD,PUT");
}
