//! A newer QEMU than Debian 12 has, used without being installed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use super::apt::{self, Suite};
use super::cache::{self, Cache};

const SUITE: &str = "bookworm-backports";
pub const PROGRAM: &str = "qemu-system-x86_64";
const PACKAGES: [&str; 4] =
    ["qemu-system-x86", "qemu-system-common", "qemu-system-data", "seabios"];

/// Returns a directory with a `qemu-system-x86_64` that finds its own files.
///
/// # Errors
/// QEMU cannot be fetched, or does not run here.
pub fn backport(cache: &Cache, refresh: bool) -> anyhow::Result<PathBuf> {
    let shelf = cache.directory("qemu")?;
    let directory = match cache::newest(&shelf).filter(|_| !refresh) {
        Some(directory) => directory,
        None => fetch(cache, &shelf)?,
    };
    Ok(directory.join("bin"))
}

fn fetch(cache: &Cache, shelf: &Path) -> anyhow::Result<PathBuf> {
    let suite = Suite::open(cache, SUITE)?;
    let packages = PACKAGES.map(|name| suite.package(name));
    let packages = packages.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    // A colon in the name would split PATH.
    let version = packages[0].version.replace(':', "-");
    let directory = shelf.join(format!("{}_{version}", packages[0].name));
    if directory.exists() {
        return Ok(directory);
    }
    println!("{:<10} fetching {} from {SUITE}", "", cache::base_name(&directory));
    let (work, archives) = (cache.temporary()?, cache.temporary()?);
    let made = work.path().join("made");
    fs::create_dir_all(made.join("bin"))?;
    for file in suite.download(&packages, archives.path())? {
        apt::unpack(&file, &made.join("root"))?;
    }
    let program = made.join("bin").join(PROGRAM);
    fs::write(&program, WRAPPER)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    probe(&program)?;
    fs::rename(&made, &directory)?;
    Ok(directory)
}

/// Script that becomes QEMU by exec, so that whoever started it has QEMU's process.
const WRAPPER: &str = r#"#!/bin/sh
root=$(dirname "$(dirname "$(readlink -f "$0")")")/root
export LD_LIBRARY_PATH="$root/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export QEMU_MODULE_DIR="$root/usr/lib/x86_64-linux-gnu/qemu"
exec "$root/usr/bin/qemu-system-x86_64" -L "$root/usr/share/qemu" -L "$root/usr/share/seabios" "$@"
"#;

/// Checks that QEMU runs here: it needs libraries that the installed QEMU brings.
fn probe(program: &Path) -> anyhow::Result<()> {
    let output = Command::new(program).args(["-machine", "help"]).output().context("QEMU")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    let why = errors.lines().next().unwrap_or("no reason given");
    ensure!(output.status.success(), "QEMU of {SUITE} does not run: {why}");
    Ok(())
}
