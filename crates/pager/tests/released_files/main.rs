//! Memory that the VMM has unplugged for good: nothing of it is left on record, and all else is as
//! it was. This process is the guest.

mod mortal;
mod unmapped;
mod vmm;

use std::io;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use ebb_ledger::{Content, Ledger, Tables};
use ebb_pager::testing::{available, page_of, serve};
use ebb_pager::{DigestKey, Grain, NoDevices, NoDisk, NothingKnown, Pager, PagerParts, Zeros};
use ebb_store::{Protection, SwapFile};
use ebb_sys::process::Process;
use ebb_sys::uffd::Uffd;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};
use ebb_vm::{Puncher, unplugged};
use testkit::{require, until};

use mortal::Mortal;
use vmm::{FILES, GOES, Machine, STAYS};

/// A frame that stays, with the metadata of a block in unplugged memory.
const METADATA: Gfn = Gfn(400);
const BLOCK: (Gfn, u8) = (Gfn(1024), 6);

/// Makes the pager of a daemon that has attached the VM, or (`recovers`) has recovered it and
/// undone the work of the daemon before.
fn pager(machine: &Machine, recovers: bool, releases: u64) -> Arc<Pager> {
    let (run, ram) = (machine.run.path(), machine.ram());
    let ledger = match recovers {
        false => Ledger::create(&run.join("ledger"), ram.end(), Tables::WhenSplit).unwrap(),
        true => {
            let mut ledger = Ledger::open(&run.join("ledger"), ram.end()).unwrap();
            ledger.recover(|_, _| ());
            ledger
        }
    };
    let slots = ram.first_bytes() / FRAME_BYTES;
    let file = SwapFile::open(&run.join("swap"), run, slots, Protection::Encrypted).unwrap();
    let parts = PagerParts {
        puncher: Puncher::new(ram),
        ledger,
        uffd: Uffd::from(machine.uffd.as_fd().try_clone_to_owned().unwrap()),
        grain: Grain::Frame,
        devices: Box::new(NoDevices),
        store: Box::new(Mortal {
            file,
            left: AtomicU64::new(releases),
            bad: Arc::clone(&machine.bad),
        }),
        disk: Box::new(NoDisk),
        digest_key: Arc::new(DigestKey::random().unwrap()),
    };
    Arc::new(Pager::new(parts).unwrap().0)
}

/// Waits for the threads that bring frames back: the guest goes on as soon as its own frame is
/// there.
fn until_all_are_back(pager: &Pager) {
    let is_free = |gfn: Gfn| pager.ledger().unlocked(gfn).is_some();
    until("nobody to hold a frame", || {
        FILES.iter().flat_map(|frames| frames.frames()).all(is_free).then_some(())
    });
}

/// Number of frames of each range that [`take`] saves.
const SAVED: u64 = 19;

/// Evicts frames of each range: saved ones, ones of a single byte, and saved ones that were read
/// since, which keep their slots. Then reclaims the block.
fn take(machine: &Machine, pager: &Arc<Pager>) {
    for frames in FILES {
        let some: Vec<Gfn> = frames.frames().take(24).chain([Gfn(frames.end().0 - 1)]).collect();
        for &gfn in &some {
            machine.write(gfn, &page_of(if gfn.0 % 4 == 0 { 1 } else { gfn.0 + 2 }));
        }
        assert_eq!(pager.evictor().evict(&some, &NothingKnown).unwrap().saved, SAVED);
        assert!(machine.reads(some[1], &page_of(some[1].0 + 2)));
    }
    until_all_are_back(pager);
    machine.write(METADATA, &page_of(9));
    let claim = pager.blocks().claim(METADATA, BLOCK.0, BLOCK.1).unwrap().expect("a claim");
    let committed = claim.commit(true, 0).expect("committed");
    pager.blocks().empty(&mut vec![committed], true).unwrap();
}

/// Returns how many frames of a range are saved on record, and how many are anything but resident.
fn on_record(pager: &Pager, frames: FrameRange) -> (u64, u64) {
    let slot = |gfn: &Gfn| matches!(pager.ledger().content(*gfn), Content::Saved { .. });
    let odd = |gfn: &Gfn| pager.ledger().content(*gfn) != Content::Resident;
    let count =
        |what: &dyn Fn(&Gfn) -> bool| frames.frames().filter(|gfn| what(gfn)).count() as u64;
    (count(&slot), count(&odd))
}

fn assert_released(pager: &Pager) {
    assert_eq!(on_record(pager, GOES), (0, 0));
    let (slots, _) = on_record(pager, STAYS);
    let kept = SAVED - slots;
    let used = pager.residency().store_usage().disk_slots_used;
    assert_eq!(used, slots + kept, "each slot has its word, or is kept");
    let counters = &pager.counters();
    let counted = [&counters.saved_frames, &counters.clean_frames].map(|count| count.load(Relaxed));
    assert_eq!(counted, [slots, kept]);
    assert_eq!(pager.ram().files()[1].resident_bytes().unwrap(), 0);
}

