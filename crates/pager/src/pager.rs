//! One VM's frames, and what may be done to them.

use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, RwLock};

use ebb_digest::DigestKey;
use ebb_ledger::{Content, Ledger, SplitError};
use ebb_store::{Store, Usage};
use ebb_sys::uffd::{HvaRange, Uffd, Watch};
use ebb_units::{FrameRange, Gfn, HugeFrame};
use ebb_vm::{Ram, Region};

use crate::coming::Coming;
use crate::counters::{Counters, add};
use crate::dead::Dead;
use crate::digests::Digests;
use crate::disk::{Disk, Resting};
use crate::failure::Failure;
use crate::folios::Folios;
use crate::guarded::Sentry;
use crate::halt::Halt;
use crate::huge::Sharer;
use crate::io_mapping::IoMapping;
use crate::jobs::Jobs;
use crate::kept::Kept;
use crate::owners::Owners;
use crate::pins::Pins;
use crate::read_ahead::ReadAhead;
use crate::unmapped::is_unmapped;
use crate::view::View;

/// The pieces in which missing memory is given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Grain {
    /// A frame at a time: the backing has small pages.
    Frame,
    /// A huge frame at a time.
    Huge,
}

/// What a pager is made of.
pub struct Parts {
    /// The VM's RAM.
    pub ram: Arc<Ram>,
    /// Where its content is.
    pub ledger: Ledger,
    /// Its faults, after the handshake.
    pub uffd: Uffd,
    /// How its memory is given.
    pub grain: Grain,
    /// Devices that reach it by themselves.
    pub devices: Box<dyn IoMapping>,
    /// Where content goes that is not in memory.
    pub store: Box<dyn Store>,
    /// Where some of it is without being written.
    pub disk: Box<dyn Disk>,
    /// By which content is known; the disk's, too.
    pub digest_key: Arc<DigestKey>,
}

/// A block that was given back because its metadata was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Restored {
    /// Its first frame.
    pub head: Gfn,
    /// It has `1 << order` frames.
    pub order: u8,
}

/// Restored blocks waiting to be looked at; beyond that they are not judged.
const RESTORED_CAPACITY: usize = 1024;

/// Tells in which of some ranges the VMM has its RAM.
type Mapped = Box<dyn Fn(&[HvaRange]) -> io::Result<Vec<HvaRange>> + Send + Sync>;

/// The pager of one VM. Used by its fault thread and its worker at once.
pub struct Pager {
    pub(crate) ram: Arc<Ram>,
    pub(crate) ledger: Ledger,
    pub(crate) uffd: Uffd,
    pub(crate) grain: Grain,
    pub(crate) devices: Box<dyn IoMapping>,
    pub(crate) store: Box<dyn Store>,
    pub(crate) disk: Box<dyn Disk>,
    pub(crate) resting: Resting,
    /// What rests there, by digest.
    pub(crate) digests: OnceLock<Digests>,
    pub(crate) owners: Owners,
    pub(crate) digest_key: Arc<DigestKey>,
    pub(crate) kept: Kept,
    pub(crate) pins: Pins,
    pub(crate) folios: Folios,
    pub(crate) dead: Dead,
    pub(crate) sharer: RwLock<Option<Arc<dyn Sharer>>>,
    /// Where memory can be plugged, and who is told of touches of what is not.
    pub(crate) pluggable: OnceLock<Vec<FrameRange>>,
    pub(crate) sentry: RwLock<Option<Arc<dyn Sentry>>>,
    /// Of the store, and of the disk.
    pub(crate) ahead: (Mutex<ReadAhead>, Mutex<ReadAhead>),
    pub(crate) coming: Coming,
    pub(crate) jobs: Jobs,
    /// Taken above the first, whoever evicts is told; above the second, faults wait.
    marks: [AtomicU64; 2],
    /// See [`Pager::evictor_waits`].
    pub(crate) evictor_waits: Arc<AtomicBool>,
    pub(crate) halt: Halt,
    pressure: OnceLock<Box<dyn Fn() + Send + Sync>>,
    mapped: OnceLock<Mapped>,
    /// For what the VMM has not mapped ([`Pager::unmapped`]).
    pub(crate) uffd_here: OnceLock<Uffd>,
    /// Files of which nothing goes ([`Pager::give_back_unmapped`]).
    pub(crate) doubted: Mutex<Vec<usize>>,
    pub(crate) panicked: OnceLock<Box<dyn Fn(String) + Send + Sync>>,
    pub(crate) failure: Failure,
    pub(crate) restored: SyncSender<Restored>,
    /// What it counts.
    pub counters: Counters,
}

