//! The REST interface over the UNIX socket.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use axum::extract::{Path, Query, State};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use ebb_api::{
    AttachRequest, AutoRequest, AutoStatus, Calibration, DetachReport, EvictReport, EvictRequest,
    HeatReport, HeatRequest, LimitRequest, LimitStatus, PoolRequest, PoolStatus, ReclaimReport,
    ReclaimRequest, ResizeReport, ResizeRequest, RunRequest, ShareRequest, State as ApiState,
    StatusQuery, Version, VmName, VmStatus, VmSummary, route,
};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::daemon::Daemon;
use crate::listing::Listing;
use crate::pool;
use crate::problem::{Answer, Refused, failed, not_allowed};
use crate::status;
use crate::worker::Command;

/// All routes.
pub fn router(daemon: Daemon) -> Router {
    Router::new()
        .route(route::VERSION, get(version))
        .route(route::VMS, get(list))
        .route(route::RUN, post(run))
        .route(route::ATTACH, post(attach))
        .route(route::VM, get(show).delete(detach))
        .route(route::RECLAIM, post(reclaim))
        .route(route::AUTO, put(auto))
        .route(route::LIMIT, put(limit))
        .route(route::SIZE, get(size).put(resize))
        .route(route::EVICT, post(evict))
        .route(route::HEAT, get(heat).post(monitor))
        .route(route::SHARE, put(share))
        .route(route::POOL, get(show_pool).put(set_pool))
        .route(route::CALIBRATION, get(calibration).post(calibrate))
        .route(route::OPENAPI, get(|| async { Json(ebb_api::document()) }))
        .with_state(Arc::new(daemon))
}

type Shared = State<Arc<Daemon>>;

/// A worker that does not begin with what it is asked by then does something that takes long, or
/// waits for QEMU. One that evicts begins between two steps, each of which writes 16 MiB: seconds,
/// on a slow disk.
const PATIENCE: Duration = Duration::from_secs(60);
/// Then its last figures have to do.
const STATUS_PATIENCE: Duration = Duration::from_secs(5);
/// A look at every frame takes its time.
const COUNTS_PATIENCE: Duration = Duration::from_secs(10);
const LIST_PATIENCE: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(10);

async fn version(State(daemon): Shared) -> Json<Version> {
    Json(Version {
        version: env!("CARGO_PKG_VERSION").into(),
        pid: std::process::id() as i32,
        run_dir: daemon.run_dir().to_owned(),
    })
}

async fn list(State(daemon): Shared) -> Answer<Json<Vec<VmSummary>>> {
    let mut asked = JoinSet::new();
    for (name, listing) in daemon.listings() {
        asked.spawn(async move {
            // What it then knows is published, or is the last that was.
            let fresh = now(&listing, false, LIST_PATIENCE).await;
            let summary =
                fresh.map_or_else(|| listing.summary(), |status| status::summary(&status));
            (name, summary)
        });
    }
    let mut all: Vec<(VmName, VmSummary)> = asked.join_all().await;
    all.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    // One that ended since is not listed any more.
    all.retain(|(name, _)| daemon.listed(name).is_some());
    Ok(Json(all.into_iter().map(|(_, summary)| summary).collect()))
}

async fn run(State(daemon): Shared, Json(request): Json<RunRequest>) -> Answer<Json<VmStatus>> {
    let name = request.name.clone();
    apart(&daemon, move |daemon| daemon.run(&request)).await?;
    current(&daemon, &name, false, PATIENCE).await.map(Json)
}

async fn attach(
    State(daemon): Shared,
    Json(request): Json<AttachRequest>,
) -> Answer<Json<VmStatus>> {
    let name = request.name.clone();
    apart(&daemon, move |daemon| daemon.attach(&request)).await?;
    current(&daemon, &name, false, PATIENCE).await.map(Json)
}

async fn show(
    State(daemon): Shared,
    Path(name): Path<VmName>,
    Query(query): Query<StatusQuery>,
) -> Answer<Json<VmStatus>> {
    let patience = if query.counts { COUNTS_PATIENCE } else { STATUS_PATIENCE };
    current(&daemon, &name, query.counts, patience).await.map(Json)
}

async fn detach(State(daemon): Shared, Path(name): Path<VmName>) -> Answer<Json<DetachReport>> {
    ask(&daemon, &name, Command::Detach).await.map(Json)
}

async fn reclaim(
    State(daemon): Shared,
    Path(name): Path<VmName>,
    Json(request): Json<ReclaimRequest>,
) -> Answer<Json<ReclaimReport>> {
    ask(&daemon, &name, |to| Command::Reclaim(request, to)).await.map(Json)
}

async fn auto(
    State(daemon): Shared,
    Path(name): Path<VmName>,
    Json(request): Json<AutoRequest>,
) -> Answer<Json<AutoStatus>> {
    ask(&daemon, &name, |to| Command::Auto(request, to)).await.map(Json)
}

async fn limit(
    State(daemon): Shared,
    Path(name): Path<VmName>,
    Json(request): Json<LimitRequest>,
) -> Answer<Json<LimitStatus>> {
    ask(&daemon, &name, |to| Command::Limit(request, to)).await.map(Json)
}

