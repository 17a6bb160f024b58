//! The REST interface over a real socket: refusals, and the stream of events.

use std::time::Duration;

use axum::extract::Extension;
use axum::http::StatusCode;
use ebb_api::{ErrorCode, Event, EventType, HOST_VMS_MAX, HostVms, Role, VmChange};
use http_body_util::Full;
use tokio::time::timeout;

use super::server::router;
use super::tcp::Client;
use super::testing::{Events, Served, request};
use crate::host::events::News;
use crate::host::registry::Daemon;
use crate::host::swap_dir::SwapDir;
use crate::host::testing;

const LONG: Duration = Duration::from_secs(60);

struct Home {
    daemon: Daemon,
    served: Served,
    _directory: tempfile::TempDir,
}

fn home() -> Home {
    let directory = tempfile::tempdir().unwrap();
    let swap_dir = SwapDir::new(directory.path(), None).unwrap();
    let daemon = testing::daemon(directory.path(), swap_dir);
    Home { served: Served::new(router(daemon.clone())), daemon, _directory: directory }
}

fn change(daemon: &Daemon, vm: &str, change: VmChange, why: &str) {
    let news = News::State(change, Some(why.into()));
    daemon.events().publish(Some(&vm.parse().unwrap()), news);
}

async fn next(events: &mut Events) -> Event {
    timeout(LONG, events.next()).await.expect("an event").expect("no end")
}

