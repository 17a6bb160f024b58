//! The REST interface of one VM's process, on the socket in the VM's directory: the routes of the
//! VM as `ebbd` has them, and those that only `ebbd` uses.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{Path, State};
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

use super::counting::Counting;
use super::extract::{Asked, Body, unknown_route, wrong_method};
use super::works::Works;
use crate::model::api_error::{Answer, ApiError};
use crate::model::figures::{VmFigures, millis, slow};
use crate::model::host_pressure::PressureNotice;
use crate::model::piloted::PlugRequest;
use crate::model::share::Share;
use crate::model::vm_routes::{
    FIGURES, HOST_PRESSURE, PILOT_COMPRESSED, PILOT_LIMIT, PILOT_PLUGGED, PILOT_RECLAIM,
    POOL_LIMIT, POOL_SHARE, WORK,
};
use crate::model::work::{WorkProgress, WorkQuery};
use crate::vm::context::mailbox::{Command, Inlet, NotTaken, Which};
use crate::vm::publisher::LatestFigures;
use crate::vm::ready::{Detaching, Progress, Watching, YetToReturn};

/// Longest wait until the worker begins with a request. A worker that takes longer is busy or waits
/// for QEMU. A worker that evicts begins between two steps, each of which writes 16 MiB: that takes
/// seconds on a slow disk.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time between two looks at the worker's progress, while a request waits for its answer.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Looks in a row without progress after which the worker counts as hanging. A worker that waits
/// for QEMU makes none for as long: a helper that injects a call has 120 s, each answer 20 s.
const LOOKS_MOST: u32 = 180;
/// Longest wait for a status, before the last figures are used instead.
const STATUS_PATIENCE: Duration = Duration::from_secs(5);
/// The same for a status with counts, which looks at every frame.
const COUNTS_PATIENCE: Duration = Duration::from_secs(10);
/// Longest wait for new figures. The answer that there are none tells `ebbd` that this process
/// lives.
const FIGURES_PATIENCE: Duration = Duration::from_secs(5);

/// The VM that this process serves.
pub struct Vm {
    /// Its name.
    pub name: VmName,
    /// Where its worker takes commands.
    pub commands: Inlet,
    /// Counts what its worker does.
    pub progress: Progress,
    /// Tells how far a detach is.
    pub detaching: Detaching,
    /// Hears whether the pilot wants to know what the guest needs.
    pub watching: Watching,
    /// What its worker has published.
    pub latest: LatestFigures,
    /// The requests that `ebbd` follows.
    pub works: Works,
    /// The counts of the guest's frames.
    pub counting: Arc<Counting>,
}

/// Asks for figures later than those of this number.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub struct Since {
    /// Number of the last figures known; 0: any will do.
    pub after: u64,
    /// Whether the pilot wants to know what the guest needs.
    #[serde(default)]
    pub watch: bool,
}

type VmState = State<Arc<Vm>>;

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
        .route(PILOT_LIMIT, put(pilot_limit))
        .route(PILOT_COMPRESSED, put(pilot_compressed))
        .route(PILOT_PLUGGED, put(pilot_plugged))
        .route(PILOT_RECLAIM, post(pilot_reclaim))
        .route(HOST_PRESSURE, put(hear_of_host))
        .route(WORK, get(work).delete(cancel))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .with_state(Arc::new(vm))
}

impl Vm {
    /// Sends a question to the worker and waits for its answer. The wait until the worker begins is
    /// bounded. The wait for the answer lasts as long as the worker makes progress.
    async fn ask<T>(
        &self,
        question: impl FnOnce(oneshot::Sender<Answer<T>>) -> Command,
    ) -> Answer<T> {
        let ((ready, heard), (to, answer)) = (oneshot::channel(), oneshot::channel());
        self.commands.put(Command::Ready(ready)).map_err(|why| self.not_taken(why))?;
        self.commands.put(question(to)).map_err(|why| self.not_taken(why))?;
        let Ok(heard) = timeout(PATIENCE, heard).await else {
            return Err(ApiError::Unavailable(format!(
                "{} is busy, or QEMU does not answer: nothing was done, try again in a while",
                self.name
            )));
        };
        heard.map_err(|_| self.ends())??;
        self.wait(answer, LOOK_EVERY).await
    }

