//! What Ebb reads from the guest's memory equals what the guest's kernel says of itself.

use std::collections::HashMap;

use ebb_api::VmStatus;
use vmtest::{Guest, Host, Vm, assets, require};

/// Tolerance, since the guest counts some things for each processor and adds them up later.
const TOLERANCE_BYTES: u64 = 2 << 20;

/// Free blocks by order, over all zones, as in `/proc/buddyinfo`.
fn free_blocks(vm: &Vm) -> [u64; 11] {
    let mut blocks = [0; 11];
    for line in vm.guest("cat /proc/buddyinfo").lines() {
        // The line has the form: Node 0, zone DMA32 3 2 1 ...
        let counts = line.split_whitespace().skip(4);
        blocks
            .iter_mut()
            .zip(counts)
            .for_each(|(sum, count)| *sum += count.parse::<u64>().unwrap());
    }
    blocks
}

/// Ebb's view of the stopped guest and the guest's own fields, taken when both see the same free
/// memory. The guest may compact its memory between its own two looks, and the daemon may answer with
/// counts from before the stop: it shares them for up to a second. So all is read again while the
/// views differ.
fn undisturbed(vm: &Vm) -> (VmStatus, HashMap<String, u64>) {
    let mut seen = Vec::new();
    for _ in 0..50 {
        let (fields, before) = (vm.meminfo(), free_blocks(vm));
        let status = vm.stopped(|| vm.status());
        let after = free_blocks(vm);
        if before == after && status.guest.free_blocks == Some(before) {
            return (status, fields);
        }
        seen.push((before, status.guest.free_blocks, after));
    }
    panic!("free blocks before, in Ebb's view, and after differ each time: {seen:?}");
}

/// Leaves memory of all kinds, with holes of all sizes in it.
fn fragment(vm: &Vm) {
    vm.churn("100M");
    vm.churn_on(3);
    vm.guest("fill a 150M");
    vm.guest("files f 60M");
    vm.guest("fill b 30M");
    vm.churn_stop();
    vm.guest("free a");
    vm.guest("fill c 70M");
}

fn assert_near(what: &str, ebb: Option<u64>, guest: u64) {
    let ebb = ebb.unwrap_or_else(|| panic!("no {what}"));
    assert!(ebb.abs_diff(guest) <= TOLERANCE_BYTES, "{what}: Ebb {ebb}, the guest {guest}");
}

fn assert_equals_the_guests_own(vm: &Vm) {
    fragment(vm);
    vm.wait_trusted();
    let (status, fields) = undisturbed(vm);
    assert_near("anonymous", status.guest.anonymous_bytes, fields["AnonPages"]);
    assert_near("file", status.guest.file_bytes, fields["Cached"] + fields["Buffers"]);
    assert_near("slab", status.guest.slab_bytes, fields["Slab"]);
    assert_near("page tables", status.guest.page_table_bytes, fields["PageTables"]);
    assert_near("offline", status.guest.offline_bytes, 0);
}

#[test]
fn kernel_6_1_cloud() {
    let vm = Host::new().run(Guest::debian("6.1-cloud"));
    assert_equals_the_guests_own(&vm);
}

#[test]
fn kernel_6_1_generic() {
    require!(assets::kernel("6.1"));
    let vm = Host::new().run(Guest::debian("6.1"));
    assert_equals_the_guests_own(&vm);
}

#[test]
fn kernel_5_10() {
    require!(assets::kernel("5.10"));
    let vm = Host::new().run(Guest::debian("5.10"));
    assert_equals_the_guests_own(&vm);
}

#[test]
fn kernel_6_12() {
    require!(assets::kernel("6.12"));
    let vm = Host::new().run(Guest::debian("6.12"));
    assert_equals_the_guests_own(&vm);
}

#[test]
fn kernel_7() {
    require!(assets::kernel("7.x"));
    let vm = Host::new().run(Guest::debian("7.x"));
    assert_equals_the_guests_own(&vm);
}

#[test]
fn without_address_randomization() {
    let vm = Host::new().run(Guest::debian("6.1-cloud").append("nokaslr"));
    assert_equals_the_guests_own(&vm);
}

#[test]
fn with_page_tables_of_five_levels() {
    let vm = Host::new().run(Guest::debian("6.1-cloud").qemu_args("-cpu max"));
    assert!(vm.guest("cat /proc/cpuinfo").contains("la57"), "five levels are in use");
    assert_equals_the_guests_own(&vm);
}

#[test]
fn with_memory_above_4_gib_on_two_nodes() {
    let guest = Guest::debian("6.1-cloud").memory("6G").nodes(2);
    let vm = Host::new().qemu(guest);
    vm.attach();
    assert_equals_the_guests_own(&vm);
}

#[test]
fn ballooned_memory_is_offline() {
    let vm = Host::new().run(Guest::debian("6.1-cloud").qemu_args("-device virtio-balloon-pci"));
    vm.qmp("balloon", serde_json::json!({ "value": 700 << 20 }));
    vmtest::until("the balloon", || {
        let now = vm.qmp("query-balloon", serde_json::json!({}));
        (now["actual"] == 700 << 20).then_some(())
    });
    vm.wait_trusted();
    let offline_bytes = undisturbed(&vm).0.guest.offline_bytes;
    assert_near("offline", offline_bytes, 324 << 20);
}
