//! Asks a VM's worker, and waits for its answer.

use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use ebb_api::{State as ApiState, VmName, VmStatus};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use super::registry::Daemon;
use crate::model::api_error::{Answer, ApiError};
use crate::vm::context::mailbox::Command;
use crate::vm::listing::Listing;

/// A worker that does not begin with what it is asked by then does something that takes long, or
/// waits for QEMU. One that evicts begins between two steps, each of which writes 16 MiB: seconds,
/// on a slow disk.
pub const PATIENCE: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Puts a question to a VM's worker and waits for its answer: not for ever to be heard, but as
/// long as the answer takes.
pub async fn ask<T>(
    daemon: &Daemon,
    name: &VmName,
    question: impl FnOnce(oneshot::Sender<Answer<T>>) -> Command,
) -> Answer<T> {
    let lost = || daemon.commands(name).err().unwrap_or_else(|| daemon.unknown(name));
    let ((ready, heard), (to, answer)) = (oneshot::channel(), oneshot::channel());
    let commands = taken_up(daemon, name).await?;
    commands.send(Command::Ready(ready)).map_err(|_| lost())?;
    commands.send(question(to)).map_err(|_| lost())?;
    let Ok(heard) = timeout(PATIENCE, heard).await else {
        return Err(ApiError::Unavailable(format!(
            "{name} is busy, or QEMU does not answer: nothing was done, try again in a while"
        )));
    };
    heard.map_err(|_| lost())??;
    answer.await.map_err(|_| lost())?
}

/// Where a VM takes its commands, once it was taken up.
async fn taken_up(daemon: &Daemon, name: &VmName) -> Answer<Sender<Command>> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match daemon.commands(name) {
            Err(ApiError::Unavailable(_)) if is_coming(daemon, name, deadline) => {
                sleep(LOOK_EVERY).await;
            }
            answer => return answer,
        }
    }
}

fn is_coming(daemon: &Daemon, name: &VmName, deadline: Instant) -> bool {
    let state = daemon.listed(name).map(|listing| listing.summary().state);
    state == Some(ApiState::TakingUp) && Instant::now() < deadline
}

/// All that is known of a VM: now, or where it is slow to answer, last.
pub async fn current(
    daemon: &Daemon,
    name: &VmName,
    counts: bool,
    patience: Duration,
) -> Answer<VmStatus> {
    let deadline = Instant::now() + patience;
    while is_coming(daemon, name, deadline) {
        sleep(LOOK_EVERY).await;
    }
    let listing = daemon.listed(name).ok_or_else(|| daemon.unknown(name))?;
    match now(&listing, counts, patience).await {
        Some(status) => Ok(status),
        None => listing.status(),
    }
}

/// What its worker says now; none: it is slow to answer.
pub async fn now(listing: &Listing, counts: bool, patience: Duration) -> Option<VmStatus> {
    let (to, answer) = oneshot::channel();
    listing.commands().ok()?.send(Command::Status(counts, to)).ok()?;
    timeout(patience, answer).await.ok()?.ok()?.ok()
}
