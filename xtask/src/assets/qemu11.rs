//! QEMU 11 with all its libraries in a directory of its own. It has a device for any vhost-user
//! back-end (`vhost-user-test-device-pci`), which older versions lack.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use super::apt::{self, Suite};
use super::cache::{self, Cache};
use super::qemu::PROGRAM;

const SUITE: &str = "trixie-backports";
const BELOW: &str = "trixie";
const PACKAGE: &str = "qemu-system-x86";
const VERSION: &str = "11.";
const DEVICE: &str = "vhost-user-test-device-pci";
/// Directories that the program does not need.
const LEFT_OUT: [&str; 4] = ["usr/share/doc", "usr/share/man", "usr/share/locale", "var"];

/// Returns a directory with a `qemu-system-x86_64` that needs only the kernel of this system. A
/// QEMU in the cache is not fetched again.
///
/// # Errors
/// QEMU cannot be fetched, or does not run here.
pub fn fetch(cache: &Cache) -> anyhow::Result<PathBuf> {
    let shelf = cache.directory("qemu11")?;
    let directory = match cache::newest(&shelf) {
        Some(directory) => directory,
        None => make(cache, &shelf)?,
    };
    Ok(directory.join("bin"))
}

fn make(cache: &Cache, shelf: &Path) -> anyhow::Result<PathBuf> {
    let suite = Suite::layered(cache, SUITE, BELOW)?;
    let version = suite.package(PACKAGE)?.version;
    let upstream = version.split_once(':').map_or(version.as_str(), |(_, version)| version);
    ensure!(upstream.starts_with(VERSION), "Debian's {SUITE} has no QEMU {VERSION}* but {version}");
    // A colon in the name would split the loader's list of libraries.
    let directory = shelf.join(format!("{PACKAGE}_{}", version.replace(':', "-")));
    eprintln!("{:<10} fetching {} from {SUITE}", "", cache::base_name(&directory));
    let (work, archives) = (cache.temporary()?, cache.temporary()?);
    let made = work.path().join("made");
    let root = made.join("root");
    fs::create_dir_all(made.join("bin"))?;
    for file in suite.download_closure(&[PACKAGE], archives.path())? {
        apt::unpack(&file, &root)?;
    }
    for path in LEFT_OUT {
        // Not every package has each of these directories.
        let _ = fs::remove_dir_all(root.join(path));
    }
    let program = made.join("bin").join(PROGRAM);
    fs::write(&program, WRAPPER)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    probe(&program)?;
    fs::rename(&made, &directory)?;
    Ok(directory)
}

/// Script that becomes QEMU by exec, through the loader that its C library came with. Whoever
/// started it has QEMU's process.
const WRAPPER: &str = r#"#!/bin/sh
root=$(dirname "$(dirname "$(readlink -f "$0")")")/root
libraries=$root/usr/lib/x86_64-linux-gnu
export QEMU_MODULE_DIR="$libraries/qemu"
exec "$libraries/ld-linux-x86-64.so.2" --inhibit-cache --library-path "$libraries" \
    "$root/usr/bin/qemu-system-x86_64" \
    -L "$root/usr/share/qemu" -L "$root/usr/share/seabios" "$@"
"#;

/// Checks that QEMU runs here and has the device. It asks for this device only: for a list of all
/// devices, QEMU would look for every module, also where the system's own QEMU has its modules.
fn probe(program: &Path) -> anyhow::Result<()> {
    let asked = ["-device", &format!("{DEVICE},help")];
    let output = Command::new(program).args(asked).output().context("QEMU")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    let why = errors.lines().next().unwrap_or("no reason given");
    ensure!(output.status.success(), "QEMU of {SUITE} does not run, or has no {DEVICE}: {why}");
    Ok(())
}
