//! Memory that the VMM has mapped nowhere, or again at the same place.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use ebb_ledger::Content;
use ebb_pager::testing::{available, page_of, serve};
use ebb_pager::{NothingKnown, Pager, Zeros};
use ebb_sys::process::Process;
use ebb_sys::ram_file::RamFile;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};
use ebb_vm::unplugged;
use testkit::require;

use crate::vmm::{FILES, GOES, Machine, STAYS, small_pages};
use crate::{BLOCK, on_record, pager, take, until_all_are_back};

/// Makes a pager that checks where the VMM has its memory mapped, as the daemon's does.
fn that_looks_at_mappings(machine: &Machine) -> Arc<Pager> {
    let pager = pager(machine, false, u64::MAX);
    pager.frames().check_mapped({
        let (vmm, ram) = (Process::own().unwrap(), Arc::clone(pager.ram()));
        move |ranges| unplugged::mapped(&vmm, &ram, ranges)
    });
    pager
}

/// A descriptor of the memory is open, by which the VMM can map it again.
#[test]
fn what_is_mapped_nowhere_stays_and_comes_back_into_its_file() {
    require!(available());
    let mut machine = Machine::new();
    let pager = that_looks_at_mappings(&machine);
    pager.frames().watch_all().unwrap();
    let _threads = serve(&pager, 1);
    take(&machine, &pager);
    // In one batch, and so adjacent in the store.
    let (near, far) = (Gfn(STAYS.start.0 + 101), Gfn(GOES.start.0 + 101));
    [near, far].iter().for_each(|&gfn| machine.write(gfn, &page_of(gfn.0 + 2)));
    assert_eq!(pager.evictor().evict(&[near, far], &NothingKnown).unwrap().saved, 2);
    assert_eq!(pager.frames().unmapped().unwrap(), []);
    // The VMM maps something else there.
    let (other, place) = (RamFile::create("other", GOES.bytes()).unwrap(), machine.guest[1].take());
    place.as_ref().unwrap().replace(&other).unwrap();
    assert_eq!(pager.frames().unmapped().unwrap(), [GOES]);
    // None of it is evicted any more, and it keeps nothing else from eviction.
    let all: Vec<Gfn> = [STAYS, GOES].iter().flat_map(|frames| frames.frames()).collect();
    let evicted = |frames: FrameRange| {
        frames.frames().filter(|gfn| pager.ledger().content(*gfn).is_evicted()).count()
    };
    let before = [STAYS, GOES].map(evicted);
    assert!(pager.evictor().evict(&all, &NothingKnown).unwrap().frames() > 0);
    assert!(evicted(STAYS) > before[0] && evicted(GOES) == before[1] && before[1] > 10);
    // A fault on a frame adjacent in the store brings nothing of it back.
    assert!(machine.reads(near, &page_of(near.0 + 2)));
    until_all_are_back(&pager);
    assert!(matches!(pager.ledger().content(far), Content::Saved { .. }));
    // A device of ours uses a frame there that reads as zero: the frame gets its memory in the
    // file.
    pager.devices().pin(FrameRange::new(BLOCK.0, 1), false).unwrap();
    pager.devices().unpin(FrameRange::new(BLOCK.0, 1));
    assert_eq!(pager.ledger().content(BLOCK.0), Content::Resident);
    let at = (BLOCK.0.0 - GOES.start.0) * FRAME_BYTES;
    let mut page = [1; FRAME_BYTES as usize];
    machine.files[1].read_at(at, &mut page).unwrap();
    assert!(page == [0; FRAME_BYTES as usize]);
    // Once this is noticed, none of its content that is in use is evicted, and all else stays.
    let before = evicted(STAYS);
    assert!(before > 10);
    pager.returner().give_back_unmapped(&[]).unwrap();
    let reads_as_zero =
        |gfn: &Gfn| matches!(pager.ledger().content(*gfn), Content::Empty { fill: 0, .. });
    assert!(evicted(GOES) == 0 && GOES.frames().any(|gfn| reads_as_zero(&gfn)));
    assert_eq!(evicted(STAYS), before);
    pager.frames().watch_all_writes().unwrap();
    pager.returner().give_back_all(Zeros::Fill).unwrap();
    assert_eq!((on_record(&pager, GOES), on_record(&pager, STAYS)), ((0, 0), (0, 0)));
    pager.frames().unwatch_all().unwrap();
    assert_eq!(other.resident_bytes().unwrap(), 0);
    machine.guest[1] = Some(small_pages(&machine.files[1]));
    for frames in FILES {
        for gfn in frames.frames().take(24).chain([Gfn(frames.end().0 - 1), near, far]) {
            let page = page_of(if gfn.0 % 4 == 0 { 1 } else { gfn.0 + 2 });
            assert!(machine.reads(gfn, &page), "{gfn:?}");
        }
    }
}

