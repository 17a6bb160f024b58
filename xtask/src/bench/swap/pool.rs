//! Compressed memory of the host that swapping fills.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use vmtest::{Undo, setting};

const ZRAM_CONTROL: &str = "/sys/class/zram-control";

/// The host's compressed memory, which version 1 of control groups charges to nobody.
#[derive(Clone)]
pub enum Pooled {
    Nothing,
    Zswap,
    /// A zram device, by its statistics file.
    Zram(PathBuf),
}

impl Pooled {
    /// Returns the current size of the compressed memory.
    ///
    /// # Errors
    /// A file operation fails, or the kernel does not tell.
    pub fn bytes(&self) -> anyhow::Result<u64> {
        match self {
            Pooled::Nothing => Ok(0),
            Pooled::Zswap => {
                let meminfo = fs::read_to_string("/proc/meminfo")?;
                let line = meminfo.lines().find_map(|line| line.strip_prefix("Zswap:"));
                let value = line.context("the kernel does not tell what zswap has")?;
                Ok(value.trim().trim_end_matches(" kB").parse::<u64>()? << 10)
            }
            Pooled::Zram(path) => zram_bytes(&fs::read_to_string(path)?),
        }
    }
}

/// Returns the third figure: all memory of the pool, with its overhead.
fn zram_bytes(stat: &str) -> anyhow::Result<u64> {
    Ok(stat.split_whitespace().nth(2).context("a short mm_stat")?.parse()?)
}

/// A zram device of our own.
pub struct Zram {
    device: PathBuf,
    _undo: Undo,
    _records: [Option<Undo>; 2],
}

impl Zram {
    /// Makes a new device.
    ///
    /// # Errors
    /// The kernel has no zram, or does not permit it.
    pub fn new() -> anyhow::Result<Zram> {
        let control = Path::new(ZRAM_CONTROL);
        // Reading the file adds a device.
        let add = || fs::read_to_string(control.join("hot_add"));
        let (number, undo) = Undo::of(add, |number| {
            let number = number.trim().to_owned();
            move || {
                let reset = format!("/sys/block/zram{number}/reset");
                let reset_done = fs::write(&reset, "1")
                    .and_then(|()| fs::write(Path::new(ZRAM_CONTROL).join("hot_remove"), &number));
                if let Err(error) = reset_done {
                    eprintln!("zram{number}: {error}");
                }
            }
        })
        .context("no zram")?;
        let name = format!("zram{}", number.trim());
        let reset = Path::new("/sys/block").join(&name).join("reset");
        // Records are undone in reverse order.
        let removed = setting::on_record(&control.join("hot_remove"), number.trim());
        let records = [removed, setting::on_record(&reset, "1")];
        Ok(Zram { device: Path::new("/dev").join(name), _undo: undo, _records: records })
    }

    /// Makes a device of this size with this compressor.
    ///
    /// # Errors
    /// Those of [`Zram::new`], or the device refuses the settings.
    pub fn with(compressor: &str, bytes: u64) -> anyhow::Result<Zram> {
        let zram = Zram::new()?;
        fs::write(zram.file("comp_algorithm"), compressor).context("zram's compressor")?;
        fs::write(zram.file("disksize"), bytes.to_string()).context("zram's size")?;
        Ok(zram)
    }

    /// Returns the path of the device.
    pub fn device(&self) -> &Path {
        &self.device
    }

    /// Returns the path of one of the device's files in sysfs.
    pub fn file(&self, name: &str) -> PathBuf {
        let device = self.device.file_name().unwrap_or_default();
        Path::new("/sys/block").join(device).join(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zram_device_tells_what_it_takes() {
        assert_eq!(zram_bytes("1 2 4096 0 8 0 0 0\n").unwrap(), 4096);
        assert!(zram_bytes("1 2").is_err());
    }
}
