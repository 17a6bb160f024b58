//! A size that the pilot sets.

use ebb_api::{ResizeRequest, SizeMechanism};
use ebb_policy::resize::Driver;

use super::Resize;
use super::parts::size_parts;
use crate::model::api_error::{Answer, not_allowed};
use crate::model::piloted::PilotedSize;
use crate::vm::context::VmContext;
use crate::vm::context::shared_size::SharedSize;

impl Resize {
    /// What the pilot is told of the VM's size; none: it plugs nothing, or its size is somebody
    /// else's.
    pub fn piloted(&self, cx: &VmContext, shared: &SharedSize) -> Option<PilotedSize> {
        let is_own = cx.record.size.is_none() || cx.record.piloted_full_bytes.is_some();
        let parts = size_parts(cx, shared);
        let plugs = |device: &ebb_policy::resize::DevicePart| device.driver != Driver::Absent;
        if !is_own || !parts.devices.iter().any(plugs) {
            return None;
        }
        let withheld = parts.ballooned_bytes().saturating_add(parts.hard_bytes.unwrap_or(0));
        let base_bytes = parts.initial_bytes.saturating_sub(withheld);
        let requested: u64 = parts.devices.iter().map(|device| device.requested_bytes).sum();
        // The devices are as they were seen last; the record is as it was asked last.
        let asked = cx.record.size.map(|size| size.bytes);
        let target_bytes = asked.unwrap_or(base_bytes.saturating_add(requested));
        Some(PilotedSize {
            bytes: parts.size_bytes(),
            target_bytes,
            full_bytes: cx.record.piloted_full_bytes.unwrap_or(target_bytes),
            base_bytes,
            block_bytes: parts.block_bytes(),
        })
    }

    /// Notes that the size is the pilot's, and returns the request for it.
    ///
    /// # Errors
    /// The VM plugs nothing, its size is somebody else's, or the record cannot be written; then
    /// nothing has changed.
    pub fn request_by_pilot(
        &mut self,
        cx: &mut VmContext,
        bytes: u64,
        shared: &SharedSize,
    ) -> Answer<ResizeRequest> {
        if cx.record.size.is_some() && cx.record.piloted_full_bytes.is_none() {
            return Err(not_allowed("ebb resize has set its size: ebb resize NAME off ends that"));
        }
        self.look(cx)?;
        let size = self.piloted(cx, shared);
        let size = size.ok_or_else(|| not_allowed("its guest can unplug no memory"))?;
        if bytes > size.full_bytes {
            return Err(not_allowed("this is more than it had before the pilot took any"));
        }
        cx.record.change(|record| record.piloted_full_bytes = Some(size.full_bytes))?;
        let by = Some(SizeMechanism::VirtioMem);
        Ok(ResizeRequest { bytes: Some(bytes), node: None, by, on_violation: None })
    }
}
