//! The only way to the guest's RAM.

use std::sync::atomic::AtomicU64;

use ebb_units::{FRAME_BYTES, Gpa};

use crate::page::PageWords;

/// The most metadata looked at in one piece: one huge page of it.
const WINDOW_BYTES: u64 = 2 << 20;

/// A guest's RAM, read-only. Bytes change under the reader at any time.
pub trait GuestMemory {
    /// One 8-byte-aligned word, read once.
    ///
    /// `None`: misaligned, no RAM, or its content is not in memory. Must never
    /// make the host allocate memory for a hole.
    fn word(&self, gpa: Gpa) -> Option<u64>;

    /// The 64-byte-aligned `struct page` at `gpa`, each of its words read once. As
    /// [`GuestMemory::word`] otherwise.
    fn page(&self, gpa: Gpa) -> Option<PageWords>;

    /// `count` words from the 8-byte-aligned `gpa` on, in place.
    ///
    /// `None`: misaligned, part of it is no RAM or not in memory, or it spans regions.
    fn words(&self, gpa: Gpa, count: usize) -> Option<&[AtomicU64]>;

    /// The next populated extent `(start, bytes)`, frame aligned and not empty, that ends
    /// after `from`; one that `from` lies in is cut to begin there. `None` after the last.
    fn next_populated(&self, from: Gpa) -> Option<(Gpa, u64)>;

    /// The RAM's segments `(start, bytes)`, frame aligned, in guest-physical order.
    fn segments(&self) -> Vec<(Gpa, u64)>;
}

/// Visits `bytes` of memory from `start` on in windows, as large as can be had in
/// place: `visit(offset, words)`. What cannot be had is visited as `None`, frame by frame.
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
