//! What a VM's size is and how far it is on the way to its target, as the API tells it.

use ebb_api::{BalloonStatus, ResizeReport, SizeState, SizeStatus};
use ebb_policy::resize::{Mechanism, SizeParts, SizeTarget};
use ebb_units::HUGE_BYTES;

use super::parts::size_parts;
use super::target::{api, target};
use super::{Resize, blocked};
use crate::model::api_error::{Answer, ApiError, failed};
use crate::support::nanoseconds::nanoseconds;
use crate::vm::context::VmContext;
use crate::vm::context::capabilities::Capabilities;
use crate::vm::context::shared_size::{SharedChange, SharedSize};

impl Resize {
    pub(super) fn state(&self, cx: &VmContext, shared: &SharedSize) -> SizeState {
        let piece = match self.progress.as_ref().map(|progress| progress.mechanism) {
            Some(Mechanism::HyperAlloc) => HUGE_BYTES,
            _ => 1,
        };
        match self.progress.as_ref().map_or(SizeState::Off, |progress| progress.state(piece)) {
            // The guest waits for room, and QEMU may: until there is some, neither makes progress.
            SizeState::Moving if cx.waits() => SizeState::Waiting,
            SizeState::Waiting if shared.is_moving && !cx.waits() => SizeState::Moving,
            state => state,
        }
    }

    /// Reports how far the VM is on its way to its target.
    ///
    /// # Errors
    /// No size was asked for.
    pub fn report(&self, cx: &VmContext, shared: &SharedSize) -> Answer<ResizeReport> {
        let (Some(target), Some(progress)) = (target(cx), &self.progress) else {
            return Err(ApiError::NotSet("it has no target: set one with ebb resize".into()));
        };
        let parts = size_parts(cx, shared);
        let (bytes, state) = (parts.size_of(&target), self.state(cx, shared));
        let resident = cx.pager.ram().resident_bytes().map_err(failed("the VM's RAM"))?;
        let start_bytes = progress.start_bytes;
        let reclaimed_bytes = progress.start_resident_bytes.saturating_sub(resident);
        let change = match progress.mechanism {
            Mechanism::HyperAlloc => shared.last_change,
            _ => SharedChange {
                taken_bytes: start_bytes.saturating_sub(bytes),
                reclaimed_bytes,
                returned_bytes: bytes.saturating_sub(start_bytes),
                purges: shared.last_change.purges,
            },
        };
        Ok(ResizeReport {
            bytes,
            wanted_bytes: target.bytes,
            node: target.node,
            mechanism: api(progress.mechanism),
            reason: progress.reason.clone(),
            state,
            least_bytes: progress.least_bytes,
            taken_bytes: change.taken_bytes,
            emptied_bytes: change.reclaimed_bytes,
            returned_bytes: change.returned_bytes,
            purges: change.purges,
            duration_ns: nanoseconds(progress.took(state)),
            stopped_by: self
                .blocked_reason(cx, (&parts, &target), state, shared)
                .unwrap_or_default(),
        })
    }

    fn blocked_reason(
        &self,
        cx: &VmContext,
        (parts, target): (&SizeParts, &SizeTarget),
        state: SizeState,
        shared: &SharedSize,
    ) -> Option<String> {
        let progress = self.progress.as_ref()?;
        match state {
            SizeState::Reached => Some("the target was reached".into()),
            SizeState::Moving | SizeState::Off => None,
            SizeState::Waiting => {
                Some(blocked::reason(cx, (parts, target), progress, shared.pause_left))
            }
        }
    }

    /// Returns the size that the VM has, and those that it could have.
    pub fn status(&self, cx: &VmContext, shared: &SharedSize) -> SizeStatus {
        let parts = size_parts(cx, shared);
        let (state, progress, target) = (self.state(cx, shared), &self.progress, target(cx));
        let found = cx.capabilities.as_ref();
        SizeStatus {
            bytes: parts.size_bytes(),
            initial_bytes: parts.initial_bytes,
            plugged_bytes: parts.plugged_bytes(),
            ballooned_bytes: parts.ballooned_bytes(),
            hard_bytes: parts.hard_bytes.unwrap_or(0),
            max_bytes: parts.max_bytes(),
            wanted_bytes: target.map(|target| target.bytes),
            wanted_node: target.and_then(|target| target.node),
            mechanism: progress.as_ref().map(|progress| api(progress.mechanism)),
            reason: progress.as_ref().map(|progress| progress.reason.clone()),
            state,
            stopped_by: target
                .filter(|_| state == SizeState::Waiting)
                .and_then(|target| self.blocked_reason(cx, (&parts, &target), state, shared)),
            devices: found.map(Capabilities::device_status).unwrap_or_default(),
        }
    }

    /// Returns the status of the VM's balloon.
    pub fn balloon_status(&self, cx: &VmContext) -> Option<BalloonStatus> {
        self.balloon.status(cx)
    }
}
