//! Frames that a device of ours uses stay resident.

use std::sync::atomic::Ordering::Relaxed;

use ebb_ledger::Content;
use ebb_pager::Grain;
use ebb_units::FrameRange;
use kvmtest::counting::{Counting, PAGES};
use testkit::require;

#[test]
fn pinned_frames_are_not_evicted() {
    require!(kvmtest::available());
    let (mut counting, daemon) = Counting::new(Grain::Frame);
    counting.start(1, 0);
    let pinned = FrameRange::new(PAGES.start, 2);
    daemon.pager.devices().pin(pinned, false).unwrap();
    for _ in 0..20 {
        daemon.evict(PAGES);
        for gfn in pinned.frames() {
            assert_eq!(daemon.pager.ledger().content(gfn), Content::Resident);
        }
    }
    daemon.pager.devices().unpin(pinned);
    kvmtest::until("the frames to go", || {
        daemon.evict(pinned);
        (daemon.pager.ledger().content(pinned.start) != Content::Resident).then_some(())
    });
    assert_eq!(counting.lost(&daemon.pager), 0);
}

/// A pin does not refill what will be overwritten, but does refill what must be kept.
#[test]
fn a_pin_brings_back_only_what_it_must() {
    require!(kvmtest::available());
    let (counting, daemon) = Counting::new(Grain::Frame);
    let (kept, replaced) = (FrameRange::new(PAGES.start, 1), FrameRange::new(PAGES.end(), 1));
    for (frames, byte) in [(kept, 1u64), (replaced, 2)] {
        counting.machine.set(frames.start.gpa(), byte);
        assert_eq!(daemon.evict(frames).saved, 1);
    }
    daemon.pager.devices().pin(kept, false).unwrap();
    daemon.pager.devices().pin(replaced, true).unwrap();
    assert_eq!(counting.machine.get(kept.start.gpa()), 1);
    assert_eq!(counting.machine.get(replaced.start.gpa()), 0);
    assert_eq!(daemon.pager.counters().replaced_frames.load(Relaxed), 1);
    assert_eq!(daemon.pager.counters().refilled_frames.load(Relaxed), 1);
    assert_eq!(daemon.pager.counters().saved_frames.load(Relaxed), 0);
}