/// Asserts that another holder of the memory keeps it until it ends: the daemon has it no more.
fn assert_let_go(machine: &mut Machine, gfn: Gfn) {
    let file = machine.files.remove(1);
    let mut page = [0; FRAME_BYTES as usize];
    file.read_at((gfn.0 - GOES.start.0) * FRAME_BYTES, &mut page).unwrap();
    assert!(page == page_of(gfn.0 + 2));
    let inode = file.identity().unwrap().1;
    drop(file);
    assert_eq!(unplugged::absent(&Process::own().unwrap(), &[inode]).unwrap(), [inode]);
}

#[test]
fn what_is_unplugged_leaves_nothing_and_the_rest_is_as_it_was() {
    require!(available());
    let mut machine = Machine::new();
    let pager = pager(&machine, false, u64::MAX);
    pager.frames().watch_all().unwrap();
    let _threads = serve(&pager, 1);
    take(&machine, &pager);
    let before = on_record(&pager, STAYS);
    assert!([on_record(&pager, GOES).0, before.0].iter().all(|slots| (5..SAVED).contains(slots)));
    let resident = Gfn(GOES.start.0 + 200);
    machine.write(resident, &page_of(resident.0 + 2));
    machine.guest[1] = None;
    pager.returner().release_file(1).unwrap();
    assert_released(&pager);
    // All but the watch on a block that is unplugged: a write of its metadata waits for nothing.
    assert_eq!(on_record(&pager, STAYS), (before.0, before.1 - 1));
    machine.write(METADATA, &page_of(10));
    pager.returner().release_file(1).unwrap();
    assert!(pager.blocks().claim(METADATA, BLOCK.0, BLOCK.1).unwrap().is_none());
    assert_eq!(
        pager.evictor().evict(&GOES.frames().collect::<Vec<_>>(), &NothingKnown).unwrap().frames(),
        0
    );
    pager.frames().watch_all().unwrap();
    pager.frames().watch_all_writes().unwrap();
    pager.frames().wake_all().unwrap();
    pager.returner().give_back_all(Zeros::Fill).unwrap();
    for gfn in STAYS.frames().take(24) {
        let page = page_of(if gfn.0 % 4 == 0 { 1 } else { gfn.0 + 2 });
        assert!(machine.reads(gfn, &page), "{gfn:?}");
    }
    assert_eq!(pager.residency().store_usage().disk_slots_used, 0);
    pager.frames().unwatch_all().unwrap();
    assert_let_go(&mut machine, resident);
}

/// Wherever a daemon dies in this, the next one does it again, and no slot is lost or freed twice.
#[test]
fn a_daemon_that_dies_over_it_leaves_it_to_the_next() {
    require!(available());
    for releases in 0.. {
        let mut machine = Machine::new();
        {
            let first = pager(&machine, false, releases);
            first.frames().watch_all().unwrap();
            let faults = serve(&first, 1);
            take(&machine, &first);
            drop(faults);
            machine.guest[1] = None;
            let done = catch_unwind(AssertUnwindSafe(|| first.returner().release_file(1).unwrap()));
            if done.is_ok() {
                assert!(releases > 10, "there was hardly anything to free");
                return;
            }
        }
        let next = pager(&machine, true, u64::MAX);
        next.returner().release_file(1).unwrap();
        next.returner().settle().unwrap();
        assert_eq!(on_record(&next, GOES), (0, 0));
        assert_eq!(next.residency().store_usage().disk_slots_used, on_record(&next, STAYS).0);
    }
}

#[test]
fn what_is_not_the_guests_any_more_is_not_watched() {
    require!(available());
    let machine = Machine::new();
    let pager = pager(&machine, false, u64::MAX);
    let looks = Arc::new(AtomicU64::new(0));
    let unplugged = machine.places[1];
    pager.frames().check_mapped({
        let looks = Arc::clone(&looks);
        move |ranges| match looks.fetch_add(1, Relaxed) {
            // The mapping is there right before; then another takes its place.
            1 => Ok(ranges.iter().copied().filter(|range| range.start != unplugged).collect()),
            _ => Ok(ranges.to_vec()),
        }
    });
    pager.frames().watch_all().unwrap();
    // Nothing serves faults: a touch of a watched frame would hang.
    GOES.frames().take(4).for_each(|gfn| machine.write(gfn, &page_of(gfn.0 + 2)));
    assert_eq!(looks.load(Relaxed), 2);
}

#[test]
fn who_cannot_look_unwatches_nothing() {
    require!(available());
    let machine = Machine::new();
    let pager = pager(&machine, false, u64::MAX);
    let some: Vec<Gfn> = STAYS.frames().take(24).collect();
    some.iter().for_each(|&gfn| machine.write(gfn, &page_of(gfn.0 + 2)));
    pager.frames().watch_all().unwrap();
    let _threads = serve(&pager, 1);
    pager.evictor().evict(&some, &NothingKnown).unwrap();
    let looks = AtomicU64::new(0);
    pager.frames().check_mapped(move |ranges| match looks.fetch_add(1, Relaxed) {
        1 => Err(io::Error::other("too many open files")),
        _ => Ok(ranges.to_vec()),
    });
    pager.frames().watch_all().unwrap();
    some.iter().for_each(|&gfn| assert!(machine.reads(gfn, &page_of(gfn.0 + 2)), "{gfn:?}"));
}
