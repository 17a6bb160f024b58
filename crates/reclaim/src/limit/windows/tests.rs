use std::cell::Cell;

use ebb_inspect::Lru;
use ebb_pager::Judge;
use ebb_sys::ram_file::RamFile;
use ebb_units::Gpa;
use ebb_vm::Region;
use ebb_vm::ram::{Backing, Ram};
use testkit::forge::{self, Forge};

use super::machine::{HUGE, Machine, NoVmm, small_pages};
use super::*;

/// The runs of frames that are reported.
fn runs(tell: impl FnOnce(&mut dyn FnMut(FrameRange))) -> Vec<(u64, u64)> {
    let mut runs = Vec::new();
    tell(&mut |frames| frames.join(&mut runs));
    runs.into_iter().map(|run| (run.start.0, run.count)).collect()
}

#[test]
fn windows_are_looked_at_where_memory_is() {
    let Some(machine) = Machine::new() else {
        return eprintln!("SKIPPED: no userfaultfd");
    };
    let pagemap = Pagemap::open(&machine.process).unwrap();
    let (spare, heat) = (|gfn: Gfn| gfn == Gfn(5), |gfn: Gfn| gfn.index_in_huge() % 4);
    let pager = &machine.pager;
    let mut windows =
        Windows::new(machine.sources(), (pager, &NoVmm), &pagemap, &spare, &heat, true);
    assert_eq!(windows.next(HugeFrame(0)), None);
    machine.touch(4, 3);
    machine.touch(500, 20);
    // In the second region, behind the hole.
    machine.touch(1024 + 8, 2);
    let next = |from| windows.next(HugeFrame(from)).map(|window| window.0);
    assert_eq!([0, 1, 2, 3, 4].map(next), [Some(0), Some(1), Some(3), Some(3), None]);
    let mapped = |window| runs(|saw| windows.mapped(HugeFrame(window), saw).unwrap());
    if let Err(error) = windows.mapped(HugeFrame(0), &mut |_| {}) {
        return eprintln!("SKIPPED: the kernel has no PAGEMAP_SCAN: {error}");
    }
    assert_eq!(mapped(0), [(4, 3), (500, 12)]);
    assert_eq!(mapped(1), [(512, 8)]);
    assert_eq!(mapped(2), []);
    assert_eq!(mapped(3), [(1536 + 8, 2)]);
    let mut visited = Vec::new();
    windows.look(HugeFrame(3), &mut |gfn, page| visited.push((gfn, page)));
    let page = |heat| Page { has_disk: true, heat, ..Page::default() };
    assert_eq!(visited, [(Gfn(1544), page(0)), (Gfn(1545), page(1))]);
    let all = runs(|saw| windows.look(HugeFrame(0), &mut |gfn, _| saw(FrameRange::new(gfn, 1))));
    assert_eq!(all, [(4, 3), (500, 12)]);
    assert_eq!([4, 5].map(|gfn| windows.may_go(Gfn(gfn))), [true, false]);
    // None of them is known to be evicted without a write.
    windows.begin(&[FrameRange::new(Gfn(4), 1)], true);
    assert!(!windows.may_go(Gfn(4)));
    windows.look(HugeFrame(0), &mut |gfn, page| assert!(page.stays, "{gfn:?}"));
}

#[test]
fn forgotten_bytes_are_reported_in_frames() {
    let Some(machine) = Machine::new() else {
        return eprintln!("SKIPPED: no userfaultfd");
    };
    let pagemap = Pagemap::open(&machine.process).unwrap();
    let (no, cold) = (|_| false, |_| 0);
    let of = machine.sources();
    let windows = Windows::new(of, (&machine.pager, &NoVmm), &pagemap, &no, &cold, false);
    let window = |window| FrameRange::huge(HugeFrame(window));
    // The third window is no RAM, and half of the fourth is.
    let reached = |bytes| windows.reached(&[window(1), window(2), window(3)], bytes);
    let found = [0, HUGE / 2, HUGE, HUGE + FRAME_BYTES, HUGE * 3 / 2].map(reached);
    assert_eq!(found, [0, 256, 1024, 1025, 1536]);
}

#[test]
fn blocks_that_overlap_are_reported_once() {
    let block = |head, order| BuddyBlock { head: Gfn(head), order };
    let mut blocks = vec![block(0, 3), block(0, 3), block(4, 0), block(8, 1), block(9, 0)];
    apart(&mut blocks);
    assert_eq!(blocks, [block(0, 3), block(8, 1)]);
}

#[test]
fn a_window_is_found_and_visited() {
    let bytes = 16 << 20;
    let file = RamFile::create("run", bytes).unwrap();
    let mapping = small_pages(&file, bytes);
    let hva = ebb_units::Hva(mapping.address().0);
    let region = Region { gpa: Gpa(0), bytes, hva, file: 0, offset: 0 };
    let ram = Ram::new(vec![region], vec![Backing::new(file, mapping)]).unwrap();
    let puncher = ebb_vm::Puncher::new(ram);
    let ram = puncher.ram();
    ram.populate(FrameRange::new(Gfn(0), bytes / FRAME_BYTES)).unwrap();
    let windows = (0..bytes / HUGE).map(HugeFrame);
    for window in windows {
        assert_eq!(ram.next_data(window.gpa()), Some(window.gpa()));
        let all = FrameRange::huge(window);
        assert_eq!(ram.populated_in(all).unwrap(), [all]);
    }
    puncher.punch(FrameRange::new(Gfn(3), 2)).unwrap();
    let forgotten = runs(|saw| {
        ram.populated_in(FrameRange::huge(HugeFrame(0))).unwrap().into_iter().for_each(saw)
    });
    assert_eq!(forgotten, [(0, 3), (5, 507)]);
}

