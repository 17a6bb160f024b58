//! Ebb reclaims from a Linux that it knows by its registration only, as it does from one that it has
//! inspected.

use vmtest::{Guest, Host, Vm, assert_goes_and_comes_back, assets, require, rounds, until};

/// A host that reads no note.
fn host() -> Host {
    let host = Host::new();
    host.set("EBB_METADATA_BY", "registration");
    host
}

/// Starts a guest that registers.
fn registered(guest: Guest) -> Vm {
    let vm = host().run(guest);
    let why = vm.ebb("reclaim").refused();
    assert!(why.contains("no registration is in its memory"), "{why}");
    insert(&vm);
    vm
}

fn insert(vm: &Vm) {
    vm.guest("sh busybox insmod /vprobe.ko");
    wait_known(vm);
}

fn wait_known(vm: &Vm) {
    until("a registration that Ebb knows", || (vm.ebb("reclaim").code == Some(0)).then_some(()));
    let guest = vm.status().guest;
    assert!(guest.trusted && guest.registered, "{guest:?}");
}

fn each_mode(label: &str) {
    require!(assets::vprobe(label));
    for mode in ["release", "strict"] {
        assert_goes_and_comes_back(&registered(Guest::debian(label).mode(mode)));
    }
}

#[test]
fn linux_6_1_gives_its_memory_in_each_mode() {
    each_mode("6.1-cloud");
}

#[test]
fn linux_5_10_gives_its_memory_in_each_mode() {
    each_mode("5.10");
}

#[test]
fn linux_6_12_gives_its_memory_in_each_mode() {
    each_mode("6.12");
}

#[test]
fn linux_7_gives_its_memory_in_each_mode() {
    each_mode("7.x");
}

#[test]
fn a_module_that_is_unloaded_ends_the_registration() {
    require!(assets::vprobe("6.1-cloud"));
    let vm = registered(Guest::debian("6.1-cloud").mode("strict"));
    vm.guest("fill kept 100M");
    vm.reclaim();
    vm.guest("sh busybox rmmod vprobe");
    until("all memory to be back", || (vm.status().emptied_bytes == 0).then_some(()));
    vm.ebb("reclaim").refused();
    insert(&vm);
    assert_eq!(vm.guest("check kept"), "0");
}

#[test]
fn a_guest_that_is_reset_registers_anew() {
    require!(assets::vprobe("6.1-cloud"));
    let vm = registered(Guest::debian("6.1-cloud").mode("strict"));
    vm.guest("fill a 300M");
    vm.guest("free a");
    vm.reclaim();
    vm.reboot();
    vm.ebb("reclaim").refused();
    insert(&vm);
    assert_goes_and_comes_back(&vm);
}

/// The process of the VM is killed again and again while the guest works.
#[test]
fn no_byte_is_lost_when_the_process_dies() {
    require!(assets::vprobe("6.1-cloud"));
    let vm = registered(Guest::debian("6.1-cloud").mode("strict"));
    vm.guest("fill kept 100M");
    vm.churn("150M");
    for _ in 0..rounds(3, 20) {
        vm.reclaim();
        vm.host().kill_servers();
        vm.churn_on(1);
        wait_known(&vm);
    }
    assert_eq!(vm.churn_stop().wrong_bytes, 0);
    assert_eq!(vm.guest("check kept"), "0");
}

/// A process of the guest writes a page that looks like a record, and its kernel registers nothing.
#[test]
fn the_note_comes_first_unless_told_otherwise() {
    require!(assets::vprobe("6.1-cloud"));
    let vm = Host::new().run(Guest::debian("6.1-cloud"));
    vm.guest("sh busybox insmod /vprobe.ko");
    vm.reclaim();
    let guest = vm.status().guest;
    assert!(guest.trusted && !guest.registered && guest.kernel.is_some(), "{guest:?}");
}
