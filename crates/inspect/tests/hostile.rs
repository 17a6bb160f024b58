//! Guests that lie.

use std::ops::Range;
use std::sync::atomic::AtomicU64;

use ebb_inspect::{
    End, Guest, GuestMemory, ListFault, Note, PageLayout, PageWords, Request, Snapshot, Untrusted,
    find_notes,
};
use ebb_units::{Gfn, Gpa};
use proptest::prelude::*;
use testkit::forge::broken::{Broken, STRUCTURES, exercise, use_it};
use testkit::forge::{self, Forge};

/// The result for a guest with `from` replaced by `to` in its note.
fn with_note(from: &str, to: &str) -> Result<(), Untrusted> {
    let forge = Forge::with_free_blocks(4);
    let text = forge.note_text();
    assert!(text.contains(from), "{from}");
    forge.note(&text.replace(from, to));
    exercise(&forge.mem)
}

#[test]
fn memory_without_a_note_is_no_guest() {
    let mut mem = Snapshot::new();
    assert_eq!(exercise(&mem), Err(Untrusted::NoNote));
    mem.add(Gpa(0), vec![0; 1 << 16]);
    assert_eq!(exercise(&mem), Err(Untrusted::NoNote));
    let forge = Forge::with_free_blocks(4);
    forge.mem.set(Gpa(forge::NOTE.0 + 8), 0);
    assert_eq!(exercise(&forge.mem), Err(Untrusted::NoNote));
}

#[test]
fn absurd_numbers_are_named() {
    let absurd = |what, value| Err(Untrusted::Absurd { what, value });
    for (from, to, result) in [
        ("SIZE(page)=64", "SIZE(page)=0", absurd("page", 0)),
        ("SIZE(page)=64", "SIZE(page)=72", Err(Untrusted::PageBytes(72))),
        ("SIZE(page)=64", "SIZE(page)=128", Err(Untrusted::PageBytes(128))),
        ("page.lru)=8", "page.lru)=56", absurd("page.lru", 56)),
        ("page.private)=40", "page.private)=41", absurd("page.private", 41)),
        ("page.private)=40", "page.private)=4000", absurd("page.private", 4000)),
        ("mapping)=24", "mapping)=18446744073709551608", absurd("page.mapping", u64::MAX - 7)),
        ("zone.free_area)=11", "zone.free_area)=64", absurd("zone.free_area", 64)),
        ("free_list)=5", "free_list)=4096", absurd("free_area.free_list", 4096)),
        ("SIZE(mem_section)=16", "SIZE(mem_section)=0", absurd("mem_section", 0)),
        ("SIZE(mem_section)=16", "SIZE(mem_section)=8192", absurd("mem_section", 8192)),
        ("SIZE_BITS)=27", "SIZE_BITS)=0", absurd("SECTION_SIZE_BITS", 0)),
        ("SIZE_BITS)=27", "SIZE_BITS)=63", absurd("SECTION_SIZE_BITS", 63)),
        ("NR_FREE_PAGES)=0", "NR_FREE_PAGES)=-1", absurd("NR_FREE_PAGES", u64::MAX)),
        ("VALUE)=-129", "VALUE)=129", absurd("PAGE_BUDDY_MAPCOUNT_VALUE", 129)),
        ("VALUE)=-129", "VALUE)=-1", absurd("PAGE_BUDDY_MAPCOUNT_VALUE", u64::MAX)),
        ("l5_enabled)=0", "l5_enabled)=7", absurd("pgtable_l5_enabled", 7)),
        ("node_data)=1024", "node_data)=99999", absurd("node_data", 99999)),
        ("sme_mask)=0", "sme_mask)=140737488355328", Err(Untrusted::Encrypted)),
        ("l5_enabled)=0", "l5_enabled)=1", Err(Untrusted::Text)),
        ("phys_base)=-", "phys_base)=", Err(Untrusted::Text)),
        ("SYMBOL(_stext)=ffff", "SYMBOL(_stext)=0000", absurd("_stext", 0xffff_8100_0000)),
        ("SYMBOL(mem_section)", "SYMBOL(other)", Err(Untrusted::Lacks("mem_section"))),
        ("mem_section)=2048", "mem_section)=0", absurd("mem_section", 0)),
    ] {
        assert_eq!(with_note(from, to), result, "{to}");
    }
}

