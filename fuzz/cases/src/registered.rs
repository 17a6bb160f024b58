//! A guest that has registered: `(place, value)` of 2 and 8 bytes each. An odd place is a word of
//! the record, which is sealed again, and an even one a word of the page metadata.

use ebb_inspect::{FreeBlocks, Registered, Request, Snapshot};
use ebb_units::{FRAME_BYTES, Gfn, Gpa};
use testkit::vprobe::{Registration, seal};

const AT: Gpa = Gpa(0x10_0000);
const METADATA: u64 = 0x20_0000;
const RAM_BYTES: u64 = 8 << 20;
const FRAMES: u64 = RAM_BYTES / FRAME_BYTES;
/// Words of the record that mean something with up to three ranges.
const RECORD_WORDS: usize = 40;

/// Runs one input.
pub fn run(data: &[u8]) {
    let mut mem = Snapshot::new();
    mem.add(Gpa(0), vec![0; RAM_BYTES as usize / 8]);
    let range = [METADATA, METADATA + 64 * FRAMES, 0, FRAMES];
    let mut words = Registration { ranges: vec![range], ..Registration::default() }.words(AT.0);
    for &[low, high, ref value @ ..] in data.as_chunks::<10>().0 {
        let (place, value) = (u16::from_le_bytes([low, high]), u64::from_le_bytes(*value));
        let index = usize::from(place / 2);
        match place % 2 {
            0 => mem.set(Gpa(METADATA + 8 * index as u64), value),
            _ => words[index % RECORD_WORDS] = value,
        }
    }
    seal(&mut words);
    for (index, word) in (0..).zip(words) {
        mem.set(Gpa(AT.0 + 8 * index), word);
    }
    match Registered::read(&mem, AT) {
        Ok(registered) => look(&mem, &registered),
        Err(error) => {
            let _ = (error.to_string(), error.answer());
        }
    }
}

/// What is chosen is RAM, aligned, and chosen once.
fn look(mem: &Snapshot, registered: &Registered) {
    let request = Request { min_order: 6, reserve_bytes: 1 << 20, want_bytes: u64::MAX };
    let mut blocks = Vec::new();
    let chosen = registered.victims(mem, request, &mut blocks);
    assert_eq!(chosen.bytes, blocks.iter().map(|block| block.frames().bytes()).sum::<u64>());
    let mut below = Gfn(FRAMES);
    for block in blocks {
        let frames = block.frames();
        assert!((6..=10).contains(&block.order) && frames.end() <= below, "{block:?}");
        assert!(block.head.0.is_multiple_of(frames.count));
        below = block.head;
        // The memory did not change.
        if let Some(metadata) = registered.metadata_frame(block.head) {
            let head = registered.head(mem, block.head).expect("it is free");
            assert_eq!((head.order, head.metadata), (block.order, metadata));
        }
    }
}
