//! Whether content that is elsewhere is dead, by the word of the guest's kernel.

use super::dead::{Verdict, Witness};
use crate::frames::Frames;
use crate::residency::Residency;
use crate::residency::judge::Judge;
use crate::residency::view::readable;
use ebb_inspect::PageWords;
use ebb_units::{FrameRange, Gfn, Gpa};
use std::sync::Arc;

impl Residency {
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
        match witness.looks_freed(gfn, &|gpa| page_words(&self.frames, gpa)) {
            true if was_in_use => Verdict::Dead,
            true => Verdict::Unproven,
            false => Verdict::Needed,
        }
    }

    /// If the guest has freed the frame since it went, it is empty from now on.
    pub(crate) fn drop_if_dead(&self, gfn: Gfn) -> bool {
        self.frames.ledger().content(gfn).is_elsewhere()
            && self.drop_if(gfn, || self.verdict(gfn) == Verdict::Dead)
    }

    /// If a frame is elsewhere and free, by the word of who evicts, it is empty from
    /// now on.
    pub fn drop_if_free(&self, gfn: Gfn, judge: &dyn Judge) -> bool {
        self.frames.ledger().content(gfn).is_elsewhere() && self.drop_if(gfn, || judge.is_dead(gfn))
    }

    fn drop_if(&self, gfn: Gfn, is_dead: impl FnOnce() -> bool) -> bool {
        let Ok(held) = self.frames.ledger().lock_frame(gfn) else { return false };
        let dead = held.content().is_elsewhere() && is_dead();
        let wanted = match dead {
            true => self.become_empty(gfn, held),
            false => held.abandon(),
        };
        self.frames.after(wanted, FrameRange::new(gfn, 1));
        dead
    }
}

/// By pread(2): not even metadata that was emptied against all rules is read in place.
fn page_words(frames: &Frames, gpa: Gpa) -> Option<PageWords> {
    let bytes: [u8; size_of::<PageWords>()] =
        readable(frames.ledger().content(gpa.gfn())).then(|| frames.ram().bytes_at(gpa))??;
    let mut words = PageWords::default();
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
        *word.get_mut() = u64::from_ne_bytes(*bytes);
    }
    Some(words)
}
