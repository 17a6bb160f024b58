//! Tests of what each mechanism has to do for a size.

use super::super::{BalloonPart, DevicePart};
use super::*;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn device(node: u32, plugged_bytes: u64) -> DevicePart {
    DevicePart {
        node,
        plugged_bytes,
        requested_bytes: plugged_bytes,
        max_bytes: 16 * GIB,
        block_bytes: 2 * MIB,
        driver: Driver::Ready,
    }
}

/// 8 GiB on two nodes, and a device for each: the setup of the paper's Table 1.
fn two_nodes() -> SizeParts {
    SizeParts {
        initial_bytes: 8 * GIB,
        node_bytes: vec![4 * GIB; 2],
        devices: vec![device(0, 0), device(1, 0)],
        balloon: Some(BalloonPart { ballooned_bytes: 0, driver: Driver::Ready }),
        hard_bytes: None,
    }
}

fn small() -> SizeParts {
    SizeParts { initial_bytes: GIB, node_bytes: vec![GIB], ..SizeParts::default() }
}

fn target(bytes: u64) -> SizeTarget {
    SizeTarget { bytes, node: None, by: None }
}

fn planned(parts: &SizeParts, target: SizeTarget) -> Plan {
    plan(parts, &target, 64 * MIB).expect("it can be had")
}

fn refused(parts: &SizeParts, target: SizeTarget) -> String {
    plan(parts, &target, 64 * MIB).expect_err("it cannot be had").to_string()
}

#[test]
fn memory_beyond_the_initial_size_is_plugged_evenly() {
    let parts = two_nodes();
    let plan = planned(&parts, target(12 * GIB));
    assert_eq!(plan.mechanism, Mechanism::VirtioMem);
    assert_eq!(plan.requested_bytes, [2 * GIB; 2]);
    let plan = planned(&parts, target(40 * GIB));
    assert_eq!(plan.requested_bytes, [16 * GIB; 2]);
    assert!(refused(&parts, target(41 * GIB)).contains("over the maximum of 40 GiB"));
    assert!(refused(&small(), target(2 * GIB)).contains("--grow-to"));
}

#[test]
fn memory_that_was_taken_returns_before_any_is_plugged() {
    let mut parts = two_nodes();
    parts.balloon = Some(BalloonPart { ballooned_bytes: 3 * GIB, driver: Driver::Ready });
    let plan = planned(&parts, target(9 * GIB));
    assert_eq!((plan.mechanism, plan.ballooned_bytes), (Mechanism::Balloon, 0));
    assert_eq!(plan.requested_bytes.iter().sum::<u64>(), GIB);
}

#[test]
fn plugged_memory_goes_before_initial_memory() {
    let mut parts = two_nodes();
    parts.devices[1] = device(1, 8 * GIB);
    let plan = planned(&parts, target(6 * GIB));
    assert_eq!((plan.mechanism, plan.ballooned_bytes), (Mechanism::VirtioMem, 2 * GIB));
    assert_eq!(plan.requested_bytes, [0, 0]);
    let plan = planned(&parts, target(10 * GIB));
    assert_eq!((plan.requested_bytes, plan.ballooned_bytes), (vec![0, 2 * GIB], 0));
}

#[test]
fn a_shared_allocator_is_preferred_to_the_balloon() {
    let mut parts = two_nodes();
    parts.hard_bytes = Some(0);
    let plan = planned(&parts, target(6 * GIB));
    assert_eq!((plan.mechanism, plan.hard_bytes), (Mechanism::HyperAlloc, 2 * GIB));
    assert_eq!(plan.ballooned_bytes, 0);
    parts.hard_bytes = None;
    let plan = planned(&parts, target(6 * GIB));
    assert_eq!((plan.mechanism, plan.ballooned_bytes), (Mechanism::Balloon, 2 * GIB));
    let why = refused(&small(), target(512 * MIB));
    assert!(why.contains("cannot have less than the 1 GiB"), "{why}");
}

#[test]
fn a_node_is_resized_by_its_own_device() {
    let mut parts = two_nodes();
    parts.devices[0] = device(0, GIB);
    let on = |node, bytes| SizeTarget { bytes, node: Some(node), by: None };
    let plan = planned(&parts, on(1, 20 * GIB));
    assert_eq!(plan.requested_bytes, [GIB, 16 * GIB]);
    assert!(refused(&parts, on(2, 8 * GIB)).contains("no NUMA node 2: the VM has 2"));
    assert!(refused(&parts, on(1, 21 * GIB)).contains("maximum of 20 GiB"));
    assert!(refused(&parts, on(1, 3 * GIB)).contains("virtio-mem can reach, 4 GiB"));
    parts.devices.pop();
    assert!(refused(&parts, on(1, 8 * GIB)).contains("no virtio-mem device"));
    let by = SizeTarget { by: Some(Mechanism::Balloon), ..on(0, 8 * GIB) };
    assert!(refused(&parts, by).contains("knows no NUMA nodes"));
}

