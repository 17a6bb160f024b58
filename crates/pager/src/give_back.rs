//! Bringing all content back: before a detach, and when the guest was reset.

pub mod release_file;
pub mod settle;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use ebb_ledger::Content;
use ebb_units::{FRAME_BYTES, FRAMES_PER_HUGE, FrameRange, Gfn};
use ebb_vm::Region;

use crate::fault::installer::Installer;
use crate::folios::FolioMap;
use crate::frames::Frames;
use crate::frames::words::{Served, again};
use crate::residency::Residency;
use crate::support::counters::{Counters, add, subtract};

/// Failures in a row after which the cause is not the frames, but the swap file or the host.
const FAILURES_MAX: u32 = 256;
/// A failure that takes seconds counts as so many.
const SLOW_FAILURE: u32 = 64;

/// What happens to empty frames that read as zero when all content comes back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Zeros {
    /// They get memory: a device, or a process that waits for no fault, may use them.
    Fill,
    /// They become holes that are resident on record, like memory that was never used. Their next
    /// touch gets zeros, from Ebb or from the kernel.
    Leave,
}

/// Brings back the content of one VM's frames.
pub struct Returner {
    frames: Arc<Frames>,
    folios: Arc<FolioMap>,
    residency: Arc<Residency>,
    installer: Arc<Installer>,
}

impl Returner {
    pub(crate) fn new(
        frames: &Arc<Frames>,
        folios: &Arc<FolioMap>,
        residency: &Arc<Residency>,
        installer: &Arc<Installer>,
    ) -> Returner {
        Returner {
            frames: Arc::clone(frames),
            folios: Arc::clone(folios),
            residency: Arc::clone(residency),
            installer: Arc::clone(installer),
        }
    }

    /// Brings back every evicted frame and the empty frames, and ends every watch. Returns the
    /// bytes brought back. Faults are served meanwhile.
    ///
    /// Frames of hugetlb files always get memory: the kernel may have no page left when they are
    /// touched, and then ends the VMM.
    ///
    /// # Errors
    /// `ENOMEM`: the host has not enough memory. Frames that are not back stay on record and are
    /// served on touch.
    pub fn give_back_all(&self, zeros: Zeros) -> io::Result<u64> {
        self.folios.forget();
        let before = self.frames.counters().non_resident();
        // The watches come first: each brings its block back before its devices.
        for (frames, content) in self.frames.off_record() {
            if let Content::Watch { .. } = content {
                for metadata in frames.frames() {
                    add(&self.frames.counters().worker_batches, 1);
                    let back = again(|| self.installer.restore_watched(metadata));
                    self.or_wake(back)?;
                }
            }
        }
        self.or_wake(
            self.give_back_each(1, |frames, content| !self.is_left(zeros, frames, content)),
        )?;
        let after = self.frames.counters().non_resident();
        // Nothing is evicted any more, so no fault makes a frame empty from now on.
        self.or_wake(self.end_empty(zeros))?;
        // This comes last: frames that came back until now have kept their slots.
        self.residency.give_up_all()?;
        Ok(before.saturating_sub(after) * FRAME_BYTES)
    }

    /// Brings back the evicted frames, and the empty ones that do not read as zero, for processes
    /// that map the memory without Ebb. Frames that stay non-resident are free in the guest, or
    /// read as the zeros that they held. Returns the bytes of the evicted frames. Faults are served
    /// meanwhile.
    ///
    /// # Errors
    /// As [`Returner::give_back_all`].
    pub fn give_back_in_use(&self) -> io::Result<u64> {
        self.folios.forget();
        let Counters { saved_frames, on_disk_frames, .. } = &self.frames.counters();
        let before = saved_frames.load(Relaxed) + on_disk_frames.load(Relaxed);
        self.or_wake(self.give_back_each(1, |_, content| !reads_as_zero(content)))?;
        Ok(before * FRAME_BYTES)
    }

    /// Brings back the content that does not read as zero, of memory that the VMM maps nowhere
    /// ([`Frames::unmapped`]): the VMM may map that memory again, and nobody is told. Does the same
    /// for the `doubted` files, which the VMM may have mapped again already, where nobody watches
    /// them. A frame that fails keeps no other from coming back. Until this has succeeded, nothing
    /// of `doubted` is evicted.
    ///
    /// # Errors
    /// As [`Returner::give_back_all`], of the first frame that failed, and as [`Frames::unmapped`].
    pub fn give_back_unmapped(&self, doubted: &[usize]) -> io::Result<()> {
        self.frames.doubted().set(doubted);
        let mut unmapped = self.frames.unmapped()?;
        let doubted = self.frames.ram().regions().filter(|region| doubted.contains(&region.file));
        unmapped.extend(doubted.map(Region::frames));
        if unmapped.is_empty() {
            self.frames.doubted().set(&[]);
            return Ok(());
        }
        let is_unmapped = |frames: FrameRange| {
            unmapped.iter().any(|other| other.start < frames.end() && frames.start < other.end())
        };
        self.give_back_each(FAILURES_MAX, |frames, content| {
            is_unmapped(frames) && !reads_as_zero(content)
        })?;
        self.frames.doubted().set(&[]);
        Ok(())
    }

