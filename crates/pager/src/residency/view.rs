//! The guest's memory as inspection may read it.

use std::sync::atomic::AtomicU64;

use ebb_inspect::{GuestMemory, PAGE_BYTES, PageWords};
use ebb_ledger::{Content, Ledger};
use ebb_store::{Page, Store};
use ebb_units::{FRAME_BYTES, FrameRange, Gpa};
use ebb_vm::Ram;

/// RAM as the guest would read it. A frame whose content is in the store is a hole in the file: it
/// is read from the store word by word, and not in place.
pub struct View<'a> {
    /// The VM's RAM.
    pub ram: &'a Ram,
    /// The ledger: where the content of each frame is.
    pub ledger: &'a Ledger,
    /// The store, with the content of evicted frames.
    pub store: &'a dyn Store,
}

impl View<'_> {
    /// Reads from a slot. `None` also if the slot has been given to another frame meanwhile.
    fn saved<const COUNT: usize>(&self, slot: u64, gpa: Gpa) -> Option<[u8; COUNT]> {
        let mut page: Page = [0; FRAME_BYTES as usize];
        self.store.load(slot, &mut page).ok()?;
        let still = self.ledger.content(gpa.gfn()) == Content::Saved { slot };
        let page = still.then_some(page)?;
        let at = (gpa.0 % FRAME_BYTES) as usize;
        page.get(at..at + COUNT)?.try_into().ok()
    }

    fn bytes_at<const COUNT: usize>(&self, gpa: Gpa) -> Option<[u8; COUNT]> {
        match self.ledger.content(gpa.gfn()) {
            Content::Saved { slot } => self.saved(slot, gpa),
            content if readable(content) => self.ram.bytes_at(gpa),
            _ => None,
        }
    }

    fn is_here(&self, frames: FrameRange) -> bool {
        frames.by_huge().all(|part| match self.ledger.is_split(part.start.huge()) {
            false => readable(self.ledger.content(part.start)),
            true => part.frames().all(|gfn| readable(self.ledger.content(gfn))),
        })
    }
}

/// Whether a frame of this content can be read in place. Watched metadata is protected against
/// writes only.
pub(crate) fn readable(content: Content) -> bool {
    matches!(content, Content::Resident | Content::Clean { .. } | Content::Watch { .. })
}

impl GuestMemory for View<'_> {
    fn word(&self, gpa: Gpa) -> Option<u64> {
        self.bytes_at(gpa).map(u64::from_ne_bytes)
    }

    fn page(&self, gpa: Gpa) -> Option<PageWords> {
        let bytes: [u8; PAGE_BYTES as usize] = self.bytes_at(gpa)?;
        let (words, _) = bytes.as_chunks::<8>();
        let words: &[[u8; 8]; PAGE_BYTES as usize / 8] = words.try_into().ok()?;
        Some(words.map(|word| AtomicU64::new(u64::from_ne_bytes(word))))
    }

    fn words(&self, gpa: Gpa, count: usize) -> Option<&[AtomicU64]> {
        let bytes = u64::try_from(count).ok()?.checked_mul(8)?;
        let end = gpa.checked_add(bytes)?.0.div_ceil(FRAME_BYTES);
        let first = gpa.gfn();
        let frames = FrameRange::new(first, end.checked_sub(first.0)?);
        self.is_here(frames).then(|| self.ram.words(gpa, count))?
    }

    fn next_populated(&self, from: Gpa) -> Option<(Gpa, u64)> {
        self.ram.next_populated(from)
    }

    fn segments(&self) -> Vec<(Gpa, u64)> {
        self.ram.regions().map(|region| (region.gpa, region.bytes)).collect()
    }
}
