//! The parts of a VM's size, by which it can change, and which plan they allow.

use ebb_policy::resize::{self, Mechanism, Plan, SizeParts, SizeRefusal, SizeTarget};
use ebb_reclaim::limit::marks::floor_bytes;
use ebb_units::FRAME_BYTES;

use crate::vm::context::VmContext;
use crate::vm::context::shared_size::SharedSize;

/// Returns the parts of the size, as they were seen last.
pub(super) fn size_parts(cx: &VmContext, shared: &SharedSize) -> SizeParts {
    let all = cx.pager.ram().bytes();
    let hard_bytes = cx.guest.shares_allocator().then_some(shared.hard_bytes);
    match &cx.capabilities {
        None => SizeParts {
            initial_bytes: all,
            node_bytes: vec![all],
            hard_bytes,
            ..SizeParts::default()
        },
        Some(found) => SizeParts {
            initial_bytes: found.initial_bytes,
            node_bytes: found.node_bytes.clone(),
            devices: found.devices(),
            // QEMU gives the host nothing of a balloon while a device is passed through.
            balloon: found.balloon_part().filter(|_| cx.passed.is_none()),
            hard_bytes,
        },
    }
}

/// Returns how the VM comes to that size.
pub(super) fn plan(parts: &SizeParts, target: &SizeTarget) -> Result<Plan, SizeRefusal> {
    resize::plan(parts, target, floor_bytes(parts.initial_bytes + parts.plugged_bytes()))
}

/// Returns what the guest is to have by the allocator that it shares, as the record has it.
pub(super) fn shared_bytes(cx: &VmContext, parts: &SizeParts, plan: &Plan) -> Option<u64> {
    let bytes = parts.initial_bytes.saturating_sub(plan.hard_bytes);
    (bytes < cx.initial_bytes()).then_some(bytes)
}

/// Returns the distance between two sizes that a VM can have, in bytes.
pub(super) fn piece_bytes(parts: &SizeParts) -> u64 {
    parts.block_bytes().max(FRAME_BYTES)
}

/// Whether a guest that is better known might be able to do it.
pub(super) fn is_about_the_guest(refusal: &SizeRefusal) -> bool {
    use SizeRefusal::{DriverAbsent, Lacks, NothingTakes};
    matches!(
        refusal,
        DriverAbsent(Mechanism::Balloon) | Lacks(Mechanism::HyperAlloc) | NothingTakes(_)
    )
}
