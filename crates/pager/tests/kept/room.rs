//! Room in a store: kept slots are given up when others need them.

use std::io;

use ebb_pager::testing::{available, page_of};
use ebb_pager::{Evicted, NothingKnown};
use ebb_store::{Compressed, Page, Protection, Quota, SharedRoom, Store, SwapFile};
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};
use tempfile::TempDir;
use testkit::require;

use crate::daemon::{Daemon, first_of};
use crate::{FRAMES, clean, saved, swap_file};

/// Of the slots that no word names, an eighth is kept by no frame; those that were used first are
/// freed first.
#[test]
fn a_store_that_is_short_of_slots_gets_them_back_in_order() {
    require!(available());
    let run = tempfile::tempdir().unwrap();
    let all = FrameRange::new(Gfn(0), 20);
    let daemon = Daemon::with_store(Box::new(swap_file(&run, 32))).with_kept(all);
    let more = FrameRange::new(Gfn(100), 12);
    more.frames().for_each(|gfn| daemon.write(gfn, &first_of(gfn)));
    assert_eq!(daemon.evict(more), saved(12));
    assert_eq!((daemon.kept(), daemon.slots()), (20, 32));
    assert_eq!(daemon.evict(FrameRange::new(Gfn(0), 1)), saved(1));
    // An eighth of those 20 was given up; frames 0 and 1 were saved first.
    assert_eq!((daemon.kept(), daemon.slots()), (18, 31));
    assert_eq!(daemon.evict(all), Evicted { saved: 2, clean: 17, ..Evicted::default() });
    for gfn in all.frames().chain(more.frames()) {
        daemon.reads(gfn, &first_of(gfn));
    }
}

/// Where words name nearly all of the slots, frames that are read again and again are still not
/// written.
#[test]
fn few_slots_are_kept_by_those_who_use_them() {
    require!(available());
    let run = tempfile::tempdir().unwrap();
    let others = FrameRange::new(Gfn(100), 240);
    let all = FrameRange::new(Gfn(0), 16);
    let daemon = Daemon::with_store(Box::new(swap_file(&run, 256)));
    for gfn in others.frames().chain(all.frames()) {
        daemon.write(gfn, &first_of(gfn));
    }
    assert_eq!((daemon.evict(others), daemon.evict(all)), (saved(240), saved(16)));
    for _ in 0..4 {
        daemon.bring_back(all);
        assert_eq!(daemon.evict(all), Evicted { saved: 2, clean: 14, ..Evicted::default() });
    }
    assert_eq!(daemon.slots(), 256);
}

/// The store has more slots than any part of the table of kept slots.
#[test]
fn slots_are_found_wherever_they_are() {
    require!(available());
    let run = tempfile::tempdir().unwrap();
    let path = run.path().join("swap");
    let store = SwapFile::open(&path, run.path(), 1 << 20, Protection::Checksum).unwrap();
    // They lie far behind the hand.
    let others = store.save_batch(&vec![first_of(Gfn(0)); 33_000]).slots;
    let daemon = Daemon::with_store(Box::new(store));
    FRAMES.frames().for_each(|gfn| daemon.write(gfn, &first_of(gfn)));
    assert_eq!(daemon.evict(FRAMES), saved(8));
    daemon.bring_back(FRAMES);
    assert_eq!((daemon.pager.residency().give_up_kept(3), daemon.kept()), (3, 5));
    assert_eq!((daemon.pager.residency().give_up_kept(9), daemon.kept()), (5, 0));
    assert_eq!(daemon.slots(), others.len() as u64);
}

/// Kept slots count against the quota, and are given up first.
#[test]
fn a_quota_is_for_those_who_need_it() {
    require!(available());
    let run = tempfile::tempdir().unwrap();
    let each_bytes = Some(16 * FRAME_BYTES);
    let quota = Quota { each_bytes, floor_bytes: Some(0), ..Quota::default() };
    let store = Box::new(swap_file(&run, 512).within(&SharedRoom::new(quota)));
    let all = FrameRange::new(Gfn(0), 12);
    let daemon = Daemon::with_store(store).with_kept(all);
    let more = FrameRange::new(Gfn(100), 12);
    more.frames().for_each(|gfn| daemon.write(gfn, &first_of(gfn)));
    assert_eq!(daemon.evict(more), saved(12));
    assert!(daemon.slots() <= 16 && daemon.kept() < 12, "{} {}", daemon.slots(), daemon.kept());
    // A frame that needs a slot and finds none stays; one that has a slot is evicted.
    let error =
        daemon.pager.evictor().evict(&all.frames().collect::<Vec<_>>(), &NothingKnown).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    assert!(daemon.slots() <= 16);
    for gfn in all.frames().chain(more.frames()) {
        daemon.reads(gfn, &first_of(gfn));
    }
}

