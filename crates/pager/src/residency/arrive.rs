//! Content comes back from the store or a disk, or is dropped there.

use std::io;

use ebb_ledger::{Content, Locked, LockedFrame};
use ebb_store::Page;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};

use crate::residency::Residency;
use crate::support::counters::{add, subtract};

impl Residency {
    /// Fills the frame with its evicted content. The caller has locked its word.
    pub(crate) fn fill_backed(&self, gfn: Gfn, content: Content) -> io::Result<()> {
        let mut page: Page = [0; FRAME_BYTES as usize];
        match content {
            Content::Saved { slot } => self.store.load(slot, &mut page)?,
            Content::OnDisk { block } => {
                self.disk.read(block, std::slice::from_mut(&mut page))?;
                self.check_block(gfn, block, &page)?;
            }
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        }
        self.frames.copy_page(gfn, &page)?;
        // Devices come before the guest, which may hand the frame to one at once.
        self.frames.devices().map(FrameRange::new(gfn, 1))
    }

    /// Notes in the word that the frame's page is there. The frame keeps the slot of its content if
    /// that is possible. Returns whether a touch was marked meanwhile.
    pub(crate) fn arrive(&self, gfn: Gfn, word: LockedFrame<'_>) -> bool {
        let content = word.content();
        let has_no_content = matches!(content, Content::Unplugged | Content::Watch { .. });
        debug_assert!(!has_no_content, "{gfn:?} arrives from {content:?}");
        match content {
            Content::Saved { slot } if self.keep_slot(gfn, slot) => {
                subtract(&self.frames.counters().saved_frames, 1);
                word.unlock(Content::Resident)
            }
            _ => self.leave(gfn, word, Content::Resident),
        }
    }

    /// Notes that the frame's content is no longer in the store or on a disk, and frees its place
    /// there. Returns whether a touch was marked meanwhile.
    ///
    /// The pair of block and frame is removed before the unlock: after it, the same block may back
    /// the frame again, and that pair must stay. The slot is freed after the unlock: no word may
    /// name a slot that another page is put into.
    pub(crate) fn leave(&self, gfn: Gfn, word: LockedFrame<'_>, next: Content) -> bool {
        let content = word.content();
        if let Content::OnDisk { block } = content {
            self.disk_backed.leave(gfn, block);
            subtract(&self.frames.counters().on_disk_frames, 1);
        }
        debug_assert!(self.kept.slot(gfn).is_none(), "{gfn:?}, {content:?}: a slot is lost");
        self.kept.clear(gfn);
        let wanted = word.unlock(next);
        if let Content::Saved { slot } = content {
            self.store.release(slot);
            subtract(&self.frames.counters().saved_frames, 1);
        }
        wanted
    }

    /// Drops the frame's content, which is dead, and notes it as empty. Returns whether a touch was
    /// marked meanwhile.
    pub(crate) fn become_empty(&self, gfn: Gfn, held: LockedFrame<'_>) -> bool {
        debug_assert!(held.content().is_evicted(), "{gfn:?}: {:?}", held.content());
        add(&self.frames.counters().dropped_frames, 1);
        add(&self.frames.counters().empty_frames, 1);
        self.leave(gfn, held, Content::Empty { fill: 0, hard: false })
    }

    pub(crate) fn lock_saved(&self, gfn: Gfn, slot: u64) -> Option<LockedFrame<'_>> {
        let word = self.frames.ledger().lock_frame(gfn).ok()?;
        if word.content() == (Content::Saved { slot }) {
            return Some(word);
        }
        self.frames.after(word.abandon(), FrameRange::new(gfn, 1));
        None
    }

    /// Makes locked frames resident on record, and frees their slots and blocks. Nobody waits for
    /// these frames: no mapping of the VMM has them.
    pub(crate) fn release(&self, held: Locked<'_>) {
        let is_ram = self.frames.ram().parts(held.frames()).next().is_some();
        debug_assert!(!is_ram, "{:?}: the VMM has it", held.frames());
        let counters = &self.frames.counters();
        let mut slots = Vec::new();
        for (frames, content) in held.contents() {
            let counter = match content {
                Content::Empty { .. } => &counters.empty_frames,
                Content::Saved { .. } => &counters.saved_frames,
                Content::OnDisk { .. } => &counters.on_disk_frames,
                Content::Resident
                | Content::Unplugged
                | Content::Watch { .. }
                | Content::Clean { .. } => continue,
            };
            subtract(counter, frames.count);
            match content {
                Content::Saved { slot } => {
                    frames.frames().for_each(|gfn| self.kept.clear(gfn));
                    slots.extend(frames.frames().map(|_| slot));
                }
                // Before the unlock, as in `Residency::leave`.
                Content::OnDisk { block } => {
                    frames.frames().for_each(|gfn| self.disk_backed.leave(gfn, block));
                }
                _ => {}
            }
        }
        self.drop_slots(held.frames());
        let _ = held.unlock(Content::Resident);
        slots.into_iter().for_each(|slot| self.store.release(slot));
    }
}
