//! The guest's page tables: an identity map of 4 KiB pages that ring 3 may write and execute.

use std::sync::atomic::Ordering::Relaxed;

use ebb_units::{FRAME_BYTES, FRAMES_PER_HUGE, Gfn, Gpa};
use ebb_vm::Ram;

/// Value of CR3. The other tables follow, one in each frame.
pub(crate) const ROOT: Gpa = Gpa(0x1000);
/// Most bytes that the tables can map: one page directory's worth.
pub(crate) const MAX_BYTES: u64 = 1 << 30;

const PRESENT_WRITE_USER: u64 = 1 | 1 << 1 | 1 << 2;

/// Builds the tables for all of RAM. Returns the first frame behind them.
pub(crate) fn build(ram: &Ram) -> Gfn {
    let table = |number: u64| Gpa(ROOT.0 + number * FRAME_BYTES);
    let tables = ram.end().0.div_ceil(FRAMES_PER_HUGE);
    let [directories, directory, first] = [table(1), table(2), table(3)];
    entry(ram, ROOT, 0, directories);
    entry(ram, directories, 0, directory);
    for number in 0..tables {
        entry(ram, directory, number, table(3 + number));
    }
    // The last-level tables lie one behind the other, like one long table.
    for frame in 0..ram.end().0 {
        entry(ram, first, frame, Gfn(frame).gpa());
    }
    table(3 + tables).gfn()
}

fn entry(ram: &Ram, table: Gpa, index: u64, to: Gpa) {
    let words = ram.words(Gpa(table.0 + index * 8), 1).expect("tables lie in RAM");
    words[0].store(to.0 | PRESENT_WRITE_USER, Relaxed);
}
