//! The removal of control groups: at once, or when the next daemon or VM starts.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use ebb_api::VmName;
use ebb_sys::process::{Process, is_no_process};

use super::hierarchy::QEMU;
use super::processes::{end_members_if, members};
use super::service::SERVICE;
use crate::model::record::Record;

/// Most further tries to remove a group, with a pause of `TRY_EVERY` before each.
const TRIES: u32 = 10;
const TRY_EVERY: Duration = Duration::from_millis(10);

/// Ends what a QEMU that has ended left running, and removes its control group.
pub fn remove_of(record: &Record) {
    if let Some(confinement) = &record.confinement {
        end_members_if(&confinement.cgroups, |uid| uid == confinement.uid);
        remove(&confinement.cgroups);
    }
}

pub(super) fn clear_below(parent: &Path, start: bool) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_left = match name.to_str().and_then(maker) {
            Some(pid) if pid == std::process::id() => start,
            Some(pid) => !may_run(pid),
            None => false,
        };
        if is_left && remove_left(&entry.path()).is_ok() {
            tracing::debug!("{}: removed, no process used it any more", entry.path().display());
        }
    }
}

/// Removes the group of a VM that is left, unless a process is in it.
fn remove_left(of_vm: &Path) -> io::Result<()> {
    let is_empty =
        |below: &str| members(&of_vm.join(below)).map_or(true, |members| members.is_empty());
    let are_empty = || [QEMU, SERVICE, "."].into_iter().all(is_empty);
    while_busy(are_empty, || remove_all(of_vm))
}

/// Removes the group of a VM, with the two in it, unless a process is in one of them.
pub(super) fn remove_all(of_vm: &Path) -> io::Result<()> {
    for below in [QEMU, SERVICE] {
        match fs::remove_dir(of_vm.join(below)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    fs::remove_dir(of_vm)
}

/// Removes the group of the VM whose QEMU had this group, which was removed. It stays while the
/// VM's process is in it; `ebbd` removes it then.
pub(super) fn remove_above(of_qemu: &Path) {
    if let (true, Some(of_vm)) = (of_qemu.ends_with(QEMU), of_qemu.parent()) {
        let _ = remove_all(of_vm);
    }
}

/// Whether the process may run. One that has ended and that nobody has waited for yet does not.
fn may_run(pid: u32) -> bool {
    match i32::try_from(pid).map(Process::open) {
        Ok(Ok(process)) => !process.has_ended().unwrap_or(false),
        Ok(Err(error)) => !is_no_process(&error),
        Err(_) => false,
    }
}

/// Number of the VM's process that made a group with this name.
fn maker(name: &str) -> Option<u32> {
    let (vm, pid) = name.rsplit_once('.')?;
    vm.parse::<VmName>().ok().and_then(|_| pid.parse().ok())
}

/// Removes a control group that is empty.
pub fn remove(directories: &[PathBuf]) {
    directories.iter().for_each(|directory| log_failure(directory, remove_soon(directory)));
}

fn log_failure(directory: &Path, removed: io::Result<()>) {
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!("control group {}: {error}", directory.display());
        }
        _ => {}
    }
}

/// Removes a control group, and that of its VM if no other group is in it.
fn remove_soon(directory: &Path) -> io::Result<()> {
    while_busy(|| true, || fs::remove_dir(directory).map(|()| remove_above(directory)))
}

/// Removes something, and tries again for a while as long as it is busy and `may_end`: a process
/// counts as in its group for a moment after its end was reported.
fn while_busy(may_end: impl Fn() -> bool, remove: impl Fn() -> io::Result<()>) -> io::Result<()> {
    for _ in 0..TRIES {
        match remove() {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && may_end() => {
                sleep(TRY_EVERY);
            }
            removed => return removed,
        }
    }
    remove()
}
