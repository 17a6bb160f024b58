//! The guest's RAM in the files that QEMU has open.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::Vm;

/// Smallest guest RAM. Smaller files that QEMU maps are something else.
const RAM_BYTES_MIN: u64 = 32 << 20;

impl Vm {
    /// The descriptors of its guest's RAM.
    pub(super) fn ram_paths(&self) -> impl Iterator<Item = PathBuf> {
        let entries = fs::read_dir(format!("/proc/{}/fd", self.pid)).expect("QEMU runs");
        entries.flatten().map(|entry| entry.path()).filter(|path| {
            let is_large = |file: fs::Metadata| file.len() >= RAM_BYTES_MIN;
            fs::read_link(path).is_ok_and(|target| is_ram(&target))
                && fs::metadata(path).is_ok_and(is_large)
        })
    }

    /// Host memory of the guest's RAM, as the kernel counts it.
    pub fn host_bytes(&self) -> u64 {
        let entries = fs::read_dir(format!("/proc/{}/fd", self.pid)).expect("QEMU runs");
        let files = entries.flatten().filter_map(|entry| {
            let target = fs::read_link(entry.path()).ok()?;
            let is_memory = is_ram(&target);
            is_memory.then(|| fs::metadata(entry.path()).ok()).flatten()
        });
        let mut seen = HashSet::new();
        let ram = files.filter(|file| file.len() >= RAM_BYTES_MIN && seen.insert(file.ino()));
        ram.map(|file| file.blocks() * 512).sum()
    }
}

/// Whether a descriptor leads to RAM, by its file's name. Boot files may be in memory, too.
fn is_ram(target: &Path) -> bool {
    let name = target.to_string_lossy();
    name.starts_with("/memfd:") && !name.starts_with("/memfd:ebb-boot")
}
