//! Debian itself, started by its own init from a disk that Ebb serves, in less memory than it
//! believes to have. Every file on the disk is checked against its package.

use std::time::Duration;

use vmtest::{Disk, Guest, Host, assets, require};

/// Longest time for a start with a look at every file: minutes, where two of them share two
/// processors.
const PATIENCE: Duration = Duration::from_secs(900);

fn starts_from(kind: &str) {
    let userland = assets::userland();
    require!(userland.as_ref());
    let host = Host::new();
    let mut disk = Disk::new(&host, "disk", "2G").formatted(kind).filled(&userland.unwrap());
    let vm = host.run(Guest::debian("6.1-cloud").memory("512M").own_disk(&disk));
    vm.console().be_patient(PATIENCE);
    vm.ebb("limit 200M").ok();
    vm.leave(&format!("boot {kind} /dev/vda"));
    vm.wait_console("every file was checked");
    let text = vm.console().text();
    let is_wrong = |line: &&str| line.contains("??5??????") || line.contains("missing  ");
    let wrong: Vec<&str> = text.lines().filter(is_wrong).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    vm.wait_end();
    disk.check(kind);
}

#[test]
fn debian_starts_from_ext4() {
    starts_from("ext4");
}

#[test]
fn debian_starts_from_xfs() {
    starts_from("xfs");
}

#[test]
fn debian_starts_from_btrfs() {
    starts_from("btrfs");
}