impl Pager {
    /// A pager over `ram`, whose faults come to `uffd`, and the blocks that it
    /// restores, for whoever wants to know whether the guest then used them.
    ///
    /// # Errors
    /// `InvalidInput`: the ledger names slots that the store does not have.
    pub fn new(parts: Parts) -> io::Result<(Pager, Receiver<Restored>)> {
        let Parts { ram, ledger, uffd, grain, devices, store, disk, digest_key } = parts;
        let (restored, receiver) = sync_channel(RESTORED_CAPACITY);
        let counters = Counters::default();
        let resting = Resting::default();
        let owners = Owners::new(store.usage());
        let (pins, folios) = (Pins::new(ram.end().0), Folios::new(ram.end().0));
        let (dead, kept) =
            (Dead::new(ram.end().0), Kept::new(ram.end().0, store.usage().disk_slots));
        for (frames, content) in ledger.runs() {
            if !matches!(content, Content::Watch { .. }) && !devices.unmap(frames) {
                // No device is served before the pager is there.
                return Err(io::ErrorKind::ResourceBusy.into());
            }
            match content {
                Content::Empty { .. } => add(&counters.emptied_frames, frames.count),
                Content::Saved { slot } => {
                    // Neighbours in one slot: each of them claims it.
                    frames.frames().try_for_each(|_| store.claim(slot))?;
                    frames.frames().for_each(|gfn| owners.set(slot, gfn));
                    add(&counters.saved_frames, frames.count);
                }
                Content::OnDisk { block } => {
                    frames.frames().for_each(|gfn| resting.rests(gfn, block));
                    add(&counters.on_disk_frames, frames.count);
                }
                _ => {}
            }
        }
        let pager = Pager {
            ram,
            ledger,
            uffd,
            grain,
            devices,
            store,
            disk,
            resting,
            digests: OnceLock::new(),
            owners,
            digest_key,
            kept,
            pins,
            folios,
            dead,
            sharer: RwLock::default(),
            pluggable: OnceLock::new(),
            sentry: RwLock::default(),
            ahead: (Mutex::new(ReadAhead::around()), Mutex::default()),
            coming: Coming::default(),
            jobs: Jobs::new(),
            marks: [const { AtomicU64::new(u64::MAX) }; 2],
            evictor_waits: Arc::default(),
            halt: Halt::new(),
            pressure: OnceLock::new(),
            mapped: OnceLock::new(),
            uffd_here: OnceLock::new(),
            doubted: Mutex::default(),
            panicked: OnceLock::new(),
            failure: Failure::default(),
            restored,
            counters,
        };
        Ok((pager, receiver))
    }

    /// The VM's RAM.
    pub fn ram(&self) -> &Arc<Ram> {
        &self.ram
    }

    /// The pieces in which its memory is given, but for what was broken up: [`Pager::grain_of`].
    pub fn grain(&self) -> Grain {
        self.grain
    }

