//! Frames that came back keep their slot, and are evicted again without a write if they hold what
//! they held. Each slot is freed once, whatever becomes of its frame. This process is the guest.

#[allow(dead_code)]
mod machine;

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use ebb_ledger::Content;
use ebb_pager::{Evicted, Grain, IoMapping, Judge, NothingKnown, Pager, Parts};
use ebb_store::{Compressed, Page, Protection, Quota, Room, Store, SwapFile};
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};
use tempfile::TempDir;
use testkit::{require, until};

use machine::{Machine, Threads, available, page_of, serve, watching};

const ALL: FrameRange = FrameRange::new(Gfn(0), 512);
const FRAMES: FrameRange = FrameRange::new(Gfn(0), 8);

struct Daemon {
    machine: Machine,
    pager: Arc<Pager>,
    _threads: Threads,
}

fn first_of(gfn: Gfn) -> Page {
    page_of(gfn.0 + 20)
}

impl Daemon {
    fn over(machine: Machine, parts: Parts) -> Daemon {
        let pager = watching(parts);
        let _threads = serve(&pager, 1);
        Daemon { machine, pager, _threads }
    }

    fn new() -> Daemon {
        let machine = Machine::new();
        let parts = machine.parts();
        Daemon::over(machine, parts)
    }

    fn with_store(store: Box<dyn Store>) -> Daemon {
        let machine = Machine::new();
        let parts = Parts { store, ..machine.parts() };
        Daemon::over(machine, parts)
    }

    /// Makes frames that were saved, came back, and keep their slots.
    fn with_kept(self, frames: FrameRange) -> Daemon {
        frames.frames().for_each(|gfn| self.write(gfn, &first_of(gfn)));
        assert_eq!(self.evict(frames).saved, frames.count);
        self.bring_back(frames);
        assert_eq!((self.kept(), self.slots()), (frames.count, frames.count));
        self
    }

    fn bring_back(&self, frames: FrameRange) {
        let guest = self.machine.guest();
        for gfn in frames.frames() {
            let _ = guest.read(gfn);
        }
        // The thread that serves a fault unlocks the frame a little later than the guest goes on.
        let is_back = |gfn| self.pager.ledger().unlocked(gfn) == Some(Content::Resident);
        until("all to be back", || frames.frames().all(is_back).then_some(()));
    }

    fn write(&self, gfn: Gfn, page: &Page) {
        self.machine.guest().write(gfn, page);
    }

    fn evict(&self, frames: FrameRange) -> Evicted {
        self.pager.evictor().evict(&frames.frames().collect::<Vec<Gfn>>(), &NothingKnown).unwrap()
    }

    fn kept(&self) -> u64 {
        self.pager.counters().clean_frames.load(Relaxed)
    }

    fn slots(&self) -> u64 {
        self.pager.residency().store_usage().disk_slots_used
    }

    fn reads(&self, gfn: Gfn, page: &Page) {
        assert!(self.machine.guest().read(gfn) == *page, "{gfn:?}");
    }

    /// Asserts that no frame keeps a slot, and that no slot is lost.
    fn assert_none_kept(&self) {
        assert_eq!((self.kept(), self.slots()), (0, 0));
    }
}

fn swap_file(run: &TempDir, slots: u64) -> SwapFile {
    let (run, path) = (run.path(), run.path().join("swap"));
    SwapFile::open(&path, run, slots, Protection::Encrypted).unwrap()
}

fn clean(count: u64) -> Evicted {
    Evicted { clean: count, ..Evicted::default() }
}

fn saved(count: u64) -> Evicted {
    Evicted { saved: count, ..Evicted::default() }
}

#[test]
fn what_is_not_changed_goes_without_a_write() {
    require!(available());
    let daemon = Daemon::new().with_kept(FRAMES);
    for _ in 0..3 {
        assert_eq!(daemon.evict(FRAMES), clean(FRAMES.count));
        assert_eq!((daemon.kept(), daemon.slots()), (0, FRAMES.count));
        daemon.bring_back(FRAMES);
        assert_eq!(daemon.kept(), FRAMES.count);
    }
    FRAMES.frames().for_each(|gfn| daemon.reads(gfn, &first_of(gfn)));
}

