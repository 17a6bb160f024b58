//! Ending the management of a VM, and removing what was kept of it.

use std::io;
use std::path::Path;

use ebb_api::{Mode, VmName};
use ebb_pager::Zeros;
use ebb_sys::process::Process;
use ebb_vm::reach::Reach;

use super::context::{LEAVING, VmContext};
use crate::helpers::injector;
use crate::model::api_error::{Answer, ApiError, not_allowed};
use crate::model::record::Record;
use crate::support::failpoint;
use crate::support::life::Dead;
use crate::system::remains::{forget, remove_swap};
use crate::system::{cgroup, origin, starting};

/// Succeeds if the VM may be detached.
///
/// # Errors
/// Ebb serves devices of the VM, or its record finds no room.
pub fn may_detach(cx: &mut VmContext) -> Answer<()> {
    let (disks, devices) = (&cx.record.disks, &cx.record.growth);
    let served = [("disks", !disks.is_empty()), ("virtio-mem devices", !devices.is_empty())];
    if let Some((what, _)) = served.iter().find(|(_, are_served)| *are_served) {
        return Err(not_allowed(format!(
            "Ebb serves this VM's {what}, so it cannot be detached while it runs: power it off"
        )));
    }
    // The end of the management is put on record once all is back. That write needs no new room,
    // unless this one does.
    match cx.record.change(|_| {}) {
        Err(refused @ ApiError::NoRoom(_)) => Err(refused),
        _ => Ok(()),
    }
}

/// Returns what happens to empty frames that read as zero. Without Ebb, the kernel serves a touch
/// of them. Devices that wait for no fault need them resident.
pub fn zeros(cx: &VmContext) -> Zeros {
    let reaching = &cx.reaching;
    let all_wait = reaching.is_complete && reaching.reach() != Reach::Nothing;
    if cx.record.mode == Mode::Release && all_wait { Zeros::Leave } else { Zeros::Fill }
}

/// Detaches a VM: its faults are not served any more, nothing is watched, and the userfaultfd in
/// the VMM is closed. All of its content must be back. Faults that wait are woken.
///
/// # Errors
/// The VMM cannot be reached, or the record cannot be written: the VM is managed as before. If the
/// userfaultfd cannot be closed, the record has it as `leaving`, and nobody makes room any more.
pub fn detach(cx: &mut VmContext) -> Answer<()> {
    cx.service = None;
    let Err(error) = leave(cx) else { return Ok(()) };
    cx.serve_again();
    if cx.record.leaving.is_some() {
        cx.pager.room().lift();
        return Err(ApiError::Failed(format!("{LEAVING}: {error}")));
    }
    watch_again(cx);
    Err(ApiError::Failed(format!("the VM stays managed, detaching failed: {error}")))
}

/// Watches a VM as before a detach that failed: its record has not changed.
fn watch_again(cx: &mut VmContext) {
    let is_watched = cx.record.mode == Mode::Strict || cx.record.evicts || cx.record.shares;
    if is_watched && let Err(error) = cx.pager.frames().watch_all() {
        tracing::error!("watching its memory: {error}");
    }
    cx.record.note(|_| {});
}

fn leave(cx: &mut VmContext) -> io::Result<()> {
    cx.pager.frames().unwatch_all()?;
    starting::unmark(cx.record.directory())?;
    close_on_record(cx)?;
    remove_detached(&cx.record, cx.record.directory());
    Ok(())
}

/// Closes the userfaultfd in the VMM, if it is there. The record drops it first: a process that
/// finds none on record makes a new one, while QEMU may use the old number for something else.
///
/// If the close fails, the record stays without it: a thread of QEMU's that was sent to close it
/// does so all the same, maybe much later (`docs/decisions/0034-*`).
fn close_on_record(cx: &mut VmContext) -> io::Result<()> {
    let Some(number) = cx.record.leaving.or(cx.record.userfaultfd) else { return Ok(()) };
    let is_there = has_userfaultfd(&cx.process, number)?;
    if cx.record.userfaultfd.is_some() {
        cx.record.try_change(|record| {
            (record.userfaultfd, record.leaving) = (None, Some(number));
        })?;
    }
    if is_there {
        let name = cx.name();
        let closed = failpoint::fails("close", name)
            .and_then(|()| injector::close(&cx.process, number))
            .and_then(|()| failpoint::fails("closed", name));
        if closed.is_err() && !is_closed(cx) {
            return closed;
        }
    }
    Ok(())
}

