//! Jobs: requests with `job=true`, and what becomes of them.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, FromRequest, MatchedPath, Request, State};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use ebb_api::{Job, ResizeRequest, VmName, route};
use serde::de::DeserializeOwned;

use super::extract::{Body, Numbered};
use super::tcp::Client;
use crate::host::events::Asker;
use crate::host::jobs::{self, What};
use crate::host::registry::Daemon;
use crate::model::api_error::{Answer, ApiError};

type DaemonState = State<Arc<Daemon>>;

/// All jobs that are known. No VM is asked.
pub async fn list(State(daemon): DaemonState) -> Json<Vec<Job>> {
    Json(daemon.jobs().list())
}

/// One job.
pub async fn show(State(daemon): DaemonState, Numbered(id): Numbered) -> Answer<Json<Job>> {
    daemon.jobs().get(id).map(Json)
}

/// Has a job end after its present step.
pub async fn cancel(State(daemon): DaemonState, Numbered(id): Numbered) -> Answer<Json<Job>> {
    daemon.jobs().cancel(id).map(Json)
}

/// Begins what a request about a VM asks for, as a job.
pub async fn begin_of_vm(daemon: &Daemon, name: VmName, request: Request) -> Answer<Response> {
    let asker = asker(request.extensions().get::<Client>());
    let what = asked(request).await?;
    accepted(jobs::begin(daemon, Some(name), what, asker)?)
}

/// Begins to measure the host's tiers, as a job.
pub fn begin_to_calibrate(daemon: &Daemon, afar: Option<&Extension<Client>>) -> Answer<Response> {
    let asker = asker(afar.map(|Extension(client)| client));
    accepted(jobs::begin(daemon, None, What::Calibrate, asker)?)
}

fn asker(afar: Option<&Client>) -> Asker {
    if afar.is_some() { Asker::Afar } else { Asker::Host }
}

fn accepted(job: Job) -> Answer<Response> {
    Ok((StatusCode::ACCEPTED, Json(job)).into_response())
}

/// What a request is about. It is refused at once if it makes no sense.
async fn asked(request: Request) -> Answer<What> {
    let matched = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let (method, path) = (request.method().clone(), matched.unwrap_or_default());
    Ok(match (method, path.as_str()) {
        (Method::POST, route::RECLAIM) => What::Reclaim(read(request).await?),
        (Method::POST, route::EVICT) => What::Evict(read(request).await?),
        (Method::POST, route::HEAT) => What::Heat(read(request).await?),
        (Method::PUT, route::SIZE) => {
            let asked: ResizeRequest = read(request).await?;
            asked.check()?;
            What::Resize(asked)
        }
        (Method::DELETE, route::VM) => What::Detach,
        (method, path) => {
            return Err(ApiError::Malformed(format!(
                "{method} {path} is never a job: leave out job=true"
            )));
        }
    })
}

async fn read<T: DeserializeOwned>(request: Request) -> Answer<T> {
    let Body(asked) = Body::from_request(request, &()).await?;
    Ok(asked)
}
