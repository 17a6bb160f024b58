//! What the pager counts; read by `ebb status`.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use ebb_ledger::Content;
use ebb_units::FrameRange;

use super::latency::Latency;

/// Counts since the VM was held, or since this daemon adopted it.
#[derive(Default)]
pub struct Counters {
    /// Touches of frames without memory.
    pub missing: AtomicU64,
    /// Of those: frames that were touched before their block's metadata was.
    pub early: AtomicU64,
    /// Writes to watched metadata.
    pub metadata: AtomicU64,
    /// Blocks given back that the guest then did not use.
    pub spurious: AtomicU64,
    /// Faults that could not be served at once, and will come again.
    pub retried: AtomicU64,
    /// Frames in the ledger's `Empty` state.
    pub emptied_frames: AtomicU64,
    /// Frames given to the host.
    pub reclaimed_frames: AtomicU64,
    /// Frames given back to the guest.
    pub returned_frames: AtomicU64,
    /// Frames whose content is in the store.
    pub saved_frames: AtomicU64,
    /// Pages that the store had in memory and moved to its disk.
    pub written_back_frames: AtomicU64,
    /// Frames in memory that keep a slot of the store, which holds what they held when they came
    /// ([`Residency::give_up_kept`](crate::Residency::give_up_kept)).
    pub clean_frames: AtomicU64,
    /// Frames whose content is in a block of the guest's disk.
    pub on_disk_frames: AtomicU64,
    /// Frames read back from the store or a disk because they were touched.
    pub refilled_frames: AtomicU64,
    /// Frames not read back when they were touched, as the guest had freed them since
    /// they went.
    pub false_reads_avoided: AtomicU64,
    /// Of those read back: frames that the guest seems to have freed, too, but what they
    /// were when they went is not known.
    pub false_reads: AtomicU64,
    /// Frames whose content was dropped, not being needed any more, before a touch.
    pub dropped_frames: AtomicU64,
    /// Frames whose old content a device overwrote before it was read back.
    pub replaced_frames: AtomicU64,
    /// Frames read back with those.
    pub ahead_frames: AtomicU64,
    /// Of those: in front of a fault that went on where they ended.
    pub ahead_hit_frames: AtomicU64,
    /// From the read of a fault's event to the end of the call that resolves it.
    pub fault: Latency,
}

impl Counters {
    /// Frames that were empty have their memory again.
    pub(crate) fn returned(&self, contents: impl Iterator<Item = (FrameRange, Content)>) {
        let empty = contents.filter(|(_, content)| matches!(content, Content::Empty { .. }));
        let frames: u64 = empty.map(|(frames, _)| frames.count).sum();
        if frames > 0 {
            add(&self.returned_frames, frames);
            subtract(&self.emptied_frames, frames);
        }
    }
}

pub(crate) fn add(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Relaxed);
}

/// Saturating: a restart begins counting at what the ledger holds, and a count
/// must never wrap to a huge number.
pub(crate) fn subtract(counter: &AtomicU64, value: u64) {
    let result = counter.fetch_update(Relaxed, Relaxed, |now| Some(now.saturating_sub(value)));
    debug_assert!(result.is_ok());
}
