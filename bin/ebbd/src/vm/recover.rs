//! Recovering a VM whose process died, with its memory as that process left it.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use ebb_api::Mode;
use ebb_ledger::{Content, Ledger};
use ebb_pager::Pager;
use ebb_passthrough::Held;
use ebb_served::SharedDisks;
use ebb_sys::process::Process;
use ebb_sys::uffd::Uffd;
use ebb_units::FrameRange;
use ebb_vm::Ram;
use ebb_vm::layout::{self, KnownRegion};

use super::attach;
use super::context::mailbox::Command;
use super::context::{ContextParts, LEAVING, VmContext};
use super::detach::{has_userfaultfd, remove_detached};
use super::devices::unplugged;
use super::make_pager::{self, Made};
use super::make_userfaultfd;
use super::passed_through;
use crate::helpers::injector;
use crate::model::api_error::unsaved;
use crate::model::record::{Record, RegionRecord, Settings};
use crate::serve::disks::{self, Disks};
use crate::serve::growth::Growth;
use crate::support::life::Life;
use crate::support::privileges::as_vm_thread;
use crate::system::remains::ledger_path;
use crate::system::small_pages;

/// Longest wait for the monitor of a VMM that may be needed for a userfaultfd.
const MONITOR: Duration = Duration::from_secs(5);

