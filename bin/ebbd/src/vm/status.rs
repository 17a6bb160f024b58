//! A VM's status, put together from all controllers that know a part of it.

use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use ebb_api::{
    Backing, FaultCounts, FaultTimes, GuestStatus, LimitStatus, Mode, SizeStatus,
    State as ApiState, VmStatus, advice,
};
use ebb_inspect::FrameCounts;
use ebb_pager::Pager;
use ebb_store::StoreUsage;
use ebb_units::{Bytes, FRAME_BYTES};

use super::context::LEAVING;
use super::context::VmContext;
use super::context::kernel::Kernel;
use super::devices::Devices;
use super::hyperalloc::SharedAllocator;
use super::limit::{Limit, in_flight};
use super::parts::{self, Counted};
use super::reclaim::Reclaim;
use super::resize::Resize;
use super::returned::Returned;
use super::tiering::Tiering;
use super::trust::Trust;
use crate::helpers::console;
use crate::model::api_error::{Answer, failed};
use crate::model::record::Record;
use crate::serve::swap_room;
use crate::system::host_facts;

/// The controllers that know a part of the status.
pub struct Knowing<'a> {
    /// The VM.
    pub cx: &'a VmContext,
    /// Knows whether a kernel waits for its memory.
    pub trust: &'a Trust,
    /// Knows the devices that reach the memory by themselves.
    pub devices: &'a Devices,
    /// Knows what was reclaimed.
    pub reclaim: &'a Reclaim,
    /// Knows the shared allocator.
    pub hyperalloc: &'a SharedAllocator,
    /// Knows what was evicted.
    pub limit: &'a Limit,
    /// Knows the size.
    pub resize: &'a Resize,
    /// Knows the tiers.
    pub tiering: &'a Tiering,
    /// Knows what the guest has got back.
    pub returned: &'a Returned,
}

/// Returns the whole status. With `counts`, every frame is classified.
pub fn of(knowing: &Knowing<'_>, counts: bool) -> Answer<VmStatus> {
    let Knowing { cx, devices, reclaim, hyperalloc, resize, tiering, returned, .. } = knowing;
    let (record, pager) = (&*cx.record, &cx.pager);
    let memory_bytes = cx.memory_bytes();
    let resident_bytes = pager.ram().resident_bytes().map_err(failed("the VM's RAM"))?;
    let record_directory = cx.record.directory();
    let emptied_bytes = match record.mode {
        Mode::Strict => pager.counters().empty_frames.load(Relaxed) * FRAME_BYTES,
        Mode::Release => memory_bytes.saturating_sub(resident_bytes),
    };
    let shared_size = hyperalloc.shared_size();
    let size = resize.status(cx, &shared_size);
    let limit = limit(knowing);
    let guest_free_bytes =
        { cx.guest.guest().ok() }.and_then(|guest| guest.free_bytes(&pager.view()));
    let counted = Counted {
        memory: memory_bytes,
        resident: resident_bytes,
        free: guest_free_bytes,
        ..counted_of(&limit, &size)
    };
    let (mechanism, mechanism_reason) =
        hyperalloc.mechanism(cx).unwrap_or_else(|| reclaim.mechanism(cx));
    Ok(VmStatus {
        name: record.name.clone(),
        pid: record.pid,
        state: ApiState::Managed,
        state_reason: None,
        age_ms: 0,
        accelerator: record.accelerator,
        accelerator_reason: record.accelerator_reason.clone(),
        backing: record.backing,
        backing_reason: record.backing_reason.clone(),
        mode: record.mode,
        mode_reason: devices.mode_reason(cx),
        reach: devices.status(cx),
        mechanism,
        mechanism_reason,
        console: record.has_console().then(|| console::socket(record_directory)),
        console_log: record.has_console().then(|| console::log(&cx.logs())),
        confinement: record.confinement.clone(),
        min_order: record.min_order,
        memory_bytes,
        unplugged_bytes: record.unplugged_bytes(),
        resident_bytes,
        parts: Some(parts::of(counted)),
        emptied_bytes,
        guest_free_bytes,
        guest: guest(cx.guest.kernel(), pager, counts),
        faults: faults(pager),
        fault_ns: fault_times(pager),
        reclaimed_total_bytes: record.totals.reclaimed_bytes,
        returned_total_bytes: returned.bytes(),
        auto: reclaim.auto_status(cx),
        limit,
        size,
        balloon: resize.balloon_status(cx),
        tier: tiering.status(cx, knowing.limit.active_bytes()),
        sharing: hyperalloc.status(cx),
        disks: cx.disks.counts(),
        warnings: warnings(knowing),
    })
}

