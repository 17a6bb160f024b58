//! A VM's state, put together from all who know a part of it.

use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use ebb_api::{
    AutoStatus, Backing, FaultCounts, FaultTimes, GuestStatus, LimitStatus, Mode,
    State as ApiState, VmStatus, VmSummary,
};
use ebb_inspect::{Counts, Guest};
use ebb_pager::Pager;
use ebb_store::Usage;
use ebb_units::{Bytes, FRAME_BYTES};

use crate::console;
use crate::held::LEAVING;
use crate::placing;
use crate::plugged;
use crate::problem::{Answer, failed};
use crate::record::Record;
use crate::swap_room;
use crate::tiers;
use crate::worker::State;

/// All of it; with `counts`, every frame is classified.
pub fn of(state: &State, counts: bool) -> Answer<VmStatus> {
    let (record, pager) = (&state.held.record, &state.held.pager);
    let (all_bytes, memory_bytes) = (pager.ram().bytes(), state.memory_bytes());
    let resident_bytes = pager.ram().resident_bytes().map_err(failed("the VM's RAM"))?;
    // What is not plugged among it, as it was when the VM was first held.
    let absent_bytes = all_bytes.saturating_sub(resident_bytes);
    let totals = record.totals;
    let read = |counter: &AtomicU64| counter.load(Relaxed);
    let (emptied_bytes, returned_total_bytes) = match record.mode {
        Mode::Strict => (
            read(&pager.counters.emptied_frames) * FRAME_BYTES,
            read(&pager.counters.returned_frames) * FRAME_BYTES,
        ),
        Mode::Release => (
            memory_bytes.saturating_sub(resident_bytes),
            (totals.reclaimed_bytes + totals.absent_at_hold_bytes).saturating_sub(absent_bytes),
        ),
    };
    let (mechanism, mechanism_reason) = state.mechanism();
    Ok(VmStatus {
        name: record.name.clone(),
        pid: record.pid,
        state: ApiState::Held,
        state_reason: None,
        age_ms: 0,
        accelerator: record.accelerator,
        accelerator_reason: record.accelerator_reason.clone(),
        backing: record.backing,
        backing_reason: record.backing_reason.clone(),
        mode: record.mode,
        mode_reason: state.mode_reason(),
        reach: state.reach_status(),
        mechanism,
        mechanism_reason,
        console: record.has_console().then(|| console::socket(&state.held.directory)),
        console_log: record.has_console().then(|| console::log(&state.held.logs())),
        confinement: record.confinement.clone(),
        min_order: record.min_order,
        memory_bytes,
        unplugged_bytes: record.unplugged_bytes(),
        resident_bytes,
        emptied_bytes,
        guest_free_bytes: { state.insight.guest().ok() }
            .and_then(|guest| guest.free_bytes(&pager.view())),
        guest: guest(state.insight.guest(), pager, counts),
        faults: FaultCounts {
            missing: read(&pager.counters.missing),
            metadata: read(&pager.counters.metadata),
            spurious: read(&pager.counters.spurious),
            early: read(&pager.counters.early),
        },
        fault_ns: FaultTimes {
            p50: pager.counters.fault.percentile_ns(50),
            p99: pager.counters.fault.percentile_ns(99),
        },
        reclaimed_total_bytes: totals.reclaimed_bytes,
        returned_total_bytes,
        auto: auto(state),
        limit: limit(state),
        size: state.size_status(),
        balloon: state.balloon_status(),
        tier: tiers::status(state),
        sharing: state.sharing_status(),
        disks: state.held.disks.counts(),
        warnings: warnings(state),
    })
}

/// Automatic reclaim.
pub fn auto(state: &State) -> AutoStatus {
    let auto = state.held.record.auto;
    AutoStatus {
        on: auto.on,
        interval_ms: auto.interval_ms,
        keep_bytes: auto.keep_bytes,
        last: state.last.clone(),
    }
}

/// The limit on resident memory, and what came of it.
pub fn limit(state: &State) -> LimitStatus {
    let counters = &state.held.pager.counters;
    let bytes = |counter: &AtomicU64| counter.load(Relaxed) * FRAME_BYTES;
    let total = state.limiter.as_ref().map(|limiter| limiter.total).unwrap_or_default();
    let (marks, usage) = (state.marks(), state.held.pager.store_usage());
    LimitStatus {
        bytes: marks.map(|marks| marks.limit_bytes),
        share_bytes: state.held.record.share.map(|share| share.bytes),
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
        ahead_total_bytes: bytes(&counters.ahead_frames),
        ahead_hit_total_bytes: bytes(&counters.ahead_hit_frames),
        false_reads_avoided_total_bytes: bytes(&counters.false_reads_avoided),
        false_reads_total_bytes: bytes(&counters.false_reads),
        dropped_total_bytes: bytes(&counters.dropped_frames),
        replaced_total_bytes: bytes(&counters.replaced_frames),
        tracked_blocks: state.held.disks.shared.tracked_blocks(),
        compressed_pages: usage.compressed_pages,
        compressed_bytes: usage.memory_bytes,
        compressed_limit_bytes: usage.memory_limit_bytes,
        compressed_ratio: ratio(usage),
        written_back_total_bytes: bytes(&counters.written_back_frames),
        swap_file_bytes: usage.file_bytes,
        all_swap_files_bytes: swap_room::room().taken_bytes(),
        waits: state.waits(),
        waiting_touches: state.held.pager.waiting_touches(),
        stuck: state.what_is_stuck(),
    }
}

