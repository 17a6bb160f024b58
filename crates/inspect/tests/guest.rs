//! A made-up guest, read as a real one.

use std::sync::atomic::AtomicU64;

use ebb_inspect::{
    BuddyBlock, End, Guest, GuestMemory, Head, PageTables, PageWords, Request, Snapshot, Untrusted,
    may_hold_note,
};
use ebb_units::{FrameRange, Gfn, Gpa};
use testkit::forge::{self, Forge};

fn inspected(forge: &Forge) -> Guest {
    Guest::inspect(&forge.mem, &[forge::ROOT.0]).expect("a sound guest")
}

fn victims(forge: &Forge, reserve_bytes: u64, want_bytes: u64) -> Vec<BuddyBlock> {
    let mut blocks = Vec::new();
    let request = Request { min_order: 9, reserve_bytes, want_bytes };
    let taken = inspected(forge).victims(&forge.mem, request, &mut blocks);
    assert_eq!(taken.bytes, blocks.iter().map(|block| block.frames().bytes()).sum::<u64>());
    assert_eq!(taken.broken_lists, 0);
    blocks
}

#[test]
fn passes_with_four_and_five_levels() {
    for levels in [4, 5] {
        let forge = Forge::with_free_blocks(levels);
        let guest = inspected(&forge);
        assert_eq!(guest.release(), "6.1.0-forged");
        assert_eq!(guest.memmap().frames(), forge::FRAMES);
        assert_eq!(guest.free_bytes(&forge.mem), Some(forge.free_frames() * 4096));
    }
}

#[test]
fn a_frame_that_may_hold_a_note_is_recognised() {
    let forge = Forge::with_free_blocks(4);
    let may_hold =
        |frames_behind| may_hold_note(&forge.mem, Gfn(forge::NOTE.gfn().0 + frames_behind));
    assert_eq!([0, 1].map(may_hold), [true, false]);
}

#[test]
fn counts_every_frame_once() {
    let forge = Forge::with_free_blocks(4);
    let counts = inspected(&forge).counts(&forge.mem);
    assert_eq!(counts.free_blocks[10], 9);
    assert_eq!(counts.free_blocks[9], 3);
    assert_eq!(counts.free_blocks[3], 2);
    assert_eq!(counts.free_frames(), forge.free_frames());
    assert_eq!(counts.frames(), forge::FRAMES);
    assert_eq!(counts.other_frames, forge::FRAMES - forge.free_frames());
}

#[test]
fn frames_of_a_compound_are_of_its_heads_kind() {
    let forge = Forge::with_free_blocks(4);
    let head = forge::FIRST_SPARE.0 + 512;
    forge.set_page(Gfn(head), 0, 65536 | 1 << 9);
    for tail in head + 1..head + 8 {
        forge.set_page(Gfn(tail), 8, 1);
    }
    assert_eq!(inspected(&forge).counts(&forge.mem).slab_frames, 8);
}

#[test]
fn free_blocks_by_address_are_those_on_the_lists() {
    let forge = Forge::with_free_blocks(4);
    let guest = inspected(&forge);
    for min_order in [0, 3, 9, 10] {
        let mut by_address = Vec::new();
        guest.memmap().free_blocks(&forge.mem, guest.layout(), min_order, |head, order| {
            by_address.push(BuddyBlock { head, order });
        });
        let mut listed = Vec::new();
        for zone in guest.zones().iter() {
            for order in min_order..=guest.layout().max_order() {
                for kind in 0..guest.zones().migrate_types() {
                    let list = guest.zones().free_list(
                        guest.sight(&forge.mem),
                        zone,
                        order,
                        kind,
                        End::Head,
                    );
                    listed.extend(list.map(|head| BuddyBlock { head, order }));
                }
            }
        }
        listed.sort();
        assert_eq!(by_address, listed);
    }
}

#[test]
fn both_ends_of_a_list_give_the_same_blocks() {
    let forge = Forge::with_free_blocks(4);
    let guest = inspected(&forge);
    let zone = guest.zones().iter().next().expect("the normal zone");
    let list = |end| guest.zones().free_list(guest.sight(&forge.mem), zone, 10, 1, end);
    let forward: Vec<Gfn> = list(End::Head).collect();
    let mut backward: Vec<Gfn> = list(End::Tail).collect();
    backward.reverse();
    assert_eq!(forward, (4..12).map(|index| Gfn(index * 1024)).collect::<Vec<_>>());
    assert_eq!(forward, backward);
}

