//! A QEMU that Ebb did not start: attached, detached, or refused.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ebb_sys::process::Process;
use serde_json::json;
use vmtest::assets::program_directory;
use vmtest::{Guest, Host, Ran, Vm, rounds, until};

/// Checks that there is no userfaultfd and no protection, as if Ebb had never managed it.
fn assert_no_trace(vm: &Vm) {
    let descriptors = fs::read_dir(format!("/proc/{}/fd", vm.pid())).unwrap().flatten();
    let links = descriptors.filter_map(|entry| fs::read_link(entry.path()).ok());
    let left = links.filter(|link| link.to_string_lossy().contains("userfaultfd")).count();
    assert_eq!(left, 0, "a userfaultfd is left in QEMU");
    let smaps = fs::read_to_string(format!("/proc/{}/smaps", vm.pid())).unwrap();
    let mut flags = smaps.lines().filter_map(|line| line.strip_prefix("VmFlags:"));
    let watched = |flag: &str| ["um", "uw", "ui"].contains(&flag);
    assert!(!flags.any(|line| line.split_whitespace().any(watched)), "a range is left registered");
}

fn assert_comes_and_goes(vm: &Vm) {
    vm.guest("fill kept 100M");
    vm.churn("100M");
    vm.attach();
    vm.wait_trusted();
    vm.reclaim();
    vm.churn_on(1);
    vm.reclaim();
    vm.detach();
    assert_no_trace(vm);
    vm.churn_on(1);
    assert_eq!(vm.churn_stop().wrong_bytes, 0);
    assert_eq!(vm.guest("check kept"), "0");
}

#[test]
fn again_and_again_in_strict_mode() {
    let host = Host::new();
    let vm = host.qemu(Guest::debian("6.1-cloud").mode("strict"));
    for _ in 0..rounds(3, 20) {
        assert_comes_and_goes(&vm);
    }
    host.kill9();
    vm.guest("fill a 600M");
    assert_eq!(vm.guest("check a"), "0");
}

#[test]
fn in_release_mode() {
    let vm = Host::new().qemu(Guest::debian("6.1-cloud").mode("release"));
    assert_comes_and_goes(&vm);
}

#[test]
fn a_pc_with_memory_above_4_gib() {
    let guest = Guest::debian("6.1-cloud").machine("pc").memory("4G").mode("strict");
    let vm = Host::new().qemu(guest);
    vm.guest("fill a 3G");
    vm.guest("free a");
    vm.attach();
    let before = vm.host_bytes();
    vm.reclaim();
    assert!(vm.host_bytes() + (2 << 30) < before);
    assert_comes_and_goes_attached(&vm, "2G");
}

#[test]
fn a_q35_with_two_memory_backends_on_two_nodes() {
    let guest = Guest::debian("6.1-cloud").nodes(2).memory("4G").mode("strict");
    let vm = Host::new().qemu(guest);
    vm.guest("fill a 3G");
    vm.guest("free a");
    vm.attach();
    let before = vm.host_bytes();
    vm.reclaim();
    assert!(vm.host_bytes() + (2 << 30) < before);
    assert_comes_and_goes_attached(&vm, "2G");
}

fn assert_comes_and_goes_attached(vm: &Vm, size: &str) {
    vm.guest(&format!("fill a {size}"));
    assert_eq!(vm.guest("check a"), "0");
    vm.guest("free a");
    vm.reclaim();
    vm.detach();
    assert_no_trace(vm);
    vm.guest(&format!("fill a {size}"));
    assert_eq!(vm.guest("check a"), "0");
}

/// Checks that the refusal is one line, nothing is managed, nothing is left in QEMU, and the guest
/// goes on.
fn assert_refused(vm: &Vm, reason: &str) {
    let why = vm.try_attach().refused();
    assert!(why.contains(reason), "{why}");
    assert!(vm.host().list().is_empty());
    assert_no_trace(vm);
    assert_eq!(vm.guest("ping"), "done");
}

#[test]
fn private_memory_is_refused() {
    let vm = Host::new().qemu(Guest::debian("6.1-cloud").ram("ram"));
    assert_refused(&vm, "shared");
}

#[test]
fn a_memfd_mapped_privately_is_refused() {
    let vm = Host::new().qemu(Guest::debian("6.1-cloud").ram("memfd,share=off"));
    assert_refused(&vm, "shared");
}

#[test]
fn a_managed_vm_cannot_be_attached() {
    let host = Host::new();
    let vm = host.qemu(Guest::debian("6.1-cloud"));
    vm.attach();
    let why = vm.try_attach().refused();
    assert!(why.contains("managed already"), "{why}");
    let line = format!("attach --name x --pid {}", vm.pid());
    let why = host.ebb(&line).refused();
    assert!(why.contains(&format!("managed already, as the VM {}", vm.name())), "{why}");
    let other = Host::new();
    let why = other.ebb(&line).refused();
    assert!(why.contains("userfaultfd"), "{why}");
    assert!(other.list().is_empty());
    vm.guest("fill a 300M");
    vm.reclaim();
    assert_eq!(vm.guest("check a"), "0");
}

/// A file that can be read and written in place, but neither removed nor replaced.
struct Fixed(PathBuf);

impl Fixed {
    fn new(path: &Path) -> Fixed {
        Ran::of(Command::new("mount").arg("--bind").args([path, path])).ok();
        Fixed(path.into())
    }
}

impl Drop for Fixed {
    fn drop(&mut self) {
        Ran::of(Command::new("umount").arg(&self.0));
    }
}