/// The touch writes, as the kernel's asynchronous faults do.
#[test]
fn a_touch_that_is_a_write_keeps_the_slot_and_costs_no_second_fault() {
    require!(available());
    let daemon = Daemon::new().with_kept(FRAMES);
    assert_eq!(daemon.evict(FRAMES), clean(FRAMES.count));
    // Writes what is there already, from the last byte to the first.
    FRAMES.frames().for_each(|gfn| daemon.write(gfn, &first_of(gfn)));
    daemon.bring_back(FRAMES);
    assert_eq!(daemon.pager.counters().metadata.load(Relaxed), 0);
    assert_eq!(daemon.kept(), FRAMES.count);
    assert_eq!(daemon.evict(FRAMES), clean(FRAMES.count));
}

#[test]
fn a_changed_byte_is_saved_and_what_is_as_it_was_again_is_not() {
    require!(available());
    let daemon = Daemon::new().with_kept(FRAMES);
    for at in [0, 7, 8, 2048, 4095] {
        for gfn in [2, 5].map(Gfn) {
            let mut page = first_of(gfn);
            page[at] ^= 1;
            daemon.write(gfn, &page);
            let last = if gfn.0 == 2 { page } else { first_of(gfn) };
            daemon.write(gfn, &last);
        }
        let expected = Evicted { saved: 1, clean: 7, ..Evicted::default() };
        assert_eq!(daemon.evict(FRAMES), expected, "byte {at}");
        assert_eq!((daemon.kept(), daemon.slots()), (0, FRAMES.count));
        daemon.bring_back(FRAMES);
        let mut page = first_of(Gfn(2));
        page[at] ^= 1;
        daemon.reads(Gfn(2), &page);
        daemon.reads(Gfn(5), &first_of(Gfn(5)));
    }
}

/// The writes bypass all page tables: a device of ours makes them, or QEMU's.
#[test]
fn a_write_by_any_way_is_seen() {
    require!(available());
    let daemon = Daemon::new().with_kept(FRAMES);
    let frame = FrameRange::new(Gfn(3), 1);
    daemon.pager.devices().pin(frame, false).unwrap();
    assert_eq!(daemon.evict(frame).frames(), 0);
    Machine::put(daemon.pager.ram(), Gfn(3), &page_of(77));
    daemon.pager.devices().unpin(frame);
    assert_eq!(daemon.evict(frame), saved(1));
    daemon.reads(Gfn(3), &page_of(77));
    // The frame is punched, as by a balloon.
    daemon.bring_back(FRAMES);
    Machine::punch(daemon.pager.ram(), frame).unwrap();
    daemon.reads(Gfn(3), &page_of(0));
    assert_eq!(daemon.evict(frame), Evicted { empty: 1, ..Evicted::default() });
    assert_eq!((daemon.kept(), daemon.slots()), (FRAMES.count - 1, FRAMES.count - 1));
}

/// A judge that touches the frames while they are about to be evicted.
struct Asks<'a>(&'a Pager);

impl Judge for Asks<'_> {
    fn is_dead(&self, _gfn: Gfn) -> bool {
        false
    }

    fn settled(&self, frames: &[Gfn]) -> Vec<bool> {
        // The fault thread leaves the same mark.
        for &gfn in frames {
            let _ = self.0.ledger().want(gfn);
        }
        vec![true; frames.len()]
    }

    fn in_use(&self, frames: &[Gfn]) -> Vec<bool> {
        vec![false; frames.len()]
    }
}

#[test]
fn a_frame_that_is_written_meanwhile_stays_and_keeps_its_slot() {
    require!(available());
    let daemon = Daemon::new().with_kept(FRAMES);
    let frames: Vec<Gfn> = FRAMES.frames().collect();
    let evicted = daemon.pager.evictor().evict(&frames, &Asks(&daemon.pager)).unwrap();
    assert_eq!(evicted, Evicted { abandoned: FRAMES.count, ..Evicted::default() });
    assert_eq!((daemon.kept(), daemon.slots()), (FRAMES.count, FRAMES.count));
    assert_eq!(daemon.evict(FRAMES), clean(FRAMES.count));
}