const FLAGS: u64 = 0;
const COMPOUND: u64 = 8;
const MAPPING: u64 = 24;
const COUNTS: u64 = 48;
const HEAD: u64 = 1 << 16;
const LISTED: u64 = 1 << 4;
const ACTIVE: u64 = 1 << 5;
const SWAP_BACKED: u64 = 1 << 19;
/// A huge page of a process.
const FOLIO: HugeFrame = HugeFrame(5);

/// A kernel with a huge page of a process. Linux 7.x does not say where the head of the page is.
fn with_a_huge_page(is_new: bool) -> Forge {
    let forge = Forge::with_free_blocks(4);
    let text = forge.note_text();
    if is_new {
        forge.note(&text.replace("page.compound_head", "page.compound_info"));
    }
    let head = FOLIO.first();
    forge.set_page(head, FLAGS, LISTED | ACTIVE | SWAP_BACKED | HEAD);
    forge.set_page(head, MAPPING, 0xffff_8880_0012_3401);
    forge.set_page(head, COUNTS, 1 << 32);
    for tail in FrameRange::huge(FOLIO).frames().skip(1) {
        let va = forge::VMEMMAP_VA + head.0 * forge::PAGE_BYTES;
        forge.set_page(tail, COMPOUND, if is_new { 1 } else { va + 1 });
    }
    forge
}

/// Even if a part before it is non-resident.
#[test]
fn a_huge_page_of_the_guest_is_reported_as_one() {
    for is_new in [false, true] {
        let forge = with_a_huge_page(is_new);
        let Some(machine) = Machine::forged(&forge) else {
            return eprintln!("SKIPPED: no userfaultfd");
        };
        let first = FOLIO.first().0;
        machine.touch(first, 2);
        machine.touch(first + 7, 3);
        let kernel = machine.kernel();
        let of = Sources { guest: Some((&kernel, &|| true)), ..machine.sources() };
        let pagemap = Pagemap::open(&machine.process).unwrap();
        let (no, cold) = (|_| false, |_| 0);
        let mut windows = Windows::new(of, (&machine.pager, &NoVmm), &pagemap, &no, &cold, false);
        let mut visited = Vec::new();
        windows.look(FOLIO, &mut |gfn, page| visited.push((gfn.0 - first, page.kind, page.lru)));
        let lru = Lru { active: true, swap_backed: true, ..Lru::default() };
        let anonymous = |at| (at, Some(PageKind::Anonymous), lru);
        assert_eq!(visited, [0, 1, 7, 8, 9].map(anonymous), "7.x: {is_new}");
    }
}

#[test]
fn free_blocks_are_reported_and_their_kept_slots_dropped() {
    let forge = Forge::with_free_blocks(4);
    let Some(machine) = Machine::forged(&forge) else {
        return eprintln!("SKIPPED: no userfaultfd");
    };
    let kernel = machine.kernel();
    let of = Sources { guest: Some((&kernel, &|| true)), ..machine.sources() };
    let pagemap = Pagemap::open(&machine.process).unwrap();
    let (no, cold) = (|_| false, |_| 0);
    let mut windows = Windows::new(of, (&machine.pager, &NoVmm), &pagemap, &no, &cold, false);
    // Blocks of eight frames at 2048 and at 2064.
    machine.write(2048, 32);
    let mut free = Vec::new();
    windows.look(HugeFrame(4), &mut |gfn, page| match page.kind {
        Some(PageKind::Free { order: 3 }) => free.push(gfn.0),
        kind => assert_eq!(kind, Some(PageKind::Other), "{gfn:?}"),
    });
    assert!(free.iter().copied().eq((2048..2056).chain(2064..2072)), "{free:?}");
    let heads: Vec<u64> = windows.take_free().iter().map(|block| block.head.0).collect();
    assert_eq!(heads, [2048, 2064]);
    assert_eq!(windows.take_free(), []);
    // Evicted before the guest freed them, as far as anybody knows.
    machine.pager.frames().watch_all().unwrap();
    let frames: Vec<Gfn> = (2044..2060).chain(2070..2072).map(Gfn).collect();
    let evicted = machine.pager.evictor().evict(&frames, &ebb_pager::NothingKnown).unwrap();
    assert_eq!(evicted.saved, 14, "{evicted:?}");
    assert_eq!(windows.drop_freed(HugeFrame(4)), Some(10));
    assert_eq!(windows.drop_freed(HugeFrame(4)), Some(0), "once");
}

/// A question to the VMM for each frame would take too long.
#[test]
fn dead_frames_are_found_at_the_batch_where_resets_come_late() {
    let forge = Forge::with_free_blocks(4);
    let Some(machine) = Machine::forged(&forge) else {
        return eprintln!("SKIPPED: no userfaultfd");
    };
    let (kernel, asked, runs) = (machine.kernel(), Cell::new(0), Cell::new(true));
    let still_runs = || {
        asked.set(asked.get() + 1);
        runs.get()
    };
    let guest = Some((&kernel, &still_runs as &dyn Fn() -> bool));
    let of = Sources { guest, hears_late: true, ..machine.sources() };
    let free = [BuddyBlock { head: Gfn(2048), order: 3 }];
    let known = Known::new(of, &machine.pager, &free);
    let frames: Vec<Gfn> = (2048..2064).map(Gfn).collect();
    let dead = || frames.iter().filter(|gfn| known.is_dead(**gfn)).map(|gfn| gfn.0);
    assert_eq!((dead().count(), asked.get()), (0, 0), "no frame is protected yet");
    known.settled(&frames);
    let before = asked.get();
    assert!(before > 0 && dead().eq(2048..2056));
    assert_eq!(asked.get(), before);
    runs.set(false);
    known.settled(&frames);
    assert_eq!(dead().count(), 0);
}
