//! Taking hold of a VM, and taking up one that a daemon before this one held.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ebb_api::{Backing, Mode};
use ebb_ledger::{Content, Ledger, LedgerError, Tables};
use ebb_pager::{Digests, Grain, Pager, Parts, Restored};
use ebb_store::{Compressed, Protection, Store, StoreError, SwapFile};
use ebb_sys::process::Process;
use ebb_sys::uffd::{Uffd, feature};
use ebb_units::{FRAME_BYTES, FrameRange};
use ebb_vm::layout::{self, KnownRegion};
use ebb_vm::{Qmp, Ram};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::cgroup;
use crate::disks::{self, Disks, Shared, Source};
use crate::failpoint;
use crate::growth::Growth;
use crate::injector;
use crate::kept;
use crate::life::{Dead, Life};
use crate::origin;
use crate::problem::{Answer, failed, not_allowed, unsaved};
use crate::record::{Record, RegionRecord, Settings};
use crate::small_pages;
use crate::starting;
use crate::swap_room;
use crate::unplugged;

/// What is said of a VM that is all but let go of.
pub const LEAVING: &str = "its memory is all back, but its userfaultfd in QEMU could not be closed yet: \
                           it is let go once that is closed";

/// A VM in hand: everything that serving it needs.
pub struct Held {
    /// Its VMM.
    pub process: Process,
    /// Its pager.
    pub pager: Arc<Pager>,
    /// Blocks that the pager gives back, to be judged.
    pub restored: std::sync::mpsc::Receiver<Restored>,
    /// The VMM's control socket, while it answers.
    pub qmp: Option<Qmp>,
    /// Its disks that Ebb serves.
    pub disks: Disks,
    /// Its virtio-mem devices that Ebb serves.
    pub growth: Growth,
    /// What is on record of it.
    pub record: Record,
    /// Its directory.
    pub directory: PathBuf,
}

/// Takes hold of a VM whose RAM was found. Nothing has been changed in the VMM
/// before; when this fails, nothing is left changed.
///
/// # Errors
/// Missing privilege or kernel features, named; another holder.
pub fn take(
    process: Process,
    ram: Ram,
    mut qmp: Qmp,
    (disks, growth): (Disks, Growth),
    mut record: Record,
    directory: &Path,
) -> Answer<Held> {
    let inodes: Vec<u64> = { ram.files().iter() }
        .map(|backing| backing.file.identity().map(|(_, inode)| inode))
        .collect::<io::Result<_>>()
        .map_err(failed("the VM's RAM"))?;
    record.regions =
        ram.regions().map(|region| RegionRecord::new(region, inodes[region.file])).collect();
    if disks.shared.is_strict() {
        fill(&ram)?;
    }
    let resident = ram.resident_bytes().map_err(failed("the VM's RAM"))?;
    if record.backing == Backing::Small {
        // Before anything is looked at: what comes from now on is small.
        small_pages::keep(&process, &ram).map_err(failed("small pages"))?;
        // Of a VM that begins now nothing was there to make large folios of.
        record.small_pages = record.started || small_pages::await_khugepaged().is_ok();
    }
    record.totals.absent_at_hold_bytes = ram.bytes().saturating_sub(resident);
    own_digests(&mut record).map_err(failed("random numbers"))?;
    let swap_was_there = record.swap.exists();
    let taken = { record.save(directory).map_err(unsaved("the VM's record")) }
        .and_then(|()| make(&process))
        .and_then(|number| {
            record.userfaultfd = Some(number);
            let (pager, restored) =
                take_with(&process, number, ram, &disks.shared, &record, directory)?;
            let pager = Arc::new(pager);
            let held = growth.hold(&pager, true);
            held.map_err(failed("the memory that it can grow by"))?;
            record.save(directory).map_err(unsaved("the VM's record"))?;
            Ok((pager, restored))
        });
    match taken {
        Ok((pager, restored)) => {
            disks.shared.serve_with(&pager);
            small_pages::mind(&pager, &process, &record);
            forget_with(&pager, Arc::clone(&disks.shared), &growth);
            let directory = directory.to_owned();
            qmp.show_silence(pager.evictor_waits());
            let qmp = Some(qmp);
            Ok(Held { process, pager, restored, qmp, disks, growth, record, directory })
        }
        Err(refused) => {
            // Leaves the VMM as it was; the reason for the refusal matters more
            // than a second failure here.
            leave(&process, &record);
            if !swap_was_there {
                remove_swap(&record);
            }
            forget(directory).unwrap_or_else(|error| tracing::error!("{}: {error}", record.name));
            Err(refused)
        }
    }
}

