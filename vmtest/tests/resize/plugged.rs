//! Plugged memory: it is reclaimed and limited as any other.

use vmtest::{Host, rounds, until};

use crate::{GIB, MIB, OTHERS_BYTES, growing, reach, total_bytes, wait_total};

/// Free memory is reclaimed from it as from other memory, while blocks come and go.
#[test]
fn plugged_memory_is_reclaimed_as_any_other() {
    for mode in ["strict", "release"].into_iter().take(rounds(1, 2) as usize) {
        let vm = Host::new().run(growing().mode(mode));
        vm.wait_trusted();
        let began_bytes = total_bytes(&vm);
        vm.churn("100M");
        for _ in 0..rounds(1, 4) {
            reach(&vm, "1536M");
            // QEMU has it before Linux has put it online.
            wait_total(&vm, began_bytes + 512 * MIB);
            vm.guest("fill a 1100M");
            vm.guest("free a");
            let before = vm.host_bytes();
            until("the free memory to be reclaimed", || {
                vm.reclaim();
                (vm.host_bytes() + 800 * MIB < before).then_some(())
            });
            vm.churn_on(1);
            vm.ebb("auto on --interval 100ms").ok();
            vm.guest("fill a 900M");
            assert_eq!(vm.guest("check a"), "0");
            vm.guest("free a");
            reach(&vm, "1G");
            vm.churn_on(1);
            vm.ebb("auto off").ok();
        }
        assert_eq!(vm.churn_stop().wrong_bytes, 0);
        assert!(vm.host_bytes() < GIB + OTHERS_BYTES);
        vm.detach();
        vm.guest("fill a 500M");
        assert_eq!(vm.guest("check a"), "0");
    }
}

/// A limit covers plugged memory, too, and unplugging drops what is evicted of it.
#[test]
fn plugged_memory_is_kept_at_a_limit() {
    let vm = Host::new().run(growing());
    vm.wait_trusted();
    let began_bytes = total_bytes(&vm);
    reach(&vm, "1536M");
    wait_total(&vm, began_bytes + 512 * MIB);
    vm.ebb("limit 700M").ok();
    vm.guest("fill a 1100M");
    assert_eq!(vm.guest("check a"), "0");
    assert!(vm.status().limit.saved_bytes > 300 * MIB);
    vm.guest("free a");
    reach(&vm, "1G");
    vm.ebb("limit off").ok();
    reach(&vm, "1536M");
    wait_total(&vm, began_bytes + 512 * MIB);
    vm.guest("fill b 1100M");
    assert_eq!(vm.guest("check b"), "0");
}
