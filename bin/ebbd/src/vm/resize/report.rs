//! What a VM's size is and how far it is on the way to its target, as the API tells it.

use ebb_api::{BalloonStatus, ResizeReport, SizeState, SizeStatus};
use ebb_policy::resize::{Mechanism, Offer, SizeTarget};
use ebb_units::HUGE_BYTES;

use super::offer::offer;
use super::target::{api, target};
use super::{Resize, blocked};
use crate::model::api_error::{Answer, failed, not_allowed};
use crate::support::nanoseconds::nanoseconds;
use crate::vm::context::VmContext;
use crate::vm::context::capabilities::Capabilities;
use crate::vm::context::shared_part::{Moved, SharedPart};

impl Resize {
    pub(super) fn state(&self, cx: &VmContext, shared: &SharedPart) -> SizeState {
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
    pub fn report(&self, cx: &VmContext, shared: &SharedPart) -> Answer<ResizeReport> {
        let (Some(target), Some(progress)) = (target(cx), &self.progress) else {
            return Err(not_allowed("it has no target: set one with ebb resize"));
        };
        let offer = offer(cx, shared);
        let (bytes, state) = (offer.size_of(&target), self.state(cx, shared));
        let resident = cx.pager.ram().resident_bytes().map_err(failed("the VM's RAM"))?;
        let start_bytes = progress.start_bytes;
        let emptied_bytes = progress.start_resident_bytes.saturating_sub(resident);
        let moved = match progress.mechanism {
            Mechanism::HyperAlloc => shared.moved,
            _ => Moved {
                taken_bytes: start_bytes.saturating_sub(bytes),
                emptied_bytes,
                returned_bytes: bytes.saturating_sub(start_bytes),
                purges: shared.moved.purges,
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
            taken_bytes: moved.taken_bytes,
            emptied_bytes: moved.emptied_bytes,
            returned_bytes: moved.returned_bytes,
            purges: moved.purges,
            duration_ns: nanoseconds(progress.took(state)),
            stopped_by: self.what_stops_it(cx, (&offer, &target), state, shared).unwrap_or_default(),
        })
    }

    fn what_stops_it(
        &self,
        cx: &VmContext,
        (offer, target): (&Offer, &SizeTarget),
        state: SizeState,
        shared: &SharedPart,
    ) -> Option<String> {
        let progress = self.progress.as_ref()?;
        match state {
            SizeState::Reached => Some("the target was reached".into()),
            SizeState::Moving | SizeState::Off => None,
            SizeState::Waiting => {
                Some(blocked::reason(cx, (offer, target), progress, shared.rests_for))
            }
        }
    }

    /// Returns the size that the VM has, and those that it could have.
    pub fn status(&self, cx: &VmContext, shared: &SharedPart) -> SizeStatus {
        let offer = offer(cx, shared);
        let (state, progress, target) = (self.state(cx, shared), &self.progress, target(cx));
        let found = cx.capabilities.as_ref();
        SizeStatus {
            bytes: offer.size_bytes(),
            initial_bytes: offer.initial_bytes,
            plugged_bytes: offer.plugged_bytes(),
            ballooned_bytes: offer.ballooned_bytes(),
            hard_bytes: offer.hard_bytes.unwrap_or(0),
            max_bytes: offer.max_bytes(),
            wanted_bytes: target.map(|target| target.bytes),
            wanted_node: target.and_then(|target| target.node),
            mechanism: progress.as_ref().map(|progress| api(progress.mechanism)),
            reason: progress.as_ref().map(|progress| progress.reason.clone()),
            state,
            stopped_by: target
                .filter(|_| state == SizeState::Waiting)
                .and_then(|target| self.what_stops_it(cx, (&offer, &target), state, shared)),
            devices: found.map(Capabilities::device_status).unwrap_or_default(),
        }
    }

    /// Returns the status of the VM's balloon.
    pub fn balloon_status(&self, cx: &VmContext) -> Option<BalloonStatus> {
        self.balloon.status(cx)
    }
}
