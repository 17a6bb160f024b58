//! Settings of the host that a test needs, for as long as it needs them.

use std::fs;
use std::path::{Path, PathBuf};

use ebb_units::HUGE_BYTES;

use crate::undo::Undo;

const SHMEM: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
const FOLIOS: &str = "/sys/kernel/mm/transparent_hugepage";
const HUGETLB: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// A setting changed, and put back when this is dropped: also when the test
/// fails. `scripts/test` does the same for a test that is killed.
pub struct HostSetting {
    _undo: Undo,
}

impl HostSetting {
    /// Transparent huge pages for shared memory, where a program asks for them.
    ///
    /// # Errors
    /// Why it cannot be had.
    pub fn shared_huge_pages() -> Result<HostSetting, String> {
        let path = Path::new(SHMEM);
        let text = read(path)?;
        let now = text.split(['[', ']']).nth(1).ok_or_else(|| format!("{SHMEM} is {text}"))?;
        let setting = kept(path.to_owned(), now.to_owned());
        match now {
            "never" | "deny" => write(path, "advise")?,
            _ => {}
        }
        Ok(setting)
    }

    /// No huge pages for shared memory, whoever asks for them.
    ///
    /// # Errors
    /// Why it cannot be had.
    pub fn no_shared_huge_pages() -> Result<HostSetting, String> {
        let path = Path::new(SHMEM);
        let text = read(path)?;
        let before = text.split(['[', ']']).nth(1).ok_or_else(|| format!("{SHMEM} is {text}"))?;
        let setting = kept(path.to_owned(), before.to_owned());
        write(path, "never")?;
        Ok(setting)
    }

    /// Folios of so many KiB for shared memory, where a program asks for huge pages.
    ///
    /// # Errors
    /// Why they cannot be had.
    pub fn shared_folios(kib: u64) -> Result<HostSetting, String> {
        let path = PathBuf::from(format!("{FOLIOS}/hugepages-{kib}kB/shmem_enabled"));
        let text = read(&path)?;
        let before = text.split(['[', ']']).nth(1).ok_or_else(|| format!("{path:?} is {text}"))?;
        let setting = kept(path.clone(), before.to_owned());
        write(&path, "advise")?;
        Ok(setting)
    }

    /// Whatever is in this file, whose choices may stand in a line with the chosen one in brackets.
    ///
    /// # Errors
    /// Why it cannot be had.
    pub fn of(path: &Path, value: &str) -> Result<HostSetting, String> {
        let text = read(path)?;
        let before = text.split(['[', ']']).nth(1).unwrap_or(&text).to_owned();
        let setting = kept(path.to_owned(), before);
        write(path, value)?;
        Ok(setting)
    }

    /// So many more bytes reserved as huge pages of 2 MiB, all of them free.
    ///
    /// # Errors
    /// Why they cannot be had: the host has not so much memory in whole.
    pub fn reserved_huge_pages(bytes: u64) -> Result<HostSetting, String> {
        let path = Path::new(HUGETLB).join("nr_hugepages");
        let (before, wanted) = (read(&path)?, bytes.div_ceil(HUGE_BYTES));
        let total = before.parse::<u64>().map_err(|error| format!("{path:?}: {error}"))? + wanted;
        let setting = kept(path.clone(), before);
        write(&path, &total.to_string())?;
        let free = read(&Path::new(HUGETLB).join("free_hugepages"))?;
        match free.parse::<u64>() {
            Ok(free) if free >= wanted => Ok(setting),
            _ => Err(format!("{free} huge pages could be reserved, {wanted} are wanted")),
        }
    }
}

/// Puts it back to `before` in the end: to be had before it is changed.
fn kept(path: PathBuf, before: String) -> HostSetting {
    let undo = Undo::new(move || {
        if let Err(error) = write(&path, &before) {
            eprintln!("not put back to {before}: {error}");
        }
    });
    HostSetting { _undo: undo }
}

fn read(path: &Path) -> Result<String, String> {
    let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(text.trim().to_owned())
}

fn write(path: &Path, value: &str) -> Result<(), String> {
    fs::write(path, value).map_err(|error| format!("{}: {error}", path.display()))
}
