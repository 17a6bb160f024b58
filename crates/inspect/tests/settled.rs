//! When a made-up guest shows that no request in flight writes to a frame.

use ebb_inspect::Guest;
use ebb_units::Gfn;
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
const HAS_PRIVATE: u64 = 1 << 13;
const WRITEBACK: u64 = 1 << 15;
const HEAD: u64 = 1 << 16;
const SWAP_BACKED: u64 = 1 << 19;
const ANONYMOUS: u64 = 0xffff_8880_0012_3401;
const KSM: u64 = 0xffff_8880_0012_3403;
const FILE: u64 = 0xffff_8880_0012_3400;
const BUFFERS: u64 = 0xffff_8880_0045_6700;
/// References that FOLL_PIN adds to a small page.
const PIN: u32 = 1024;

const GFN: Gfn = Gfn(forge::FIRST_SPARE.0 + 512);

fn counts(references: u32, maps: i32) -> u64 {
    u64::from(references) << 32 | u64::from((maps - 1) as u32)
}

fn guest() -> (Forge, Guest) {
    let forge = Forge::with_free_blocks(4);
    let guest = Guest::inspect(&forge.mem, &[forge::ROOT.0]).expect("a sound guest");
    (forge, guest)
}

/// Whether a page with these words is settled. Words that are not given are those of unused page
/// cache.
fn settled(words: &[(u64, u64)]) -> bool {
    let (forge, guest) = guest();
    let rest = [(FLAGS, LRU | UPTODATE), (COMPOUND, 0), (MAPPING, FILE), (PRIVATE, 0)];
    rest.iter().for_each(|&(at, word)| forge.set_page(GFN, at, word));
    forge.set_page(GFN, COUNTS, counts(1, 0));
    words.iter().for_each(|&(at, word)| forge.set_page(GFN, at, word));
    let settled = guest.settled(&forge.mem, &[GFN]) == [true];
    assert_eq!(guest.looks_settled(&forge.mem, GFN), settled);
    settled
}

#[test]
fn page_cache_is_settled_unless_it_is_locked_or_pinned() {
    let flags = |more| (FLAGS, LRU | UPTODATE | more);
    for (what, words, want) in [
        ("at rest", vec![], true),
        ("mapped three times", vec![(COUNTS, counts(4, 3))], true),
        ("of shared memory", vec![flags(SWAP_BACKED)], true),
        ("being written to the disk", vec![flags(WRITEBACK)], true),
        ("being read", vec![flags(LOCKED), (COUNTS, counts(1, 0))], false),
        ("pinned", vec![(COUNTS, counts(1 + PIN, 0))], false),
        ("mapped and pinned by a reference", vec![(COUNTS, counts(3, 1))], false),
        ("pinned, and no longer in the cache", vec![(MAPPING, 0)], false),
        ("on no list", vec![(FLAGS, UPTODATE)], false),
        (
            "with buffers",
            vec![flags(HAS_PRIVATE), (PRIVATE, BUFFERS), (COUNTS, counts(2, 0))],
            false,
        ),
        ("of btrfs", vec![flags(HAS_PRIVATE), (PRIVATE, 1), (COUNTS, counts(2, 0))], true),
        ("of btrfs, pinned", vec![flags(HAS_PRIVATE), (PRIVATE, 1), (COUNTS, counts(3, 0))], false),
        ("a driver's", vec![(MAPPING, FILE | 2)], false),
        ("no pointer", vec![(MAPPING, 0x1000)], false),
        ("nobody's", vec![(COUNTS, counts(0, 0))], false),
        ("more mappings than references", vec![(COUNTS, counts(1, 3))], false),
        ("slab", vec![flags(SLAB)], false),
        ("a page table", vec![(COUNTS, 1 << 32 | u64::from(!0x200u32))], false),
    ] {
        assert_eq!(settled(&words), want, "{what}");
    }
}

#[test]
fn anonymous_memory_is_settled_if_only_its_mappings_refer_to_it() {
    let flags = |more| (FLAGS, LRU | UPTODATE | SWAP_BACKED | more);
    let of = |mapping| vec![flags(0), (MAPPING, mapping)];
    for (what, more, want) in [
        ("mapped", vec![(COUNTS, counts(1, 1))], true),
        ("shared by a fork", vec![(COUNTS, counts(2, 2))], true),
        ("pinned", vec![(COUNTS, counts(1 + PIN, 1))], false),
        ("pinned by a reference", vec![(COUNTS, counts(2, 1))], false),
        ("pinned and not mapped any more", vec![(COUNTS, counts(1, 0))], false),
        ("locked", vec![flags(LOCKED), (COUNTS, counts(1, 1))], false),
        ("in the swap cache", vec![(COUNTS, counts(2, 1))], false),
        ("freed", vec![(COUNTS, counts(0, 0))], false),
    ] {
        for mapping in [ANONYMOUS, KSM] {
            let words: Vec<_> = of(mapping).into_iter().chain(more.iter().copied()).collect();
            assert_eq!(settled(&words), want, "{what}");
        }
    }
}

