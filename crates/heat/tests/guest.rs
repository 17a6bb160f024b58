//! Page tables of made-up guests: sound ones, and ones made to do harm.

use std::cell::Cell;
use std::sync::atomic::AtomicU64;

use ebb_heat::{
    Access, GuestTracker, Levels, LockedTables, Observer, Roots, Round, TableMemory, TrackError,
    Tracker, Verdict, Walk,
};
use ebb_inspect::{Guest, GuestMemory};
use ebb_units::{FrameRange, Gfn, Gpa};
use proptest::prelude::*;
use testkit::forge::{FIRST_SPARE, FRAMES, Forge, IMAGE_VA, ROOT};

const PRESENT: u64 = 0b111;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const LRU: u64 = 8;
const MAPCOUNT: u64 = 48;
/// `_mapcount` of a page table before 6.10.
const TABLE: u64 = !0x200u32 as u64;
/// Virtual address of the list that links the roots.
const LIST_VA: u64 = IMAGE_VA + 0x3_0000;

/// A guest with one process, whose page tables lie from `FIRST_SPARE` on.
struct Made {
    forge: Forge,
    next: Cell<u64>,
    root: Gfn,
    /// Whether metadata can be locked.
    holds: bool,
}

impl Made {
    fn new(levels: u32) -> Made {
        let forge = Forge::with_free_blocks(levels);
        let mut made =
            Made { forge, next: Cell::new(FIRST_SPARE.0 + 100), root: Gfn(0), holds: true };
        made.root = made.frame();
        for index in 256..512 {
            let entry = made.word(Gpa(ROOT.0 + 8 * index));
            made.set(made.root, index, entry);
        }
        made.forge.set_page(made.root, LRU, LIST_VA);
        made.forge.set_page(made.root, LRU + 8, LIST_VA);
        made
    }

    fn frame(&self) -> Gfn {
        self.next.set(self.next.get() + 1);
        Gfn(self.next.get())
    }

    fn table(&self) -> Gfn {
        let gfn = self.frame();
        self.forge.set_page(gfn, MAPCOUNT, TABLE);
        gfn
    }

    fn word(&self, gpa: Gpa) -> u64 {
        self.forge.mem.word(gpa).unwrap()
    }

    fn set(&self, table: Gfn, index: u64, entry: u64) {
        self.forge.mem.set(Gpa(table.gpa().0 + 8 * index), entry);
    }

    fn entry(&self, table: Gfn, index: u64) -> u64 {
        self.word(Gpa(table.gpa().0 + 8 * index))
    }

    /// Makes tables from the root down, each one's entry `index` leading to the next. Returns the
    /// lowest table and the one above it.
    fn chain(&self, index: u64) -> (Gfn, Gfn) {
        let (mut above, mut table) = (self.root, self.root);
        for _ in 1..self.forge.levels {
            let next = self.table();
            self.set(table, index, next.gpa().0 | PRESENT | ACCESSED);
            (above, table) = (table, next);
        }
        (table, above)
    }

    fn guest(&self) -> Guest {
        Guest::inspect(&self.forge.mem, &[]).expect("the made guest is trusted")
    }

    fn levels(&self) -> Levels {
        Levels::new(&[FrameRange::new(Gfn(0), FRAMES)], 0)
    }
}

impl TableMemory for Made {
    fn memory(&self) -> &dyn GuestMemory {
        &self.forge.mem
    }

    fn read(&self, table: Gfn, entries: &mut [u64; 512]) -> bool {
        let words = self.forge.mem.words(table.gpa(), 512);
        words.is_some_and(|words| {
            let each = entries.iter_mut().zip(words);
            each.for_each(|(to, word)| *to = word.load(std::sync::atomic::Ordering::Relaxed));
            true
        })
    }

    fn while_locked(
        &self,
        _metadata: Gfn,
        work: &mut dyn FnMut(&dyn LockedTables),
    ) -> std::io::Result<bool> {
        if self.holds {
            work(self);
        }
        Ok(self.holds)
    }
}

impl LockedTables for Made {
    fn table(&self, table: Gfn, work: &mut dyn FnMut(&[u64; 512], &[AtomicU64])) -> bool {
        let mut entries = [0; 512];
        let there = self.read(table, &mut entries);
        self.forge.mem.words(table.gpa(), 512).filter(|_| there).is_some_and(|words| {
            work(&entries, words);
            true
        })
    }
}

fn round(made: &Made, walk: Walk, observer: &mut dyn Observer) -> Result<Round, TrackError> {
    let (guest, mut roots) = (made.guest(), Roots::default());
    GuestTracker::new(made, &guest, &mut roots, &|| true).round(walk, observer)
}

/// An observer that remembers all reports, and has all marks cleared.
#[derive(Default)]
struct All(Vec<(Gfn, u64, Access)>);

