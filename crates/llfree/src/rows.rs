//! The bit field of one area: eight rows of 64 frames.
//!
//! `flip` is the area's ([`Area::flip`](crate::area::Area::flip)): a row XOR `flip` has a set bit
//! for each allocated frame. `flip` cannot change while somebody has a claim on a frame of the
//! area, or has allocated one.

use crate::atomic::{Atom, AtomicU64};
use crate::layout::{AREA_ROWS, ROW_FRAMES};

pub(crate) type Rows = [AtomicU64; AREA_ROWS];

/// Most passes over the rows to find a claimed frame. Owners of other claims may take the frames
/// that this thread finds, but each takes some frame, so another pass helps. The bound makes the
/// loop end.
const ROUNDS: usize = 4;
const ROW_ORDER: u8 = 6;

/// Returns a mask of `2^order` bits from bit `first` on, all in one row.
#[inline(always)]
pub(crate) fn run(first: usize, order: u8) -> u64 {
    let bits = 1u32 << order;
    u64::MAX >> (ROW_FRAMES as u32 - bits) << (first % ROW_FRAMES as usize)
}

/// Takes an aligned block of order 0 to 9, searching from row `start`. Returns its first frame in
/// the area.
#[inline]
pub(crate) fn take(rows: &Rows, start: usize, order: u8, flip: u64) -> Option<usize> {
    match order {
        0 => (0..ROUNDS).find_map(|_| take_one(rows, start, flip)),
        1..=ROW_ORDER => each_row(start).find_map(|row| take_run(rows, row, order, flip)),
        _ => take_rows(rows, 1 << (order - ROW_ORDER), flip),
    }
}

/// Takes the first free frame of a row.
#[inline(always)]
pub(crate) fn take_in_row(row: &AtomicU64, mut seen: u64, flip: u64) -> Option<usize> {
    loop {
        let used = seen ^ flip;
        if used == u64::MAX {
            return None;
        }
        let bit = used.trailing_ones();
        match row.replace(seen, seen ^ 1 << bit) {
            Ok(()) => return Some(bit as usize),
            Err(now) => seen = now,
        }
    }
}

fn each_row(start: usize) -> impl Iterator<Item = usize> {
    (0..AREA_ROWS).map(move |step| (start + step) % AREA_ROWS)
}

fn take_one(rows: &Rows, start: usize, flip: u64) -> Option<usize> {
    each_row(start).find_map(|row| {
        let bit = take_in_row(&rows[row], rows[row].get(), flip)?;
        Some(row * ROW_FRAMES as usize + bit)
    })
}

fn take_run(rows: &Rows, row: usize, order: u8, flip: u64) -> Option<usize> {
    let mut bit = 0;
    rows[row].change(|seen| {
        bit = first_run(!(seen ^ flip), order)?;
        Some(seen ^ run(bit, order))
    })?;
    Some(row * ROW_FRAMES as usize + bit)
}

/// Returns the first aligned run of `2^order` set bits.
fn first_run(free: u64, order: u8) -> Option<usize> {
    // Bit n of the mask for order o is set for n divisible by 2^o.
    const STARTS: [u64; 7] = [
        u64::MAX,
        0x5555_5555_5555_5555,
        0x1111_1111_1111_1111,
        0x0101_0101_0101_0101,
        0x0001_0001_0001_0001,
        0x0000_0001_0000_0001,
        1,
    ];
    let folded = (0..order).fold(free, |free, step| free & free >> (1u32 << step));
    let starts = folded & STARTS[usize::from(order)];
    (starts != 0).then(|| starts.trailing_zeros() as usize)
}

/// Takes `count` whole rows, beginning at a multiple of `count`.
fn take_rows(rows: &Rows, count: usize, flip: u64) -> Option<usize> {
    (0..AREA_ROWS)
        .step_by(count)
        .find(|&first| take_rows_at(rows, first, count, flip))
        .map(|first| first * ROW_FRAMES as usize)
}

fn take_rows_at(rows: &Rows, first: usize, count: usize, flip: u64) -> bool {
    let taken =
        (first..first + count).take_while(|&row| rows[row].replace(flip, !flip).is_ok()).count();
    if taken < count {
        // We hold these rows whole, so nobody else changes them.
        (first..first + taken).for_each(|row| rows[row].set(flip));
    }
    taken == count
}

/// Takes the block of order 0 to 8 that begins at frame `first` of the area.
pub(crate) fn take_at(rows: &Rows, first: usize, order: u8, flip: u64) -> bool {
    let row = first / ROW_FRAMES as usize;
    if order > ROW_ORDER {
        return take_rows_at(rows, row, 1 << (order - ROW_ORDER), flip);
    }
    let run = run(first, order);
    rows[row].change(|seen| ((seen ^ flip) & run == 0).then_some(seen ^ run)).is_some()
}

/// Frees the block of order 0 to 9 that begins at frame `first` of the area. Returns the number of
/// frames freed: all or none, or, if another thread frees parts of the same block at the same time,
/// those that this thread freed first.
#[inline(always)]
pub(crate) fn give(rows: &Rows, first: usize, order: u8, flip: u64) -> u16 {
    let row = first / ROW_FRAMES as usize;
    if order > ROW_ORDER {
        return give_rows(rows, row, 1 << (order - ROW_ORDER), flip);
    }
    let run = run(first, order);
    let given = rows[row].change(|seen| ((seen ^ flip) & run == run).then_some(seen ^ run));
    if given.is_some() { 1 << order } else { 0 }
}

fn give_rows(rows: &Rows, first: usize, count: usize, flip: u64) -> u16 {
    let give = |row: usize| u16::from(rows[row].replace(!flip, flip).is_ok());
    // The first thread at the first row frees the block.
    if !are_taken(rows, first, count, flip) || give(first) == 0 {
        return 0;
    }
    let others: u16 = (first + 1..first + count).map(give).sum();
    (1 + others) * ROW_FRAMES as u16
}

/// Whether all frames of these rows are allocated.
pub(crate) fn are_taken(rows: &Rows, first: usize, count: usize, flip: u64) -> bool {
    (first..first + count).all(|row| rows[row].get() == !flip)
}

/// Whether all frames of a block of order 0 to 9 are free.
pub(crate) fn is_free(rows: &Rows, first: usize, order: u8, flip: u64) -> bool {
    let row = first / ROW_FRAMES as usize;
    if order > ROW_ORDER {
        return (row..row + (1 << (order - ROW_ORDER))).all(|row| rows[row].get() == flip);
    }
    (rows[row].get() ^ flip) & run(first, order) == 0
}

/// Returns how many frames are free.
pub(crate) fn count_free(rows: &Rows, flip: u64) -> u32 {
    rows.iter().map(|row| (row.get() ^ flip).count_zeros()).sum()
}
