//! A zone's header of any content, in a guest of 16 MiB.

use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;

use ebb_reclaim::hyperalloc::check_header;
use ebb_sys::mapping::Mapping;
use ebb_sys::ram_file::RamFile;
use ebb_units::{Gpa, Hva};
use ebb_vm::ram::Backing;
use ebb_vm::{Ram, Region};

const RAM_BYTES: u64 = 16 << 20;
const MAGIC: u64 = u64::from_le_bytes(*b"EBBLLFRE");

fn ram() -> &'static Ram {
    static RAM: OnceLock<Ram> = OnceLock::new();
    RAM.get_or_init(|| {
        let file = RamFile::create("fuzz", RAM_BYTES).expect("memfd");
        let mapping = Mapping::new(&file, 0, RAM_BYTES).expect("mmap");
        let (gpa, hva) = (Gpa(0), Hva(1 << 30));
        let region = Region { gpa, bytes: RAM_BYTES, hva, file: 0, offset: 0 };
        Ram::new(vec![region], vec![Backing::new(file, mapping)]).expect("one region")
    })
}

/// Runs one input. Its first byte says where the header is, and whether it begins validly.
pub fn run(bytes: &[u8]) {
    let Some((how, content)) = bytes.split_first() else { return };
    let at = Gpa(u64::from(how & 0x7f) * 0x2_0010);
    let Some(words) = ram().words(at, 16) else { return };
    for (word, eight) in words.iter().zip(content.chunks_exact(8)) {
        word.store(u64::from_le_bytes(eight.try_into().expect("eight bytes")), Relaxed);
    }
    if how & 0x80 != 0 {
        words[0].store(MAGIC, Relaxed);
    }
    let _ = check_header(ram(), at);
}