/// Returns what the limit and the size tell of where the memory is.
fn counted_of(limit: &LimitStatus, size: &SizeStatus) -> Counted {
    Counted {
        saved: limit.saved_bytes,
        compressed: limit.compressed_pages.saturating_mul(FRAME_BYTES),
        disk_backed: limit.on_disk_bytes,
        withheld: size.ballooned_bytes.saturating_add(size.hard_bytes),
        ..Counted::default()
    }
}

fn fault_times(pager: &Pager) -> FaultTimes {
    let percentile = |percent| pager.counters().fault_percentile_ns(percent);
    FaultTimes { p50: percentile(50), p99: percentile(99) }
}

fn faults(pager: &Pager) -> FaultCounts {
    let counters = pager.counters();
    let read = |counter: &AtomicU64| counter.load(Relaxed);
    FaultCounts {
        missing: read(&counters.missing),
        metadata: read(&counters.metadata),
        spurious: read(&counters.spurious),
        early: read(&counters.early),
    }
}

/// Returns the limit on resident memory, and what eviction did.
pub fn limit(knowing: &Knowing<'_>) -> LimitStatus {
    let Knowing { cx, limit, devices, .. } = knowing;
    let counters = &cx.pager.counters();
    let bytes = |counter: &AtomicU64| counter.load(Relaxed) * FRAME_BYTES;
    let (total, marks, usage) = (limit.evicted(), cx.marks(), cx.pager.residency().store_usage());
    LimitStatus {
        bytes: marks.map(|marks| marks.limit_bytes),
        share_bytes: cx.record.share.map(|share| share.bytes),
        high_bytes: marks.map(|marks| marks.high_bytes),
        low_bytes: marks.map(|marks| marks.low_bytes),
        saved_bytes: bytes(&counters.saved_frames),
        on_disk_bytes: bytes(&counters.on_disk_frames),
        clean_bytes: bytes(&counters.clean_frames),
        saved_total_bytes: total.saved * FRAME_BYTES,
        clean_total_bytes: total.clean * FRAME_BYTES,
        on_disk_total_bytes: total.on_disk * FRAME_BYTES,
        empty_total_bytes: total.empty * FRAME_BYTES,
        refilled_total_bytes: bytes(&counters.refilled_frames),
        refaulted_total_bytes: bytes(&counters.refaulted_frames),
        ahead_total_bytes: bytes(&counters.ahead_frames),
        ahead_hit_total_bytes: bytes(&counters.ahead_hit_frames),
        false_reads_avoided_total_bytes: bytes(&counters.false_reads_avoided),
        false_reads_total_bytes: bytes(&counters.false_reads),
        dropped_total_bytes: bytes(&counters.dropped_frames),
        replaced_total_bytes: bytes(&counters.replaced_frames),
        tracked_blocks: cx.disks.shared.tracked_blocks(),
        compressed_pages: usage.compressed_pages,
        compressed_bytes: usage.memory_bytes,
        compressed_limit_bytes: usage.memory_limit_bytes,
        compressed_ratio: ratio(usage),
        written_back_total_bytes: bytes(&counters.written_back_frames),
        swap_file_bytes: usage.file_bytes,
        all_swap_files_bytes: swap_room::taken_bytes(),
        waits: cx.waits(),
        waiting_touches: cx.pager.room().waiting_touches(),
        stuck: limit.why_not_kept(cx, devices.why_stopped()),
    }
}

/// Returns by what factor compression shrinks pages, to a hundredth.
fn ratio(usage: StoreUsage) -> Option<f64> {
    let pages_bytes = usage.compressed_pages * FRAME_BYTES;
    let hundredths = (pages_bytes * 100).checked_div(usage.memory_bytes)?;
    Some(hundredths as f64 / 100.0)
}

fn guest(kernel: Result<&Kernel, &str>, pager: &Pager, counts: bool) -> GuestStatus {
    let guest = match kernel {
        Ok(Kernel::Inspected(guest)) => guest,
        Ok(Kernel::Registered(_)) => {
            return GuestStatus { trusted: true, registered: true, ..GuestStatus::default() };
        }
        Err(why) => return GuestStatus { why: Some(why.to_owned()), ..GuestStatus::default() },
    };
    let known = GuestStatus {
        kernel: Some(guest.release().to_owned()),
        trusted: true,
        ..GuestStatus::default()
    };
    match counts {
        true => counted(known, &guest.counts(&pager.view())),
        false => known,
    }
}

fn counted(known: GuestStatus, counts: &FrameCounts) -> GuestStatus {
    let bytes = |frames: u64| Some(frames * FRAME_BYTES);
    GuestStatus {
        free_blocks: counts.free_blocks.first_chunk().copied(),
        anonymous_bytes: bytes(counts.anonymous_frames),
        file_bytes: bytes(counts.file_frames),
        slab_bytes: bytes(counts.slab_frames),
        page_table_bytes: bytes(counts.table_frames),
        offline_bytes: bytes(counts.offline_frames),
        ..known
    }
}

