//! The target of a VM's size, as it was asked for and as it is on record.

use ebb_api::{ResizeRequest, SizeMechanism};
use ebb_policy::resize::{Mechanism, SizeTarget};
use ebb_units::Bytes;

use crate::model::record::SizeRecord;
use crate::vm::context::VmContext;

/// Returns the target of a request; `None`: the size is to stay.
pub fn target_of(request: &ResizeRequest) -> Option<SizeTarget> {
    let bytes = request.bytes?;
    Some(SizeTarget { bytes, node: request.node, by: request.by.map(mechanism) })
}

/// Returns the target on record.
pub(super) fn target(cx: &VmContext) -> Option<SizeTarget> {
    let size = cx.record.size?;
    Some(SizeTarget { bytes: size.bytes, node: size.node, by: size.by.map(mechanism) })
}

/// Returns the message once there is no target. `size`: the target before.
pub(super) fn no_more(size: Option<SizeRecord>) -> String {
    let Some(SizeRecord { bytes, node, .. }) = size else { return "there was no target".into() };
    let node = node.map(|node| format!(" on node {node}")).unwrap_or_default();
    format!("its target of {}{node} was removed", Bytes(bytes))
}

fn mechanism(by: SizeMechanism) -> Mechanism {
    match by {
        SizeMechanism::HyperAlloc => Mechanism::HyperAlloc,
        SizeMechanism::Balloon => Mechanism::Balloon,
        SizeMechanism::VirtioMem => Mechanism::VirtioMem,
    }
}

pub(super) fn api(by: Mechanism) -> SizeMechanism {
    match by {
        Mechanism::HyperAlloc => SizeMechanism::HyperAlloc,
        Mechanism::Balloon => SizeMechanism::Balloon,
        Mechanism::VirtioMem => SizeMechanism::VirtioMem,
    }
}
