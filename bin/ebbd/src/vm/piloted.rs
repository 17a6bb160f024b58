//! What the pilot is told of a VM, put together from the controllers that know a part of it.

use std::sync::atomic::Ordering::Relaxed;

use ebb_reclaim::limit::marks::floor_bytes;
use ebb_units::FRAME_BYTES;

use super::context::VmContext;
use super::limit::{Limit, by_pilot};
use super::resize::plugged;
use crate::model::api_error::{Answer, failed};
use crate::model::piloted::{Piloted, PilotedCompressed};

/// Returns what the pilot wants to know of the VM.
///
/// # Errors
/// As fstat(2) of the VM's RAM.
pub fn of(cx: &VmContext, limit: &Limit) -> Answer<Piloted> {
    let (memory_bytes, missed) = (cx.memory_bytes(), &cx.pager.counters().missed_frames);
    Ok(Piloted {
        taken_bytes: cx.pager.residency().taken_bytes().map_err(failed("the VM's RAM"))?,
        memory_bytes,
        floor_bytes: floor_bytes(memory_bytes),
        working_bytes: limit.active_bytes(),
        limit_bytes: cx.record.limit_bytes.filter(|_| cx.record.is_piloted),
        missed_total_bytes: Some(missed.load(Relaxed) * FRAME_BYTES),
        compressed: compressed(cx),
        plugged: plugged::seen(cx),
        left_alone: by_pilot::may_limit(cx).err().map(|why| why.to_string()),
    })
}

/// Its compressed memory; none: its store cannot compress.
fn compressed(cx: &VmContext) -> Option<PilotedCompressed> {
    let can_compress = cx.pager.residency().store_usage().memory_slots > 0;
    can_compress.then(|| PilotedCompressed {
        most_bytes: cx.record.compressed_bytes(),
        is_piloted: cx.record.piloted_compressed_bytes.is_some(),
        own_bytes: cx.record.settings.compressed_bytes,
    })
}
