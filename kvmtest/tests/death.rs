//! A daemon dies at any step of its work, and another one goes on from there.

use std::mem::forget;
use std::sync::atomic::Ordering::Relaxed;

use ebb_ledger::{Content, LockedFrame};
use ebb_pager::{Grain, Pager, Zeros};
use ebb_sys::uffd::Events;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};
use kvmtest::{Daemon, Machine, until};
use testkit::require;

use kvmtest::blocks::{Blocks, RELEASED, STRICT, Settings, TOUCHED};
use kvmtest::counting::{Counting, PAGES};

const ROUNDS: u64 = 20;
const VCPUS: u64 = 2;

/// Waits until a vCPU faults. In every second round, the dead daemon has already read that fault.
fn somebody_waits(machine: &Machine, round: u64) {
    until("a vCPU to wait", || machine.fault_waits().then_some(()));
    if round.is_multiple_of(2) {
        let read = machine.uffd().read(&mut Events::new()).unwrap().count();
        assert!(read > 0);
    }
}

fn keeps_every_word(settings: Settings) {
    let mut blocks = Blocks::new(settings);
    let running = blocks.start(VCPUS);
    blocks.wait_until_all_are_filled();
    for round in 0..ROUNDS {
        blocks.reclaim_free();
        // These are more than the vCPUs have at once, plus the two that are claimed here.
        blocks.stop_serving(VCPUS + 2);
        // One block is only claimed, the other is about to be reclaimed.
        for commit in [false, true] {
            let mut all = (0..blocks.count()).cycle();
            let claim = until("a free block", || blocks.claim(all.next()?));
            match commit {
                true => forget(blocks.commit(claim)),
                false => forget(claim),
            }
        }
        blocks.replace_daemon(|machine| somebody_waits(machine, round));
    }
    blocks.finish(running);
}

#[test]
fn reclaimed_blocks_outlive_their_daemon() {
    require!(kvmtest::available());
    for settings in [STRICT, TOUCHED, RELEASED] {
        keeps_every_word(settings);
    }
    keeps_every_word(Settings { fill: Some(0xaa), ..STRICT });
    keeps_every_word(Settings { grain: Grain::Huge, order: 9, ..STRICT });
}

/// Locks a frame, and protects it in the VM.
fn lock_and_protect<'a>(machine: &Machine, pager: &'a Pager, gfn: Gfn) -> LockedFrame<'a> {
    let locked = pager.ledger().lock_frame(gfn).unwrap();
    let range = pager.ram().hva_range(FrameRange::new(gfn, 1)).unwrap();
    machine.uffd().protect(range).unwrap();
    locked
}

/// Locks and protects a frame, saves it, and records it as saved.
fn save<'a>(machine: &Machine, pager: &'a Pager, gfn: Gfn) -> LockedFrame<'a> {
    let mut locked = lock_and_protect(machine, pager, gfn);
    let mut page = [0; FRAME_BYTES as usize];
    pager.ram().read(FrameRange::new(gfn, 1), &mut page).unwrap();
    let slot = pager.view().store.save(&page).unwrap();
    // Nobody serves faults, so nobody marks the frame.
    assert!(locked.commit(Content::Saved { slot }));
    locked
}

/// Brings the page of a saved frame back, but does not record that.
fn bring_back<'a>(machine: &Machine, pager: &'a Pager, gfn: Gfn) -> Option<LockedFrame<'a>> {
    let locked = pager.ledger().lock_frame(gfn).unwrap();
    let Content::Saved { slot } = locked.content() else { return None };
    let mut page = [0; FRAME_BYTES as usize];
    pager.view().store.load(slot, &mut page).unwrap();
    let range = pager.ram().hva_range(FrameRange::new(gfn, 1)).unwrap();
    machine.uffd().copy(range.start, &page).unwrap();
    Some(locked)
}

/// Leaves frames at every step between resident and saved, and back.
fn die_at_work(machine: &Machine, pager: &Pager) {
    for (gfn, step) in PAGES.frames().zip([0, 1, 2, 3].into_iter().cycle()) {
        let resident = pager.ledger().content(gfn) == Content::Resident;
        match step {
            0 if resident => forget(lock_and_protect(machine, pager, gfn)),
            1 if resident => forget(save(machine, pager, gfn)),
            2 if resident => {
                let saved = save(machine, pager, gfn);
                machine.punch(FrameRange::new(gfn, 1)).unwrap();
                forget(saved);
            }
            _ => forget(bring_back(machine, pager, gfn)),
        }
    }
}

#[test]
fn saved_frames_outlive_their_daemon() {
    require!(kvmtest::available());
    let (mut counting, mut daemon) = Counting::new(Grain::Frame);
    counting.start(VCPUS, 0);
    for round in 0..ROUNDS {
        until("an eviction", || {
            let done = daemon.evict(counting.all());
            (done.frames() > 0).then_some(())
        });
        daemon.stop_serving();
        // No fault is served any more, so this evicts most frames.
        if round.is_multiple_of(3) {
            daemon.evict(counting.all());
        }
        die_at_work(&counting.machine, &daemon.pager);
        drop(daemon);
        somebody_waits(&counting.machine, round);
        daemon = Daemon::recover(&counting.machine, Grain::Frame);
        daemon.serve();
    }
    assert_eq!(counting.lost(&daemon.pager), 0);
    daemon.pager.returner().give_back_all(Zeros::Fill).unwrap();
    assert_eq!(daemon.pager.ledger().runs().count(), 0);
    assert_eq!(daemon.pager.counters().saved_frames.load(Relaxed), 0);
}
