//! Frames that were not written since they came back keep their slot, and go again without
//! being saved; a write is never missed.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use ebb_ledger::Content;
use ebb_pager::{Evicted, Grain};
use ebb_units::{FrameRange, Gfn};
use kvmtest::counting::{Counting, PAGES};
use kvmtest::{Daemon, Machine, until};
use vmtest::require;

/// The frame that goes and comes.
const PAGE: Gfn = PAGES.start;
const ONE: FrameRange = FrameRange::new(PAGE, 1);

fn content(daemon: &Daemon) -> Content {
    // Who fills a frame wakes before it unlocks, if somebody asked meanwhile.
    until("the word", || daemon.pager.ledger().unlocked(PAGE))
}

fn is_clean(daemon: &Daemon) -> bool {
    matches!(content(daemon), Content::Clean { .. })
}

fn slots(daemon: &Daemon) -> u64 {
    daemon.pager.store_usage().disk_slots_used
}

fn evicted(daemon: &Daemon) -> Evicted {
    daemon.evict(ONE)
}

/// A machine whose frame was saved, and came back to be read.
fn with_a_clean_frame() -> (Counting, Daemon) {
    let (counting, daemon) = Counting::new(Grain::Frame);
    write(&counting.machine, 7);
    assert_eq!(evicted(&daemon), Evicted { saved: 1, ..Evicted::default() });
    assert_eq!(read(&counting.machine), 7);
    assert!(is_clean(&daemon));
    assert_eq!((slots(&daemon), clean_frames(&daemon)), (1, 1));
    (counting, daemon)
}

fn clean_frames(daemon: &Daemon) -> u64 {
    daemon.pager.counters.clean_frames.load(Relaxed)
}

fn read(machine: &Machine) -> u64 {
    machine.read_as_vmm(PAGE.gpa())
}

fn write(machine: &Machine, value: u64) {
    machine.write_as_vmm(PAGE.gpa(), value);
}

/// It is plain memory, and has no slot.
fn assert_plain(daemon: &Daemon) {
    assert_eq!(content(daemon), Content::Resident);
    until("the slot to be free", || (slots(daemon) == 0).then_some(()));
    assert_eq!(clean_frames(daemon), 0);
}

/// What was written is what comes back.
fn assert_written(counting: &Counting, daemon: &Daemon) {
    write(&counting.machine, 8);
    assert_plain(daemon);
    assert_eq!(evicted(daemon), Evicted { saved: 1, ..Evicted::default() });
    assert_eq!(read(&counting.machine), 8);
}

#[test]
fn a_clean_frame_is_not_saved_again() {
    require!(kvmtest::available());
    let (counting, daemon) = with_a_clean_frame();
    for _ in 0..3 {
        assert_eq!(evicted(&daemon), Evicted { clean: 1, ..Evicted::default() });
        assert_eq!((slots(&daemon), clean_frames(&daemon)), (1, 0));
        assert_eq!(read(&counting.machine), 7);
        assert!(is_clean(&daemon));
    }
    assert_written(&counting, &daemon);
}

#[test]
fn who_comes_to_write_gets_plain_memory() {
    require!(kvmtest::available());
    let (counting, daemon) = with_a_clean_frame();
    assert_eq!(evicted(&daemon).clean, 1);
    assert_written(&counting, &daemon);
}

/// Aging takes frames out of the VMM's page table all the time.
#[test]
fn the_protection_outlives_the_page_table_entry() {
    require!(kvmtest::available());
    let (counting, daemon) = with_a_clean_frame();
    counting.machine.forget();
    assert_eq!(read(&counting.machine), 7);
    counting.machine.forget();
    assert!(is_clean(&daemon));
    assert_written(&counting, &daemon);
}

/// Were the protection not what it stands on, this would find what was written.
#[test]
fn a_write_past_the_protection_is_lost() {
    require!(kvmtest::available());
    let (counting, daemon) = with_a_clean_frame();
    counting.machine.set(PAGE.gpa(), 8);
    assert_eq!(evicted(&daemon).clean, 1);
    assert_eq!(read(&counting.machine), 7);
}

#[test]
fn a_device_of_ours_ends_it_first() {
    require!(kvmtest::available());
    let (counting, daemon) = with_a_clean_frame();
    daemon.pager.pin(ONE, false).unwrap();
    assert_plain(&daemon);
    counting.machine.set(PAGE.gpa(), 8);
    assert_eq!(evicted(&daemon), Evicted::default());
    daemon.pager.unpin(ONE);
    assert_eq!(evicted(&daemon), Evicted { saved: 1, ..Evicted::default() });
    assert_eq!(read(&counting.machine), 8);
}