fn make(process: &Process) -> Answer<i32> {
    injector::make(process).map_err(|error| {
        not_allowed(format!("process {} cannot be given a userfaultfd: {error}", process.pid()))
    })
}

/// Closes the userfaultfd in the VMM, if there is one: all that it watched is the kernel's again.
fn leave(process: &Process, record: &Record) {
    if let Some(number) = record.userfaultfd
        && let Err(error) = injector::close(process, number)
    {
        tracing::error!("{}: closing the userfaultfd in QEMU: {error}", record.name);
    }
}

fn part(process: &Process, record: &Record, directory: &Path) {
    if let Err(error) = origin::keep(record, directory) {
        tracing::warn!("{}: where its console is: {error}", record.name);
    }
    cgroup::remove_later(record, process.try_clone());
    // It is let go all the same: what is left behind says so.
    if let Err(error) = forget_all(record, directory) {
        tracing::error!("{}: what was kept of it is not removed: {error}", record.name);
    }
}

/// Removes the VM's record and ledger; a VM that Ebb started keeps its sockets and logs while it
/// runs.
fn forget_all(record: &Record, directory: &Path) -> io::Result<()> {
    remove_swap(record);
    starting::unmark(directory)?;
    forget(directory)
}

/// Removes what is kept of a VM in its directory, its record before what belongs to that. What is
/// not there is no error. The mark of a start stays: its QEMU may run, with nothing else to tell of
/// it.
fn forget(directory: &Path) -> io::Result<()> {
    Record::remove(directory)?;
    ebb_store::remove(directory)?;
    let paths = [ledger_path(directory), digests_path(directory)];
    paths.iter().try_for_each(|path| kept::remove_if_there(path))
}

/// All memory is there before a device that cannot wait may use it, as for one that
/// is passed through.
fn fill(ram: &Ram) -> Answer<()> {
    let mut regions = ram.regions();
    regions.try_for_each(|region| ram.populate(region.frames())).map_err(|error| {
        not_allowed(format!(
            "a disk with dma=strict needs all of the VM's memory at the start: {error}"
        ))
    })
}

fn take_with(
    process: &Process,
    number: i32,
    ram: Ram,
    shared: &Arc<Shared>,
    record: &Record,
    directory: &Path,
) -> Answer<(Pager, std::sync::mpsc::Receiver<Restored>)> {
    let uffd = process.descriptor(number).and_then(Uffd::taken);
    let uffd = uffd.map_err(failed("the VMM's userfaultfd"))?;
    shake_hands(&uffd)?;
    prepare(&ram, record.backing);
    let ledger = new_ledger(&ram, record, directory).map_err(failed("the VM"))?;
    let (pager, restored) =
        pager(ram, ledger, uffd, shared, record, directory).map_err(failed("the VM"))?;
    unplugged::mind(&pager, process).map_err(failed("the VM"))?;
    if record.mode == Mode::Strict || record.evicts {
        pager.watch_all().map_err(|error| match error.raw_os_error() {
            Some(code) if code == rustix::io::Errno::BUSY.raw_os_error() => not_allowed(
                "another userfaultfd serves a part of the VM's memory: only one pager can hold it",
            ),
            _ => not_allowed(format!("the VM's memory cannot be watched: {error}")),
        })?;
    }
    Ok((pager, restored))
}

