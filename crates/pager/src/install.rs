//! Serving one fault: journey 2 of ARCHITECTURE.md.

use std::io;
use std::time::Instant;

use ebb_ledger::{Content, Locked, Want};
use ebb_store::Page;
use ebb_sys::uffd::Fault;
use ebb_units::{FRAME_BYTES, FRAMES_PER_HUGE, FrameRange, Gfn, HUGE_BYTES};
use ebb_vm::Region;

use crate::counters::{add, subtract};
use crate::hand::Hand;
use crate::pager::{Grain, Pager, Restored};
use crate::read_ahead::ReadAhead;
use crate::zero::EMPTY;

/// A frame whose word changes hands under the fault thread this often is left
/// to come again.
const ATTEMPTS: usize = 64;

impl Pager {
    /// Serves a fault that was read at `began`, leaves it to the refill threads, or
    /// leaves a mark for whoever holds the frame. `true`: it is done.
    pub(crate) fn serve(&self, fault: Fault, began: Instant, hand: &mut Hand) -> bool {
        if !fault.write_protected && self.needs_time(fault) {
            if self.refill_at_once(fault, &mut hand.in_memory) {
                return true;
            }
            if self.refill_later(fault, began) {
                return false;
            }
        }
        self.serve_on(fault, hand);
        true
    }

    /// Whether its content is elsewhere, or it may have to wait for room.
    fn needs_time(&self, fault: Fault) -> bool {
        let gfn = self.ram.gpa(fault.address).map(|gpa| gpa.gfn());
        let content = gfn.map(|gfn| self.ledger.content(gfn));
        matches!(content, Some(Content::Saved { .. } | Content::OnDisk { .. }))
            || self.is_over_limit()
    }

    /// Serves a fault on this thread; with room for pages, reads ahead.
    pub(crate) fn serve_on(&self, fault: Fault, hand: &mut Hand) {
        // The kernel reports faults in registered ranges only.
        let Some(gfn) = self.ram.gpa(fault.address).map(|gpa| gpa.gfn()) else { return };
        let counter = match fault.write_protected {
            true => &self.counters.metadata,
            false => &self.counters.missing,
        };
        add(counter, 1);
        for _ in 0..ATTEMPTS {
            match self.attempt(gfn, fault, hand) {
                Ok(Served::Done) => return,
                Ok(Served::Busy) => std::thread::yield_now(),
                Err(error) => {
                    if self.fault_failed(gfn, error, hand.pages.is_some()) {
                        add(&self.counters.retried, 1);
                        return;
                    }
                    break;
                }
            }
        }
        // No memory, or no luck: woken, the guest touches it again.
        add(&self.counters.retried, 1);
        self.report("wake", self.wake(FrameRange::new(gfn, 1)));
    }

    fn attempt(&self, gfn: Gfn, fault: Fault, hand: &mut Hand) -> io::Result<Served> {
        match (fault.write_protected, self.ledger.want(gfn)) {
            (_, Want::Marked(_)) => Ok(Served::Done),
            (true, Want::Free(Content::Watch { head, order })) => {
                let served = self.restore(gfn, head, order)?;
                if let Served::Done = served {
                    // A full queue only means that this one is not judged.
                    let _ = self.restored.try_send(Restored { head, order });
                }
                Ok(served)
            }
            // A protection that ended before its event was read.
            (true, Want::Free(_)) => self.let_through(gfn),
            (false, Want::Free(content)) => match (content, &mut hand.pages) {
                (Content::Saved { .. } | Content::OnDisk { .. }, Some(buffer)) => {
                    self.refill_ahead(gfn, buffer)
                }
                (Content::Guarded, _) => self.serve_guarded(gfn, fault.write),
                (Content::Empty { .. }, _) => {
                    add(&self.counters.early, 1);
                    self.install_ahead(gfn, content, &mut hand.zeros)
                }
                _ => self.install_ahead(gfn, content, &mut hand.zeros),
            },
        }
    }

