//! Memory that is plugged and unplugged in blocks while the VM runs. It is watched while it is
//! unplugged, so that a touch of it is noticed.

use crate::fault::sentry::Sentry;
use std::io;
use std::sync::Arc;

use ebb_ledger::Content;
use ebb_sys::uffd::HvaRange;
use ebb_units::{FrameRange, HugeFrame};

use crate::fault::installer::Installer;
use crate::frames::Frames;
use crate::frames::words::EMPTY;
use crate::frames::words::{Served, again};
use crate::residency::Residency;

/// The memory of one VM that can be plugged.
pub struct Pluggable {
    frames: Arc<Frames>,
    residency: Arc<Residency>,
    installer: Arc<Installer>,
}

impl Pluggable {
    pub(crate) fn new(
        frames: &Arc<Frames>,
        residency: &Arc<Residency>,
        installer: &Arc<Installer>,
    ) -> Pluggable {
        Pluggable {
            frames: Arc::clone(frames),
            residency: Arc::clone(residency),
            installer: Arc::clone(installer),
        }
    }

    /// From now on first touches of these regions come here, whatever the mode, and `sentry` is
    /// told of touches of unplugged frames. Takes effect once.
    ///
    /// # Errors
    /// As [`Frames::watch_all`]; `InvalidInput`: one of them is not in one region of RAM.
    pub fn watch_pluggable(
        &self,
        regions: Vec<FrameRange>,
        sentry: Arc<dyn Sentry>,
    ) -> io::Result<()> {
        // Memory that the VMM has unplugged for good is not watched.
        let there =
            regions.iter().filter(|frames| self.frames.ram().region_of(frames.start).is_some());
        let hvas: Vec<HvaRange> =
            there.map(|frames| self.frames.hva(*frames)).collect::<io::Result<_>>()?;
        self.frames.watch_missing(&hvas)?;
        self.frames.set_pluggable(regions);
        self.installer.set_sentry(sentry);
        Ok(())
    }

    /// Takes whole huge frames from the guest, which has unplugged them: devices may not use them,
    /// they have no memory, and their evicted content is dropped. For frames that are `Unplugged`
    /// already, makes sure of that.
    ///
    /// # Errors
    /// `ResourceBusy`: a device uses a part of them. Others as fallocate(2). None of them is newly
    /// unplugged then; their content may be lost.
    pub fn unplug(&self, frames: FrameRange) -> io::Result<()> {
        let mut taken = Vec::new();
        let unplugged =
            self.unplug_each(frames, &mut taken).and_then(|()| self.frames.punch(frames));
        if unplugged.is_err() {
            taken.into_iter().try_for_each(|huge| again(|| self.plug_huge(huge)))?;
        }
        unplugged
    }

    /// Makes each huge frame `Unplugged`. The word comes before the punch: from then on a touch of
    /// missing memory is reported.
    fn unplug_each(&self, frames: FrameRange, taken: &mut Vec<HugeFrame>) -> io::Result<()> {
        for part in self.frames.whole(frames)? {
            let huge = part.start.huge();
            self.end_watches_in(part)?;
            again(|| {
                let Some(held) = self.residency.lock_huge(huge) else { return Ok(Served::Busy) };
                if held.contents().all(|content| content == Content::Unplugged) {
                    held.abandon();
                    return Ok(Served::Done);
                }
                match held.unplug() {
                    Ok(true) => taken.push(huge),
                    Ok(false) => return Ok(Served::Busy),
                    Err(error) => return Err(error),
                }
                Ok(Served::Done)
            })?;
        }
        Ok(())
    }

    /// Restores the blocks whose metadata is here: nobody will write it any more.
    fn end_watches_in(&self, part: FrameRange) -> io::Result<()> {
        if !self.frames.ledger().is_split(part.start.huge()) {
            return Ok(());
        }
        part.frames().try_for_each(|gfn| again(|| self.installer.restore_watched(gfn)))
    }

    /// Lets the guest use whole huge frames: `Unplugged` ones read as zeros, others stay what they
    /// are. `prealloc`: all of them have memory on return.
    ///
    /// # Errors
    /// `ENOMEM` with `prealloc`: what was unplugged is unplugged again. Others as madvise(2).
    pub fn plug(&self, frames: FrameRange, prealloc: bool) -> io::Result<()> {
        let parts = self.frames.whole(frames)?;
        if prealloc && let Err(error) = self.frames.ram().populate(frames) {
            let unplugged =
                |part: &FrameRange| self.frames.ledger().content(part.start) == Content::Unplugged;
            parts.into_iter().filter(unplugged).try_for_each(|part| self.frames.punch(part))?;
            return Err(error);
        }
        parts.into_iter().try_for_each(|part| again(|| self.plug_huge(part.start.huge())))
    }

    fn plug_huge(&self, huge: HugeFrame) -> io::Result<Served> {
        let Some(held) = self.residency.lock_huge(huge) else { return Ok(Served::Busy) };
        held.plug(self.plugged_content());
        Ok(Served::Done)
    }

    /// What plugged memory is before its first touch. A hole that is resident on record reads as
    /// zeros. Where devices cannot wait, the memory must be mapped for them when it comes.
    fn plugged_content(&self) -> Content {
        if self.frames.devices().any() { EMPTY } else { Content::Resident }
    }
}
