//! Where the content of evicted frames is.
//!
//! It has one trait, [`Store`], and two stores: [`SwapFile`] keeps pages on a disk, sealed
//! (encrypted, or with a checksum), [`Compressed`] keeps pages that compress well in memory, in
//! front of another store. Formats: `docs/swap-store.md`.
#![forbid(unsafe_code)]

mod batch;
mod clusters;
mod compressed;
mod disk;
mod error;
mod key;
mod medium;
mod number_set;
mod page_buffer;
mod room;
mod sealer;
mod seals;
mod signature;
mod slabs;
mod slot_bits;
mod swap_file;
mod table;
mod traffic;

pub use batch::{Loaded, SavedBatch};
pub use clusters::CLUSTER_SLOTS;
pub use compressed::Compressed;
pub use disk::Disk;
pub use error::StoreError;
pub use medium::{Identity, Medium};
pub use page_buffer::PageBuffer;
pub use room::{NoRoom, Quota, SharedRoom, Space};
pub use sealer::Protection;
pub use swap_file::SwapFile;
pub use table::{TABLE_BYTES, Table, TableSlot};
pub use traffic::Traffic;

use std::io;
use std::path::Path;

/// The content of a frame.
pub type Page = [u8; ebb_units::FRAME_BYTES as usize];

/// Keeps the content of frames, one slot each. Slot numbers are below 2^48. Several frames may get
/// the same slot, each for itself, if the slot number alone says all that is in the page.
pub trait Store: Send + Sync {
    /// Puts a page into a free slot. On return it survives this process.
    ///
    /// # Errors
    /// [`StoreError::Full`], or what the medium said; the page is in no slot then.
    fn save(&self, page: &Page) -> Result<u64, StoreError>;

    /// Puts pages into free slots with few writes, into adjacent slots where there are any. Pages
    /// reported as stored survive this process.
    fn save_batch(&self, pages: &[Page]) -> SavedBatch;

    /// Reads a slot that is in use. The fault path calls it: it allocates nothing.
    ///
    /// # Errors
    /// [`StoreError::NotInUse`]. [`StoreError::Damaged`]: what was read is not what was saved.
    /// Or what the medium said. `page` is unchanged then.
    fn load(&self, slot: u64, page: &mut Page) -> Result<(), StoreError>;

    /// Reads slots from `first` on at once, at most [`CLUSTER_SLOTS`], and loads the pages of
    /// those that are in use and intact. A page not reported as loaded has undefined content, and
    /// [`Store::load`] tells why. A slot released meanwhile may be reported either way: only slots
    /// whose frames the caller has locked count. A page-aligned `pages` ([`PageBuffer`]) saves a
    /// copy.
    ///
    /// # Errors
    /// What the medium said.
    fn load_batch(&self, first: u64, pages: &mut [Page]) -> Result<Loaded, StoreError>;

    /// Reads slots from `first` on as [`Store::load_batch`] does, but only for the pages in
    /// `which`, as indices from `first`. It calls `ready` with each of them, in this order, as
    /// soon as its page is loaded. All other pages have undefined content.
    ///
    /// # Errors
    /// What the medium said.
    fn load_some(
        &self,
        first: u64,
        pages: &mut [Page],
        which: &[usize],
        ready: &mut dyn FnMut(usize, &Page),
    ) -> Result<(), StoreError> {
        self.load_batch(first, pages).map(|loaded| loaded.tell(pages, which, ready))
    }

    /// Frees a slot whose content is not needed any more. The fault path calls it: it does no I/O.
    fn release(&self, slot: u64);

    /// Frees the space of released slots, for a limited time: on a slow medium the rest is freed
    /// by later calls.
    ///
    /// # Errors
    /// What the medium said. The slots stay usable.
    fn trim(&self) -> Result<(), StoreError>;

    /// Whether a store that shares room with this one has lacked room since the last call.
    fn is_room_wanted(&self) -> bool {
        false
    }

    /// Whether the name that the file was opened by leads to nothing now, or to another file. What
    /// is stored is lost then as soon as this process ends.
    fn is_removed(&self) -> bool {
        false
    }

    /// Marks a slot as in use, because a word of a ledger that a dead daemon left names it. It
    /// comes before any save.
    ///
    /// # Errors
    /// [`StoreError::NotInUse`]: there is no such slot, or two frames claim it.
    fn claim(&self, slot: u64) -> Result<(), StoreError>;

    /// Returns how many slots to read at once, at most, for the sake of one that is wanted. It is
    /// smaller while others wait for the same disk.
    fn most_at_once(&self) -> usize {
        CLUSTER_SLOTS as usize
    }

    /// Returns how much of the store is in use now.
    fn usage(&self) -> StoreUsage;

    /// Returns slots in memory whose pages should go to the disk to make room: those that have
    /// been there longest. To move them, the caller uses [`Store::save_to_disk`], writes a word of
    /// the ledger for each, and uses [`Store::release`]. Only the thread that saves calls it.
    fn surplus(&self) -> Vec<u64> {
        Vec::new()
    }

    /// Saves pages as [`Store::save_batch`] does, but none of them in memory.
    fn save_to_disk(&self, pages: &[Page]) -> SavedBatch {
        self.save_batch(pages)
    }

    /// Sets the most bytes that pages in memory may take, up to what the store was made for. Pages
    /// beyond that are surplus. Only the thread that saves calls it.
    ///
    /// # Errors
    /// The store had no memory so far, and its file cannot be made. Nothing has changed then.
    fn limit_memory(&self, _bytes: u64) -> Result<(), StoreError> {
        Ok(())
    }
}

/// First slot in memory. Slots below it are on disk.
pub const MEMORY_SLOTS: u64 = 1 << 47;

/// How much of a store is in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StoreUsage {
    /// Slots on disk.
    pub disk_slots: u64,
    /// Slots on disk that hold a page.
    pub disk_slots_used: u64,
    /// Bytes that the file on disk took when it was last written or trimmed.
    pub file_bytes: u64,
    /// Slot numbers for compressed pages, from [`MEMORY_SLOTS`] on. Few of them are ever in use.
    pub memory_slots: u64,
    /// Bytes that compressed pages take in memory, with free room in their chunks.
    pub memory_bytes: u64,
    /// Most bytes that they may take.
    pub memory_limit_bytes: u64,
    /// Pages compressed in memory.
    pub compressed_pages: u64,
    /// Pages filled with one byte, which take no memory.
    pub filled_pages: u64,
}

/// A run directory's files should be in memory only: a key on a disk could be found there after
/// the VM has ended.
pub use ebb_sys::memory_fs::is_in_memory;

/// Whether an earlier daemon had a [`Compressed`] store in `run`.
///
/// # Errors
/// As stat(2).
pub fn has_compressed(run: &Path) -> io::Result<bool> {
    run.join(slabs::FILE).try_exists()
}

/// Removes the stores' files in a VM's run directory, the key first: from then on what is on disk
/// cannot be read.
///
/// # Errors
/// As unlink(2). A missing file is no error.
pub fn remove(run: &Path) -> io::Result<()> {
    let all = [key::FILE, key::NEXT, seals::FILE, slabs::FILE];
    all.iter().try_for_each(|name| remove_file(&run.join(name)))
}

fn remove_file(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
