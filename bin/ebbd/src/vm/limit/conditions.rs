//! The conditions of a limit, and of evicting memory in use.

use ebb_api::{Backing, DmaMode};
use ebb_reclaim::limit::marks::floor_bytes;
use ebb_units::Bytes;

use crate::model::api_error::{Answer, not_allowed};
use crate::system::small_pages::keeps_holes;
use crate::vm::context::VmContext;

/// Succeeds if the VM can have a limit of `bytes`, and this low mark.
pub(super) fn may_limit(cx: &VmContext, bytes: u64, low_bytes: Option<u64>) -> Answer<()> {
    let memory_bytes = cx.memory_bytes();
    let floor = floor_bytes(memory_bytes);
    if bytes < floor {
        return Err(not_allowed(format!(
            "a limit of {} is below what keeps this guest alive: give {} or more",
            Bytes(bytes),
            Bytes(floor)
        )));
    }
    if let Some(low) = low_bytes.filter(|low| *low < floor) {
        return Err(not_allowed(format!(
            "a low mark of {} is below what keeps this guest alive: give {} or more",
            Bytes(low),
            Bytes(floor)
        )));
    }
    if bytes >= memory_bytes {
        return Err(not_allowed(format!(
            "a limit of {} limits nothing: the VM has {}; `off` lifts the limit",
            Bytes(bytes),
            Bytes(memory_bytes)
        )));
    }
    Ok(())
}

/// Succeeds if memory in use may be evicted.
///
/// Punching a part of a large folio may zero it in place. So nothing in use is evicted where the
/// kernel may have made, or may yet make, large folios that nobody tells.
///
/// # Errors
/// Why it may not.
pub fn may_evict(cx: &VmContext) -> Answer<()> {
    cx.may_evict_beside_devices()?;
    let record = &cx.record;
    if let Some(disk) = record.disks.iter().find(|disk| disk.dma == DmaMode::Strict) {
        return Err(not_allowed(format!(
            "its disk {} has dma=strict: such a device cannot wait for memory in use to come \
             back, so it is not evicted; free memory is reclaimed (ebb reclaim, ebb auto)",
            disk.path.display()
        )));
    }
    match record.backing {
        Backing::Hugetlb => Err(not_allowed("frames in hugetlb pages are not evicted")),
        Backing::Thp if !keeps_holes() => Err(not_allowed(
            "before Linux 6.4, the host's kernel may fill evicted parts of huge pages with zeros: \
             start the VM with --backing small",
        )),
        Backing::Small if !record.small_pages => Err(not_allowed(
            "QEMU could not be told yet to use no huge pages for its RAM; Ebb tries again",
        )),
        Backing::Small if !record.started && !cx.pager.folios().minds_large_folios() => {
            Err(not_allowed(
                "this VM was not started by Ebb, and the host does not tell which of its \
             memory is in large folios, which cannot be evicted in parts: run ebbd as \
             root, outside of containers",
            ))
        }
        _ => Ok(()),
    }
}
