//! The pilot's record, `pilot.json`, of any content. Whatever its rules say, no VM loses what its
//! guest needs to live.

use std::time::Duration;

use ebb_policy::pilot::{Action, Pilot, VmSight};
use ebb_policy::pressure::{Budget, HostMemory};

const GIB: u64 = 1 << 30;
const FLOOR: u64 = GIB / 8;

/// Runs one input.
pub fn run(data: &[u8]) {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    std::fs::write(directory.path().join("pilot.json"), data).expect("room for it");
    let Ok((host_rule, rule)) = ebbd::pilot_on_record(directory.path(), "a") else { return };
    let host = Budget { name: "host".into(), total_bytes: 16 * GIB, available_bytes: GIB / 4 };
    let host = HostMemory { host, groups: Vec::new(), stall_permille: None };
    let mut vm = VmSight {
        name: "a".into(),
        rule,
        memory_bytes: 4 * GIB,
        resident_bytes: 4 * GIB,
        floor_bytes: FLOOR,
        limit_bytes: None,
        spare_bytes: 0,
        working_bytes: None,
        refaulted_bytes: 0,
        compressed: None,
        guest: None,
        plugged: None,
        waits: false,
        may_reclaim: true,
        may_limit: true,
    };
    let mut pilot = Pilot::default();
    for second in 0..100 {
        let now = Duration::from_secs(second);
        for decision in pilot.look(now, host_rule, &host, &[vm.clone()]) {
            if let Action::Limit { to, .. } = decision.action {
                assert!(to.is_none_or(|to| (FLOOR..4 * GIB).contains(&to)), "{decision}");
                vm.limit_bytes = to;
                vm.resident_bytes = to.unwrap_or(4 * GIB);
            }
        }
    }
}