#[test]
fn victims_come_from_the_tails_and_the_largest_of_all_zones_first() {
    let blocks = victims(&Forge::with_free_blocks(4), 0, u64::MAX);
    let heads: Vec<u64> = blocks.iter().map(|block| block.head.0 / 1024).collect();
    assert_eq!(heads, [11, 10, 9, 8, 7, 6, 5, 4, 12, 15, 14, 13]);
}

#[test]
fn a_reserve_is_left_at_each_lists_head() {
    // One block of each of the three lists (4 + 2 + 4 MiB), then one more of each.
    let forge = Forge::with_free_blocks(4);
    let heads = |reserve| -> Vec<u64> {
        victims(&forge, reserve, u64::MAX).iter().map(|block| block.head.0 / 1024).collect()
    };
    assert_eq!(heads(10 << 20), [11, 10, 9, 8, 7, 6, 5, 15, 14]);
    assert_eq!(heads(16 << 20), [11, 10, 9, 8, 7, 6, 15]);
    assert_eq!(heads(u64::MAX), [0; 0]);
}

#[test]
fn takes_no_more_than_wanted() {
    let forge = Forge::with_free_blocks(4);
    assert_eq!(victims(&forge, 0, 0).len(), 0);
    assert_eq!(victims(&forge, 0, 4 << 20).len(), 1);
    assert_eq!(victims(&forge, 0, 5 << 20).len(), 2);
}

#[test]
fn a_look_follows_the_guests_own_page_tables() {
    let mut forge = Forge::with_free_blocks(4);
    let guest = inspected(&forge);
    let head = Gfn(4096);
    let metadata = forge.page(head, 0).gfn();
    assert_eq!(guest.look(&forge.mem).head(head), Some(Head { order: 10, metadata }));
    assert_eq!(guest.memmap().walk(&forge.mem, head).map(Gpa::gfn), Some(metadata));
    assert_eq!(guest.look(&forge.mem).head(Gfn(4097)), None);

    // The guest moves the metadata, so the old copy no longer counts.
    let other_place = Gpa(9 << 20);
    forge.map(forge::VMEMMAP_VA + head.0 * forge::PAGE_BYTES, other_place, 0);
    assert_eq!(guest.look(&forge.mem).head(head), None);
    assert_eq!(guest.memmap().walk(&forge.mem, head), Some(other_place));
    assert_eq!(guest.memmap().metadata_gpa(head).map(Gpa::gfn), Some(metadata));
}

#[test]
fn a_kernel_that_no_vcpu_runs_is_refused() {
    let forge = Forge::with_free_blocks(4);
    let dead = Guest::inspect(&forge.mem, &[0, 0x5000]);
    assert_eq!(dead.err(), Some(Untrusted::NotRunning));
    // The process's half of a pair of roots under page-table isolation, with its PCID.
    let guest = inspected(&forge);
    assert!(guest.runs_on(&forge.mem, &[0, forge::ROOT.0 + 0x1000 + 5]));
    assert!(!guest.runs_on(&forge.mem, &[]));
}

#[test]
fn the_kernel_that_runs_is_found_among_notes_of_earlier_boots() {
    let forge = Forge::with_free_blocks(4);
    let stale =
        forge.note_text().replace("phys_base)=-", "phys_base)=-1").replace("6.1.0", "5.10.0");
    forge.note_at(Gpa(0x1000), stale.as_bytes());
    forge.note_at(Gpa(63 << 20), b"OSRELEASE=5.10.0-empty\n");
    assert_eq!(inspected(&forge).release(), "6.1.0-forged");
}

#[test]
fn recheck_notices_a_new_kernel() {
    let forge = Forge::with_free_blocks(4);
    let guest = inspected(&forge);
    assert!(guest.recheck(&forge.mem));
    forge.note(&forge.note_text().replace("PG_slab)=9", "PG_slab)=8"));
    assert!(!guest.recheck(&forge.mem));
    forge.note(&forge.note_text());
    assert!(guest.recheck(&forge.mem));
    forge.mem.set(Gpa(forge::ROOT.0 + 8 * 511), 0);
    assert!(!guest.recheck(&forge.mem));
}