/// A compound of eight frames in the page cache.
fn large(references: u32, more: &[(u64, u64)]) -> Vec<bool> {
    let (forge, guest) = guest();
    let head_va = forge::VMEMMAP_VA + GFN.0 * forge::PAGE_BYTES;
    let frames: Vec<Gfn> = (0..8).map(|index| Gfn(GFN.0 + index)).collect();
    for &gfn in &frames[1..] {
        forge.set_page(gfn, COMPOUND, head_va | 1);
        forge.set_page(gfn, COUNTS, counts(0, 0));
    }
    let words = [(FLAGS, LRU | UPTODATE | HEAD), (COMPOUND, 0), (MAPPING, FILE), (PRIVATE, 0)];
    words.iter().chain(more).for_each(|&(at, word)| forge.set_page(GFN, at, word));
    forge.set_page(GFN, COUNTS, counts(references, 0));
    guest.settled(&forge.mem, &frames)
}

#[test]
fn a_compound_in_the_page_cache_has_a_reference_for_each_frame() {
    assert_eq!(large(8, &[]), [true; 8]);
    assert_eq!(large(9, &[(FLAGS, LRU | UPTODATE | HEAD | HAS_PRIVATE), (PRIVATE, 1)]), [true; 8]);
    for (what, references, more) in [
        ("pinned or mapped", 9, vec![]),
        ("pinned", 8 + PIN, vec![]),
        ("locked", 8, vec![(FLAGS, LRU | UPTODATE | HEAD | LOCKED)]),
        ("with buffers", 9, vec![(FLAGS, LRU | UPTODATE | HEAD | HAS_PRIVATE), (PRIVATE, BUFFERS)]),
        ("no longer in the cache", 1, vec![(MAPPING, 0)]),
    ] {
        assert_eq!(large(references, &more), [false; 8], "{what}");
    }
}

#[test]
fn an_anonymous_huge_page_is_settled_if_one_process_maps_it_whole() {
    let anonymous = |flags, whole: u32, references| {
        let (forge, guest) = guest();
        let frames = [GFN, Gfn(GFN.0 + 1), Gfn(GFN.0 + 7)];
        for &gfn in &frames[1..] {
            forge.set_page(gfn, COMPOUND, forge::VMEMMAP_VA + GFN.0 * forge::PAGE_BYTES + 1);
        }
        forge.set_page(frames[1], 16, u64::from(whole) << 32 | 0x901);
        for (at, word) in [(FLAGS, flags), (COMPOUND, 0), (MAPPING, ANONYMOUS), (PRIVATE, 0)] {
            forge.set_page(GFN, at, word);
        }
        forge.set_page(GFN, COUNTS, counts(references, 0));
        guest.settled(&forge.mem, &frames) == [true; 3]
    };
    let at_rest = LRU | UPTODATE | SWAP_BACKED | HEAD;
    assert!(anonymous(at_rest, 0, 1));
    for (what, flags, whole, references) in [
        ("pinned", at_rest, 0, 2),
        ("pinned and not mapped any more", at_rest, u32::MAX, 1),
        ("mapped twice", at_rest, 1, 2),
        ("mapped twice, once just now", at_rest, 1, 1),
        ("locked", at_rest | LOCKED, 0, 1),
    ] {
        assert!(!anonymous(flags, whole, references), "{what}");
    }
}

#[test]
fn metadata_that_has_moved_tells_nothing() {
    let (mut forge, guest) = guest();
    let words = [(FLAGS, LRU | UPTODATE), (MAPPING, FILE), (COUNTS, counts(1, 0))];
    words.iter().for_each(|&(at, word)| forge.set_page(GFN, at, word));
    assert_eq!(guest.settled(&forge.mem, &[GFN]), [true]);
    let va = forge::VMEMMAP_VA + GFN.0 * forge::PAGE_BYTES;
    forge.map(va, ebb_units::Gpa(9 << 20), 0);
    assert_eq!(guest.settled(&forge.mem, &[GFN]), [false]);
}

#[test]
fn frames_without_metadata_are_not_settled() {
    let (forge, guest) = guest();
    assert_eq!(guest.settled(&forge.mem, &[Gfn(u64::MAX >> 12)]), [false]);
}
