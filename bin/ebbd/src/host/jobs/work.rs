//! A request that keeps a VM's worker busy: how far it is, and cancelling it.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::Method;
use ebb_api::{JobProgress, JobUnit, route};
use tokio::time::{sleep, timeout};

use super::run::{Of, Refused, succeeded};
use crate::host::asking;
use crate::host::link::{self, Reply};
use crate::model::site::api_socket;
use crate::model::vm_routes::WORK;
use crate::model::work::WorkProgress;

/// Time between two looks. The VM's process answers from what its worker has counted anyway.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Longest wait for a word about the progress.
const PATIENCE: Duration = Duration::from_secs(1);

/// Sends the request, and returns its answer. Meanwhile notes the progress, and passes a cancel on to
/// the VM's process.
pub async fn follow(
    vm: &Of<'_>,
    method: Method,
    route: &str,
    body: Bytes,
) -> Result<Reply, Refused> {
    let uri = format!("{}?work={}", route::of_vm(route, vm.name), vm.doing.id);
    let asking = asking::ask_of(vm.daemon, (vm.name, vm.listing), method, &uri, body);
    tokio::select! {
        reply = asking => succeeded(reply?),
        never = attend(vm) => match never {},
    }
}

/// Asks for the progress of the request again and again, until it is dropped.
async fn attend(vm: &Of<'_>) -> Infallible {
    let mut is_told = false;
    loop {
        tokio::select! {
            () = sleep(LOOK_EVERY) => {}
            () = vm.doing.cancelled(), if !vm.doing.is_cancelled() => {}
        }
        // The request may not have come yet, or the next process is about to get it.
        if vm.doing.is_cancelled() && !is_told {
            is_told = ask(vm, Method::DELETE).await.is_some();
        }
        let progress = ask(vm, Method::GET).await.and_then(|reply| reply.read().ok());
        if let Some(WorkProgress { done_bytes, total_bytes }) = progress {
            let unit = JobUnit::Bytes;
            vm.doing.note(JobProgress { done: done_bytes, total: total_bytes, unit });
        }
    }
}

async fn ask(vm: &Of<'_>, method: Method) -> Option<Reply> {
    let socket = api_socket(&vm.daemon.site().directory(vm.name));
    let uri = WORK.replace("{id}", &vm.doing.id.to_string());
    let asked = timeout(PATIENCE, link::ask(&socket, method, &uri, Bytes::new())).await;
    asked.ok()?.ok().filter(|reply| reply.status.is_success())
}