#[test]
fn whatever_becomes_of_a_frame_its_slot_is_freed_once() {
    require!(available());
    type Act = fn(&Daemon);
    let ways: [(&str, Act); 8] = [
        ("given back", |daemon| assert_eq!(daemon.pager.returner().give_back_all().unwrap(), 0)),
        ("not to go again", |daemon| daemon.pager.evictor().trim_store(true).unwrap()),
        ("given up", |daemon| assert_eq!(daemon.pager.residency().give_up_kept(99), 8)),
        ("unplugged", |daemon| daemon.pager.pluggable().guard(ALL).unwrap()),
        ("in a block that is emptied", |daemon| {
            let claim = daemon.pager.blocks().claim(Gfn(64), Gfn(0), 3).unwrap().expect("a claim");
            let committed = claim.commit(true, 0).expect("nobody wants it");
            assert_eq!(daemon.pager.blocks().empty(&mut vec![committed], true).unwrap(), 8);
        }),
        ("in a block that nothing is recorded of", |daemon| {
            let claim = daemon.pager.blocks().claim(Gfn(64), Gfn(0), 3).unwrap().expect("a claim");
            let committed = claim.commit(false, 0).expect("nobody wants it");
            assert_eq!(daemon.pager.blocks().empty(&mut vec![committed], false).unwrap(), 8);
        }),
        ("in a huge frame that is emptied", |daemon| {
            let held = daemon.pager.residency().hold_huge(Gfn(0).huge()).expect("nobody holds it");
            let Ok(held) = held.record() else { panic!("it is free") };
            daemon.pager.residency().empty_huge([&held].into_iter()).unwrap();
            held.settle(false);
        }),
        ("filled with a byte", |daemon| {
            FRAMES.frames().for_each(|gfn| daemon.write(gfn, &page_of(1)));
            assert_eq!(daemon.evict(FRAMES).empty, 8);
        }),
    ];
    for (way, act) in ways {
        println!("{way}");
        let daemon = Daemon::new().with_kept(FRAMES);
        act(&daemon);
        daemon.assert_none_kept();
        // Other frames get its slots now.
        let others = FrameRange::new(Gfn(100), 16);
        let content = daemon.pager.ledger().content(Gfn(100));
        if content != Content::Guarded {
            others.frames().for_each(|gfn| daemon.write(gfn, &first_of(gfn)));
            assert_eq!(daemon.evict(others).saved, 16);
            others.frames().for_each(|gfn| daemon.reads(gfn, &first_of(gfn)));
        }
    }
}

/// A frame that is overwritten without being read, or is dead, never holds again what its slot
/// holds.
#[test]
fn a_frame_that_is_replaced_keeps_nothing() {
    require!(available());
    let daemon = Daemon::new().with_kept(FRAMES);
    assert_eq!(daemon.evict(FRAMES), clean(FRAMES.count));
    daemon.pager.devices().pin(FRAMES, true).unwrap();
    daemon.pager.devices().unpin(FRAMES);
    daemon.assert_none_kept();
}

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
    let away = FrameRange::new(Gfn(100), 240);
    let all = FrameRange::new(Gfn(0), 16);
    let daemon = Daemon::with_store(Box::new(swap_file(&run, 256)));
    for gfn in away.frames().chain(all.frames()) {
        daemon.write(gfn, &first_of(gfn));
    }
    assert_eq!((daemon.evict(away), daemon.evict(all)), (saved(240), saved(16)));
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
    let store = Box::new(swap_file(&run, 512).within(&Room::new(quota)));
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
    let room = Room::new(Quota { all_bytes, floor_bytes: Some(0), ..Quota::default() });
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
    daemon.pager.residency().limit_store_memory(0);
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
    let file = swap_file(&run, 512).within(&Room::new(quota));
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
    daemon.pager.residency().limit_store_memory(0);
    while daemon.pager.evictor().write_back().unwrap() > 0 {}
    assert_eq!(daemon.pager.residency().store_usage().compressed_pages, 0);
    FRAMES.frames().for_each(|gfn| daemon.reads(gfn, &small(gfn)));
}

