//! Tests of reclaim from a made-up guest.

use std::sync::Arc;
use std::time::Duration;

use ebb_api::ReclaimWhen;
use ebb_ledger::Content;
use ebb_reclaim::resting::Resting;
use ebb_reclaim::vprobe::{Mode, Order, ReclaimedBlocks};
use ebb_units::{FrameRange, Gfn, Gpa};
use testkit::{forge, until};

use super::*;
use crate::support::open_files::Descriptors;
use crate::vm::context::machine;

/// Order of the free blocks here.
const ORDER: u8 = 10;
/// Free blocks of the made-up guest, by their first frames.
const FREE: [Gfn; 2] = [Gfn(4 << ORDER), Gfn(5 << ORDER)];
/// Offset of the word in `struct page` that says that a block is free.
const MAPCOUNT: u64 = 48;

/// Reclaims free blocks without a reserve.
fn reclaim_all(cx: &VmContext, mode: Mode) -> ReclaimedBlocks {
    reclaim_but(cx, mode, None)
}

/// Reclaims the free blocks that do not rest.
fn reclaim_but(cx: &VmContext, mode: Mode, resting: Option<&Resting>) -> ReclaimedBlocks {
    let order = Order {
        mode,
        min_order: ORDER,
        reserve_bytes: 0,
        want_bytes: u64::MAX,
        batch_bytes: 64 << 20,
        resting,
    };
    let guest = cx.guest.guest().expect("it is trusted");
    let (reclaimed, stop) =
        ebb_reclaim::vprobe::reclaim(&cx.pager, guest, order, &mut Vec::new(), |_| true);
    assert!(stop.is_none(), "{stop:?}");
    reclaimed
}

#[test]
fn only_a_trusted_guest_tells_what_is_free() {
    let Some((mut cx, machine)) = machine::context() else { return };
    let reclaim = Reclaim::default();
    let why = reclaim.may_reclaim(&cx, false).expect_err("nobody knows it").to_string();
    assert!(why.starts_with("the guest is not trusted: "), "{why}");
    assert_eq!(reclaim.mechanism(&cx).0, Mechanism::None);
    let _qemu = machine.boot_trusted(&mut cx);
    assert!(reclaim.may_reclaim(&cx, true).is_ok());
    assert_eq!(reclaim.mechanism(&cx).0, Mechanism::VProbe);
    assert!(reclaim.may_reclaim(&cx, false).is_err(), "it may have been reset since");
    cx.record.note(|record| record.backing = Backing::Hugetlb);
    let why = reclaim.may_reclaim(&cx, true).expect_err("nothing watches it").to_string();
    assert!(why.contains("--backing thp"), "{why}");
}

#[test]
fn a_guest_with_less_free_memory_than_the_reserve_keeps_it() {
    let Some((mut cx, machine)) = machine::context() else { return };
    let _qemu = machine.boot_trusted(&mut cx);
    let descriptors = Descriptors::now(&Arc::new(machine.vmm.process())).expect("/proc");
    cx.reaching.descriptors = Some(Arc::new(descriptors));
    let free = FrameRange::block(FREE[0], ORDER);
    machine.touch(free);
    cx.pager.frames().watch_all_writes().expect("it is watched");
    let mut reclaim = Reclaim::default();
    // QEMU may not answer in time.
    let mut passes =
        (0..100).map(|_| reclaim.pass(&mut cx, u64::MAX, 0, Which::All, &Work::default()).0);
    let pass = passes.find(|pass| !pass.is_cut_short()).expect("an answer in time");
    assert_eq!(pass.bytes(), 0);
    let why = pass.report(u64::MAX, Duration::ZERO).stopped_by;
    assert!(why.contains("the reserve of 64 MiB"), "{why}");
    // It is the reserve that was in the way.
    assert_eq!(reclaim_all(&cx, Mode::Release).bytes, free.bytes());
}

#[test]
fn a_cancelled_reclaim_keeps_what_it_has_and_spares_the_rest() {
    let Some((mut cx, machine)) = machine::context() else { return };
    let _qemu = machine.boot_trusted(&mut cx);
    let free = FREE.map(|head| FrameRange::block(head, ORDER));
    free.into_iter().for_each(|block| machine.touch(block));
    cx.pager.frames().watch_all_writes().expect("it is watched");
    let order = Order {
        mode: Mode::Release,
        min_order: ORDER,
        reserve_bytes: 0,
        want_bytes: u64::MAX,
        batch_bytes: free[0].bytes(),
        resting: None,
    };
    let mut told = Vec::new();
    let goes_on = |so_far: &ReclaimedBlocks| {
        told.push((so_far.bytes, so_far.seen_bytes));
        told.len() == 1
    };
    let guest = cx.guest.guest().expect("it is trusted");
    let (reclaimed, stop) =
        ebb_reclaim::vprobe::reclaim(&cx.pager, guest, order, &mut Vec::new(), goes_on);
    assert!(stop.is_some(), "it was told to stop");
    let block = free[0].bytes();
    // Other free blocks are holes: looked at, and passed over.
    let [(before, seen_first), (after, seen_last)] = told[..] else { panic!("{told:?}") };
    assert_eq!((before, after, reclaimed.bytes), (0, block, block));
    assert!(seen_first < seen_last && seen_last <= reclaimed.found_bytes, "{reclaimed:?}");
    // Nothing of the other one is locked, protected or gone.
    assert_eq!(reclaim_all(&cx, Mode::Release).bytes, block);
}