    /// Waits for the answer of the worker, as long as the worker makes progress.
    async fn wait<T>(
        &self,
        mut answer: oneshot::Receiver<Answer<T>>,
        look_every: Duration,
    ) -> Answer<T> {
        let (mut count, mut looks) = ((self.progress)(), 0);
        while looks < LOOKS_MOST {
            if let Ok(answer) = timeout(look_every, &mut answer).await {
                return answer.map_err(|_| self.ends())?;
            }
            let before = std::mem::replace(&mut count, (self.progress)());
            looks = if count == before { looks + 1 } else { 0 };
        }
        Err(ApiError::OutcomeUnknown(format!(
            "the worker of {name} has made no progress for {LOOKS_MOST} s: ebb status {name} shows \
             whether it goes on; if not, end its process, and the next one recovers the VM: kill -9 \
             {}",
            std::process::id(),
            name = self.name
        )))
    }

    /// The API error about a VM that is no longer managed.
    fn ends(&self) -> ApiError {
        ApiError::Over(format!("{} has just ended, or was detached", self.name))
    }

    /// The API error about a request that the worker does not get.
    fn not_taken(&self, why: NotTaken) -> ApiError {
        match why {
            NotTaken::Ended => self.ends(),
            NotTaken::Full => ApiError::Unavailable(format!(
                "{} is busy, and too many requests wait for it: nothing was done, try again in a \
                 while",
                self.name
            )),
        }
    }

    /// The worker's current status; none: the worker is slow to answer.
    async fn now(&self, counts: bool, patience: Duration) -> Option<VmStatus> {
        let (to, answer) = oneshot::channel();
        self.commands.put(Command::Status(counts, to)).ok()?;
        timeout(patience, answer).await.ok()?.ok()?.ok()
    }

    /// The status that was published last.
    fn last(&self) -> Answer<VmStatus> {
        let latest = self.latest.borrow().clone();
        let Some(latest) = latest else {
            return Err(ApiError::Unavailable("it was recovered just now: try again".into()));
        };
        let age = latest.at.elapsed();
        let status = latest.figures.status.clone();
        Ok(VmStatus { state_reason: slow(age), age_ms: millis(age), ..status })
    }

    /// The status that was published last, with what a detach has yet to bring back.
    fn with_left(&self, left: YetToReturn) -> Answer<VmStatus> {
        let mut status = self.last()?;
        status.state_reason = Some("it is being detached: its content comes back".into());
        let YetToReturn { saved_bytes, on_disk_bytes } = left;
        (status.limit.saved_bytes, status.limit.on_disk_bytes) = (saved_bytes, on_disk_bytes);
        Ok(status)
    }

    /// The newest figures.
    fn newest(&self) -> Answer<Json<VmFigures>> {
        let latest = self.latest.borrow().clone();
        latest.map(|latest| Json(latest.figures.clone())).ok_or_else(|| self.ends())
    }
}

async fn show(State(vm): VmState, Asked(query): Asked<StatusQuery>) -> Answer<Json<VmStatus>> {
    if let Some(left) = (vm.detaching)() {
        return vm.with_left(left).map(Json);
    }
    let plain = || vm.now(false, STATUS_PATIENCE);
    let status = match query.counts {
        true => vm.counting.status(|| counts(Arc::clone(&vm)), plain).await,
        false => plain().await,
    };
    match status {
        Some(status) => Ok(Json(status)),
        None => vm.last().map(Json),
    }
}

/// The worker's current status with every frame counted.
async fn counts(vm: Arc<Vm>) -> Option<VmStatus> {
    vm.now(true, COUNTS_PATIENCE).await
}

async fn detach(
    State(vm): VmState,
    Asked(followed): Asked<WorkQuery>,
) -> Answer<Json<DetachReport>> {
    let _followed = vm.works.begin(followed);
    vm.ask(Command::Detach).await.map(Json)
}

async fn reclaim(
    State(vm): VmState,
    Asked(followed): Asked<WorkQuery>,
    Body(request): Body<ReclaimRequest>,
) -> Answer<Json<ReclaimReport>> {
    let followed = vm.works.begin(followed);
    vm.ask(|to| Command::Reclaim(request, Which::All, followed.work(), to)).await.map(Json)
}

