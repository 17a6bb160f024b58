//! A guest's page tables, changed in place: `docs/decisions/0023-*`.
//!
//! A frame is a page table for as long as its `struct page` says so, and the guest cannot change
//! that while the metadata is write-protected. So a thread that changes an entry locks the
//! metadata, checks that the frame is a page table, and then swaps words: the guest may write to
//! the table meanwhile, but cannot turn it into something else.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use ebb_ledger::{Content, LockedFrame};
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};

use crate::frames::Frames;
use crate::residency::view::readable;

/// Number of words in a frame.
const WORDS: usize = FRAME_BYTES as usize / 8;

/// A metadata frame to which nobody in the guest can write until this is dropped.
#[must_use]
pub struct LockedMetadata<'p> {
    frames: &'p Frames,
    frame: FrameRange,
    word: Option<LockedFrame<'p>>,
    /// Whether this protected the frame. If not, it was protected before, and stays so.
    is_ours: bool,
}

impl LockedMetadata<'_> {
    /// Runs `work` with the words of a frame as they are now, and with the words in place, while
    /// the frame is locked: it is neither punched nor moved meanwhile. `false`: it is not resident
    /// now, or a request of a disk uses it.
    ///
    /// A frame whose words are all zero is not touched in place: it may be a hole. `work` may
    /// change only words that are not zero in the copy.
    pub fn with_table(&self, table: Gfn, work: impl FnOnce(&[u64; WORDS], &[AtomicU64])) -> bool {
        let (frames, frame) = (self.frames, FrameRange::new(table, 1));
        if frames.ram().range(frame).is_none() || frames.split(table.huge()).is_err() {
            return false;
        }
        let Ok(word) = frames.ledger().lock_frame(table) else { return false };
        let is_plain = word.content() == Content::Resident && !frames.pins().has(table);
        let mut words = [0; WORDS];
        let done = match frames.ram().words(table.gpa(), WORDS) {
            Some(in_place) if is_plain && read_table(frames, table, &mut words) => {
                if words.iter().any(|word| *word != 0) {
                    work(&words, in_place);
                }
                true
            }
            _ => false,
        };
        frames.after(word.abandon(), frame);
        done
    }
}

impl Drop for LockedMetadata<'_> {
    /// Lets the guest go on, and wakes writers that wait for the metadata.
    fn drop(&mut self) {
        if self.is_ours {
            self.frames.report("unprotect", self.frames.unprotect(self.frame));
        }
        if let Some(word) = self.word.take() {
            self.frames.after(word.abandon(), self.frame);
        }
    }
}

/// The page tables in one VM's frames.
pub struct GuestTables(Arc<Frames>);

impl GuestTables {
    pub(crate) fn new(frames: &Arc<Frames>) -> GuestTables {
        GuestTables(Arc::clone(frames))
    }

    /// Locks and write-protects a metadata frame. The caller must then check by the guest's page
    /// tables whether it is still that frame's metadata.
    ///
    /// `None`: another thread works on it, or it is not resident.
    ///
    /// # Errors
    /// As ioctl_userfaultfd(2): `ENOENT` where writes to it are not watched.
    pub fn lock_metadata(&self, metadata: Gfn) -> io::Result<Option<LockedMetadata<'_>>> {
        let frame = FrameRange::new(metadata, 1);
        if self.0.ram().range(frame).is_none() || self.0.split(metadata.huge()).is_err() {
            return Ok(None);
        }
        let Ok(word) = self.0.ledger().lock_frame(metadata) else { return Ok(None) };
        let is_ours = match word.content() {
            Content::Resident => true,
            // The frame is protected for a reclaimed block, for as long as the word is locked.
            Content::Watch { .. } => false,
            _ => {
                self.0.after(word.abandon(), frame);
                return Ok(None);
            }
        };
        let held = LockedMetadata { frames: &self.0, frame, word: Some(word), is_ours };
        if is_ours {
            // On failure, the drop undoes what must be undone.
            self.0.protect(frame)?;
        }
        Ok(Some(held))
    }

    /// Reads a frame's words, each once. `false`: it is not resident, or no RAM. A hole reads as
    /// zeros and stays a hole.
    pub fn read_table(&self, table: Gfn, words: &mut [u64; WORDS]) -> bool {
        read_table(&self.0, table, words)
    }
}

fn read_table(frames: &Frames, table: Gfn, words: &mut [u64; WORDS]) -> bool {
    let mut bytes = [0; FRAME_BYTES as usize];
    let there = readable(frames.ledger().content(table))
        && frames.ram().read(FrameRange::new(table, 1), &mut bytes).is_ok();
    let (each, _) = bytes.as_chunks::<8>();
    words.iter_mut().zip(each).for_each(|(word, bytes)| *word = u64::from_ne_bytes(*bytes));
    there
}