    /// Ends a protection that nothing stands behind. Under the frame's lock: the
    /// worker may be about to protect it for a block, and that protection
    /// must not be the one that ends.
    fn let_through(&self, gfn: Gfn) -> io::Result<Served> {
        let frame = FrameRange::new(gfn, 1);
        let Some(held) = self.hold_word_of(gfn) else { return Ok(Served::Busy) };
        let words = held.frames();
        let watched = held.contents().any(|(_, content)| matches!(content, Content::Watch { .. }));
        let done = if watched { Ok(Served::Busy) } else { self.unprotect(frame).map(Served::done) };
        let wanted = held.abandon();
        self.after(wanted, words);
        done
    }

    /// Gives a missing frame its content: alone, or with its huge frame.
    pub(crate) fn install(&self, gfn: Gfn, content: Content) -> io::Result<Served> {
        self.install_ahead(gfn, content, &mut ReadAhead::timid())
    }

    /// The same, and what lies behind it where that takes no reading.
    fn install_ahead(
        &self,
        gfn: Gfn,
        content: Content,
        ahead: &mut ReadAhead,
    ) -> io::Result<Served> {
        if let Content::Empty { .. } = content
            && let Some(served) = self.install_shared(gfn)?
        {
            return Ok(served);
        }
        let zero = matches!(content, Content::Resident | Content::Empty { fill: 0, .. });
        let is_huge =
            || self.grain_of(gfn.huge()) == Grain::Huge && !self.ledger.is_split(gfn.huge());
        // What cannot be broken up would never go, once a part of it came by itself.
        let in_parts = || self.can_break_up(gfn.huge()) && self.is_short_of(HUGE_BYTES);
        let whole = zero && is_huge() && !in_parts();
        match content {
            _ if whole => self.install_huge(gfn, content),
            Content::Resident | EMPTY => self.install_zeros(gfn, ahead),
            Content::Guarded | Content::Watch { .. } | Content::Clean { .. } => {
                self.install_zero(gfn, content, || {})
            }
            Content::Empty { fill, .. } => self.install_frame(gfn, content, fill),
            Content::Saved { .. } | Content::OnDisk { .. } => self.install_backed(gfn),
        }
    }

    /// Gives a huge frame that reads as zero its memory, if all of it is `content` still.
    pub(crate) fn install_huge(&self, gfn: Gfn, content: Content) -> io::Result<Served> {
        let Some(held) = self.hold_words(FrameRange::huge(gfn.huge())) else {
            return Ok(Served::Busy);
        };
        let frames = self.part_in_ram(gfn);
        if held.contents().any(|(_, now)| now != content) {
            self.after(held.abandon(), frames);
            return Ok(Served::Busy);
        }
        let is_ours = content != Content::Resident;
        if !is_ours {
            self.devices.lost(frames);
        }
        if let Err(error) = self.ram.populate(frames) {
            self.after(held.abandon(), frames);
            return Err(error);
        }
        if is_ours {
            self.devices.map(frames);
        }
        self.count_returned(held.contents());
        // Whoever asked meanwhile is woken with the rest.
        let _ = held.unlock(Content::Resident);
        self.wake(frames).map(Served::done)
    }

    /// The part of the frame's huge frame that is RAM of the same region.
    fn part_in_ram(&self, gfn: Gfn) -> FrameRange {
        let huge = FrameRange::huge(gfn.huge());
        let region = self.ram.region_of(gfn).map_or(huge, Region::frames);
        let start = huge.start.max(region.start);
        FrameRange::new(start, huge.end().0.min(region.end().0) - start.0)
    }

    /// Gives a frame whose every byte is `fill` its memory, if it is `content` still.
    fn install_frame(&self, gfn: Gfn, content: Content, fill: u8) -> io::Result<Served> {
        if self.split(gfn.huge()).is_err() {
            return Ok(Served::Busy);
        }
        let Ok(held) = self.ledger.lock_frame(gfn) else { return Ok(Served::Busy) };
        let frame = FrameRange::new(gfn, 1);
        if held.content() != content {
            self.after(held.abandon(), frame);
            return Ok(Served::Busy);
        }
        if let Err(error) = self.fill(gfn, fill) {
            self.after(held.abandon(), frame);
            return Err(error);
        }
        // Devices before the guest: it may hand the frame to one at once.
        self.devices.map(frame);
        self.count_returned([(frame, content)].into_iter());
        let _ = held.unlock(Content::Resident);
        self.wake(frame).map(Served::done)
    }

