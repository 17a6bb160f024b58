//! Where the content of frames rests that are not in memory.
#![forbid(unsafe_code)]

mod slots;
mod swap_file;

pub use swap_file::SwapFile;

use std::io;

/// A frame's content.
pub type Page = [u8; ebb_units::FRAME_BYTES as usize];

/// A place for the content of frames, one slot each.
pub trait Store: Send + Sync {
    /// Puts a page into a free slot. On return it survives this process.
    ///
    /// # Errors
    /// `StorageFull`, or what the medium said; the page is in no slot then.
    fn save(&self, page: &Page) -> io::Result<u64>;

    /// Reads a slot that is in use.
    ///
    /// # Errors
    /// `InvalidInput`: it is not; or what the medium said.
    fn load(&self, slot: u64, page: &mut Page) -> io::Result<()>;

    /// The slot's content is not needed any more. Called on the fault path: no
    /// I/O here.
    fn release(&self, slot: u64);

    /// Gives back the space of slots that were released. By whoever saves, not
    /// while it saves.
    ///
    /// # Errors
    /// What the medium said; the slots stay usable.
    fn trim(&self) -> io::Result<()>;

    /// The slot is in use, by the word of a ledger that a dead daemon left.
    ///
    /// # Errors
    /// `InvalidInput`: there is no such slot, or two frames claim it.
    fn claim(&self, slot: u64) -> io::Result<()>;
}
