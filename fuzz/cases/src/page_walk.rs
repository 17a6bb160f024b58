//! Page tables of any content: `va, root | levels, words of RAM...`.

use ebb_inspect::{PageTables, Snapshot, Walk};
use ebb_units::Gpa;

/// Runs one input.
pub fn run(data: &[u8]) {
    let mut words =
        data.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")));
    let (Some(va), Some(root)) = (words.next(), words.next()) else { return };
    // Half of the words lead into RAM, and all words repeat. So a walk gets far, though few random
    // words of 64 bits would be an address in RAM.
    let near = |word: u64| if word & 2 == 0 { word & 0xffff } else { word };
    let words: Vec<u64> = words.map(near).collect();
    if words.is_empty() {
        return;
    }
    let mut mem = Snapshot::new();
    mem.add(Gpa(0), words.iter().copied().cycle().take(16 * 512).collect());
    let tables =
        PageTables { root: Gpa(root & 0x000f_ffff_ffff_f000), levels: 4 + (root as u32 & 1) };
    match tables.walk(&mem, va) {
        Walk::Mapped { gpa, bytes } => {
            assert!(gpa.0 < 1 << 52 && (1..=1 << 30).contains(&bytes));
            assert_eq!(gpa.0 % 4096, va % 4096);
            assert_eq!(tables.translate(&mem, va), Some(gpa));
        }
        Walk::Absent { bytes } => {
            assert!((1..=1 << 48).contains(&bytes));
            assert_eq!(tables.translate(&mem, va), None);
        }
    }
}