impl Observer for All {
    fn would_clear(&self, _frames: FrameRange) -> bool {
        true
    }

    fn saw(&mut self, frames: FrameRange, access: Access) -> Verdict {
        self.0.push((frames.start, frames.count, access));
        Verdict::Clear
    }
}

#[test]
fn finds_and_clears_what_was_used_and_nothing_else() {
    for levels in [4, 5] {
        let made = Made::new(levels);
        let (table, above) = made.chain(3);
        let data: Vec<Gfn> = (0..4).map(|_| made.frame()).collect();
        let entries = [
            data[0].gpa().0 | PRESENT | ACCESSED,
            data[1].gpa().0 | PRESENT | DIRTY,
            data[2].gpa().0 | PRESENT | ACCESSED | DIRTY | 1 << 63,
            // An absent page, and one of the kernel's.
            data[3].gpa().0 | ACCESSED,
            data[3].gpa().0 | 0b011 | ACCESSED,
        ];
        (0..).zip(entries).for_each(|(index, entry)| made.set(table, index, entry));
        let mut all = All::default();
        let found = round(&made, Walk::Pruned, &mut all).unwrap();
        assert_eq!(all.0, [(data[0], 1, Access::Read), (data[2], 1, Access::Write)]);
        let cleared = [entries[0] & !ACCESSED, entries[1], entries[2] & !ACCESSED];
        for (index, entry) in (0..).zip(cleared.into_iter().chain(entries[3..].iter().copied())) {
            assert_eq!(made.entry(table, index), entry, "entry {index}");
        }
        assert_eq!(made.entry(above, 3) & ACCESSED, 0);
        assert_eq!(made.entry(made.root, 3) & ACCESSED, ACCESSED, "no page table by its type");
        assert_eq!((found.cleared_entries, found.used_entries), (3, 2));
        // Nobody has used it since.
        let again = round(&made, Walk::Pruned, &mut All::default()).unwrap();
        assert_eq!((again.pruned_tables, again.used_entries), (1, 0));
    }
}

#[test]
fn a_table_that_was_not_used_is_not_read_but_by_a_full_round() {
    let made = Made::new(4);
    let (table, above) = made.chain(0);
    let data = made.frame();
    made.set(table, 9, data.gpa().0 | PRESENT | ACCESSED);
    made.set(above, 0, made.entry(above, 0) & !ACCESSED);
    let mut all = All::default();
    round(&made, Walk::Pruned, &mut all).unwrap();
    assert_eq!(all.0, []);
    round(&made, Walk::Full, &mut all).unwrap();
    assert_eq!(all.0, [(data, 1, Access::Read)]);
    assert_eq!(made.entry(table, 9) & ACCESSED, 0);
}

#[test]
fn large_leaves_are_one_use_of_all_their_frames() {
    let made = Made::new(4);
    let (_, above) = made.chain(0);
    made.set(above, 5, (8 << 20) | PRESENT | ACCESSED | LARGE);
    made.set(above, 6, (1 << 40) | PRESENT | ACCESSED | LARGE);
    let mut all = All::default();
    round(&made, Walk::Pruned, &mut all).unwrap();
    assert_eq!(all.0, [(Gfn(2048), 512, Access::Read)]);
    assert_eq!(made.entry(above, 5) & ACCESSED, 0);
    assert_eq!(made.entry(above, 6) & ACCESSED, ACCESSED, "outside RAM");
}

#[test]
fn kernels_before_6_1_keep_the_bits_above_page_tables() {
    let made = Made::new(4);
    made.forge.note(&made.forge.note_text().replace("6.1.0", "5.10.0"));
    let (table, above) = made.chain(0);
    made.forge.set_page(table, MAPCOUNT, !0x400u32 as u64);
    made.set(table, 1, made.frame().gpa().0 | PRESENT | ACCESSED);
    // Linux 5.10 marks page tables by another bit.
    let found = round(&made, Walk::Pruned, &mut All::default()).unwrap();
    assert_eq!(found.cleared_entries, 1);
    assert_eq!(made.entry(above, 0) & ACCESSED, ACCESSED);
}

#[test]
fn a_page_that_is_no_table_by_its_metadata_is_not_written() {
    for kind in [0xffff_ffff, 0, !0x80u32 as u64] {
        let made = Made::new(4);
        let (table, _) = made.chain(0);
        let entry = made.frame().gpa().0 | PRESENT | ACCESSED;
        made.set(table, 1, entry);
        made.forge.set_page(table, MAPCOUNT, kind);
        let mut all = All::default();
        let found = round(&made, Walk::Full, &mut all).unwrap();
        assert_eq!(made.entry(table, 1), entry, "{kind:#x}");
        assert_eq!((all.0.len(), found.missed_entries), (0, 1));
    }
}

