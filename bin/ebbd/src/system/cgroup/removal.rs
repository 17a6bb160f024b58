//! The removal of control groups: at once, later, or by another process of `ebbd`.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread::{self, sleep};
use std::time::Duration;

use ebb_api::VmName;
use ebb_sys::process::{Process, is_gone};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;

use super::QEMU;
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

/// Removes the control group of a detached QEMU once it has ended, if this process still runs then.
pub fn remove_later(record: &Record, process: io::Result<Process>) {
    let cgroups = record.confinement.iter().flat_map(|confinement| confinement.cgroups.clone());
    // A VM that is started under its name later has other groups.
    let with_inode = |directory: PathBuf| inode(&directory).ok().map(|inode| (directory, inode));
    let groups: Vec<(PathBuf, u64)> = cgroups.filter_map(with_inode).collect();
    let Some(process) = process.ok().filter(|_| !groups.is_empty()) else { return };
    let wait = move || {
        let mut end = [PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN)];
        if retry_on_intr(|| poll(&mut end, None)).is_ok() {
            remove_these(&groups);
        }
    };
    // Without this thread, the next start of a VM or of a daemon removes it.
    drop(thread::Builder::new().name("control group".into()).spawn(wait));
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
            tracing::debug!("{}: removed, it was left", entry.path().display());
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

/// Removes the group of the VM whose QEMU had this group, which is gone. It stays while the VM's
/// process is in it; `ebbd` removes it then.
pub(super) fn remove_above(of_qemu: &Path) {
    if let (true, Some(of_vm)) = (of_qemu.ends_with(QEMU), of_qemu.parent()) {
        let _ = remove_all(of_vm);
    }
}

/// Whether the process may run. One that has ended and that nobody has waited for yet does not.
fn may_run(pid: u32) -> bool {
    match i32::try_from(pid).map(Process::open) {
        Ok(Ok(process)) => !process.has_ended().unwrap_or(false),
        Ok(Err(error)) => !is_gone(&error),
        Err(_) => false,
    }
}

/// Number of the VM's process that made a group with this name.
fn maker(name: &str) -> Option<u32> {
    let (vm, pid) = name.rsplit_once('.')?;
    vm.parse::<VmName>().ok().and_then(|_| pid.parse().ok())
}

/// Inode number of a directory. A directory that is made in its place has another one.
fn inode(directory: &Path) -> io::Result<u64> {
    Ok(fs::metadata(directory)?.ino())
}

/// Removes a control group that is empty.
pub fn remove(directories: &[PathBuf]) {
    directories.iter().for_each(|directory| log_failure(directory, remove_soon(directory, None)));
}

/// As [`remove`], but leaves directories that were made anew and have other inode numbers.
fn remove_these(groups: &[(PathBuf, u64)]) {
    groups.iter().for_each(|(directory, number)| {
        log_failure(directory, remove_soon(directory, Some(*number)));
    });
}

fn log_failure(directory: &Path, removed: io::Result<()>) {
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!("control group {}: {error}", directory.display());
        }
        _ => {}
    }
}

/// Removes a control group. With a `number`, only the directory that has this inode number.
fn remove_soon(directory: &Path, number: Option<u64>) -> io::Result<()> {
    let is_another =
        || -> io::Result<bool> { Ok(number.is_some() && number != Some(inode(directory)?)) };
    while_busy(
        || true,
        || match is_another()? {
            true => Ok(()),
            false => fs::remove_dir(directory).map(|()| remove_above(directory)),
        },
    )
}

/// Removes something, and tries again for a while as long as it is busy and `may_end`: a process
/// counts as in its group for a moment after its end was told.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_that_was_made_anew_stays() {
        let parent = tempfile::tempdir().unwrap();
        let group = parent.path().join("web.1");
        fs::create_dir(&group).unwrap();
        let known = [(group.clone(), inode(&group).unwrap())];
        // Otherwise its inode number may be free for the new one.
        fs::rename(&group, parent.path().join("before")).unwrap();
        fs::create_dir(&group).unwrap();
        remove_these(&known);
        assert!(group.exists());
        remove_these(&[(group.clone(), inode(&group).unwrap())]);
        assert!(!group.exists());
    }
}
