//! Doing what a job is to do.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::http::Method;
use ebb_api::{ApiErrorBody, HeatReport, HeatRequest, JobProgress, JobUnit, VmName, route};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::sleep;

use super::report::{End, Report};
use super::silence::Silence;
use super::what::What;
use super::{Doing, resize, work};
use crate::host::apart::apart;
use crate::host::asking;
use crate::host::link::Reply;
use crate::host::listing::Listing;
use crate::host::registry::Daemon;
use crate::model::api_error::{Answer, ApiError, failed};

/// Time between two looks at something that a VM's worker does beside its other work.
pub const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Does a job, in its turn among those of its VM, or of the host.
pub async fn run(daemon: Daemon, vm: Option<(VmName, Arc<Listing>)>, what: What, mut doing: Doing) {
    let end = turn(&daemon, vm.as_ref(), what, &doing).await;
    doing.end = Some(end.unwrap_or_else(End::refused));
}

async fn turn(
    daemon: &Daemon,
    vm: Option<&(VmName, Arc<Listing>)>,
    what: What,
    doing: &Doing,
) -> Result<End, Refused> {
    let turn = tokio::select! {
        biased;
        () = doing.cancelled() => return Ok(not_begun()),
        turn = doing.jobs.lane(vm.map(|(name, _)| name)).lock_owned() => turn,
    };
    if !doing.start() {
        return Ok(not_begun());
    }
    let Some((name, listing)) = vm else { return host(daemon, &what).await };
    let vm = Of { daemon, name, listing, doing };
    match what {
        What::Reclaim(request) => {
            let bytes = to_bytes(&request)?;
            let done = work::follow(&vm, Method::POST, route::RECLAIM, bytes).await?;
            Ok(End::reclaimed(read(&done)?))
        }
        What::Evict(request) => {
            let bytes = to_bytes(&request)?;
            let done = work::follow(&vm, Method::POST, route::EVICT, bytes).await?;
            Ok(End::evicted(read(&done)?))
        }
        What::Detach => {
            asking::note_detach(daemon, name).await;
            let done = work::follow(&vm, Method::DELETE, route::VM, Bytes::new()).await?;
            asking::await_end(daemon, name).await;
            Ok(End::detached(read(&done)?))
        }
        What::Resize(request) => resize::run(&vm, request, turn).await,
        What::Heat(request) => heat(&vm, request, turn).await,
        What::Calibrate => Err(ApiError::Failed("a VM cannot be measured".into()).into()),
    }
}

/// Why a job was refused, or has failed.
pub struct Refused(ApiErrorBody);

impl From<ApiError> for Refused {
    fn from(why: ApiError) -> Refused {
        Refused(why.into())
    }
}

impl From<Refused> for ApiErrorBody {
    fn from(Refused(why): Refused) -> ApiErrorBody {
        why
    }
}

/// A VM that a job is about.
pub struct Of<'a> {
    pub daemon: &'a Daemon,
    pub name: &'a VmName,
    /// What is known of it: a later VM of the same name has another one.
    pub listing: &'a Arc<Listing>,
    pub doing: &'a Doing,
}

impl Of<'_> {
    /// Sends a request to the VM's process, and returns what it answers.
    pub async fn ask<A: DeserializeOwned>(
        &self,
        method: Method,
        route: &str,
        body: Bytes,
    ) -> Result<A, Refused> {
        let uri = route::of_vm(route, self.name);
        let of = (self.name, self.listing);
        let reply = asking::ask_of(self.daemon, of, method, &uri, body).await?;
        read(&succeeded(reply)?)
    }

    /// Looks a while later how far something is.
    pub async fn look<A: DeserializeOwned>(&self, route: &str) -> Result<A, Refused> {
        sleep(LOOK_EVERY).await;
        self.ask(Method::GET, route, Bytes::new()).await
    }
}

/// The answer, unless it is a refusal.
pub fn succeeded(reply: Reply) -> Result<Reply, Refused> {
    match reply.status.is_success() {
        true => Ok(reply),
        false => Err(Refused(reply.refusal())),
    }
}

fn read<T: DeserializeOwned>(reply: &Reply) -> Result<T, Refused> {
    Ok(reply.read().map_err(failed("the VM's answer"))?)
}

/// A request's body.
pub fn to_bytes(request: &impl Serialize) -> Answer<Bytes> {
    serde_json::to_vec(request).map(Bytes::from).map_err(failed("the daemon"))
}

fn not_begun() -> End {
    End::cancelled("nothing was done", Report::Nothing)
}

async fn host(daemon: &Daemon, what: &What) -> Result<End, Refused> {
    match what {
        What::Calibrate => {
            let daemon = daemon.clone();
            let measured = apart(move || daemon.calibrate()).await;
            measured.map_err(failed("the daemon"))??;
            Ok(End::done("measured: ebb calibrate's figures are on record"))
        }
        _ => Err(ApiError::Failed("it is about no VM".into()).into()),
    }
}

/// Begins a monitoring, and waits for its end. The worker looks beside its other work, so other jobs
/// have their turn meanwhile.
async fn heat<T>(vm: &Of<'_>, request: HeatRequest, turn: T) -> Result<End, Refused> {
    let began = Instant::now();
    let mut report: HeatReport = vm.ask(Method::POST, route::HEAT, to_bytes(&request)?).await?;
    drop(turn);
    let mut silence = Silence::default();
    while report.monitoring {
        let (done, total) = (report.windows_done.into(), Some(report.windows.into()));
        vm.doing.note(JobProgress { done, total, unit: JobUnit::Windows });
        let next = tokio::select! {
            () = vm.doing.cancelled() => {
                let text = "the monitoring goes on to its end, and nobody waits for it";
                return Ok(End::cancelled(text, Report::Nothing));
            }
            next = vm.look(route::HEAT) => next.map_err(ApiErrorBody::from),
        };
        report = match next {
            Ok(next) => next,
            Err(why) if silence.bears(&why) => continue,
            Err(why) => return Ok(End::refused(why)),
        };
        silence.end();
    }
    // The next process of a VM knows nothing of a monitoring.
    let is_recent = |age_s| age_s <= began.elapsed().as_secs();
    let is_found = report.figures.as_ref().is_some_and(|found| is_recent(found.age_s));
    match report.failed {
        None if !is_found => Err(ApiError::Failed(format!(
            "{} was not monitored: its process was recovered meanwhile",
            vm.name
        ))
        .into()),
        Some(why) => Err(ApiError::Failed(format!("{} was not monitored: {why}", vm.name)).into()),
        None => Ok(End::done("monitored: ebb heat shows what is hot")),
    }
}