#[test]
fn a_detach_that_fails_leaves_the_vm_managed_and_can_be_repeated() {
    let host = Host::new();
    let vm = host.qemu(Guest::debian("6.1-cloud").memory("256M").mode("strict").cpus(1));
    vm.guest("fill a 100M");
    vm.attach();
    let record = host.run_directory().join("vms").join(vm.name()).join("vm.json");
    let fixed = Fixed::new(&record);
    let why = vm.ebb("detach").refused();
    assert!(why.contains("stays managed"), "{why}");
    // QEMU gives new descriptors the lowest free number: that of its userfaultfd once it is closed.
    let log = host.directory().join("of-qemu");
    let backend = json!({"type": "file", "data": {"out": log.to_str()}});
    vm.qmp("chardev-add", json!({"id": "of-qemu", "backend": backend}));
    drop(fixed);
    vm.ebb("evict --bytes 20M").ok();
    assert_eq!(vm.guest("check a"), "0");
    vm.detach();
    assert_no_trace(&vm);
    let descriptors = fs::read_dir(format!("/proc/{}/fd", vm.pid())).expect("QEMU runs").flatten();
    let mut links = descriptors.filter_map(|entry| fs::read_link(entry.path()).ok());
    assert!(links.any(|link| link == log), "a descriptor of QEMU's own was closed");
    assert_eq!(vm.guest("check a"), "0");
}

/// A thread of QEMU that is sent to close it does so even if it is frozen and thawed much later.
#[test]
fn a_userfaultfd_that_is_closed_late_takes_no_memory_along() {
    let host = Host::new();
    let vm = host.qemu(Guest::debian("6.1-cloud").memory("256M").mode("strict").cpus(1));
    vm.guest("fill a 100M");
    // The userfaultfd is closed, and Ebb is told that it is not.
    host.set("EBB_FAIL", format!("{}:closed:1", vm.name()));
    vm.attach();
    vm.ebb("evict --bytes 20M").ok();
    vm.detach();
    assert_no_trace(&vm);
    host.kill9();
    host.set("EBB_FAIL", format!("{}:close:1", vm.name()));
    vm.attach();
    vm.ebb("limit 150M").ok();
    let why = vm.ebb("detach").refused();
    assert!(why.contains("userfaultfd in QEMU"), "{why}");
    let warnings = vm.status().warnings;
    assert!(
        warnings.iter().any(|line| line.contains("detached once that is closed")),
        "{warnings:?}"
    );
    for line in ["evict --bytes 20M", "limit 150M", "reclaim"] {
        let why = vm.ebb(line).refused();
        assert!(why.contains("detached once that is closed"), "{why}");
    }
    // Not by this process: its thread that waits for QEMU's end would be told of QEMU's stops.
    let qemu = Process::open(vm.pid()).expect("QEMU runs");
    let start_ticks = qemu.start_ticks().expect("it runs");
    for number in qemu.userfaultfds().expect("its descriptors") {
        let words = format!("inject close {} {start_ticks} {number}", vm.pid());
        let mut helper = Command::new(program_directory().join("ebbd"));
        let closed = helper.args(words.split(' ')).status();
        assert!(closed.expect("a helper").success(), "{number} is not closed");
    }
    until("the VM to be detached", || host.list().is_empty().then_some(()));
    assert_no_trace(&vm);
    assert_eq!(vm.guest("check a"), "0");
    // Another request to detach closes it, too.
    host.kill9();
    vm.attach();
    vm.ebb("detach").refused();
    vm.detach();
    assert_no_trace(&vm);
    assert_eq!(vm.guest("check a"), "0");
    // The next daemon closes it, too.
    host.kill9();
    vm.attach();
    vm.ebb("evict --bytes 20M").ok();
    vm.ebb("detach").refused();
    host.kill9();
    host.set("EBB_FAIL", "nobody:close:1");
    host.start();
    until("the VM to be detached", || host.list().is_empty().then_some(()));
    assert_no_trace(&vm);
    assert_eq!(vm.guest("check a"), "0");
}

/// All of its memory is watched by then, and the userfaultfd stays in QEMU at first.
#[test]
fn an_attach_that_fails_late_leaves_a_guest_that_runs() {
    let host = Host::new();
    let vm = host.qemu(Guest::debian("6.1-cloud").memory("256M").mode("strict").cpus(1));
    host.set("EBB_FAIL", format!("{0}:attach:1,{0}:close:1", vm.name()));
    let why = vm.try_attach().refused();
    assert!(why.contains("EBB_FAIL"), "{why}");
    vm.guest("fill a 100M");
    until("the VM to be detached", || host.list().is_empty().then_some(()));
    assert_no_trace(&vm);
    assert_eq!(vm.guest("check a"), "0");
}

#[test]
fn a_file_that_cannot_be_removed_keeps_no_vm() {
    let host = Host::new();
    let vm = host.qemu(Guest::debian("6.1-cloud").memory("256M").mode("strict").cpus(1));
    vm.guest("fill a 100M");
    vm.attach();
    let fixed = Fixed::new(&host.run_directory().join("vms").join(vm.name()).join("ledger"));
    vm.detach();
    assert_no_trace(&vm);
    assert!(host.list().is_empty());
    drop(fixed);
    vm.attach();
    vm.ebb("evict --bytes 20M").ok();
    assert_eq!(vm.guest("check a"), "0");
    vm.detach();
    assert_no_trace(&vm);
}