#[test]
fn metadata_that_cannot_be_locked_leaves_the_bits_for_later() {
    let mut made = Made::new(4);
    made.holds = false;
    let (table, _) = made.chain(0);
    made.set(table, 1, made.frame().gpa().0 | PRESENT | ACCESSED);
    let mut levels = made.levels();
    let found = round(&made, Walk::Full, &mut levels).unwrap();
    assert_eq!((found.cleared_entries, found.locked_frames), (0, 0));
    assert_eq!(made.entry(table, 1) & ACCESSED, ACCESSED);
    made.holds = true;
    levels.next_window();
    round(&made, Walk::Full, &mut levels).unwrap();
    assert_eq!(made.entry(table, 1) & ACCESSED, 0);
}

#[test]
fn a_kernel_that_may_not_run_is_not_written_to() {
    let made = Made::new(4);
    let (table, _) = made.chain(0);
    made.set(table, 1, made.frame().gpa().0 | PRESENT | ACCESSED);
    let (guest, mut roots) = (made.guest(), Roots::default());
    let mut tracker = GuestTracker::new(&made, &guest, &mut roots, &|| false);
    let result = tracker.round(Walk::Full, &mut All::default());
    assert!(matches!(result, Err(TrackError::NotRunning)));
    assert_eq!(made.entry(table, 1) & ACCESSED, ACCESSED);
}

#[test]
fn a_guest_without_processes_says_so() {
    let made = Made::new(4);
    made.forge.set_page(made.root, LRU, 0);
    let error = round(&made, Walk::Full, &mut All::default()).unwrap_err();
    assert!(matches!(error, TrackError::NoRoots));
    // A root that maps another kernel.
    let made = Made::new(4);
    made.set(made.root, 511, 0x5000 | PRESENT);
    assert!(matches!(round(&made, Walk::Full, &mut All::default()), Err(TrackError::NoRoots)));
}

#[test]
fn tables_in_circles_are_read_once() {
    let made = Made::new(5);
    let (table, above) = made.chain(0);
    for index in 0..512 {
        made.set(table, index, made.root.gpa().0 | PRESENT | ACCESSED);
        made.set(above, index, above.gpa().0 | PRESENT | ACCESSED);
    }
    (0..256).for_each(|index| made.set(made.root, index, made.root.gpa().0 | PRESENT | ACCESSED));
    let found = round(&made, Walk::Full, &mut All::default()).unwrap();
    assert!(found.tables <= 5, "{found:?}");
}

#[test]
fn large_leaves_without_end_are_cut_short() {
    let made = Made::new(4);
    let entry = PRESENT | ACCESSED | LARGE;
    for table in 0..200 {
        let above = made.table();
        (0..512).for_each(|index| made.set(above, index, entry));
        let upper = match table {
            0 => made.table(),
            _ => Gfn(made.entry(made.root, 0) >> 12 & 0xff_ffff),
        };
        made.set(made.root, 0, upper.gpa().0 | PRESENT);
        made.set(upper, table, above.gpa().0 | PRESENT);
    }
    let mut levels = made.levels();
    let found = round(&made, Walk::Full, &mut levels).unwrap();
    assert!(found.is_truncated);
    assert!(found.used_entries <= 8 * FRAMES / 512, "{found:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Whatever the tables hold, only accessed bits of present entries in page tables change.
    #[test]
    fn only_accessed_bits_of_tables_change(
        seeds in prop::collection::vec((0u64..24, 0u64..512, 0u64..40, any::<u8>()), 1..400),
    ) {
        let made = Made::new(4);
        let tables: Vec<Gfn> =
            (0..24).map(|index| if index % 3 == 2 { made.frame() } else { made.table() }).collect();
        (0..8).for_each(|index| made.set(made.root, index, tables[index as usize].gpa().0 | PRESENT));
        for (table, index, to, flags) in seeds {
            let to = tables.get(to as usize).map_or(Gfn(FRAMES + to), |gfn| *gfn);
            made.set(tables[table as usize], index, to.gpa().0 | u64::from(flags));
        }
        let all = |made: &Made| -> Vec<u64> {
            let words = made.forge.mem.words(Gpa(0), FRAMES as usize * 512).unwrap();
            words.iter().map(|word| word.load(std::sync::atomic::Ordering::Relaxed)).collect()
        };
        let before = all(&made);
        let guest = made.guest();
        round(&made, Walk::Full, &mut All::default()).unwrap();
        for (word, (before, now)) in before.into_iter().zip(all(&made)).enumerate() {
            if before != now {
                let gfn = Gfn(word as u64 / 512);
                prop_assert!(guest.table_metadata(&made.forge.mem, gfn).is_some(), "{:?}", gfn);
                prop_assert_eq!(now, before & !ACCESSED);
                prop_assert!(before & 1 == 1);
            }
        }
    }
}
