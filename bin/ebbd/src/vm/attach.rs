//! Beginning to manage a VM that nobody manages.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use ebb_api::{Backing, Mode};
use ebb_pager::{Pager, Restored};
use ebb_passthrough::{Held, PassedThrough};
use ebb_served::SharedDisks;
use ebb_sys::process::Process;
use ebb_sys::uffd::Uffd;
use ebb_vm::{Qmp, Ram};
use rustix::io::Errno;

use super::context::mailbox::Command;
use super::context::{ContextParts, VmContext};
use super::detach;
use super::devices::unplugged;
use super::make_pager::{self, Made};
use super::make_userfaultfd;
use super::passed_through;
use crate::model::api_error::{Answer, failed, not_allowed, unsaved};
use crate::model::record::{Record, RegionRecord};
use crate::serve::disks::Disks;
use crate::serve::growth::Growth;
use crate::support::failpoint;
use crate::system::{remains, small_pages};

/// Attaches a VM whose RAM was found. `held`: QEMU's descriptors of passed-through devices. Nothing
/// in the VMM has changed before this call, and if it fails, nothing stays changed.
///
/// # Errors
/// Missing privilege or kernel features, by name; another pager serves the VM's memory.
pub fn attach(
    process: Process,
    ram: Ram,
    mut qmp: Qmp,
    ((disks, growth), held): ((Disks, Growth), Option<Held>),
    mut record: Record,
    directory: &Path,
) -> Answer<(VmContext, Receiver<Command>)> {
    describe(&process, &ram, disks.shared.is_strict() || held.is_some(), &mut record)?;
    let swap_was_there = record.swap.exists();
    let with = (&disks, &growth, held);
    let made = make(&process, ram, (with, &mut qmp), &mut record, directory);
    let Attached { pager, restored, passed } = match made {
        Ok(made) => made,
        Err(refused) => {
            // Leaves the VMM as it was. The reason for the refusal matters more than a second
            // failure here.
            if !swap_was_there {
                remains::remove_swap(&record);
            }
            detach::give_up(&process, record, directory);
            return Err(refused);
        }
    };
    disks.shared.serve_with(&pager);
    small_pages::mind(&pager, &process, &record);
    make_pager::forget_with(&pager, Arc::clone(&disks.shared), &growth);
    let qmp = Some(qmp);
    Ok(VmContext::new(ContextParts {
        process,
        pager,
        restored,
        qmp,
        record,
        directory,
        disks,
        growth,
        passed,
    }))
}

/// Describes the VM's memory in the record. `fills`: a device that cannot wait is to use it.
fn describe(process: &Process, ram: &Ram, fills: bool, record: &mut Record) -> Answer<()> {
    let inodes: Vec<u64> = { ram.files().iter() }
        .map(|backing| backing.identity().map(|(_, inode)| inode))
        .collect::<io::Result<_>>()
        .map_err(failed("the VM's RAM"))?;
    record.regions =
        ram.regions().map(|region| RegionRecord::new(region, inodes[region.file])).collect();
    if fills {
        fill(ram)?;
    }
    let resident = ram.resident_bytes().map_err(failed("the VM's RAM"))?;
    if record.backing == Backing::Small {
        // Before anything is looked at: memory that comes from now on is in small pages.
        small_pages::keep(process, ram).map_err(failed("small pages"))?;
        // A VM that begins now had no memory to make large folios of.
        record.small_pages = record.started || small_pages::await_khugepaged().is_ok();
    }
    record.totals.absent_at_attach_bytes = ram.bytes().saturating_sub(resident);
    make_pager::own_digests(record).map_err(failed("random numbers"))
}

/// A pager whose VM has a userfaultfd, and what belongs to it.
struct Attached {
    pager: Arc<Pager>,
    restored: Receiver<Restored>,
    passed: Option<Arc<PassedThrough>>,
}

