//! Whether the VMM's requests may write to memory that is about to be evicted.

use ebb_units::Bytes;
use ebb_vm::pinning::pinning_of;

use crate::model::api_error::{Answer, ApiError, failed};
use crate::support::open_files::OpenFiles;
use crate::vm::context::VmContext;

/// The memory that stays resident because nobody tells when requests to it end.
const STAYS: &str = "its kernel's own memory, file pages with buffers and large pages of \
                     processes stay in memory";

/// Returns why requests may write past a protection, if they may. Then the guest tells which frames
/// are in flight. The judge finds descriptors that were opened since they were listed, once frames
/// are protected.
///
/// # Errors
/// The guest is not known, so nobody tells.
pub fn may_tell_in_flight(cx: &VmContext, open: &mut OpenFiles) -> Answer<Option<String>> {
    let process = &cx.process;
    let why = open.of(process).and_then(|open| pinning_of(process, open));
    let why = why.map_err(failed("QEMU's descriptors"))?;
    match (why, cx.guest.guest()) {
        (Some(why), Err(unknown)) => Err(ApiError::NotTrusted(format!(
            "{why}, and Ebb cannot tell which reads still write to memory that is to be evicted, \
             because the guest is not trusted ({unknown}): try again once it is, start QEMU with \
             cache=writeback, or give the disk by `ebb run --disk`"
        ))),
        (why, _) => Ok(why),
    }
}

/// Returns what the user should know of it, if memory in use is evicted.
pub fn warning(cx: &VmContext) -> Option<String> {
    if !cx.record.evicts {
        return None;
    }
    match may_tell_in_flight(cx, &mut OpenFiles::default()) {
        Ok(why) => why.map(|why| format!("{why}: {STAYS}")),
        Err(why) => Some(why.to_string()),
    }
}

/// Returns why nothing more is evicted.
pub fn nothing_more(pinned: Option<&str>) -> String {
    let message = "nothing more can be evicted now";
    pinned.map_or(message.into(), |why| format!("{message}: {why}, and so {STAYS}"))
}

/// Returns why a limit is not kept, though all was evicted that can be.
pub fn out_of_reach(pinned: Option<&str>, taken_bytes: u64) -> String {
    let why = nothing_more(pinned);
    format!("{why}; it takes {}: raise the limit above that", Bytes(taken_bytes))
}
