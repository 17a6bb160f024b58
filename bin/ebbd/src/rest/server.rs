//! The REST interface of `ebbd` on its UNIX socket. Requests about one VM are forwarded to the VM's
//! process.

use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post, put};
use axum::{Json, Router};
use ebb_api::{
    AttachRequest, Calibration, HistoryQuery, HostVms, JobQuery, PilotRequest, PilotSight,
    PilotStatus, PoolRequest, PoolStatus, Role, RuleRequest, RunRequest, ShareRequest, Top,
    Version, VmName, VmSummary, WhoAmI, route,
};

use super::events;
use super::extract::{Asked, Body, Named, unknown_route, wrong_method};
use super::jobs;
use super::refusals::{self, about};
use super::tcp::Client;
use crate::host::events::Asker;
use crate::host::guests::Guests;
use crate::host::host_vms::Observing;
use crate::host::metrics::Metrics;
use crate::host::registry::Daemon;
use crate::host::{apart, asking, history, pilot, pool_keeper, start_vm, top};
use crate::model::api_error::{Answer, ApiError, failed};
use crate::model::task::Work;

/// All routes.
pub fn router(daemon: Daemon) -> Router {
    // Both tell of the same look at the host's guests.
    let guests = Arc::new(Guests::default());
    let metrics = Arc::new(Metrics::new(Arc::clone(&guests)));
    let observing = Arc::new(Observing::new(guests));
    let vms = [route::RECLAIM, route::AUTO, route::LIMIT, route::SIZE, route::EVICT, route::HEAT];
    let router = Router::new()
        .route(route::VERSION, get(version))
        .route(route::WHOAMI, get(whoami))
        .route(route::VMS, get(list))
        .route(route::RUN, post(run))
        .route(route::ATTACH, post(attach))
        .route(route::VM, get(show).delete(detach))
        .route(route::SHARE, put(share))
        .route(route::POOL, get(show_pool).put(set_pool))
        .route(route::PILOT, get(show_pilot).put(set_pilot))
        .route(route::PILOT_SIGHT, get(pilot_sight))
        .route(route::TOP, get(show_top))
        .route(route::OBSERVE, get(move |daemon: DaemonState| observe(daemon, observing)))
        .route(route::HISTORY, get(show_history))
        .route(route::RULE, put(set_rule))
        .route(route::CALIBRATION, get(calibration).post(calibrate))
        .route(route::JOBS, get(jobs::list))
        .route(route::JOB, get(jobs::show).delete(jobs::cancel))
        .route(route::EVENTS, get(events::events))
        .route(route::METRICS, get(move |daemon: DaemonState| show_metrics(daemon, metrics)))
        .route(route::OPENAPI, get(|| async { Json(ebb_api::document()) }));
    let router = vms.into_iter().fold(router, |router, route| router.route(route, any(forward)));
    let daemon = Arc::new(daemon);
    router
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(Arc::clone(&daemon), refusals::publish))
        .with_state(daemon)
}

/// OpenMetrics 1.0, "Content type".
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type DaemonState = State<Arc<Daemon>>;

async fn version(State(daemon): DaemonState) -> Json<Version> {
    Json(Version {
        version: env!("CARGO_PKG_VERSION").into(),
        pid: std::process::id() as i32,
        run_dir: daemon.site().run_dir.clone(),
    })
}

/// Tells a client what it may do. The guard before all routes has found out the role of a client that
/// is on another machine.
async fn whoami(role: Option<Extension<Role>>) -> Json<WhoAmI> {
    Json(WhoAmI { role: role.map_or(Role::Host, |Extension(role)| role) })
}

/// Lists VMs by what they published last. No VM is asked.
async fn list(State(daemon): DaemonState) -> Json<Vec<VmSummary>> {
    Json(daemon.listings().iter().map(|(_, listing)| listing.summary()).collect())
}

async fn run(State(daemon): DaemonState, Body(request): Body<RunRequest>) -> Response {
    let name = request.name.clone();
    let work = Work::Run(Box::new(request));
    about(&name, started(&daemon, &name, work).await)
}

async fn attach(State(daemon): DaemonState, Body(request): Body<AttachRequest>) -> Response {
    let name = request.name.clone();
    let answer = match request.check() {
        Ok(()) => started(&daemon, &name, Work::Attach(request)).await,
        Err(bad) => Err(bad.into()),
    };
    about(&name, answer)
}

/// Has a VM managed, and returns its status.
async fn started(daemon: &Arc<Daemon>, name: &VmName, work: Work) -> Answer<Response> {
    start_vm::start(daemon, name.clone(), work).await?;
    asking::current(daemon, name).await
}

