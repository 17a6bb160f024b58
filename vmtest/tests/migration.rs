//! A guest that migrates from a VM of Ebb's to another QEMU: what is elsewhere comes back or is
//! sent as it is, and neither side loses a byte.

use std::fs;

use ebb_api::MayTake;
use serde_json::json;
use tempfile::TempDir;
use vmtest::{Disk, Guest, Host, Vm, require, until};

const MIB: u64 = 1 << 20;
const LIMIT_MIB: u64 = 90;
/// What is sent before anything else happens.
const SOME: u64 = 8 * MIB;
/// Bytes a second of a postcopy migration that is to last.
const SLOW: u64 = 64 << 10;

/// A host with compressed memory, and with its swap files in a directory of their own.
fn host() -> Result<(Host, TempDir), String> {
    let (host, swap) =
        (Host::in_memory()?, tempfile::tempdir().map_err(|error| error.to_string())?);
    host.set("EBB_COMPRESSED", "8M");
    host.set("EBB_SWAP_DIR", swap.path());
    Ok((host, swap))
}

/// A VM with memory in each place: reclaimed, compressed, in the swap file, and resident.
fn scattered(host: &Host) -> Vm {
    let vm = host.run(Guest::debian("6.1-cloud").memory("384M").cpus(1));
    vm.wait_trusted();
    reclaim_freed(&vm);
    vm.guest("fill soft 20M");
    vm.guest("fill hard 80M");
    vm.ebb(&format!("limit {LIMIT_MIB}M")).ok();
    wait_scattered(&vm);
    vm
}

fn reclaim_freed(vm: &Vm) {
    vm.guest("fill freed 150M");
    vm.guest("free freed");
    let report = vm.reclaim();
    assert!(report.bytes > 0, "{report:?}");
}

fn wait_scattered(vm: &Vm) {
    until("memory in each place", || {
        let limit = vm.status().limit;
        let is_scattered = limit.compressed_pages > 0 && limit.swap_file_bytes > 0;
        let taken_bytes = vm.host_bytes() + limit.compressed_bytes;
        (is_scattered && taken_bytes <= LIMIT_MIB * MIB).then_some(())
    });
}

/// Waits until `ebb status` tells this of the migration.
fn wait_said(vm: &Vm, what: &str) {
    until(format_args!("ebb to say: {what}"), || {
        vm.ebb("status").ok().contains(what).then_some(())
    });
}

fn assert_bytes(vm: &Vm) {
    for name in ["soft", "hard"] {
        assert_eq!(vm.guest(&format!("check {name}")), "0", "{name} in {}", vm.name());
    }
}

/// Changes, takes and brings back memory of which a part was sent already.
fn work(vm: &Vm) {
    vm.guest("refill hard");
    vm.guest("fill freed 30M");
    vm.guest("free freed");
    vm.reclaim();
    vm.ebb("evict --bytes 16M").ok();
    vm.churn_on(1);
    assert_bytes(vm);
    assert_eq!(vm.status().reach.may_take, MayTake::Everything);
}

/// The guest has arrived: ends what loads it, has Ebb manage it there, and takes memory again.
fn settle(vm: &Vm) {
    vm.churn_on(1);
    assert_eq!(vm.churn_stop().wrong_bytes, 0);
    assert_bytes(vm);
    vm.attach();
    wait_said(vm, "if it came from elsewhere, there is nothing to do");
    vm.wait_trusted();
    reclaim_freed(vm);
    vm.ebb(&format!("limit {LIMIT_MIB}M")).ok();
    wait_scattered(vm);
    assert_bytes(vm);
    vm.detach();
    assert_bytes(vm);
}

