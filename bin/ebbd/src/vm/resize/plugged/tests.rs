//! Tests with a QEMU that has two devices.

use serde_json::json;

use super::*;
use crate::model::record::SizeRecord;
use crate::vm::context::machine::qemu::Qemu;
use crate::vm::context::machine::{self, Machine};
use crate::vm::context::shared_size::SharedSize;

const MIB: u64 = 1 << 20;
const REQUEST: &str = "qom-set requested-size ";

/// QEMU says that this is asked of each device, and that the guest has plugged it.
fn plugs(qemu: &Qemu, mib: [u64; 2]) {
    let device = |(node, mib): (u64, u64)| {
        let data = json!({
            "id": format!("memory{node}"),
            "node": node,
            "memaddr": (node + 1) << 40,
            "size": mib * MIB,
            "requested-size": mib * MIB,
            "max-size": 512 * MIB,
            "block-size": 2 * MIB,
        });
        json!({ "type": "virtio-mem", "data": data })
    };
    let devices: Vec<_> = (0..).zip(mib).map(device).collect();
    qemu.answers("query-memory-devices", json!(devices));
}

/// A VM with 64 and 32 MiB plugged, of which the pilot has had 4 MiB each unplugged.
fn unplugged() -> Option<(VmContext, Machine, Qemu, Resize)> {
    let (mut cx, machine) = machine::context()?;
    let qemu = Qemu::of(&mut cx);
    plugs(&qemu, [64, 32]);
    let mut resize = Resize::default();
    pilot(&mut resize, &mut cx, (96, 88)).expect("QEMU obeys");
    assert_eq!(asked(&qemu), [60, 28]);
    plugs(&qemu, [60, 28]);
    Some((cx, machine, qemu, resize))
}

fn pilot(resize: &mut Resize, cx: &mut VmContext, (from, to): (u64, u64)) -> Answer<()> {
    let request = PlugRequest { from_bytes: from * MIB, to_bytes: to * MIB };
    resize.plug_by_pilot(cx, request)
}

/// What the devices were asked for since the last call, in MiB.
fn asked(qemu: &Qemu) -> Vec<u64> {
    let told = qemu.told();
    let bytes = told.iter().filter_map(|line| line.strip_prefix(REQUEST));
    bytes.map(|bytes| bytes.parse::<u64>().expect("a number") / MIB).collect()
}

/// What is plugged, what is to be, and what was before the pilot, in MiB.
fn sizes(cx: &VmContext) -> [u64; 3] {
    let seen = seen(cx).expect("it has plugged some");
    assert!(seen.may_unplug && seen.block_bytes == 2 * MIB);
    [seen.bytes, seen.asked_bytes, seen.full_bytes].map(|bytes| bytes / MIB)
}

#[test]
fn each_device_gets_its_own_back() {
    let Some((mut cx, _machine, qemu, mut resize)) = unplugged() else { return };
    assert_eq!(sizes(&cx), [96, 88, 96], "it was asked for, and not seen yet");
    pilot(&mut resize, &mut cx, (88, 92)).expect("QEMU obeys");
    assert_eq!(asked(&qemu), [62, 30]);
    plugs(&qemu, [62, 30]);
    resize.look(&mut cx).expect("QEMU tells");
    assert_eq!(sizes(&cx), [92, 92, 96]);
    // More than it had is not to be had.
    pilot(&mut resize, &mut cx, (92, 400)).expect("QEMU obeys");
    assert_eq!((asked(&qemu), cx.record.piloted_devices.len()), (vec![64, 32], 0));
    plugs(&qemu, [64, 32]);
    resize.plug_again(&mut cx).expect("there is nothing to do");
    assert_eq!(asked(&qemu), [0; 0]);
}

#[test]
fn all_comes_back_at_once() {
    let Some((mut cx, _machine, qemu, mut resize)) = unplugged() else { return };
    resize.plug_again(&mut cx).expect("QEMU obeys");
    assert_eq!((asked(&qemu), cx.record.piloted_devices.len()), (vec![64, 32], 0));
}

