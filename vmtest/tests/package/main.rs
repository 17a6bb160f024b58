//! Debian's package on a Debian with systemd: installed, started, upgraded and removed, while VMs
//! run beside it. That takes minutes, since QEMU runs in QEMU there: `cargo xtask soak package`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use vmtest::{Disk, Guest, Host, Ran, assets, has_time, nested, require};

/// Longest time for one step.
const PATIENCE: Duration = Duration::from_secs(900);

/// Builds the package with this revision.
fn package(host: &Host, revision: &str) -> PathBuf {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let path = Ran::of(Command::new(project.join("scripts/deb")).arg(revision)).ok();
    // The next one takes its place.
    let kept = host.directory().join(format!("{revision}.deb"));
    fs::copy(path.trim_end(), &kept).unwrap_or_else(|error| panic!("{path}: {error}"));
    kept
}

#[test]
fn a_newcomer_installs_upgrades_and_removes_ebb_beside_vms() {
    require!(has_time("minutes in a guest with systemd: cargo xtask soak package"));
    let userland = assets::userland();
    require!(userland.as_ref());
    let host = Host::new();
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/package");
    let disk = Disk::new(&host, "disk", "3G").formatted("ext4").filled(&userland.unwrap());
    let disk = nested::with_qemu(disk).with_files(&[
        (&package(&host, "1"), "root/ebb-1.deb"),
        (&package(&host, "2"), "root/ebb-2.deb"),
        (&own.join("walk.sh"), "root/walk.sh"),
        // In place of the unit of other tests, which would power the guest off.
        (&own.join("walk.service"), "etc/systemd/system/check-files.service"),
    ]);
    let drive = format!("file={},if=virtio,format=raw,cache=unsafe", disk.image().display());
    let guest = Guest::debian("6.1-cloud").memory("2G").qemu_args(&format!("-drive {drive}"));
    let vm = host.qemu(guest);
    vm.console().be_patient(PATIENCE);
    vm.leave("boot ext4 /dev/vda");
    vm.wait_console("walk: over");
    let text = vm.console().text();
    let steps: Vec<&str> = text.lines().filter(|line| line.contains("walk: ")).collect();
    assert!(text.contains("walk: all steps succeeded"), "{}", steps.join("\n"));
    vm.wait_end();
}
