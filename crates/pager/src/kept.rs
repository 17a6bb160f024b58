//! Slots of the store that frames keep while they are back in memory. A frame that holds what its
//! slot holds when it goes again goes without a write (`docs/decisions/0041-*`).
//!
//! Nothing but the digest says that they hold the same: it is of the page that was saved, and is
//! compared with that of the page that goes, while the frame is protected. So a frame with a slot is
//! plain memory, which anybody may write by any way. No word names a slot that is kept. Rows are
//! changed by whoever holds the frame's word. A daemon's death frees all of them.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use ebb_digest::Digest;
use ebb_store::MEMORY_SLOTS;
use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn};

use crate::counters::{add, subtract};
use crate::install::Served;
use crate::pager::Pager;

/// The slot and one, or 0; then the digest of what is in it.
type Row = [AtomicU64; 3];

/// No word names the slot: the frame keeps it.
const KEPT: u64 = 1 << 63;
/// So much of the store's slots no frame keeps: pages that are written find room in a row.
const FREE_PART: u64 = 8;
/// Slots that are looked at by one call, in a millisecond or two.
const LOOKS_MOST: u64 = 1 << 18;
/// Slots that are given up at once for other VMs: 32 MiB.
const FOR_OTHERS: usize = 8192;

/// The rows of a VM's frames: 12 KiB for each huge frame of which some was saved on a disk.
pub(crate) struct Kept {
    parts: Vec<OnceLock<Box<[Row]>>>,
    /// The slot after the one that was given up last.
    hand: AtomicU64,
}

impl Kept {
    pub(crate) fn new(frames: u64) -> Kept {
        let parts = (0..frames.div_ceil(FRAMES_PER_HUGE)).map(|_| OnceLock::new()).collect();
        Kept { parts, hand: AtomicU64::new(0) }
    }

    /// What a frame holds that is saved in this slot from now on. Nothing is noted of a slot in
    /// memory, which takes room for as long as it is kept, or where this process has no memory.
    pub(crate) fn note(&self, gfn: Gfn, slot: u64, digest: Digest) {
        if slot >= MEMORY_SLOTS {
            return self.clear(gfn);
        }
        let Some([place, low, high]) = self.make(gfn) else { return };
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
        if let Some([place, ..]) = self.row(gfn) {
            place.fetch_and(!KEPT, Release);
        }
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
    fn among(&self, frames: FrameRange) -> impl Iterator<Item = Gfn> {
        let part = |part: &FrameRange| {
            self.parts.get(part.start.huge().0 as usize).is_some_and(|part| part.get().is_some())
        };
        let frames = frames.by_huge().filter(part).flat_map(FrameRange::frames);
        frames.filter(|gfn| self.slot(*gfn).is_some())
    }
}

impl Pager {
    /// As the holder of a frame's word, which names no slot: the frame keeps none any more.
    pub(crate) fn drop_slot(&self, gfn: Gfn) -> bool {
        let Some(slot) = self.kept.slot(gfn) else { return false };
        self.kept.clear(gfn);
        self.store.release(slot);
        subtract(&self.counters.clean_frames, 1);
        true
    }

    /// The same of many, as the holder of their words.
    pub(crate) fn drop_slots(&self, frames: FrameRange) {
        for gfn in self.kept.among(frames) {
            self.drop_slot(gfn);
        }
    }

    /// As the holder of a frame that was just filled from a slot of the store: whether it keeps it.
    pub(crate) fn keep_slot(&self, gfn: Gfn, slot: u64) -> bool {
        let keeps = slot < MEMORY_SLOTS && self.kept.keep(gfn, slot);
        add(&self.counters.clean_frames, u64::from(keeps));
        keeps
    }

    /// Gives up at most so many slots that frames keep: in the order of the slots, from where the
    /// last call ended, so that those go first that were written first, and what becomes free lies
    /// together. Returns how many those were: fewer where the next lie far off. Frames that
    /// somebody holds keep theirs.
    pub fn give_up_kept(&self, most: usize) -> usize {
        let slots = self.store.usage().disk_slots;
        let mut given = 0;
        for _ in 0..slots.min(LOOKS_MOST) {
            if given == most || self.counters.clean_frames.load(Relaxed) == 0 {
                break;
            }
            let slot = self.kept.hand.fetch_add(1, Relaxed) % slots;
            let owner = self.owners.get(slot);
            given += usize::from(owner.is_some_and(|gfn| self.give_up(gfn, |now| now == slot)));
        }
        given
    }

    /// Those of the frames that nobody holds keep none any more.
    pub(crate) fn give_up_in(&self, frames: FrameRange) {
        for gfn in self.kept.among(frames) {
            self.give_up(gfn, |_| true);
        }
    }

    /// Before so many pages are saved.
    pub(crate) fn leave_free_slots(&self, pages: usize) {
        let usage = self.store.usage();
        let free = usage.disk_slots.saturating_sub(usage.disk_slots_used);
        let wanted = usage.disk_slots / FREE_PART + pages as u64;
        self.give_up_kept(wanted.saturating_sub(free) as usize);
    }

    fn give_up(&self, gfn: Gfn, wanted: impl Fn(u64) -> bool) -> bool {
        if !self.kept.slot(gfn).is_some_and(&wanted) {
            return false;
        }
        let Ok(word) = self.ledger.lock_frame(gfn) else { return false };
        // Another by now, or none.
        let given = self.kept.slot(gfn).is_some_and(wanted) && self.drop_slot(gfn);
        self.after(word.abandon(), FrameRange::new(gfn, 1));
        given
    }

    /// Nobody keeps a slot any more, but what comes back from now on.
    ///
    /// # Errors
    /// `TimedOut`: somebody holds a frame and does not let go.
    pub(crate) fn give_up_all(&self) -> io::Result<()> {
        let all = FrameRange::new(Gfn(0), self.kept.parts.len() as u64 * FRAMES_PER_HUGE);
        self.kept.among(all).try_for_each(|gfn| {
            self.again(|| match self.give_up(gfn, |_| true) || self.kept.slot(gfn).is_none() {
                true => Ok(Served::Done),
                false => Ok(Served::Busy),
            })
        })
    }

    /// Gives back the space of what was saved and is not needed any more, and where others are
    /// short of it some of what frames keep. From the thread that evicts.
    ///
    /// # Errors
    /// From the store; nothing is lost.
    pub fn trim_store(&self) -> io::Result<()> {
        if self.store.is_room_wanted() {
            self.give_up_kept(FOR_OTHERS);
        }
        Ok(self.store.trim()?)
    }
}
