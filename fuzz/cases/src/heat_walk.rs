//! Page tables and lists of processes of any content, walked to find what was used. Words of a
//! sound guest are overwritten as `classify` does; then entries of 24 tables are set: `table,
//! index, to, flags` of 1, 2, 1 and 1 bytes. Nothing changes but accessed bits in what the metadata
//! calls a page table.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use ebb_heat::{
    Access, GuestTracker, LockedTables, Observer, Roots, TableMemory, Tracker, Verdict, Walk,
};
use ebb_inspect::{Guest, GuestMemory, Snapshot};
use ebb_units::{FrameRange, Gfn, Gpa};
use testkit::forge::broken::Broken;
use testkit::forge::{FIRST_SPARE, FRAMES, IMAGE_VA, MEMMAP, PAGE_BYTES, ROOT};

use crate::classify::change;

const PRESENT: u64 = 0b111;
const ACCESSED: u64 = 1 << 5;
const LRU: u64 = 8;
const MAPCOUNT: u64 = 48;
/// `_mapcount` of a page table before Linux 6.10.
const TABLE: u64 = !0x200u32 as u64;
/// Virtual address of the list of roots.
const LIST_VA: u64 = IMAGE_VA + 0x3_0000;
/// First frame of one process's root and the tables below it.
const PROCESS: Gfn = Gfn(FIRST_SPARE.0 + 100);
const TABLES: u64 = 24;

/// Runs one input.
pub fn run(data: &[u8]) {
    let Some((&broken_words, data)) = data.split_first() else { return };
    let (changes, entries) = data.split_at(data.len().min(12 * usize::from(broken_words % 32)));
    let mut broken = Broken::new();
    broken.set(process(broken.mem()));
    broken.set(changes.as_chunks().0.iter().map(change));
    broken.set(entries.as_chunks::<5>().0.iter().map(entry));
    let Ok(guest) = Guest::inspect(broken.mem(), &[]) else { return };
    let before = tables(broken.mem());
    let mut roots = Roots::default();
    let memory = Tables(broken.mem());
    let mut tracker = GuestTracker::new(&memory, &guest, &mut roots, &|| true);
    let _ = tracker.round(Walk::Full, &mut ClearsAll);
    for (word, (before, now)) in before.into_iter().zip(tables(broken.mem())).enumerate() {
        if before != now {
            let table = Gfn(PROCESS.0 + word as u64 / 512);
            assert!(guest.table_metadata(broken.mem(), table).is_some(), "{table:?}");
            assert_eq!((now, before & 1), (before & !ACCESSED, 1));
        }
    }
    // What a round cleared must not reach the next input.
    let changed = (0..(TABLES + 1) * 512).map(|word| (PROCESS.gpa().0, 8 * word, 0));
    broken.set(changed);
}

/// Returns the words that make `PROCESS` the root of a process, with tables that nothing leads to.
fn process(mem: &Snapshot) -> Vec<(u64, u64, u64)> {
    let metadata = |gfn: Gfn| MEMMAP.0 + gfn.0 * PAGE_BYTES;
    let kernel = (256..512).map(|index| {
        let entry = mem.word(Gpa(ROOT.0 + 8 * index)).unwrap_or(0);
        (PROCESS.gpa().0, 8 * index, entry)
    });
    let links = [LRU, LRU + 8].map(|offset| (metadata(PROCESS), offset, LIST_VA));
    let kinds = (1..=TABLES).filter(|index| index % 3 != 2);
    let kinds = kinds.map(|index| (metadata(Gfn(PROCESS.0 + index)), MAPCOUNT, TABLE));
    let first = (0..8).map(|index| {
        let table = Gfn(PROCESS.0 + 1 + index);
        (PROCESS.gpa().0, 8 * index, table.gpa().0 | PRESENT)
    });
    kernel.chain(links).chain(kinds).chain(first).collect()
}

fn entry(bytes: &[u8; 5]) -> (u64, u64, u64) {
    let [table, low, high, to, flags] = *bytes;
    let table = Gfn(PROCESS.0 + 1 + u64::from(table) % TABLES);
    let index = u64::from(u16::from_le_bytes([low, high])) % 512;
    // The entry leads into a table, into RAM, or beyond RAM.
    let to = match u64::from(to) {
        to if to < TABLES => Gfn(PROCESS.0 + 1 + to),
        to => Gfn(FRAMES - 200 + to),
    };
    (table.gpa().0, 8 * index, to.gpa().0 | u64::from(flags))
}

/// Returns the words of the root and of the tables.
fn tables(mem: &Snapshot) -> Vec<u64> {
    let words = mem.words(PROCESS.gpa(), (TABLES as usize + 1) * 512).unwrap_or_default();
    words.iter().map(|word| word.load(Relaxed)).collect()
}

struct Tables<'a>(&'a Snapshot);

impl TableMemory for Tables<'_> {
    fn memory(&self) -> &dyn GuestMemory {
        self.0
    }

    fn read(&self, table: Gfn, entries: &mut [u64; 512]) -> bool {
        let words = self.0.words(table.gpa(), 512);
        words.is_some_and(|words| {
            entries.iter_mut().zip(words).for_each(|(to, word)| *to = word.load(Relaxed));
            true
        })
    }

    fn while_locked(
        &self,
        _metadata: Gfn,
        work: &mut dyn FnMut(&dyn LockedTables),
    ) -> std::io::Result<bool> {
        work(self);
        Ok(true)
    }
}

impl LockedTables for Tables<'_> {
    fn table(&self, table: Gfn, work: &mut dyn FnMut(&[u64; 512], &[AtomicU64])) -> bool {
        let mut entries = [0; 512];
        let there = self.read(table, &mut entries);
        self.0.words(table.gpa(), 512).filter(|_| there).is_some_and(|words| {
            work(&entries, words);
            true
        })
    }
}

struct ClearsAll;

impl Observer for ClearsAll {
    fn would_clear(&self, _frames: FrameRange) -> bool {
        true
    }

    fn saw(&mut self, _frames: FrameRange, _access: Access) -> Verdict {
        Verdict::Clear
    }
}
