//! A VM in the pool: the pool decides its limit.

use ebb_reclaim::limit::marks::floor_bytes;
use ebb_units::Bytes;

use super::in_flight::may_tell_in_flight;
use super::may_evict;
use crate::model::api_error::{Answer, not_allowed};
use crate::model::share::Share;
use crate::support::open_files::OpenFiles;
use crate::vm::context::VmContext;

/// Puts the VM into the pool, with its share as the first limit; or takes it out and lifts the
/// limit. Returns whether the limit on record has changed.
///
/// # Errors
/// The VM cannot have this share; then nothing has changed.
pub fn set(cx: &mut VmContext, share: Option<Share>) -> Answer<bool> {
    let was = cx.record.share;
    let Some(share) = share else {
        if was.is_none() {
            return Err(not_allowed(format!(
                "{} is not in the pool: ebb pool shows the VMs that are",
                cx.name()
            )));
        }
        return put_on_record(cx, None, None).map(|()| true);
    };
    may_have(cx, share)?;
    cx.begin_to_evict()?;
    if was.is_some() {
        // The pool tells its new limit in a moment.
        return cx.record.change(|record| record.share = Some(share)).map(|()| false);
    }
    put_on_record(cx, Some(share), Some(share.bytes)).map(|()| true)
}

/// Puts on record the limit that the pool gives the VM from now on; `None`: all of its memory.
/// Returns whether the limit on record has changed.
pub fn allow(cx: &mut VmContext, limit_bytes: Option<u64>) -> bool {
    let share = cx.record.share;
    if share.is_none() || cx.record.limit_bytes == limit_bytes {
        return false;
    }
    let noted = put_on_record(cx, share, limit_bytes);
    if let Err(error) = &noted {
        tracing::error!("its share of the pool: {error}");
    }
    noted.is_ok()
}

fn may_have(cx: &VmContext, share: Share) -> Answer<()> {
    if let Some(tiers) = &cx.record.tiers {
        return Err(not_allowed(format!(
            "its tiers, {}, fix how much of it is in memory: a share is for a VM started without \
             --tier",
            tiers.ladder
        )));
    }
    let floor = floor_bytes(cx.memory_bytes());
    if share.lower_bytes() < floor {
        return Err(not_allowed(format!(
            "a lower limit of {} is below what keeps this guest alive: give a share of {} or \
             more, or a higher --lower",
            Bytes(share.lower_bytes()),
            Bytes(floor.saturating_mul(100) / u64::from(share.lower_percent.max(1)) + 1)
        )));
    }
    may_evict(cx)?;
    may_tell_in_flight(cx, &mut OpenFiles::default()).map(drop)
}

fn put_on_record(cx: &mut VmContext, share: Option<Share>, bytes: Option<u64>) -> Answer<()> {
    let memory_bytes = cx.memory_bytes();
    cx.record.change(|record| {
        (record.share, record.is_piloted) = (share, false);
        record.piloted_compressed_bytes = None;
        record.limit_bytes = bytes.filter(|&bytes| bytes < memory_bytes);
        (record.low_bytes, record.high_bytes) = (None, None);
    })
}