#[test]
fn a_device_that_somebody_else_has_changed_is_theirs() {
    let Some((mut cx, _machine, qemu, mut resize)) = unplugged() else { return };
    plugs(&qemu, [60, 40]);
    let why = pilot(&mut resize, &mut cx, (88, 80)).expect_err("it is another size").to_string();
    assert!(why.contains("somebody else has changed"), "{why}");
    assert_eq!(sizes(&cx), [100, 100, 104]);
    resize.plug_again(&mut cx).expect("QEMU obeys");
    assert_eq!(asked(&qemu), [64], "the other one is as it was left");
    // To what it was before the pilot, too.
    let Some((mut cx, _machine, qemu, mut resize)) = unplugged() else { return };
    plugs(&qemu, [64, 32]);
    resize.look(&mut cx).expect("QEMU tells");
    assert!(cx.record.piloted_devices.is_empty());
}

#[test]
fn the_next_process_goes_on_wherever_this_one_has_ended() {
    for (mib, left) in [([60, 28], [96, 88]), ([64, 28], [32, 28]), ([64, 32], [0, 0])] {
        let Some((mut cx, _machine, qemu, _)) = unplugged() else { return };
        plugs(&qemu, mib);
        let mut next = Resize::default();
        next.look(&mut cx).expect("QEMU tells");
        let devices = &cx.record.piloted_devices;
        let full: u64 = devices.iter().map(|device| device.full_bytes / MIB).sum();
        let asked: u64 = devices.iter().map(|device| device.asked_bytes / MIB).sum();
        assert_eq!([full, asked], left, "{mib:?}");
    }
}

#[test]
fn an_operators_size_is_left_alone() {
    let Some((mut cx, _machine, qemu, mut resize)) = unplugged() else { return };
    resize.look(&mut cx).expect("QEMU tells");
    resize.stay(&mut cx, None, &SharedSize::default()).expect("a record");
    assert!(cx.record.piloted_devices.is_empty(), "the size that it has is the operator's");
    let size = SizeRecord { bytes: cx.initial_bytes(), node: None, by: None };
    cx.record.note(|record| record.size = Some(size));
    assert_eq!(seen(&cx), None);
    let why = pilot(&mut resize, &mut cx, (88, 80)).expect_err("the operator's").to_string();
    assert!(why.contains("ebb resize has set its size"), "{why}");
    assert_eq!(asked(&qemu), [0; 0]);
}

#[test]
fn a_qemu_that_may_wait_is_not_asked() {
    let Some((mut cx, _machine, qemu, mut resize)) = unplugged() else { return };
    cx.record.note(|record| record.limit_bytes = Some(60 * MIB));
    cx.no_room = Some("the swap file is full".into());
    qemu.asked();
    let why = pilot(&mut resize, &mut cx, (88, 96)).expect_err("it waits").to_string();
    assert!(why.contains("its guest waits for room"), "{why}");
    resize.keep_figures(&mut cx);
    assert_eq!(qemu.asked(), [""; 0]);
}

#[test]
fn a_guest_that_is_short_of_memory_has_all_back_without_the_pilot() {
    let Some((mut cx, _machine, qemu, mut resize)) = unplugged() else { return };
    let initial_bytes = cx.pager.ram().bytes();
    for (available_mib, wanted) in [(512, vec![]), (10, vec![64, 32])] {
        qemu.balloons(initial_bytes, available_mib * MIB);
        resize.looked = None;
        resize.keep_figures(&mut cx);
        assert_eq!(asked(&qemu), wanted);
    }
    assert!(cx.record.piloted_devices.is_empty());
}

#[test]
fn figures_are_asked_for_while_the_pilot_wants_them() {
    let Some((mut cx, _machine)) = machine::context() else { return };
    let qemu = Qemu::of(&mut cx);
    plugs(&qemu, [64, 32]);
    qemu.balloons(cx.pager.ram().bytes(), 512 * MIB);
    let mut resize = Resize::default();
    resize.keep_figures(&mut cx);
    assert_eq!(qemu.asked(), [""; 0], "the host is not short");
    cx.mailbox.note_watched(true);
    resize.keep_figures(&mut cx);
    assert!(qemu.told().contains(&"qom-set guest-stats-polling-interval 1".into()));
    assert_eq!(sizes(&cx), [96, 96, 96]);
}