#[test]
fn a_message_is_one_line() {
    let why = with_note("SIZE(page)=64", "SIZE(page)=72").expect_err("an odd size");
    assert_eq!(
        why.to_string(),
        "its kernel's struct page has 72 bytes; stock kernels have 64, others are not known"
    );
}

#[test]
fn a_count_that_disagrees_is_refused() {
    let forge = Forge::with_free_blocks(4);
    forge.set_zone(1, 1344, 1 << 20);
    assert!(matches!(exercise(&forge.mem), Err(Untrusted::Gate { .. })));
    let none = Forge::new(4);
    assert!(matches!(exercise(&none.mem), Err(Untrusted::Gate { found: 0, counted: 0, .. })));
}

#[test]
fn page_tables_in_a_circle_end() {
    // Every entry of the root leads to the root, at every level; no leaf.
    for levels in [4, 5] {
        let forge = Forge::with_free_blocks(levels);
        for entry in 0..512 {
            forge.mem.set(Gpa(forge::ROOT.0 + 8 * entry), forge::ROOT.0 | 0b11);
        }
        assert_eq!(exercise(&forge.mem), Err(Untrusted::Text));
    }
}

#[test]
fn a_memory_map_outside_ram_covers_nothing() {
    let mut forge = Forge::with_free_blocks(4);
    for offset in (0..forge::FRAMES * forge::PAGE_BYTES).step_by(4096) {
        forge.map(forge::VMEMMAP_VA + offset, Gpa(1 << 40 | offset), 0);
    }
    assert_eq!(exercise(&forge.mem), Err(Untrusted::NoMemmap));
}

#[test]
fn metadata_that_frames_share_is_not_believed() {
    let mut forge = Forge::with_free_blocks(4);
    let head = Gfn(8192);
    forge.map(forge::VMEMMAP_VA + head.0 * forge::PAGE_BYTES, forge.page(Gfn(4096), 0), 0);
    // Two metadata frames are dropped, so the gate sees two blocks less, which it allows.
    let guest = Guest::inspect(&forge.mem, &[]);
    let found = forge.free_frames() - 2048;
    let reason = Untrusted::Gate { found, counted: forge.free_frames(), tolerance: 1024 };
    assert_eq!(guest.err(), Some(reason));
    forge.set_zone(0, 1344, found);
    let guest = Guest::inspect(&forge.mem, &[]).expect("the rest is sound");
    assert!(!guest.memmap().covers(head) && !guest.memmap().covers(Gfn(4096)));
    assert!(guest.memmap().covers(Gfn(4095)) && guest.memmap().covers(Gfn(4096 + 64)));
}

#[test]
fn wild_orders_are_no_blocks() {
    let forge = Forge::with_free_blocks(4);
    let guest = Guest::inspect(&forge.mem, &[]).expect("a sound guest");
    for order in [11, 20, 63, 64, u64::MAX] {
        forge.set_page(Gfn(4096), 40, order);
        assert_eq!(guest.look(&forge.mem).head(Gfn(4096)), None);
        assert_eq!(guest.counts(&forge.mem).free_blocks[10], 8);
        assert_eq!(guest.counts(&forge.mem).frames(), forge::FRAMES);
    }
    // An order that does not fit the frame's number.
    forge.set_page(Gfn(4096), 40, 10);
    forge.set_page(Gfn(2051), 48, -129i32 as u32 as u64);
    forge.set_page(Gfn(2051), 40, 9);
    assert_eq!(guest.look(&forge.mem).head(Gfn(2051)), None);
}

