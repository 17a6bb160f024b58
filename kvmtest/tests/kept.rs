//! Refilled frames keep their slot, and are evicted again without being saved if their content is
//! unchanged. A write is never missed, whatever mapping it comes by.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use ebb_ledger::Content;
use ebb_pager::{Evicted, Grain, Zeros};
use ebb_units::{FrameRange, Gfn};
use kvmtest::counting::{Counting, PAGES};
use kvmtest::{Daemon, Machine, until};
use testkit::require;

/// The frame that is evicted and refilled.
const PAGE: Gfn = PAGES.start;
const ONE: FrameRange = FrameRange::new(PAGE, 1);

fn content(daemon: &Daemon) -> Content {
    // The thread that fills a frame wakes waiters before it unlocks the frame, if somebody asked
    // meanwhile.
    until("the word", || daemon.pager.ledger().unlocked(PAGE))
}

fn slots(daemon: &Daemon) -> u64 {
    daemon.pager.residency().store_usage().disk_slots_used
}

fn kept(daemon: &Daemon) -> u64 {
    daemon.pager.counters().clean_frames.load(Relaxed)
}

fn evicted(daemon: &Daemon) -> Evicted {
    daemon.evict(ONE)
}

/// Makes a machine whose frame was saved and refilled.
fn with_a_kept_slot() -> (Counting, Daemon) {
    let (counting, daemon) = Counting::new(Grain::Frame);
    write(&counting.machine, 7);
    assert_eq!(evicted(&daemon), Evicted { saved: 1, ..Evicted::default() });
    assert_eq!(read(&counting.machine), 7);
    assert_kept(&daemon);
    (counting, daemon)
}

fn read(machine: &Machine) -> u64 {
    machine.read_as_vmm(PAGE.gpa())
}

fn write(machine: &Machine, value: u64) {
    machine.write_as_vmm(PAGE.gpa(), value);
}

fn assert_kept(daemon: &Daemon) {
    assert_eq!(content(daemon), Content::Resident);
    assert_eq!((slots(daemon), kept(daemon)), (1, 1));
}

fn assert_none(daemon: &Daemon) {
    assert_eq!(content(daemon), Content::Resident);
    assert_eq!((slots(daemon), kept(daemon)), (0, 0));
}

/// Checks that a write survives an eviction.
fn assert_written(counting: &Counting, daemon: &Daemon) {
    write(&counting.machine, 8);
    assert_eq!(evicted(daemon), Evicted { saved: 1, ..Evicted::default() });
    assert_eq!(read(&counting.machine), 8);
}

#[test]
fn a_frame_that_was_read_is_not_saved_again() {
    require!(kvmtest::available());
    let (counting, daemon) = with_a_kept_slot();
    for _ in 0..3 {
        assert_eq!(evicted(&daemon), Evicted { clean: 1, ..Evicted::default() });
        assert_eq!((slots(&daemon), kept(&daemon)), (1, 0));
        assert_eq!(read(&counting.machine), 7);
        assert_kept(&daemon);
    }
    assert_written(&counting, &daemon);
}

/// Where the kernel handles KVM's faults asynchronously, all faults look like this one.
#[test]
fn nor_is_one_that_was_touched_by_a_write_of_the_same() {
    require!(kvmtest::available());
    let (counting, daemon) = with_a_kept_slot();
    for _ in 0..3 {
        assert_eq!(evicted(&daemon), Evicted { clean: 1, ..Evicted::default() });
        write(&counting.machine, 7);
        assert_kept(&daemon);
    }
    assert_eq!(daemon.pager.counters().metadata.load(Relaxed), 0, "no second fault");
    assert_written(&counting, &daemon);
}

/// The write comes from a device of ours, or from any other mapping.
#[test]
fn a_write_by_another_mapping_is_seen() {
    require!(kvmtest::available());
    let (counting, daemon) = with_a_kept_slot();
    counting.machine.set(PAGE.gpa(), 8);
    assert_eq!(evicted(&daemon), Evicted { saved: 1, ..Evicted::default() });
    assert_eq!(read(&counting.machine), 8);
    daemon.pager.devices().pin(ONE, false).unwrap();
    assert_kept(&daemon);
    counting.machine.set(PAGE.gpa(), 9);
    assert_eq!(evicted(&daemon), Evicted::default());
    daemon.pager.devices().unpin(ONE);
    assert_eq!(evicted(&daemon), Evicted { saved: 1, ..Evicted::default() });
    assert_eq!(read(&counting.machine), 9);
}

