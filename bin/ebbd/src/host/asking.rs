//! Sends a request to a VM's process and waits for its answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Bytes, to_bytes};
use axum::extract::Request;
use axum::http::{Method, Uri};
use axum::response::{IntoResponse, Response};
use ebb_api::{State as ApiState, VmName, route};
use http_body_util::LengthLimitError;
use tokio::time::{sleep, timeout};

use super::apart::apart;
use super::link::{self, LinkError, Reply};
use super::listing::Listing;
use super::registry::Daemon;
use crate::model::api_error::{Answer, ApiError, not_allowed};
use crate::model::site::api_socket;

/// Longest wait for a process that is recovering the VM, or that does not answer.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// A process without a sign of life for this long is stopped or hangs. Usually one comes every 5 s.
const SIGN_LIMIT: Duration = Duration::from_secs(30);
/// Longest wait for a status, before the last figures are shown instead.
const STATUS_PATIENCE: Duration = Duration::from_secs(15);
const BODY_MOST_BYTES: usize = 2 << 20;
/// What a client may ask a VM's process for in the query. The rest is between `ebbd` and the process.
const FORWARDED: &str = "counts";

/// Forwards a request to the VM's process.
///
/// # Errors
/// There is no such VM, it is not managed now, or its process does not answer.
pub async fn forward(daemon: &Daemon, name: &VmName, request: Request) -> Answer<Reply> {
    let (method, uri, body) = parts(request).await?;
    ask(daemon, name, method, &uri, body).await
}

/// Sends a request of `ebbd` itself to the VM's process.
///
/// # Errors
/// Those of [`forward`].
pub async fn ask(
    daemon: &Daemon,
    name: &VmName,
    method: Method,
    uri: &str,
    body: Bytes,
) -> Answer<Reply> {
    let listing = daemon.listed(name).ok_or_else(|| daemon.unknown(name))?;
    ask_of(daemon, (name, &listing), method, uri, body).await
}

/// Sends a request to the process of this VM, and not to that of a later VM of the same name, which
/// has another listing.
///
/// # Errors
/// Those of [`forward`], or another VM has the name.
pub async fn ask_of(
    daemon: &Daemon,
    (name, of): (&VmName, &Arc<Listing>),
    method: Method,
    uri: &str,
    body: Bytes,
) -> Answer<Reply> {
    let (socket, deadline) =
        (api_socket(&daemon.site().directory(name)), Instant::now() + PATIENCE);
    loop {
        let listing = daemon.listed(name).ok_or_else(|| daemon.unknown(name))?;
        if !Arc::ptr_eq(&listing, of) {
            return Err(not_allowed(format!("{name} has ended, and another VM has its name now")));
        }
        match listing.reach() {
            Ok(()) => match asked(&listing, link::ask(&socket, method.clone(), uri, body.clone()))
                .await?
            {
                Ok(reply) => return Ok(reply),
                // The next process is about to listen there.
                Err(LinkError::Unreachable(_)) if Instant::now() < deadline => {}
                Err(error) => return Err(lost(daemon, name, &error)),
            },
            Err(_) if is_coming(&listing, deadline) => {}
            Err(refused) => return Err(refused),
        }
        sleep(LOOK_EVERY).await;
    }
}

/// Waits for the answer as long as the process shows signs of life.
async fn asked<T>(listing: &Listing, asking: impl Future<Output = T>) -> Answer<T> {
    let silent = async {
        while listing.heard() < SIGN_LIMIT {
            sleep(Duration::from_secs(1)).await;
        }
    };
    tokio::select! {
        answer = asking => Ok(answer),
        () = silent => Err(ApiError::OutcomeUnknown(format!(
            "its process has not answered for {} s: it is stopped, or hangs; once it goes on, \
             ebb status shows whether this was done",
            listing.heard().as_secs()
        ))),
    }
}

fn lost(daemon: &Daemon, name: &VmName, error: &LinkError) -> ApiError {
    match daemon.listed(name) {
        None => daemon.unknown(name),
        Some(_) if matches!(error, LinkError::TooLong) => {
            ApiError::Failed(format!("{name}: {error}"))
        }
        Some(_) if matches!(error, LinkError::Unreachable(_)) => ApiError::Unavailable(format!(
            "{name}: {error}; nothing was done: try again in a while"
        )),
        Some(_) => ApiError::OutcomeUnknown(format!(
            "{name}: {error}; it is recovered now: ebb status {name} shows what was done"
        )),
    }
}