async fn resize(
    State(daemon): Shared,
    Path(name): Path<VmName>,
    Json(request): Json<ResizeRequest>,
) -> Answer<Json<ResizeReport>> {
    ask(&daemon, &name, |to| Command::Resize(request, to)).await.map(Json)
}

async fn size(State(daemon): Shared, Path(name): Path<VmName>) -> Answer<Json<ResizeReport>> {
    ask(&daemon, &name, Command::Size).await.map(Json)
}

async fn evict(
    State(daemon): Shared,
    Path(name): Path<VmName>,
    Json(request): Json<EvictRequest>,
) -> Answer<Json<EvictReport>> {
    ask(&daemon, &name, |to| Command::Evict(request, to)).await.map(Json)
}

async fn monitor(
    State(daemon): Shared,
    Path(name): Path<VmName>,
    Json(request): Json<HeatRequest>,
) -> Answer<Json<HeatReport>> {
    ask(&daemon, &name, |to| Command::Monitor(request, to)).await.map(Json)
}

async fn heat(State(daemon): Shared, Path(name): Path<VmName>) -> Answer<Json<HeatReport>> {
    ask(&daemon, &name, Command::Heat).await.map(Json)
}

async fn share(
    State(daemon): Shared,
    Path(name): Path<VmName>,
    Json(request): Json<ShareRequest>,
) -> Answer<Json<PoolStatus>> {
    pool::share(&daemon, &name, request).await.map(Json)
}

async fn set_pool(
    State(daemon): Shared,
    Json(request): Json<PoolRequest>,
) -> Answer<Json<PoolStatus>> {
    pool::set(&daemon, request).map(Json)
}

async fn show_pool(State(daemon): Shared) -> Answer<Json<PoolStatus>> {
    pool::status(&daemon).map(Json)
}

async fn calibrate(State(daemon): Shared) -> Answer<Json<Calibration>> {
    apart(&daemon, Daemon::calibrate).await.map(Json)
}

async fn calibration(State(daemon): Shared) -> Answer<Json<Calibration>> {
    let last = apart(&daemon, |daemon| Ok(daemon.calibrated.last())).await?;
    last.map(Json).ok_or_else(|| not_allowed("nothing was measured yet: ebb calibrate does it"))
}

/// Puts a question to a VM's worker and waits for its answer: not for ever to be heard, but as
/// long as the answer takes.
pub async fn ask<T>(
    daemon: &Daemon,
    name: &VmName,
    question: impl FnOnce(oneshot::Sender<Answer<T>>) -> Command,
) -> Answer<T> {
    let lost = || daemon.commands(name).err().unwrap_or_else(|| daemon.unknown(name));
    let ((ready, heard), (to, answer)) = (oneshot::channel(), oneshot::channel());
    let commands = taken_up(daemon, name).await?;
    commands.send(Command::Ready(ready)).map_err(|_| lost())?;
    commands.send(question(to)).map_err(|_| lost())?;
    let Ok(heard) = timeout(PATIENCE, heard).await else {
        return Err(Refused::Unavailable(format!(
            "{name} is busy, or QEMU does not answer: nothing was done, try again in a while"
        )));
    };
    heard.map_err(|_| lost())??;
    answer.await.map_err(|_| lost())?
}

/// Where a VM takes its commands, once it was taken up.
async fn taken_up(daemon: &Daemon, name: &VmName) -> Answer<Sender<Command>> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match daemon.commands(name) {
            Err(Refused::Unavailable(_)) if is_coming(daemon, name, deadline) => {
                sleep(LOOK_EVERY).await;
            }
            answer => return answer,
        }
    }
}

fn is_coming(daemon: &Daemon, name: &VmName, deadline: Instant) -> bool {
    let state = daemon.listed(name).map(|listing| listing.summary().state);
    state == Some(ApiState::TakingUp) && Instant::now() < deadline
}

/// All that is known of a VM: now, or where it is slow to answer, last.
async fn current(
    daemon: &Daemon,
    name: &VmName,
    counts: bool,
    patience: Duration,
) -> Answer<VmStatus> {
    let deadline = Instant::now() + patience;
    while is_coming(daemon, name, deadline) {
        sleep(LOOK_EVERY).await;
    }
    let listing = daemon.listed(name).ok_or_else(|| daemon.unknown(name))?;
    match now(&listing, counts, patience).await {
        Some(status) => Ok(status),
        None => listing.status(),
    }
}

async fn now(listing: &Listing, counts: bool, patience: Duration) -> Option<VmStatus> {
    let (to, answer) = oneshot::channel();
    listing.commands().ok()?.send(Command::Status(counts, to)).ok()?;
    timeout(patience, answer).await.ok()?.ok()?.ok()
}

/// Work that waits for a VMM, away from the threads that answer requests.
async fn apart<T: Send + 'static>(
    daemon: &Arc<Daemon>,
    work: impl FnOnce(&Daemon) -> Answer<T> + Send + 'static,
) -> Answer<T> {
    let daemon = Arc::clone(daemon);
    let done = tokio::task::spawn_blocking(move || work(&daemon)).await;
    done.map_err(failed("the daemon"))?
}