    /// Its memory, for inspection.
    pub fn view(&self) -> View<'_> {
        View { ram: &self.ram, ledger: &self.ledger, store: &*self.store }
    }

    /// Its ledger.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// How much of the store is in use.
    pub fn store_usage(&self) -> Usage {
        self.store.usage()
    }

    /// What pages that the store keeps in memory may take; no more than it was made for.
    pub fn limit_store_memory(&self, bytes: u64) {
        self.store.limit_memory(bytes);
    }

    /// Memory that the host gives for this VM's RAM: what is resident, and what the store
    /// keeps of it in memory.
    ///
    /// # Errors
    /// As fstat(2).
    pub fn taken_bytes(&self) -> io::Result<u64> {
        Ok(self.ram.resident_bytes()? + self.store.usage().memory_bytes)
    }

    /// When more than `tell_bytes` are taken, whoever evicts is told; when more than
    /// `wait_bytes`, faults that take memory wait a little for it. `u64::MAX`: no limit.
    pub fn set_marks(&self, tell_bytes: u64, wait_bytes: u64) {
        for (mark, bytes) in self.marks.iter().zip([tell_bytes, wait_bytes]) {
            mark.store(bytes, Relaxed);
        }
    }

    /// What [`Pager::set_marks`] set last.
    pub fn marks(&self) -> (u64, u64) {
        let [tell, wait] = self.marks.each_ref().map(|mark| mark.load(Relaxed));
        (tell, wait)
    }

    /// While this says `true`, no fault waits for room: whoever evicts waits for the VMM, which may
    /// be held up by such faults.
    pub fn evictor_waits(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.evictor_waits)
    }

    /// Who is told of pressure, from the threads that serve faults; once.
    pub fn on_pressure(&self, tell: impl Fn() + Send + Sync + 'static) {
        // A second one would only be told of the same.
        let _ = self.pressure.set(Box::new(tell));
    }

    /// Whether somebody evicts what is too much.
    pub(crate) fn has_limit(&self) -> bool {
        self.marks[1].load(Relaxed) != u64::MAX
    }

    /// Whether faults should wait for room; whoever evicts is told in time.
    pub(crate) fn is_over_limit(&self) -> bool {
        let (tell_bytes, wait_bytes) = self.marks();
        if tell_bytes == u64::MAX {
            return false;
        }
        // As fstat(2): about a microsecond.
        let Ok(bytes) = self.taken_bytes() else { return false };
        if bytes > tell_bytes
            && let Some(tell) = self.pressure.get()
        {
            tell();
        }
        bytes > wait_bytes
    }

    /// Whether so much more would have whoever evicts begin.
    pub(crate) fn is_short_of(&self, bytes: u64) -> bool {
        let (tell_bytes, _) = self.marks();
        let is_above = |taken: u64| taken.saturating_add(bytes) > tell_bytes;
        tell_bytes != u64::MAX && self.taken_bytes().is_ok_and(is_above)
    }

    /// From now on all first touches and all writes to protected frames come
    /// here. Without this, missing memory is given by the kernel.
    ///
    /// # Errors
    /// `EBUSY`: another userfaultfd has a part of it; as ioctl_userfaultfd(2).
    pub fn watch_all(&self) -> io::Result<()> {
        let ranges: Vec<HvaRange> = self.ram.regions().map(Region::hva_range).collect();
        self.watch_missing(&ranges)
    }

    /// First touches of these ranges come here, but for those where the VMM has no RAM any more:
    /// they are about to be let go of.
    ///
    /// What else it has at such an address must not be filled with the guest's memory, so it is
    /// looked at before, and once more after. Only a range that is proved to be something else is
    /// unwatched: in all others content may be elsewhere, and its place would read as zeros.
    pub(crate) fn watch_missing(&self, ranges: &[HvaRange]) -> io::Result<()> {
        let ours = self.of_ram(ranges)?;
        ours.iter().try_for_each(|range| self.uffd.register(*range, Watch::MissingAndWrite))?;
        let Ok(left) = self.of_ram(&ours) else { return Ok(()) };
        for range in ours.iter().filter(|range| !left.contains(range)) {
            self.report("unwatch", self.uffd.unregister(*range));
        }
        Ok(())
    }

    /// Those of the ranges where the VMM has its RAM.
    pub(crate) fn of_ram(&self, ranges: &[HvaRange]) -> io::Result<Vec<HvaRange>> {
        match self.mapped.get() {
            Some(which) => which(ranges),
            None => Ok(ranges.to_vec()),
        }
    }

    /// Who says in which of some ranges the VMM has its RAM mapped where it had, from now on; once.
    pub fn check_mapped(
        &self,
        which: impl Fn(&[HvaRange]) -> io::Result<Vec<HvaRange>> + Send + Sync + 'static,
    ) {
        // A second one would look at the same VMM.
        let _ = self.mapped.set(Box::new(which));
    }

    /// Writes to protected frames of this range come here.
    ///
    /// # Errors
    /// As [`Pager::watch_all`]; `InvalidInput`: the range is not in one region.
    pub fn watch_writes(&self, frames: FrameRange) -> io::Result<()> {
        self.uffd.register(self.hva(frames)?, self.watch_of(frames))
    }

    /// Writes to protected frames come here, wherever they are in RAM.
    ///
    /// # Errors
    /// As [`Pager::watch_all`].
    pub fn watch_all_writes(&self) -> io::Result<()> {
        let all: Vec<HvaRange> = self.ram.regions().map(Region::hva_range).collect();
        let there = self.of_ram(&all)?;
        let mut regions = self.ram.regions().filter(|region| there.contains(&region.hva_range()));
        let watch = |region: &Region| self.watch_of(region.frames());
        regions.try_for_each(|region| self.uffd.register(region.hva_range(), watch(region)))
    }

    /// Wakes everybody: events that a dead daemon had read are asked again.
    ///
    /// # Errors
    /// As ioctl_userfaultfd(2).
    pub fn wake_all(&self) -> io::Result<()> {
        self.ram.regions().try_for_each(|region| self.uffd.wake(region.hva_range()))
    }

    /// Ends every protection and gives all faults back to the kernel. Content
    /// that is not in the RAM file must have been brought back before.
    ///
    /// # Errors
    /// As ioctl_userfaultfd(2).
    pub fn unwatch_all(&self) -> io::Result<()> {
        let all: Vec<HvaRange> = self.ram.regions().map(Region::hva_range).collect();
        // What is not there any more is not watched either.
        let there = self.of_ram(&all).unwrap_or(all);
        there.into_iter().try_for_each(|range| self.uffd.unregister(range))
    }

    /// Lets writes to these frames through, and wakes whoever waits to write. Where the VMM has
    /// nothing of ours mapped nothing is protected.
    ///
    /// # Errors
    /// `InvalidInput`: the range is not in one region; as ioctl_userfaultfd(2).
    pub fn unprotect(&self, frames: FrameRange) -> io::Result<()> {
        let range = self.hva(frames)?;
        match self.uffd.unprotect(range) {
            Err(error) if is_unmapped(&error) => self.uffd.wake(range),
            done => done,
        }
    }

    pub(crate) fn protect(&self, frames: FrameRange) -> io::Result<()> {
        self.uffd.protect(self.hva(frames)?)
    }

    pub(crate) fn wake(&self, frames: FrameRange) -> io::Result<()> {
        self.uffd.wake(self.hva(frames)?)
    }

    pub(crate) fn hva(&self, frames: FrameRange) -> io::Result<HvaRange> {
        self.ram.hva_range(frames).ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// Gives each frame of a huge frame its own ledger word.
    pub(crate) fn split(&self, huge: HugeFrame) -> Result<(), SplitError> {
        self.ledger.split(huge).map(|wanted| self.after(wanted, FrameRange::huge(huge)))
    }

    /// After words were held for a moment: whoever asked in that moment is
    /// woken, and asks again.
    pub(crate) fn after(&self, wanted: bool, frames: FrameRange) {
        let frames = self.ram.clip(frames);
        if let (true, Some(frames)) = (wanted, frames) {
            self.report("wake", self.wake(frames));
        }
    }

    /// An error on a path that cannot hand it on. The VMM's end is no error.
    pub(crate) fn report(&self, what: &str, result: io::Result<()>) {
        match result {
            Err(error) if !is_gone(&error) => tracing::error!("{what}: {error}"),
            _ => {}
        }
    }
}

/// The VMM is gone: ESRCH from the userfaultfd.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}
