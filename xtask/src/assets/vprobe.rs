//! The guest's module `vprobe`, built for a kernel of Debian's.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

use anyhow::Context;

use super::build_root::BuildRoot;
use super::cache::{Cache, base_name};
use super::kernel::Source;
use crate::cargo::workspace;

const NAME: &str = "vprobe";
const DIRECTORY: &str = "guest/linux/vprobe";

/// Returns the module for the kernel in this package, `linux-image-RELEASE_VERSION`. One in the
/// cache that was made from the same files is not built again.
///
/// # Errors
/// The kernel's headers cannot be fetched, or the module does not build.
pub fn module(cache: &Cache, source: &Source, image: &str) -> anyhow::Result<PathBuf> {
    let sources = sources()?;
    let mut hasher = DefaultHasher::new();
    sources.hash(&mut hasher);
    let directory = cache.directory(NAME)?;
    let path = directory.join(format!("{image}-{:016x}.ko", hasher.finish()));
    if path.exists() {
        return Ok(path);
    }
    let root = BuildRoot::fetch(cache, source, image)?;
    println!("{:<10} building {NAME}", source.label);
    let module = root.build(NAME, &sources)?;
    let work = cache.temporary()?;
    let unfinished = work.path().join("module");
    fs::write(&unfinished, module)?;
    fs::rename(&unfinished, &path)?;
    Ok(path)
}

/// The files that make the module, by name.
fn sources() -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    let directory = workspace().join(DIRECTORY);
    let entries = fs::read_dir(&directory).context(DIRECTORY)?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    // Where somebody has built the module in place, his objects are no sources.
    paths.retain(|path| {
        let kind = path.extension().map(|extension| extension.to_string_lossy().into_owned());
        base_name(path) == "Kbuild" || matches!(kind.as_deref(), Some("c" | "h" | "S"))
    });
    paths.retain(|path| !base_name(path).ends_with(".mod.c"));
    paths.sort();
    paths.into_iter().map(|path| Ok((base_name(&path), fs::read(&path)?))).collect()
}
