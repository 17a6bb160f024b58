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
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use ebb_digest::Digest;
use ebb_store::{MEMORY_SLOTS, Page, PageBuffer, SavedBatch};
use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn};

use crate::counters::{add, subtract};
use crate::install::Served;
use crate::pager::Pager;
use crate::sparse::Sparse;

/// The slot and one, or 0; then the digest of what is in it.
type Row = [AtomicU64; 3];

/// No word names the slot: the frame keeps it.
const KEPT: u64 = 1 << 63;
/// So much of the store's slots that no word names is kept by no frame: pages that are written find
/// room in a row.
const FREE_PART: u64 = 8;
/// Slots that frames keep are asked for so often, where a store has no room for pages.
const ROOM_ATTEMPTS: usize = 4;
const WORD_SLOTS: u64 = u32::BITS as u64;
/// Slots that are given up at once for others: 32 MiB.
const AT_ONCE: usize = 8192;

/// The rows of a VM's frames: 12 KiB for each huge frame of which some was saved on a disk.
pub(crate) struct Kept {
    parts: Vec<OnceLock<Box<[Row]>>>,
    /// A bit for each slot: kept.
    slots: Sparse,
    /// In words of these bits.
    words: u64,
    /// Where slots were given up last.
    hand: AtomicU64,
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

    fn mark(&self, slot: u64, is_kept: bool) {
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
        self.kept.mark(slot, false);
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

    /// Whether the frame keeps a slot: unless it was changed since, it goes without a write.
    pub fn keeps_slot(&self, gfn: Gfn) -> bool {
        self.kept.slot(gfn).is_some()
    }

    /// Gives up at most so many slots that frames keep: in the order of the slots, from where the
    /// last call ended, so that those go first that were written first, and what becomes free lies
    /// together. Returns how many those were: fewer only if there are no more, but for frames that
    /// somebody holds.
    pub fn give_up_kept(&self, most: usize) -> usize {
        let (words, hand) = (self.kept.words, &self.kept.hand);
        let (start, mut given) = (hand.load(Relaxed), 0);
        for at in (start..words).chain(0..start) {
            if given == most || self.counters.clean_frames.load(Relaxed) == 0 {
                break;
            }
            hand.store(at, Relaxed);
            let bits = self.kept.slots.get(at).map_or(0, |word| word.load(Acquire));
            let each = (0..WORD_SLOTS).filter(|bit| bits >> bit & 1 != 0);
            for slot in each.map(|bit| at * WORD_SLOTS + bit) {
                let owner = self.owners.get(slot).filter(|_| given < most);
                given += usize::from(owner.is_some_and(|gfn| self.give_up(gfn, |now| now == slot)));
            }
        }
        given
    }

    /// Before frames are held that may be saved.
    pub(crate) fn leave_free_slots(&self) {
        let (usage, kept) = (self.store.usage(), self.counters.clean_frames.load(Relaxed));
        let free = usage.disk_slots.saturating_sub(usage.disk_slots_used);
        self.give_up_kept(((free + kept) / FREE_PART).saturating_sub(free) as usize);
    }

    /// Has pages saved; where there is no room for all of them, in slots that frames only keep.
    pub(crate) fn with_room(
        &self,
        pages: &[Page],
        save: impl Fn(&[Page]) -> SavedBatch,
    ) -> SavedBatch {
        let mut batch = save(pages);
        for _ in 0..ROOM_ATTEMPTS {
            let rest: Vec<usize> =
                (0..pages.len()).filter(|at| batch.slots[*at].is_none()).collect();
            let is_short = batch.error.as_ref().is_some_and(|error| error.is_no_room());
            // Who has a slot without need makes room for who needs one.
            if !is_short || self.give_up_kept(rest.len()) == 0 {
                break;
            }
            let mut to_save = PageBuffer::new(rest.len());
            to_save.pages_mut().iter_mut().zip(&rest).for_each(|(to, at)| *to = pages[*at]);
            let more = save(to_save.pages());
            rest.iter().zip(more.slots).for_each(|(at, slot)| batch.slots[*at] = slot);
            batch.error = more.error;
        }
        batch
    }

    /// Those of the frames that nobody holds keep none any more.
    pub(crate) fn give_up_in(&self, frames: FrameRange) {
        for gfn in self.kept.among(frames) {
            self.give_up(gfn, |_| true);
        }
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

    /// Gives back the space of what was saved and is not needed any more, and where other VMs are
    /// short of it, or nothing is to be evicted (`is_idle`), some of what frames keep. From the
    /// thread that evicts.
    ///
    /// # Errors
    /// From the store; nothing is lost.
    pub fn trim_store(&self, is_idle: bool) -> io::Result<()> {
        if self.store.is_room_wanted() || is_idle {
            self.give_up_kept(AT_ONCE);
        }
        Ok(self.store.trim()?)
    }
}
