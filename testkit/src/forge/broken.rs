//! Breaking a sound guest in places, and what a daemon does with it.

use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_inspect::{BuddyBlock, Guest, GuestMemory, Request, Snapshot, Untrusted};
use ebb_units::{Gfn, Gpa};

use super::{FRAMES, Forge, IMAGE, MEMMAP, NODE, NOTE, ROOT, SECTIONS};

/// Addresses of the structures that matter: page tables, image, struct pages of free blocks,
/// sections, zones, node, note.
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

/// Does with a guest what a daemon does. It must end soon whatever the guest contains, and return
/// nothing but RAM.
pub fn exercise(mem: &dyn GuestMemory) -> Result<(), Untrusted> {
    let began = Instant::now();
    let result = Guest::inspect(mem, &[]).and_then(|guest| use_it(mem, guest));
    assert!(began.elapsed() < Duration::from_secs(5), "took {:?}", began.elapsed());
    result
}

/// Does the same with a guest that was inspected earlier.
pub fn use_it(mem: &dyn GuestMemory, mut guest: Guest) -> Result<(), Untrusted> {
    let request = Request { min_order: 0, reserve_bytes: 1 << 20, want_bytes: u64::MAX };
    let mut blocks = Vec::new();
    guest.victims(mem, request, &mut blocks);
    assert!(blocks.len() as u64 <= FRAMES);
    guest.memmap().free_blocks(mem, guest.layout(), 0, |head, order| {
        blocks.push(BuddyBlock { head, order });
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
        guest.memmap().walk(mem, Gfn(gfn));
    }
    if let Some(places) = guest.counter_places(mem) {
        let _ = guest.counters(mem, &places).map(|counters| counters.free_in_blocks(9));
    }
    guest.recheck(mem);
    guest.refresh(mem).map(|_| ())
}

/// One sound guest for many cases. Each case breaks it, and mends it afterwards.
static SOUND: LazyLock<Mutex<Forge>> = LazyLock::new(|| Mutex::new(Forge::with_free_blocks(4)));

/// Changed words of a guest's memory, which are restored when this is dropped.
pub struct Broken<'a> {
    forge: MutexGuard<'a, Forge>,
    before: Vec<(Gpa, u64)>,
}

impl Broken<'_> {
    /// Locks the sound guest, so that nobody else has it meanwhile.
    pub fn new() -> Broken<'static> {
        let forge = SOUND.lock().unwrap_or_else(PoisonError::into_inner);
        Broken { forge, before: Vec::new() }
    }

    /// Returns the guest as it is now.
    pub fn forge(&self) -> &Forge {
        &self.forge
    }

    /// Returns the guest's memory.
    pub fn mem(&self) -> &Snapshot {
        &self.forge.mem
    }

    /// Sets words. Each is a structure's address, an offset in it and the value.
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