async fn texts(events: &mut Events) -> Vec<String> {
    let mut all = Vec::new();
    while let Some(event) = timeout(LONG, events.next()).await.expect("the end") {
        all.push(event.text);
    }
    all
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
        ("GET /v1/events?since=x", "", bad, "the query: "),
        ("GET /v1/events?vms=web", "", bad, "unknown field `vms`"),
        ("GET /v1/events?type=states", "", bad, "\"states\" is not one of state, refusal"),
        ("GET /v1/vms/web", "", ErrorCode::UnknownVm, "there is no VM web"),
        ("PUT /v1/vms/web/limit", limit, ErrorCode::UnknownVm, "there is no VM web"),
        ("GET /v1/pilot/sight", "", ErrorCode::NotSet, "the pilot is off"),
        ("PUT /v1/vms/web/limit?job=true", limit, bad, "/limit is never a job: leave out job=true"),
        ("GET /v1/vms/web/size?job=true", "", bad, "/size is never a job"),
        ("POST /v1/vms/web/reclaim?job=maybe", "{}", bad, "the query: "),
        ("POST /v1/vms/web/reclaim?job=true", "{", bad, "the request's body: EOF"),
        ("POST /v1/vms/web/evict?job=true", "{}", bad, "missing field `bytes`"),
        ("PUT /v1/vms/web/size?job=true", r#"{"bytes": null, "node": 0}"#, bad, "belong to a size"),
        ("POST /v1/vms/web/reclaim?job=true", "{}", ErrorCode::UnknownVm, "there is no VM web"),
        ("DELETE /v1/vms/web?job=true", "", ErrorCode::UnknownVm, "there is no VM web"),
        ("GET /v1/jobs/x", "", bad, "\"x\" is no number of a job"),
        ("DELETE /v1/jobs/-1", "", bad, "\"-1\" is no number of a job"),
        ("GET /v1/jobs/7", "", ErrorCode::UnknownJob, "there is no job 7"),
        ("DELETE /v1/jobs/7", "", ErrorCode::UnknownJob, "there is no job 7"),
        ("POST /v1/jobs/7", "", ErrorCode::WrongMethod, "/v1/jobs/7 has no method POST"),
        ("GET /v1/calibration", "", ErrorCode::NotSet, "nothing was measured yet"),
        ("PUT /v1/observe", "", ErrorCode::WrongMethod, "/v1/observe has no method PUT"),
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

#[tokio::test]
async fn what_is_kept_is_told_and_then_what_happens() {
    let home = home();
    change(&home.daemon, "web", VmChange::Attached, "first");
    change(&home.daemon, "db", VmChange::Ended, "second");
    let mut events = home.served.events("", None).await;
    let (first, second) = (next(&mut events).await, next(&mut events).await);
    assert_eq!((first.text.as_str(), second.text.as_str()), ("attached: first", "ended: second"));
    assert_eq!(first.vm.map(|vm| vm.to_string()).as_deref(), Some("web"));
    change(&home.daemon, "web", VmChange::Ended, "third");
    let third = next(&mut events).await;
    assert_eq!((third.number, third.text.as_str()), (second.number + 1, "ended: third"));
    home.daemon.events().close();
    assert_eq!(timeout(LONG, events.next()).await.expect("the end"), None);
}

#[tokio::test]
async fn a_client_says_what_it_has_had_and_what_it_wants() {
    let home = home();
    change(&home.daemon, "web", VmChange::Attached, "1");
    change(&home.daemon, "db", VmChange::Attached, "2");
    change(&home.daemon, "web", VmChange::Ended, "3");
    let mut all = home.served.events("?follow=false", None).await;
    let first = next(&mut all).await.number;
    assert_eq!(texts(&mut all).await, ["attached: 2", "ended: 3"]);
    let told = async |query: &str, last| texts(&mut home.served.events(query, last).await).await;
    assert_eq!(told("?follow=false&vm=db", None).await, ["attached: 2"]);
    assert_eq!(told("?follow=false&type=warning,refusal", None).await, [""; 0]);
    let since = format!("?follow=false&since={first}");
    assert_eq!(told(&since, None).await, ["attached: 2", "ended: 3"]);
    // A client that connects again sends its first query once more.
    assert_eq!(told(&since, Some(first + 1)).await, ["ended: 3"]);
    let lost = told("?follow=false&since=7", None).await;
    assert!(lost[0].contains("may be missing") && lost.len() == 4, "{lost:?}");
}

#[tokio::test]
async fn a_client_that_does_not_read_loses_events_and_is_told() {
    const COUNT: u64 = 8000;
    let home = home();
    let mut slow = home.served.events("", None).await;
    let long = "x".repeat(1000);
    for _ in 0..COUNT {
        change(&home.daemon, "web", VmChange::Ended, &long);
        // The connection takes what it has room for.
        tokio::task::yield_now().await;
    }
    change(&home.daemon, "web", VmChange::Detached, "last");
    let (mut numbers, mut lost) = (Vec::new(), 0);
    loop {
        let event = next(&mut slow).await;
        if event.kind == EventType::Lost {
            lost += 1;
            continue;
        }
        numbers.push(event.number);
        if event.text == "detached: last" {
            break;
        }
    }
    assert!(lost >= 1, "it had {} of {COUNT}", numbers.len());
    assert!(numbers.len() < COUNT as usize / 2, "{} were kept for it", numbers.len());
    assert!(numbers.is_sorted_by(|one, next| one < next));
}

#[tokio::test]
async fn streams_beyond_the_bound_are_refused() {
    let home = home();
    let mut open = Vec::new();
    for _ in 0..32 {
        open.push(home.served.events("", None).await);
    }
    let (status, refused) = home.served.refused("GET /v1/events", "").await;
    assert_eq!((status, refused.code), (429, Some(ErrorCode::TooMany)), "{refused:?}");
    assert!(home.served.ask("GET /v1/version", "").await.0.is_success());
    open.pop();
    let again = async {
        while home.served.ask("GET /v1/vms/web", "").await.0 != 404
            || home.daemon.events().free_streams() == 0
        {
            tokio::task::yield_now().await;
        }
    };
    timeout(LONG, again).await.expect("room for one more");
    home.served.events("", None).await;
}

#[tokio::test]
async fn commands_that_are_refused_are_events_and_questions_are_not() {
    let home = home();
    home.served.refused("GET /v1/vms/web", "").await;
    home.served.refused("PUT /v1/vms/web/limit", r#"{"bytes": 1}"#).await;
    home.served.refused("POST /v1/vms/attach", r#"{"name": "db", "pid": 1}"#).await;
    home.served.refused("POST /v1/vms/run", "{").await;
    let told: Vec<Event> = testing::events(&home.daemon).await;
    let of = |event: &Event| {
        let refusal = event.refusal.as_ref().expect("a refusal");
        let vm = event.vm.as_ref().map_or("-", |vm| vm.as_str());
        format!("{vm} {} {} {}", refusal.method, refusal.path, refusal.code)
    };
    let told: Vec<String> = told.iter().map(of).collect();
    assert_eq!(
        told,
        [
            "web PUT /v1/vms/web/limit unknown_vm",
            "db POST /v1/vms/attach bad_request",
            "- POST /v1/vms/run bad_request",
        ]
    );
}

#[tokio::test]
async fn a_client_is_told_what_it_may_do() {
    let home = home();
    let role = async |served: &Served| served.ask("GET /v1/whoami", "").await.1["role"].clone();
    assert_eq!(role(&home.served).await, "host");
    let router = router(home.daemon.clone()).layer(Extension(Role::Read));
    assert_eq!(role(&Served::new(router)).await, "read");
}

/// Which VMs there are depends on the host of the test.
#[tokio::test]
async fn all_vms_of_the_host_are_told() {
    let home = home();
    let (status, told) = home.served.ask("GET /v1/observe", "").await;
    assert_eq!(status, StatusCode::OK, "{told}");
    let HostVms { vms, .. } = serde_json::from_value(told.clone()).expect("VMs");
    assert!(vms.len() <= HOST_VMS_MAX && vms.is_sorted_by_key(|vm| vm.pid), "{told}");
    for vm in vms {
        assert_eq!(vm.managed_as, None, "this daemon manages none: {told}");
        assert!(vm.usage.is_some() != vm.reason.is_some(), "{told}");
    }
}

#[tokio::test]
async fn another_machine_has_no_vms_attached() {
    let home = home();
    let body = r#"{"mode":"dry_run","attach":true}"#;
    assert_eq!(home.served.ask("PUT /v1/pilot", body).await.0, StatusCode::OK);
    let afar = Client(std::net::IpAddr::from([192, 0, 2, 1]));
    let served = Served::new(router(home.daemon.clone()).layer(Extension(afar)));
    let (status, refused) = served.refused("PUT /v1/pilot", body).await;
    assert_eq!((status, refused.code), (403, Some(ErrorCode::Forbidden)), "{refused:?}");
    let (status, _) = served.ask("PUT /v1/pilot", r#"{"mode":"dry_run"}"#).await;
    assert_eq!(status, StatusCode::OK);
}