async fn pilot_reclaim(
    State(vm): VmState,
    Body(request): Body<ReclaimRequest>,
) -> Answer<Json<ReclaimReport>> {
    vm.ask(|to| Command::Reclaim(request, Which::Lasting, Arc::default(), to)).await.map(Json)
}

async fn auto(State(vm): VmState, Body(request): Body<AutoRequest>) -> Answer<Json<AutoStatus>> {
    vm.ask(|to| Command::Auto(request, to)).await.map(Json)
}

async fn limit(State(vm): VmState, Body(request): Body<LimitRequest>) -> Answer<Json<LimitStatus>> {
    vm.ask(|to| Command::Limit(request, to)).await.map(Json)
}

async fn resize(
    State(vm): VmState,
    Body(request): Body<ResizeRequest>,
) -> Answer<Json<ResizeReport>> {
    vm.ask(|to| Command::Resize(request, to)).await.map(Json)
}

async fn size(State(vm): VmState) -> Answer<Json<ResizeReport>> {
    vm.ask(Command::Size).await.map(Json)
}

async fn evict(
    State(vm): VmState,
    Asked(followed): Asked<WorkQuery>,
    Body(request): Body<EvictRequest>,
) -> Answer<Json<EvictReport>> {
    let followed = vm.works.begin(followed);
    vm.ask(|to| Command::Evict(request, followed.work(), to)).await.map(Json)
}

/// Tells how far a request is. The worker is not asked: it is busy with it.
async fn work(State(vm): VmState, Path(id): Path<u64>) -> Answer<Json<WorkProgress>> {
    let work = vm.works.get(id).ok_or(ApiError::UnknownJob(id))?;
    if let Some(YetToReturn { saved_bytes, on_disk_bytes }) = (vm.detaching)() {
        work.note_left(saved_bytes.saturating_add(on_disk_bytes));
    }
    Ok(Json(work.progress()))
}

async fn cancel(State(vm): VmState, Path(id): Path<u64>) -> Answer<StatusCode> {
    vm.works.get(id).ok_or(ApiError::UnknownJob(id))?.cancel();
    Ok(StatusCode::NO_CONTENT)
}

async fn monitor(State(vm): VmState, Body(request): Body<HeatRequest>) -> Answer<Json<HeatReport>> {
    vm.ask(|to| Command::Monitor(request, to)).await.map(Json)
}

async fn heat(State(vm): VmState) -> Answer<Json<HeatReport>> {
    vm.ask(Command::Heat).await.map(Json)
}

async fn share(State(vm): VmState, Body(share): Body<Option<Share>>) -> Answer<Json<VmFigures>> {
    vm.ask(|to| Command::Share(share, to)).await?;
    // The worker published before it answered.
    vm.newest()
}

async fn allow(
    State(vm): VmState,
    Body(limit_bytes): Body<Option<u64>>,
) -> Answer<Json<VmFigures>> {
    vm.ask(|to| Command::Allow(limit_bytes, to)).await?;
    vm.newest()
}

async fn pilot_limit(
    State(vm): VmState,
    Body(limit_bytes): Body<Option<u64>>,
) -> Answer<Json<VmFigures>> {
    vm.ask(|to| Command::PilotLimit(limit_bytes, to)).await?;
    vm.newest()
}

async fn pilot_compressed(
    State(vm): VmState,
    Body(bytes): Body<Option<u64>>,
) -> Answer<Json<VmFigures>> {
    vm.ask(|to| Command::PilotCompressed(bytes, to)).await?;
    vm.newest()
}

async fn pilot_plugged(
    State(vm): VmState,
    Body(request): Body<PlugRequest>,
) -> Answer<Json<VmFigures>> {
    vm.ask(|to| Command::PilotPlugged(request, to)).await?;
    vm.newest()
}

async fn hear_of_host(State(vm): VmState, Body(notice): Body<PressureNotice>) -> Answer<Json<u64>> {
    vm.ask(|to| Command::HostPressure(notice, to)).await.map(Json)
}

