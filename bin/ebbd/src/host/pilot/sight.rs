//! VMs as the policy sees them, and as clients see what it saw.

use std::time::Duration;

use ebb_api::{
    BalloonStatus, MayTake, PilotSight, SeenBound, SeenPlugged, SeenVm, VmName, VmStatus,
};
use ebb_policy::need::MemoryFigures;
use ebb_policy::pilot::{CompressedSight, HostSight, PluggedSight, VmRule, VmSight};

use super::record::class_for_clients;
use crate::model::figures::millis;
use crate::model::piloted::{Piloted, PilotedPlugged};

/// Figures of a guest count for so many seconds.
const GUEST_AGE_S: u64 = 5;

/// The VM of these figures.
pub(super) fn of(name: &VmName, status: &VmStatus, piloted: &Piloted, rule: VmRule) -> VmSight {
    let non_resident = piloted.memory_bytes.saturating_sub(status.resident_bytes);
    // The guest's own word: no more of it can be resident than is.
    let most = status.resident_bytes.saturating_sub(piloted.floor_bytes);
    let spare = status.guest_free_bytes.unwrap_or(0).saturating_sub(non_resident).min(most);
    let may_take = status.guest.trusted && status.reach.may_take != MayTake::Nothing;
    VmSight {
        name: name.to_string(),
        rule,
        memory_bytes: piloted.memory_bytes,
        resident_bytes: piloted.taken_bytes,
        floor_bytes: piloted.floor_bytes,
        limit_bytes: piloted.limit_bytes,
        spare_bytes: spare,
        working_bytes: piloted.working_bytes,
        refaulted_bytes: piloted.missed_bytes(status.limit.refaulted_total_bytes),
        guest: status.balloon.as_ref().and_then(guest),
        plugged: piloted.plugged.map(plugged),
        compressed: piloted.compressed.map(|compressed| CompressedSight {
            bytes: status.limit.compressed_bytes,
            most_bytes: compressed.most_bytes,
            // What somebody else has set is left alone.
            own_bytes: if compressed.is_piloted { compressed.own_bytes } else { 0 },
        }),
        waits: status.limit.waits,
        // While its guest waits for room, QEMU may answer nobody.
        may_reclaim: may_take && !status.limit.waits,
        may_limit: piloted.left_alone.is_none(),
    }
}

fn plugged(plugged: PilotedPlugged) -> PluggedSight {
    let PilotedPlugged { bytes, asked_bytes, full_bytes, block_bytes, may_unplug } = plugged;
    PluggedSight { bytes, asked_bytes, full_bytes, block_bytes, may_unplug }
}

fn seen_plugged(plugged: PluggedSight) -> SeenPlugged {
    let PluggedSight { bytes, asked_bytes, full_bytes, block_bytes, may_unplug } = plugged;
    SeenPlugged { bytes, asked_bytes, full_bytes, block_bytes, may_unplug }
}

/// What a guest says of its memory; none: it is too old to say how it is now.
fn guest(balloon: &BalloonStatus) -> Option<MemoryFigures> {
    let figures = balloon.figures.filter(|figures| figures.age_s <= GUEST_AGE_S)?;
    let (total_bytes, available_bytes) = (figures.total_bytes?, figures.available_bytes?);
    Some(MemoryFigures { total_bytes, available_bytes })
}

/// What the pilot saw, for clients.
pub(super) fn for_clients(now: Duration, host: HostSight<'_>, vms: &[VmSight]) -> PilotSight {
    let bound = |bound: &ebb_policy::pressure::Budget| SeenBound {
        name: bound.name.clone(),
        total_bytes: bound.total_bytes,
        available_bytes: bound.available_bytes,
    };
    PilotSight {
        at_ms: millis(now),
        bounds: host.memory.bounds().map(bound).collect(),
        stall_permille: host.memory.stall_permille,
        swap_bytes: host.swap_bytes,
        vms: vms.iter().filter_map(seen_vm).collect(),
    }
}

fn seen_vm(vm: &VmSight) -> Option<SeenVm> {
    Some(SeenVm {
        name: vm.name.parse().ok()?,
        class: class_for_clients(vm.rule.class),
        weight: vm.rule.weight,
        min_bytes: vm.rule.min_bytes,
        max_bytes: vm.rule.max_bytes,
        hold: vm.rule.is_held,
        memory_bytes: vm.memory_bytes,
        resident_bytes: vm.resident_bytes,
        floor_bytes: vm.floor_bytes,
        limit_bytes: vm.limit_bytes,
        spare_bytes: vm.spare_bytes,
        working_bytes: vm.working_bytes,
        refaulted_bytes: vm.refaulted_bytes,
        compressed_bytes: vm.compressed.map_or(0, |compressed| compressed.bytes),
        compressed_most_bytes: vm.compressed.map(|compressed| compressed.most_bytes),
        compressed_own_bytes: vm.compressed.map_or(0, |compressed| compressed.own_bytes),
        guest_total_bytes: vm.guest.map(|guest| guest.total_bytes),
        guest_available_bytes: vm.guest.map(|guest| guest.available_bytes),
        plugged: vm.plugged.map(seen_plugged),
        waits: vm.waits,
        may_reclaim: vm.may_reclaim,
        may_limit: vm.may_limit,
    })
}