/// Agrees with the kernel on what is needed; names what is missing.
fn shake_hands(uffd: &Uffd) -> Answer<()> {
    uffd.handshake(feature::needed()).map(drop).map_err(|error| {
        let has = ebb_sys::uffd::probe().unwrap_or(0);
        let missing = feature::NEEDED.iter().filter(|(bit, _)| has & bit == 0);
        let names: Vec<&str> = missing.map(|(_, name)| *name).collect();
        not_allowed(match names.is_empty() {
            true => format!("the kernel's userfaultfd: {error}"),
            false => format!(
                "the kernel's userfaultfd lacks {}: a newer one is needed",
                names.join(", ")
            ),
        })
    })
}

/// Gives the digests an owner, if they have none.
fn own_digests(record: &mut Record) -> io::Result<()> {
    if record.digests == 0 {
        let mut number = [0; 8];
        getrandom(&mut number, GetRandomFlags::empty())?;
        record.digests = u64::from_ne_bytes(number).max(1);
    }
    Ok(())
}

/// Those of a VM with disks. One that is taken up while there is no room for them goes without.
fn digests(ram: &Ram, record: &Record, directory: &Path) -> io::Result<Option<Digests>> {
    if record.disks.is_empty() {
        return Ok(None);
    }
    let path = digests_path(directory);
    match Digests::open(&path, ram.end(), record.digests) {
        Err(error) if error.kind() == io::ErrorKind::StorageFull => {
            tracing::warn!(
                "{}: what rests on its disks is not compared as it comes back: {}: {error}",
                record.name,
                path.display()
            );
            // What it holds is not kept up from now on.
            fs::remove_file(&path)?;
            Ok(None)
        }
        opened => opened.map(Some),
    }
}

fn pager(
    ram: Ram,
    ledger: Ledger,
    uffd: Uffd,
    shared: &Arc<Shared>,
    record: &Record,
    directory: &Path,
) -> io::Result<(Pager, std::sync::mpsc::Receiver<Restored>)> {
    let grain = match record.backing {
        Backing::Small => Grain::Frame,
        _ => Grain::Huge,
    };
    if !ebb_store::is_in_memory(directory)? {
        tracing::warn!("{}: not on tmpfs; the swap file's key is on a disk", directory.display());
    }
    let slots = ram.first_bytes() / FRAME_BYTES;
    let ram = Arc::new(ram);
    let devices = failpoint::devices(shared.devices(&ram), &record.name);
    let digests = digests(&ram, record, directory)?;
    let (pager, restored) = Pager::new(Parts {
        ram,
        ledger,
        uffd,
        grain,
        devices,
        store: store(slots, record, directory)?,
        disk: Box::new(Source(Arc::clone(shared))),
        digest_key: shared.digest_key(),
    })?;
    digests.into_iter().for_each(|digests| pager.compare_with(digests));
    Ok((pager, restored))
}

/// The swap file, and compressed memory in front of it: also where none is wanted any
/// more, but a daemon before this one had some.
fn store(slots: u64, record: &Record, directory: &Path) -> Result<Box<dyn Store>, StoreError> {
    let slots = record.tiers.as_ref().map_or(slots, |tiers| tiers.slots);
    let disk = || {
        let disk = SwapFile::open(&record.swap, directory, slots, Protection::Encrypted)?;
        Ok::<_, StoreError>(disk.within(swap_room::room()).among(&swap_room::traffic(&record.swap)))
    };
    match record.compressed_bytes() {
        0 if !ebb_store::has_compressed(directory)? => Ok(Box::new(disk()?)),
        bytes => match Compressed::open(directory, bytes, disk()?) {
            // One that is taken up does not wait for room that it did not need so far.
            Err(StoreError::RunDirectory(error)) if !ebb_store::has_compressed(directory)? => {
                tracing::warn!("{}: without compressed memory: {error}", record.name);
                Ok(Box::new(disk()?))
            }
            store => Ok(Box::new(store?)),
        },
    }
}

