//! The offer of a VM: by what its size can change, and which plan that allows.

use ebb_policy::resize::{self, Mechanism, Offer, Plan, Refusal, SizeTarget};
use ebb_reclaim::limit::marks::floor_bytes;
use ebb_units::FRAME_BYTES;

use crate::vm::context::VmContext;
use crate::vm::context::shared_part::SharedPart;

/// Returns by what the size can change, as it was seen last.
pub(super) fn offer(cx: &VmContext, shared: &SharedPart) -> Offer {
    let all = cx.pager.ram().bytes();
    let hard_bytes = cx.guest.shares_allocator().then_some(shared.hard_bytes);
    match &cx.capabilities {
        None => Offer { initial_bytes: all, node_bytes: vec![all], hard_bytes, ..Offer::default() },
        Some(found) => Offer {
            initial_bytes: found.initial_bytes,
            node_bytes: found.node_bytes.clone(),
            devices: found.devices(),
            balloon: found.balloon_offer(),
            hard_bytes,
        },
    }
}

/// Returns how the VM comes to that size.
pub(super) fn plan(offer: &Offer, target: &SizeTarget) -> Result<Plan, Refusal> {
    resize::plan(offer, target, floor_bytes(offer.initial_bytes + offer.plugged_bytes()))
}

/// Returns what the guest is to have by the allocator that it shares, as the record has it.
pub(super) fn shared_bytes(cx: &VmContext, offer: &Offer, plan: &Plan) -> Option<u64> {
    let bytes = offer.initial_bytes.saturating_sub(plan.hard_bytes);
    (bytes < cx.initial_bytes()).then_some(bytes)
}

/// Returns the distance between two sizes that a VM can have, in bytes.
pub(super) fn piece_bytes(offer: &Offer) -> u64 {
    offer.block_bytes().max(FRAME_BYTES)
}

/// Whether a guest that is better known might be able to do it.
pub(super) fn is_about_the_guest(refusal: &Refusal) -> bool {
    use Refusal::{DriverAbsent, Lacks, NothingTakes};
    matches!(
        refusal,
        DriverAbsent(Mechanism::Balloon) | Lacks(Mechanism::HyperAlloc) | NothingTakes(_)
    )
}