/// With less free space than this in the run directory, a write may find no room.
const RUN_DIR_LEAST_BYTES: u64 = 256 << 10;

fn warnings(knowing: &Knowing<'_>) -> Vec<String> {
    let Knowing { cx, trust, tiering, limit, devices, .. } = knowing;
    let record = &cx.record;
    let mut all = Vec::new();
    all.extend(trust.why_stopped());
    all.extend(record.leaving.map(|_| format!("{LEAVING}; `ebb detach` tries again")));
    all.extend(of_backing(cx));
    let most_bytes = record.limit_bytes.unwrap_or(u64::MAX).min(cx.memory_bytes());
    all.extend(host_facts::memory_bytes().and_then(|host| too_large(most_bytes, host)));
    let confinement = record.confinement.iter();
    all.extend(confinement.flat_map(|confinement| confinement.lacks.iter().cloned()));
    all.extend(tiering.warnings(cx, limit.active_bytes()));
    all.extend(devices.plugged_warning());
    all.extend(no_room(record.directory()));
    all.extend(key_on_disk(record.directory()));
    all.extend(
        record
            .why_unsaved()
            .map(|why| format!("the last change is not on record yet, and Ebb tries again: {why}")),
    );
    let by_tier = record.tiers.as_ref().is_some_and(|tiers| tiers.file.is_some());
    let swaps = record.evicts.then(|| swap_room::in_memory(&record.swap, by_tier));
    all.extend(swaps.flatten());
    if cx.pager.residency().is_store_removed() {
        all.push(swap_is_removed(record));
    }
    all.extend(in_flight::warning(cx));
    let unheard = cx.qmp.why_unheard();
    all.extend(unheard.map(|why| format!("{why}: resets go unnoticed, so nothing is reclaimed")));
    all
}

/// The warning of a swap file that was removed.
pub fn swap_is_removed(record: &Record) -> String {
    let detach = record.disks.is_empty() && record.growth.is_empty();
    advice::swap_is_removed(&record.swap, &record.name, detach)
}

/// Returns warnings about the memory's pages and their files.
fn of_backing(cx: &VmContext) -> Vec<String> {
    let mut all = Vec::new();
    match cx.record.backing {
        Backing::Small => {
            all.push(format!("{}; {}", advice::SMALL_PAGES_COST, cx.record.backing_reason));
        }
        Backing::Hugetlb if !cx.guest.shares_allocator() => all.push(
            "its RAM is in hugetlb pages, which cannot be write-protected 4 KiB at a time: free \
             memory cannot be reclaimed"
                .into(),
        ),
        _ => {}
    }
    let ram = cx.pager.ram();
    match ram.is_broken() {
        true => all.push("QEMU has shrunk the file of its RAM: its memory is lost, stop it".into()),
        false if ram.may_shrink() => all.push(
            "the file of its RAM is not sealed: should QEMU shrink it, the VM's memory is lost, and \
             no other VM's (start QEMU with memory-backend-memfd, which seals it)"
                .into(),
        ),
        false => {}
    }
    all
}

/// Returns a warning for a VM that may take more memory than the host has.
fn too_large(most_bytes: u64, host_bytes: u64) -> Option<String> {
    (most_bytes > host_bytes).then(|| {
        format!(
            "it may take {} of memory, and the host has {}: set a limit below that (ebb limit)",
            Bytes(most_bytes),
            Bytes(host_bytes)
        )
    })
}

/// Returns a warning if the swap file's key is on a disk.
fn key_on_disk(directory: &Path) -> Option<String> {
    let is_on_disk = ebb_store::is_in_memory(directory).is_ok_and(|is| !is);
    is_on_disk.then(|| advice::key_on_disk(directory))
}

/// Returns a warning if records may find no room in the run directory.
fn no_room(directory: &Path) -> Option<String> {
    let found = rustix::fs::statvfs(directory).ok()?;
    let free_bytes = found.f_bavail.saturating_mul(found.f_frsize);
    (free_bytes < RUN_DIR_LEAST_BYTES).then(|| {
        format!(
            "the run directory, {}, has {} left: Ebb refuses changes that it cannot record there; \
             make room",
            directory.display(),
            Bytes(free_bytes)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_that_the_host_has_no_memory_for_is_reported() {
        let message = too_large(100 << 30, 23 << 30).unwrap();
        assert!(message.contains("100 GiB") && message.contains("23 GiB"), "{message}");
        assert!(message.contains("ebb limit") && !message.contains('\n'), "{message}");
        assert_eq!(too_large(1 << 30, 1 << 30), None);
    }

    #[test]
    fn a_key_on_a_disk_is_reported() {
        let message = key_on_disk(Path::new("/proc")).unwrap();
        assert!(message.contains("/proc") && message.contains("EBB_RUN_DIR"), "{message}");
        assert_eq!(key_on_disk(Path::new("/dev/shm")), None);
    }
}
