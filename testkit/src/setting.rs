//! Settings of the host that a test needs, for as long as it needs them.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use ebb_units::HUGE_BYTES;

use crate::undo::Undo;

const SHMEM: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
const FOLIOS: &str = "/sys/kernel/mm/transparent_hugepage";
const HUGETLB: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// A changed setting, which is restored when this is dropped, also when the test fails.
/// `scripts/test` does the same for a test that is killed.
pub struct HostSetting {
    // The fields are dropped in this order.
    _undo: Undo,
    _record: Option<Undo>,
}

impl HostSetting {
    /// Allows transparent huge pages for shared memory, where a program asks for them.
    ///
    /// # Errors
    /// The setting cannot be changed.
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

    /// Forbids huge pages for shared memory, even where a program asks for them.
    ///
    /// # Errors
    /// The setting cannot be changed.
    pub fn no_shared_huge_pages() -> Result<HostSetting, String> {
        let path = Path::new(SHMEM);
        let text = read(path)?;
        let before = text.split(['[', ']']).nth(1).ok_or_else(|| format!("{SHMEM} is {text}"))?;
        let setting = kept(path.to_owned(), before.to_owned());
        write(path, "never")?;
        Ok(setting)
    }

    /// Allows folios of `kib` KiB for shared memory, where a program asks for huge pages.
    ///
    /// # Errors
    /// The setting cannot be changed.
    pub fn shared_folios(kib: u64) -> Result<HostSetting, String> {
        let path = PathBuf::from(format!("{FOLIOS}/hugepages-{kib}kB/shmem_enabled"));
        let text = read(&path)?;
        let before = text.split(['[', ']']).nth(1).ok_or_else(|| format!("{path:?} is {text}"))?;
        let setting = kept(path.clone(), before.to_owned());
        write(&path, "advise")?;
        Ok(setting)
    }

    /// Sets the file at `path` to `value`. The file may list its choices in a line, with the chosen
    /// one in brackets.
    ///
    /// # Errors
    /// The setting cannot be changed.
    pub fn of(path: &Path, value: &str) -> Result<HostSetting, String> {
        let text = read(path)?;
        let before = text.split(['[', ']']).nth(1).unwrap_or(&text).to_owned();
        let setting = kept(path.to_owned(), before);
        write(path, value)?;
        Ok(setting)
    }

    /// Reserves `bytes` more bytes as huge pages of 2 MiB, all of them free.
    ///
    /// # Errors
    /// The host does not have that much contiguous memory.
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

/// Directory of the records of what to restore, for whoever comes after a process that was killed.
static RECORDS: OnceLock<PathBuf> = OnceLock::new();
static NEXT: AtomicU64 = AtomicU64::new(0);

/// From now on, keeps a record of each value to restore in this directory, until it is restored.
pub fn record_in(directory: PathBuf) {
    let _ = RECORDS.set(directory);
}

/// Records that `value` must be restored, if records are kept. Dropping the result removes the
/// record.
#[must_use]
pub fn on_record(path: &Path, value: &str) -> Option<Undo> {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let file = RECORDS.get()?.join(format!("{number:010}"));
    fs::write(&file, format!("{}\n{value}", path.display())).ok()?;
    Some(Undo::new(move || drop(fs::remove_file(&file))))
}

/// Returns the records in a directory of another process, the newest first: paths, and the values
/// to restore there.
pub fn records(directory: &Path) -> Vec<(PathBuf, String)> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.sort_unstable();
    let record = |file: PathBuf| {
        let text = fs::read_to_string(file).ok()?;
        let (path, value) = text.split_once('\n')?;
        Some((path.into(), value.to_owned()))
    };
    files.into_iter().rev().filter_map(record).collect()
}

/// Restores `before` in the end. Call it before the change.
fn kept(path: PathBuf, before: String) -> HostSetting {
    let record = on_record(&path, &before);
    let undo = Undo::new(move || {
        if let Err(error) = write(&path, &before) {
            eprintln!("not put back to {before}: {error}");
        }
    });
    HostSetting { _undo: undo, _record: record }
}

fn read(path: &Path) -> Result<String, String> {
    let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(text.trim().to_owned())
}

fn write(path: &Path, value: &str) -> Result<(), String> {
    fs::write(path, value).map_err(|error| format!("{}: {error}", path.display()))
}
