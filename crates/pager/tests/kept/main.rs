//! Frames that came back keep their slot, and are evicted again without a write if they hold what
//! they held. Each slot is freed once, whatever becomes of its frame. This process is the guest.

mod daemon;
mod deaths;
mod room;

use std::sync::atomic::Ordering::Relaxed;

use ebb_ledger::Content;
use ebb_pager::testing::{Machine, available, page_of};
use ebb_pager::{Evicted, Grain, Judge, Pager, PagerParts, Zeros};
use ebb_store::{Protection, SwapFile};
use ebb_units::{FrameRange, Gfn};
use tempfile::TempDir;
use testkit::require;

use daemon::{Daemon, first_of};

const ALL: FrameRange = FrameRange::new(Gfn(0), 512);
const FRAMES: FrameRange = FrameRange::new(Gfn(0), 8);

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
    daemon.machine.guest().punch(frame).unwrap();
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
    let causes: [(&str, Act); 8] = [
        ("given back", |daemon| {
            assert_eq!(daemon.pager.returner().give_back_all(Zeros::Fill).unwrap(), 0)
        }),
        ("not to go again", |daemon| daemon.pager.evictor().trim_store(true).unwrap()),
        ("given up", |daemon| assert_eq!(daemon.pager.residency().give_up_kept(99), 8)),
        ("unplugged", |daemon| daemon.pager.pluggable().unplug(ALL).unwrap()),
        ("in a block that is reclaimed", |daemon| {
            let claim = daemon.pager.blocks().claim(Gfn(64), Gfn(0), 3).unwrap().expect("a claim");
            let committed = claim.commit(true, 0).expect("nobody wants it");
            assert_eq!(daemon.pager.blocks().empty(&mut vec![committed], true).unwrap(), 8);
        }),
        ("in a block that nothing is recorded of", |daemon| {
            let claim = daemon.pager.blocks().claim(Gfn(64), Gfn(0), 3).unwrap().expect("a claim");
            let committed = claim.commit(false, 0).expect("nobody wants it");
            assert_eq!(daemon.pager.blocks().empty(&mut vec![committed], false).unwrap(), 8);
        }),
        ("in a huge frame that is reclaimed", |daemon| {
            let held = daemon.pager.residency().lock_huge(Gfn(0).huge()).expect("nobody holds it");
            let Ok(held) = held.record() else { panic!("it is free") };
            daemon.pager.residency().empty_huge([&held].into_iter()).unwrap();
            held.settle(false);
        }),
        ("filled with a byte", |daemon| {
            FRAMES.frames().for_each(|gfn| daemon.write(gfn, &page_of(1)));
            assert_eq!(daemon.evict(FRAMES).empty, 8);
        }),
    ];
    for (cause, act) in causes {
        println!("{cause}");
        let daemon = Daemon::new().with_kept(FRAMES);
        act(&daemon);
        daemon.assert_none_kept();
        // Other frames get its slots now.
        let others = FrameRange::new(Gfn(100), 16);
        let content = daemon.pager.ledger().content(Gfn(100));
        if content != Content::Unplugged {
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

#[test]
fn frames_in_huge_pages_keep_their_slots_too() {
    require!(available());
    let setting = testkit::HostSetting::shared_huge_pages();
    require!(setting.as_ref());
    let (machine, run) = (Machine::of(Grain::Huge), tempfile::tempdir().unwrap());
    let parts = PagerParts { store: Box::new(swap_file(&run, 1024)), ..machine.parts() };
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
