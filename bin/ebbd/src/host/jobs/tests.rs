//! Jobs of VMs whose processes are stand-ins.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use axum::http::StatusCode;
use axum::routing::{delete, get, post, put};
use axum::{Json, Router};
use ebb_api::{
    ErrorCode, EventType, HeatRequest, JOBS_MAX, JobKind, JobState, JobUnit, ReclaimRequest,
    ResizeRequest, route,
};
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::table::{JOBS_AFAR_MAX, Table};
use super::*;
use crate::host::swap_dir::SwapDir;
use crate::host::testing;
use crate::model::vm_routes::WORK;

const LONG: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

struct Home {
    daemon: Daemon,
    _directory: tempfile::TempDir,
}

/// A daemon with the VM `web`, whose process has these routes.
fn home(router: Router) -> Home {
    let directory = tempfile::tempdir().unwrap();
    let daemon = testing::daemon(directory.path(), SwapDir::new(directory.path(), None).unwrap());
    testing::publish(&daemon, "web", testing::status(), None);
    testing::serve(&daemon, "web", router);
    Home { daemon, _directory: directory }
}

fn web() -> Option<VmName> {
    Some("web".parse().unwrap())
}

fn reclaim() -> What {
    What::Reclaim(ReclaimRequest { bytes: Some(8 * MIB) })
}

fn a_report(bytes: u64, stopped_by: &str) -> Json<Value> {
    Json(json!({ "bytes": bytes, "blocks": 1, "duration_ns": 1, "scan_ns": 1,
        "stopped_by": stopped_by,
        "skipped": { "in_use": 0, "already_empty": 0, "cancelled": 0 } }))
}

impl Home {
    fn begin(&self, what: What) -> Job {
        begin(&self.daemon, web(), what, Asker::Host).unwrap()
    }