/// Our own mapping gives memory back in the pieces that the VM's has.
fn prepare(ram: &Ram, backing: Backing) {
    for file in ram.files() {
        let huge = backing == Backing::Thp;
        if backing != Backing::Hugetlb
            && let Err(error) = file.mapping.use_huge_pages(huge)
        {
            tracing::debug!("huge pages for the daemon's view: {error}");
        }
    }
}

/// With small pages each fault may need its huge frame's table.
fn new_ledger(ram: &Ram, record: &Record, directory: &Path) -> Result<Ledger, LedgerError> {
    let tables = match record.backing {
        Backing::Small => Tables::AtOnce,
        _ => Tables::WhenSplit,
    };
    Ledger::create(&ledger_path(directory), ram.end(), tables)
}

fn ledger_path(directory: &Path) -> PathBuf {
    directory.join("ledger")
}

fn digests_path(directory: &Path) -> PathBuf {
    directory.join("digests")
}

/// Removes all that a VM left which has ended.
///
/// # Errors
/// As unlink(2).
pub fn clear(record: Option<&Record>, directory: &Path, _: &Dead) -> io::Result<()> {
    if let Some(record) = record {
        remove_swap(record);
        cgroup::remove_of(record);
    }
    starting::unmark(directory)?;
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Removes a VM's swap file, which nobody can read any more once its key is gone. A block
/// device stays.
fn remove_swap(record: &Record) {
    if record.swap.metadata().is_ok_and(|found| !found.is_file()) {
        return;
    }
    if let Err(error) = kept::remove_if_there(&record.swap) {
        tracing::error!("{}: {error}", record.swap.display());
    }
}

/// Takes up a VM from its directory, with its memory as a dead daemon left it, and with
/// this daemon's settings.
/// Asks nothing of the VMM: its threads may wait in faults that only the taker
/// can serve.
///
/// # Errors
/// [`NotAdopted`].
pub fn adopt(directory: &Path, settings: Settings) -> Result<Held, NotAdopted> {
    let mut record = Record::load(directory)?.ok_or(NotAdopted::Over)?;
    record.settings = settings;
    match record.life() {
        Life::Lives(process) => match record.leaving {
            Some(number) => Err(end_leaving(&process, number, &record, directory)),
            None => Ok(adopt_process(process, record, directory)?),
        },
        Life::Dead(_) => Err(NotAdopted::Over),
        Life::Unknown(error) => Err(error.into()),
    }
}

/// A daemon died while it let the VM go: all of its memory was back.
fn end_leaving(process: &Process, number: i32, record: &Record, directory: &Path) -> NotAdopted {
    let closed = has_userfaultfd(process, number).and_then(|is_there| match is_there {
        true => injector::close(process, number).or_else(|error| {
            // Somebody else has, all the same.
            if has_userfaultfd(process, number)? { Err(error) } else { Ok(()) }
        }),
        false => Ok(()),
    });
    match closed {
        Ok(()) => {
            part(process, record, directory);
            NotAdopted::Over
        }
        Err(error) => NotAdopted::Failed(io::Error::other(format!("{LEAVING}: {error}"))),
    }
}

/// Why a VM is not taken up.
#[derive(Debug, thiserror::Error)]
pub enum NotAdopted {
    /// Its VMM has ended, or it was let go.
    #[error("it has ended, or was let go")]
    Over,
    /// Not now. Nothing was removed; the VM waits where it is: better than a wrong byte.
    #[error(transparent)]
    Failed(#[from] io::Error),
}

fn adopt_process(process: Process, mut record: Record, directory: &Path) -> io::Result<Held> {
    let regions: Vec<KnownRegion> = record.regions.iter().map(RegionRecord::known).collect();
    let ram = layout::reopen(&process, &regions).map_err(io::Error::other)?;
    unplugged::note(&mut record, &ram, directory);
    let fresh = record.userfaultfd.is_none();
    own_digests(&mut record)?;
    let number = match record.userfaultfd {
        Some(number) => number,
        None => remake(&process)?,
    };
    let uffd = Uffd::taken(userfaultfd(&process, number)?)?;
    prepare(&ram, record.backing);
    let images = disks::reopen(&record.disks, &record.images).map_err(io::Error::other)?;
    let shared = Shared::new(&images, &record.disks, ram.first_bytes())?;
    let (pager, restored) = match fresh {
        true => {
            shake_hands(&uffd).map_err(io::Error::other)?;
            let ledger = new_ledger(&ram, &record, directory);
            pager(ram, ledger.map_err(io::Error::other)?, uffd, &shared, &record, directory)?
        }
        false => recovered(ram, uffd, &shared, &record, directory)?,
    };
    unplugged::mind(&pager, &process)?;
    if record.mode == Mode::Strict || record.evicts || record.shares {
        pager.watch_all()?;
    }
    record.userfaultfd = Some(number);
    match record.save(directory) {
        // What was on record holds: of this daemon's settings its next change tells.
        Err(error) if !fresh => tracing::warn!("{}: its record: {error}", record.name),
        saved => saved?,
    }
    let pager = Arc::new(pager);
    shared.serve_with(&pager);
    small_pages::mind(&pager, &process, &record);
    let disks = Disks::start(images, &shared, directory, record.cpus).map_err(io::Error::other)?;
    let growth = Growth::start(&record.growth, directory, Some(&pager));
    let growth = growth.map_err(io::Error::other)?;
    growth.hold(&pager, false)?;
    forget_with(&pager, shared, &growth);
    let (directory, qmp) = (directory.to_owned(), None);
    Ok(Held { process, pager, restored, qmp, disks, growth, record, directory })
}

/// Disks and devices forget what the pager has to have forgotten here.
fn forget_with(pager: &Pager, disks: Arc<Shared>, growth: &Growth) {
    let devices = growth.forgetting();
    pager.on_forget(move |frames| {
        disks.forget(frames);
        devices(frames);
    });
}

/// The recovery rule: a page in the RAM file wins; a hole is what the ledger
/// says; a hole that the ledger calls resident is zero.
fn recovered(
    ram: Ram,
    uffd: Uffd,
    shared: &Arc<Shared>,
    record: &Record,
    directory: &Path,
) -> io::Result<(Pager, std::sync::mpsc::Receiver<Restored>)> {
    let path = ledger_path(directory);
    let mut ledger = Ledger::open(&path, ram.end()).map_err(io::Error::other)?;
    let mut held = Vec::new();
    ledger.recover(|frames, content| held.push((frames, content)));
    let (pager, restored) = pager(ram, ledger, uffd, shared, record, directory)?;
    // First: what is gone has no place that could be looked at.
    unplugged::let_go(&pager)?;
    held.iter().try_for_each(|(frames, content)| pager.settle_held(*frames, *content))?;
    pager.settle()?;
    // A frame that was held and is still resident may be protected for a
    // block that was never committed.
    for (frames, _) in held.iter().filter(|(_, content)| *content == Content::Resident) {
        unprotect_in_ram(&pager, *frames);
    }
    match record.mode {
        Mode::Release => pager.end_watches()?,
        Mode::Strict => held.iter().try_for_each(|(frames, _)| pager.settle_watch(frames.start))?,
    }
    Ok((pager, restored))
}

fn unprotect_in_ram(pager: &Pager, frames: FrameRange) {
    if let Some(frames) = pager.ram().clip(frames)
        && let Err(error) = pager.unprotect(frames)
    {
        // Not watched: then it was not protected either.
        tracing::debug!("{frames:?}: {error}");
    }
}

/// A daemon died while it made the userfaultfd: whatever it left is closed,
/// and one is made anew.
fn remake(process: &Process) -> io::Result<i32> {
    process.userfaultfds()?.into_iter().try_for_each(|number| injector::close(process, number))?;
    injector::make(process)
}

fn has_userfaultfd(process: &Process, number: i32) -> io::Result<bool> {
    Ok(process.userfaultfds()?.contains(&number))
}

fn userfaultfd(process: &Process, number: i32) -> io::Result<OwnedFd> {
    match has_userfaultfd(process, number)? {
        true => process.descriptor(number),
        false => Err(io::Error::other("the userfaultfd in the VMM is gone")),
    }
}

impl Held {
    /// Lets the VM go: everything is back, nothing is watched, the userfaultfd
    /// in the VMM is closed. Its fault thread must have ended; faults that
    /// wait are woken.
    ///
    /// # Errors
    /// When the VMM cannot be reached, or the record cannot be written: the VM is still held, and
    /// its faults are to be served again. When the userfaultfd cannot be closed: it is `leaving`.
    pub fn let_go(&mut self) -> io::Result<()> {
        self.pager.unwatch_all()?;
        starting::unmark(&self.directory)?;
        self.close_userfaultfd()?;
        self.part();
        Ok(())
    }

    /// Removes what is kept of a VM whose userfaultfd is closed. Its fault thread must have ended.
    pub fn part(&mut self) {
        part(&self.process, &self.record, &self.directory);
    }

    /// Closes it in the VMM, if it is there. It leaves the record first: a daemon that finds none
    /// on record makes a new one, while QEMU may use its number for something else.
    ///
    /// It stays off the record where that fails: a thread of QEMU's that was sent to close it does
    /// so all the same, maybe much later (`docs/decisions/0034-*`).
    fn close_userfaultfd(&mut self) -> io::Result<()> {
        let Some(number) = self.record.leaving.or(self.record.userfaultfd) else { return Ok(()) };
        let is_there = has_userfaultfd(&self.process, number)?;
        let before = self.record.userfaultfd.take();
        self.record.leaving = Some(number);
        if before.is_some()
            && let Err(error) = self.record.save(&self.directory)
        {
            (self.record.userfaultfd, self.record.leaving) = (before, None);
            return Err(error);
        }
        if is_there {
            let name = &self.record.name;
            let closed = failpoint::fails("close", name)
                .and_then(|()| injector::close(&self.process, number))
                .and_then(|()| failpoint::fails("closed", name));
            if closed.is_err() && !self.is_closed() {
                return closed;
            }
        }
        Ok(())
    }

    /// Whether a userfaultfd that the VM is leaving by is closed in the VMM.
    pub fn is_closed(&self) -> bool {
        let is_there = |number| has_userfaultfd(&self.process, number);
        self.record.leaving.is_none_or(|number| is_there(number).is_ok_and(|is_there| !is_there))
    }

    /// Its VMM has ended: removes its control group, and the VM's record, ledger and swap file.
    ///
    /// # Errors
    /// As unlink(2).
    pub fn bury(&self, _: &Dead) -> io::Result<()> {
        cgroup::remove_of(&self.record);
        self.forget()
    }

    fn forget(&self) -> io::Result<()> {
        forget_all(&self.record, &self.directory)
    }

    /// Leaves a VM as it was that was just taken hold of and cannot be served: all of its memory
    /// is where it was.
    pub fn undo(self) {
        if let Err(error) = self.pager.unwatch_all() {
            tracing::error!("{}: {error}", self.record.name);
        }
        let Held { process, pager, restored, qmp, disks, growth, record, directory } = self;
        // What is wanting may be descriptors, and letting go takes some.
        drop((disks, growth, pager, restored, qmp));
        leave(&process, &record);
        remove_swap(&record);
        if let Err(error) = forget(&directory) {
            tracing::error!("{}: {error}", record.name);
        }
    }

    /// Where its logs are.
    pub fn logs(&self) -> PathBuf {
        self.record.logs.clone().unwrap_or_else(|| self.directory.clone())
    }

    /// A copy of the VMM's pidfd.
    ///
    /// # Errors
    /// As dup(2).
    pub fn pidfd(&self) -> io::Result<OwnedFd> {
        self.process.as_fd().try_clone_to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::starting::Qemu;

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
