//! A sound guest broken in places, and what is done with it.

use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_inspect::{Block, Guest, GuestMemory, Request, Snapshot, Untrusted};
use ebb_units::{Gfn, Gpa};

use super::{FRAMES, Forge, IMAGE, MEMMAP, NODE, NOTE, ROOT, SECTIONS};

/// Where the structures are that matter: page tables, image, struct pages of free
/// blocks, sections, zones, node, note.
pub const STRUCTURES: [u64; 10] = [
    1 << 20,
    ROOT.0,
    IMAGE.0,
    IMAGE.0 + 0x2_0000,
    MEMMAP.0 + 2048 * 64,
    MEMMAP.0 + 4096 * 64,
    SECTIONS.0 - 4096,
    NODE.0,
    NODE.0 + 171_552,
    NOTE.0,
];

/// What a daemon does with a guest, in a row. Must end soon whatever the guest holds,
/// and name nothing but RAM.
pub fn exercise(mem: &dyn GuestMemory) -> Result<(), Untrusted> {
    let began = Instant::now();
    let result = Guest::inspect(mem, &[]).and_then(|guest| use_it(mem, guest));
    assert!(began.elapsed() < Duration::from_secs(5), "took {:?}", began.elapsed());
    result
}

/// The same with a guest inspected earlier.
pub fn use_it(mem: &dyn GuestMemory, mut guest: Guest) -> Result<(), Untrusted> {
    let request = Request { min_order: 0, reserve_bytes: 1 << 20, want_bytes: u64::MAX };
    let mut blocks = Vec::new();
    guest.victims(mem, request, &mut blocks);
    assert!(blocks.len() as u64 <= FRAMES);
    guest.memmap().free_blocks(mem, guest.layout(), 0, |head, order| {
        blocks.push(Block { head, order });
    });
    let mut look = guest.look(mem);
    for block in blocks {
        assert!(guest.memmap().in_ram(block.frames()), "{block:?}");
        look.head(block.head);
    }
    let counts = guest.counts(mem);
    assert!(counts.frames() >= guest.memmap().frames());
    for gfn in [0, 1, 511, 1 << 40, u64::MAX] {
        look.head(Gfn(gfn));
        guest.metadata_frame(mem, Gfn(gfn));
    }
    guest.recheck(mem);
    guest.refresh(mem).map(|_| ())
}

/// One sound guest for many cases: each breaks it, and mends it again.
static SOUND: LazyLock<Mutex<Forge>> = LazyLock::new(|| Mutex::new(Forge::with_free_blocks(4)));

/// Words of a guest's memory, put back when this goes away.
pub struct Broken<'a> {
    forge: MutexGuard<'a, Forge>,
    before: Vec<(Gpa, u64)>,
}

impl Broken<'_> {
    /// Of the sound guest, which nobody else has meanwhile.
    pub fn new() -> Broken<'static> {
        let forge = SOUND.lock().unwrap_or_else(PoisonError::into_inner);
        Broken { forge, before: Vec::new() }
    }

    /// The guest as it is now.
    pub fn forge(&self) -> &Forge {
        &self.forge
    }

    /// Its memory.
    pub fn mem(&self) -> &Snapshot {
        &self.forge.mem
    }

    /// Sets words, each by a structure's address, an offset in it and the value.
    pub fn set(&mut self, words: impl IntoIterator<Item = (u64, u64, u64)>) {
        for (base, offset, value) in words {
            let gpa = Gpa(base + offset / 8 * 8);
            self.before.extend(self.mem().word(gpa).map(|word| (gpa, word)));
            self.mem().set(gpa, value);
        }
    }
}

impl Drop for Broken<'_> {
    fn drop(&mut self) {
        while let Some((gpa, word)) = self.before.pop() {
            self.mem().set(gpa, word);
        }
    }
}
