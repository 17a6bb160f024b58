//! Content that nobody will ask for: of frames that the guest has freed since they went.
//!
//! Proof: when the frame went, it was page cache or anonymous memory; now its metadata
//! says that it was freed. No touch came in between, or it would not be elsewhere any
//! more; so what was saved is what it held before it was freed
//! (`docs/decisions/0012-dead-frames-at-the-fault.md`).

use std::io;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::{Arc, PoisonError, RwLock};

use ebb_inspect::{Guest, PageWords};
use ebb_ledger::{Content, LockedFrame};
use ebb_units::{FrameRange, Gfn, Gpa};

use crate::counters::add;
use crate::evict::Judge;
use crate::install::Served;
use crate::pager::Pager;
use crate::sparse::Sparse;
use crate::view::readable;

/// Linux frees pages to its per-processor lists, and from there, in batches of this size
/// at most (`pcp->batch`).
const FREED_TOGETHER: u64 = 63;

/// A guest's kernel, for threads that bring its frames back.
pub trait Witness: Send + Sync {
    /// Whether a frame that [`Judge::in_use`] told of has been freed since. `read` reads
    /// the guest's metadata, in about a microsecond.
    fn looks_freed(&self, gfn: Gfn, read: &dyn Fn(Gpa) -> Option<PageWords>) -> bool;
}

impl Witness for Guest {
    fn looks_freed(&self, gfn: Gfn, read: &dyn Fn(Gpa) -> Option<PageWords>) -> bool {
        Guest::looks_freed(self, gfn, read)
    }
}

/// What is known of the frames that are elsewhere.
pub(crate) struct Dead {
    witness: RwLock<Option<Arc<dyn Witness>>>,
    /// A bit a frame: in use, by the witness's word, when it went.
    in_use: Sparse,
}

impl Dead {
    pub(crate) fn new(frames: u64) -> Dead {
        Dead { witness: RwLock::default(), in_use: Sparse::new(frames.div_ceil(32)) }
    }

    /// As the holder of the frame's word, before it is on record as elsewhere.
    pub(crate) fn went(&self, gfn: Gfn, in_use: bool) {
        let bit = 1 << (gfn.0 % 32);
        match in_use {
            true => drop(self.in_use.make(gfn.0 / 32).map(|bits| bits.fetch_or(bit, AcqRel))),
            false => drop(self.in_use.get(gfn.0 / 32).map(|bits| bits.fetch_and(!bit, AcqRel))),
        }
    }

    fn was_in_use(&self, gfn: Gfn) -> bool {
        self.in_use.get(gfn.0 / 32).is_some_and(|bits| bits.load(Acquire) >> (gfn.0 % 32) & 1 != 0)
    }

    fn believe(&self, witness: Option<Arc<dyn Witness>>) {
        let mut now = self.witness.write().unwrap_or_else(PoisonError::into_inner);
        // Nobody has the new one before the bits of the old one's frames are gone.
        self.in_use.clear();
        *now = witness;
    }

    /// After the frame's word was locked: the witness of whoever evicted it, or a later one.
    fn witness(&self) -> Option<Arc<dyn Witness>> {
        self.witness.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What is known of a frame that is elsewhere and wanted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It may be needed.
    Needed,
    /// It looks freed, but what it was when it went is not known.
    Unproven,
    /// It was freed.
    Dead,
}

impl Pager {
    /// From now on `witness` is believed, and of frames that are elsewhere already nothing
    /// is known. It must be believed before frames are evicted on its kernel's word.
    pub fn believe(&self, witness: Option<Arc<dyn Witness>>) {
        self.dead.believe(witness);
    }

    /// As the holder of the frame's word.
    pub(crate) fn verdict(&self, gfn: Gfn) -> Verdict {
        let Some(witness) = self.dead.witness() else { return Verdict::Needed };
        // After the witness: that of another kernel comes with cleared bits.
        let was_in_use = self.dead.was_in_use(gfn);
        match witness.looks_freed(gfn, &|gpa| self.metadata(gpa)) {
            true if was_in_use => Verdict::Dead,
            true => Verdict::Unproven,
            false => Verdict::Needed,
        }
    }

    /// By pread(2): not even metadata that was emptied against all rules is read in place.
    fn metadata(&self, gpa: Gpa) -> Option<PageWords> {
        let bytes: [u8; size_of::<PageWords>()] =
            readable(self.ledger.content(gpa.gfn())).then(|| self.ram.bytes_at(gpa))??;
        let mut words = PageWords::default();
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word.get_mut() = u64::from_ne_bytes(*bytes);
        }
        Some(words)
    }

    /// A touched frame comes back as zeros: its old content is dead, or about to be
    /// overwritten.
    pub(crate) fn install_blank(&self, gfn: Gfn, held: LockedFrame<'_>) -> io::Result<Served> {
        let frame = FrameRange::new(gfn, 1);
        // Zeros until somebody has written: what a hole on record as resident is.
        if let Err(error) = self.fill(gfn, 0) {
            self.after(held.abandon(), frame);
            return Err(error);
        }
        self.devices.map(frame);
        // What its slot holds it never will again.
        let _ = self.leave(gfn, held, Content::Resident);
        self.wake(frame).map(|()| Served::Done)
    }

    /// A frame that was just emptied, since the guest had freed it, gets memory, and with
    /// it those around it of which the same holds: Linux hands out together, and often
    /// from the last to the first, what it freed together. `false`: it has none yet.
    pub(crate) fn install_freed(&self, gfn: Gfn) -> io::Result<bool> {
        let behind = (self.frames_to_border(gfn) - 1).min(FREED_TOGETHER);
        let before = (gfn.index_in_huge() as u64).min(FREED_TOGETHER);
        let is_freed = |gfn: &Gfn| self.drop_if_dead(*gfn);
        let behind = (1..=behind).map(|by| Gfn(gfn.0 + by)).take_while(is_freed).count();
        let before = (1..=before).map(|by| Gfn(gfn.0 - by)).take_while(is_freed).count();
        let first = Gfn(gfn.0 - before as u64);
        self.install_run(FrameRange::new(first, (before + 1 + behind) as u64))
    }

    /// If the guest has freed the frame since it went, it is empty from now on.
    pub(crate) fn drop_if_dead(&self, gfn: Gfn) -> bool {
        self.ledger.content(gfn).is_elsewhere()
            && self.drop_if(gfn, || self.verdict(gfn) == Verdict::Dead)
    }

    /// If a frame is elsewhere and free, by the word of who evicts, it is empty from
    /// now on.
    pub fn drop_if_free(&self, gfn: Gfn, judge: &dyn Judge) -> bool {
        self.ledger.content(gfn).is_elsewhere() && self.drop_if(gfn, || judge.is_dead(gfn))
    }

    fn drop_if(&self, gfn: Gfn, is_dead: impl FnOnce() -> bool) -> bool {
        let Ok(held) = self.ledger.lock_frame(gfn) else { return false };
        let dead = held.content().is_elsewhere() && is_dead();
        let wanted = match dead {
            true => self.become_empty(gfn, held),
            false => held.abandon(),
        };
        self.after(wanted, FrameRange::new(gfn, 1));
        dead
    }

    /// What the frame held is dead. Whether somebody asked for it meanwhile.
    pub(crate) fn become_empty(&self, gfn: Gfn, held: LockedFrame<'_>) -> bool {
        add(&self.counters.dropped_frames, 1);
        add(&self.counters.emptied_frames, 1);
        self.leave(gfn, held, Content::Empty { fill: 0, hard: false })
    }
}
