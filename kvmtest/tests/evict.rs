//! Frames in use are evicted under running vCPUs.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use ebb_ledger::{Content, LockedFrame};
use ebb_pager::{Evicted, Grain, NothingKnown, Pager, Zeros};
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};
use kvmtest::until;
use testkit::require;

use kvmtest::counting::{Counting, PAGES};

fn keeps_every_write(vcpus: u64, rest: u64, enough: u64) {
    let (mut counting, daemon) = Counting::new(Grain::Frame);
    counting.start(vcpus, rest);
    let mut total = Evicted::default();
    until(format_args!("{enough} evictions"), || {
        let done = daemon.evict(counting.all());
        total.add(done);
        (total.saved + total.clean >= enough).then_some(())
    });
    eprintln!("{vcpus} vCPUs: {total:?}");
    assert_eq!(counting.lost(&daemon.pager), 0);
    daemon.pager.returner().give_back_all(Zeros::Fill).unwrap();
    assert_eq!(daemon.pager.ledger().runs().count(), 0);
}

#[test]
fn frames_in_use_keep_every_write() {
    require!(kvmtest::available());
    keeps_every_write(1, 0, 10_000);
    keeps_every_write(2, 0, 10_000);
    // Such a guest does not notice half of the evictions.
    keeps_every_write(2, 10_000, 10_000);
}

/// Pages go to compressed memory, and from there to disk, while the guest faults on them.
#[test]
fn pages_on_their_way_to_disk_keep_every_write() {
    require!(kvmtest::available());
    let (mut counting, daemon) = Counting::new(Grain::Frame);
    // The limit is one chunk, so that nothing stays for long.
    require!(daemon.compress(64 << 10));
    counting.start(2, 0);
    let (mut saved, mut moved) = (0, 0);
    until("evictions and moves", || {
        saved += daemon.evict(counting.all()).saved;
        moved += daemon.pager.evictor().write_back().unwrap();
        (saved >= 10_000 && moved >= 2000).then_some(())
    });
    eprintln!("{saved} saved, {moved} moved");
    assert_eq!(counting.lost(&daemon.pager), 0);
    daemon.pager.returner().give_back_all(Zeros::Fill).unwrap();
    daemon.evict(counting.all());
    assert!(daemon.pager.residency().store_usage().compressed_pages > 100);
    while daemon.pager.evictor().write_back().unwrap() > 0 {}
    assert_eq!(daemon.pager.residency().store_usage().memory_bytes, 0);
    daemon.pager.returner().give_back_all(Zeros::Fill).unwrap();
    assert_eq!(daemon.pager.ledger().runs().count(), 0);
}

/// A full disk costs nothing. A disk that cannot be read makes the guest wait, but not the host's
/// processors, and the guest goes on once the disk works again.
#[test]
fn a_failing_disk_loses_nothing() {
    require!(kvmtest::available());
    let (mut counting, daemon) = Counting::new(Grain::Frame);
    counting.start(2, 0);
    daemon.disk.full.store(true, SeqCst);
    let frames: Vec<_> = PAGES.frames().collect();
    let refused = until("a page to be saved in vain", || {
        daemon.pager.evictor().evict(&frames, &NothingKnown).err()
    });
    assert_eq!(refused.kind(), std::io::ErrorKind::StorageFull);
    assert_eq!(daemon.pager.residency().store_usage().disk_slots_used, 0);
    daemon.disk.full.store(false, SeqCst);
    daemon.disk.blind.store(true, SeqCst);
    let failure = until("the guest to miss one", || {
        daemon.evict(counting.all());
        daemon.pager.faults().failure()
    });
    assert!(failure.to_string().contains("Input/output error"), "{failure}");
    daemon.disk.blind.store(false, SeqCst);
    until("the failure to be over", || daemon.pager.faults().failure().is_none().then_some(()));
    eprintln!("{} reads failed", daemon.disk.failed_reads.load(SeqCst));
    assert_eq!(counting.lost(&daemon.pager), 0);
    daemon.pager.returner().give_back_all(Zeros::Fill).unwrap();
}

/// A huge frame is evicted whole or not at all, whatever the guest writes meanwhile.
#[test]
fn huge_frames_in_use_keep_every_write() {
    require!(kvmtest::available());
    let (mut counting, daemon) = Counting::new(Grain::Huge);
    // Most of the time the pause is longer than an eviction takes.
    counting.start(1, 160_000_000);
    let huge = FrameRange::huge(PAGES.start.huge());
    let mut abandoned = 0;
    for _ in 0..10 {
        let saved = until("a whole huge frame to go", || {
            let done = daemon.evict(huge);
            abandoned += done.abandoned;
            (done.frames() > 0).then_some(done.frames())
        });
        assert_eq!(saved, huge.count);
        daemon.pager.returner().give_back_all(Zeros::Fill).unwrap();
    }
    eprintln!("{abandoned} frames were written to meanwhile");
    assert_eq!(counting.lost(&daemon.pager), 0);
}

/// Saves and punches, as eviction does, but protects nothing. The guest writes in between.
fn evict_in_the_wrong_order(counting: &Counting, pager: &Pager) -> u64 {
    // Only this thread evicts resident frames.
    let resident = PAGES.frames().filter(|&gfn| pager.ledger().content(gfn) == Content::Resident);
    let saved: Vec<_> = resident.filter_map(|gfn| save(pager, gfn)).collect();
    let count = || -> u64 { saved.iter().map(|(gfn, ..)| counting.counted_in(*gfn)).sum() };
    let before = count();
    until("a write after the save", || (saved.is_empty() || count() > before).then_some(()));
    let frames = saved.len() as u64;
    for (gfn, held, slot) in saved {
        counting.machine.punch(FrameRange::new(gfn, 1)).unwrap();
        pager.counters().saved_frames.fetch_add(1, Relaxed);
        if held.unlock(Content::Saved { slot }) {
            pager.frames().wake_all().unwrap();
        }
    }
    frames
}

fn save(pager: &Pager, gfn: Gfn) -> Option<(Gfn, LockedFrame<'_>, u64)> {
    let mut held = pager.ledger().lock_frame(gfn).ok()?;
    let mut page = [0; FRAME_BYTES as usize];
    pager.ram().read(FrameRange::new(gfn, 1), &mut page).unwrap();
    let slot = pager.view().store.save(&page).unwrap();
    if held.commit(Content::Saved { slot }) {
        return Some((gfn, held, slot));
    }
    // Two vCPUs have faulted on the frame together, and this is the fault of the second.
    if held.abandon() {
        pager.frames().wake_all().unwrap();
    }
    None
}

/// Shows that the protection is needed, and that the guest's checks see a lost write.
#[test]
fn the_wrong_order_loses_writes() {
    require!(kvmtest::available());
    const ENOUGH: u64 = 5000;
    let (mut counting, daemon) = Counting::new(Grain::Frame);
    daemon.pager.ledger().split(PAGES.start.huge()).unwrap();
    counting.start(2, 0);
    let mut total = 0;
    until(format_args!("{ENOUGH} evictions"), || {
        total += evict_in_the_wrong_order(&counting, &daemon.pager);
        (total >= ENOUGH).then_some(())
    });
    let lost = counting.lost(&daemon.pager);
    eprintln!("{lost} writes lost in {total} evictions");
    assert!(lost > 0, "{lost}");
}
