//! Tests of the size controller.

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;

use ebb_policy::resize::{BalloonPart, Driver};
use ebb_vm::qmp::Qmp;
use ebb_vm::reach::{DeviceKind, MemoryUser};

use super::*;
use crate::vm::context::machine;
use crate::vm::context::machine::qemu::Qemu;
use crate::vm::context::qmp_link::QmpLink;

const MIB: u64 = 1 << 20;

fn target_record(bytes: u64) -> SizeRecord {
    SizeRecord { bytes, node: None, by: None }
}

fn plan_of_balloon(ballooned_bytes: u64, hard_bytes: u64) -> Plan {
    Plan {
        mechanism: Mechanism::Balloon,
        reason: String::new(),
        requested_bytes: Vec::new(),
        ballooned_bytes,
        hard_bytes,
    }
}

/// QEMU ends at its first command. The shared allocator's part is on record by then.
#[test]
fn a_goal_outlives_a_request_that_failed() {
    let Some((mut cx, _run)) = machine::context() else { return };
    let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    let silence = cx.pager.room().evictor_waits();
    cx.qmp = QmpLink::new(cx.process.pid(), cx.record.monitor(), Some(Qmp::over(ours)), silence);
    let qemu = std::thread::spawn(move || {
        BufReader::new(theirs).read_line(&mut String::new()).expect("balloon");
    });
    let initial_bytes = cx.initial_bytes();
    let (node_bytes, pluggers) = (vec![initial_bytes], Vec::new());
    cx.capabilities = Some(Capabilities { initial_bytes, node_bytes, pluggers, balloon: None });
    let parts = SizeParts {
        initial_bytes,
        balloon: Some(BalloonPart { ballooned_bytes: 0, driver: Driver::Ready }),
        hard_bytes: Some(0),
        ..SizeParts::default()
    };
    let mut resize = Resize::default();
    assert!(resize.apply(&mut cx, &parts, &plan_of_balloon(HUGE_BYTES, HUGE_BYTES)).is_err());
    assert_eq!(cx.record.size_bytes, Some(initial_bytes - HUGE_BYTES));
    assert_eq!(resize.take_goal(), SharedGoal::New);
    assert_eq!(resize.take_goal(), SharedGoal::Same);
    qemu.join().expect("QEMU");
}

#[test]
fn a_size_that_cannot_be_is_refused_with_what_is_in_the_way() {
    let Some((mut cx, _machine)) = machine::context() else { return };
    let initial_bytes = cx.initial_bytes();
    let refusal = |cx: &VmContext, bytes| {
        let target = SizeTarget { bytes, node: None, by: None };
        let prepared = Resize::default().prepare(cx, target, &SharedSize::default());
        prepared.err().expect("it is refused").to_string()
    };
    let why = refusal(&cx, initial_bytes + HUGE_BYTES);
    assert!(why.contains("over the maximum") && !why.contains("trusted"), "{why}");
    // A known guest might share its allocator.
    let why = refusal(&cx, initial_bytes - HUGE_BYTES);
    assert!(why.contains("it has no balloon") && why.contains("the guest is not trusted"), "{why}");
    cx.reaching.found = vec![MemoryUser { name: "vfio-pci".into(), kind: DeviceKind::Vfio }];
    let why = refusal(&cx, initial_bytes - HUGE_BYTES);
    assert!(why.contains("no memory is reclaimed because of vfio-pci"), "{why}");
}

#[test]
fn a_target_is_pursued_unless_the_guest_waits_for_room() {
    let Some((mut cx, _machine)) = machine::context() else { return };
    let (mut resize, shared) = (Resize::default(), SharedSize::default());
    assert!(!resize.is_due(&cx, &shared), "it has no target");
    let initial_bytes = cx.initial_bytes();
    cx.record.note(|record| {
        record.size = Some(target_record(initial_bytes - HUGE_BYTES));
        record.limit_bytes = Some(initial_bytes);
    });
    resize.progress = Some(Progress::new(&plan_of_balloon(HUGE_BYTES, 0), initial_bytes, 0, 0));
    assert!(resize.is_due(&cx, &shared));
    assert_eq!(resize.state(&cx, &shared), SizeState::Moving);
    cx.no_room = Some("the swap file is full".into());
    assert!(!resize.is_due(&cx, &shared));
    let report = resize.report(&cx, &shared).expect("it has a target");
    assert_eq!(report.state, SizeState::Waiting);
    assert!(report.stopped_by.ends_with("once there is room: the swap file is full"), "{report:?}");
    // The size that it has is no target.
    let stayed = resize.stay(&mut cx, None, &shared).expect("a record");
    assert_eq!(stayed.stopped_by, "its target of 62 MiB was removed");
    assert!(cx.record.size.is_none() && resize.report(&cx, &shared).is_err());
}

#[test]
fn a_guest_under_pressure_has_its_balloon_back_and_is_left_alone() {
    let Some((mut cx, _machine)) = machine::context() else { return };
    let qemu = Qemu::of(&mut cx);
    let (mut resize, shared, initial_bytes) =
        (Resize::default(), SharedSize::default(), cx.initial_bytes());
    let small_bytes = initial_bytes - 4 * MIB;
    cx.record.note(|record| record.size = Some(target_record(small_bytes)));
    let mut pursue = |left_bytes, available_bytes| {
        qemu.balloons(left_bytes, available_bytes);
        assert_eq!(resize.pursue(&mut cx, &shared), SharedGoal::Same);
        let mut told = qemu.told();
        told.retain(|line| line.starts_with("balloon "));
        told
    };
    assert_eq!(pursue(initial_bytes, 512 * MIB), [format!("balloon {small_bytes}")]);
    assert_eq!(pursue(small_bytes, 10 * MIB), [format!("balloon {initial_bytes}")]);
    assert_eq!(pursue(initial_bytes, 512 * MIB), [""; 0]);
    let report = resize.report(&cx, &shared).expect("it has a target");
    assert_eq!(report.state, SizeState::Waiting);
    assert!(report.stopped_by.contains("so Ebb emptied its balloon"), "{report:?}");
    assert_eq!(resize.balloon_status(&cx).map(|status| status.releases), Some(1));
}

#[test]
fn after_a_reset_the_balloon_is_empty_and_the_progress_begins_anew() {
    let Some((mut cx, _machine)) = machine::context() else { return };
    let qemu = Qemu::of(&mut cx);
    qemu.balloons(cx.initial_bytes(), 512 * MIB);
    let (mut resize, shared) = (Resize::default(), SharedSize::default());
    resize.look(&mut cx).expect("QEMU tells");
    let (parts, initial_bytes) = (size_parts(&cx, &shared), cx.initial_bytes());
    let plan = plan_of_balloon(HUGE_BYTES, 0);
    resize.apply(&mut cx, &parts, &plan).expect("QEMU obeys");
    resize.progress = Some(Progress::new(&plan, initial_bytes, 0, 0));
    resize.note_blocked_reason("of the kernel before".into());
    qemu.told();
    resize.on_reset(&mut cx);
    assert_eq!(qemu.told(), [format!("balloon {initial_bytes}")]);
    assert!(resize.progress.as_ref().is_some_and(|progress| progress.blocked_reason.is_none()));
    resize.on_reset(&mut cx);
    assert_eq!(qemu.told(), [""; 0], "it is empty");
}