#[test]
fn a_requested_mechanism_is_used_alone() {
    let mut parts = two_nodes();
    parts.devices[0] = device(0, 2 * GIB);
    let by = |mechanism, bytes| SizeTarget { bytes, node: None, by: Some(mechanism) };
    let plan = planned(&parts, by(Mechanism::Balloon, 9 * GIB));
    assert_eq!((plan.ballooned_bytes, plan.requested_bytes), (GIB, vec![2 * GIB, 0]));
    let why = refused(&parts, by(Mechanism::Balloon, 11 * GIB));
    assert!(why.contains("maximum of 10 GiB"), "{why}");
    let why = refused(&parts, by(Mechanism::Balloon, 2 * GIB));
    assert!(why.contains("the balloon can reach, 2"), "{why}");
    let why = refused(&parts, by(Mechanism::VirtioMem, 7 * GIB));
    assert!(why.contains("virtio-mem can reach, 8 GiB"), "{why}");
    let why = refused(&parts, by(Mechanism::HyperAlloc, 7 * GIB));
    assert!(why.contains("needs one with LLFree"), "{why}");
    let why = refused(&small(), by(Mechanism::VirtioMem, 2 * GIB));
    assert!(why.contains("no virtio-mem device"), "{why}");
    let why = refused(&small(), by(Mechanism::Balloon, GIB / 2));
    assert!(why.contains("no balloon"), "{why}");
}

#[test]
fn sizes_between_two_blocks_are_refused_with_the_next_ones() {
    let why = refused(&two_nodes(), target(9 * GIB + MIB));
    let (below, above) = (9 * GIB, 9 * GIB + 2 * MIB);
    assert!(why.contains(&format!("give {below} or {above}")), "{why}");
    let why = refused(&two_nodes(), target(7 * GIB + 1));
    let (below, above) = (7 * GIB, 7 * GIB + 4096);
    assert!(why.contains(&format!("give {below} or {above}")), "{why}");
}

#[test]
fn no_guest_is_made_smaller_than_its_kernel() {
    assert!(refused(&two_nodes(), target(63 * MIB)).contains("give 64 MiB or more"));
}

#[test]
fn a_driver_that_has_nothing_to_do_may_be_absent() {
    let mut parts = two_nodes();
    parts.devices[0].driver = Driver::Absent;
    parts.balloon = Some(BalloonPart { ballooned_bytes: 0, driver: Driver::Absent });
    let on = |node| SizeTarget { bytes: 5 * GIB, node: Some(node), by: None };
    assert_eq!(planned(&parts, on(1)).check_drivers(&parts), Ok(()));
    let refused = |target| planned(&parts, target).check_drivers(&parts).unwrap_err().to_string();
    assert!(refused(on(0)).contains("the driver virtio_mem"));
    assert!(refused(target(6 * GIB)).contains("the driver virtio_balloon"));
}

proptest! {
    /// A plan leads to the target size, and once the size is reached, nothing more has to be
    /// done.
    #[test]
    fn a_plan_leads_to_the_size_and_stays(
        plugged in prop::collection::vec(0u64..8192, 0..4),
        ballooned in 0u64..4 * GIB / 4096,
        shares in any::<bool>(),
        blocks in 300u64..20_000,
    ) {
        let mut parts = two_nodes();
        let devices = (0..).zip(&plugged).map(|(node, blocks)| device(node, blocks * 2 * MIB));
        parts.devices = devices.collect();
        let ballooned_bytes = ballooned * 4096;
        parts.balloon = Some(BalloonPart { ballooned_bytes, driver: Driver::Ready });
        parts.hard_bytes = shares.then_some(0);
        let target = target(blocks * 2 * MIB);
        if let Ok(first) = plan(&parts, &target, 64 * MIB) {
            for (device, bytes) in parts.devices.iter_mut().zip(&first.requested_bytes) {
                prop_assert!(*bytes <= device.max_bytes && bytes % device.block_bytes == 0);
                (device.plugged_bytes, device.requested_bytes) = (*bytes, *bytes);
            }
            let ballooned_bytes = first.ballooned_bytes;
            parts.balloon = Some(BalloonPart { ballooned_bytes, driver: Driver::Ready });
            parts.hard_bytes = shares.then_some(first.hard_bytes);
            prop_assert_eq!(parts.size_bytes(), target.bytes);
            let next = plan(&parts, &target, 64 * MIB).expect("it was reached");
            prop_assert_eq!(next.requested_bytes, first.requested_bytes);
            prop_assert_eq!(next.ballooned_bytes, first.ballooned_bytes);
            prop_assert_eq!(next.hard_bytes, first.hard_bytes);
        } else {
            prop_assert!(target.bytes > parts.max_bytes());
        }
    }
}
