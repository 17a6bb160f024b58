//! Starts VMs, and attaches those that somebody else started, each in a process of its own.

use std::sync::Arc;

use ebb_api::{VmChange, VmName};

use super::apart::{apart, apart_or_log};
use super::events::News;
use super::registry::{Daemon, Reserved};
use super::supervisor::Supervisor;
use super::vm_process::VmProcess;
use crate::model::api_error::{Answer, ApiError, failed};
use crate::model::record::Record;
use crate::model::task::{TaskResult, Work};
use crate::support::life::Life;

/// Has a VM managed.
///
/// # Errors
/// The refusal. Nothing is left behind then.
pub async fn start(daemon: &Arc<Daemon>, name: VmName, work: Work) -> Answer<()> {
    let daemon = Daemon::clone(daemon);
    // The task runs to its end even if the client closes its connection.
    let started = tokio::spawn(async move { begin(&daemon, name, work).await });
    started.await.map_err(failed("the daemon"))?
}

async fn begin(daemon: &Daemon, name: VmName, work: Work) -> Answer<()> {
    let (again, change) = match &work {
        Work::Attach(request) => {
            check_unmanaged(daemon, request.pid)?;
            (true, VmChange::Attached)
        }
        _ => (false, VmChange::Started),
    };
    let (of, asked) = (daemon.clone(), name.clone());
    let reserved = apart(move || of.reserve(&asked, again)).await;
    let mut reserved = reserved.map_err(failed("the daemon"))??;
    reserved.hand_over();
    match VmProcess::start(daemon.task(&name, work), false).await {
        Ok((process, TaskResult::Managed)) => {
            daemon.events().publish(Some(&name), News::State(change, None));
            Supervisor::of(daemon, name).begin(Some(process));
            reserved.keep();
            Ok(())
        }
        Ok((process, result)) => {
            // The process may still be clearing something away.
            process.ended(&name).await;
            end(daemon, name, reserved).await;
            Err(match result {
                TaskResult::Refused(refused) => refused,
                _ => ApiError::Failed("nothing was to be recovered".into()),
            })
        }
        Err(error) => {
            end(daemon, name, reserved).await;
            Err(failed("the VM's process")(error))
        }
    }
}

/// Checks that no VM of this daemon is the process.
///
/// # Errors
/// One is.
fn check_unmanaged(daemon: &Daemon, pid: i32) -> Answer<()> {
    // The number of a VM that has ended may be another process's by now.
    let lives = |name: &VmName| match Record::load(&daemon.site().directory(name)) {
        Ok(Some(record)) => matches!(record.life(), Life::Lives(_)),
        _ => true,
    };
    let listed = daemon.listings();
    let mut of_it = listed.into_iter().filter(|(_, listing)| listing.summary().pid == pid);
    match of_it.find(|(name, _)| lives(name)) {
        Some((name, _)) => {
            Err(ApiError::Taken(format!("process {pid} is managed already, as the VM {name}")))
        }
        None => Ok(()),
    }
}

async fn clear_away(name: &VmName, reserved: Reserved) {
    apart_or_log(name, move || reserved.clear_away()).await;
}

/// Handles the end of a process that did not manage the VM: has the next one recover the VM, or end
/// its detach, if it is on record. Else clears up.
async fn end(daemon: &Daemon, name: VmName, reserved: Reserved) {
    match Record::load(&reserved.directory) {
        Ok(None) => clear_away(&name, reserved).await,
        _ => {
            Supervisor::of(daemon, name).begin(None);
            reserved.keep();
        }
    }
}
