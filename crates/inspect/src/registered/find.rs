//! Finding records in the guest's memory.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use ebb_units::{Gfn, Gpa};
use ebb_vprobe::may_be_record;

use crate::GuestMemory;
use crate::memory::for_populated_frames;

/// Most records of either kind that a search returns. Any process of the guest can write pages that
/// look like one.
pub const RECORDS_MAX: usize = 64;

/// Returns the addresses of pages in the populated RAM that may be a record: at most
/// [`RECORDS_MAX`] of those that `comes_first` chooses by address and words, and as many others
/// behind them. Both are in guest-physical order.
pub fn find_records(
    mem: &dyn GuestMemory,
    comes_first: &dyn Fn(Gpa, &[AtomicU64]) -> bool,
) -> Vec<Gpa> {
    let (mut first, mut others) = (Vec::new(), Vec::new());
    for_populated_frames(mem, |at, frame| {
        if !begins_record(frame) {
            return;
        }
        let list = if comes_first(at, frame) { &mut first } else { &mut others };
        if list.len() < RECORDS_MAX {
            list.push(at);
        }
    });
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
