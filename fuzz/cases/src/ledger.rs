//! A ledger that somebody has overwritten: `(word, value)` of 2 and 8 bytes each. Whatever the
//! ledger says, recovery ends, no frame stays locked, and each frame has one content.

use std::fs::File;
use std::os::unix::fs::FileExt;

use ebb_ledger::{Content, Ledger, Tables};
use ebb_units::Gfn;

/// Four huge frames.
const FRAMES: u64 = 4 * 512;

/// Runs one input.
pub fn run(data: &[u8]) {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    let path = directory.path().join("ledger");
    drop(Ledger::create(&path, Gfn(FRAMES), Tables::WhenSplit).expect("a ledger"));
    let file = File::options().write(true).open(&path).expect("the ledger");
    let words = file.metadata().expect("the ledger").len() / 8;
    for [low, high, value @ ..] in data.as_chunks::<10>().0 {
        let word = u64::from(u16::from_le_bytes([*low, *high])) % words;
        file.write_all_at(value, word * 8).expect("room for it");
    }
    let Ok(mut ledger) = Ledger::open(&path, Gfn(FRAMES)) else { return };
    let mut held = 0;
    ledger.recover(|frames, _| held += frames.count);
    assert!(held <= FRAMES);
    for gfn in (0..FRAMES).map(Gfn) {
        assert_eq!(ledger.unlocked(gfn), Some(ledger.content(gfn)));
    }
    let mut end = Gfn(0);
    for (frames, content) in ledger.runs() {
        assert!(frames.start >= end && frames.end() <= Gfn(FRAMES) && content != Content::Resident);
        end = frames.end();
    }
}