#[test]
fn what_is_elsewhere_arrives_and_can_be_taken_there() {
    let host = host();
    require!(host.as_ref());
    let (host, swap) = host.expect("it is there");
    let from = scattered(&host);
    let socket = host.directory().join("there.sock");
    let to = host.arriving(&from, &socket, false);
    let why = to.try_attach().refused();
    assert!(why.contains("waits for a guest that migrates to it"), "{why}");
    assert_eq!(host.list().len(), 1);

    from.churn("20M");
    from.hold_migration();
    from.begin_migration(&socket);
    from.wait_sent(SOME);
    wait_said(&from, "in progress: evicted content comes back where it is sent");
    work(&from);
    from.let_migration_end();
    from.wait_migration("completed");
    to.wait_running();
    // The guest that is stopped here keeps its limit.
    wait_scattered(&from);
    wait_said(&from, "done: if the guest runs elsewhere now, end this QEMU");
    from.qmp("cont", json!({}));
    assert_bytes(&from);
    from.kill();
    until("the source to be forgotten", || host.list().is_empty().then_some(()));
    let why = from.ebb("status").refused();
    assert!(why.contains(from.name()), "{why}");
    until("its swap file to go", || {
        let mut files = fs::read_dir(swap.path()).expect("a directory").flatten();
        let is_its = |file: fs::DirEntry| file.file_name().to_string_lossy().contains(from.name());
        (!files.any(is_its)).then_some(())
    });
    settle(&to);
}

#[test]
fn a_migration_that_does_not_end_costs_the_source_nothing() {
    let host = host();
    require!(host.as_ref());
    let (host, _swap) = host.expect("it is there");
    let from = scattered(&host);
    from.churn("20M");
    from.hold_migration();
    from.begin_migration(&host.nowhere());
    from.wait_sent(SOME);
    // QEMU's reads wait for the next processes, too.
    host.kill9();
    host.start();
    from.wait_trusted();
    work(&from);
    from.qmp("migrate_cancel", json!({}));
    from.wait_migration("cancelled");
    wait_said(&from, "cancelled: the guest stays where it was");
    work(&from);

    let socket = host.directory().join("there.sock");
    let to = host.arriving(&from, &socket, false);
    from.begin_migration(&socket);
    from.wait_sent(SOME);
    to.kill();
    from.wait_migration("failed");
    wait_said(&from, "failed: the guest stays where it was");
    work(&from);
    wait_scattered(&from);
    assert_eq!(from.churn_stop().wrong_bytes, 0);
    assert_bytes(&from);
}

/// The guest runs at the destination while its source is asked for the rest.
#[test]
fn a_postcopy_migration_finds_all_that_is_elsewhere() {
    let host = host();
    require!(host.as_ref());
    let (host, _swap) = host.expect("it is there");
    let from = scattered(&host);
    let socket = host.directory().join("there.sock");
    let to = host.arriving(&from, &socket, false);
    for vm in [&from, &to] {
        vm.set_migration_capability("postcopy-ram", true);
    }
    from.churn("20M");
    from.hold_migration();
    from.set_migration(json!({ "max-postcopy-bandwidth": SLOW }));
    from.begin_migration(&socket);
    from.wait_sent(SOME);
    from.qmp("migrate-start-postcopy", json!({}));
    to.wait_running();
    wait_said(&from, "the guest has moved, and needs the rest of its memory: end neither QEMU");
    let why = to.try_attach().refused();
    assert!(why.contains("until its postcopy migration"), "{why}");
    from.set_migration(json!({ "max-postcopy-bandwidth": 1 << 30 }));
    from.wait_migration("completed");
    // QEMU has closed its userfaultfd then.
    to.wait_migration("completed");
    from.kill();
    settle(&to);
}

/// Neither Ebb nor QEMU would send what the disk has written to memory.
#[test]
fn qemu_refuses_while_ebb_serves_a_disk() {
    let host = Host::new();
    let disk = Disk::new(&host, "disk", "64M");
    let vm = host.run(Guest::debian("6.1-cloud").memory("128M").cpus(1).own_disk(&disk));
    let to = json!({ "uri": format!("unix:{}", host.nowhere().display()) });
    let refused = vm.open_qmp().execute("migrate", to).expect_err("it is refused");
    assert!(refused.to_string().contains("Migration disabled: vhost"), "{refused}");
    assert_eq!(vm.guest("ping"), "done");
}

#[test]
fn ebb_starts_no_qemu_that_waits_for_its_guest() {
    let host = Host::new();
    let why = host.ebb("run --name a --memory 256M -- -incoming defer").refused();
    assert!(why.contains("attach it once the guest runs there"), "{why}");
    assert!(host.list().is_empty());
}