#[test]
fn after_a_daemons_death_it_is_plain() {
    require!(kvmtest::available());
    let (counting, daemon) = with_a_clean_frame();
    drop(daemon);
    let mut daemon = Daemon::adopt(&counting.machine, Grain::Frame);
    daemon.serve();
    assert_plain(&daemon);
    assert_written(&counting, &daemon);
}

/// The VMM has punched the page, as a balloon does, and a daemon dies.
#[test]
fn a_clean_frame_that_the_vmm_punched_is_a_hole() {
    require!(kvmtest::available());
    for (evicts, dies) in [(false, false), (true, false), (false, true)] {
        let (counting, mut daemon) = with_a_clean_frame();
        counting.machine.ram().punch(ONE).unwrap();
        if evicts {
            assert_eq!(evicted(&daemon), Evicted::default());
        }
        if dies {
            drop(daemon);
            daemon = Daemon::adopt(&counting.machine, Grain::Frame);
            daemon.serve();
        }
        assert_eq!(read(&counting.machine), 0);
        assert_plain(&daemon);
        assert_written(&counting, &daemon);
    }
}

#[test]
fn giving_back_ends_it() {
    require!(kvmtest::available());
    let (counting, daemon) = with_a_clean_frame();
    daemon.pager.give_back_all().unwrap();
    assert_plain(&daemon);
    assert_eq!(daemon.pager.ledger().runs().count(), 0);
    daemon.pager.unwatch_all().unwrap();
    write(&counting.machine, 8);
    assert_eq!(counting.machine.get(PAGE.gpa()), 8);
}

#[test]
fn a_store_in_want_of_slots_gets_them() {
    require!(kvmtest::available());
    let (counting, daemon) = with_a_clean_frame();
    assert_eq!(daemon.pager.give_up_clean(0).unwrap(), 0);
    assert!(is_clean(&daemon));
    assert_eq!(daemon.pager.give_up_clean(9).unwrap(), 1);
    assert_plain(&daemon);
    assert_written(&counting, &daemon);
}

/// Another frame.
const OTHER: Gfn = Gfn(PAGE.0 + 64);

/// The guest has freed it, and its block is emptied.
#[test]
fn a_clean_frame_can_be_emptied() {
    require!(kvmtest::available());
    let (_counting, daemon) = with_a_clean_frame();
    let claim = daemon.pager.claim(OTHER, PAGE, 0).unwrap().expect("nobody else works on it");
    let committed = claim.commit(true, 0).expect("nobody wants it");
    assert_eq!(daemon.pager.empty(&mut vec![committed], false).unwrap(), 1);
    assert_eq!(content(&daemon), Content::Empty { fill: 0, hard: false });
    assert_eq!((slots(&daemon), clean_frames(&daemon)), (0, 0));
}

#[test]
fn clean_metadata_can_be_watched() {
    require!(kvmtest::available());
    let (_counting, daemon) = with_a_clean_frame();
    let claim = daemon.pager.claim(PAGE, OTHER, 0).unwrap().expect("nobody else works on it");
    assert_eq!(slots(&daemon), 0);
    claim.let_go();
    assert_plain(&daemon);
}

/// What a write to a clean frame costs its writer, for whoever wants to know.
#[test]
fn every_write_is_noticed() {
    require!(kvmtest::available());
    let (counting, daemon) = Counting::new(Grain::Frame);
    let gpas = || PAGES.frames().map(|page| page.gpa());
    gpas().for_each(|gpa| counting.machine.write_as_vmm(gpa, gpa.0));
    assert_eq!(daemon.evict(PAGES).saved, PAGES.count);
    gpas().for_each(|gpa| assert_eq!(counting.machine.read_as_vmm(gpa), gpa.0));
    until("all to be clean", || (clean_frames(&daemon) == PAGES.count).then_some(()));
    let began = Instant::now();
    gpas().for_each(|gpa| counting.machine.write_as_vmm(gpa, gpa.0 + 1));
    eprintln!("{:?} a write to a clean frame", began.elapsed() / PAGES.count as u32);
    until("none to be clean", || (clean_frames(&daemon) == 0).then_some(()));
    assert_eq!(daemon.evict(PAGES).saved, PAGES.count);
    gpas().for_each(|gpa| assert_eq!(counting.machine.read_as_vmm(gpa), gpa.0 + 1));
}