/// Without a random base a kernel boots to the same addresses again, and all but its image may
/// still be the last boot's.
#[test]
fn a_kernel_that_boots_again_is_not_taken_for_the_last_boot() {
    let forge = Forge::with_free_blocks(4);
    let headers = [Gpa(20 << 20), Gpa(40 << 20)];
    forge.note(&(forge.note_text() + &forge.llfree_text(&headers)));
    let refused = |forge: &Forge| Guest::inspect(&forge.mem, &[forge::ROOT.0]).err();
    assert_eq!(refused(&forge), Some(Untrusted::NotRunning));
    forge.boot_llfree(&headers);
    let guest = inspected(&forge);
    assert_eq!(guest.llfree().len(), headers.len());
    for stale in [[Gpa(0), Gpa(0)], [headers[0], Gpa(0)], [headers[0], Gpa(24 << 20)]] {
        forge.boot_llfree(&stale);
        assert!(!guest.recheck(&forge.mem) && !guest.image_agrees(&forge.mem));
        assert!(guest.runs_on(&forge.mem, &[forge::ROOT.0]), "its tables tell nothing");
        assert_eq!(refused(&forge), Some(Untrusted::NotRunning));
    }
    forge.boot_llfree(&headers);
    assert!(guest.recheck(&forge.mem) && guest.image_agrees(&forge.mem));
    for node in [0, forge::DIRECT_VA + forge::NODE.0 + 4096] {
        forge.set_node(node);
        assert!(!guest.recheck(&forge.mem) && !guest.image_agrees(&forge.mem));
    }
}

#[test]
fn refresh_follows_sections_that_come_and_go() {
    let forge = Forge::with_free_blocks(4);
    let mut guest = inspected(&forge);
    assert_eq!(guest.refresh(&forge.mem), Ok(false));
    // The only section goes offline.
    forge.mem.set(forge::SECTIONS, forge::VMEMMAP_VA | 0b1011);
    assert_eq!(guest.refresh(&forge.mem), Err(Untrusted::NoMemmap));
    forge.mem.set(forge::SECTIONS, forge::VMEMMAP_VA | 0b10_1111);
    assert_eq!(guest.refresh(&forge.mem), Ok(true));
    assert_eq!(guest.refresh(&forge.mem), Ok(false));
}

/// Memory in which only some frames are resident.
struct Only<'a>(&'a Snapshot, Vec<FrameRange>);

impl Only<'_> {
    fn has(&self, gpa: Gpa) -> bool {
        self.1.iter().any(|frames| frames.contains(gpa.gfn()))
    }
}

impl GuestMemory for Only<'_> {
    fn word(&self, gpa: Gpa) -> Option<u64> {
        self.has(gpa).then(|| self.0.word(gpa))?
    }

    fn page(&self, gpa: Gpa) -> Option<PageWords> {
        self.has(gpa).then(|| self.0.page(gpa))?
    }

    fn words(&self, gpa: Gpa, count: usize) -> Option<&[AtomicU64]> {
        let last = Gpa(gpa.0 + 8 * count as u64 - 1);
        (self.has(gpa) && self.has(last)).then(|| self.0.words(gpa, count))?
    }

    fn next_populated(&self, from: Gpa) -> Option<(Gpa, u64)> {
        self.0.next_populated(from)
    }

    fn segments(&self) -> Vec<(Gpa, u64)> {
        self.0.segments()
    }
}

#[test]
fn every_look_does_with_the_frames_that_are_needed() {
    for levels in [4, 5] {
        let forge = Forge::with_free_blocks(levels);
        forge.note(&(forge.note_text() + &forge.llfree_text(&[Gpa(20 << 20)])));
        forge.boot_llfree(&[Gpa(20 << 20)]);
        let guest = inspected(&forge);
        let needed = Only(&forge.mem, guest.needed_frames(&forge.mem));
        assert!(guest.recheck(&needed) && !guest.memmap().changed(&needed));
        assert_eq!(guest.free_bytes(&needed), guest.free_bytes(&forge.mem));
        assert_eq!(guest.counts(&needed), guest.counts(&forge.mem));
        for gfn in (0..forge::FRAMES).step_by(61).map(Gfn) {
            let walk = |mem: &dyn GuestMemory| guest.memmap().walk(mem, gfn);
            assert_eq!(walk(&needed), walk(&forge.mem));
        }
        // The needed frames are few. Without the tables nothing is known.
        let frames: u64 = needed.1.iter().map(|frames| frames.count).sum();
        assert!(frames < forge::FRAMES / 32, "{frames} of {}", forge::FRAMES);
        let tables = PageTables { root: forge::ROOT, levels };
        let others = needed.1.iter().filter(|frames| !frames.contains(tables.root.gfn()));
        assert!(!guest.recheck(&Only(&forge.mem, others.copied().collect())));
    }
}
