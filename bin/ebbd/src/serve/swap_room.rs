//! What swap files may take of their disk, and what happens at that bound.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use clap::Args;
use ebb_api::advice;
use ebb_store::{Quota, SharedRoom, SwapFile, TABLE_BYTES, Table, TableSlot, Traffic};
use ebb_units::Bytes;

use crate::model::swap_rule::{SwapQuota, WhenFull};

/// The options.
#[derive(Args, Clone, Copy, Debug)]
pub struct SwapRoom {
    /// The most that all swap files take together, as 64G [default: no quota].
    #[arg(long, env = "EBB_SWAP_MAX", value_name = "SIZE")]
    swap_max: Option<Bytes>,
    /// The most that the swap file of each VM takes [default: no quota].
    #[arg(long, env = "EBB_SWAP_MAX_EACH", value_name = "SIZE")]
    swap_max_each: Option<Bytes>,
    /// What stays free on the file system of the swap files [default: a fiftieth of it, 1 GiB at
    /// most].
    #[arg(long, env = "EBB_SWAP_KEEP_FREE", value_name = "SIZE")]
    swap_keep_free: Option<Bytes>,
    /// What a VM at its limit does when its swap file is full.
    #[arg(long, env = "EBB_WHEN_SWAP_IS_FULL", value_name = "CHOICE", default_value = "wait")]
    pub when_swap_is_full: WhenFull,
}

impl SwapRoom {
    /// The quota as VMs' processes are told it.
    pub fn quota(self) -> SwapQuota {
        let bytes = |size: Option<Bytes>| size.map(|size| size.0);
        SwapQuota {
            all_bytes: bytes(self.swap_max),
            each_bytes: bytes(self.swap_max_each),
            floor_bytes: bytes(self.swap_keep_free),
        }
    }
}

/// What this process's swap file shares with others.
struct SharedSwap {
    place: TableSlot,
    room: Arc<SharedRoom>,
}

/// One for each process, which has one swap file.
static SHARED: OnceLock<SharedSwap> = OnceLock::new();

/// Sets the quota of this process's swap file, with a slot of the table in `run_dir`, or by itself.
pub fn begin(quota: SwapQuota, run_dir: &Path, slot: Option<usize>) {
    let table = slot.and_then(|_| match open_table(run_dir) {
        Ok(table) => Some(table),
        Err(error) => {
            tracing::warn!("{TABLE_FILE}: {error}: what other VMs swap is not taken into account");
            None
        }
    });
    let place = match (table, slot) {
        (Some(table), Some(slot)) => TableSlot::given(&table, slot),
        _ => TableSlot::alone(),
    };
    // Called once in a process.
    let _ = SHARED.set(SharedSwap { room: SharedRoom::at(of(quota), place.clone()), place });
}

fn shared() -> &'static SharedSwap {
    SHARED.get_or_init(|| {
        let place = TableSlot::alone();
        SharedSwap { room: SharedRoom::at(Quota::default(), place.clone()), place }
    })
}

fn of(quota: SwapQuota) -> Quota {
    let SwapQuota { all_bytes, each_bytes, floor_bytes } = quota;
    Quota { all_bytes, each_bytes, floor_bytes }
}

/// File of the table in which the swap files of all VMs tell each other what they take and read.
const TABLE_FILE: &str = "swap.shared";

/// Opens the table, and makes it if there is none.
///
/// # Errors
/// Those of open(2) and mmap(2). `StorageFull`: the run directory has no room for it.
pub fn open_table(run_dir: &Path) -> io::Result<Arc<Table>> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let file = options.open(run_dir.join(TABLE_FILE))?;
    if file.metadata()?.len() < TABLE_BYTES {
        file.set_len(TABLE_BYTES)?;
    }
    Table::over(&file)
}

/// Bytes that all swap files take together.
pub fn taken_bytes() -> u64 {
    shared().room.taken_bytes()
}

/// The swap file, kept to the quota. It yields its disk to others' reads.
pub fn among_others(disk: SwapFile, path: &Path) -> SwapFile {
    let SharedSwap { place, room } = shared();
    disk.within(room).among(&Traffic::at(place.clone(), disk_of(path)))
}

/// What is wrong with a swap file in memory, and what to do. `by_tier`: a VM's tiers name it. The
/// file need not exist yet.
pub fn in_memory(swap: &Path, by_tier: bool) -> Option<String> {
    if swap.metadata().is_ok_and(|found| !found.is_file()) {
        // It is a device; its node may well be on tmpfs.
        return None;
    }
    let place = swap.parent()?;
    let is_memory = ebb_store::is_in_memory(place).is_ok_and(|is| is);
    let (why, advice) = advice::swap_in_memory(place, by_tier);
    is_memory.then(|| format!("{why}: {advice}"))
}

/// Device number of the disk that has the swap file, or that is the swap file. Each partition of a
/// disk counts as a disk.
fn disk_of(swap: &Path) -> u64 {
    swap.metadata().map_or(0, |found| match found.file_type().is_block_device() {
        true => found.rdev(),
        false => found.dev(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_swap_file_in_memory_is_reported() {
        let message = in_memory(Path::new("/dev/shm/web.7.swap"), false).unwrap();
        for word in ["/dev/shm", "saves nothing", "EBB_SWAP_DIR"] {
            assert!(message.contains(word) && !message.contains('\n'), "{message}");
        }
        assert!(in_memory(Path::new("/dev/shm/web"), true).unwrap().contains("--tier"));
        assert_eq!(in_memory(Path::new("/proc/web.7.swap"), false), None);
        // It is a device, though its node is on tmpfs.
        assert_eq!(in_memory(Path::new("/dev/zero"), true), None);
    }
}