    /// Whether empty frames become holes that are resident on record.
    fn is_left(&self, zeros: Zeros, frames: FrameRange, content: Content) -> bool {
        zeros == Zeros::Leave && reads_as_zero(content) && self.frames.ram().knows_holes(frames)
    }

    /// Gives the frames memory that are still empty, or makes them resident on record without
    /// memory. Faults have made frames empty meanwhile, which the guest had freed.
    ///
    /// An empty word must not outlive the watch of its frame. The kernel would give the frame memory
    /// unseen, and the word would still say that it reads as zero.
    fn end_empty(&self, zeros: Zeros) -> io::Result<()> {
        for (frames, content) in self.frames.off_record() {
            match content {
                _ if self.is_left(zeros, frames, content) => {
                    again(|| Ok(self.leave_hole(frames)))?;
                }
                Content::Empty { .. } => again(|| self.give_back(frames))?,
                _ => {}
            }
        }
        Ok(())
    }

    fn leave_hole(&self, frames: FrameRange) -> Served {
        if frames.count < FRAMES_PER_HUGE && self.frames.split(frames.start.huge()).is_err() {
            return Served::Busy;
        }
        let Some(held) = self.frames.lock_words(frames) else { return Served::Busy };
        let left = held.contents().filter(|(_, content)| reads_as_zero(*content));
        let count = left.map(|(frames, _)| frames.count).sum();
        subtract(&self.frames.counters().empty_frames, count);
        let left = |content| if reads_as_zero(content) { Content::Resident } else { content };
        let wanted = held.unlock_with(left);
        self.frames.after(wanted, frames);
        Served::Done
    }

    /// Wakes all touches after a failure: a touch that waited for a holder that failed was not
    /// woken.
    fn or_wake(&self, result: io::Result<()>) -> io::Result<()> {
        if result.is_err() {
            self.frames.wake_all()?;
        }
        result
    }

    /// Brings back each wanted frame. Goes on after a failure, until `failures_max` frames in a row
    /// have failed.
    fn give_back_each(
        &self,
        failures_max: u32,
        wanted: impl Fn(FrameRange, Content) -> bool,
    ) -> io::Result<()> {
        let (mut first, mut in_a_row) = (None, 0);
        let each = self.frames.off_record().into_iter();
        for (frames, content) in each.filter(|(frames, content)| wanted(*frames, *content)) {
            let count = match content {
                Content::Empty { .. } => frames.count,
                Content::Saved { .. } | Content::OnDisk { .. } => 1,
                _ => continue,
            };
            for start in (frames.start.0..frames.end().0).step_by(count as usize) {
                add(&self.frames.counters().worker_batches, 1);
                let part = FrameRange::new(Gfn(start), count);
                let Err(error) = self.give_back_part(part, content) else {
                    in_a_row = 0;
                    continue;
                };
                in_a_row += if error.kind() == io::ErrorKind::TimedOut { SLOW_FAILURE } else { 1 };
                let first = first.get_or_insert(error);
                if in_a_row >= failures_max {
                    return Err(std::mem::replace(first, io::ErrorKind::Other.into()));
                }
            }
        }
        first.map_or(Ok(()), Err)
    }

    /// Brings back a range of empty frames, or one evicted frame.
    fn give_back_part(&self, part: FrameRange, content: Content) -> io::Result<()> {
        match content {
            Content::Empty { .. } => again(|| self.give_back(part)),
            _ => again(|| self.bring_back(part.start)),
        }
    }

    fn give_back(&self, frames: FrameRange) -> io::Result<Served> {
        match self.installer.refill(frames)? {
            true => Ok(Served::Done),
            false => Ok(Served::Busy),
        }
    }

    /// Brings back one frame. A frame that a fault has brought back meanwhile needs nothing.
    fn bring_back(&self, gfn: Gfn) -> io::Result<Served> {
        match self.frames.ledger().content(gfn) {
            Content::Saved { .. } | Content::OnDisk { .. } => self.installer.install_backed(gfn),
            _ => Ok(Served::Done),
        }
    }
}

fn reads_as_zero(content: Content) -> bool {
    matches!(content, Content::Empty { fill: 0, .. })
}
