//! Whether evicted content is dead, by the word of the guest's kernel.

use super::dead::{Verdict, Witness};
use crate::frames::Frames;
use crate::residency::Residency;
use crate::residency::judge::Judge;
use crate::residency::view::readable;
use ebb_inspect::PageWords;
use ebb_store::Page;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa};
use std::cell::RefCell;
use std::sync::Arc;

impl Residency {
    /// Believes `witness` from now on; of frames that are already evicted nothing is known any
    /// more. The witness must be believed before frames are evicted on its kernel's word.
    pub fn believe(&self, witness: Option<Arc<dyn Witness>>) {
        self.dead.believe(witness);
    }

    /// Judges whether the frame's content is dead. The caller has locked the frame's word.
    pub(crate) fn verdict(&self, gfn: Gfn) -> Verdict {
        self.dead.verdict(gfn, &|gpa| page_words(&self.frames, gpa))
    }

    /// Returns a reader of verdicts. While it lives, the caller keeps locked the words of all
    /// frames that it asks for.
    pub(crate) fn verdicts(&self) -> Verdicts<'_> {
        Verdicts { residency: self, read: RefCell::default() }
    }

    /// Makes the frame empty if the guest has freed it since its eviction. Returns whether it did.
    pub(crate) fn drop_if_dead(&self, gfn: Gfn) -> bool {
        self.frames.ledger().content(gfn).is_evicted()
            && self.drop_if(gfn, || self.verdict(gfn) == Verdict::Dead)
    }

    /// Makes the frame empty if it is evicted and `judge` says that it is free. Returns whether it
    /// did.
    pub fn drop_if_free(&self, gfn: Gfn, judge: &dyn Judge) -> bool {
        self.frames.ledger().content(gfn).is_evicted() && self.drop_if(gfn, || judge.is_dead(gfn))
    }

    fn drop_if(&self, gfn: Gfn, is_dead: impl FnOnce() -> bool) -> bool {
        let Ok(held) = self.frames.ledger().lock_frame(gfn) else { return false };
        let dead = held.content().is_evicted() && is_dead();
        let wanted = match dead {
            true => self.become_empty(gfn, held),
            false => held.abandon(),
        };
        self.frames.after(wanted, FrameRange::new(gfn, 1));
        dead
    }
}

/// Verdicts of frames whose metadata lies together: the metadata is read one frame at a time.
pub(crate) struct Verdicts<'r> {
    residency: &'r Residency,
    /// The metadata frame read last, and its bytes.
    read: RefCell<Option<(Gfn, Box<Page>)>>,
}

impl Verdicts<'_> {
    /// Whether the guest has freed the frame since its eviction. One look at metadata that was read
    /// together sorts out nearly all frames. It proves nothing: two looks at different times do
    /// (`docs/decisions/0012-dead-frames-at-the-fault.md`), so the metadata is read again for the
    /// frames that look dead.
    pub(crate) fn is_dead(&self, gfn: Gfn) -> bool {
        let looks_dead = || self.residency.dead.verdict(gfn, &|gpa| self.page_words(gpa));
        self.residency.dead.was_in_use(gfn)
            && looks_dead() == Verdict::Dead
            && self.residency.verdict(gfn) == Verdict::Dead
    }

    fn page_words(&self, gpa: Gpa) -> Option<PageWords> {
        let (frame, at) = (gpa.gfn(), (gpa.0 % FRAME_BYTES) as usize);
        let mut read = self.read.borrow_mut();
        if read.as_ref().is_none_or(|(gfn, _)| *gfn != frame) {
            *read = Some((frame, Box::new(bytes_at(&self.residency.frames, frame.gpa())?)));
        }
        let (_, page) = read.as_ref()?;
        Some(words_of(page.get(at..at + size_of::<PageWords>())?))
    }
}

/// Reads metadata by pread(2): not even metadata that was punched against all rules is read in
/// place.
fn page_words(frames: &Frames, gpa: Gpa) -> Option<PageWords> {
    let bytes: [u8; size_of::<PageWords>()] = bytes_at(frames, gpa)?;
    Some(words_of(&bytes))
}

fn bytes_at<const COUNT: usize>(frames: &Frames, gpa: Gpa) -> Option<[u8; COUNT]> {
    readable(frames.ledger().content(gpa.gfn())).then(|| frames.ram().bytes_at(gpa))?
}

fn words_of(bytes: &[u8]) -> PageWords {
    let mut words = PageWords::default();
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
        *word.get_mut() = u64::from_ne_bytes(*bytes);
    }
    words
}
