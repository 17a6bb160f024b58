//! When a frame counts as freed since it was in use.

use std::cell::Cell;
use std::sync::atomic::Ordering::Relaxed;

use ebb_inspect::{Guest, GuestMemory, PageWords};
use ebb_units::{Gfn, Gpa};
use testkit::forge::{self, Forge};

const FLAGS: u64 = 0;
const COMPOUND: u64 = 8;
const MAPPING: u64 = 24;
const PRIVATE: u64 = 40;
const COUNTS: u64 = 48;

const LOCKED: u64 = 1 << 0;
const UPTODATE: u64 = 1 << 2;
const LRU: u64 = 1 << 4;
const SLAB: u64 = 1 << 9;
const HEAD: u64 = 1 << 16;
const SWAP_BACKED: u64 = 1 << 19;
/// Node and zone, above all flags.
const PLACE: u64 = 0b10_1001 << 50;
const ANONYMOUS: u64 = 0xffff_8880_0012_3401;
const FILE: u64 = 0xffff_8880_0012_3400;

const GFN: Gfn = Gfn(forge::FIRST_SPARE.0 + 512);

/// The word of reference count and map count.
fn counts(references: u32, maps: i32) -> u64 {
    u64::from(references) << 32 | u64::from(maps as u32)
}

/// Makes a page as the allocator hands it out, used by nobody.
fn new_page(forge: &Forge, gfn: Gfn) {
    let words = [(FLAGS, PLACE), (COMPOUND, 0), (16, 0), (MAPPING, 0), (32, 0), (PRIVATE, 0)];
    words.iter().for_each(|&(at, word)| forge.set_page(gfn, at, word));
    forge.set_page(gfn, COUNTS, counts(1, -1));
}

fn cached(forge: &Forge, gfn: Gfn) {
    new_page(forge, gfn);
    forge.set_page(gfn, FLAGS, PLACE | LRU | UPTODATE);
    forge.set_page(gfn, MAPPING, FILE);
}

fn anonymous(forge: &Forge, gfn: Gfn) {
    cached(forge, gfn);
    forge.set_page(gfn, FLAGS, PLACE | LRU | UPTODATE | SWAP_BACKED);
    forge.set_page(gfn, MAPPING, ANONYMOUS);
    forge.set_page(gfn, COUNTS, counts(1, 0));
}

fn guest() -> (Forge, Guest) {
    let forge = Forge::with_free_blocks(4);
    let guest = Guest::inspect(&forge.mem, &[forge::ROOT.0]).expect("a sound guest");
    (forge, guest)
}

fn in_use(forge: &Forge, guest: &Guest, gfn: Gfn) -> bool {
    guest.in_use(&forge.mem, &[gfn])[0]
}

fn freed(forge: &Forge, guest: &Guest, gfn: Gfn) -> bool {
    guest.looks_freed(gfn, &|gpa| forge.mem.page(gpa))
}

#[test]
fn page_cache_and_anonymous_memory_is_in_use() {
    let (forge, guest) = guest();
    for make in [cached, anonymous] {
        make(&forge, GFN);
        assert!(in_use(&forge, &guest, GFN));
        assert!(!freed(&forge, &guest, GFN));
    }
    for (what, at, word) in [
        ("on no list", FLAGS, PLACE | UPTODATE),
        ("truncated", MAPPING, 0),
        ("a driver's", MAPPING, FILE | 2),
        ("nobody's", COUNTS, counts(0, -1)),
        ("a table", COUNTS, counts(1, !0x200)),
        ("a slab", FLAGS, PLACE | LRU | SLAB),
    ] {
        cached(&forge, GFN);
        forge.set_page(GFN, at, word);
        assert!(!in_use(&forge, &guest, GFN), "{what}");
    }
}

#[test]
fn a_frame_that_is_free_or_has_another_use_was_freed() {
    let (forge, guest) = guest();
    new_page(&forge, GFN);
    assert!(freed(&forge, &guest, GFN));
    for (what, at, word) in [
        ("on a CPU's list", COUNTS, counts(0, -1)),
        ("the first of a free block", COUNTS, counts(0, !0x80)),
        ("a table", COUNTS, counts(1, !0x200)),
        ("offline", COUNTS, counts(1, !0x100)),
        ("a slab", FLAGS, PLACE | SLAB),
        ("the first of a huge page", FLAGS, PLACE | HEAD),
    ] {
        new_page(&forge, GFN);
        forge.set_page(GFN, at, word);
        assert!(freed(&forge, &guest, GFN), "{what}");
    }
}

