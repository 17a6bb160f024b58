//! Memory that the VMM has unplugged for good: nothing of it is left on record, and all else is as
//! it was. This process is the guest.

#[allow(dead_code)]
mod machine;

use std::io;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use ebb_ledger::{Content, Ledger, Tables};
use ebb_pager::{DigestKey, Grain, NoDevices, NoDisk, NothingKnown, Pager, Parts};
use ebb_store::{Loaded, Page, Protection, SavedBatch, Store, StoreError, SwapFile, Usage};
use ebb_sys::mapping::Mapping;
use ebb_sys::process::Process;
use ebb_sys::ram_file::RamFile;
use ebb_sys::uffd::Uffd;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa, Hva};
use ebb_vm::ram::Backing;
use ebb_vm::{Ram, Region, unplugged};
use rustix::io::Errno;
use tempfile::TempDir;
use testkit::{require, until};

use machine::{available, new_uffd, page_of, serve};

const STAYS: FrameRange = FrameRange::new(Gfn(0), 512);
/// Memory that is unplugged: one huge frame, and a part of another.
const GOES: FrameRange = FrameRange::new(Gfn(512), 768);
const FILES: [FrameRange; 2] = [STAYS, GOES];
/// A frame that stays, with the metadata of a block in unplugged memory.
const METADATA: Gfn = Gfn(400);
const BLOCK: (Gfn, u8) = (Gfn(1024), 6);

/// A VM with two memory back-ends, as its VMM has it.
struct Machine {
    files: Vec<RamFile>,
    guest: Vec<Option<Mapping>>,
    places: Vec<Hva>,
    uffd: Uffd,
    /// The slot that cannot be read.
    bad: Arc<AtomicU64>,
    run: TempDir,
}

fn small_pages(file: &RamFile) -> Mapping {
    let mapping = Mapping::new(file, 0, file.bytes().unwrap()).unwrap();
    // A kernel without huge pages need not be told.
    let _ = mapping.use_huge_pages(false);
    mapping
}

impl Machine {
    fn new() -> Machine {
        let files = FILES.map(|frames| RamFile::create("gone", frames.bytes()).unwrap());
        let guest: Vec<Mapping> = files.iter().map(small_pages).collect();
        let places = guest.iter().map(Mapping::address).collect();
        Machine {
            files: files.into(),
            guest: guest.into_iter().map(Some).collect(),
            places,
            uffd: new_uffd().unwrap(),
            bad: Arc::new(AtomicU64::new(u64::MAX)),
            run: tempfile::tempdir().unwrap(),
        }
    }

    fn ram(&self) -> Ram {
        let backing = |file: &RamFile| {
            let file = RamFile::from(file.as_fd().try_clone_to_owned().unwrap());
            let mapping = small_pages(&file);
            Backing { file, mapping }
        };
        let region = |(file, frames): (usize, &FrameRange)| Region {
            gpa: frames.start.gpa(),
            bytes: frames.bytes(),
            hva: self.places[file],
            file,
            offset: 0,
        };
        let regions = FILES.iter().enumerate().map(region).collect();
        Ram::new(regions, self.files.iter().map(backing).collect()).unwrap()
    }

    fn words(&self, gfn: Gfn) -> &[AtomicU64] {
        let file = FILES.iter().position(|frames| frames.contains(gfn)).unwrap();
        let at = Gpa(gfn.gpa().0 - FILES[file].start.gpa().0);
        self.guest[file].as_ref().unwrap().words(at.0, 512).unwrap()
    }

    fn write(&self, gfn: Gfn, page: &Page) {
        for (word, bytes) in self.words(gfn).iter().zip(page.as_chunks().0) {
            word.store(u64::from_ne_bytes(*bytes), Relaxed);
        }
    }

    fn reads(&self, gfn: Gfn, page: &Page) -> bool {
        let mut each = self.words(gfn).iter().zip(page.as_chunks().0);
        each.all(|(word, bytes)| word.load(Relaxed) == u64::from_ne_bytes(*bytes))
    }
}

/// A swap file. Its daemon dies when it is about to free a slot after `left` others, and the slot
/// `bad` is on a bad sector.
struct Mortal {
    file: SwapFile,
    left: AtomicU64,
    bad: Arc<AtomicU64>,
}

impl Store for Mortal {
    fn save(&self, page: &Page) -> Result<u64, StoreError> {
        self.file.save(page)
    }
    fn save_batch(&self, pages: &[Page]) -> SavedBatch {
        self.file.save_batch(pages)
    }
    fn load(&self, slot: u64, page: &mut Page) -> Result<(), StoreError> {
        if slot == self.bad.load(Relaxed) {
            return Err(io::Error::from(Errno::IO).into());
        }
        self.file.load(slot, page)
    }
    fn load_batch(&self, slot: u64, pages: &mut [Page]) -> Result<Loaded, StoreError> {
        self.file.load_batch(slot, pages)
    }
    fn claim(&self, slot: u64) -> Result<(), StoreError> {
        self.file.claim(slot)
    }
    fn release(&self, slot: u64) {
        let left = self.left.fetch_sub(1, Relaxed);
        assert!(left > 0, "the daemon dies here");
        self.file.release(slot);
    }
    fn trim(&self) -> Result<(), StoreError> {
        self.file.trim()
    }
    fn usage(&self) -> Usage {
        self.file.usage()
    }
}

