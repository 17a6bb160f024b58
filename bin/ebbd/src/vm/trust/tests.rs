//! Tests of trust in a made-up kernel.

use ebb_units::{Gfn, Gpa};
use serde_json::json;

use super::*;
use crate::vm::context::machine::{self, FILE_BYTES};

/// Asks whether the guest is trusted, and acts on the answer.
fn is_trusted(trust: &mut Trust, cx: &mut VmContext) -> bool {
    let runs = trust.look(cx);
    trust.settle(cx, runs)
}

#[test]
fn a_kernel_is_believed_as_long_as_the_processor_runs_it() {
    let Some((mut cx, machine)) = machine::context() else { return };
    let qemu = machine.boot(&mut cx);
    let mut trust = Trust::default();
    assert!(is_trusted(&mut trust, &mut cx));
    let kernel = cx.guest.guest().expect("it is trusted").note().digest();
    assert_eq!(cx.record.kernel, Some(kernel));
    assert!(cx.guest.witness().is_some() && !trust.has_lost_its_kernel(&cx));
    // What is in memory is as before.
    qemu.runs(Gpa(0));
    assert!(!trust.look(&mut cx) && trust.has_lost_its_kernel(&cx));
    assert!(!trust.settle(&mut cx, false) && cx.guest.witness().is_none());
}

#[test]
fn a_new_kernel_is_not_trusted_before_what_was_reclaimed_is_back() {
    let Some((mut cx, machine)) = machine::context() else { return };
    let _qemu = machine.boot(&mut cx);
    cx.record.note(|record| record.kernel = Some(1));
    let mut trust = Trust::default();
    assert!(!is_trusted(&mut trust, &mut cx));
    let why = cx.guest.guest().unwrap_err();
    assert!(why.contains("earlier kernel is not back yet"), "{why}");
    trust.bring_back_for_next(&mut cx);
    assert_eq!(cx.record.kernel, None);
    assert!(is_trusted(&mut trust, &mut cx));
}

/// Devices wait for memory in release mode.
#[test]
fn for_the_next_kernel_memory_comes_back_in_strict_mode_alone() {
    for (mode, left) in [(Mode::Release, 8), (Mode::Strict, 0)] {
        let Some((mut cx, machine)) = machine::context() else { return };
        cx.record.note(|record| (record.mode, record.kernel) = (mode, Some(1)));
        let frames = FrameRange::new(Gfn(0), 8);
        machine.evict(&mut cx, frames);
        Trust::default().bring_back_for_next(&mut cx);
        let is_evicted = |gfn: &Gfn| cx.pager.ledger().content(*gfn).is_evicted();
        assert_eq!(frames.frames().filter(is_evicted).count(), left, "{mode:?}");
        assert_eq!(cx.record.kernel, None);
    }
}

/// In strict mode, all memory is watched already.
#[test]
fn page_metadata_is_watched_in_release_mode_alone() {
    for (mode, is_watched) in [(Mode::Release, true), (Mode::Strict, false)] {
        let Some((mut cx, machine)) = machine::context() else { return };
        cx.record.note(|record| record.mode = mode);
        let _qemu = machine.boot(&mut cx);
        let mut trust = Trust::default();
        assert!(is_trusted(&mut trust, &mut cx));
        assert_eq!(trust.watched == metadata_frames(&cx), is_watched, "{mode:?}");
        trust.forget_watches();
        assert_eq!(trust.watched, []);
    }
}

#[test]
fn other_memory_at_an_address_ends_the_trust() {
    let Some((mut cx, machine)) = machine::with_files(2) else { return };
    let qemu = machine.boot(&mut cx);
    let device = json!({ "id": "d", "addr": FILE_BYTES, "size": FILE_BYTES });
    qemu.answers("query-memory-devices", json!([{ "type": "dimm", "data": device }]));
    let is_at = |hva: u64| {
        let answer = format!("Host virtual address for {FILE_BYTES:#x} (m) is {hva:#x}");
        qemu.answers(&format!("gpa2hva {FILE_BYTES:#x}"), json!(answer));
    };
    let hva = cx.pager.ram().regions().last().expect("a region").hva.0;
    is_at(hva);
    let mut trust = Trust::default();
    assert!(trust.look(&mut cx));
    is_at(hva + FILE_BYTES);
    assert!(!trust.look(&mut cx));
    let why = cx.guest.guest().unwrap_err();
    assert!(why.contains("other memory is at its address 0x4000000 now"), "{why}");
}
