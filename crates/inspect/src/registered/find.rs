//! Finding records in the guest's memory.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use ebb_units::{FRAME_BYTES, Gfn, Gpa};
use ebb_vprobe::may_be_record;

use crate::GuestMemory;
use crate::memory::for_windows;

/// Most records of either kind that a search returns. Any process of the guest can write pages that
/// look like one.
pub const RECORDS_MAX: usize = 64;

const FRAME_WORDS: usize = FRAME_BYTES as usize / 8;

/// Returns the addresses of pages in the populated RAM that may be a record: at most
/// [`RECORDS_MAX`] of those that `comes_first` chooses by address and words, and as many others
/// behind them. Both are in guest-physical order.
pub fn find_records(
    mem: &dyn GuestMemory,
    comes_first: &dyn Fn(Gpa, &[AtomicU64]) -> bool,
) -> Vec<Gpa> {
    let (mut first, mut others) = (Vec::new(), Vec::new());
    let mut from = Gpa(0);
    while let Some((start, bytes)) = mem.next_populated(from) {
        let Some(end) = start.checked_add(bytes).filter(|end| end.0 > from.0) else { break };
        for_windows(mem, start, bytes, |offset, window| {
            let frames = window.iter().flat_map(|words| words.chunks_exact(FRAME_WORDS));
            for (index, frame) in frames.enumerate().filter(|(_, frame)| begins_record(frame)) {
                let at = Gpa(start.0 + offset + index as u64 * FRAME_BYTES);
                let list = match comes_first(at, frame) {
                    true => &mut first,
                    false => &mut others,
                };
                if list.len() < RECORDS_MAX {
                    list.push(at);
                }
            }
        });
        from = end;
    }
    first.append(&mut others);
    first
}

/// Whether this frame may hold a record. `false` if the frame is not resident.
pub fn may_hold_record(mem: &dyn GuestMemory, gfn: Gfn) -> bool {
    mem.words(gfn.gpa(), 1).is_some_and(begins_record)
}

fn begins_record(words: &[AtomicU64]) -> bool {
    words.first().is_some_and(|word| may_be_record(word.load(Relaxed)))
}
