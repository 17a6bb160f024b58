//! Whatever dies, at whatever moment: nothing is lost, and nothing is left behind.

use std::fs;
use std::thread;
use std::time::Duration;

use serde_json::json;
use vmtest::{Disk, Guest, Host, Ran, assets, busy_for, permit, require, rounds, until};

#[test]
fn killed_daemons_lose_nothing() {
    let host = Host::new();
    let vm = host.run(Guest::debian("6.1-cloud").mode("strict"));
    vm.guest("fill kept 100M");
    vm.churn("200M");
    let count = u64::from(rounds(12, 50));
    for round in 0..count {
        let taking = thread::spawn({
            let host = host.clone();
            move || host.ebb("reclaim vm0")
        });
        busy_for(Duration::from_millis(round * 350 / count));
        host.kill9();
        // It may have finished before.
        let _ = taking.join().expect("ebb ends");
        host.start();
        vm.churn_on(1);
    }
    assert_eq!(vm.churn_stop().wrong_bytes, 0);
    assert_eq!(vm.guest("check kept"), "0");
    vm.detach();
    assert_eq!(vm.guest("check kept"), "0");
}

#[test]
fn the_next_daemon_knows_what_was_reclaimed() {
    let host = Host::new();
    let vm = host.run(Guest::debian("6.1-cloud").mode("strict"));
    vm.guest("fill a 500M");
    vm.guest("free a");
    vm.reclaim();
    let before = vm.status();
    host.kill9();
    host.start();
    let after = vm.status();
    assert_eq!((after.pid, after.mode, after.backing), (before.pid, before.mode, before.backing));
    assert!(before.emptied_bytes > 350 << 20);
    // The guest may have used some blocks meanwhile.
    assert!(after.emptied_bytes <= before.emptied_bytes);
    assert!(after.emptied_bytes + (64 << 20) > before.emptied_bytes, "{}", after.emptied_bytes);
    vm.guest("fill a 500M");
    assert_eq!(vm.guest("check a"), "0");
}

#[test]
fn a_guest_waits_for_its_daemon() {
    let host = Host::new();
    let vm = host.run(Guest::debian("6.1-cloud").mode("strict"));
    vm.guest("fill a 500M");
    vm.guest("free a");
    vm.reclaim();
    host.kill9();
    let filled = thread::scope(|scope| {
        let filling = scope.spawn(|| vm.guest("fill a 500M"));
        busy_for(Duration::from_secs(5));
        let waited = !filling.is_finished();
        host.start();
        filling.join().expect("the guest answers");
        waited
    });
    assert!(filled, "the guest cannot have had the memory without the daemon");
    assert_eq!(vm.guest("check a"), "0");
}

/// Checks that nothing of the VM is left: no record, no file, no descriptor or mapping of its
/// memory.
fn assert_nothing_is_left(host: &Host) {
    until("the VM's end to be noticed", || host.list().is_empty().then_some(()));
    let left = fs::read_dir(host.run_directory().join("vms")).map(|entries| entries.count());
    assert_eq!(left.unwrap_or(0), 0);
    until("the VM's process to end", || host.servers().is_empty().then_some(()));
    let daemon = host.daemon().expect("the daemon runs");
    let maps = fs::read_to_string(format!("/proc/{daemon}/maps")).unwrap();
    assert!(!maps.contains("/memfd:"), "{maps}");
    let descriptors = fs::read_dir(format!("/proc/{daemon}/fd")).unwrap().flatten();
    let links = descriptors.filter_map(|entry| fs::read_link(entry.path()).ok());
    let memory_links: Vec<_> = links
        .filter(|link| {
            link.to_string_lossy().contains("/memfd:") || link.ends_with("[userfaultfd]")
        })
        .collect();
    assert!(memory_links.is_empty(), "{memory_links:?}");
}

#[test]
fn a_killed_vm_leaves_nothing() {
    let host = Host::new();
    let vm = host.run(Guest::debian("6.1-cloud").mode("strict"));
    vm.guest("fill a 500M");
    vm.guest("free a");
    vm.reclaim();
    vm.kill();
    assert_nothing_is_left(&host);
}

#[test]
fn a_vm_that_turns_itself_off_leaves_nothing() {
    let host = Host::new();
    let vm = host.run(Guest::debian("6.1-cloud"));
    vm.reclaim();
    vm.power_off();
    assert_nothing_is_left(&host);
}

#[test]
fn a_vm_that_died_without_a_daemon_leaves_nothing() {
    let host = Host::new();
    let vm = host.run(Guest::debian("6.1-cloud").mode("strict"));
    vm.reclaim();
    host.kill9();
    vm.kill();
    host.start();
    assert_nothing_is_left(&host);
}

/// QEMU has its sockets by then, and does not listen there yet: it would stay stopped for ever.
#[test]
fn a_daemon_that_dies_while_it_starts_a_vm_leaves_no_qemu() {
    assert_no_qemu_is_left("run --name cut --memory 64M -- -S");
}

/// The same for a QEMU without a user of its own.
#[test]
fn a_daemon_that_dies_while_it_starts_a_privileged_vm_leaves_no_qemu() {
    assert_no_qemu_is_left("run --name cut --memory 64M --privileged -- -S");
}

