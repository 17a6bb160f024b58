//! Where the content of a frame that is being evicted will be.

use ebb_digest::Digest;
use ebb_ledger::Content;
use ebb_store::Page;
use ebb_units::Gfn;

use crate::residency::Residency;
use crate::residency::judge::Judge;
use crate::support::counters::{add, subtract};

/// Where the content of a frame will be once it is punched.
#[derive(Clone, Copy)]
pub(crate) struct ContentPlace {
    pub(crate) content: Content,
    /// Digest of the page, if it is saved.
    pub(crate) digest: Digest,
    /// Whether it is in the slot that the frame keeps.
    pub(crate) is_kept: bool,
}

impl ContentPlace {
    /// A place whose content has no digest, or needs none.
    pub(crate) fn of(content: Content) -> ContentPlace {
        ContentPlace { content, digest: [0; 2], is_kept: false }
    }
}

/// A place, or the digest of a page that has no place yet.
pub(crate) type Found = Result<ContentPlace, Digest>;

/// Returns the byte of which the whole page consists, if there is one.
fn filled_with(page: &Page) -> Option<u8> {
    let (words, _) = page.as_chunks::<8>();
    let first = page[0];
    words.iter().all(|word| *word == [first; 8]).then_some(first)
}

impl Residency {
    /// Returns where the frame's content is without a write, or its digest if there is no such
    /// place. If the frame keeps a slot with another content, the slot is released: no word names
    /// it, so nobody needs it.
    pub(crate) fn unwritten(&self, gfn: Gfn, page: &Page, judge: &dyn Judge) -> Found {
        let empty = |fill| ContentPlace::of(Content::Empty { fill, hard: false });
        let fill = filled_with(page).or_else(|| judge.is_dead(gfn).then_some(0));
        if let Some(fill) = fill {
            self.drop_slot(gfn);
            return Ok(empty(fill));
        }
        // Computed once: for the frame's slot, for the disks, and for the return of the frame.
        let digest = self.digest_key.digest(page);
        if let Some(slot) = self.kept.slot_with(gfn, &digest) {
            return Ok(ContentPlace { content: Content::Saved { slot }, digest, is_kept: true });
        }
        self.drop_slot(gfn);
        let block = self.disk_backed.add(gfn, || self.disk.find(&digest)).ok_or(digest)?;
        if !self.note_block(gfn, block, page) {
            self.disk_backed.leave(gfn, block);
            return Err(digest);
        }
        Ok(ContentPlace::of(Content::OnDisk { block }))
    }

    /// Undoes a place that is not used after all. A slot that the frame kept stays kept.
    pub(crate) fn undo(&self, gfn: Gfn, place: ContentPlace) {
        match place.content {
            Content::Saved { slot } if !place.is_kept => self.store.release(slot),
            Content::OnDisk { block } => self.disk_backed.leave(gfn, block),
            _ => {}
        }
    }

    /// Notes that the frame is evicted. The caller has locked its word, which says so from now on.
    pub(crate) fn note_evicted(&self, gfn: Gfn, place: ContentPlace) {
        let counters = &self.frames.counters();
        self.refaults.went(gfn);
        let kept = match place.content {
            Content::Saved { slot } if place.is_kept => Some(slot),
            _ => None,
        };
        debug_assert_eq!(self.kept.slot(gfn), kept, "{gfn:?} is evicted as {:?}", place.content);
        match place.content {
            Content::Saved { .. } if place.is_kept => {
                self.kept.went(gfn);
                subtract(&counters.clean_frames, 1);
            }
            Content::Saved { slot } => self.kept.note(gfn, slot, place.digest),
            _ => {}
        }
        add(
            match place.content {
                Content::Saved { .. } => &counters.saved_frames,
                Content::OnDisk { .. } => &counters.on_disk_frames,
                _ => &counters.empty_frames,
            },
            1,
        );
    }
}

#[cfg(test)]
mod tests {
    use ebb_units::FRAME_BYTES;

    use super::*;

    #[test]
    fn only_a_page_of_one_byte_is_filled() {
        let mut page = [0xaa; FRAME_BYTES as usize];
        assert_eq!(filled_with(&page), Some(0xaa));
        page[FRAME_BYTES as usize - 1] = 0;
        assert_eq!(filled_with(&page), None);
    }
}
