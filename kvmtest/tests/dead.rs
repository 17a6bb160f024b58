//! Frames that the guest has freed since their eviction come back without a read from the store,
//! and only those.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use ebb_ledger::Content;
use ebb_pager::{Evicted, Grain, Judge, Pager, Zeros};
use ebb_units::{FrameRange, Gfn};
use kvmtest::reuse::{Hasty, IN_USE, NEW, Reuse};
use kvmtest::{Daemon, until};
use testkit::require;

const VCPUS: u64 = 2;
/// A pause that is longer than an eviction locks a frame.
const LONG: u64 = 160_000_000;

fn avoided(pager: &Pager) -> u64 {
    pager.counters().false_reads_avoided.load(Relaxed)
}

/// Returns how many words were wrong.
fn torture(judge: impl Fn(&Reuse) -> Box<dyn Judge>, rest: u64, enough: u64) -> u64 {
    let (reuse, daemon) = Reuse::new(VCPUS);
    let judge = judge(&reuse);
    let running = reuse.start(rest);
    let mut total = Evicted::default();
    until(format_args!("{enough} reads avoided"), || {
        total.add(reuse.evict(&daemon, &*judge));
        (avoided(&daemon.pager) >= enough).then_some(())
    });
    let wrong = reuse.wrong(running);
    let read = |counter: &std::sync::atomic::AtomicU64| counter.load(Relaxed);
    let counters = &daemon.pager.counters();
    let [back, dropped] = [&counters.refilled_frames, &counters.dropped_frames].map(read);
    eprintln!("{} avoided, {dropped} dropped, {back} read", avoided(&daemon.pager));
    eprintln!("{total:?}");
    assert!(back > 0 && dropped > 0 && total.clean > 0);
    daemon.pager.returner().give_back_all(Zeros::Fill).unwrap();
    assert_eq!(read(&counters.saved_frames) + read(&counters.clean_frames), 0);
    assert_eq!(read(&counters.empty_frames), 0);
    assert_eq!(daemon.pager.ledger().runs().count(), 0);
    assert_eq!(daemon.pager.residency().store_usage().disk_slots_used, 0);
    wrong
}

#[test]
fn frames_in_use_are_read_and_freed_ones_are_not() {
    require!(kvmtest::available());
    assert_eq!(torture(|reuse| Box::new(reuse.metadata()), 0, 2000), 0);
    // With this pause, half-filled pages are evicted, too.
    assert_eq!(torture(|reuse| Box::new(reuse.metadata()), LONG, 20), 0);
}

/// The pager must ask at the eviction whether a frame is in use. This judge answers that wrongly,
/// so words are lost.
#[test]
fn a_look_at_the_fault_alone_loses_words() {
    require!(kvmtest::available());
    assert!(torture(|reuse| Box::new(Hasty(reuse.metadata())), LONG, 100) > 0);
}

/// A page in use is evicted. Then the guest hands it out anew, and a device of ours touches it.
fn touched_anew(between: impl FnOnce(&Reuse, Daemon) -> Daemon) -> (u64, u64) {
    let (reuse, daemon) = Reuse::new(1);
    let page = reuse.pages().start;
    reuse.machine.set(page.gpa(), 7);
    reuse.set(page, IN_USE);
    assert_eq!(daemon.evict_by(FrameRange::new(page, 1), &reuse.metadata()).saved, 1);
    reuse.set(page, NEW);
    let daemon = between(&reuse, daemon);
    daemon.pager.devices().pin(FrameRange::new(page, 1), false).unwrap();
    (reuse.machine.get(page.gpa()), avoided(&daemon.pager))
}

#[test]
fn a_pin_reads_nothing_that_is_dead() {
    require!(kvmtest::available());
    assert_eq!(touched_anew(|_, daemon| daemon), (0, 1));
}

#[test]
fn a_kernel_is_not_believed_about_frames_of_another() {
    require!(kvmtest::available());
    let again = |reuse: &Reuse, daemon: Daemon| {
        daemon.pager.residency().believe(None);
        daemon.pager.residency().believe(Some(Arc::new(reuse.metadata())));
        daemon
    };
    assert_eq!(touched_anew(again), (7, 0));
    let nobody = |_: &Reuse, daemon: Daemon| {
        daemon.pager.residency().believe(None);
        daemon
    };
    assert_eq!(touched_anew(nobody), (7, 0));
}

#[test]
fn a_new_daemon_knows_nothing_of_what_went_before() {
    require!(kvmtest::available());
    let recovered = |reuse: &Reuse, daemon: Daemon| {
        drop(daemon);
        let daemon = Daemon::recover(&reuse.machine, Grain::Frame);
        daemon.pager.residency().believe(Some(Arc::new(reuse.metadata())));
        daemon
    };
    assert_eq!(touched_anew(recovered), (7, 0));
}

#[test]
fn a_free_frame_gives_its_slot_back() {
    require!(kvmtest::available());
    let (reuse, daemon) = Reuse::new(1);
    let page: Gfn = reuse.pages().start;
    reuse.machine.set(page.gpa(), 7);
    reuse.set(page, IN_USE);
    assert_eq!(daemon.evict_by(FrameRange::new(page, 1), &reuse.metadata()).saved, 1);
    assert!(!daemon.pager.residency().drop_if_free(page, &reuse.metadata()));
    reuse.set(page, 0);
    assert!(daemon.pager.residency().drop_if_free(page, &reuse.metadata()));
    assert_eq!(daemon.pager.ledger().content(page), Content::Empty { fill: 0, hard: false });
    assert_eq!(daemon.pager.residency().store_usage().disk_slots_used, 0);
}