/// Makes the pager of a daemon that has attached the VM, or (`adopt`) has recovered it and undone
/// the work of the daemon before.
fn pager(machine: &Machine, adopt: bool, releases: u64) -> Arc<Pager> {
    let (run, ram) = (machine.run.path(), machine.ram());
    let ledger = match adopt {
        false => Ledger::create(&run.join("ledger"), ram.end(), Tables::WhenSplit).unwrap(),
        true => {
            let mut ledger = Ledger::open(&run.join("ledger"), ram.end()).unwrap();
            ledger.recover(|_, _| ());
            ledger
        }
    };
    let slots = ram.first_bytes() / FRAME_BYTES;
    let file = SwapFile::open(&run.join("swap"), run, slots, Protection::Encrypted).unwrap();
    let parts = Parts {
        ram: Arc::new(ram),
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

fn assert_gone(pager: &Pager) {
    assert_eq!(on_record(pager, GOES), (0, 0));
    let (slots, _) = on_record(pager, STAYS);
    let kept = SAVED - slots;
    let used = pager.residency().store_usage().disk_slots_used;
    assert_eq!(used, slots + kept, "each slot has its word, or is kept");
    let counters = &pager.counters();
    let counted = [&counters.saved_frames, &counters.clean_frames].map(|count| count.load(Relaxed));
    assert_eq!(counted, [slots, kept]);
    assert_eq!(pager.ram().files()[1].file.resident_bytes().unwrap(), 0);
}

/// Asserts that another holder of the memory keeps it until it ends: the daemon has it no more.
fn assert_let_go(machine: &mut Machine, gfn: Gfn) {
    let file = machine.files.remove(1);
    let mut page = [0; FRAME_BYTES as usize];
    file.read_at((gfn.0 - GOES.start.0) * FRAME_BYTES, &mut page).unwrap();
    assert!(page == page_of(gfn.0 + 2));
    let inode = file.identity().unwrap().1;
    drop(file);
    assert_eq!(unplugged::gone(&Process::own().unwrap(), &[inode]).unwrap(), [inode]);
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
    pager.returner().let_go(1).unwrap();
    assert_gone(&pager);
    // All but the watch on a block that is unplugged: a write of its metadata waits for nothing.
    assert_eq!(on_record(&pager, STAYS), (before.0, before.1 - 1));
    machine.write(METADATA, &page_of(10));
    pager.returner().let_go(1).unwrap();
    assert!(pager.blocks().claim(METADATA, BLOCK.0, BLOCK.1).unwrap().is_none());
    assert_eq!(
        pager.evictor().evict(&GOES.frames().collect::<Vec<_>>(), &NothingKnown).unwrap().frames(),
        0
    );
    pager.frames().watch_all().unwrap();
    pager.frames().watch_all_writes().unwrap();
    pager.frames().wake_all().unwrap();
    pager.returner().give_back_all().unwrap();
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
            let done = catch_unwind(AssertUnwindSafe(|| first.returner().let_go(1).unwrap()));
            if done.is_ok() {
                assert!(releases > 10, "there was hardly anything to free");
                return;
            }
        }
        let next = pager(&machine, true, u64::MAX);
        next.returner().let_go(1).unwrap();
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
    let gone = machine.places[1];
    pager.frames().check_mapped({
        let looks = Arc::clone(&looks);
        move |ranges| match looks.fetch_add(1, Relaxed) {
            // The mapping is there right before; then another takes its place.
            1 => Ok(ranges.iter().copied().filter(|range| range.start != gone).collect()),
            _ => Ok(ranges.to_vec()),
        }
    });
    pager.frames().watch_all().unwrap();
    // Nothing serves faults: a touch of a watched frame would hang.
    GOES.frames().take(4).for_each(|gfn| machine.write(gfn, &page_of(gfn.0 + 2)));
    assert_eq!(looks.load(Relaxed), 2);
}

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
    let away = |frames: FrameRange| {
        frames.frames().filter(|gfn| pager.ledger().content(*gfn).is_elsewhere()).count()
    };
    let before = [STAYS, GOES].map(away);
    assert!(pager.evictor().evict(&all, &NothingKnown).unwrap().frames() > 0);
    assert!(away(STAYS) > before[0] && away(GOES) == before[1] && before[1] > 10);
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
    let before = away(STAYS);
    assert!(before > 10);
    pager.returner().give_back_unmapped(&[]).unwrap();
    let reads_as_zero =
        |gfn: &Gfn| matches!(pager.ledger().content(*gfn), Content::Empty { fill: 0, .. });
    assert!(away(GOES) == 0 && GOES.frames().any(|gfn| reads_as_zero(&gfn)));
    assert_eq!(away(STAYS), before);
    pager.frames().watch_all_writes().unwrap();
    pager.returner().give_back_all().unwrap();
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
    pager.returner().give_back_all().unwrap();
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
    let away = GOES.frames().find_map(|gfn| match content(gfn) {
        Content::Saved { slot } => Some(slot),
        _ => None,
    });
    machine.bad.store(away.expect("some that is saved"), Relaxed);
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