    /// The way back from the store or a disk, alone.
    pub(crate) fn install_backed(&self, gfn: Gfn) -> io::Result<Served> {
        let frame = FrameRange::new(gfn, 1);
        let Ok(held) = self.ledger.lock_frame(gfn) else { return Ok(Served::Busy) };
        let content = held.content();
        if !content.is_elsewhere() {
            self.after(held.abandon(), frame);
            return Ok(Served::Busy);
        }
        if let Err(error) = self.fill_backed(gfn, content) {
            self.after(held.abandon(), frame);
            return Err(error);
        }
        add(&self.counters.refilled_frames, 1);
        let _ = self.arrive(gfn, held);
        self.wake(frame).map(Served::done)
    }

    /// Puts the frame's content where it was, as the holder of its word.
    pub(crate) fn fill_backed(&self, gfn: Gfn, content: Content) -> io::Result<()> {
        let mut page: Page = [0; FRAME_BYTES as usize];
        match content {
            Content::Saved { slot } => self.store.load(slot, &mut page)?,
            Content::OnDisk { block } => {
                self.disk.read(block, std::slice::from_mut(&mut page))?;
                self.check_rest(gfn, block, &page)?;
            }
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        }
        self.copy_page(gfn, &page)?;
        // Devices before the guest: it may hand the frame to one at once.
        self.devices.map(FrameRange::new(gfn, 1));
        Ok(())
    }

    pub(crate) fn copy_page(&self, gfn: Gfn, page: &[u8]) -> io::Result<()> {
        match self.fill_by(gfn, |uffd, to| uffd.copy(to.start, page)) {
            // There already: a daemon died between the copy and the word.
            Err(error) if is_present(&error) => self.unprotect(FrameRange::new(gfn, 1)),
            result => result,
        }
    }

    /// A hole that reads as zero and was never taken: nothing to write down. `first` is done
    /// once it is certain that the frame is still `content`.
    ///
    /// Under the word's lock: a frame that somebody else has given memory meanwhile may have
    /// been written and saved since, and these zeros would win over what was saved.
    pub(crate) fn install_zero(
        &self,
        gfn: Gfn,
        content: Content,
        first: impl FnOnce(),
    ) -> io::Result<Served> {
        let frame = FrameRange::new(gfn, 1);
        let Some(held) = self.hold_word_of(gfn) else { return Ok(Served::Busy) };
        let words = held.frames();
        let served = match held.contents().all(|(_, now)| now == content) {
            true => {
                first();
                self.devices.lost(frame);
                self.fill(gfn, 0).map(Served::done)
            }
            false => Ok(Served::Busy),
        };
        self.after(held.abandon(), words);
        if let Ok(Served::Done) = served {
            self.wake(frame)?;
        }
        served
    }