#[test]
fn frames_in_huge_pages_keep_their_slots_too() {
    require!(available());
    let setting = testkit::HostSetting::shared_huge_pages();
    require!(setting.as_ref());
    let (machine, run) = (Machine::of(Grain::Huge), tempfile::tempdir().unwrap());
    let parts = Parts { store: Box::new(swap_file(&run, 1024)), ..machine.parts() };
    let daemon = Daemon::over(machine, parts).with_kept(ALL);
    daemon.write(Gfn(9), &page_of(9));
    assert_eq!(daemon.evict(ALL), Evicted { saved: 1, clean: 511, ..Evicted::default() });
    // All of the huge frame is evicted, or nothing.
    daemon.bring_back(ALL);
    daemon.write(Gfn(9), &page_of(10));
    struct NotOne;
    impl Judge for NotOne {
        fn is_dead(&self, _gfn: Gfn) -> bool {
            false
        }
        fn settled(&self, frames: &[Gfn]) -> Vec<bool> {
            frames.iter().map(|gfn| gfn.0 != 7).collect()
        }
        fn in_use(&self, frames: &[Gfn]) -> Vec<bool> {
            vec![false; frames.len()]
        }
    }
    let evicted = daemon.pager.evictor().evict(&ALL.frames().collect::<Vec<_>>(), &NotOne).unwrap();
    assert_eq!((evicted.frames(), evicted.in_flight, daemon.kept()), (0, 1, 512));
    daemon.bring_back(ALL);
    daemon.reads(Gfn(9), &page_of(10));
}

/// A device at which the daemon dies when frames are about to be punched, once that was asked for.
struct Dies(Arc<AtomicU64>);

impl IoMapping for Dies {
    fn map(&self, _: FrameRange) {}

    fn unmap(&self, _: FrameRange) -> bool {
        assert!(self.0.load(Relaxed) == 0, "the daemon dies here");
        true
    }

    fn lost(&self, _: FrameRange) {}
}

/// Either the words name the slots while the pages are still there, or the pages have come back,
/// and the next daemon knows of no kept slot.
#[test]
fn a_daemons_death_frees_what_no_word_names() {
    require!(available());
    for at_work in [true, false] {
        let (machine, dies) = (Machine::new(), Arc::new(AtomicU64::new(0)));
        let parts = Parts { devices: Box::new(Dies(Arc::clone(&dies))), ..machine.parts() };
        let daemon = Daemon::over(machine, parts).with_kept(FRAMES);
        if at_work {
            daemon.write(Gfn(2), &page_of(77));
            dies.store(1, Relaxed);
            catch_unwind(AssertUnwindSafe(|| daemon.evict(FRAMES))).unwrap_err();
        }
        let Daemon { machine, pager, _threads } = daemon;
        drop((_threads, pager));
        let mut parts = machine.parts_left();
        parts.ledger.recover(|_, _| ());
        let next = Pager::new(parts).unwrap().0;
        next.returner().settle().unwrap();
        assert_eq!(next.ledger().runs().count(), 0);
        assert_eq!(next.residency().store_usage().disk_slots_used, 0);
        next.frames().unprotect(FrameRange::new(Gfn(0), 512)).unwrap();
        let guest = machine.guest();
        for gfn in FRAMES.frames() {
            let page = if at_work && gfn.0 == 2 { page_of(77) } else { first_of(gfn) };
            assert!(guest.read(gfn) == page, "{gfn:?}");
        }
    }
}

/// A daemon of an older version protected frames that it called clean, and their words name the
/// slots.
#[test]
fn what_an_older_daemon_called_clean_is_plain_memory() {
    require!(available());
    let daemon = Daemon::new().with_kept(FRAMES);
    let Daemon { machine, pager, _threads } = daemon;
    drop(_threads);
    for (gfn, slot) in FRAMES.frames().zip(0..) {
        let _ = pager.ledger().lock_frame(gfn).unwrap().unlock(Content::Clean { slot });
    }
    machine.uffd().protect(pager.ram().hva_range(FRAMES).unwrap()).unwrap();
    // The VMM has punched one frame, as a balloon does.
    Machine::punch(pager.ram(), FrameRange::new(Gfn(7), 1)).unwrap();
    drop(pager);
    let mut parts = machine.parts_left();
    parts.ledger.recover(|_, _| ());
    let next = Pager::new(parts).unwrap().0;
    next.returner().settle().unwrap();
    assert_eq!(next.ledger().runs().count(), 0);
    // Nothing serves faults: a protection that was left would hang this.
    let guest = machine.guest();
    FRAMES.frames().take(7).for_each(|gfn| guest.write(gfn, &page_of(77)));
    let next = Arc::new(next);
    next.frames().watch_all().unwrap();
    let _threads = serve(&next, 1);
    assert!(guest.read(Gfn(7)) == page_of(0) && guest.read(Gfn(6)) == page_of(77));
    let frames: Vec<Gfn> = FRAMES.frames().collect();
    assert_eq!(next.evictor().evict(&frames, &NothingKnown).unwrap().saved, 7);
    assert_eq!(next.residency().store_usage().disk_slots_used, 7);
}
