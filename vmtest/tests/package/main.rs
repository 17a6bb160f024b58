//! Debian's package on a Debian with systemd: installed, started, upgraded and removed, while VMs
//! run beside it. The commands are those that the docs give to newcomers. That takes minutes, since
//! QEMU runs in QEMU there, and since cargo-deb is built the first time. So `make test` leaves it
//! out: `cargo xtask soak package`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use vmtest::{Disk, Guest, Host, Ran, assets, docs, has_time, nested, require};

/// Longest time for all steps.
const PATIENCE: Duration = Duration::from_secs(1800);
/// Pages with commands that are carried out.
const PAGES: [&str; 9] =
    ["start", "pilot", "limits", "attach", "install", "config", "metrics", "api", "remote"];
/// Programs in these commands that neither the package nor the small Debian has.
const PROGRAMS: [&str; 2] = ["curl", "openssl"];
/// What `openssl` reads where it is installed as a package.
const OPENSSL_SETTINGS: &str = "/etc/ssl/openssl.cnf";

/// Builds the package with this revision.
fn package(host: &Host, revision: &str) -> PathBuf {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let built = Ran::of(Command::new(project.join("scripts/deb")).arg(revision)).ok();
    let built = Path::new(built.trim_end());
    // The next one takes its place.
    let kept = host.directory().join(built.file_name().expect("the package's name"));
    fs::copy(built, &kept).unwrap_or_else(|error| panic!("{}: {error}", built.display()));
    kept
}

/// The packages, and the commands of each page, as `walk.sh` needs them.
fn newcomers_files(host: &Host) -> Vec<PathBuf> {
    let mut files = vec![package(host, "1"), package(host, "2")];
    for page in PAGES {
        let file = host.directory().join(page).with_extension("commands");
        fs::write(&file, docs::commands(page)).expect("the page's commands");
        files.push(file);
    }
    files
}

#[test]
fn a_newcomer_installs_upgrades_and_removes_ebb_beside_vms() {
    require!(has_time("minutes in a guest with systemd: cargo xtask soak package"));
    let userland = assets::userland();
    require!(userland.as_ref());
    let kernel = assets::kernel(nested::INNER_KERNEL);
    require!(kernel.as_ref());
    let host = Host::new();
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/package");
    let disk = Disk::new(&host, "disk", "3G").formatted("ext4").filled(&userland.unwrap());
    let files = newcomers_files(&host);
    let files: Vec<_> = files.iter().map(|file| (file.as_path(), "root")).collect();
    let disk = nested::with_qemu(disk).with_kernel(&kernel.unwrap()).with_files(&files);
    let disk = nested::with_programs(disk, &PROGRAMS).with_files(&[
        (Path::new(OPENSSL_SETTINGS), "root/openssl.cnf"),
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