/// Each of these alone means that the content must be read.
#[test]
fn anything_that_a_live_page_may_have_speaks_against_it() {
    let (forge, guest) = guest();
    for bit in 0..=19 {
        new_page(&forge, GFN);
        forge.set_page(GFN, FLAGS, PLACE | 1 << bit);
        // The flag of a slab, or of a compound's head.
        assert_eq!(freed(&forge, &guest, GFN), [9, 16].contains(&bit), "flag {bit}");
    }
    for (what, at, word) in [
        ("two references", COUNTS, counts(2, -1)),
        ("mapped", COUNTS, counts(1, 0)),
        ("of a file", MAPPING, FILE),
        ("anonymous", MAPPING, ANONYMOUS),
        ("with buffers", PRIVATE, FILE),
        ("the part of something unknown", COMPOUND, 1),
        ("the part of what lies behind it", COMPOUND, page_va(Gfn(GFN.0 + 1)) + 1),
        ("the part of what is no page", COMPOUND, page_va(Gfn(GFN.0 - 1)) + 9),
    ] {
        new_page(&forge, GFN);
        forge.set_page(GFN, at, word);
        assert!(!freed(&forge, &guest, GFN), "{what}");
    }
}

fn page_va(gfn: Gfn) -> u64 {
    forge::VMEMMAP_VA + gfn.0 * forge::PAGE_BYTES
}

#[test]
fn parts_of_a_huge_page_are_what_its_head_is() {
    let (forge, guest) = guest();
    let tail = Gfn(GFN.0 + 7);
    anonymous(&forge, GFN);
    forge.set_page(GFN, FLAGS, PLACE | LRU | UPTODATE | HEAD);
    new_page(&forge, tail);
    forge.set_page(tail, COMPOUND, page_va(GFN) + 1);
    assert!(in_use(&forge, &guest, tail));
    assert!(!freed(&forge, &guest, tail));
    new_page(&forge, GFN);
    forge.set_page(GFN, FLAGS, PLACE | HEAD);
    assert!(!in_use(&forge, &guest, tail));
    assert!(freed(&forge, &guest, tail));
    forge.set_page(GFN, FLAGS, PLACE | HEAD | LOCKED);
    assert!(!freed(&forge, &guest, tail), "being split");
    forge.set_page(GFN, COMPOUND, page_va(Gfn(GFN.0 - 1)) + 1);
    assert!(!freed(&forge, &guest, tail), "a tail is no head");
}

/// A part of a huge page that is being split: its flags are off for a moment, and then it is a page
/// of its own.
#[test]
fn a_page_that_changes_under_the_look_is_not_freed() {
    let (forge, guest) = guest();
    for (first, then) in
        [(new_page as fn(&Forge, Gfn), cached as fn(&Forge, Gfn)), (cached, new_page)]
    {
        let looks = Cell::new(0);
        let read = |gpa: Gpa| -> Option<PageWords> {
            if looks.replace(looks.get() + 1) == 0 {
                first(&forge, GFN)
            } else {
                then(&forge, GFN)
            }
            let page = forge.mem.page(gpa)?;
            assert_ne!(page[6].load(Relaxed), 0);
            Some(page)
        };
        assert!(!guest.looks_freed(GFN, &read));
    }
}

/// The metadata has moved since the guest was inspected, so its old place now has something else.
#[test]
fn metadata_that_moved_tells_nothing() {
    let (mut forge, guest) = guest();
    cached(&forge, GFN);
    assert!(in_use(&forge, &guest, GFN));
    let page = page_va(GFN) & !0xfff;
    forge.map(page, Gpa(forge::MEMMAP.0 + 0x1000), 0);
    assert!(!in_use(&forge, &guest, GFN));
}

#[test]
fn a_note_that_lacks_a_flag_tells_nothing() {
    let forge = Forge::with_free_blocks(4);
    forge.note(&forge.note_text().replace("NUMBER(PG_lru)=4\n", ""));
    let guest = Guest::inspect(&forge.mem, &[forge::ROOT.0]).expect("a sound guest");
    cached(&forge, GFN);
    assert!(!in_use(&forge, &guest, GFN));
    new_page(&forge, GFN);
    assert!(!freed(&forge, &guest, GFN));
}
