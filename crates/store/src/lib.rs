//! Where the content of frames rests that are not in memory.
//!
//! One trait, [`Store`]: [`SwapFile`] keeps pages on a disk, sealed (encrypted, or with a
//! checksum), [`Compressed`] those in memory that shrink, in front of another store.
//! Formats: `docs/swap-store.md`.
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
pub use medium::Medium;
pub use page_buffer::PageBuffer;
pub use room::{NoRoom, Quota, Room, Space};
pub use sealer::Protection;
pub use swap_file::SwapFile;
pub use table::{Place, TABLE_BYTES, Table};
pub use traffic::Traffic;

use std::io;
use std::path::Path;

/// A frame's content.
pub type Page = [u8; ebb_units::FRAME_BYTES as usize];

/// A place for the content of frames, one slot each. Slot numbers are below
/// 2^48. Several frames may be given the same slot, each for itself: a page
/// whose slot number says all that is in it.
pub trait Store: Send + Sync {
    /// Puts a page into a free slot. On return it survives this process.
    ///
    /// # Errors
    /// [`StoreError::Full`], or what the medium said; the page is in no slot then.
    fn save(&self, page: &Page) -> Result<u64, StoreError>;

    /// Puts pages into free slots, adjacent ones where there are such, with few
    /// writes. What is reported as stored survives this process.
    fn save_batch(&self, pages: &[Page]) -> SavedBatch;

    /// Reads a slot that is in use. On the fault path: allocates nothing.
    ///
    /// # Errors
    /// [`StoreError::NotInUse`]; [`StoreError::Damaged`]: what was read is not what
    /// was saved; or what the medium said. `page` is as before then.
    fn load(&self, slot: u64, page: &mut Page) -> Result<(), StoreError>;

    /// Reads the slots from `first` on in one go, as far as they are in use and
    /// whole; at most [`CLUSTER_SLOTS`]. A page that is not reported as loaded
    /// holds any bytes; [`Store::load`] tells why. A slot that is released meanwhile
    /// may be reported either way: only slots whose frames the caller holds mean
    /// anything. A page-aligned `pages` ([`PageBuffer`]) saves a copy.
    ///
    /// # Errors
    /// What the medium said.
    fn load_batch(&self, first: u64, pages: &mut [Page]) -> Result<Loaded, StoreError>;

    /// Of the slots that are read from `first` on only `which` are wanted, and in this order: `ready`
    /// is told of each of them, counted from `first`, as soon as its page is there. No other page
    /// means anything. Else as [`Store::load_batch`].
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

    /// The slot's content is not needed any more. Called on the fault path: no
    /// I/O here.
    fn release(&self, slot: u64);

    /// Gives back the space of slots that were released, for a while: where the medium takes long the
    /// rest goes the next time.
    ///
    /// # Errors
    /// What the medium said; the slots stay usable.
    fn trim(&self) -> Result<(), StoreError>;

    /// Whether a store that shares room with this one has found none, since this was asked last.
    fn is_room_wanted(&self) -> bool {
        false
    }

    /// The slot is in use, by the word of a ledger that a dead daemon left. Before
    /// anything is saved.
    ///
    /// # Errors
    /// [`StoreError::NotInUse`]: there is no such slot, or two frames claim it.
    fn claim(&self, slot: u64) -> Result<(), StoreError>;

    /// How many slots are read at once, at most, for the sake of one that is wanted: fewer
    /// while others wait for the same disk.
    fn most_at_once(&self) -> usize {
        CLUSTER_SLOTS as usize
    }

    /// How much of it is in use now.
    fn usage(&self) -> Usage;

    /// Slots in memory whose pages should go to the disk to make room, those that
    /// have been there longest: with [`Store::save_to_disk`], a word in the ledger for
    /// each, and [`Store::release`]. From the thread that saves.
    fn surplus(&self) -> Vec<u64> {
        Vec::new()
    }

    /// As [`Store::save_batch`], with nothing kept in memory.
    fn save_to_disk(&self, pages: &[Page]) -> SavedBatch {
        self.save_batch(pages)
    }

    /// Sets what pages in memory may take; no more than the store was made for. What
    /// takes more is surplus.
    fn limit_memory(&self, _bytes: u64) {}
}

/// Slots from here on are in memory, those below on disk.
pub const MEMORY_SLOTS: u64 = 1 << 47;

/// How much of a store is in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Slots on disk.
    pub disk_slots: u64,
    /// Slots on disk that hold a page.
    pub disk_slots_used: u64,
    /// What the file on disk took when it was last written or trimmed.
    pub file_bytes: u64,
    /// Numbers of slots for compressed pages: so many from [`MEMORY_SLOTS`] on. Few of
    /// them are ever in use.
    pub memory_slots: u64,
    /// What compressed pages take in memory, room for more included.
    pub memory_bytes: u64,
    /// The most that they may take.
    pub memory_limit_bytes: u64,
    /// Pages compressed in memory.
    pub compressed_pages: u64,
    /// Pages of one byte again and again, which take nothing.
    pub filled_pages: u64,
}

/// A run directory's files should be in memory alone: a key on a disk may be found there after
/// its VM.
pub use ebb_sys::memory_fs::is_in_memory;

/// Whether a daemon before this one had a [`Compressed`] store in `run`.
///
/// # Errors
/// As stat(2).
pub fn has_compressed(run: &Path) -> io::Result<bool> {
    run.join(slabs::FILE).try_exists()
}

/// Removes what stores keep in a VM's run directory, its key first: what lies
/// on disk cannot be read from then on.
///
/// # Errors
/// As unlink(2); nothing that is missing is an error.
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
