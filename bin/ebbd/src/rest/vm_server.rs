//! The REST interface of one VM's process, on the socket in the VM's directory: the routes of the VM as
//! `ebbd` has them, and what only `ebbd` asks.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use ebb_api::{
    AutoRequest, AutoStatus, DetachReport, EvictReport, EvictRequest, HeatReport, HeatRequest,
    LimitRequest, LimitStatus, ReclaimReport, ReclaimRequest, ResizeReport, ResizeRequest,
    StatusQuery, VmName, VmStatus, route,
};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::model::api_error::{Answer, ApiError};
use crate::model::figures::{Figures, millis, slow};
use crate::model::share::Share;
use crate::vm::context::mailbox::Command;
use crate::vm::publisher::Seen;

/// GET with [`Since`]: [`Figures`] that are newer; no content: none came for a while.
pub const FIGURES: &str = "/v1/figures";
/// PUT a [`Share`], or null: [`Figures`] as they are then.
pub const POOL_SHARE: &str = "/v1/pool-share";
/// PUT a limit in bytes, or null: [`Figures`] as they are then.
pub const POOL_LIMIT: &str = "/v1/pool-limit";

/// A worker that does not begin with what it is asked by then does something that takes long, or
/// waits for QEMU. One that evicts begins between two steps, each of which writes 16 MiB: seconds,
/// on a slow disk.
const PATIENCE: Duration = Duration::from_secs(60);
/// Then its last figures have to do.
const STATUS_PATIENCE: Duration = Duration::from_secs(5);
/// A look at every frame takes its time.
const COUNTS_PATIENCE: Duration = Duration::from_secs(10);
/// Who waits for figures hears after this that there are none: `ebbd` so knows that the process lives.
const FIGURES_PATIENCE: Duration = Duration::from_secs(5);

/// The VM.
pub struct Vm {
    /// Its name.
    pub name: VmName,
    /// Where its worker takes commands.
    pub commands: Sender<Command>,
    /// What its worker published.
    pub seen: Seen,
}

/// Figures after the one of this number.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub struct Since {
    /// 0: any.
    pub after: u64,
}

type Shared = State<Arc<Vm>>;

/// All routes.
pub fn router(vm: Vm) -> Router {
    Router::new()
        .route(route::VM, get(show).delete(detach))
        .route(route::RECLAIM, post(reclaim))
        .route(route::AUTO, put(auto))
        .route(route::LIMIT, put(limit))
        .route(route::SIZE, get(size).put(resize))
        .route(route::EVICT, post(evict))
        .route(route::HEAT, get(heat).post(monitor))
        .route(FIGURES, get(figures))
        .route(POOL_SHARE, put(share))
        .route(POOL_LIMIT, put(allow))
        .with_state(Arc::new(vm))
}

impl Vm {
    /// Puts a question to the worker and waits for its answer: not for ever to be heard, but as long
    /// as the answer takes.
    async fn ask<T>(
        &self,
        question: impl FnOnce(oneshot::Sender<Answer<T>>) -> Command,
    ) -> Answer<T> {
        let ((ready, heard), (to, answer)) = (oneshot::channel(), oneshot::channel());
        self.commands.send(Command::Ready(ready)).map_err(|_| self.ends())?;
        self.commands.send(question(to)).map_err(|_| self.ends())?;
        let Ok(heard) = timeout(PATIENCE, heard).await else {
            return Err(ApiError::Unavailable(format!(
                "{} is busy, or QEMU does not answer: nothing was done, try again in a while",
                self.name
            )));
        };
        heard.map_err(|_| self.ends())??;
        answer.await.map_err(|_| self.ends())?
    }

    /// What is said of a VM that is not managed any more.
    fn ends(&self) -> ApiError {
        ApiError::Over(format!("{} has just ended, or was detached", self.name))
    }

    /// What the worker says now; none: it is slow to answer.
    async fn now(&self, counts: bool, patience: Duration) -> Option<VmStatus> {
        let (to, answer) = oneshot::channel();
        self.commands.send(Command::Status(counts, to)).ok()?;
        timeout(patience, answer).await.ok()?.ok()?.ok()
    }