/// How much smaller pages are in compressed memory, to a hundredth.
fn ratio(usage: Usage) -> Option<f64> {
    let pages_bytes = usage.compressed_pages * FRAME_BYTES;
    let hundredths = (pages_bytes * 100).checked_div(usage.memory_bytes)?;
    Some(hundredths as f64 / 100.0)
}

/// The short form, from the long one.
pub fn summary(status: &VmStatus) -> VmSummary {
    VmSummary {
        name: status.name.clone(),
        pid: status.pid,
        state: status.state,
        state_reason: status.state_reason.clone(),
        age_ms: Some(status.age_ms),
        accelerator: status.accelerator,
        backing: status.backing,
        mode: status.mode,
        trusted: status.guest.trusted,
        auto: status.auto.on,
        memory_bytes: status.memory_bytes,
        resident_bytes: status.resident_bytes,
    }
}

/// The short form of a VM that is not taken up yet.
pub fn on_record(record: &Record) -> VmSummary {
    VmSummary {
        name: record.name.clone(),
        pid: record.pid,
        state: ApiState::TakingUp,
        state_reason: None,
        age_ms: None,
        accelerator: record.accelerator,
        backing: record.backing,
        mode: record.mode,
        trusted: false,
        auto: record.auto.on,
        memory_bytes: record.memory_bytes(),
        resident_bytes: 0,
    }
}

fn guest(guest: Result<&Guest, &str>, pager: &Pager, counts: bool) -> GuestStatus {
    let guest = match guest {
        Ok(guest) => guest,
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

fn counted(known: GuestStatus, counts: &Counts) -> GuestStatus {
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

/// With less than this free in the run directory something may find no room.
const RUN_DIR_LEAST_BYTES: u64 = 256 << 10;

fn warnings(state: &State) -> Vec<String> {
    let mut all = Vec::new();
    all.extend(state.held.record.leaving.map(|_| format!("{LEAVING}; `ebb detach` tries again")));
    match state.held.record.backing {
        Backing::Small => all.push(format!(
            "its RAM is in 4 KiB pages, which cost some 60 times more to take and to give: {}",
            state.held.record.backing_reason
        )),
        Backing::Hugetlb if !state.may_share() => all.push(
            "its RAM is in hugetlb pages, which cannot be write-protected 4 KiB at a time: free \
             memory cannot be taken"
                .into(),
        ),
        _ => {}
    }
    let ram = state.held.pager.ram();
    match ram.is_broken() {
        true => all.push("QEMU has shrunk the file of its RAM: its memory is lost, stop it".into()),
        false if ram.may_shrink() => all.push(
            "the file of its RAM is not sealed: should QEMU shrink it, the VM's memory is lost, and \
             no other VM's (start QEMU with memory-backend-memfd, which seals it)"
                .into(),
        ),
        false => {}
    }
    let confinement = state.held.record.confinement.iter();
    all.extend(confinement.flat_map(|confinement| confinement.lacks.iter().cloned()));
    all.extend(tiers::status(state).as_ref().and_then(tiers::warning));
    if let (true, Some(why)) = (state.is_monitored(), state.monitor.blind_spot()) {
        all.push(format!("not each use of its memory is seen: {why}"));
    }
    all.extend(state.placing.iter().flat_map(placing::warnings));
    all.extend(plugged::warning(&state.plugged));
    all.extend(no_room(&state.held.directory));
    all.extend(
        state
            .unsaved
            .iter()
            .map(|why| format!("what changed last is not on record, which is tried again: {why}")),
    );
    let (record, by_tier) = (&state.held.record, state.held.record.tiers.as_ref());
    let by_tier = by_tier.is_some_and(|tiers| tiers.file.is_some());
    let swaps = record.evicts.then(|| swap_room::in_memory(&record.swap, by_tier));
    all.extend(swaps.flatten());
    all.extend(state.in_flight_warning());
    if state.held.qmp.is_none() {
        all.push(
            "QEMU's QMP socket does not answer: resets go unnoticed, so nothing is taken".into(),
        );
    }
    all
}

/// Whether records find no room where they are to be.
fn no_room(directory: &Path) -> Option<String> {
    let found = rustix::fs::statvfs(directory).ok()?;
    let free_bytes = found.f_bavail.saturating_mul(found.f_frsize);
    (free_bytes < RUN_DIR_LEAST_BYTES).then(|| {
        format!(
            "the run directory, {}, has {} left: what cannot be put on record there is not done; \
             make room",
            directory.display(),
            Bytes(free_bytes)
        )
    })
}