/// Why a VM is not recovered.
#[derive(Debug, thiserror::Error)]
pub enum NotRecovered {
    /// The VMM has ended, or the VM was detached.
    #[error("it has ended, or was detached")]
    Over,
    /// Recovery failed for now. Nothing was removed. The VM waits where it is, which is better than
    /// a wrong byte.
    #[error(transparent)]
    Failed(#[from] io::Error),
}

/// Recovers a VM from its directory, with this process's settings. Asks nothing of the VMM: its
/// threads may wait in faults that only the next pager can serve.
///
/// # Errors
/// [`NotRecovered`].
pub fn recover(
    directory: &Path,
    settings: Settings,
) -> Result<(VmContext, Receiver<Command>), NotRecovered> {
    let mut record = Record::load(directory)?.ok_or(NotRecovered::Over)?;
    record.settings = settings;
    match record.life() {
        Life::Lives(process) => match record.leaving {
            Some(number) => Err(end_leaving(&process, number, &record, directory)),
            None => Ok(recover_process(process, record, directory)?),
        },
        Life::Dead(_) => Err(NotRecovered::Over),
        Life::Unknown(error) => Err(error.into()),
    }
}

/// Finishes the detach of a VM whose process died in it: all of its content was back.
fn end_leaving(process: &Process, number: i32, record: &Record, directory: &Path) -> NotRecovered {
    let closed = has_userfaultfd(process, number).and_then(|is_there| match is_there {
        true => injector::close(process, number).or_else(|error| {
            // QEMU may have closed it all the same.
            if has_userfaultfd(process, number)? { Err(error) } else { Ok(()) }
        }),
        false => Ok(()),
    });
    match closed {
        Ok(()) => {
            remove_detached(record, directory);
            NotRecovered::Over
        }
        Err(error) => NotRecovered::Failed(io::Error::other(format!("{LEAVING}: {error}"))),
    }
}

fn recover_process(
    process: Process,
    mut record: Record,
    directory: &Path,
) -> io::Result<(VmContext, Receiver<Command>)> {
    let regions: Vec<KnownRegion> = record.regions.iter().map(RegionRecord::known).collect();
    let ram = layout::reopen(&process, &regions).map_err(io::Error::other)?;
    unplugged::note(&mut record, &ram, directory);
    let is_fresh = record.userfaultfd.is_none();
    make_pager::own_digests(&mut record)?;
    let number = match record.userfaultfd {
        Some(number) => number,
        None => remake(&process, &mut record, directory)?,
    };
    let uffd = Uffd::taken(userfaultfd(&process, number)?)?;
    make_pager::prepare(&ram, record.backing);
    let images = disks::reopen(&record.disks, &record.images).map_err(io::Error::other)?;
    let shared = disks::share(&images, &record.disks, ram.first_bytes())?;
    let held = passed_through::take_again(&process, &mut record)?;
    if is_fresh && held.is_some() {
        attach::fill(&ram).map_err(io::Error::other)?;
    }
    let Made { pager, restored, passed } = match is_fresh {
        true => fresh_pager(ram, uffd, (&shared, held), &record, directory)?,
        false => recovered_pager(ram, uffd, (&shared, held), &record, directory)?,
    };
    let save = |record: &Record| record.save(directory).map_err(unsaved("the VM's record"));
    let converted = passed_through::convert(passed.as_deref(), true, &mut record, save);
    converted.map_err(io::Error::other)?;
    unplugged::mind(&pager, &process)?;
    if record.mode == Mode::Strict || record.evicts || record.shares {
        pager.frames().watch_all()?;
    }
    let pager = Arc::new(pager);
    shared.serve_with(&pager);
    small_pages::mind(&pager, &process, &record);
    let (disks, growth) = as_vm_thread(|| {
        let disks = Disks::start(images, &shared, (&record.name, directory), record.cpus);
        let growth = Growth::start(&record.growth, directory, Some(&pager));
        io::Result::Ok((disks.map_err(io::Error::other)?, growth.map_err(io::Error::other)?))
    })??;
    growth.attach(&pager, is_fresh)?;
    (record.userfaultfd, record.making) = (Some(number), None);
    match record.save(directory) {
        // The record in the directory still holds. Its next change also writes this process's
        // settings.
        Err(error) if !is_fresh => tracing::warn!("its record: {error}"),
        saved => saved?,
    }
    make_pager::forget_with(&pager, shared, &growth);
    let qmp = None;
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

/// Makes a pager where no userfaultfd was made yet: no content of the VM can be evicted.
fn fresh_pager(
    ram: Ram,
    uffd: Uffd,
    with: (&Arc<SharedDisks>, Option<Held>),
    record: &Record,
    directory: &Path,
) -> io::Result<Made> {
    make_pager::shake_hands(&uffd).map_err(io::Error::other)?;
    let ledger = make_pager::new_ledger(&ram, record, directory).map_err(io::Error::other)?;
    let store = make_pager::store(&ram, None, record, directory)?;
    make_pager::pager(ram, (ledger, store), uffd, with, record, directory)
}

/// Makes a pager by the recovery rule: a page in the RAM file wins; a hole is what the ledger says;
/// a hole that the ledger calls resident is zero.
fn recovered_pager(
    ram: Ram,
    uffd: Uffd,
    with: (&Arc<SharedDisks>, Option<Held>),
    record: &Record,
    directory: &Path,
) -> io::Result<Made> {
    let path = ledger_path(directory);
    let mut ledger = Ledger::open(&path, ram.end()).map_err(io::Error::other)?;
    // First: without it the ledger stays as the last process left it, locks and all.
    let store = make_pager::store(&ram, Some(&ledger), record, directory)?;
    let mut locked = Vec::new();
    ledger.recover(|frames, content| locked.push((frames, content)));
    let made = make_pager::pager(ram, (ledger, store), uffd, with, record, directory)?;
    let pager = &made.pager;
    // First: memory that QEMU has unplugged has no place that could be looked at.
    unplugged::release(pager)?;
    locked
        .iter()
        .try_for_each(|(frames, content)| pager.residency().settle_locked(*frames, *content))?;
    pager.returner().settle()?;
    // Last: what is taken is on record by now. Other devices' mappings are this process's own.
    if made.passed.is_some() {
        pager.residency().map_resident()?;
    }
    // A frame whose word was locked and that is still resident may be protected for a block that
    // was never committed.
    for (frames, _) in locked.iter().filter(|(_, content)| *content == Content::Resident) {
        unprotect_in_ram(pager, *frames);
    }
    match record.mode {
        Mode::Release => pager.returner().end_watches()?,
        Mode::Strict => {
            locked.iter().try_for_each(|(frames, _)| pager.returner().settle_watch(frames.start))?
        }
    }
    Ok(made)
}

fn unprotect_in_ram(pager: &Pager, frames: FrameRange) {
    if let Some(frames) = pager.ram().clip(frames)
        && let Err(error) = pager.frames().unprotect(frames)
    {
        // The frame is not watched: then it was not protected either.
        tracing::debug!("{frames:?}: {error}");
    }
}

/// Makes a userfaultfd where a process died before the VM was managed, and puts it on record before
/// it watches anything. Closes what that process left: the one on record, or one that watches
/// nothing. As nothing is watched, the VMM can answer.
fn remake(process: &Process, record: &mut Record, directory: &Path) -> io::Result<i32> {
    let left = process.userfaultfds()?;
    for &number in left.iter().filter(|&&number| record.making != Some(number)) {
        if process.may_watch(number)? {
            return Err(io::Error::other(format!(
                "process {} has userfaultfd {number}, which is on no record here: another pager, \
                 or another ebbd, may serve its memory: end that one, or detach the VM there",
                process.pid()
            )));
        }
    }
    left.into_iter().try_for_each(|number| injector::close(process, number))?;
    let mut qmp = record.monitor().connect(process.pid(), MONITOR).ok();
    let number = make_userfaultfd::make(process, qmp.as_mut());
    if let Some(qmp) = qmp {
        qmp.close();
    }
    let number = number?;
    record.change(directory, |record| record.making = Some(number))?;
    Ok(number)
}

fn userfaultfd(process: &Process, number: i32) -> io::Result<OwnedFd> {
    match has_userfaultfd(process, number)? {
        true => process.descriptor(number),
        false => Err(io::Error::other("the VMM no longer has the userfaultfd")),
    }
}
