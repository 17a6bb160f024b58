//! Slots of the store that frames keep while they are resident. A frame that still holds what its
//! slot holds when it is evicted again needs no write (`docs/decisions/0041-*`).
//!
//! Only the digest proves that both are the same. The digest is of the page that was saved, and is
//! compared with the digest of the frame's page at eviction, while the frame is protected. So a
//! frame with a slot is plain memory, which anybody may write in any way. No word names a kept
//! slot. A row is changed only by the holder of the lock on the frame's word. A daemon's death
//! frees all kept slots.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use ebb_digest::Digest;
use ebb_store::MEMORY_SLOTS;
use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn};

use crate::support::sparse::Sparse;

/// The slot's number plus one, or 0; then the two words of the digest of its content.
type Row = [AtomicU64; 3];

/// Flag in the first word of a row: the frame keeps the slot, and no word names it.
const KEPT: u64 = 1 << 63;
pub(super) const WORD_SLOTS: u64 = u32::BITS as u64;

/// The rows of a VM's frames: 12 KiB for each huge frame of which a frame was saved on a disk.
pub(crate) struct Kept {
    pub(super) parts: Vec<OnceLock<Box<[Row]>>>,
    /// A bit for each slot: it is kept.
    pub(super) slots: Sparse,
    /// Number of words that hold these bits.
    pub(super) words: u64,
    /// The word at which slots were given up last.
    pub(super) hand: AtomicU64,
}

impl Kept {
    pub(crate) fn new(frames: u64, slots: u64) -> Kept {
        let parts = (0..frames.div_ceil(FRAMES_PER_HUGE)).map(|_| OnceLock::new()).collect();
        let words = slots.div_ceil(WORD_SLOTS);
        Kept { parts, slots: Sparse::new(words), words, hand: AtomicU64::new(0) }
    }

    /// Notes the digest of a frame's content that is saved in this slot from now on. Notes nothing
    /// for a slot in memory, which takes room for as long as it is kept, or if this process cannot
    /// get memory for the row.
    pub(crate) fn note(&self, gfn: Gfn, slot: u64, digest: Digest) {
        if slot >= MEMORY_SLOTS {
            return self.clear(gfn);
        }
        let Some([place, low, high]) = self.make(gfn) else { return };
        // Gives the bit its memory here, before a fault sets it.
        self.slots.make(slot / WORD_SLOTS);
        debug_assert!(place.load(Relaxed) & KEPT == 0, "{gfn:?} has a slot already");
        low.store(digest[0], Relaxed);
        high.store(digest[1], Relaxed);
        place.store(slot + 1, Release);
    }

    /// Called when the frame is back from its slot: it keeps the slot if the digest is known.
    /// Returns whether it does.
    pub(crate) fn keep(&self, gfn: Gfn, slot: u64) -> bool {
        let Some([place, ..]) = self.row(gfn) else { return false };
        let is_known = place.load(Acquire) == slot + 1;
        place.store(if is_known { (slot + 1) | KEPT } else { 0 }, Release);
        if is_known {
            self.mark(slot, true);
        }
        is_known
    }

    /// Returns the slot that the frame keeps.
    pub(crate) fn slot(&self, gfn: Gfn) -> Option<u64> {
        let place = self.row(gfn)?[0].load(Acquire);
        (place & KEPT != 0).then_some((place & !KEPT).wrapping_sub(1))
    }

    /// Returns the slot that the frame keeps, if a page of this digest is in it.
    pub(crate) fn slot_with(&self, gfn: Gfn, digest: &Digest) -> Option<u64> {
        let slot = self.slot(gfn)?;
        let [_, low, high] = self.row(gfn)?;
        (*digest == [low.load(Relaxed), high.load(Relaxed)]).then_some(slot)
    }

    /// Notes that the frame's word names the slot that the frame kept.
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
        let before = match is_kept {
            true => word.fetch_or(bit, AcqRel),
            false => word.fetch_and(!bit, AcqRel),
        };
        debug_assert_ne!(before & bit != 0, is_kept, "slot {slot} has one keeper at most");
    }

    /// Forgets the frame's slot.
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
            // Rows that another thread made are as good.
            let _ = part.set(rows.into_boxed_slice());
        }
        part.get()?.get(gfn.index_in_huge())
    }

    /// Returns those of the frames that keep a slot now.
    pub(super) fn among(&self, frames: FrameRange) -> impl Iterator<Item = Gfn> {
        let part = |part: &FrameRange| {
            self.parts.get(part.start.huge().0 as usize).is_some_and(|part| part.get().is_some())
        };
        let frames = frames.by_huge().filter(part).flat_map(FrameRange::frames);
        frames.filter(|gfn| self.slot(*gfn).is_some())
    }
}
