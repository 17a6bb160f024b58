//! Finds the VMs that an earlier daemon managed. VMs whose processes ended are recovered; those
//! whose processes run go on.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ebb_api::{VmChange, VmName};
use ebb_sys::private_dir;
use tokio::time::sleep;

use super::apart::apart_or_log;
use super::events::News;
use super::listing::{Listing, Stage};
use super::registry::Daemon;
use super::supervisor::Supervisor;
use super::vm_process::VmProcess;
use crate::model::record::Record;

const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Begins with every VM that an earlier daemon managed, and clears away what VMs that ended since
/// have left.
///
/// # Errors
/// Those of reading the run directory.
pub fn recover_all(daemon: &Daemon) -> io::Result<()> {
    let vms = daemon.site().vms();
    private_dir::make(&vms).map_err(io::Error::other)?;
    let (mut names, mut without) = (BTreeSet::new(), Vec::new());
    for entry in fs::read_dir(vms)? {
        let directory = entry?.path();
        let named = directory.file_name().and_then(|name| name.to_str()?.parse().ok());
        let Some(name) = named else { continue };
        let (name, mut stale): (VmName, Option<PathBuf>) = (name, None);
        let listing = match Record::load(&directory) {
            Ok(Some(record)) => {
                let is_stale = record.settings != daemon.site().settings;
                stale = is_stale.then(|| record.swap.clone());
                let stage = Stage::Recovering;
                Some(Arc::new(Listing::new(&name, &record, stage, daemon.events())))
            }
            Ok(None) => match running(&name, &directory) {
                Some(process) => {
                    names.insert(name.clone());
                    await_start(daemon, name, directory, process);
                    continue;
                }
                None => {
                    without.push((name, directory));
                    continue;
                }
            },
            Err(error) => {
                tracing::error!("{}: its record: {error}", directory.display());
                None
            }
        };
        names.insert(name.clone());
        daemon.vms().insert(name.clone(), listing);
        let supervisor = Supervisor::of(daemon, name.clone());
        match (running(&name, &directory), stale) {
            (Some(process), Some(swap)) if process.shares_swap(&swap) => {
                tracing::info!(
                    "{name}: this daemon has other options: the VM's process restarts with them"
                );
                process.kill();
                supervisor.begin_after(process);
            }
            (process, stale) => {
                if let (Some(_), Some(swap)) = (&process, stale) {
                    tracing::error!(
                        "{name}: its process goes on with the old options: the swap file {} was \
                         removed, renamed or replaced, and it alone may have it; put the file \
                         back, and restart ebbd",
                        swap.display()
                    );
                }
                supervisor.begin(process);
            }
        }
    }
    daemon.keep_slots(|name| names.iter().any(|known| known.as_str() == name));
    clear_later(daemon, without);
    Ok(())
}

/// The VM's process, if an earlier daemon started it and it has not ended.
fn running(name: &VmName, directory: &std::path::Path) -> Option<VmProcess> {
    VmProcess::running(directory).unwrap_or_else(|error| {
        tracing::error!("{name}: {error}");
        None
    })
}

/// Lets a process go on that is starting or attaching a VM: then the VM is managed, or nothing is
/// left of it.
fn await_start(daemon: &Daemon, name: VmName, directory: PathBuf, process: VmProcess) {
    daemon.vms().insert(name.clone(), None);
    let daemon = daemon.clone();
    tokio::spawn(async move {
        loop {
            let is_on_record = !matches!(Record::load(&directory), Ok(None));
            if is_on_record {
                daemon.events().publish(Some(&name), News::State(VmChange::Managed, None));
                return Supervisor::of(&daemon, name).begin(Some(process));
            }
            if process.has_ended().unwrap_or(false) {
                break;
            }
            sleep(LOOK_EVERY).await;
        }
        // If it put a record in place before it ended, the VM is recovered.
        if !matches!(Record::load(&directory), Ok(None)) {
            return Supervisor::of(&daemon, name).begin(None);
        }
        let of = name.clone();
        apart_or_log(&name, move || daemon.forget(&of, &directory, None)).await;
    });
}

/// Clears away what VMs left that are on no record. It may take long, so no guest waits for it;
/// only a VM that is started or attached does.
fn clear_later(daemon: &Daemon, without: Vec<(VmName, PathBuf)>) {
    if without.is_empty() {
        return;
    }
    let of = daemon.clone();
    let clear = move || without.iter().for_each(|(name, at)| of.clear_away(name, at));
    match thread::Builder::new().name("clearing".into()).spawn(clear) {
        Ok(thread) => *daemon.clearing() = Some(thread),
        Err(error) => tracing::error!("no thread to remove what ended VMs left: {error}"),
    }
}
