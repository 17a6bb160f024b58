//! The REST interface over the UNIX socket.

use std::sync::Arc;

use axum::extract::{Path, Query, State};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use ebb_api::{
    AttachRequest, AutoRequest, AutoStatus, Calibration, DetachReport, EvictReport, EvictRequest,
    HeatReport, HeatRequest, LimitRequest, LimitStatus, PoolRequest, PoolStatus, ReclaimReport,
    ReclaimRequest, ResizeReport, ResizeRequest, RunRequest, ShareRequest, StatusQuery, Version,
    VmName, VmStatus, VmSummary, route,
};
use tokio::sync::oneshot;

use crate::daemon::Daemon;
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

async fn version(State(daemon): Shared) -> Json<Version> {
    Json(Version {
        version: env!("CARGO_PKG_VERSION").into(),
        pid: std::process::id() as i32,
        run_dir: daemon.run_dir().to_owned(),
    })
}

async fn list(State(daemon): Shared) -> Answer<Json<Vec<VmSummary>>> {
    let mut all = Vec::new();
    for name in daemon.names() {
        match ask(&daemon, &name, |to| Command::Status(false, to)).await {
            Ok(full) => all.push(status::summary(&full)),
            // It ended since the names were read.
            Err(Refused::Unknown(_)) => {}
            Err(refused) => return Err(refused),
        }
    }
    Ok(Json(all))
}

async fn run(State(daemon): Shared, Json(request): Json<RunRequest>) -> Answer<Json<VmStatus>> {
    let name = request.name.clone();
    apart(&daemon, move |daemon| daemon.run(&request)).await?;
    ask(&daemon, &name, |to| Command::Status(false, to)).await.map(Json)
}

async fn attach(
    State(daemon): Shared,
    Json(request): Json<AttachRequest>,
) -> Answer<Json<VmStatus>> {
    let name = request.name.clone();
    apart(&daemon, move |daemon| daemon.attach(&request)).await?;
    ask(&daemon, &name, |to| Command::Status(false, to)).await.map(Json)
}

async fn show(
    State(daemon): Shared,
    Path(name): Path<VmName>,
    Query(query): Query<StatusQuery>,
) -> Answer<Json<VmStatus>> {
    ask(&daemon, &name, |to| Command::Status(query.counts, to)).await.map(Json)
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
    pool::set(&daemon, request).await.map(Json)
}

async fn show_pool(State(daemon): Shared) -> Answer<Json<PoolStatus>> {
    pool::status(&daemon).await.map(Json)
}

async fn calibrate(State(daemon): Shared) -> Answer<Json<Calibration>> {
    apart(&daemon, Daemon::calibrate).await.map(Json)
}

async fn calibration(State(daemon): Shared) -> Answer<Json<Calibration>> {
    let last = apart(&daemon, |daemon| Ok(daemon.calibrated.last())).await?;
    last.map(Json).ok_or_else(|| not_allowed("nothing was measured yet: ebb calibrate does it"))
}

/// Puts a question to a VM's worker and waits for its answer.
pub async fn ask<T>(
    daemon: &Daemon,
    name: &VmName,
    question: impl FnOnce(oneshot::Sender<Answer<T>>) -> Command,
) -> Answer<T> {
    let unknown = || Refused::Unknown(name.clone());
    let (to, answer) = oneshot::channel();
    daemon.commands(name)?.send(question(to)).map_err(|_| unknown())?;
    answer.await.map_err(|_| unknown())?
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
