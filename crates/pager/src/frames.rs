//! A VM's frames: their memory, their ledger words, and the userfaultfd that reports their faults.

use self::doubted_files::DoubtedFiles;
use self::errors::is_unmapped;
use self::errors::is_vmm_ended;
use self::io_mapping::IoMapping;
use self::pins::Pins;
use std::io;
use std::sync::{Arc, OnceLock};

use ebb_ledger::{Content, Ledger, SplitError};
use ebb_sys::uffd::{HvaRange, Uffd, Watch};
use ebb_units::{FrameRange, HugeFrame};
use ebb_vm::{Puncher, Ram, Region};

use crate::support::counters::Counters;

pub mod doubted_files;
pub mod errors;
pub mod fill;
pub mod io_mapping;
pub mod pins;
pub mod punch;
pub mod ranges;
pub mod soft_iommu;
pub mod unmapped;
pub mod words;

/// Returns those of some ranges in which the VMM still maps its RAM.
type Mapped = Box<dyn Fn(&[HvaRange]) -> io::Result<Vec<HvaRange>> + Send + Sync>;

/// The frames of one VM. All threads of the VM use them at once.
pub struct Frames {
    ram: Arc<Ram>,
    /// The only part that returns memory to the host.
    puncher: Puncher,
    ledger: Ledger,
    uffd: Uffd,
    devices: Box<dyn IoMapping>,
    pins: Pins,
    mapped: OnceLock<Mapped>,
    /// A userfaultfd of this process, for memory that the VMM does not map ([`Frames::unmapped`]).
    uffd_here: OnceLock<Uffd>,
    doubted: DoubtedFiles,
    /// The regions in which memory can be plugged.
    pluggable: OnceLock<Vec<FrameRange>>,
    counters: Counters,
}

impl Frames {
    /// Makes frames over RAM and its ledger, whose faults come to `uffd`.
    pub(crate) fn new(
        puncher: Puncher,
        ledger: Ledger,
        uffd: Uffd,
        devices: Box<dyn IoMapping>,
    ) -> Frames {
        let ram = Arc::clone(puncher.ram());
        Frames {
            pins: Pins::new(ram.end().0),
            puncher,
            ram,
            ledger,
            uffd,
            devices,
            mapped: OnceLock::new(),
            uffd_here: OnceLock::new(),
            doubted: DoubtedFiles::default(),
            pluggable: OnceLock::new(),
            counters: Counters::default(),
        }
    }

    /// The userfaultfd in the VMM.
    pub(crate) fn uffd(&self) -> &Uffd {
        &self.uffd
    }

    /// The devices that reach the memory by themselves.
    pub(crate) fn devices(&self) -> &dyn IoMapping {
        &*self.devices
    }

    /// The frames that devices use right now.
    pub(crate) fn pins(&self) -> &Pins {
        &self.pins
    }

    /// The RAM files of which nothing is evicted.
    pub(crate) fn doubted(&self) -> &DoubtedFiles {
        &self.doubted
    }

    /// The pager's counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Sets the regions in which memory can be plugged. Takes effect once.
    pub(crate) fn set_pluggable(&self, regions: Vec<FrameRange>) {
        // A second call would name the same devices.
        let _ = self.pluggable.set(regions);
    }

    /// The VM's RAM.
    pub fn ram(&self) -> &Arc<Ram> {
        &self.ram
    }

    /// The VM's ledger.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Has all first touches and all writes to protected frames come here from now on. Without
    /// this, the kernel gives missing memory.
    ///
    /// # Errors
    /// `EBUSY`: another userfaultfd watches a part of it. Others as ioctl_userfaultfd(2).
    pub fn watch_all(&self) -> io::Result<()> {
        let ranges: Vec<HvaRange> = self.ram.regions().map(Region::hva_range).collect();
        self.watch_missing(&ranges)
    }