/// Whether the userfaultfd that the record has as `leaving` is closed in the VMM.
pub fn is_closed(cx: &VmContext) -> bool {
    let is_there = |number| has_userfaultfd(&cx.process, number);
    cx.record.leaving.is_none_or(|number| is_there(number).is_ok_and(|is_there| !is_there))
}

/// Removes what is kept of a VM whose userfaultfd is closed. Its fault thread must have ended. QEMU
/// runs on in its control group: once that is empty, the next start of `ebbd` or of a VM removes it
/// ([`cgroup::clear_left`]).
pub fn remove_detached(record: &Record, directory: &Path) {
    if let Err(error) = origin::keep(record, directory) {
        tracing::warn!("where its console is: {error}");
    }
    // The VM is detached all the same; the message tells what is left behind.
    if let Err(error) = forget_all(record, directory) {
        tracing::error!("its files are not all removed: {error}");
    }
}

/// Removes the control group, record, ledger and swap file of a VM whose VMM has ended.
///
/// # Errors
/// As unlink(2).
pub fn remove_ended(cx: &VmContext, _: &Dead) -> io::Result<()> {
    cgroup::remove_of(&cx.record);
    forget_all(&cx.record, cx.record.directory())
}

/// Leaves a VM as it was that was just attached and cannot be served. All of its memory is still
/// where it was.
pub fn undo(cx: VmContext) {
    if let Err(error) = cx.pager.frames().unwatch_all() {
        tracing::error!("{error}");
    }
    let VmContext { process, pager, restored, qmp, record, disks, growth, service, .. } = cx;
    // Frees descriptors first: they may be what is short, and closing the userfaultfd takes some.
    drop((service, disks, growth, pager, restored, qmp));
    remove_swap(&record);
    give_up(&process, record.clone(), record.directory());
}

/// Closes the userfaultfd in the VMM of a VM that cannot be managed, and removes record and ledger.
/// None of its memory is watched. If the userfaultfd cannot be closed, the record has it as
/// `leaving`, for the next process.
pub fn give_up(process: &Process, mut record: Record, directory: &Path) {
    let number = record.userfaultfd.or(record.making);
    let gone = match number.map_or(Ok(()), |number| close(process, number, &record.name)) {
        Ok(()) => forget(directory),
        Err(error) => {
            tracing::error!("closing the userfaultfd in QEMU: {error}");
            (record.userfaultfd, record.making, record.leaving) = (None, None, number);
            record.save(directory)
        }
    };
    gone.unwrap_or_else(|error| tracing::error!("what was begun for it: {error}"));
}

/// Closes a userfaultfd in the VMM.
fn close(process: &Process, number: i32, name: &VmName) -> io::Result<()> {
    let closed = failpoint::fails("close", name).and_then(|()| injector::close(process, number));
    match closed {
        // QEMU may have closed it all the same.
        Err(error) if has_userfaultfd(process, number)? => Err(error),
        _ => Ok(()),
    }
}

/// Whether the process has a userfaultfd of this number.
///
/// # Errors
/// As [`Process::userfaultfds`].
pub fn has_userfaultfd(process: &Process, number: i32) -> io::Result<bool> {
    Ok(process.userfaultfds()?.contains(&number))
}

/// Removes the VM's swap file, record and ledger. A VM that Ebb started keeps its sockets and logs
/// while it runs.
fn forget_all(record: &Record, directory: &Path) -> io::Result<()> {
    remove_swap(record);
    starting::unmark(directory)?;
    forget(directory)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::system::starting::Qemu;

    #[test]
    fn a_start_that_failed_is_marked_while_its_qemu_may_run() {
        let home = tempfile::tempdir().unwrap();
        starting::mark(home.path(), Qemu::User(1), &[], None).unwrap();
        let left = || fs::read_dir(home.path()).unwrap().count();
        let of_mark = left();
        assert!(of_mark > 0);
        fs::write(home.path().join("ledger"), "").unwrap();
        forget(home.path()).unwrap();
        assert_eq!(left(), of_mark);
        starting::unmark(home.path()).unwrap();
        assert_eq!(left(), 0);
    }
}
