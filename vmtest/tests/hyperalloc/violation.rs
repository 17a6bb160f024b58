//! A VM that touches memory which it may not have.

use ebb_api::OnViolation;
use serde_json::json;
use vmtest::{Host, Vm, assets, require, until};

use crate::{MIB, assert_consistent, resize, start};

/// Reads guest-physical memory all over, as nothing in the guest would: most of it is no longer the
/// guest's.
fn touch_all_over(vm: &Vm) {
    for at in (64..1024).step_by(32) {
        let line = format!("xp /1xg {:#x}", at * MIB);
        vm.qmp("human-monitor-command", json!({ "command-line": line }));
    }
}

#[test]
fn a_vm_that_touches_what_it_may_not_have_is_stopped_if_wanted() {
    require!(assets::kernel("llfree"));
    let vm = start(&Host::new(), |guest| guest);
    assert_eq!(resize(&vm, "200M").bytes, 200 * MIB);
    touch_all_over(&vm);
    let sharing = vm.status().sharing;
    assert!(sharing.violations > 4 && sharing.stopped.is_none(), "{sharing:?}");
    let report = vm.ebb("resize 200M --on-violation stop --json").ok();
    assert!(report.contains("the target was reached"), "{report}");
    resize(&vm, "1G");
    resize(&vm, "200M");
    touch_all_over(&vm);
    let sharing = until("the VM to be stopped", || {
        Some(vm.status().sharing).filter(|sharing| sharing.stopped.is_some())
    });
    assert_eq!(sharing.on_violation, OnViolation::Stop);
    let state = vm.qmp("query-status", json!({}));
    assert_eq!(state["status"], "paused", "{state}");
    vm.qmp("cont", json!({}));
    resize(&vm, "1G");
    vm.guest("fill a 600M");
    assert_eq!(vm.guest("check a"), "0");
    assert_consistent(&vm);
}