    /// Has first touches of these ranges come here, except ranges in which the VMM has no RAM any
    /// more: those are about to be released.
    ///
    /// Anything else that the VMM maps at such an address must not be filled with the guest's
    /// memory. So the mapping is checked before the registration, and again after it. Only a range
    /// that is proved to be something else is unwatched: in all others, content may be evicted, and
    /// its hole would read as zeros.
    pub(crate) fn watch_missing(&self, ranges: &[HvaRange]) -> io::Result<()> {
        let ours = self.of_ram(ranges)?;
        ours.iter().try_for_each(|range| self.uffd.register(*range, Watch::MissingAndWrite))?;
        let Ok(left) = self.of_ram(&ours) else { return Ok(()) };
        for range in ours.iter().filter(|range| !left.contains(range)) {
            self.report("unwatch", self.uffd.unregister(*range));
        }
        Ok(())
    }

    /// Returns those of the ranges where the VMM maps its RAM.
    pub(crate) fn of_ram(&self, ranges: &[HvaRange]) -> io::Result<Vec<HvaRange>> {
        match self.mapped.get() {
            Some(which) => which(ranges),
            None => Ok(ranges.to_vec()),
        }
    }

    /// Sets the function that says in which of some ranges the VMM still maps its RAM. Takes effect
    /// once.
    pub fn check_mapped(
        &self,
        which: impl Fn(&[HvaRange]) -> io::Result<Vec<HvaRange>> + Send + Sync + 'static,
    ) {
        // A second function would look at the same VMM.
        let _ = self.mapped.set(Box::new(which));
    }

    /// Has writes to protected frames of this range come here.
    ///
    /// # Errors
    /// As [`Frames::watch_all`]; `InvalidInput`: the range is not in one region.
    pub fn watch_writes(&self, frames: FrameRange) -> io::Result<()> {
        self.uffd.register(self.hva(frames)?, self.watch_of(frames))
    }

    /// Has writes to protected frames anywhere in RAM come here.
    ///
    /// # Errors
    /// As [`Frames::watch_all`].
    pub fn watch_all_writes(&self) -> io::Result<()> {
        let all: Vec<HvaRange> = self.ram.regions().map(Region::hva_range).collect();
        let mapped = self.of_ram(&all)?;
        let mut regions = self.ram.regions().filter(|region| mapped.contains(&region.hva_range()));
        let watch = |region: &Region| self.watch_of(region.frames());
        regions.try_for_each(|region| self.uffd.register(region.hva_range(), watch(region)))
    }

    /// Wakes all waiting touches: faults whose events a dead daemon had read are raised again.
    ///
    /// # Errors
    /// As ioctl_userfaultfd(2).
    pub fn wake_all(&self) -> io::Result<()> {
        self.ram.regions().try_for_each(|region| self.uffd.wake(region.hva_range()))
    }

    /// Ends every protection and gives all faults back to the kernel. All evicted content must have
    /// been brought back before.
    ///
    /// # Errors
    /// As ioctl_userfaultfd(2).
    pub fn unwatch_all(&self) -> io::Result<()> {
        let all: Vec<HvaRange> = self.ram.regions().map(Region::hva_range).collect();
        // A range that the VMM does not map any more is not watched either.
        let mapped = self.of_ram(&all).unwrap_or(all);
        mapped.into_iter().try_for_each(|range| self.uffd.unregister(range))
    }

    /// Lets writes to these frames through, and wakes writers that wait. Where the VMM does not map
    /// our RAM, nothing is protected.
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

    /// Unprotects the frames if they are watched: unwatched frames were not protected either.
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

    /// Called after words were locked for a moment: if a touch was marked in that moment
    /// (`wanted`), wakes it, and it faults again.
    pub(crate) fn after(&self, wanted: bool, frames: FrameRange) {
        if !wanted {
            return;
        }
        // A huge frame's one word covers all regions that meet in it.
        for part in self.ram.parts(frames) {
            self.report("wake", self.wake(part));
        }
    }

    /// Logs an error on a path that cannot return it. The VMM's end is no error.
    pub(crate) fn report(&self, what: &str, result: io::Result<()>) {
        match result {
            Err(error) if !is_vmm_ended(&error) => tracing::error!("{what}: {error}"),
            _ => {}
        }
    }

    pub(crate) fn off_record(&self) -> Vec<(FrameRange, Content)> {
        self.ledger.runs().collect()
    }
}
