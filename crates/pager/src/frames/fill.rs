//! Filling holes with pages.

use std::io;

use ebb_sys::uffd::{HvaRange, Uffd, Watch, feature};
use ebb_sys::uffd_node;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};

use crate::frames::Frames;
use crate::frames::errors::is_unmapped;

impl Frames {
    /// Fills a hole with a page whose every byte is `fill`. A page that is already there stays.
    pub(crate) fn fill(&self, gfn: Gfn, fill: u8) -> io::Result<()> {
        let filled = self.fill_by(gfn, |uffd, to| match fill {
            0 => uffd.zero(to, false),
            _ => uffd.copy(to.start, &[fill; FRAME_BYTES as usize]),
        });
        match filled {
            Err(error) if is_present(&error) => Ok(()),
            result => result,
        }
    }

    pub(crate) fn copy_page(&self, gfn: Gfn, page: &[u8]) -> io::Result<()> {
        match self.fill_by(gfn, |uffd, to| uffd.copy(to.start, page)) {
            // The page is already there: a daemon died between the copy and the update of the word.
            Err(error) if is_present(&error) => self.unprotect(FrameRange::new(gfn, 1)),
            result => result,
        }
    }

    /// Fills consecutive frames that were not asked for. Fails for a frame that the VMM maps
    /// nowhere.
    pub(crate) fn copy_run(&self, frames: FrameRange, bytes: &[u8]) -> io::Result<()> {
        let mut pages = frames.frames().zip(bytes.chunks(FRAME_BYTES as usize));
        match self.uffd.copy_run(self.hva(frames)?.start, bytes) {
            Ok(done) if done == frames.bytes() => Ok(()),
            Err(error) if is_unmapped(&error) && frames.count == 1 => Err(error),
            // The VMM has split its mapping here, and no call goes beyond the split.
            Err(error) if is_unmapped(&error) => {
                pages.try_for_each(|(gfn, page)| self.copy_run(FrameRange::new(gfn, 1), page))
            }
            // Some pages are already there: a daemon died between the copy and the update of the
            // word.
            _ => pages.try_for_each(|(gfn, page)| self.copy_page(gfn, page)),
        }
    }

    /// Fills a frame by `fill`: in the VMM, or in this process where the VMM does not map it. The
    /// caller has locked the frame's word.
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
        let mapping = backing.map(place.offset, FRAME_BYTES)?;
        let here = HvaRange { start: mapping.address(), bytes: FRAME_BYTES };
        let uffd = self.uffd_here()?;
        uffd.register(here, Watch::MissingAndWrite)?;
        fill(uffd, here)
    }

    /// The userfaultfd of this process, made when it is first needed.
    fn uffd_here(&self) -> io::Result<&Uffd> {
        if self.uffd_here.get().is_none() {
            let uffd = uffd_node::own_uffd()?;
            uffd.handshake(feature::needed())?;
            // Another thread may have set its own first.
            let _ = self.uffd_here.set(uffd);
        }
        self.uffd_here.get().ok_or_else(|| io::ErrorKind::Other.into())
    }

    /// Fills frames with zeros up to the first that already has a page, and returns the filled
    /// range. If the very first frame already has a page, that page wins and the frame counts as
    /// filled.
    pub(crate) fn zero_run(&self, frames: FrameRange) -> io::Result<FrameRange> {
        let bytes = match self.uffd.zero_run(self.hva(frames)?) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => FRAME_BYTES,
            // The VMM has split its mapping here, and no call goes beyond the split.
            Err(_) if frames.count > 1 => {
                return self.zero_run(FrameRange::new(frames.start, 1));
            }
            Err(error) if is_unmapped(&error) => {
                self.fill(frames.start, 0)?;
                FRAME_BYTES
            }
            result => result?,
        };
        Ok(FrameRange::new(frames.start, bytes / FRAME_BYTES))
    }
}

pub(crate) fn is_present(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::AlreadyExists
}
