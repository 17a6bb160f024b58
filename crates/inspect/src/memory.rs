//! Read access to the guest's RAM, the only one that this crate has.

use std::sync::atomic::AtomicU64;

use ebb_units::{FRAME_BYTES, FrameRange, Gpa};

use crate::page::PageWords;

/// Most metadata in one window: one huge page of it.
const WINDOW_BYTES: u64 = 2 << 20;

const FRAME_WORDS: usize = FRAME_BYTES as usize / 8;

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

/// Whether all of `frames` is in one of these segments of RAM.
pub(crate) fn in_ram(segments: &[(Gpa, u64)], frames: FrameRange) -> bool {
    let (start, end) = (frames.start.gpa().0, frames.end().gpa().0);
    segments.iter().any(|&(base, bytes)| base.0 <= start && end - base.0 <= bytes)
}

/// Visits the words of each frame of the populated RAM that can be read in place, in guest-physical
/// order.
pub(crate) fn for_populated_frames(
    mem: &dyn GuestMemory,
    mut visit: impl FnMut(Gpa, &[AtomicU64]),
) {
    let mut from = Gpa(0);
    while let Some((start, bytes)) = mem.next_populated(from) {
        let Some(end) = start.checked_add(bytes).filter(|end| end.0 > from.0) else { break };
        for_windows(mem, start, bytes, |offset, window| {
            let frames = window.iter().flat_map(|words| words.chunks_exact(FRAME_WORDS));
            for (index, frame) in (0..).zip(frames) {
                visit(Gpa(start.0 + offset + index * FRAME_BYTES), frame);
            }
        });
        from = end;
    }
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
