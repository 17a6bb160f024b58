//! A scan of some frames gives the same result as a scan of all of them.

use ebb_inspect::{Guest, Lru, PageKind};
use ebb_units::{FrameRange, Gfn};
use testkit::forge::{self, Forge};

const FLAGS: u64 = 0;
const COMPOUND: u64 = 8;
const MAPPING: u64 = 24;
const PRIVATE: u64 = 40;
const COUNTS: u64 = 48;
const BUDDY: u64 = -129i32 as u32 as u64;
const HEAD: u64 = 1 << 16;
const LRU: u64 = 1 << 4;
const ACTIVE: u64 = 1 << 5;
const SWAP_BACKED: u64 = 1 << 19;
const ANONYMOUS: u64 = 0xffff_8880_0012_3401;
const FILE: u64 = 0xffff_8880_0012_3400;

/// First frame of a process's huge page.
const HUGE: Gfn = Gfn(forge::FIRST_SPARE.0 + 512);

fn page(forge: &Forge, gfn: Gfn, flags: u64, mapping: u64) {
    forge.set_page(gfn, FLAGS, flags);
    forge.set_page(gfn, MAPPING, mapping);
    forge.set_page(gfn, COUNTS, 1 << 32);
}

fn forged() -> (Forge, Guest) {
    let forge = Forge::with_free_blocks(4);
    page(&forge, HUGE, LRU | ACTIVE | SWAP_BACKED | HEAD, ANONYMOUS);
    let head_va = forge::VMEMMAP_VA + HUGE.0 * forge::PAGE_BYTES;
    for tail in HUGE.0 + 1..HUGE.0 + 512 {
        forge.set_page(Gfn(tail), COMPOUND, head_va + 1);
    }
    for gfn in HUGE.0 + 600..HUGE.0 + 700 {
        page(&forge, Gfn(gfn), LRU, FILE);
    }
    let guest = Guest::inspect(&forge.mem, &[forge::ROOT.0]).expect("a sound guest");
    (forge, guest)
}

/// Each frame's kind.
fn kinds(forge: &Forge, guest: &Guest) -> Vec<Option<PageKind>> {
    let mut kinds = vec![None; forge::FRAMES as usize];
    guest.memmap().kinds(&forge.mem, guest.layout(), |frames, kind| {
        kinds[frames.start.0 as usize..frames.end().0 as usize].fill(Some(kind));
    });
    kinds
}

#[test]
fn any_part_is_seen_as_in_the_whole() {
    let (forge, guest) = forged();
    let all = kinds(&forge, &guest);
    // Free blocks, a huge page, single frames: cut at their borders and inside.
    for start in [0, 2047, 2048, 2051, HUGE.0, HUGE.0 + 1, HUGE.0 + 511, 4096, 4999, 5120, 7168] {
        for count in [1, 3, 64, 512, 1500] {
            let frames = FrameRange::new(Gfn(start), count);
            let mut seen = vec![None; count as usize];
            guest.memmap().kinds_in(&forge.mem, guest.layout(), frames, |run, kind, _| {
                for gfn in run.frames().filter(|gfn| frames.contains(*gfn)) {
                    let place = &mut seen[(gfn.0 - start) as usize];
                    assert_eq!(place.replace(kind), None, "{gfn:?} is visited twice");
                }
            });
            let end = start as usize + count as usize;
            assert_eq!(seen, all[start as usize..end], "{frames:?}");
        }
    }
}

/// A huge page that is being freed, or a lie: no block begins at the first frame that is looked at.
#[test]
fn tails_of_a_free_head_are_no_block() {
    let (forge, guest) = forged();
    forge.set_page(HUGE, FLAGS, 0);
    forge.set_page(HUGE, PRIVATE, 3);
    forge.set_page(HUGE, COUNTS, BUDDY);
    let seen = |first: u64| {
        let (mut seen, frames) = (Vec::new(), FrameRange::new(Gfn(first), 64));
        let all = |run, kind, _: Lru| seen.push((run, kind));
        guest.memmap().kinds_in(&forge.mem, guest.layout(), frames, all);
        seen
    };
    let within = FrameRange::new(Gfn(HUGE.0 + 128), 64);
    assert_eq!(seen(within.start.0), [(within, PageKind::Other)]);
    let block = (FrameRange::block(HUGE, 3), PageKind::Free { order: 3 });
    assert_eq!(seen(HUGE.0)[0], block);
}

#[test]
fn frames_beyond_the_guests_memory_are_not_visited() {
    let (forge, guest) = forged();
    let beyond = FrameRange::new(Gfn(forge::FRAMES), 512);
    guest.memmap().kinds_in(&forge.mem, guest.layout(), beyond, |run, kind, _| {
        panic!("{run:?}: {kind:?}");
    });
}

fn lru(forge: &Forge, gfn: Gfn) -> Lru {
    let guest = Guest::inspect(&forge.mem, &[forge::ROOT.0]).expect("a sound guest");
    let (mut found, one) = (None, FrameRange::new(gfn, 1));
    guest.memmap().kinds_in(&forge.mem, guest.layout(), one, |_, _, lru| found = Some(lru));
    found.expect("a frame")
}

#[test]
fn parts_of_a_huge_page_are_as_active_as_its_head() {
    let (forge, _) = forged();
    let active = Lru { active: true, swap_backed: true, ..Lru::default() };
    assert_eq!([0, 1, 511].map(|part| lru(&forge, Gfn(HUGE.0 + part))), [active; 3]);
}

#[test]
fn flags_are_where_each_kernel_has_them() {
    let all = Lru {
        active: true,
        referenced: true,
        workingset: true,
        unevictable: true,
        swap_backed: true,
        dirty: true,
    };
    let gfn = Gfn(HUGE.0 + 600);
    let (old, unevictable) = ("NUMBER(PG_lru)=4\n", 1 << 20);
    for (lru_bit, head_bit, others) in [(4, 16, [1, 3, 5, 6]), (5, 6, [2, 4, 8, 9])] {
        let (forge, _) = forged();
        let text = forge.note_text().replace(old, &format!("NUMBER(PG_lru)={lru_bit}\n"));
        forge.note(&text.replace("65536", &(1 << head_bit).to_string()));
        let flags = others.iter().fold(SWAP_BACKED | unevictable, |all, bit| all | 1 << bit);
        page(&forge, gfn, flags | 1 << lru_bit, FILE);
        assert_eq!(lru(&forge, gfn), all, "PG_lru {lru_bit}");
        page(&forge, gfn, flags, FILE);
        assert_eq!(lru(&forge, gfn), Lru::default(), "on no list");
    }
    // If no known kernel has this order of flags, only what the note gives is known.
    let (forge, _) = forged();
    forge.note(&forge.note_text().replace(old, "NUMBER(PG_lru)=7\n"));
    page(&forge, gfn, 1 << 7 | SWAP_BACKED | 0b111_1111, FILE);
    assert_eq!(lru(&forge, gfn), Lru { swap_backed: true, ..Lru::default() });
}