fn assert_no_qemu_is_left(run: &'static str) {
    let host = Host::new();
    let place = host.directory().join("slow");
    fs::create_dir(&place).unwrap();
    permit(&place, 0o777);
    let (slow, pid_file) = (place.join("qemu"), place.join("pid"));
    let waits =
        format!("echo $$ > {0}.new; mv {0}.new {0}; while :; do sleep 1; done", pid_file.display());
    let text = format!("case \"$*\" in *ebb-qmp*) {waits};; esac\nexec qemu-system-x86_64 \"$@\"");
    fs::write(&slow, format!("#!/bin/sh\n{text}\n")).unwrap();
    permit(&slow, 0o755);
    host.set("EBB_QEMU", &slow);
    let starting = thread::spawn({
        let host = host.clone();
        move || host.ebb(run)
    });
    let pid = until("QEMU to be started", || fs::read_to_string(&pid_file).ok());
    // A process that has ended has no command line.
    let line = || fs::read_to_string(format!("/proc/{}/cmdline", pid.trim())).unwrap_or_default();
    host.kill9();
    starting.join().expect("ebb ends").refused();
    assert!(line().contains("ebb-qmp"), "it outlives its daemon");
    host.set("EBB_QEMU", "qemu-system-x86_64");
    host.start();
    // A start under the same name waits until everything is cleared away.
    host.ebb(run).ok();
    assert_eq!(line(), "", "{}", host.log());
    let is_logged = || host.log().contains("died while it started this VM");
    until("the log to say so", || is_logged().then_some(()));
    assert_eq!(host.list().len(), 1);
}

#[test]
fn one_vm_of_two_dies_alone() {
    let host = Host::new();
    let (one, other) = (
        host.run(Guest::debian("6.1-cloud").memory("512M")),
        host.run(Guest::debian("6.1-cloud").memory("512M")),
    );
    other.guest("fill a 200M");
    one.kill();
    until("one VM in the list", || (host.list().len() == 1).then_some(()));
    assert!(!host.log().contains("died while it started"), "{}", host.log());
    other.reclaim();
    assert_eq!(other.guest("check a"), "0");
}

#[test]
fn a_second_daemon_is_refused() {
    let host = Host::new();
    host.start();
    let first = host.daemon();
    let why = Ran::of(&mut host.command("ebbd")).refused();
    assert!(why.contains("run"), "{why}");
    assert_eq!(host.daemon(), first);
}

#[test]
fn a_reset_guest_is_inspected_anew() {
    for mode in ["strict", "release"] {
        let vm = Host::new().run(Guest::debian("6.1-cloud").mode(mode));
        for _ in 0..3 {
            vm.guest("fill a 500M");
            vm.guest("free a");
            vm.reclaim();
            vm.reboot();
            vm.wait_trusted();
        }
        vm.guest("fill a 700M");
        assert_eq!(vm.guest("check a"), "0");
    }
}

/// Nobody tells the next daemon, and the guest's processors stand still. Only the record tells that
/// memory was reclaimed from another kernel.
#[test]
fn a_reset_without_a_daemon_brings_all_back() {
    let host = Host::new();
    let vm = host.run(Guest::debian("6.1-cloud").mode("strict"));
    vm.guest("fill a 500M");
    vm.guest("free a");
    vm.reclaim();
    vm.qmp("stop", json!({}));
    assert!(vm.status().emptied_bytes > 350 << 20);
    host.kill9();
    vm.qmp("system_reset", json!({}));
    until("the reset", || {
        let status = vm.qmp("query-status", json!({}));
        (status["status"] == "prelaunch").then_some(())
    });
    host.start();
    until("all to be back", || (vm.status().emptied_bytes == 0).then_some(()));
    vm.qmp("cont", json!({}));
    vm.wait_boot();
    vm.wait_trusted();
    vm.guest("fill a 500M");
    vm.guest("free a");
    vm.reclaim();
    // The kernel on record now is the one that runs.
    host.kill9();
    host.start();
    vm.wait_trusted();
    assert!(vm.status().emptied_bytes > 250 << 20);
    vm.guest("fill a 500M");
    assert_eq!(vm.guest("check a"), "0");
}

/// The old kernel's memory counts as its own until all is back.
#[test]
fn nothing_is_reclaimed_from_a_kernel_before_the_last_one_has_all_back() {
    let kernel = assets::kernel("6.1-cloud");
    require!(kernel.as_ref().map_err(Clone::clone));
    let kernel = kernel.expect("required");
    let host = Host::new();
    let disk = Disk::new(&host, "disk", "256M").formatted("ext4").with_kernel(&kernel);
    host.set("EBB_FAIL", "vm0:lost:1");
    let vm = host.run(Guest::debian("6.1-cloud").mode("strict").own_disk(&disk));
    vm.guest("fill a 500M");
    vm.guest("free a");
    vm.reclaim();
    vm.guest("mount ext4 /dev/vda /mnt");
    vm.kexec("/mnt/vmlinuz", "/mnt/initrd");
    let why = vm.ebb("reclaim").refused();
    assert!(why.contains("is not back yet"), "{why}");
    until("all to be back", || (vm.status().emptied_bytes == 0).then_some(()));
    vm.wait_trusted();
    vm.guest("fill a 500M");
    assert_eq!(vm.guest("check a"), "0");
    vm.guest("free a");
    vm.reclaim();
}

#[test]
fn a_panicked_guest_is_still_managed() {
    let host = Host::new();
    let vm = host.run(Guest::debian("6.1-cloud").mode("strict"));
    vm.reclaim();
    vm.panic();
    assert_eq!(vm.status().pid, vm.pid());
    vm.detach();
    assert!(host.list().is_empty());
}