    async fn until(&self, id: u64, is_meant: impl Fn(&Job) -> bool) -> Job {
        let look = async {
            loop {
                let job = self.daemon.jobs().get(id).unwrap();
                if is_meant(&job) {
                    return job;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(LONG, look).await.unwrap_or_else(|_| panic!("{:?}", self.daemon.jobs().list()))
    }

    async fn ended(&self, id: u64) -> Job {
        self.until(id, |job| job.state.is_over()).await
    }

    fn refusal(&self, id: u64) -> String {
        self.daemon.jobs().cancel(id).expect_err("it goes on").to_string()
    }
}

/// A VM's process that reclaims until somebody cancels it.
fn endless() -> Router {
    let (cancelled, begun) = (Arc::new(Notify::new()), Arc::new(AtomicU64::new(0)));
    let (ends, begins) = (Arc::clone(&cancelled), Arc::clone(&begun));
    let work = async move || {
        begins.fetch_add(1, Relaxed);
        ends.notified().await;
        a_report(3 * MIB, "it was cancelled")
    };
    let progress = async move || match begun.load(Relaxed) {
        0 => Err(StatusCode::NOT_FOUND),
        _ => Ok(Json(json!({ "done_bytes": 2 * MIB, "total_bytes": 8 * MIB }))),
    };
    let cancel = async move || {
        cancelled.notify_one();
        StatusCode::NO_CONTENT
    };
    Router::new().route(route::RECLAIM, post(work)).route(WORK, get(progress).merge(delete(cancel)))
}

#[tokio::test]
async fn a_job_goes_on_by_itself_and_is_told_at_both_ends() {
    let home = home(
        Router::new()
            .route(route::RECLAIM, post(async || a_report(5 * MIB, "nothing more is free"))),
    );
    let job = home.begin(reclaim());
    assert_eq!((job.kind, job.state, job.vm.clone()), (JobKind::Reclaim, JobState::Waiting, web()));
    let ended = home.ended(job.id).await;
    assert_eq!((ended.state, ended.error), (JobState::Done, None));
    assert_eq!(ended.text, "reclaimed 5 MiB: nothing more is free");
    assert_eq!(ended.reclaim.map(|report| report.bytes), Some(5 * MIB));
    assert!(ended.ended.is_some_and(|end| end >= ended.begun));
    assert_eq!(ended.progress.map(|progress| progress.done), Some(5 * MIB));
    let next = home.begin(reclaim());
    assert!(next.id > job.id);
    home.ended(next.id).await;

    let events = testing::events(&home.daemon).await;
    let told: Vec<String> = events
        .iter()
        .filter(|event| event.kind == EventType::Job)
        .filter(|event| event.job.as_ref().is_some_and(|figures| figures.id == job.id))
        .map(|event| event.text.clone())
        .collect();
    let id = job.id;
    let end = format!("reclaim, job {id}: done: reclaimed 5 MiB: nothing more is free");
    assert_eq!(told, [format!("reclaim, job {id}: waiting"), end]);
}

#[tokio::test]
async fn progress_is_seen_and_a_cancel_reaches_the_process() {
    let home = home(endless());
    let job = home.begin(reclaim());
    let running = home.until(job.id, |job| job.progress.is_some()).await;
    let progress = running.progress.unwrap();
    assert_eq!((progress.done, progress.total), (2 * MIB, Some(8 * MIB)));
    assert_eq!((running.state, progress.unit), (JobState::Running, JobUnit::Bytes));
    assert!(running.can_cancel && !running.cancelling);
    let told = home.daemon.jobs().cancel(job.id).unwrap();
    assert!(told.cancelling && !told.can_cancel);
    let ended = home.ended(job.id).await;
    assert_eq!((ended.state, ended.cancelling), (JobState::Cancelled, false));
    assert_eq!(ended.text, "reclaimed 3 MiB: it was cancelled");
    assert_eq!(ended.progress.map(|progress| progress.done), Some(3 * MIB));
    let why = home.refusal(job.id);
    assert_eq!(why, format!("job {} has ended already: cancelled", job.id));
}

#[tokio::test]
async fn jobs_of_one_vm_take_turns_and_one_that_waits_is_cancelled_at_once() {
    let home = home(endless());
    let first = home.begin(reclaim());
    home.until(first.id, |job| job.state == JobState::Running).await;
    let (second, third) = (home.begin(reclaim()), home.begin(What::Detach));
    home.daemon.jobs().cancel(second.id).unwrap();
    let ended = home.ended(second.id).await;
    assert_eq!((ended.state, ended.text.as_str()), (JobState::Cancelled, "nothing was done"));
    assert_eq!(home.daemon.jobs().get(third.id).unwrap().state, JobState::Waiting);
    home.daemon.jobs().cancel(third.id).unwrap();
    home.ended(third.id).await;
    assert_eq!(home.daemon.jobs().get(first.id).unwrap().state, JobState::Running);
    home.daemon.jobs().cancel(first.id).unwrap();
    home.ended(first.id).await;
}

#[tokio::test]
async fn a_job_does_nothing_with_the_next_vm_of_the_name() {
    let end = Arc::new(Notify::new());
    let ends = Arc::clone(&end);
    let work = async move || {
        ends.notified().await;
        a_report(MIB, "nothing more is free")
    };
    let home = home(Router::new().route(route::RECLAIM, post(work)));
    let first = home.begin(reclaim());
    home.until(first.id, |job| job.state == JobState::Running).await;
    let second = home.begin(What::Detach);
    let name = web().unwrap();
    home.daemon.forget(&name, &home.daemon.site().directory(&name), None);
    testing::publish(&home.daemon, "web", testing::status(), None);
    end.notify_one();
    assert_eq!(home.ended(first.id).await.state, JobState::Done, "its VM's process has answered");
    let ended = home.ended(second.id).await;
    let why = "web has ended, and another VM has its name now";
    assert_eq!((ended.state, ended.text.as_str()), (JobState::Failed, why));
}

fn a_heat(monitoring: bool) -> Json<Value> {
    let windows_done = if monitoring { 1 } else { 4 };
    let found = json!({ "age_s": 0, "windows": 4, "duration_ms": 800, "tracker": "guest_tables",
        "tracker_reason": "", "host_needs": "", "read_weight": 1, "write_weight": 2,
        "degree_max": 12, "memory_bytes": 0, "used_bytes": 0, "hot_bytes": 0, "looking_us": 0,
        "tables_read": 0, "tables_pruned": 0, "marks_cleared": 0, "is_truncated": false,
        "degrees": [], "block_bytes": 0, "regions": [] });
    let figures = if monitoring { Value::Null } else { found };
    Json(json!({ "monitoring": monitoring, "windows_done": windows_done, "windows": 4,
        "failed": null, "figures": figures }))
}

#[tokio::test]
async fn a_monitoring_bears_a_silent_process_and_a_cancel() {
    let looks = Arc::new(AtomicU64::new(0));
    let look = async move || match looks.fetch_add(1, Relaxed) {
        0 => {
            let why = json!({ "code": "unavailable", "error": "it is being recovered" });
            Err((StatusCode::SERVICE_UNAVAILABLE, Json(why)))
        }
        1 => Ok(a_heat(true)),
        _ => Ok(a_heat(false)),
    };
    let heat = Router::new().route(route::HEAT, post(async || a_heat(true)).merge(get(look)));
    let home = home(heat);
    let ended = home.ended(home.begin(What::Heat(HeatRequest { fresh: true })).id).await;
    assert_eq!((ended.state, ended.error), (JobState::Done, None));

    let never_ends = post(async || a_heat(true)).merge(get(async || a_heat(true)));
    let home = self::home(Router::new().route(route::HEAT, never_ends));
    let job = home.begin(What::Heat(HeatRequest { fresh: true }));
    home.until(job.id, |job| job.progress.is_some()).await;
    home.daemon.jobs().cancel(job.id).unwrap();
    assert_eq!(home.ended(job.id).await.state, JobState::Cancelled);
}

#[tokio::test]
async fn what_cannot_stop_half_way_says_so() {
    let stays = async || std::future::pending::<StatusCode>().await;
    let home = home(Router::new().route(route::VM, delete(stays)));
    let job = home.begin(What::Detach);
    let running = home.until(job.id, |job| job.state == JobState::Running).await;
    assert!(!running.can_cancel);
    let why = home.refusal(job.id);
    assert!(why.contains("a detach that has begun goes on to its end"), "{why}");
    assert!(home.daemon.jobs().cancel(1).is_err_and(|why| matches!(why, ApiError::UnknownJob(1))));
}

#[tokio::test]
async fn a_refusal_of_the_process_is_the_jobs_error() {
    let refused = async || {
        let body =
            json!({ "code": "not_trusted", "error": "the guest is not trusted", "hint": "w" });
        (StatusCode::UNPROCESSABLE_ENTITY, Json(body))
    };
    let home = home(Router::new().route(route::RECLAIM, post(refused)));
    let ended = home.ended(home.begin(reclaim()).id).await;
    let error = ended.error.expect("an error");
    assert_eq!((ended.state, error.code), (JobState::Failed, Some(ErrorCode::NotTrusted)));
    assert_eq!([error.error, ended.text], ["the guest is not trusted"; 2]);
}

fn a_size(bytes: u64, wanted_bytes: u64, state: &str) -> Json<Value> {
    Json(json!({ "bytes": bytes, "wanted_bytes": wanted_bytes, "node": null,
        "mechanism": "balloon", "reason": "it has one", "state": state, "least_bytes": null,
        "taken_bytes": 0, "emptied_bytes": 0, "returned_bytes": 0, "purges": 0, "duration_ns": 1,
        "stopped_by": "" }))
}

fn resize() -> What {
    let bytes = Some(64 * MIB);
    What::Resize(ResizeRequest { bytes, node: None, by: None, on_violation: None })
}

#[tokio::test]
async fn a_cancelled_resize_drops_its_target() {
    let dropped = Arc::new(AtomicU64::new(0));
    let drops = Arc::clone(&dropped);
    let set = async move |Json(asked): Json<ResizeRequest>| match asked.bytes {
        Some(wanted) => a_size(128 * MIB, wanted, "moving"),
        None => {
            drops.fetch_add(1, Relaxed);
            a_size(96 * MIB, 96 * MIB, "off")
        }
    };
    let home = home(
        Router::new()
            .route(route::SIZE, put(set).merge(get(async || a_size(96 * MIB, 64 * MIB, "moving")))),
    );
    let job = home.begin(resize());
    let half = |job: &Job| job.progress.is_some_and(|progress| progress.done == 32 * MIB);
    let running = home.until(job.id, half).await;
    assert_eq!(running.progress.and_then(|progress| progress.total), Some(64 * MIB));
    home.daemon.jobs().cancel(job.id).unwrap();
    let ended = home.ended(job.id).await;
    assert_eq!((ended.state, ended.text.as_str()), (JobState::Cancelled, "stays at 96 MiB"));
    assert_eq!(dropped.load(Relaxed), 1);
}

#[tokio::test]
async fn a_target_that_was_replaced_ends_the_job() {
    let home = home(
        Router::new().route(
            route::SIZE,
            put(async || a_size(128 * MIB, 64 * MIB, "moving"))
                .merge(get(async || a_size(120 * MIB, 32 * MIB, "moving"))),
        ),
    );
    let ended = home.ended(home.begin(resize()).id).await;
    assert_eq!(ended.state, JobState::Cancelled);
    assert_eq!(ended.text, "another target was set meanwhile");
}

#[test]
fn the_table_is_bounded_and_the_oldest_that_have_ended_go_first() {
    let mut table = Table::default();
    let add =
        |table: &mut Table, asker| table.add(JobKind::Reclaim, web(), asker).map(|(job, _)| job.id);
    let first = add(&mut table, Asker::Host).unwrap();
    for _ in 0..JOBS_AFAR_MAX {
        add(&mut table, Asker::Afar).unwrap();
    }
    let refused = add(&mut table, Asker::Afar).expect_err("it leaves some to the host");
    assert_eq!(refused.code(), ErrorCode::TooMany);
    while table.list().len() < JOBS_MAX {
        add(&mut table, Asker::Host).unwrap();
    }
    let refused = add(&mut table, Asker::Host).expect_err("all are under way");
    assert!(matches!(refused, ApiError::TooManyJobs(JOBS_MAX)));
    let [second, third] = [first + 1, first + 2];
    for id in [third, second] {
        table.end(id, End::done("")).unwrap();
    }
    add(&mut table, Asker::Host).unwrap();
    assert!(table.get(second).is_err() && table.get(third).is_ok() && table.get(first).is_ok());
    assert_eq!(table.list().len(), JOBS_MAX);
}