async fn figures(State(vm): VmState, Asked(Since { after, watch }): Asked<Since>) -> Response {
    (vm.watching)(watch);
    let mut changes = vm.latest.clone();
    let began = Instant::now();
    loop {
        let latest = changes.borrow_and_update().clone();
        if let Some(latest) = latest.filter(|latest| latest.figures.number > after) {
            let mut figures = latest.figures.clone();
            figures.status.age_ms = millis(latest.at.elapsed());
            return Json(figures).into_response();
        }
        let left = FIGURES_PATIENCE.saturating_sub(began.elapsed());
        match timeout(left, changes.changed()).await {
            Ok(Ok(())) => {}
            // There are no new figures, or there will be none.
            _ => return StatusCode::NO_CONTENT.into_response(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use ebb_api::ErrorCode;

    use super::*;
    use crate::rest::testing::Served;
    use crate::vm::context::mailbox::Mailbox;
    use crate::vm::publisher::Publisher;

    const SOON: Duration = Duration::from_millis(1);

    /// A VM whose worker makes this progress. Its mailbox has no reader.
    fn vm(progress: impl Fn() -> u64 + Send + Sync + 'static) -> Vm {
        let name = "web".parse().expect("a name");
        let commands = Mailbox::new().0.inlet();
        let detaching: Detaching = Box::new(|| None);
        let watching: Watching = Box::new(|_| ());
        let (progress, latest) = (Box::new(progress), Publisher::new().1);
        let (works, counting) = (Works::default(), Arc::default());
        Vm { name, commands, progress, detaching, watching, latest, works, counting }
    }

    #[tokio::test]
    async fn every_refusal_has_one_shape() {
        let served = Served::new(router(vm(|| 0)));
        for (line, body, code) in [
            ("GET /v1/nothing", "", ErrorCode::UnknownRoute),
            ("POST /v1/vms/web/limit", "", ErrorCode::WrongMethod),
            ("PUT /v1/vms/web/limit", r#"{"bytes": -1}"#, ErrorCode::BadRequest),
            ("GET /v1/vms/web?counts=maybe", "", ErrorCode::BadRequest),
            ("POST /v1/vms/web/reclaim", "{}", ErrorCode::VmOver),
        ] {
            let (status, refused) = served.refused(line, body).await;
            assert_eq!((status, refused.code), (code.status(), Some(code)), "{line}: {refused:?}");
        }
    }

    #[tokio::test]
    async fn a_status_during_a_detach_tells_what_is_left() {
        let (mut publisher, latest) = Publisher::new();
        let text = include_str!("../../../ebb/tests/cli/status.json");
        publisher.publish(serde_json::from_str(text).expect("a status"), None, None, None);
        let left = YetToReturn { saved_bytes: 7 << 20, on_disk_bytes: 5 << 20 };
        let vm = Vm { detaching: Box::new(move || Some(left)), latest, ..vm(|| 0) };
        let query = Asked(StatusQuery { counts: true });
        let Json(status) = show(State(Arc::new(vm)), query).await.expect("a status");
        assert_eq!((status.limit.saved_bytes, status.limit.on_disk_bytes), (7 << 20, 5 << 20));
        assert!(status.state_reason.is_some_and(|why| why.contains("being detached")));
    }

    #[tokio::test]
    async fn a_worker_that_hangs_is_reported_with_what_to_do() {
        let (_never, answer) = oneshot::channel::<Answer<()>>();
        let why = vm(|| 7).wait(answer, SOON).await.expect_err("it hangs").to_string();
        assert!(why.contains("no progress") && why.contains("kill -9 "), "{why}");
        assert!(!why.contains('\n') && !why.contains("  "), "{why}");
    }

    #[tokio::test]
    async fn a_worker_that_makes_progress_is_waited_for() {
        let (to, answer) = oneshot::channel();
        let (to, count) = (Mutex::new(Some(to)), Mutex::new(0));
        let works = move || {
            let mut count = count.lock().expect("no thread has died");
            *count += 1;
            if *count > u64::from(2 * LOOKS_MOST) {
                let to = to.lock().expect("no thread has died").take();
                to.into_iter().for_each(|to| to.send(Ok(5)).expect("somebody waits"));
            }
            *count
        };
        assert_eq!(vm(works).wait(answer, SOON).await.expect("an answer"), 5);
    }
}
