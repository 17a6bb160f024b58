//! Read access to the guest's RAM, the only one that this crate has.

use std::sync::atomic::AtomicU64;

use ebb_units::{FRAME_BYTES, Gpa};

use crate::page::PageWords;

/// Most metadata in one window: one huge page of it.
const WINDOW_BYTES: u64 = 2 << 20;

/// A guest's RAM, read-only. Its bytes may change at any time.
pub trait GuestMemory {
    /// Reads one 8-byte-aligned word, once.
    ///
    /// Returns `None` if `gpa` is misaligned, not in RAM, or not resident. Must never make the host
    /// allocate memory for a hole.
    fn word(&self, gpa: Gpa) -> Option<u64>;

    /// Reads the 64-byte-aligned `struct page` at `gpa`, each of its words once. Returns `None` in
    /// the same cases as [`GuestMemory::word`].
    fn page(&self, gpa: Gpa) -> Option<PageWords>;

    /// Returns `count` words in place, from the 8-byte-aligned `gpa` on.
    ///
    /// Returns `None` if `gpa` is misaligned, if a part is not in RAM or not resident, or if the
    /// words span regions.
    fn words(&self, gpa: Gpa, count: usize) -> Option<&[AtomicU64]>;

    /// The next populated extent `(start, bytes)` that ends after `from`, frame aligned and not
    /// empty. An extent that contains `from` is cut to begin there. `None` after the last.
    fn next_populated(&self, from: Gpa) -> Option<(Gpa, u64)>;

    /// The RAM's segments `(start, bytes)`, frame aligned, in guest-physical order.
    fn segments(&self) -> Vec<(Gpa, u64)>;
}

/// Visits `bytes` of memory from `start` on with `visit(offset, window)`. Windows are as large as
/// can be read in place. A window that cannot be read whole is visited frame by frame, and a frame
/// that cannot be read is `Err` with its bytes.
pub(crate) fn for_windows(
    mem: &dyn GuestMemory,
    start: Gpa,
    bytes: u64,
    mut visit: impl FnMut(u64, Result<&[AtomicU64], u64>),
) {
    let mut offset = 0;
    while offset < bytes {
        let gpa = Gpa(start.0 + offset);
        let whole = (bytes - offset).min(WINDOW_BYTES - gpa.0 % WINDOW_BYTES);
        match mem.words(gpa, (whole / 8) as usize) {
            Some(words) => visit(offset, Ok(words)),
            None => for_frames(mem, gpa, whole, |at, words| visit(offset + at, words)),
        }
        offset += whole;
    }
}

fn for_frames(
    mem: &dyn GuestMemory,
    start: Gpa,
    bytes: u64,
    mut visit: impl FnMut(u64, Result<&[AtomicU64], u64>),
) {
    let mut offset = 0;
    while offset < bytes {
        let gpa = Gpa(start.0 + offset);
        let part = (bytes - offset).min(FRAME_BYTES - gpa.0 % FRAME_BYTES);
        visit(offset, mem.words(gpa, (part / 8) as usize).ok_or(part));
        offset += part;
    }
}
