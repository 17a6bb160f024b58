//! A sound guest with overwritten words: `(structure, offset, value)` of 1, 3 and 8 bytes each. An
//! odd first byte overwrites them after the inspection, an even one before it.

use ebb_inspect::Guest;
use testkit::forge::broken::{Broken, STRUCTURES, exercise, use_it};

pub(crate) fn change(bytes: &[u8; 12]) -> (u64, u64, u64) {
    let [structure, offset @ .., _, _, _, _, _, _, _, _] = *bytes;
    let value = u64::from_le_bytes(*bytes.last_chunk().expect("eight bytes"));
    let offset = u64::from(u32::from_le_bytes([offset[0], offset[1], offset[2], 0]));
    (STRUCTURES[usize::from(structure) % STRUCTURES.len()], offset % 0x2_0000, value)
}

/// Runs one input.
pub fn run(data: &[u8]) {
    let Some((&when, data)) = data.split_first() else { return };
    let changes = data.as_chunks().0.iter().map(change);
    let mut broken = Broken::new();
    if when % 2 == 0 {
        broken.set(changes);
        let _ = exercise(broken.mem());
    } else {
        let guest = Guest::inspect(broken.mem(), &[]).expect("a sound guest");
        broken.set(changes);
        let _ = use_it(broken.mem(), guest);
    }
}
