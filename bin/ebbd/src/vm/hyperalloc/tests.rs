//! Tests of the shared allocator's part of a size.

use ebb_ledger::Content;
use ebb_units::HugeFrame;
use ebb_vm::reach::{DeviceKind, MemoryUser};

use super::*;
use crate::vm::context::machine;

fn shrinking() -> SharedAllocator {
    SharedAllocator { shrink: Some(Shrink::default()), ..SharedAllocator::default() }
}

#[test]
fn nothing_is_reclaimed_beside_a_device_that_cannot_wait() {
    let Some((mut cx, _run)) = machine::context() else { return };
    let mut allocator = shrinking();
    cx.reaching.found = vec![MemoryUser { name: "vfio-pci".into(), kind: DeviceKind::Vfio }];
    let step = allocator.step(&mut cx);
    assert!(step.blocked_reason.is_some_and(|why| why.contains("no memory is reclaimed")));
    assert!(!allocator.shared_size().is_moving);
}

/// QEMU would send a part of what is changed.
#[test]
fn the_allocator_of_a_guest_that_migrates_is_left_as_it_is() {
    let Some((mut cx, _run)) = machine::context() else { return };
    let mut migrates = |status: &str| {
        cx.reaching.migration.status = Some(status.into());
        let step = shrinking().step(&mut cx);
        let shared = SharedAllocator::default().check(&mut cx).expect_err("its guest is unknown");
        (step.blocked_reason.unwrap_or_default(), shared.to_string())
    };
    let (step, shared) = migrates("active");
    assert!(step.contains("its guest migrates") && shared.contains("its guest migrates"));
    let (step, shared) = migrates("completed");
    assert!(!step.contains("migrates") && !shared.contains("migrates"), "{step}{shared}");
}

#[test]
fn a_size_is_not_sought_of_a_guest_that_has_all_back() {
    let Some((mut cx, _run)) = machine::context() else { return };
    let mut allocator = shrinking();
    allocator.on_reset(&cx);
    assert!(!allocator.shared_size().is_moving);
    let mut allocator = shrinking();
    allocator.give_back_all(&cx, Zeros::Fill).expect("all back");
    assert!(!allocator.shared_size().is_moving);
    assert!(allocator.step(&mut cx).blocked_reason.is_none());
}

#[test]
fn a_size_is_not_sought_while_qemu_may_wait_for_room() {
    let Some((mut cx, _run)) = machine::context() else { return };
    let allocator = shrinking();
    cx.record.note(|record| record.limit_bytes = Some(HUGE_BYTES));
    assert_eq!(allocator.step_after(&cx), Some(Duration::ZERO));
    cx.no_room = Some("the swap file is full".into());
    assert!(cx.waits());
    assert_eq!(allocator.step_after(&cx), None);
}

/// The next kernel does not know of it, and nobody returns it.
#[test]
fn what_was_hard_reclaimed_is_memory_like_any_other_after_a_reset() {
    let Some((mut cx, _run)) = machine::context() else { return };
    cx.record.note(|record| record.shares = true);
    let huge = HugeFrame(1);
    let held = cx.pager.residency().lock_huge(huge).expect("nobody works on it");
    let Ok(held) = held.record() else { panic!("nobody uses it") };
    held.settle(true);
    let content = || cx.pager.ledger().content(huge.first());
    assert_eq!(content(), Content::Empty { fill: 0, hard: true });
    shrinking().on_reset(&cx);
    assert_eq!(content(), Content::Empty { fill: 0, hard: false });
}
