//! The short form of a VM's status: its line in the list.

use ebb_api::{LimitStatus, State, VmStatus, VmSummary};

use super::record::Record;

/// The short form of a status.
pub fn of(status: &VmStatus) -> VmSummary {
    VmSummary {
        name: status.name.clone(),
        pid: status.pid,
        state: status.state,
        state_reason: status.state_reason.clone().or_else(|| waits(&status.limit)),
        age_ms: Some(status.age_ms),
        accelerator: status.accelerator,
        backing: status.backing,
        mode: status.mode,
        trusted: status.guest.trusted,
        auto: status.auto.on,
        memory_bytes: status.memory_bytes,
        resident_bytes: status.resident_bytes,
        limit_bytes: status.limit.bytes,
        evicted_bytes: status.limit.saved_bytes.saturating_add(status.limit.on_disk_bytes),
    }
}

/// Why the guest waits for room, if it does.
pub fn waits(limit: &LimitStatus) -> Option<String> {
    limit.stuck.clone().filter(|_| limit.waits)
}

/// The short form of a VM that is not recovered yet.
pub fn on_record(record: &Record) -> VmSummary {
    VmSummary {
        name: record.name.clone(),
        pid: record.pid,
        state: State::Recovering,
        state_reason: None,
        age_ms: None,
        accelerator: record.accelerator,
        backing: record.backing,
        mode: record.mode,
        trusted: false,
        auto: record.auto.on,
        memory_bytes: record.memory_bytes(),
        resident_bytes: 0,
        limit_bytes: record.limit_bytes,
        evicted_bytes: 0,
    }
}
