//! Frames in use are saved and emptied under running vCPUs.

use ebb_ledger::{Content, LockedFrame};
use ebb_pager::{Evicted, Pager};
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};
use kvmtest::until;
use vmtest::require;

use kvmtest::counting::{Counting, PAGES, spare};

fn keeps_every_write(vcpus: u64, rest: u64, enough: u64) {
    let (mut counting, daemon) = Counting::new();
    counting.start(vcpus, rest);
    let mut total = Evicted::default();
    until(format_args!("{enough} evictions"), || {
        let done = daemon.pager.evict(counting.all(), spare).unwrap();
        total.saved_frames += done.saved_frames;
        total.abandoned_frames += done.abandoned_frames;
        (total.saved_frames >= enough).then_some(())
    });
    eprintln!("{vcpus} vCPUs: {total:?}");
    assert_eq!(counting.lost(&daemon.pager), 0);
    daemon.pager.give_back_all().unwrap();
    assert_eq!(daemon.pager.ledger().runs().count(), 0);
}

#[test]
fn frames_in_use_keep_every_write() {
    require!(kvmtest::available());
    keeps_every_write(1, 0, 10_000);
    keeps_every_write(2, 0, 10_000);
    // Half of the evictions go through unseen by such a guest.
    keeps_every_write(2, 10_000, 10_000);
}

/// Saves and punches, as eviction does, but protects nothing.
fn evict_in_the_wrong_order(pager: &Pager) -> u64 {
    let resident = PAGES.frames().filter_map(|gfn| {
        let held = pager.ledger().lock_frame(gfn).ok()?;
        Some((gfn, held)).filter(|(_, held)| held.content() == Content::Resident)
    });
    let saved: Vec<_> = resident.filter_map(|(gfn, held)| save(pager, gfn, held)).collect();
    let count = saved.len() as u64;
    for (gfn, held, slot) in saved {
        pager.ram().punch(FrameRange::new(gfn, 1)).unwrap();
        if held.unlock(Content::Saved { slot }) {
            pager.wake_all().unwrap();
        }
    }
    count
}

fn save<'a>(
    pager: &Pager,
    gfn: Gfn,
    mut held: LockedFrame<'a>,
) -> Option<(Gfn, LockedFrame<'a>, u64)> {
    let mut page = [0; FRAME_BYTES as usize];
    pager.ram().read(FrameRange::new(gfn, 1), &mut page).unwrap();
    let slot = pager.view().store.save(&page).unwrap();
    held.commit(Content::Saved { slot }).then_some((gfn, held, slot))
}

/// Were the protection not needed, or did the guest's checks not see a lost
/// write, this would fail.
#[test]
fn the_wrong_order_loses_writes() {
    require!(kvmtest::available());
    const ENOUGH: u64 = 5000;
    let (mut counting, daemon) = Counting::new();
    daemon.pager.ledger().split(PAGES.start.huge()).unwrap();
    counting.start(2, 0);
    let mut total = 0;
    until(format_args!("{ENOUGH} evictions"), || {
        total += evict_in_the_wrong_order(&daemon.pager);
        (total >= ENOUGH).then_some(())
    });
    let lost = counting.lost(&daemon.pager);
    eprintln!("{lost} writes lost in {total} evictions");
    assert!(lost > 0, "{lost}");
}
