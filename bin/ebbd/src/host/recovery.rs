//! Recovers the VMs that a daemon before this one managed, and has VMs served in threads of their own.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use ebb_api::VmName;
use ebb_sys::private_dir;

use super::registry::Daemon;
use super::supervisor::Supervisor;
use crate::model::api_error::{Answer, failed};
use crate::model::record::Record;
use crate::vm::context::VmContext;
use crate::vm::context::mailbox::Command;
use crate::vm::detach;
use crate::vm::listing::{Listing, Stage};
use crate::vm::worker::Ready;

/// Begins to recover every VM that a daemon before this one managed, each in a thread of its
/// own, and clears away what VMs that ended since have left.
///
/// # Errors
/// As reading the run directory.
pub fn recover_all(daemon: &Daemon) -> io::Result<()> {
    let vms = daemon.run_dir().join("vms");
    private_dir::make(&vms).map_err(io::Error::other)?;
    let (mut all, mut without) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(vms)? {
        let directory = entry?.path();
        let named = directory.file_name().and_then(|name| name.to_str()?.parse().ok());
        let Some(name) = named else { continue };
        let listing = match Record::load(&directory) {
            Ok(Some(record)) => Some(Arc::new(Listing::new(&record, Stage::TakingUp))),
            Ok(None) => {
                without.push((name, directory));
                continue;
            }
            Err(error) => {
                tracing::error!("{}: its record: {error}", directory.display());
                None
            }
        };
        daemon.vms().insert(VmName::clone(&name), listing);
        all.push((name, directory));
    }
    *daemon.left() = all;
    recover_left(daemon);
    clear_later(daemon, without);
    Ok(())
}

/// Clears away what VMs left that are on no record. It may take long, so no guest waits for it;
/// a VM that is started or attached does.
fn clear_later(daemon: &Daemon, without: Vec<(VmName, PathBuf)>) {
    if without.is_empty() {
        return;
    }
    let of = daemon.clone();
    let clear = move || without.iter().for_each(|(name, at)| of.clear_away(name, at));
    match thread::Builder::new().name("clearing".into()).spawn(clear) {
        Ok(thread) => *daemon.clearing() = Some(thread),
        Err(error) => tracing::error!("no thread to clear away what VMs left: {error}"),
    }
}

/// Begins to recover those for which there was no thread before.
pub fn recover_left(daemon: &Daemon) {
    let all = std::mem::take(&mut *daemon.left());
    for (name, directory) in all {
        let supervisor =
            Supervisor { name: name.clone(), directory: directory.clone(), daemon: daemon.clone() };
        let thread = thread::Builder::new().name(format!("vm {name}"));
        if let Err(error) = thread.spawn(move || supervisor.run(None)) {
            tracing::error!("{name}: no thread to recover it: {error}");
            daemon.left().push((name, directory));
        }
    }
}

/// Has a VM served that was just attached. Its thread is there before its service is.
///
/// # Errors
/// Threads cannot be made; the VM is as it was then.
pub fn serve(daemon: &Daemon, name: VmName, managed: (VmContext, Receiver<Command>)) -> Answer<()> {
    let (give, take) = channel();
    let directory = managed.0.record.directory().to_owned();
    let supervisor = Supervisor { name: name.clone(), directory, daemon: daemon.clone() };
    let run = move || take.recv().map_or((), |ready| supervisor.run(Some(ready)));
    let ready = match thread::Builder::new().name(format!("vm {name}")).spawn(run) {
        Ok(_) => Ready::new(managed),
        Err(error) => Err((error, Box::new(managed.0))),
    };
    let ready = ready.map_err(|(error, context)| {
        detach::undo(*context);
        failed("the VM's threads")(error)
    })?;
    let listing = Arc::new(Listing::new(ready.record(), Stage::Held(ready.commands())));
    daemon.vms().insert(name, Some(Arc::clone(&listing)));
    // It waits for nothing else.
    let _ = give.send((ready, listing));
    Ok(())
}