/// Walks the list of order 10 from its head after `link` of its first block is changed.
fn broken_list(link: u64) -> (Vec<Gfn>, Option<ListFault>) {
    let forge = Forge::with_free_blocks(4);
    let guest = Guest::inspect(&forge.mem, &[]).expect("a sound guest");
    forge.set_page(Gfn(4096), 8, link);
    let zone = guest.zones().iter().next().expect("the normal zone");
    let mut list = guest.zones().free_list(guest.sight(&forge.mem), zone, 10, 1, End::Head);
    let heads = list.by_ref().collect();
    (heads, list.fault())
}

#[test]
fn wild_list_links_end_the_walk() {
    let page = |gfn: u64| forge::VMEMMAP_VA + gfn * forge::PAGE_BYTES;
    for (link, fault) in [
        (0, ListFault::Wild),
        (u64::MAX, ListFault::Wild),
        (page(4096) + 16, ListFault::Wild),
        (page(1 << 30) + 8, ListFault::Wild),
        (page(5121) + 8, ListFault::NotFree),
        (page(13 * 1024) + 8, ListFault::NotFree),
    ] {
        assert_eq!(broken_list(link), (vec![Gfn(4096)], Some(fault)), "{link:#x}");
    }
}

#[test]
fn a_list_in_a_circle_ends() {
    let (heads, fault) = broken_list(forge::VMEMMAP_VA + 4096 * forge::PAGE_BYTES + 8);
    assert_eq!(heads.len() as u64, forge::FRAMES >> 10);
    assert_eq!(fault, Some(ListFault::Endless));
}

#[test]
fn circles_in_all_lists_yield_no_more_than_ram() {
    let forge = Forge::with_free_blocks(4);
    let guest = Guest::inspect(&forge.mem, &[]).expect("a sound guest");
    let block = forge::VMEMMAP_VA + 4096 * forge::PAGE_BYTES + 8;
    forge.set_page(Gfn(4096), 8, block);
    forge.set_page(Gfn(4096), 16, block);
    for list in 0..forge::MIGRATE_TYPES {
        for zone in 0..3 {
            forge.set_zone(zone, 256 + 10 * 88 + list * 16, block);
            forge.set_zone(zone, 256 + 10 * 88 + list * 16 + 8, block);
        }
    }
    let mut blocks = Vec::new();
    let request = Request { min_order: 10, reserve_bytes: 0, want_bytes: u64::MAX };
    guest.victims(&forge.mem, request, &mut blocks);
    assert_eq!(blocks.len() as u64, forge::FRAMES >> 10);
}

#[test]
fn thousands_of_notes_do_not_cost_thousands_of_scans() {
    let forge = Forge::with_free_blocks(4);
    for frame in 0..4096 {
        forge.note_at(Gpa((48 << 20) + frame * 4096), b"OSRELEASE=6.1.0\nSIZE(page)=64\n");
    }
    assert_eq!(find_notes(&forge.mem).len(), 32);
    exercise(&forge.mem).expect("the real one comes first");
}

/// RAM with a missing part.
struct Holed<'a> {
    mem: &'a Snapshot,
    hole: Range<u64>,
}

impl GuestMemory for Holed<'_> {
    fn word(&self, gpa: Gpa) -> Option<u64> {
        (!self.hole.contains(&gpa.0)).then(|| self.mem.word(gpa))?
    }

    fn page(&self, gpa: Gpa) -> Option<PageWords> {
        (!self.hole.contains(&gpa.0)).then(|| self.mem.page(gpa))?
    }

    fn words(&self, gpa: Gpa, count: usize) -> Option<&[AtomicU64]> {
        let apart = gpa.0 >= self.hole.end || gpa.0 + 8 * count as u64 <= self.hole.start;
        apart.then(|| self.mem.words(gpa, count))?
    }

    fn next_populated(&self, from: Gpa) -> Option<(Gpa, u64)> {
        let parts = [(0, self.hole.start), (self.hole.end, forge::RAM_BYTES)];
        let ahead = parts.into_iter().find(|&(start, end)| start < end && end > from.0);
        ahead.map(|(start, end)| (Gpa(start.max(from.0)), end - start.max(from.0)))
    }

    fn segments(&self) -> Vec<(Gpa, u64)> {
        vec![(Gpa(0), forge::RAM_BYTES)]
    }
}