    /// What was published last.
    fn last(&self) -> Answer<VmStatus> {
        let seen = self.seen.borrow().clone();
        let Some(latest) = seen else {
            return Err(ApiError::Unavailable("it was recovered just now: try again".into()));
        };
        let age = latest.at.elapsed();
        let status = latest.figures.status.clone();
        Ok(VmStatus { state_reason: slow(age), age_ms: millis(age), ..status })
    }

    /// The newest figures.
    fn newest(&self) -> Answer<Json<Figures>> {
        let seen = self.seen.borrow().clone();
        seen.map(|latest| Json(latest.figures.clone())).ok_or_else(|| self.ends())
    }
}

async fn show(State(vm): Shared, Query(query): Query<StatusQuery>) -> Answer<Json<VmStatus>> {
    let patience = if query.counts { COUNTS_PATIENCE } else { STATUS_PATIENCE };
    match vm.now(query.counts, patience).await {
        Some(status) => Ok(Json(status)),
        None => vm.last().map(Json),
    }
}

async fn detach(State(vm): Shared) -> Answer<Json<DetachReport>> {
    vm.ask(Command::Detach).await.map(Json)
}

async fn reclaim(
    State(vm): Shared,
    Json(request): Json<ReclaimRequest>,
) -> Answer<Json<ReclaimReport>> {
    vm.ask(|to| Command::Reclaim(request, to)).await.map(Json)
}

async fn auto(State(vm): Shared, Json(request): Json<AutoRequest>) -> Answer<Json<AutoStatus>> {
    vm.ask(|to| Command::Auto(request, to)).await.map(Json)
}

async fn limit(State(vm): Shared, Json(request): Json<LimitRequest>) -> Answer<Json<LimitStatus>> {
    vm.ask(|to| Command::Limit(request, to)).await.map(Json)
}

async fn resize(
    State(vm): Shared,
    Json(request): Json<ResizeRequest>,
) -> Answer<Json<ResizeReport>> {
    vm.ask(|to| Command::Resize(request, to)).await.map(Json)
}

async fn size(State(vm): Shared) -> Answer<Json<ResizeReport>> {
    vm.ask(Command::Size).await.map(Json)
}

async fn evict(State(vm): Shared, Json(request): Json<EvictRequest>) -> Answer<Json<EvictReport>> {
    vm.ask(|to| Command::Evict(request, to)).await.map(Json)
}

async fn monitor(State(vm): Shared, Json(request): Json<HeatRequest>) -> Answer<Json<HeatReport>> {
    vm.ask(|to| Command::Monitor(request, to)).await.map(Json)
}

async fn heat(State(vm): Shared) -> Answer<Json<HeatReport>> {
    vm.ask(Command::Heat).await.map(Json)
}

async fn share(State(vm): Shared, Json(share): Json<Option<Share>>) -> Answer<Json<Figures>> {
    vm.ask(|to| Command::Share(share, to)).await?;
    // The worker published before it answered.
    vm.newest()
}

async fn allow(State(vm): Shared, Json(limit_bytes): Json<Option<u64>>) -> Answer<Json<Figures>> {
    vm.ask(|to| Command::Allow(limit_bytes, to)).await?;
    vm.newest()
}

async fn figures(State(vm): Shared, Query(Since { after }): Query<Since>) -> Response {
    let mut seen = vm.seen.clone();
    let began = Instant::now();
    loop {
        let latest = seen.borrow_and_update().clone();
        if let Some(latest) = latest.filter(|latest| latest.figures.number > after) {
            let mut figures = latest.figures.clone();
            figures.status.age_ms = millis(latest.at.elapsed());
            return Json(figures).into_response();
        }
        let left = FIGURES_PATIENCE.saturating_sub(began.elapsed());
        match timeout(left, seen.changed()).await {
            Ok(Ok(())) => {}
            // None came, or none will.
            _ => return StatusCode::NO_CONTENT.into_response(),
        }
    }
}
