//! Tells of commands that were refused or have failed, among the events.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use ebb_api::{ApiErrorBody, ErrorCode, RefusalFigures, VmName, route};

use crate::host::events::News;
use crate::host::registry::Daemon;
use crate::model::api_error::Answer;

/// What stands before a VM's name in a path.
const VMS: &str = "/v1/vms/";

/// The VM that a request is about, where its path does not say it.
#[derive(Clone)]
struct About(VmName);

/// The answer to a request that is about this VM.
pub fn about(name: &VmName, answer: Answer<Response>) -> Response {
    let mut response = answer.into_response();
    response.extensions_mut().insert(About(name.clone()));
    response
}

/// Answers a request. If it was a command and is refused, that is an event.
pub async fn publish(State(daemon): State<Arc<Daemon>>, request: Request, next: Next) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let response = next.run(request).await;
    let is_command = ![Method::GET, Method::HEAD, Method::OPTIONS].contains(&method);
    if let Some(refusal) = response.extensions().get::<ApiErrorBody>().filter(|_| is_command) {
        let about = response.extensions().get::<About>().map(|About(name)| name.clone());
        let vm = about.or_else(|| of_path(&path));
        let code = refusal.code.unwrap_or(ErrorCode::Failed);
        let error = refusal.error.clone();
        let refusal = RefusalFigures { method: method.to_string(), path, code, error };
        daemon.events().publish(vm.as_ref(), News::Refusal(refusal));
    }
    response
}

/// The VM that the path names.
fn of_path(path: &str) -> Option<VmName> {
    if [route::RUN, route::ATTACH].contains(&path) {
        return None;
    }
    path.strip_prefix(VMS)?.split('/').next()?.parse().ok()
}