fn is_coming(listing: &Listing, deadline: Instant) -> bool {
    listing.summary().state == ApiState::Recovering && Instant::now() < deadline
}

async fn parts(request: Request) -> Answer<(Method, String, Bytes)> {
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, BODY_MOST_BYTES).await;
    let body = body.map_err(|error| match error.into_inner().is::<LengthLimitError>() {
        true => ApiError::TooLarge(BODY_MOST_BYTES),
        false => ApiError::Malformed("the request's body does not come".into()),
    })?;
    Ok((parts.method, forwarded(&parts.uri), body))
}

/// The path, with what may be forwarded of the query.
fn forwarded(uri: &Uri) -> String {
    let is_forwarded = |pair: &&str| pair.split('=').next() == Some(FORWARDED);
    let pair = uri.query().and_then(|query| query.split('&').find(is_forwarded));
    pair.map_or_else(|| uri.path().to_owned(), |pair| format!("{}?{pair}", uri.path()))
}

/// Status of a VM that was just started.
///
/// # Errors
/// Those of [`forward`].
pub async fn current(daemon: &Daemon, name: &VmName) -> Answer<Response> {
    let uri = route::of_vm(route::VM, name);
    ask(daemon, name, Method::GET, &uri, Bytes::new()).await.map(IntoResponse::into_response)
}

/// Status of a VM: the current one, or the last one if its process is slow to answer.
///
/// # Errors
/// Those of [`forward`].
pub async fn show(daemon: &Daemon, name: &VmName, request: Request) -> Answer<Response> {
    let listing: Arc<Listing> = daemon.listed(name).ok_or_else(|| daemon.unknown(name))?;
    match timeout(STATUS_PATIENCE, forward(daemon, name, request)).await {
        Ok(Ok(reply)) if !reply.status.is_server_error() => Ok(reply.into_response()),
        _ => listing.status().map(|status| axum::Json(status).into_response()),
    }
}

/// Detaches a VM, and waits until the daemon has forgotten it.
///
/// # Errors
/// Those of [`forward`].
pub async fn detach(daemon: &Daemon, name: &VmName, request: Request) -> Answer<Response> {
    note_detach(daemon, name).await;
    let reply = forward(daemon, name, request).await?;
    if reply.status.is_success() {
        await_end(daemon, name).await;
    }
    Ok(reply.into_response())
}

/// Notes that an operator detaches a VM, before its process is asked: `ebbd` may end before that
/// process is done, and the pilot of the next one must not attach the VM again. The note does no harm
/// to a VM that stays managed.
pub async fn note_detach(daemon: &Daemon, name: &VmName) {
    let Some(listing) = daemon.listed(name) else { return };
    let (daemon, pid) = (daemon.clone(), listing.summary().pid);
    let noted = apart(move || daemon.pilot_record().leave(pid)).await;
    if let Err(error) | Ok(Err(error)) = noted {
        tracing::warn!("{name}: the pilot may attach it again: its record: {error}");
    }
}

/// Waits until the daemon has forgotten a VM that is detached.
pub async fn await_end(daemon: &Daemon, name: &VmName) {
    let deadline = Instant::now() + PATIENCE;
    while daemon.is_known(name) && Instant::now() < deadline {
        sleep(LOOK_EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_does_not_speak_for_the_daemon() {
        for (asked, sent) in [
            ("/v1/vms/web", "/v1/vms/web"),
            ("/v1/vms/web?counts=true", "/v1/vms/web?counts=true"),
            ("/v1/vms/web?work=7&counts=true", "/v1/vms/web?counts=true"),
            ("/v1/vms/web/reclaim?work=7", "/v1/vms/web/reclaim"),
            ("/v1/vms/web/reclaim?w%6frk=7&=&", "/v1/vms/web/reclaim"),
        ] {
            assert_eq!(forwarded(&Uri::from_static(asked)), sent);
        }
    }
}
