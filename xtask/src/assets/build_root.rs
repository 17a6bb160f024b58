//! A small Debian in which modules of one kernel are built: that kernel's headers, and the compiler
//! and the tools that it was built with.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};
use rustix::fs::{CWD, FileType, Mode};

use super::apt::{self, Suite};
use super::cache::{self, Cache};
use super::kernel::Source;

/// Programs that a build runs, beside the compiler that the headers depend on.
const TOOLS: [&str; 9] =
    ["make", "binutils", "dash", "bash", "coreutils", "sed", "grep", "mawk", "findutils"];
/// Beginnings of the names of what headers depend on, and a build needs with all its dependencies.
const COMPILER: [&str; 3] = ["linux-kbuild-", "linux-compiler-", "gcc-"];
const HEADERS: &str = "linux-headers-";
/// Directories that a build does not need.
const LEFT_OUT: [&str; 5] =
    ["usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "var"];
/// Number to change when the same packages are put together in another way.
const RECIPE: u32 = 1;

/// A directory with a Debian of its own.
pub struct BuildRoot {
    root: PathBuf,
    release: String,
}

impl BuildRoot {
    /// Returns the build root for the kernel in this package, `linux-image-RELEASE_VERSION`. One in
    /// the cache is not fetched again.
    ///
    /// # Errors
    /// Debian no longer has the kernel's headers, or they cannot be fetched.
    pub fn fetch(cache: &Cache, source: &Source, image: &str) -> anyhow::Result<BuildRoot> {
        let (name, version) = image.split_once('_').context("an image has a version")?;
        let release = name.strip_prefix("linux-image-").context("an image has a release")?;
        let root = cache.directory("headers")?.join(format!("{image}-{RECIPE}"));
        if !root.exists() {
            println!("{:<10} fetching the headers of {release}", source.label);
            make(cache, &source.suite(cache)?, release, version, &root)?;
        }
        Ok(BuildRoot { root, release: release.into() })
    }

    /// Builds the module `NAME.ko` from these files, without debugging information. Returns its
    /// content.
    ///
    /// # Errors
    /// The first message of the compiler that tells why.
    pub fn build(&self, name: &str, sources: &[(String, Vec<u8>)]) -> anyhow::Result<Vec<u8>> {
        let place = self.root.join("build");
        if place.exists() {
            fs::remove_dir_all(&place)?;
        }
        fs::create_dir(&place)?;
        for (name, content) in sources {
            fs::write(place.join(name), content)?;
        }
        let headers = format!("/lib/modules/{}/build", self.release);
        self.run(&["make", "--jobs=2", "-C", &headers, "M=/build", "modules"])?;
        let file = format!("{name}.ko");
        self.run(&["strip", "--strip-debug", &format!("/build/{file}")])?;
        fs::read(place.join(&file)).context(file)
    }

    /// Runs a program inside. It has the processes' file system, because objtool looks into it.
    fn run(&self, words: &[&str]) -> anyhow::Result<()> {
        let mut command = Command::new("unshare");
        command.args(["--fork", "--pid", "--kill-child", "--mount-proc", "--root"]);
        command.arg(&self.root).args(["/usr/bin/env", "--ignore-environment", "LC_ALL=C"]);
        command.arg("PATH=/usr/bin:/bin:/usr/sbin:/sbin").args(words);
        let output = command.output().context("unshare does not start")?;
        if output.status.success() {
            return Ok(());
        }
        let errors = String::from_utf8_lossy(&output.stderr);
        let tells = |line: &&str| line.contains("rror:") || line.contains("not found");
        let why = errors.lines().find(tells).or(errors.lines().last()).unwrap_or("no reason given");
        bail!("{} for {}: {why}", words[0], self.release)
    }
}

fn make(
    cache: &Cache,
    suite: &Suite,
    release: &str,
    version: &str,
    to: &Path,
) -> anyhow::Result<()> {
    ensure!(rustix::process::geteuid().is_root(), "building modules takes root");
    let headers = suite.package(&format!("{HEADERS}{release}"))?;
    ensure!(
        headers.version == version,
        "Debian has headers of version {} for the kernel {version}",
        headers.version
    );
    let begins = |name: &str, parts: &[&str]| parts.iter().any(|part| name.starts_with(part));
    let mut tools: Vec<&str> = headers.depends.iter().map(String::as_str).collect();
    tools.retain(|name| begins(name, &COMPILER));
    tools.extend(TOOLS);
    let common = headers.depends.iter().filter(|name| begins(name, &[HEADERS]));
    let mut packages =
        common.map(|name| suite.package(name)).collect::<anyhow::Result<Vec<_>>>()?;
    packages.push(headers.clone());
    let (work, plain, closure) = (cache.temporary()?, cache.temporary()?, cache.temporary()?);
    let root = work.path().join("root");
    let mut files = suite.download(&packages, plain.path())?;
    files.extend(suite.download_closure(&tools, closure.path())?);
    for file in &files {
        apt::unpack(file, &root)?;
    }
    finish(&root).with_context(|| cache::base_name(to))?;
    Ok(fs::rename(&root, to)?)
}

/// Does what the packages' own scripts do when they are installed, as far as a build needs it.
fn finish(root: &Path) -> anyhow::Result<()> {
    for path in LEFT_OUT {
        // Not every release has each of these directories.
        let _ = fs::remove_dir_all(root.join(path));
    }
    for path in ["proc", "dev", "tmp"] {
        fs::create_dir_all(root.join(path))?;
    }
    let null = (FileType::CharacterDevice, rustix::fs::makedev(1, 3));
    rustix::fs::mknodat(CWD, root.join("dev/null"), null.0, Mode::from(0o666), null.1)?;
    Ok(symlink("mawk", root.join("usr/bin/awk"))?)
}
