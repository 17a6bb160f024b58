//! The REST interface over the UNIX socket.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, Query, State};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use ebb_api::{
    AttachRequest, AutoRequest, AutoStatus, Calibration, DetachReport, EvictReport, EvictRequest,
    HeatReport, HeatRequest, LimitRequest, LimitStatus, PoolRequest, PoolStatus, ReclaimReport,
    ReclaimRequest, ResizeReport, ResizeRequest, RunRequest, ShareRequest, StatusQuery, Version,
    VmName, VmStatus, VmSummary, route,
};

use crate::host::asking::{PATIENCE, ask, current};
use crate::host::registry::Daemon;
use crate::host::{pool_keeper, run as start};
use crate::model::api_error::{Answer, failed, not_allowed};
use crate::vm::context::mailbox::Command;

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

/// Then its last figures have to do.
const STATUS_PATIENCE: Duration = Duration::from_secs(5);
/// A look at every frame takes its time.
const COUNTS_PATIENCE: Duration = Duration::from_secs(10);

async fn version(State(daemon): Shared) -> Json<Version> {
    Json(Version {
        version: env!("CARGO_PKG_VERSION").into(),
        pid: std::process::id() as i32,
        run_dir: daemon.run_dir().to_owned(),
    })
}

/// As they were published last: no VM is asked.
async fn list(State(daemon): Shared) -> Json<Vec<VmSummary>> {
    Json(daemon.listings().iter().map(|(_, listing)| listing.summary()).collect())
}

async fn run(State(daemon): Shared, Json(request): Json<RunRequest>) -> Answer<Json<VmStatus>> {
    let name = request.name.clone();
    apart(&daemon, move |daemon| start::run(daemon, &request)).await?;
    current(&daemon, &name, false, PATIENCE).await.map(Json)
}

async fn attach(
    State(daemon): Shared,
    Json(request): Json<AttachRequest>,
) -> Answer<Json<VmStatus>> {
    let name = request.name.clone();
    apart(&daemon, move |daemon| start::attach(daemon, &request)).await?;
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
    pool_keeper::share(&daemon, &name, request).await.map(Json)
}

async fn set_pool(
    State(daemon): Shared,
    Json(request): Json<PoolRequest>,
) -> Answer<Json<PoolStatus>> {
    pool_keeper::set(&daemon, request).map(Json)
}

async fn show_pool(State(daemon): Shared) -> Answer<Json<PoolStatus>> {
    pool_keeper::status(&daemon).map(Json)
}

async fn calibrate(State(daemon): Shared) -> Answer<Json<Calibration>> {
    apart(&daemon, Daemon::calibrate).await.map(Json)
}

async fn calibration(State(daemon): Shared) -> Answer<Json<Calibration>> {
    let last = apart(&daemon, |daemon| Ok(daemon.calibrated().last())).await?;
    last.map(Json).ok_or_else(|| not_allowed("nothing was measured yet: ebb calibrate does it"))
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
