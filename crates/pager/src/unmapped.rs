//! Memory that the VMM has mapped nowhere, and yet not given up: its file is open in the VMM, which
//! can map it again.
//!
//! Nothing of it can be protected, so nothing of it is evicted. What it has elsewhere comes back
//! into its file by a mapping of this process, which finds the same memory. That mapping is watched
//! by a userfaultfd as well: only so is a page there either as a whole or not at all, and only so
//! does a page win that somebody else has put there.

use std::io;
use std::sync::{MutexGuard, PoisonError};

use ebb_sys::mapping::Mapping;
use ebb_sys::uffd::{HvaRange, Uffd, Watch, feature};
use ebb_sys::uffd_node;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};
use ebb_vm::Region;
use rustix::io::Errno;

use crate::pager::Pager;

impl Pager {
    /// What of RAM the VMM has not mapped where it had it, as far as can be known.
    ///
    /// # Errors
    /// As [`ebb_vm::unplugged::mapped`].
    pub fn unmapped(&self) -> io::Result<Vec<FrameRange>> {
        let regions: Vec<Region> = self.ram.regions().copied().collect();
        let all: Vec<HvaRange> = regions.iter().map(Region::hva_range).collect();
        let there = self.of_ram(&all)?;
        let is_away = |region: &&Region| !there.contains(&region.hva_range());
        Ok(regions.iter().filter(is_away).map(Region::frames).collect())
    }

    /// Whether the VMM may have mapped these files again without anybody's being told.
    pub(crate) fn doubt(&self, files: &[usize]) {
        *self.lock_doubted() = files.to_vec();
    }

    /// Whether a frame is RAM, of a file that is not doubted.
    pub(crate) fn is_in_no_doubt(&self, gfn: Gfn) -> bool {
        let region = self.ram.region_of(gfn);
        region.is_some_and(|region| !self.lock_doubted().contains(&region.file))
    }

    fn lock_doubted(&self) -> MutexGuard<'_, Vec<usize>> {
        self.doubted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has `fill` fill a frame: in the VMM, or here where the VMM has nothing at its address. As the
    /// holder of the frame's word.
    pub(crate) fn fill_by(
        &self,
        gfn: Gfn,
        fill: impl Fn(&Uffd, HvaRange) -> io::Result<()>,
    ) -> io::Result<()> {
        match fill(&self.uffd, self.hva(FrameRange::new(gfn, 1))?) {
            Err(error) if is_unmapped(&error) => self.fill_here(gfn, fill),
            filled => filled,
        }
    }

    fn fill_here(
        &self,
        gfn: Gfn,
        fill: impl Fn(&Uffd, HvaRange) -> io::Result<()>,
    ) -> io::Result<()> {
        let place = self.ram.place(gfn.gpa()).ok_or(io::ErrorKind::InvalidInput)?;
        let backing = self.ram.files().get(place.file).ok_or(io::ErrorKind::InvalidInput)?;
        let mapping = Mapping::new(&backing.file, place.offset, FRAME_BYTES)?;
        let here = HvaRange { start: mapping.address(), bytes: FRAME_BYTES };
        let uffd = self.uffd_here()?;
        uffd.register(here, Watch::MissingAndWrite)?;
        fill(uffd, here)
    }

    /// Of this process, made when it is first needed.
    fn uffd_here(&self) -> io::Result<&Uffd> {
        if self.uffd_here.get().is_none() {
            let uffd = uffd_node::own_uffd()?;
            uffd.handshake(feature::needed())?;
            // Somebody else's may have come first.
            let _ = self.uffd_here.set(uffd);
        }
        self.uffd_here.get().ok_or_else(|| io::ErrorKind::Other.into())
    }
}

/// Whether the VMM has nothing of ours at the address that an ioctl was for.
pub(crate) fn is_unmapped(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::NOENT.raw_os_error())
}