#[test]
fn a_reclaim_that_is_cancelled_before_it_begins_reclaims_nothing_and_says_so() {
    let Some((mut cx, machine)) = machine::context() else { return };
    let _qemu = machine.boot_trusted(&mut cx);
    machine.touch(FrameRange::block(FREE[0], ORDER));
    cx.pager.frames().watch_all_writes().expect("it is watched");
    let (mut reclaim, work) = (Reclaim::default(), Work::default());
    work.cancel();
    let (pass, ended) = reclaim.pass(&mut cx, u64::MAX, 0, Which::All, &work);
    assert!(!pass.is_cut_short(), "there is no second pass");
    assert_eq!((pass.bytes(), ended.is_none()), (0, true));
}

#[test]
fn a_block_that_came_back_and_is_still_free_came_without_need() {
    let Some((mut cx, machine)) = machine::context() else { return };
    let _qemu = machine.boot_trusted(&mut cx);
    cx.watch_all().expect("it is watched");
    cx.serve_again();
    reclaim_all(&cx, Mode::Strict);
    let content = |gfn: Gfn| cx.pager.ledger().content(gfn);
    assert_eq!(FREE.map(content), [Content::Empty { fill: 0, hard: false }; 2]);
    let mapcount = |gfn: Gfn| {
        let page = Gpa(forge::MEMMAP.0 + gfn.0 * forge::PAGE_BYTES);
        &machine.words(page, 8)[MAPCOUNT as usize / 8]
    };
    let [taken, free] = FREE.map(mapcount);
    taken.store(u32::MAX.into(), Relaxed);
    free.store(free.load(Relaxed), Relaxed);
    assert_eq!(FREE.map(content), [Content::Resident; 2]);
    let (mut reclaim, spurious) = (Reclaim::default(), &cx.pager.counters().spurious);
    until("a block to be judged", || {
        reclaim.judge_restored(&cx);
        (spurious.load(Relaxed) > 0).then_some(())
    });
    // The other one was judged before.
    assert_eq!(spurious.load(Relaxed), 1);
    let resting = reclaim.vprobe.resting();
    assert_eq!(FREE.map(|head| resting.rests(head, Instant::now())), [false, true]);
    taken.store(free.load(Relaxed), Relaxed);
    let block = FrameRange::block(FREE[0], ORDER).bytes();
    assert_eq!(reclaim_but(&cx, Mode::Release, Some(resting)).bytes, block);
}

#[test]
fn automatic_reclaim_goes_by_its_last_settings() {
    let Some((mut cx, _machine)) = machine::context() else { return };
    let mut reclaim = Reclaim::default();
    assert!(!reclaim.is_due(&cx), "it is off");
    let pressure = AutoRequest {
        on: true,
        when: Some(ReclaimWhen::Pressure),
        below_bytes: Some(u64::MAX),
        ..AutoRequest::default()
    };
    let why = reclaim.set_auto(&mut cx, pressure).expect_err("no host has as much").to_string();
    assert!(why.contains("less than the threshold"), "{why}");
    assert!(!cx.record.auto.on);
    let below_bytes = Some(1);
    let status = reclaim.set_auto(&mut cx, AutoRequest { below_bytes, ..pressure });
    let stuck = status.expect("a record").stuck.expect("nobody knows the guest");
    assert!(stuck.contains("the guest is not trusted"), "{stuck}");
    assert!(!reclaim.is_due(&cx), "the host is watched");
    let notice = |why: &str| PressureNotice { seen_by: "PSI".into(), why: Some(why.into()) };
    assert_eq!(reclaim.hear(&cx, notice("short")), Some("short".into()));
    let interval = AutoRequest { when: Some(ReclaimWhen::Interval), ..AutoRequest::default() };
    reclaim.set_auto(&mut cx, AutoRequest { on: true, ..interval }).expect("a record");
    assert_eq!([reclaim.is_due(&cx), reclaim.is_due(&cx)], [true, false]);
    assert_eq!(reclaim.hear(&cx, notice("short")), None);
}