async fn show(
    State(daemon): DaemonState,
    Named(name): Named,
    request: Request,
) -> Answer<Response> {
    asking::show(&daemon, &name, request).await
}

async fn detach(
    State(daemon): DaemonState,
    Named(name): Named,
    Asked(JobQuery { job }): Asked<JobQuery>,
    request: Request,
) -> Answer<Response> {
    match job {
        true => jobs::begin_of_vm(&daemon, name, request).await,
        false => asking::detach(&daemon, &name, request).await,
    }
}

async fn forward(
    State(daemon): DaemonState,
    Named(name): Named,
    Asked(JobQuery { job }): Asked<JobQuery>,
    request: Request,
) -> Answer<Response> {
    match job {
        true => jobs::begin_of_vm(&daemon, name, request).await,
        false => asking::forward(&daemon, &name, request).await.map(IntoResponse::into_response),
    }
}

async fn share(
    State(daemon): DaemonState,
    Named(name): Named,
    Body(request): Body<ShareRequest>,
) -> Answer<Response> {
    pool_keeper::share(&daemon, &name, request).await
}

async fn set_pool(
    State(daemon): DaemonState,
    Body(request): Body<PoolRequest>,
) -> Answer<Json<PoolStatus>> {
    pool_keeper::set(&daemon, request).map(Json)
}

async fn show_pool(State(daemon): DaemonState) -> Answer<Json<PoolStatus>> {
    pool_keeper::status(&daemon).map(Json)
}

async fn set_pilot(
    State(daemon): DaemonState,
    afar: Option<Extension<Client>>,
    Body(request): Body<PilotRequest>,
) -> Answer<Json<PilotStatus>> {
    if afar.is_some() && request.attach == Some(true) {
        return Err(ApiError::Forbidden(
            "only the host itself may have VMs attached: `ebb pilot --attach on` there".into(),
        ));
    }
    pilot::set(&daemon, &request).map(Json)
}

async fn show_pilot(State(daemon): DaemonState) -> Json<PilotStatus> {
    Json(pilot::status(&daemon))
}

async fn pilot_sight(State(daemon): DaemonState) -> Answer<Json<PilotSight>> {
    pilot::last_sight(&daemon).map(Json)
}

async fn show_top(State(daemon): DaemonState) -> Answer<Json<Top>> {
    apart(&daemon, top::now).await.map(Json)
}

async fn observe(State(daemon): DaemonState, observing: Arc<Observing>) -> Answer<Json<HostVms>> {
    apart(&daemon, move |daemon| observing.now(daemon)).await.map(Json)
}

async fn show_metrics(State(daemon): DaemonState, metrics: Arc<Metrics>) -> Answer<Response> {
    let text = apart(&daemon, move |daemon| metrics.text(daemon)).await?;
    Ok(([(CONTENT_TYPE, OPEN_METRICS)], text).into_response())
}

async fn show_history(
    State(daemon): DaemonState,
    Asked(query): Asked<HistoryQuery>,
    afar: Option<Extension<Client>>,
) -> Answer<Response> {
    query.check()?;
    let asker = if afar.is_some() { Asker::Afar } else { Asker::Host };
    let leave = daemon.history().readers().admit(asker)?;
    let told = apart(&daemon, move |daemon| history::tell(daemon.history(), &query, leave)).await?;
    Ok(([(CONTENT_TYPE, "application/json")], told).into_response())
}

async fn set_rule(
    State(daemon): DaemonState,
    Named(name): Named,
    Body(request): Body<RuleRequest>,
) -> Answer<Json<PilotStatus>> {
    pilot::rule(&daemon, &name, &request).map(Json)
}

async fn calibrate(
    State(daemon): DaemonState,
    Asked(JobQuery { job }): Asked<JobQuery>,
    afar: Option<Extension<Client>>,
) -> Answer<Response> {
    match job {
        true => jobs::begin_to_calibrate(&daemon, afar.as_ref()),
        false => apart(&daemon, Daemon::calibrate).await.map(|found| Json(found).into_response()),
    }
}

async fn calibration(State(daemon): DaemonState) -> Answer<Json<Calibration>> {
    let last = apart(&daemon, |daemon| Ok(daemon.calibrated().last())).await?;
    let unmeasured = || ApiError::NotSet("nothing was measured yet: ebb calibrate does it".into());
    last.map(Json).ok_or_else(unmeasured)
}

/// Runs work that takes long, away from the threads that answer requests.
async fn apart<T: Send + 'static>(
    daemon: &Arc<Daemon>,
    work: impl FnOnce(&Daemon) -> Answer<T> + Send + 'static,
) -> Answer<T> {
    let daemon = Arc::clone(daemon);
    let done = apart::apart(move || work(&daemon)).await;
    done.map_err(failed("the daemon"))?
}