/// Lines as in notes, with names and numbers of any kind.
const LINES: &str = "(OSRELEASE=5\\.10\n)?\
    ((SYMBOL|SIZE|OFFSET|LENGTH|NUMBER)\\([a-z._]{0,9}\\)=(0x)?-?[0-9a-f]{0,20}\n){0,40}";

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn any_note_is_parsed_or_refused(
        bytes in prop::collection::vec(any::<u8>(), 0..5000),
        lines in LINES,
    ) {
        for text in [bytes, lines.into_bytes()] {
            if let Some(note) = Note::parse(Gpa(0), text) {
                prop_assert!(PageLayout::new(&note).is_err());
            }
        }
    }

    /// Whether or not the guest passes, this ends, and what it names is RAM.
    #[test]
    fn broken_structures_are_survived(
        words in prop::collection::vec((prop::sample::select(&STRUCTURES), 0u64..0x2_0000, value()), 1..40),
    ) {
        let mut broken = Broken::new();
        broken.set(words);
        let _ = exercise(broken.mem());
    }

    #[test]
    fn a_guest_may_turn_bad_later(
        words in prop::collection::vec((prop::sample::select(&STRUCTURES), 0u64..0x2_0000, value()), 1..200),
    ) {
        let mut broken = Broken::new();
        let guest = Guest::inspect(broken.mem(), &[]).expect("a sound guest");
        broken.set(words);
        let _ = use_it(broken.mem(), guest);
    }

    #[test]
    fn any_number_in_the_note_is_survived(line in 3usize..38, value in value()) {
        let mut broken = Broken::new();
        let text = broken.forge().note_text();
        let mut lines: Vec<String> = text.lines().map(str::to_string).collect();
        if let Some((name, _)) = lines[line].clone().split_once('=') {
            lines[line] = match name.starts_with("SYMBOL") {
                true => format!("{name}={value:x}"),
                false => format!("{name}={}", value as i64),
            };
        }
        broken.set((0..4096).step_by(8).map(|at| (forge::NOTE.0, at, 0)));
        broken.forge().note(&(lines.join("\n") + "\n"));
        let _ = exercise(broken.mem());
    }

    #[test]
    fn missing_ram_is_survived(start in 0u64..16384, frames in 1u64..4096) {
        let broken = Broken::new();
        let end = ((start + frames) * 4096).min(forge::RAM_BYTES);
        let _ = exercise(&Holed { mem: broken.mem(), hole: start * 4096..end });
    }
}

#[test]
fn a_broken_guest_was_mended() {
    exercise(Broken::new().mem()).expect("a sound guest");
}

/// Numbers that may break something: small, pointers to existing structures, single bits, any.
fn value() -> impl Strategy<Value = u64> {
    prop_oneof![
        0u64..70,
        (0u64..64).prop_map(|bit| 1 << bit),
        (0u64..64).prop_map(|bit| u64::MAX << bit),
        (0u64..forge::FRAMES).prop_map(|frame| (frame * 4096) | 0b1000_0011),
        (0u64..forge::FRAMES).prop_map(|gfn| forge::VMEMMAP_VA + gfn * 64 + 8),
        (0u64..forge::RAM_BYTES).prop_map(|gpa| forge::DIRECT_VA + gpa),
        Just(-129i32 as u32 as u64),
        any::<u64>(),
    ]
}
