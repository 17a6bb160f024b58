//! A kernel's note of any content, by itself and in a guest's memory.

use ebb_inspect::{Guest, Note, PageLayout, Snapshot, find_notes};
use ebb_units::Gpa;

/// Returns the header of a note with `bytes` of text.
fn header(bytes: usize) -> Vec<u8> {
    let sizes = [11u32.to_le_bytes(), (bytes as u32).to_le_bytes(), [0; 4]].concat();
    [sizes, b"VMCOREINFO\0\0".to_vec()].concat()
}

/// Runs one input.
pub fn run(text: &[u8]) {
    if let Some(note) = Note::parse(Gpa(0), text.to_vec()) {
        let _ = PageLayout::new(&note);
    }
    let mut bytes = [header(text.len()), text.to_vec()].concat();
    bytes.resize(8192.max(bytes.len().next_multiple_of(4096)), 0);
    let words = bytes.chunks_exact(8);
    let words = words.map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")));
    let mut mem = Snapshot::new();
    mem.add(Gpa(0), words.collect());
    assert!(find_notes(&mem).iter().all(|note| note.is_there(&mem)));
    let _ = Guest::inspect(&mem, &[0, 0x1000]);
}
