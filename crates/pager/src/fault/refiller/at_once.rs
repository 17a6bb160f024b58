//! Content that the store has in memory comes back on the fault thread: nothing is read for it, and
//! waiting for another thread would take longer than filling it.

use ebb_ledger::Content;
use ebb_store::MEMORY_SLOTS;
use ebb_sys::uffd::Fault;
use ebb_units::FrameRange;

use crate::fault::read_ahead::ReadAhead;
use crate::fault::refiller::Refiller;
use crate::residency::dead::Verdict;
use crate::support::counters::add;

/// Most frames brought back together: no other touch waits longer than for these.
const TOGETHER_MAX: usize = 8;

fn slot_in_memory(content: Content) -> Option<u64> {
    match content {
        Content::Saved { slot } => Some(slot).filter(|slot| *slot >= MEMORY_SLOTS),
        _ => None,
    }
}

impl Refiller {
    /// Serves the touch of a frame whose content is in memory, and also brings back what lies
    /// around it, where that pays. `false`: a thread that may wait must serve it, as there is no
    /// room, another thread has locked the frame, or the content cannot be loaded or is dead.
    pub(crate) fn refill_at_once(&self, fault: Fault, ahead: &mut ReadAhead) -> bool {
        let Some(gfn) = self.frames.ram().gpa(fault.address).map(|gpa| gpa.gfn()) else {
            return false;
        };
        let Some(slot) = slot_in_memory(self.frames.ledger().content(gfn)) else { return false };
        if self.room.is_over_limit() {
            return false;
        }
        let Some(word) = self.residency.lock_saved(gfn, slot) else { return false };
        let verdict = self.residency.verdict(gfn);
        if verdict == Verdict::Dead || self.residency.fill_backed(gfn, word.content()).is_err() {
            self.frames.after(word.abandon(), FrameRange::new(gfn, 1));
            return false;
        }
        add(&self.frames.counters().missing, 1);
        add(&self.frames.counters().false_reads, u64::from(verdict == Verdict::Unproven));
        let comeback = self.residency.count_refill(gfn, || self.room.is_at_limit());
        let _ = self.residency.arrive(gfn, word);
        self.frames.after(true, FrameRange::new(gfn, 1));
        let hits = self.bring_around(slot, ahead);
        self.residency.count_hits(hits, comeback);
        true
    }

    /// Brings back what lies around a slot, where that pays. Returns how many frames that were read
    /// ahead earlier were of use.
    fn bring_around(&self, slot: u64, ahead: &mut ReadAhead) -> u64 {
        if self.residency.owners().get(slot).is_none() {
            // The slot has no neighbours.
            return 0;
        }
        let window = ahead.window(slot);
        let first = slot.saturating_sub(window.before as u64);
        let all = first..first + window.pages.min(TOGETHER_MAX) as u64;
        let brought = |near: &u64| *near != slot && self.bring(*near);
        let (count, last) = all.filter(brought).fold((0, slot), |(n, _), near| (n + 1, near));
        ahead.read(slot, last.max(slot) + 1, count);
        add(&self.frames.counters().ahead_frames, count);
        window.hits
    }

    /// Brings back the content of a slot that was not touched. Returns whether it came.
    fn bring(&self, slot: u64) -> bool {
        let Some(gfn) = self.residency.owners().get(slot) else { return false };
        let Some(word) = self.residency.lock_saved(gfn, slot) else { return false };
        let (wanted, came) = match self.residency.verdict(gfn) {
            Verdict::Dead => (self.residency.become_empty(gfn, word), false),
            _ if self.residency.fill_backed(gfn, word.content()).is_err() => {
                (word.abandon(), false)
            }
            _ => (self.residency.arrive(gfn, word), true),
        };
        self.frames.after(wanted, FrameRange::new(gfn, 1));
        came
    }
}
