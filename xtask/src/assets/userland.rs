//! A small Debian, for guests that need its programs.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};

use super::apt;
use super::cache::Cache;

const SUITE: &str = "bookworm";
/// Packages besides the smallest system: the init of every Debian, a compressor, a compiler, two
/// loads, a database.
const PACKAGES: &str = "systemd-sysv,udev,zstd,gcc,libc6-dev,make,stress-ng,sysbench,redis-tools";
/// The database's server, and the program that it is: which one it is depends on the name. Debian's
/// package of the server has this link, too, and would also start it with the system.
const SERVER: [&str; 2] = ["usr/local/bin/redis-server", "/usr/bin/redis-check-rdb"];
/// A project in C that guests compile, in `/usr/src`.
const PROJECT: &str = "lua5.4";
/// Unit that checks every file against its package's checksums after the start. It writes to the
/// kernel's log, because it loses the terminal when a login is offered there.
const CHECK: &str = "[Unit]\nDescription=Check all files\n\
    [Service]\nType=oneshot\n\
    ExecStart=/bin/sh -c 'dpkg --verify --verify-format=rpm | tee /dev/kmsg; \
    echo every file was checked >/dev/kmsg; systemctl --force poweroff'\n\
    [Install]\nWantedBy=multi-user.target\n";

/// Returns the root file system as an archive, whose name tells what it was made from.
///
/// # Errors
/// Debian's mirror cannot be reached, or this process is not root.
pub fn archive(cache: &Cache) -> anyhow::Result<PathBuf> {
    let mut hasher = DefaultHasher::new();
    (PACKAGES, PROJECT, CHECK, SERVER).hash(&mut hasher);
    let name = format!("{SUITE}-{:08x}.tar", hasher.finish() as u32);
    let path = cache.directory("userland")?.join(name);
    if path.exists() {
        return Ok(path);
    }
    ensure!(rustix::process::geteuid().is_root(), "debootstrap takes root");
    println!("{:<10} making a Debian with {PACKAGES}", "");
    let work = cache.temporary()?;
    let (root, unfinished) = (work.path().join("root"), work.path().join("archive"));
    let mirror = apt::mirror();
    run(Command::new("debootstrap")
        .args(["--variant=minbase", "--include", PACKAGES, SUITE])
        .arg(&root)
        .arg(mirror))?;
    finish(&root)?;
    add_project(cache, &root)?;
    run(Command::new("tar")
        .arg("--create")
        .arg("--file")
        .arg(&unfinished)
        .arg("--directory")
        .arg(&root)
        .arg("."))?;
    fs::rename(&unfinished, &path)?;
    Ok(path)
}

fn add_project(cache: &Cache, root: &Path) -> anyhow::Result<()> {
    let work = cache.temporary()?;
    let archive = apt::Suite::sources(cache, SUITE)?.download_source(PROJECT, work.path())?;
    let to = root.join("usr/src").join(PROJECT);
    fs::create_dir_all(&to)?;
    let mut unpack = Command::new("tar");
    unpack.arg("--extract").arg("--file").arg(&archive).arg("--directory").arg(&to);
    run(unpack.args(["--strip-components=1", "--no-same-owner"]))
}

fn finish(root: &Path) -> anyhow::Result<()> {
    for file in fs::read_dir(root.join("var/cache/apt/archives"))?.flatten() {
        if file.path().extension().is_some_and(|extension| extension == "deb") {
            fs::remove_file(file.path())?;
        }
    }
    let units = root.join("etc/systemd/system");
    let wants = units.join("multi-user.target.wants");
    fs::create_dir_all(&wants)?;
    let [server, program] = SERVER;
    std::os::unix::fs::symlink(program, root.join(server))?;
    fs::write(units.join("check-files.service"), CHECK)?;
    std::os::unix::fs::symlink("../check-files.service", wants.join("check-files.service"))?;
    fs::write(root.join("etc/hostname"), "guest\n")?;
    Ok(())
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("{program} does not start"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let last = text.lines().rev().find(|line| line.starts_with("E:")).unwrap_or("no reason given");
    bail!("{program}: {last}{}", String::from_utf8_lossy(&output.stderr).trim())
}