    /// Holds the word that speaks for a frame: its own, or that of its huge frame.
    pub(crate) fn hold_word_of(&self, gfn: Gfn) -> Option<Locked<'_>> {
        let words = match self.ledger.is_split(gfn.huge()) {
            true => FrameRange::new(gfn, 1),
            false => FrameRange::huge(gfn.huge()),
        };
        self.hold_words(words)
    }

    /// Holds all of these words, or none: then whoever asked for one meanwhile asks again.
    pub(crate) fn hold_words(&self, words: FrameRange) -> Option<Locked<'_>> {
        let held = self.ledger.lock(words);
        held.inspect_err(|busy| self.after(busy.wanted, words)).ok()
    }

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

    /// Algorithm 2: the guest writes the metadata of an emptied block. Gives
    /// the block its memory, lets devices at it, then lets the write through.
    pub(crate) fn restore(&self, metadata: Gfn, head: Gfn, order: u8) -> io::Result<Served> {
        let Ok(watch) = self.ledger.lock_frame(metadata) else { return Ok(Served::Busy) };
        // Another block's by now, or nobody's.
        if watch.content() != (Content::Watch { head, order }) {
            self.after(watch.abandon(), FrameRange::new(metadata, 1));
            return Ok(Served::Busy);
        }
        let block = FrameRange::block(head, order);
        // What is gone needs no memory (`Pager::let_go`).
        for part in block.by_huge().filter(|part| self.ram.region_of(part.start).is_some()) {
            match self.refill(part) {
                Ok(true) => {}
                refilled => {
                    self.after(watch.abandon(), FrameRange::new(metadata, 1));
                    return refilled.map(|_| Served::Busy);
                }
            }
        }
        // Before the unlock: after it the worker may protect the frame anew.
        let frame = FrameRange::new(metadata, 1);
        let open = self.unprotect(frame);
        let wanted = watch.unlock(Content::Resident);
        self.after(wanted, frame);
        open.map(Served::done)
    }

    /// Brings the block of a metadata frame back, if that is a watch.
    pub(crate) fn restore_watched(&self, metadata: Gfn) -> io::Result<Served> {
        match self.ledger.content(metadata) {
            Content::Watch { head, order } => self.restore(metadata, head, order),
            _ => Ok(Served::Done),
        }
    }

    /// Brings every emptied frame of a range in one huge frame back, and lets devices at it;
    /// `false`: somebody holds a part of it. A frame that is not empty stays what it is: it was
    /// touched early, and may have been evicted since.
    pub(crate) fn refill(&self, frames: FrameRange) -> io::Result<bool> {
        // Blocks that were not recorded were not split either.
        if frames.count < FRAMES_PER_HUGE && self.split(frames.start.huge()).is_err() {
            return Ok(false);
        }
        let Some(held) = self.hold_words(frames) else { return Ok(false) };
        // Populating a part of a huge frame may give all of it memory, which would
        // win over what is saved of the rest.
        let grain = self.grain_of(frames.start.huge());
        let in_pages = grain == Grain::Huge && frames.count < FRAMES_PER_HUGE;
        let filled = match !in_pages && held.contents().all(|(_, content)| content == EMPTY) {
            true => self.ram.populate(frames),
            false => held.contents().try_for_each(|(part, content)| match content {
                EMPTY if grain == Grain::Frame => self.ram.populate(part),
                Content::Empty { fill, .. } => {
                    { part.frames() }.try_for_each(|gfn| self.fill(gfn, fill))
                }
                _ => Ok(()),
            }),
        };
        if let Err(error) = filled {
            self.after(held.abandon(), frames);
            return Err(error);
        }
        let empty = |content| matches!(content, Content::Empty { .. });
        for (part, _) in held.contents().filter(|(_, content)| empty(*content)) {
            self.devices.map(part);
        }
        self.count_returned(held.contents());
        let back = |content| if empty(content) { Content::Resident } else { content };
        let wanted = held.unlock_with(back);
        // Who was left to wait for room has marked nothing.
        self.after(wanted || self.may_halt(), frames);
        Ok(true)
    }

    pub(crate) fn count_returned(&self, contents: impl Iterator<Item = (FrameRange, Content)>) {
        let empty = contents.filter(|(_, content)| matches!(content, Content::Empty { .. }));
        let frames: u64 = empty.map(|(frames, _)| frames.count).sum();
        if frames > 0 {
            add(&self.counters.returned_frames, frames);
            subtract(&self.counters.emptied_frames, frames);
        }
    }
}

/// What became of one attempt.
pub(crate) enum Served {
    /// Resolved, or marked for its holder.
    Done,
    /// The word is held for a moment; ask again.
    Busy,
}

impl Served {
    fn done((): ()) -> Served {
        Served::Done
    }
}

fn is_present(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::AlreadyExists
}

#[cfg(test)]
mod tests;
