//! Putting pages where there are none.

use std::io;

use ebb_sys::mapping::Mapping;
use ebb_sys::uffd::{HvaRange, Uffd, Watch, feature};
use ebb_sys::uffd_node;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};

use crate::frames::Frames;
use crate::frames::errors::is_unmapped;

impl Frames {
    /// Puts a page of `fill` where there is none.
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
            // There already: a daemon died between the copy and the word.
            Err(error) if is_present(&error) => self.unprotect(FrameRange::new(gfn, 1)),
            result => result,
        }
    }

    /// Fills frames in a row, that nobody asked for: not where the VMM has them mapped nowhere.
    pub(crate) fn copy_run(&self, frames: FrameRange, bytes: &[u8]) -> io::Result<()> {
        let mut pages = frames.frames().zip(bytes.chunks(FRAME_BYTES as usize));
        match self.uffd.copy_run(self.hva(frames)?.start, bytes) {
            Ok(done) if done == frames.bytes() => Ok(()),
            Err(error) if is_unmapped(&error) && frames.count == 1 => Err(error),
            // The VMM has parted its mapping here: no call goes beyond that.
            Err(error) if is_unmapped(&error) => {
                pages.try_for_each(|(gfn, page)| self.copy_run(FrameRange::new(gfn, 1), page))
            }
            // Some are there already: a daemon died between the copy and the word.
            _ => pages.try_for_each(|(gfn, page)| self.copy_page(gfn, page)),
        }
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

    /// Fills frames until one that is there already; the first may be that one, and
    /// then its page wins. How far it came.
    pub(crate) fn zero_run(&self, frames: FrameRange) -> io::Result<FrameRange> {
        let bytes = match self.uffd.zero_run(self.hva(frames)?) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => FRAME_BYTES,
            // The VMM has parted its mapping here: no call goes beyond that.
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
