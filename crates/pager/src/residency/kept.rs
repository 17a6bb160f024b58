//! Slots of the store that frames keep while they are back in memory. A frame that holds what its
//! slot holds when it goes again goes without a write (`docs/decisions/0041-*`).
//!
//! Nothing but the digest says that they hold the same: it is of the page that was saved, and is
//! compared with that of the page that goes, while the frame is protected. So a frame with a slot is
//! plain memory, which anybody may write by any way. No word names a slot that is kept. Rows are
//! changed by whoever holds the frame's word. A daemon's death frees all of them.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use ebb_digest::Digest;
use ebb_store::MEMORY_SLOTS;
use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn};

use crate::support::sparse::Sparse;

/// The slot and one, or 0; then the digest of what is in it.
type Row = [AtomicU64; 3];

/// No word names the slot: the frame keeps it.
const KEPT: u64 = 1 << 63;
pub(super) const WORD_SLOTS: u64 = u32::BITS as u64;

/// The rows of a VM's frames: 12 KiB for each huge frame of which some was saved on a disk.
pub(crate) struct Kept {
    pub(super) parts: Vec<OnceLock<Box<[Row]>>>,
    /// A bit for each slot: kept.
    pub(super) slots: Sparse,
    /// In words of these bits.
    pub(super) words: u64,
    /// Where slots were given up last.
    pub(super) hand: AtomicU64,
}

impl Kept {
    pub(crate) fn new(frames: u64, slots: u64) -> Kept {
        let parts = (0..frames.div_ceil(FRAMES_PER_HUGE)).map(|_| OnceLock::new()).collect();
        let words = slots.div_ceil(WORD_SLOTS);
        Kept { parts, slots: Sparse::new(words), words, hand: AtomicU64::new(0) }
    }

    /// What a frame holds that is saved in this slot from now on. Nothing is noted of a slot in
    /// memory, which takes room for as long as it is kept, or where this process has no memory.
    pub(crate) fn note(&self, gfn: Gfn, slot: u64, digest: Digest) {
        if slot >= MEMORY_SLOTS {
            return self.clear(gfn);
        }
        let Some([place, low, high]) = self.make(gfn) else { return };
        // Its bit has memory before it is set, at a fault.
        self.slots.make(slot / WORD_SLOTS);
        debug_assert!(place.load(Relaxed) & KEPT == 0, "{gfn:?} has a slot already");
        low.store(digest[0], Relaxed);
        high.store(digest[1], Relaxed);
        place.store(slot + 1, Release);
    }

    /// The frame is back from its slot, which it keeps if its digest is known: `true`.
    pub(crate) fn keep(&self, gfn: Gfn, slot: u64) -> bool {
        let Some([place, ..]) = self.row(gfn) else { return false };
        let is_known = place.load(Acquire) == slot + 1;
        place.store(if is_known { (slot + 1) | KEPT } else { 0 }, Release);
        if is_known {
            self.mark(slot, true);
        }
        is_known
    }

    /// The slot that the frame keeps.
    pub(crate) fn slot(&self, gfn: Gfn) -> Option<u64> {
        let place = self.row(gfn)?[0].load(Acquire);
        (place & KEPT != 0).then_some((place & !KEPT).wrapping_sub(1))
    }

    /// The slot that the frame keeps, if a page of this digest is in it.
    pub(crate) fn slot_with(&self, gfn: Gfn, digest: &Digest) -> Option<u64> {
        let slot = self.slot(gfn)?;
        let [_, low, high] = self.row(gfn)?;
        (*digest == [low.load(Relaxed), high.load(Relaxed)]).then_some(slot)
    }

    /// The frame's word names the slot that it kept.
    pub(crate) fn went(&self, gfn: Gfn) {
        if let Some([place, ..]) = self.row(gfn)
            && let Some(slot) = self.slot(gfn)
        {
            place.store(slot + 1, Release);
            self.mark(slot, false);
        }
    }

    pub(super) fn mark(&self, slot: u64, is_kept: bool) {
        let (Some(word), bit) = (self.slots.get(slot / WORD_SLOTS), 1 << (slot % WORD_SLOTS))
        else {
            return;
        };
        match is_kept {
            true => word.fetch_or(bit, AcqRel),
            false => word.fetch_and(!bit, AcqRel),
        };
    }

    /// Nothing is known of the frame's slot any more.
    pub(crate) fn clear(&self, gfn: Gfn) {
        if let Some([place, ..]) = self.row(gfn) {
            place.store(0, Release);
        }
    }

    fn row(&self, gfn: Gfn) -> Option<&Row> {
        self.parts.get(gfn.huge().0 as usize)?.get()?.get(gfn.index_in_huge())
    }

    fn make(&self, gfn: Gfn) -> Option<&Row> {
        let part = self.parts.get(gfn.huge().0 as usize)?;
        if part.get().is_none() {
            let (mut rows, count) = (Vec::new(), FRAMES_PER_HUGE as usize);
            rows.try_reserve_exact(count).ok()?;
            rows.resize_with(count, Row::default);
            // Another thread's are as good.
            let _ = part.set(rows.into_boxed_slice());
        }
        part.get()?.get(gfn.index_in_huge())
    }

    /// Those of the frames that keep a slot now.
    pub(super) fn among(&self, frames: FrameRange) -> impl Iterator<Item = Gfn> {
        let part = |part: &FrameRange| {
            self.parts.get(part.start.huge().0 as usize).is_some_and(|part| part.get().is_some())
        };
        let frames = frames.by_huge().filter(part).flat_map(FrameRange::frames);
        frames.filter(|gfn| self.slot(*gfn).is_some())
    }
}
