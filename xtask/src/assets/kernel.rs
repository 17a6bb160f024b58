//! Debian's kernels.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};

use super::apt::{self, Package, Suite};
use super::cache::{self, Cache};
use super::modules;

/// Where a kernel comes from.
pub struct Source {
    /// Name of the kernel in tests.
    pub label: &'static str,
    /// Debian's release that has the kernel.
    suite: &'static str,
    /// Package that depends on the newest image.
    newest: &'static str,
    /// Beginning of the release number of the kernel itself.
    release: &'static str,
    /// Whether the kernel does not run reliably under Debian 12's QEMU 7.2.
    pub needs_newer_qemu: bool,
}

const CLOUD: &str = "linux-image-cloud-amd64";
const GENERIC: &str = "linux-image-amd64";

/// All kernels that are tested. The generic one has options that the cloud one lacks, such as page
/// poisoning.
pub const KERNELS: [Source; 5] = [
    source("6.1-cloud", "bookworm", CLOUD, "6.1.", false),
    source("6.1", "bookworm", GENERIC, "6.1.", false),
    source("5.10", "bullseye", CLOUD, "5.10.", true),
    source("6.12", "trixie", CLOUD, "6.12.", true),
    source("7.x", "trixie-backports", CLOUD, "7.", true),
];

const fn source(
    label: &'static str,
    suite: &'static str,
    newest: &'static str,
    release: &'static str,
    needs_newer_qemu: bool,
) -> Source {
    Source { label, suite, newest, release, needs_newer_qemu }
}

impl Source {
    /// Gets the lists of packages from which the kernel's modules can be built.
    ///
    /// # Errors
    /// As for [`Suite::open`].
    pub fn suite(&self, cache: &Cache) -> anyhow::Result<Suite> {
        match self.suite.strip_suffix("-backports") {
            Some(below) => Suite::layered(cache, self.suite, below),
            None => Suite::open(cache, self.suite),
        }
    }
}

/// Returns a directory with `vmlinuz` and `modules/`, named after package and version.
///
/// # Errors
/// Debian's release, or that kernel in it, cannot be fetched.
pub fn fetch(cache: &Cache, source: &Source, refresh: bool) -> anyhow::Result<PathBuf> {
    let shelf = cache.directory(&format!("kernels/{}-{:08x}", source.label, stamp()))?;
    if let Some(directory) = cache::newest(&shelf).filter(|_| !refresh) {
        return Ok(directory);
    }
    let suite = Suite::open(cache, source.suite)?;
    let packages = resolve(&suite, source)?;
    let image = packages.first().context("no image")?;
    let directory = shelf.join(format!("{}_{}", image.name, image.version));
    if !directory.exists() {
        println!("{:<10} fetching {} from {}", source.label, image.name, source.suite);
        make(cache, &suite, &packages, &directory)?;
    }
    Ok(directory)
}

/// Returns a number that tells one selection of modules from another.
fn stamp() -> u32 {
    let mut hasher = DefaultHasher::new();
    modules::selection().hash(&mut hasher);
    hasher.finish() as u32
}

/// Returns the packages of a kernel: the image first. The kernel itself, its modules and the list
/// of what it has built in may be separate packages.
fn resolve(suite: &Suite, source: &Source) -> anyhow::Result<Vec<Package>> {
    let parts = ["linux-image-", "linux-binary-", "linux-modules-", "linux-base-"];
    let versioned = |name: &String| {
        parts.iter().any(|part| {
            name.strip_prefix(part)
                .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        })
    };
    let mut names: Vec<String> =
        suite.package(source.newest)?.depends.into_iter().filter(versioned).collect();
    let is_wanted = |name: &String| name.starts_with(&format!("linux-image-{}", source.release));
    ensure!(
        names.first().is_some_and(is_wanted),
        "Debian's {} has no kernel {}* any more but {}",
        source.suite,
        source.release,
        names.join(", ")
    );
    let mut packages: Vec<Package> = Vec::new();
    while let Some(name) = names.pop() {
        if packages.iter().all(|package| package.name != name) {
            let package = suite.package(&name)?;
            names.extend(package.depends.iter().filter(|name| versioned(name)).cloned());
            packages.push(package);
        }
    }
    Ok(packages)
}

fn make(
    cache: &Cache,
    suite: &Suite,
    packages: &[Package],
    directory: &Path,
) -> anyhow::Result<()> {
    let (work, archives) = (cache.temporary()?, cache.temporary()?);
    let (root, made) = (work.path().join("root"), work.path().join("made"));
    for file in suite.download(packages, archives.path())? {
        apt::unpack(&file, &root)?;
    }
    fs::create_dir_all(made.join("modules"))?;
    fs::rename(vmlinuz(&root)?, made.join("vmlinuz"))?;
    modules::pick(&root, &made.join("modules"))?;
    fs::rename(&made, directory)?;
    Ok(())
}

/// Finds the kernel: in `boot` up to 7.0, beside the modules in later releases.
fn vmlinuz(root: &Path) -> anyhow::Result<PathBuf> {
    let boot = entries(&root.join("boot")).into_iter();
    let beside =
        entries(&root.join("usr/lib/modules")).into_iter().map(|path| path.join("vmlinuz"));
    let is_kernel = |path: &PathBuf| cache::base_name(path).starts_with("vmlinuz");
    let found = boot.chain(beside).find(|path| is_kernel(path) && path.is_file());
    found.context("the packages hold no vmlinuz")
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}
