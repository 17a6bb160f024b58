//! Reclaimed blocks come back, before the guest writes their metadata.

use std::io;

use ebb_ledger::Content;
use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn};

use crate::fault::installer::Installer;
use crate::fault::installer::whole::Failed;
use crate::folios::Grain;
use crate::frames::words::EMPTY;
use crate::frames::words::Served;

impl Installer {
    /// Algorithm 2: the guest writes the metadata of a reclaimed block. Gives the block its memory,
    /// maps it for devices, then lets the write through.
    pub(crate) fn restore(&self, metadata: Gfn, head: Gfn, order: u8) -> io::Result<Served> {
        let Ok(watch) = self.frames.ledger().lock_frame(metadata) else { return Ok(Served::Busy) };
        // The watch is another block's by now, or has ended.
        if watch.content() != (Content::Watch { head, order }) {
            self.frames.after(watch.abandon(), FrameRange::new(metadata, 1));
            return Ok(Served::Busy);
        }
        let block = FrameRange::block(head, order);
        // A part that the VMM has unplugged needs no memory (`Returner::release_file`).
        for part in block.by_huge().filter(|part| self.frames.ram().region_of(part.start).is_some())
        {
            match self.refill(part) {
                Ok(true) => {}
                refilled => {
                    self.frames.after(watch.abandon(), FrameRange::new(metadata, 1));
                    return refilled.map(|_| Served::Busy);
                }
            }
        }
        // Before the unlock: after it, the worker may protect the frame anew.
        let frame = FrameRange::new(metadata, 1);
        let open = self.frames.unprotect(frame);
        let wanted = watch.unlock(Content::Resident);
        self.frames.after(wanted, frame);
        open.map(Served::done)
    }

    /// Restores the block of a metadata frame, if the frame is a watch.
    pub(crate) fn restore_watched(&self, metadata: Gfn) -> io::Result<Served> {
        match self.frames.ledger().content(metadata) {
            Content::Watch { head, order } => self.restore(metadata, head, order),
            _ => Ok(Served::Done),
        }
    }

    /// Gives every empty frame of a range in one huge frame its memory, and maps it for devices;
    /// `false`: another thread has locked a part of it. A frame that is not empty stays what it is:
    /// it was touched early, and may have been evicted since.
    pub(crate) fn refill(&self, frames: FrameRange) -> io::Result<bool> {
        if self.frames.devices().is_whole() {
            return self.fill_whole(frames.start.huge(), Failed::Punch);
        }
        // Huge frames of blocks that were not recorded were not split either.
        if frames.count < FRAMES_PER_HUGE && self.frames.split(frames.start.huge()).is_err() {
            return Ok(false);
        }
        let Some(held) = self.frames.lock_words(frames) else { return Ok(false) };
        // Populating a part of a huge frame may give all of it memory, which would win over the
        // saved content of the rest.
        let grain = self.folios.grain_of(frames.start.huge());
        let in_pages = grain == Grain::Huge && frames.count < FRAMES_PER_HUGE;
        let filled = match !in_pages && held.contents().all(|(_, content)| content == EMPTY) {
            true => self.frames.ram().populate(frames),
            false => held.contents().try_for_each(|(part, content)| match content {
                EMPTY if grain == Grain::Frame => self.frames.ram().populate(part),
                Content::Empty { fill, .. } => {
                    { part.frames() }.try_for_each(|gfn| self.frames.fill(gfn, fill))
                }
                _ => Ok(()),
            }),
        };
        if let Err(error) = filled {
            self.frames.after(held.abandon(), frames);
            return Err(error);
        }
        let empty = |content| matches!(content, Content::Empty { .. });
        let map = |(part, _)| self.frames.devices().map(part);
        let mapped = held.contents().filter(|(_, content)| empty(*content)).try_for_each(map);
        if let Err(error) = mapped {
            self.frames.after(held.abandon(), frames);
            return Err(error);
        }
        self.frames.counters().returned(held.contents());
        let back = |content| if empty(content) { Content::Resident } else { content };
        let wanted = held.unlock_with(back);
        // A touch that was left to wait for room has left no mark.
        self.frames.after(wanted || self.room.may_halt(), frames);
        Ok(true)
    }
}
