//! Made-up figures for tests.

use ebb_api::{
    FaultSpread, MemoryParts, PilotMode, PilotStage, State, Top, TopHost, TopVm, VmClass,
};

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// A host with these VMs. The time is 2026-11-28T14:05:03Z.
pub fn top(vms: Vec<TopVm>) -> Top {
    let host = TopHost {
        total_bytes: 64 * GIB,
        available_bytes: 20 * GIB,
        reserve_bytes: 6 * GIB,
        bounds: Vec::new(),
        stall_permille: Some(4),
        pilot: PilotMode::On,
        stage: Some(PilotStage::Ample),
    };
    Top { at_unix_ms: 1_795_874_703_000, host, vms }
}

/// A VM of 2 GiB with which nothing is wrong.
pub fn vm(name: &str) -> TopVm {
    let parts = MemoryParts {
        in_use_bytes: 1000 * MIB,
        free_bytes: Some(100 * MIB),
        empty_bytes: 448 * MIB,
        compressed_bytes: 250 * MIB,
        swapped_bytes: 200 * MIB,
        disk_backed_bytes: 50 * MIB,
    };
    TopVm {
        name: name.parse().unwrap(),
        state: State::Managed,
        state_reason: None,
        age_ms: Some(300),
        memory_bytes: 2 * GIB,
        parts: Some(parts),
        compressed_in_bytes: 80 * MIB,
        limit_bytes: Some(1200 * MIB),
        limit_by_pilot: true,
        working_bytes: None,
        faults_per_s: Some(12),
        fault_ns: Some(FaultSpread { counts: vec![0, 0, 60], p50: Some(8000), p99: Some(16_000) }),
        refaulted_bytes_per_s: Some(0),
        misses_memory: false,
        waits: false,
        waiting_touches: 0,
        class: VmClass::Normal,
        hold: false,
        warnings: 0,
    }
}
