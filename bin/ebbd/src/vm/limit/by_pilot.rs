//! A limit that the pilot sets.

use super::in_flight::may_tell_in_flight;
use super::{conditions, limit_store_memory, may_evict};
use crate::model::api_error::{Answer, failed, not_allowed};
use crate::support::open_files::OpenFiles;
use crate::vm::context::VmContext;

/// Whether this limit of the pilot's takes memory from the VM, or may do so: it is lower than the
/// one before, or there was none of the pilot's.
pub fn is_lower(cx: &VmContext, limit_bytes: Option<u64>) -> bool {
    let before = cx.record.limit_bytes.filter(|_| cx.record.is_piloted);
    limit_bytes.is_some_and(|bytes| before.is_none_or(|before| bytes < before))
}

/// Puts on record the limit that the pilot gives the VM; `None`: all of its memory. Returns whether
/// the limit on record has changed.
///
/// # Errors
/// The VM cannot have this limit, or the limit is somebody else's; then nothing has changed.
pub fn set(cx: &mut VmContext, limit_bytes: Option<u64>) -> Answer<bool> {
    let is_piloted = limit_bytes.is_some();
    if !is_piloted && !cx.record.is_piloted {
        return Ok(false);
    }
    // To give memory back, nothing has to be in order.
    if let Some(bytes) = limit_bytes.filter(|_| is_lower(cx, limit_bytes)) {
        may_limit(cx)?;
        conditions::may_limit(cx, bytes, None)?;
        may_tell_in_flight(cx, &mut OpenFiles::default())?;
        cx.begin_to_evict()?;
    }
    cx.record.change(|record| {
        (record.limit_bytes, record.is_piloted) = (limit_bytes, is_piloted);
        (record.low_bytes, record.high_bytes) = (None, None);
    })?;
    Ok(true)
}

/// Puts on record how much memory the VM's compressed pages may take; `None`: as the daemon has it
/// for all VMs. What is above it goes to the swap file from now on.
///
/// # Errors
/// The VM cannot have compressed memory, or its limit is somebody else's; then nothing has changed.
pub fn compress(cx: &mut VmContext, bytes: Option<u64>) -> Answer<()> {
    if bytes.is_none() && cx.record.piloted_compressed_bytes.is_none() {
        return Ok(());
    }
    if bytes.is_some() {
        may_limit(cx)?;
    }
    if bytes.is_some_and(|bytes| bytes > cx.record.compressed_most_bytes()) {
        return Err(not_allowed("this is more compressed memory than its store is made for"));
    }
    let before = cx.record.piloted_compressed_bytes;
    cx.record.change(|record| record.piloted_compressed_bytes = bytes)?;
    limit_store_memory(cx).map_err(|error| {
        // The store is as it was, so the record says so, too.
        if let Err(unsaved) = cx.record.change(|record| record.piloted_compressed_bytes = before) {
            tracing::warn!("its compressed memory: {unsaved}");
        }
        failed("its compressed memory")(error)
    })
}

/// Succeeds if the limit is the pilot's to set.
///
/// # Errors
/// Why it is not.
pub fn may_limit(cx: &VmContext) -> Answer<()> {
    let record = &cx.record;
    if record.share.is_some() {
        return Err(not_allowed("the pool sets its limit: ebb share NAME off ends that"));
    }
    if record.tiers.is_some() {
        return Err(not_allowed("its tiers fix how much of it is in memory"));
    }
    if record.limit_bytes.is_some() && !record.is_piloted {
        return Err(not_allowed("ebb limit has set its limit: ebb limit NAME off ends that"));
    }
    may_evict(cx)
}