#[test]
fn after_a_daemons_death_nothing_is_kept() {
    require!(kvmtest::available());
    let (counting, daemon) = with_a_kept_slot();
    drop(daemon);
    let mut daemon = Daemon::recover(&counting.machine, Grain::Frame);
    daemon.serve();
    assert_none(&daemon);
    assert_written(&counting, &daemon);
}

/// The VMM has punched the page, as a balloon does, and in one case the daemon dies.
#[test]
fn a_frame_that_the_vmm_punched_is_a_hole() {
    require!(kvmtest::available());
    for (evicts, dies) in [(false, false), (true, false), (false, true)] {
        let (counting, mut daemon) = with_a_kept_slot();
        counting.machine.punch(ONE).unwrap();
        if evicts {
            assert_eq!(evicted(&daemon), Evicted { empty: 1, ..Evicted::default() });
        }
        if dies {
            drop(daemon);
            daemon = Daemon::recover(&counting.machine, Grain::Frame);
            daemon.serve();
        }
        assert_eq!(read(&counting.machine), 0);
        assert_written(&counting, &daemon);
        assert_eq!(slots(&daemon), kept(&daemon));
    }
}

#[test]
fn giving_back_ends_it() {
    require!(kvmtest::available());
    let (counting, daemon) = with_a_kept_slot();
    daemon.pager.returner().give_back_all(Zeros::Fill).unwrap();
    assert_none(&daemon);
    assert_eq!(daemon.pager.ledger().runs().count(), 0);
    daemon.pager.frames().unwatch_all().unwrap();
    write(&counting.machine, 8);
    assert_eq!(counting.machine.get(PAGE.gpa()), 8);
}

#[test]
fn a_store_in_want_of_slots_gets_them() {
    require!(kvmtest::available());
    let (counting, daemon) = with_a_kept_slot();
    assert_eq!(daemon.pager.residency().give_up_kept(0), 0);
    assert_kept(&daemon);
    assert_eq!(daemon.pager.residency().give_up_kept(9), 1);
    assert_none(&daemon);
    assert_written(&counting, &daemon);
}

/// A frame other than [`PAGE`].
const OTHER: Gfn = Gfn(PAGE.0 + 64);

/// The guest has freed the frame, and its block is reclaimed.
#[test]
fn a_frame_that_is_reclaimed_keeps_no_slot() {
    require!(kvmtest::available());
    let (_counting, daemon) = with_a_kept_slot();
    let claim =
        daemon.pager.blocks().claim(OTHER, PAGE, 0).unwrap().expect("nobody else works on it");
    let committed = claim.commit(true, 0).expect("nobody wants it");
    assert_eq!(daemon.pager.blocks().empty(&mut vec![committed], false).unwrap(), 1);
    assert_eq!(content(&daemon), Content::Empty { fill: 0, hard: false });
    assert_eq!((slots(&daemon), kept(&daemon)), (0, 0));
}

#[test]
fn metadata_that_keeps_a_slot_can_be_watched() {
    require!(kvmtest::available());
    let (counting, daemon) = with_a_kept_slot();
    let claim =
        daemon.pager.blocks().claim(PAGE, OTHER, 0).unwrap().expect("nobody else works on it");
    claim.abandon();
    assert_kept(&daemon);
    assert_written(&counting, &daemon);
}

/// This also prints what a write after a read costs the writer.
#[test]
fn every_write_is_seen() {
    require!(kvmtest::available());
    let (counting, daemon) = Counting::new(Grain::Frame);
    let gpas = || PAGES.frames().map(|page| page.gpa());
    gpas().for_each(|gpa| counting.machine.write_as_vmm(gpa, gpa.0));
    assert_eq!(daemon.evict(PAGES).saved, PAGES.count);
    gpas().for_each(|gpa| assert_eq!(counting.machine.read_as_vmm(gpa), gpa.0));
    until("all to keep their slots", || (kept(&daemon) == PAGES.count).then_some(()));
    let began = Instant::now();
    gpas().for_each(|gpa| counting.machine.write_as_vmm(gpa, gpa.0 + 1));
    eprintln!("{:?} a write to a frame that was read", began.elapsed() / PAGES.count as u32);
    assert_eq!(daemon.evict(PAGES).saved, PAGES.count);
    gpas().for_each(|gpa| assert_eq!(counting.machine.read_as_vmm(gpa), gpa.0 + 1));
}
