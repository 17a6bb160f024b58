//! What swap files may take of their disk, and what happens once they take it.

use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use clap::Args;
use ebb_api::advice;
use ebb_store::{Quota, Room, Traffic};
use ebb_units::Bytes;

use crate::model::swap_rule::WhenFull;

/// The options.
#[derive(Args, Clone, Copy, Debug)]
pub struct SwapRoom {
    /// The most that all swap files take together, as 64G [default: what there is].
    #[arg(long, env = "EBB_SWAP_MAX", value_name = "SIZE")]
    swap_max: Option<Bytes>,
    /// The most that the swap file of each VM takes [default: what there is].
    #[arg(long, env = "EBB_SWAP_MAX_EACH", value_name = "SIZE")]
    swap_max_each: Option<Bytes>,
    /// So much of the swap files' file system stays free [default: a fiftieth of it, 1 GiB at
    /// most].
    #[arg(long, env = "EBB_SWAP_KEEP_FREE", value_name = "SIZE")]
    swap_keep_free: Option<Bytes>,
    /// What becomes of a VM at its limit when its swap file can take no more.
    #[arg(long, env = "EBB_WHEN_SWAP_IS_FULL", value_name = "CHOICE", default_value = "wait")]
    pub when_swap_is_full: WhenFull,
}

/// One a process, since it is of the host's disks.
static ROOM: OnceLock<Arc<Room>> = OnceLock::new();

impl SwapRoom {
    /// From now on all swap files keep to it.
    pub fn begin(self) {
        let bytes = |size: Option<Bytes>| size.map(|size| size.0);
        let quota = Quota {
            all_bytes: bytes(self.swap_max),
            each_bytes: bytes(self.swap_max_each),
            floor_bytes: bytes(self.swap_keep_free),
        };
        // Nobody began before.
        let _ = ROOM.set(Room::new(quota));
    }
}

/// What the swap files of this host share.
pub fn room() -> &'static Arc<Room> {
    ROOM.get_or_init(|| Room::new(Quota::default()))
}

/// What is wrong with a swap file that is in memory, and what to do; `by_tier`: a VM's tiers name
/// it. It need not be there yet.
pub fn in_memory(swap: &Path, by_tier: bool) -> Option<String> {
    if swap.metadata().is_ok_and(|found| !found.is_file()) {
        // A block device; its node may well be on tmpfs.
        return None;
    }
    let place = swap.parent()?;
    let is_memory = ebb_store::is_in_memory(place).is_ok_and(|is| is);
    let (why, advice) = advice::swap_in_memory(place, by_tier);
    is_memory.then(|| format!("{why}: {advice}"))
}

/// By device number. Few hosts have more than one such disk, so none is ever forgotten.
static DISKS: Mutex<BTreeMap<u64, Arc<Traffic>>> = Mutex::new(BTreeMap::new());

/// What the swap files on one disk share, a file's or a block device's. Partitions of one disk
/// count as several.
pub fn traffic(swap: &Path) -> Arc<Traffic> {
    let number = swap.metadata().map_or(0, |found| match found.file_type().is_block_device() {
        true => found.rdev(),
        false => found.dev(),
    });
    let mut disks = DISKS.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(disks.entry(number).or_insert_with(Traffic::new))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_swap_file_in_memory_is_told() {
        let told = in_memory(Path::new("/dev/shm/web.7.swap"), false).unwrap();
        for word in ["/dev/shm", "saves nothing", "EBB_SWAP_DIR"] {
            assert!(told.contains(word) && !told.contains('\n'), "{told}");
        }
        assert!(in_memory(Path::new("/dev/shm/web"), true).unwrap().contains("--tier"));
        assert_eq!(in_memory(Path::new("/proc/web.7.swap"), false), None);
        // A device, though its node is on tmpfs.
        assert_eq!(in_memory(Path::new("/dev/zero"), true), None);
    }
}
