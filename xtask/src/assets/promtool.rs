//! Prometheus' checker of rules and figures, used without being installed: Debian's package would
//! also start a server.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use super::apt::{self, Suite};
use super::cache::{self, Cache};

const SUITE: &str = "bookworm";
const PACKAGE: &str = "prometheus";
const PROGRAM: &str = "promtool";

/// Returns the program. One in the cache is not fetched again.
///
/// # Errors
/// It cannot be fetched, or does not run here.
pub fn fetch(cache: &Cache) -> anyhow::Result<PathBuf> {
    let shelf = cache.directory(PROGRAM)?;
    let directory = match cache::newest(&shelf) {
        Some(directory) => directory,
        None => make(cache, &shelf)?,
    };
    Ok(directory.join(PROGRAM))
}

fn make(cache: &Cache, shelf: &Path) -> anyhow::Result<PathBuf> {
    let suite = Suite::open(cache, SUITE)?;
    let package = suite.package(PACKAGE)?;
    let directory = shelf.join(format!("{PACKAGE}_{}", package.version));
    println!("{:<10} fetching {} from {SUITE}", "", cache::base_name(&directory));
    let (work, archives) = (cache.temporary()?, cache.temporary()?);
    let (root, made) = (work.path().join("root"), work.path().join("made"));
    fs::create_dir(&made)?;
    for file in suite.download(&[package], archives.path())? {
        apt::unpack(&file, &root)?;
    }
    let program = made.join(PROGRAM);
    // The rest of the package, the server, is not needed.
    fs::rename(root.join("usr/bin").join(PROGRAM), &program).context(PROGRAM)?;
    probe(&program)?;
    fs::rename(&made, &directory)?;
    Ok(directory)
}

/// Checks that it runs here.
fn probe(program: &Path) -> anyhow::Result<()> {
    let output = Command::new(program).arg("--version").output().context(PROGRAM)?;
    let errors = String::from_utf8_lossy(&output.stderr);
    let why = errors.lines().next().unwrap_or("no reason given");
    ensure!(output.status.success(), "{PROGRAM} of {SUITE} does not run: {why}");
    Ok(())
}