/// The memory is mapped again at the same place: it is not watched, and looks as it was.
#[test]
fn what_was_mapped_again_comes_back_though_a_frame_of_it_fails() {
    require!(available());
    let machine = Machine::new();
    let pager = that_looks_at_mappings(&machine);
    let some = |frames: FrameRange| frames.frames().take(24).collect::<Vec<Gfn>>();
    let all = [some(STAYS), some(GOES)].concat();
    all.iter().for_each(|&gfn| machine.write(gfn, &page_of(gfn.0 + 2)));
    pager.frames().watch_all().unwrap();
    assert_eq!(pager.evictor().evict(&all, &NothingKnown).unwrap().saved, all.len() as u64);
    machine.guest[1].as_ref().unwrap().replace(&machine.files[1]).unwrap();
    assert_eq!(pager.frames().unmapped().unwrap(), []);
    let slot = |gfn: Gfn| match pager.ledger().content(gfn) {
        Content::Saved { slot } => Some(slot),
        _ => None,
    };
    let first = some(GOES)[0];
    machine.bad.store(slot(first).unwrap(), Relaxed);
    let error = pager.returner().give_back_unmapped(&[1]).unwrap_err();
    assert!(error.to_string().contains("nput/output"), "{error}");
    let saved = |gfn: &Gfn| slot(*gfn).is_some();
    assert_eq!(some(GOES).into_iter().filter(saved).collect::<Vec<_>>(), [first]);
    machine.bad.store(u64::MAX, Relaxed);
    pager.returner().give_back_unmapped(&[1]).unwrap();
    assert!(some(STAYS).iter().all(saved), "the other file is in no doubt");
    // Nothing serves faults: what did not come back would be zeros.
    some(GOES).iter().for_each(|&gfn| assert!(machine.reads(gfn, &page_of(gfn.0 + 2)), "{gfn:?}"));
    pager.returner().give_back_all(Zeros::Fill).unwrap();
    pager.frames().unwatch_all().unwrap();
}

/// A frame that came back keeps its slot, whose content is compared when the frame is evicted
/// again. This holds even where nobody saw the write, because the VMM has mapped the memory again.
#[test]
fn what_was_mapped_again_and_written_is_saved_anew_though_a_frame_fails() {
    require!(available());
    let machine = Machine::new();
    let pager = that_looks_at_mappings(&machine);
    pager.frames().watch_all().unwrap();
    let threads = serve(&pager, 1);
    take(&machine, &pager);
    drop(threads);
    let content = |gfn: Gfn| pager.ledger().content(gfn);
    // The frame that `take` read.
    let (kept, resident) = (Gfn(GOES.start.0 + 1), Gfn(GOES.start.0 + 200));
    assert_eq!(content(kept), Content::Resident);
    machine.guest[1].as_ref().unwrap().replace(&machine.files[1]).unwrap();
    [kept, resident].iter().for_each(|&gfn| machine.write(gfn, &page_of(77)));
    // An evicted frame cannot be read.
    let evicted = GOES.frames().find_map(|gfn| match content(gfn) {
        Content::Saved { slot } => Some(slot),
        _ => None,
    });
    machine.bad.store(evicted.expect("some that is saved"), Relaxed);
    pager.returner().give_back_unmapped(&[1]).unwrap_err();
    // Watched again, it is evicted only once all of it is back.
    pager.frames().watch_all().unwrap();
    let both = [kept, resident];
    assert_eq!(pager.evictor().evict(&both, &NothingKnown).unwrap().frames(), 0);
    machine.bad.store(u64::MAX, Relaxed);
    pager.returner().give_back_unmapped(&[1]).unwrap();
    assert_eq!(pager.evictor().evict(&both, &NothingKnown).unwrap().saved, 2);
    let _threads = serve(&pager, 1);
    both.iter().for_each(|&gfn| assert!(machine.reads(gfn, &page_of(77)), "{gfn:?}"));
}
