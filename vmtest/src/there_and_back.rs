//! Memory of a guest that goes to the host and comes back.

use crate::{Vm, rounds};

const MIB: u64 = 1 << 20;

/// Reclaims while all memory of the guest is in use and changes, then when nothing changes.
///
/// # Panics
/// The host gets too little of it, or the guest finds a wrong byte.
pub fn assert_goes_and_comes_back(vm: &Vm) {
    vm.guest("fill kept 100M");
    vm.churn("150M");
    for _ in 0..rounds(3, 20) {
        vm.reclaim();
        vm.churn_on(1);
    }
    assert_eq!(vm.churn_stop().wrong_bytes, 0);
    assert_freed_memory_goes_and_comes_back(vm);
    assert_eq!(vm.guest("check kept"), "0");
}

/// Reclaims what the guest has freed, and has the guest use as much again.
fn assert_freed_memory_goes_and_comes_back(vm: &Vm) {
    vm.guest("fill a 500M");
    vm.guest("free a");
    let full_bytes = vm.host_bytes();
    let report = vm.reclaim();
    assert!(vm.host_bytes() + 350 * MIB < full_bytes, "{report:?}, {full_bytes} before");
    vm.guest("fill a 500M");
    assert_eq!(vm.guest("check a"), "0");
    assert!(vm.host_bytes() > 500 * MIB);
}
