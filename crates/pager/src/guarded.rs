//! Memory that comes and goes in blocks while the VM runs: guarded while it is unplugged, so
//! that a touch of it is noticed.

use std::io;
use std::sync::{Arc, PoisonError};

use ebb_ledger::Content;
use ebb_sys::uffd::{HvaRange, Watch};
use ebb_units::{FrameRange, Gfn, HugeFrame};

use crate::install::Served;
use crate::pager::Pager;
use crate::zero::EMPTY;

/// Who knows what a touch of unplugged memory means. Called on the fault path: no waiting, no
/// allocation.
pub trait Sentry: Send + Sync {
    /// A processor touches this frame, which is guarded and stays so until this returns; it finds
    /// zeros there for all that, or it would wait for ever.
    fn touched(&self, gfn: Gfn, write: bool);
}

impl Pager {
    /// From now on first touches of these regions come here, whatever the mode, and `sentry` is
    /// told of those of guarded frames. Once.
    ///
    /// # Errors
    /// As [`Pager::watch_all`]; `InvalidInput`: one of them is not in one region of RAM.
    pub fn watch_pluggable(
        &self,
        regions: Vec<FrameRange>,
        sentry: Arc<dyn Sentry>,
    ) -> io::Result<()> {
        // What is gone is not watched.
        let there = regions.iter().filter(|frames| self.ram.region_of(frames.start).is_some());
        let hvas: Vec<HvaRange> =
            there.map(|frames| self.hva(*frames)).collect::<io::Result<_>>()?;
        self.watch_missing(&hvas)?;
        // A second one would be of the same devices.
        let _ = self.pluggable.set(regions);
        *self.sentry.write().unwrap_or_else(PoisonError::into_inner) = Some(sentry);
        Ok(())
    }

    /// What is to be watched in a range for the sake of its metadata.
    pub(crate) fn watch_of(&self, frames: FrameRange) -> Watch {
        let overlaps = |region: &FrameRange| {
            region.start.0 < frames.end().0 && frames.start.0 < region.end().0
        };
        match self.pluggable.get().is_some_and(|regions| regions.iter().any(overlaps)) {
            true => Watch::MissingAndWrite,
            false => Watch::Write,
        }
    }

    /// Takes whole huge frames from the guest, which has unplugged them: devices may not use
    /// them, they have no memory, and what they had elsewhere is dropped. Those that are
    /// guarded already are made sure of.
    ///
    /// # Errors
    /// `ResourceBusy`: a device uses a part of them. Or as fallocate(2). None of them is newly
    /// guarded then; their content may be gone.
    pub fn guard(&self, frames: FrameRange) -> io::Result<()> {
        let mut taken = Vec::new();
        let guarded = self.guard_each(frames, &mut taken).and_then(|()| self.ram.punch(frames));
        if guarded.is_err() {
            taken.into_iter().try_for_each(|huge| self.again(|| self.plug_huge(huge)))?;
        }
        guarded
    }

    /// The word comes first: from then on a touch of what is missing is told.
    fn guard_each(&self, frames: FrameRange, taken: &mut Vec<HugeFrame>) -> io::Result<()> {
        for part in self.whole(frames)? {
            let huge = part.start.huge();
            self.end_watches_in(part)?;
            self.again(|| {
                let Some(held) = self.hold_huge(huge) else { return Ok(Served::Busy) };
                if held.contents().all(|content| content == Content::Guarded) {
                    held.let_go();
                    return Ok(Served::Done);
                }
                match held.guard() {
                    Ok(true) => taken.push(huge),
                    Ok(false) => return Ok(Served::Busy),
                    Err(error) => return Err(error),
                }
                Ok(Served::Done)
            })?;
        }
        Ok(())
    }

    /// Blocks whose metadata was here come back: nobody will write it any more.
    fn end_watches_in(&self, part: FrameRange) -> io::Result<()> {
        if !self.ledger.is_split(part.start.huge()) {
            return Ok(());
        }
        part.frames().try_for_each(|gfn| self.again(|| self.restore_watched(gfn)))
    }

    /// Lets the guest have whole huge frames: those that were guarded read as zeros, others
    /// stay what they are. `prealloc`: all of them have memory on return.
    ///
    /// # Errors
    /// `ENOMEM` with `prealloc`, and what was guarded is so again; as madvise(2).
    pub fn unguard(&self, frames: FrameRange, prealloc: bool) -> io::Result<()> {
        let parts = self.whole(frames)?;
        if prealloc && let Err(error) = self.ram.populate(frames) {
            let guarded = |part: &FrameRange| self.ledger.content(part.start) == Content::Guarded;
            parts.into_iter().filter(guarded).try_for_each(|part| self.ram.punch(part))?;
            return Err(error);
        }
        parts.into_iter().try_for_each(|part| self.again(|| self.plug_huge(part.start.huge())))
    }

    fn plug_huge(&self, huge: HugeFrame) -> io::Result<Served> {
        let Some(held) = self.hold_huge(huge) else { return Ok(Served::Busy) };
        held.plug(self.resting_content());
        Ok(Served::Done)
    }

    /// What plugged memory is before its first touch. A hole that is resident on record reads
    /// as zeros; where devices cannot wait it is to be mapped when it comes.
    fn resting_content(&self) -> Content {
        if self.devices.any() { EMPTY } else { Content::Resident }
    }

    /// Its huge frames, if it is whole ones, in one region.
    fn whole(&self, frames: FrameRange) -> io::Result<Vec<FrameRange>> {
        let parts: Vec<FrameRange> = frames.by_huge().collect();
        let is_whole = |part: &FrameRange| *part == FrameRange::huge(part.start.huge());
        match self.ram.range(frames).is_some() && parts.iter().all(is_whole) {
            true => Ok(parts),
            false => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Serves a touch of a guarded frame.
    pub(crate) fn serve_guarded(&self, gfn: Gfn, write: bool) -> io::Result<Served> {
        let sentry = self.sentry.read().unwrap_or_else(PoisonError::into_inner).clone();
        self.install_zero(gfn, Content::Guarded, || {
            if let Some(sentry) = sentry {
                sentry.touched(gfn, write);
            }
        })
    }
}
