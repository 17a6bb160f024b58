//! Tests of what an answer of QEMU's is worth by a monitor that tells of resets late, as libvirt's.

use super::*;
use crate::vm::context::VmContext;
use crate::vm::context::machine::qemu::Qemu;
use crate::vm::context::machine::{self, Machine};

/// A VM with a trusted guest that is attached through libvirt.
fn through_libvirt() -> Option<(VmContext, Machine, Qemu)> {
    let (mut cx, machine) = machine::context()?;
    cx.record.note(|record| record.domain = Some("4dea22b3-1d52-d8f3-2516-782e98ab3fa0".into()));
    let qemu = machine.boot_trusted(&mut cx);
    assert!(!cx.qmp.hears_at_once());
    let process = Arc::new(cx.process.try_clone().expect("a descriptor"));
    let seen = Descriptors::now(&process).expect("its descriptors");
    cx.reaching.descriptors = Some(Arc::new(seen));
    qemu.asked();
    Some((cx, machine, qemu))
}

fn liveness(cx: &mut VmContext) -> Liveness<'_> {
    let VmContext { qmp, guest, reaching, pager, .. } = cx;
    Liveness::new(qmp, guest, reaching, pager)
}

#[test]
fn an_answer_counts_once() {
    let Some((mut cx, _machine, qemu)) = through_libvirt() else { return };
    let mut liveness = liveness(&mut cx);
    assert!(liveness.runs() && liveness.runs());
    assert_eq!(qemu.asked(), ["info registers -a"; 2]);
}

/// The registers are those of the same kernel: it may have booted again.
#[test]
fn a_reset_that_comes_with_the_answer_counts() {
    let Some((mut cx, _machine, qemu)) = through_libvirt() else { return };
    let reports = qemu.reporter();
    qemu.waits_for(move || reports("RESET"));
    let mut liveness = liveness(&mut cx);
    assert!(!liveness.runs() && !liveness.runs());
    assert_eq!(liveness.ended(), Some(End::Reset));
    assert_eq!(qemu.asked().len(), 1, "nobody is asked any more");
}
