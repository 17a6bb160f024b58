//! The test bench itself: every kernel boots, and the guest's init does what it says.

use vmtest::{Guest, Host, assets, require};

fn boots(label: &str) {
    let vm = Host::new().qemu(Guest::debian(label));
    assert_eq!(vm.guest("ping"), "done");
    let release = label.trim_end_matches(|c: char| !c.is_ascii_digit());
    let version = vm.guest("cat /proc/sys/kernel/osrelease");
    assert!(version.starts_with(release), "{version}");
}

#[test]
fn kernel_6_1_cloud_boots() {
    require!(assets::kernel("6.1-cloud"));
    boots("6.1-cloud");
}

#[test]
fn kernel_6_1_generic_boots() {
    require!(assets::kernel("6.1"));
    boots("6.1");
}

#[test]
fn kernel_5_10_boots() {
    require!(assets::kernel("5.10"));
    boots("5.10");
}

#[test]
fn kernel_6_12_boots() {
    require!(assets::kernel("6.12"));
    boots("6.12");
}

#[test]
fn kernel_7_boots() {
    require!(assets::kernel("7.x"));
    boots("7.x");
}

#[test]
fn memory_keeps_its_pattern_until_it_is_freed() {
    let vm = Host::new().qemu(Guest::debian("6.1-cloud"));
    vm.guest("fill a 300M");
    vm.guest("fill b 100M");
    assert_eq!(vm.guest("check a"), "0");
    vm.guest("refill a");
    assert!(vm.guest("touch a").parse::<u64>().expect("pages per second") > 1000);
    assert_eq!(vm.guest("check a"), "0");
    assert!(vm.host_bytes() > 400 << 20, "{}", vm.host_bytes());
    vm.guest("free a");
    assert_eq!(vm.guest("check b"), "0");
    assert_eq!(vm.try_guest("check a").unwrap_err().0, "there is no a");
}

#[test]
fn a_guest_refuses_what_it_has_no_memory_for() {
    let vm = Host::new().qemu(Guest::debian("6.1-cloud"));
    let why = vm.try_guest("fill a 2G").unwrap_err().0;
    assert!(why.contains("available"), "{why}");
    assert_eq!(vm.guest("ping"), "done");
}

#[test]
fn files_and_disks_keep_their_pattern() {
    let vm = Host::new().qemu(Guest::debian("6.1-cloud").disk("64M"));
    vm.guest("files f 50M");
    assert_eq!(vm.guest("checkfiles f"), "0");
    vm.guest("rmfiles f");
    vm.guest("dropcaches");
    assert_eq!(vm.guest("disk /dev/vda 64M"), "0");
}

#[test]
fn load_runs_in_the_background_and_counts_its_cycles() {
    let vm = Host::new().qemu(Guest::debian("6.1-cloud"));
    vm.churn("200M");
    vm.churn_on(5);
    let load = vm.churn_stop();
    assert!(load.cycles >= 5, "{load:?}");
    assert_eq!(load.wrong_bytes, 0);
    assert!(vm.guest("bench mem 1").parse::<u64>().expect("pages per second") > 1000);
}

#[test]
fn a_guest_reboots_and_turns_itself_off() {
    let vm = Host::new().qemu(Guest::debian("6.1-cloud"));
    let boot = vm.guest("cat /proc/sys/kernel/random/boot_id");
    vm.reboot();
    assert_ne!(vm.guest("cat /proc/sys/kernel/random/boot_id"), boot);
    vm.power_off();
}

#[test]
fn a_kernel_that_complains_is_noticed() {
    let vm = Host::new().qemu(Guest::debian("6.1-cloud"));
    assert!(vm.complaints().is_empty());
    vm.panic();
    assert!(vm.complaints().iter().any(|line| line.contains("Kernel panic")));
}

#[test]
fn a_stopped_guest_stands_still() {
    let vm = Host::new().qemu(Guest::debian("6.1-cloud").machine("pc").nodes(2).memory("6G"));
    vm.churn("100M");
    vm.stopped(|| assert_eq!(vm.qmp("query-status", serde_json::json!({}))["running"], false));
    vm.churn_on(1);
    assert_eq!(vm.churn_stop().wrong_bytes, 0);
    assert!(vm.guest("cat /proc/buddyinfo").contains("Node 1"));
}
