//! The pager's counters, which `ebb status` shows.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use ebb_ledger::Content;
use ebb_units::FrameRange;

use super::latency::Latency;

/// Counts since the VM was attached, or since this daemon recovered it.
#[derive(Default)]
pub struct Counters {
    /// Touches of frames without memory.
    pub missing: AtomicU64,
    /// Touches of empty frames: of a block whose metadata was not written yet, or of a frame that
    /// was evicted as one repeated byte. They count in `missing` too.
    pub early: AtomicU64,
    /// Writes to watched metadata.
    pub metadata: AtomicU64,
    /// Restored blocks that the guest then did not use.
    pub spurious: AtomicU64,
    /// Faults that could not be served at once, and will be raised again.
    pub retried: AtomicU64,
    /// Frames in the ledger's `Empty` state.
    pub empty_frames: AtomicU64,
    /// Frames whose memory was returned to the host.
    pub reclaimed_frames: AtomicU64,
    /// Empty frames that got their memory again.
    pub returned_frames: AtomicU64,
    /// Frames whose content is in the store.
    pub saved_frames: AtomicU64,
    /// Pages that the store had in memory and has moved to its disk.
    pub written_back_frames: AtomicU64,
    /// Resident frames that keep a slot of the store. The slot holds the content with which the
    /// frame came back ([`Residency::give_up_kept`](crate::Residency::give_up_kept)).
    pub clean_frames: AtomicU64,
    /// Disk-backed frames: a block of the guest's disk has their content.
    pub on_disk_frames: AtomicU64,
    /// Frames read back from the store or a disk because they were touched.
    pub refilled_frames: AtomicU64,
    /// Frames of `refilled_frames` and `ahead_hit_frames` that had been evicted seconds before.
    pub refaulted_frames: AtomicU64,
    /// The same, and those that came back while the VM was at its limit, so that others had to go
    /// for them.
    pub missed_frames: AtomicU64,
    /// Touched frames that were not read back, because the guest had freed them since they were
    /// evicted.
    pub false_reads_avoided: AtomicU64,
    /// Frames that were read back although the guest seems to have freed them: what they were at
    /// their eviction is not known. They count in `refilled_frames` too.
    pub false_reads: AtomicU64,
    /// Frames whose content was dropped before a touch, because it was not needed any more.
    pub dropped_frames: AtomicU64,
    /// Frames whose old content was not read back, because a device overwrote it.
    pub replaced_frames: AtomicU64,
    /// Frames read back ahead, together with touched ones.
    pub ahead_frames: AtomicU64,
    /// Frames of `ahead_frames` in front of a fault that went on where they ended.
    pub ahead_hit_frames: AtomicU64,
    /// Batches that were evicted or reclaimed for the VM's worker, and parts that were brought back
    /// for it. Faults and devices do not count. While the worker has such work done, the count
    /// stands still only if the work does.
    pub worker_batches: AtomicU64,
    /// Times of touches of frames without memory. The time of a fault is that from the read of its
    /// event to the end of the call that resolves it.
    pub missing_times: Latency,
    /// The part of `missing_times` that is of evicted frames.
    pub refill_times: Latency,
    /// Times of writes to watched metadata, and to other protected frames.
    pub metadata_times: Latency,
}

/// What a fault was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FaultKind {
    /// A touch of a frame without memory that was not evicted.
    Missing,
    /// A touch of an evicted frame.
    Evicted,
    /// A write to a protected frame.
    Metadata,
}

impl Counters {
    /// Notes how long a fault took.
    pub(crate) fn note_time(&self, kind: FaultKind, took: Duration) {
        match kind {
            FaultKind::Missing => self.missing_times.record(took),
            FaultKind::Evicted => {
                self.missing_times.record(took);
                self.refill_times.record(took);
            }
            FaultKind::Metadata => self.metadata_times.record(took),
        }
    }

    /// Returns the time, in ns, that `percent` of all faults did not exceed; `None` before the
    /// first.
    pub fn fault_percentile_ns(&self, percent: u64) -> Option<u64> {
        let all = [&self.missing_times, &self.metadata_times];
        Latency::percentile_of_all_ns(&all, percent)
    }

    /// Returns the number of empty and evicted frames.
    pub(crate) fn non_resident(&self) -> u64 {
        let counters = [&self.empty_frames, &self.saved_frames, &self.on_disk_frames];
        counters.iter().map(|counter| counter.load(Relaxed)).sum()
    }

    /// Counts the frames among these that were empty and have their memory again.
    pub(crate) fn returned(&self, contents: impl Iterator<Item = (FrameRange, Content)>) {
        let empty = contents.filter(|(_, content)| matches!(content, Content::Empty { .. }));
        let frames: u64 = empty.map(|(frames, _)| frames.count).sum();
        if frames > 0 {
            add(&self.returned_frames, frames);
            subtract(&self.empty_frames, frames);
        }
    }
}

pub(crate) fn add(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Relaxed);
}

/// Subtracts frames that were counted: whoever makes a frame count does so before it unlocks the
/// frame's word, and a restart begins counting at what the ledger holds. Stops at 0 all the same: a
/// count must never wrap to a huge number.
pub(crate) fn subtract(counter: &AtomicU64, value: u64) {
    let before = counter.fetch_update(Relaxed, Relaxed, |now| Some(now.saturating_sub(value)));
    debug_assert!(before.is_ok_and(|now| now >= value), "{before:?} less {value}");
}
