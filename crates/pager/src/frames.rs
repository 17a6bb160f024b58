//! A VM's frames: their memory, their words, and who is told of their faults.

use self::errors::is_gone;
use self::errors::is_unmapped;
use self::io_mapping::IoMapping;
use self::pins::Pins;
use std::io;
use std::sync::{Arc, Mutex, OnceLock};

use ebb_ledger::{Content, Ledger, SplitError};
use ebb_sys::uffd::{HvaRange, Uffd, Watch};
use ebb_units::{FrameRange, HugeFrame};
use ebb_vm::{Ram, Region};

use crate::support::counters::Counters;
use ebb_vm::Puncher;

pub mod errors;
pub mod fill;
pub mod io_mapping;
pub mod pins;
pub mod punch;
pub mod ranges;
pub mod soft_iommu;
pub mod unmapped;
pub mod words;

/// Tells in which of some ranges the VMM has its RAM.
type Mapped = Box<dyn Fn(&[HvaRange]) -> io::Result<Vec<HvaRange>> + Send + Sync>;

/// The frames of one VM. Used by all of its threads at once.
pub struct Frames {
    ram: Arc<Ram>,
    /// Only this gives memory back.
    puncher: Puncher,
    ledger: Ledger,
    uffd: Uffd,
    devices: Box<dyn IoMapping>,
    pins: Pins,
    mapped: OnceLock<Mapped>,
    /// For what the VMM has not mapped ([`Frames::unmapped`]).
    uffd_here: OnceLock<Uffd>,
    /// Files of which nothing goes.
    doubted: Mutex<Vec<usize>>,
    /// Where memory can be plugged.
    pluggable: OnceLock<Vec<FrameRange>>,
    counters: Counters,
}

impl Frames {
    /// Over RAM and its ledger; faults come to `uffd`.
    pub(crate) fn new(
        ram: Arc<Ram>,
        ledger: Ledger,
        uffd: Uffd,
        devices: Box<dyn IoMapping>,
    ) -> Frames {
        Frames {
            pins: Pins::new(ram.end().0),
            puncher: Puncher::new(Arc::clone(&ram)),
            ram,
            ledger,
            uffd,
            devices,
            mapped: OnceLock::new(),
            uffd_here: OnceLock::new(),
            doubted: Mutex::default(),
            pluggable: OnceLock::new(),
            counters: Counters::default(),
        }
    }

    /// The userfaultfd in the VMM.
    pub(crate) fn uffd(&self) -> &Uffd {
        &self.uffd
    }

    /// Devices that reach the memory by themselves.
    pub(crate) fn devices(&self) -> &dyn IoMapping {
        &*self.devices
    }

    /// Who uses which frames right now.
    pub(crate) fn pins(&self) -> &Pins {
        &self.pins
    }

    /// What is counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Memory can be plugged in these regions; once.
    pub(crate) fn set_pluggable(&self, regions: Vec<FrameRange>) {
        // A second one would be of the same devices.
        let _ = self.pluggable.set(regions);
    }

    /// The VM's RAM.
    pub fn ram(&self) -> &Arc<Ram> {
        &self.ram
    }

    /// Its ledger.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
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
    /// As [`Frames::watch_all`]; `InvalidInput`: the range is not in one region.
    pub fn watch_writes(&self, frames: FrameRange) -> io::Result<()> {
        self.uffd.register(self.hva(frames)?, self.watch_of(frames))
    }

    /// Writes to protected frames come here, wherever they are in RAM.
    ///
    /// # Errors
    /// As [`Frames::watch_all`].
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

    /// What is not watched was not protected either.
    pub(crate) fn unprotect_if_watched(&self, frames: FrameRange) -> io::Result<()> {
        self.unprotect(frames).or_else(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::InvalidInput => Ok(()),
            _ => Err(error),
        })
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

    pub(crate) fn off_record(&self) -> Vec<(FrameRange, Content)> {
        self.ledger.runs().collect()
    }
}
