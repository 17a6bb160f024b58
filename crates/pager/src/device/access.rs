//! Frames that a device of ours will use: they are brought into memory, and stay resident.

pub mod vacate;

use std::io;
use std::sync::Arc;

use ebb_ledger::Content;
use ebb_units::{FrameRange, Gfn, HugeFrame};

use crate::fault::installer::Installer;
use crate::folios::{FolioMap, Grain};
use crate::frames::Frames;
use crate::frames::words::{ATTEMPTS, SOON_ATTEMPTS, Served, again_for};
use crate::residency::Residency;
use crate::residency::dead::Verdict;
use crate::support::counters::add;

/// Pins one VM's frames for devices.
pub struct DeviceAccess {
    frames: Arc<Frames>,
    folios: Arc<FolioMap>,
    residency: Arc<Residency>,
    installer: Arc<Installer>,
}

impl DeviceAccess {
    pub(crate) fn new(
        frames: &Arc<Frames>,
        folios: &Arc<FolioMap>,
        residency: &Arc<Residency>,
        installer: &Arc<Installer>,
    ) -> DeviceAccess {
        DeviceAccess {
            frames: Arc::clone(frames),
            folios: Arc::clone(folios),
            residency: Arc::clone(residency),
            installer: Arc::clone(installer),
        }
    }

    /// Brings these frames into memory, where they stay until [`DeviceAccess::unpin`]. With
    /// `replace`, the caller writes every byte of them, and evicted content is not read.
    ///
    /// # Errors
    /// A frame cannot be brought back; nothing is pinned then.
    pub fn pin(&self, frames: FrameRange, replace: bool) -> io::Result<()> {
        self.pin_for(ATTEMPTS, frames, replace)
    }

    /// As [`DeviceAccess::pin`], for a device that asks again for as long as it takes: waits some
    /// milliseconds at most for the holder of a frame's lock, as a slow swap disk can hold one for
    /// any time.
    ///
    /// # Errors
    /// `PermissionDenied`: no device may use a frame. Any other: it cannot be had now. Nothing is
    /// pinned then.
    pub fn pin_soon(&self, frames: FrameRange, replace: bool) -> io::Result<()> {
        self.pin_for(SOON_ATTEMPTS, frames, replace)
    }

    fn pin_for(&self, attempts: usize, frames: FrameRange, replace: bool) -> io::Result<()> {
        frames.frames().for_each(|gfn| self.frames.pins().pin(gfn));
        let settle = |gfn| again_for(attempts, || self.settle_pin(gfn, replace));
        let there = frames.frames().try_for_each(settle);
        let there = there.and_then(|()| self.fill_holes(attempts, frames, replace));
        if there.is_err() {
            self.unpin(frames);
        }
        there
    }

    /// Ends one [`DeviceAccess::pin`] of the same frames.
    pub fn unpin(&self, frames: FrameRange) {
        frames.frames().for_each(|gfn| self.frames.pins().unpin(gfn));
    }

    fn settle_pin(&self, gfn: Gfn, replace: bool) -> io::Result<Served> {
        match self.frames.ledger().unlocked(gfn) {
            None => Ok(Served::Busy),
            Some(Content::Resident) => Ok(Served::Done),
            Some(Content::Unplugged) => Err(io::ErrorKind::PermissionDenied.into()),
            Some(Content::Watch { head, order }) => self.installer.restore(gfn, head, order),
            Some(Content::Saved { .. } | Content::OnDisk { .. }) => self.pin_back(gfn, replace),
            Some(content) => self.installer.install(gfn, content),
        }
    }

    /// Gives holes that are resident on record their memory before the device does so by its own
    /// access: that access could bring a huge page, whose zeros would win over evicted content in
    /// it.
    fn fill_holes(&self, attempts: usize, frames: FrameRange, replace: bool) -> io::Result<()> {
        let fill = |gfn| again_for(attempts, || self.fill_hole(gfn, replace));
        for part in frames.by_huge() {
            // A huge frame whose single word says that all of it is resident has no evicted part.
            let huge = part.start.huge();
            if self.folios.grain_of(huge) == Grain::Huge && !self.frames.ledger().is_split(huge) {
                continue;
            }
            for part in self.frames.ram().parts(part) {
                if !self.frames.ram().is_full(part)? {
                    part.frames().try_for_each(fill)?;
                }
            }
        }
        Ok(())
    }

    fn fill_hole(&self, gfn: Gfn, replace: bool) -> io::Result<Served> {
        let frame = FrameRange::new(gfn, 1);
        if !self.frames.ram().is_hole(frame)? {
            return Ok(Served::Done);
        }
        let Some(held) = self.frames.lock_word_of(gfn) else { return Ok(Served::Busy) };
        let words = held.frames();
        if held.contents().any(|(_, content)| content != Content::Resident) {
            self.frames.after(held.abandon(), words);
            return self.settle_pin(gfn, replace).map(|_| Served::Busy);
        }
        self.frames.devices().lost(frame);
        let filled = match self.folios.grain_of(gfn.huge()) {
            // This process's mapping has no huge pages.
            Grain::Frame => self.frames.ram().populate(frame),
            Grain::Huge if self.is_mixed(gfn.huge()) => self.frames.fill(gfn, 0),
            Grain::Huge => Ok(()),
        };
        self.frames.after(held.abandon(), words);
        // The guest may have touched the frame, and waits for it too.
        filled.and_then(|()| self.frames.wake(frame)).map(|()| Served::Done)
    }

    /// Whether parts of a huge frame are evicted or empty. Then all of RAM is watched. An eviction
    /// takes no huge frame with a pinned frame in it, so no further part becomes non-resident.
    fn is_mixed(&self, huge: HugeFrame) -> bool {
        let there = |content| matches!(content, Content::Resident | Content::Watch { .. });
        FrameRange::huge(huge).frames().any(|gfn| !there(self.frames.ledger().content(gfn)))
    }

    /// Brings an evicted frame back; unread, if its content is not needed.
    fn pin_back(&self, gfn: Gfn, replace: bool) -> io::Result<Served> {
        let Ok(held) = self.frames.ledger().lock_frame(gfn) else { return Ok(Served::Busy) };
        let counters = &self.frames.counters();
        let (evicted, blank) = match held.content().is_evicted() {
            false => (false, None),
            true if replace => (true, Some(&counters.replaced_frames)),
            true => {
                let dead = self.residency.verdict(gfn) == Verdict::Dead;
                (true, dead.then_some(&counters.false_reads_avoided))
            }
        };
        if let Some(counter) = blank {
            return self.installer.install_blank(gfn, held).inspect(|_| add(counter, 1));
        }
        self.frames.after(held.abandon(), FrameRange::new(gfn, 1));
        if evicted { self.installer.install_backed(gfn) } else { Ok(Served::Busy) }
    }
}
