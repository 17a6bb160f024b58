//! Figures of the room for swap files.

use std::fmt;
use std::sync::Mutex;

use ebb_store::Quota;
use rustix::fs::statvfs;

use super::{Meaning, Sheet, bytes};
use crate::host::registry::Daemon;

static AVAILABLE: Meaning = bytes(
    "host_swap_available",
    "What swap files may still take: within the quota, and what is free above the floor.",
);
static QUOTA: Meaning =
    bytes("host_swap_quota", "The most that all swap files may take. None: no quota.");

/// The disk of the swap directory.
#[derive(Default)]
pub struct SwapDisk {
    /// Whoever looks has it. A disk that does not answer makes one client wait, and not all.
    looking: Mutex<()>,
}

/// The room for swap files at one moment.
#[derive(Debug)]
pub struct Swap {
    available_bytes: u64,
    quota_bytes: Option<u64>,
}

impl SwapDisk {
    /// Looks at the room in the daemon's swap directory. None: it cannot be told, or somebody else
    /// looks at it now. `taken_bytes`: what all swap files take.
    pub fn look(&self, daemon: &Daemon, taken_bytes: u64) -> Option<Swap> {
        let _looking = self.looking.try_lock().ok()?;
        let site = daemon.site();
        let found = statvfs(&site.swap_dir).ok()?;
        let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
        let quota = site.settings.swap_quota;
        let floor = Quota { floor_bytes: quota.floor_bytes, ..Quota::default() };
        let floor_bytes = floor.floor_of(bytes(found.f_blocks));
        let free_bytes = bytes(found.f_bavail).saturating_sub(floor_bytes);
        Some(swap(free_bytes, quota.all_bytes, taken_bytes))
    }
}

/// The room, from what is free above the floor.
fn swap(free_bytes: u64, quota_bytes: Option<u64>, taken_bytes: u64) -> Swap {
    let left_bytes = quota_bytes.map_or(u64::MAX, |most| most.saturating_sub(taken_bytes));
    Swap { available_bytes: free_bytes.min(left_bytes), quota_bytes }
}

/// Writes the figures. What is not known is left out.
pub(super) fn tell(swap: Option<&Swap>, sheet: &mut Sheet<'_>) -> fmt::Result {
    sheet.gauge(&AVAILABLE, swap.map(|swap| swap.available_bytes as f64))?;
    sheet.gauge(&QUOTA, swap.and_then(|swap| swap.quota_bytes).map(|bytes| bytes as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tighter_bound_counts() {
        let available = |quota, taken| swap(100, quota, taken).available_bytes;
        assert_eq!(available(None, 70), 100);
        assert_eq!(available(Some(120), 70), 50);
        assert_eq!(available(Some(1000), 70), 100);
        assert_eq!(available(Some(50), 70), 0);
    }
}
