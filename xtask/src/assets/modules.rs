//! The few modules that test guests load, in an order in which they can be loaded.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

/// Drivers of the devices that tests give to guests.
const WANTED: [&str; 4] = ["virtio_pci", "virtio_blk", "virtio_balloon", "virtio_mem"];

/// File systems that tests mount, loaded only for a mount. They request their checksum by name, so
/// no module depends on [`CHECKSUM`], which has it.
const FILE_SYSTEMS: [&str; 4] = ["ext4", "xfs", "btrfs", "virtiofs"];
const CHECKSUM: &str = "crc32c_generic";

/// Driver of the network device, loaded only if a guest is to have a network.
const NETWORK: &str = "virtio_net";

/// Modules that are loaded only on request, as far as the kernel has them: those with which a guest
/// passes a device on to a VM of its own, and the driver of a disk that is passed on.
const ON_REQUEST: [(&str, &[&str]); 2] =
    [("vfio_pci", &["vfio_iommu_type1", "vfio_pci"]), ("nvme", &["nvme"])];

/// Names the modules that are picked. Another selection needs another cache.
pub fn selection() -> String {
    let on_request = ON_REQUEST.iter().flat_map(|(_, names)| names.iter().copied());
    let all = WANTED.into_iter().chain(FILE_SYSTEMS).chain([CHECKSUM, NETWORK]);
    all.chain(on_request).collect::<Vec<_>>().join(" ")
}

/// Picks modules from the unpacked packages in `root`.
///
/// The wanted modules and what they depend on go into `directory`, uncompressed, and their order
/// into the file `order` beside them. For what is loaded on request, `order.NAME` has what must be
/// loaded besides. What the kernel has built in needs no module.
///
/// # Errors
/// A driver is neither in the packages nor built in, or a module is damaged.
pub fn pick(root: &Path, directory: &Path) -> anyhow::Result<()> {
    let mut picker = Picker { files: HashMap::new(), builtin: String::new(), picked: Vec::new() };
    picker.survey(root)?;
    for name in WANTED {
        picker.pick(name)?;
    }
    picker.store(0, directory, "order")?;
    let drivers = picker.picked.len();
    for name in FILE_SYSTEMS {
        picker.picked.truncate(drivers);
        for name in [CHECKSUM, name] {
            // Newer kernels do not have the checksum in this module. A guest without a file system
            // says so when it is asked to mount it.
            if picker.has(name) {
                picker.pick(name)?;
            }
        }
        picker.store(drivers, directory, &format!("order.{name}"))?;
    }
    picker.picked.truncate(drivers);
    picker.pick(NETWORK)?;
    picker.store(drivers, directory, &format!("order.{NETWORK}"))?;
    for (name, modules) in ON_REQUEST {
        picker.picked.truncate(drivers);
        for module in
            modules.iter().filter(|module| picker.has(module)).copied().collect::<Vec<_>>()
        {
            picker.pick(module)?;
        }
        picker.store(drivers, directory, &format!("order.{name}"))?;
    }
    Ok(())
}

struct Picker {
    /// Path of each module, by its name.
    files: HashMap<String, PathBuf>,
    /// The kernel's list of what it has built in.
    builtin: String,
    picked: Vec<(String, Vec<u8>)>,
}

impl Picker {
    /// Writes the picked modules from index `first` on, and their order.
    fn store(&self, first: usize, directory: &Path, order_name: &str) -> anyhow::Result<()> {
        let mut order = String::new();
        for (name, content) in self.picked.iter().skip(first) {
            fs::write(directory.join(name), content)?;
            order += &format!("{name}\n");
        }
        Ok(fs::write(directory.join(order_name), order)?)
    }

    fn has(&self, name: &str) -> bool {
        self.files.contains_key(name)
    }

    fn survey(&mut self, directory: &Path) -> anyhow::Result<()> {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let (kind, path) = (entry.file_type()?, entry.path());
            let name = entry.file_name().to_string_lossy().into_owned();
            if kind.is_dir() {
                self.survey(&path)?;
            } else if name == "modules.builtin" {
                self.builtin += &fs::read_to_string(&path)?;
            } else if let Some((name, _)) = name.split_once(".ko").filter(|_| kind.is_file()) {
                self.files.insert(name.replace('-', "_"), path);
            }
        }
        Ok(())
    }

    fn pick(&mut self, name: &str) -> anyhow::Result<()> {
        let file_name = format!("{name}.ko");
        if self.picked.iter().any(|(picked, _)| *picked == file_name) {
            return Ok(());
        }
        let Some(path) = self.files.get(name) else {
            let is_builtin =
                self.builtin.lines().any(|line| line.ends_with(&format!("/{name}.ko")));
            ensure!(is_builtin, "module {name} is neither in the packages nor built in");
            return Ok(());
        };
        let content = read(path).with_context(|| path.display().to_string())?;
        for dependency in depends(&content) {
            self.pick(&dependency)?;
        }
        self.picked.push((file_name, content));
        Ok(())
    }
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    if path.extension().is_none_or(|extension| extension != "xz") {
        return Ok(fs::read(path)?);
    }
    let output = Command::new("xz").args(["--decompress", "--stdout"]).arg(path).output();
    let output = output.context("xz does not start")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(output.stdout)
}

/// Returns the modules named in the field `depends=` of the section `.modinfo`.
fn depends(module: &[u8]) -> Vec<String> {
    let key = b"\0depends=";
    let Some(at) = module.windows(key.len()).position(|window| window == key) else {
        return Vec::new();
    };
    let value = module[at + key.len()..].split(|&byte| byte == 0).next().unwrap_or_default();
    let names = String::from_utf8_lossy(value);
    names.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_names_what_it_needs() {
        assert_eq!(
            depends(b"x\0license=GPL\0depends=virtio,virtio-ring\0y"),
            ["virtio", "virtio_ring"]
        );
        assert!(depends(b"x\0depends=\0y").is_empty());
    }
}