/// Makes the userfaultfd in the VMM, and the pager over it. Writes the record before, once the
/// userfaultfd is there, and after. If it fails, no memory is watched.
fn make(
    process: &Process,
    ram: Ram,
    ((disks, growth, held), qmp): ((&Disks, &Growth, Option<Held>), &mut Qmp),
    record: &mut Record,
    directory: &Path,
) -> Answer<Attached> {
    let save = |record: &Record| record.save(directory).map_err(unsaved("the VM's record"));
    save(record)?;
    // After the record is there: of two that begin at once, one at least sees the other.
    if let Some(name) = record.twin(directory) {
        let pid = record.pid;
        return Err(not_allowed(format!(
            "process {pid} is on record as {name}: detach {name} first"
        )));
    }
    let number = make_userfaultfd::make(process, Some(qmp)).map_err(|error| {
        not_allowed(format!("process {} cannot be given a userfaultfd: {error}", process.pid()))
    })?;
    record.making = Some(number);
    save(record)?;
    let with = (&disks.shared, held);
    let Made { pager, restored, passed } =
        make_pager(process, number, ram, with, record, directory)?;
    let pager = Arc::new(pager);
    // Before anything is watched: the kernel maps nothing for devices that is.
    passed_through::convert(passed.as_deref(), false, record, save)?;
    let begun = begin(&pager, growth, record).and_then(|()| {
        (record.userfaultfd, record.making) = (Some(number), None);
        save(record)
    });
    match begun {
        Ok(()) => Ok(Attached { pager, restored, passed }),
        Err(refused) => {
            // The userfaultfd may stay in QEMU: then nobody would serve what waits for it.
            if let Err(error) = pager.frames().unwatch_all() {
                tracing::error!("its memory stays watched: {error}");
            }
            Err(refused)
        }
    }
}

/// Watches what has to be watched from the beginning.
fn begin(pager: &Arc<Pager>, growth: &Growth, record: &Record) -> Answer<()> {
    failpoint::may_end("begin", &record.name);
    if record.mode == Mode::Strict || record.evicts {
        pager.frames().watch_all().map_err(|error| match error.raw_os_error() {
            Some(code) if code == Errno::BUSY.raw_os_error() => not_allowed(
                "another userfaultfd serves a part of the VM's memory: only one pager can serve it",
            ),
            _ => not_allowed(format!("the VM's memory cannot be watched: {error}")),
        })?;
    }
    growth.attach(pager, true).map_err(failed("the memory that it can grow by"))?;
    failpoint::fails("attach", &record.name).map_err(failed("the VM"))
}

/// Makes all memory resident before a device that cannot wait may use it: a disk in strict DMA mode,
/// or a device that is passed through. The kernel maps no hole of watched memory for the latter, and
/// QEMU would end for that.
pub(super) fn fill(ram: &Ram) -> Answer<()> {
    let mut regions = ram.regions();
    regions.try_for_each(|region| ram.populate(region.frames())).map_err(|error| {
        not_allowed(format!(
            "a device that cannot wait (dma=strict, or passed through) needs all of the VM's \
             memory at the start: {error}"
        ))
    })
}

fn make_pager(
    process: &Process,
    number: i32,
    ram: Ram,
    with: (&Arc<SharedDisks>, Option<Held>),
    record: &Record,
    directory: &Path,
) -> Answer<Made> {
    let uffd = process.descriptor(number).and_then(Uffd::taken);
    let uffd = uffd.map_err(failed("the VMM's userfaultfd"))?;
    make_pager::shake_hands(&uffd)?;
    make_pager::prepare(&ram, record.backing);
    let ledger = make_pager::new_ledger(&ram, record, directory).map_err(failed("the VM"))?;
    let store = make_pager::store(&ram, None, record, directory).map_err(failed("the VM"))?;
    let made = make_pager::pager(ram, (ledger, store), uffd, with, record, directory);
    let made = made.map_err(failed("the VM"))?;
    unplugged::mind(&made.pager, process).map_err(failed("the VM"))?;
    Ok(made)
}