#[test]
fn what_one_vm_keeps_another_may_have() {
    require!(available());
    gives_way_to_another(|_, file| Box::new(file));
}

#[test]
fn what_one_vm_keeps_behind_compressed_memory_another_may_have() {
    require!(available());
    gives_way_to_another(|run, file| Box::new(Compressed::open(run.path(), 0, file).unwrap()));
}

/// Two VMs share a quota.
fn gives_way_to_another(store: impl Fn(&TempDir, SwapFile) -> Box<dyn Store>) {
    let runs = [(); 2].map(|()| tempfile::tempdir_in("/dev/shm").unwrap());
    let all_bytes = Some(16 * FRAME_BYTES);
    let room = SharedRoom::new(Quota { all_bytes, floor_bytes: Some(0), ..Quota::default() });
    let [one, other] = runs
        .each_ref()
        .map(|run| Daemon::with_store(store(run, swap_file(run, 512).within(&room))));
    let one = one.with_kept(FrameRange::new(Gfn(0), 12));
    let frames: Vec<Gfn> = FRAMES.frames().collect();
    frames.iter().for_each(|&gfn| other.write(gfn, &first_of(gfn)));
    let evict = || other.pager.evictor().evict(&frames, &NothingKnown);
    assert_eq!(evict().unwrap_err().kind(), io::ErrorKind::StorageFull);
    assert_eq!(one.kept(), 12);
    one.pager.evictor().trim_store(false).unwrap();
    one.assert_none_kept();
    evict().unwrap();
    assert_eq!(other.slots(), FRAMES.count);
    // The other VM's need is told once.
    let one = one.with_kept(FrameRange::new(Gfn(0), 4));
    one.pager.evictor().trim_store(false).unwrap();
    assert_eq!(one.kept(), 4);
    FRAMES.frames().for_each(|gfn| other.reads(gfn, &first_of(gfn)));
}

/// A slot in memory is not kept, as it takes memory. The content of a slot on the disk is known,
/// even if the page came there by way of memory.
#[test]
fn no_slot_in_memory_is_kept() {
    require!(available());
    let run = tempfile::tempdir_in("/dev/shm").unwrap();
    let store = Compressed::open(run.path(), 1 << 20, swap_file(&run, 512)).unwrap();
    let daemon = Daemon::with_store(Box::new(store));
    for gfn in FRAMES.frames() {
        let mut page = page_of(0);
        page[0] = 20 + gfn.0 as u8;
        daemon.write(gfn, &page);
    }
    assert_eq!(daemon.evict(FRAMES), saved(8));
    assert_eq!(daemon.pager.residency().store_usage().compressed_pages, 8);
    daemon.bring_back(FRAMES);
    daemon.assert_none_kept();
    assert_eq!(daemon.pager.residency().store_usage().compressed_pages, 0);
    assert_eq!(daemon.evict(FRAMES), saved(8));
    daemon.pager.residency().limit_store_memory(0).unwrap();
    while daemon.pager.evictor().write_back().unwrap() > 0 {}
    assert_eq!(daemon.slots(), 8);
    daemon.bring_back(FRAMES);
    assert_eq!(daemon.evict(FRAMES), clean(8));
}

/// A page that moves from memory to the disk needs room there as well.
#[test]
fn what_is_kept_makes_room_for_what_moves_to_the_disk() {
    require!(available());
    let run = tempfile::tempdir_in("/dev/shm").unwrap();
    let each_bytes = Some(16 * FRAME_BYTES);
    let quota = Quota { each_bytes, floor_bytes: Some(0), ..Quota::default() };
    let file = swap_file(&run, 512).within(&SharedRoom::new(quota));
    let store = Compressed::open(run.path(), 1 << 20, file).unwrap();
    let daemon = Daemon::with_store(Box::new(store));
    let noise = |gfn: Gfn| -> Page {
        let mut state = gfn.0 + 1;
        std::array::from_fn(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
    };
    let kept = FrameRange::new(Gfn(100), 16);
    kept.frames().for_each(|gfn| daemon.write(gfn, &noise(gfn)));
    assert_eq!(daemon.evict(kept), saved(16));
    daemon.bring_back(kept);
    assert_eq!((daemon.kept(), daemon.slots()), (16, 16));
    let small = |gfn: Gfn| {
        let mut page = page_of(0);
        page[0] = 20 + gfn.0 as u8;
        page
    };
    FRAMES.frames().for_each(|gfn| daemon.write(gfn, &small(gfn)));
    assert_eq!(daemon.evict(FRAMES), saved(8));
    daemon.pager.residency().limit_store_memory(0).unwrap();
    while daemon.pager.evictor().write_back().unwrap() > 0 {}
    assert_eq!(daemon.pager.residency().store_usage().compressed_pages, 0);
    FRAMES.frames().for_each(|gfn| daemon.reads(gfn, &small(gfn)));
}
