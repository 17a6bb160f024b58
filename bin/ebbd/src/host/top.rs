//! The host and all VMs at one moment, by what the VMs published last. No VM is asked.

use std::time::{SystemTime, UNIX_EPOCH};

use ebb_api::{SeenBound, State, Top, TopHost, TopVm, VmName, VmSummary};
use ebb_policy::pressure::Budget;

use super::listing::{Listing, Seen};
use super::pilot::Glance;
use super::registry::Daemon;
use crate::model::api_error::{Answer, failed};
use crate::model::figures::millis;
use crate::system::host_memory;

/// The host and its VMs now. Reads some files of the kernel, which may block for a while.
///
/// # Errors
/// The host's memory cannot be read.
pub fn now(daemon: &Daemon) -> Answer<Top> {
    let pilot = Glance::of(daemon);
    let host = host(&pilot)?;
    let vms = daemon.listings().into_iter();
    let vms = vms.map(|(name, listing)| vm(name, &listing, &pilot)).collect();
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(Top { at_unix_ms: millis(since), host, vms })
}

/// The host now, and what the pilot does with it.
///
/// # Errors
/// The host's memory cannot be read.
pub fn host(pilot: &Glance) -> Answer<TopHost> {
    let memory = host_memory::glance().map_err(failed("the host's memory"))?;
    let bound = |bound: &Budget| SeenBound {
        name: bound.name.clone(),
        total_bytes: bound.total_bytes,
        available_bytes: bound.available_bytes,
    };
    Ok(TopHost {
        total_bytes: memory.host.total_bytes,
        available_bytes: memory.host.available_bytes,
        reserve_bytes: pilot.reserve.of(memory.host.total_bytes),
        bounds: memory.groups.iter().map(bound).collect(),
        stall_permille: memory.stall_permille,
        pilot: pilot.mode,
        stage: pilot.stage,
    })
}

fn vm(name: VmName, listing: &Listing, pilot: &Glance) -> TopVm {
    let Seen { summary, status, rates, fault_ns, piloted, is_slow, .. } = listing.seen();
    let VmSummary { state, state_reason, age_ms, .. } = summary;
    let (rule, status) = (pilot.rule(&name), status.as_deref());
    let limit = status.map(|status| &status.limit);
    // What was true seconds ago says nothing about now.
    let is_now = !is_slow && state == State::Managed;
    let (rates, fault_ns) = (rates.filter(|_| is_now), fault_ns.filter(|_| is_now));
    let misses = |bytes| rule.policy.misses_memory(summary.resident_bytes, bytes);
    TopVm {
        state,
        state_reason,
        age_ms,
        memory_bytes: summary.memory_bytes,
        parts: status.and_then(|status| status.parts),
        compressed_in_bytes: limit.map_or(0, |limit| limit.compressed_bytes),
        limit_bytes: summary.limit_bytes,
        limit_by_pilot: piloted.as_ref().is_some_and(|piloted| piloted.limit_bytes.is_some()),
        working_bytes: piloted.and_then(|piloted| piloted.working_bytes),
        faults_per_s: rates.map(|rates| rates.faults),
        fault_ns,
        refaulted_bytes_per_s: rates.map(|rates| rates.refaulted_bytes),
        misses_memory: rates.is_some_and(|rates| misses(rates.refaulted_bytes)),
        waits: limit.is_some_and(|limit| limit.waits),
        waiting_touches: limit.map_or(0, |limit| limit.waiting_touches),
        class: rule.class,
        hold: rule.hold,
        warnings: status.map_or(0, |status| status.warnings.len() as u64),
        name,
    }
}

#[cfg(test)]
mod tests {
    use ebb_pager::GROUPS;

    use super::*;
    use crate::host::swap_dir::SwapDir;
    use crate::host::testing;
    use crate::model::figures::VmFigures;
    use crate::model::times::{Durations, Times};

    /// The times of a VM with so many faults in the fourth group.
    fn times(faults: u64) -> Times {
        let none = || Durations { counts: vec![0; GROUPS], sum_ns: 0 };
        let mut missing = none();
        missing.counts[3] = faults;
        Times { missing, metadata: none(), refill: none(), reclaim: none(), install: None }
    }

    #[test]
    fn all_vms_are_there_by_what_they_published() {
        let run = tempfile::tempdir().unwrap();
        let daemon = testing::daemon(run.path(), SwapDir::new(run.path(), None).unwrap());
        assert!(now(&daemon).unwrap().vms.is_empty());
        let mut waits = testing::status();
        (waits.limit.waits, waits.limit.stuck) = (true, Some("the swap file is full".into()));
        waits.parts = None;
        testing::publish(&daemon, "web", testing::status(), None);
        testing::publish(&daemon, "full", waits, None);
        let top = now(&daemon).unwrap();
        let [full, web] = &top.vms[..] else { panic!("{top:?}") };
        assert_eq!((full.name.as_str(), web.name.as_str()), ("full", "web"));
        assert_eq!(web.parts.unwrap().sum_bytes(), web.memory_bytes);
        assert!(full.waits && full.parts.is_none());
        assert_eq!(full.state_reason.as_deref(), Some("the swap file is full"));
        // A rate needs two publications.
        assert_eq!((web.faults_per_s, web.misses_memory), (None, false));
        let TopHost { total_bytes, available_bytes, reserve_bytes, .. } = top.host;
        assert!(available_bytes <= total_bytes && reserve_bytes == total_bytes / 10, "{top:?}");
    }

    #[test]
    fn times_are_those_of_the_last_faults() {
        let run = tempfile::tempdir().unwrap();
        let daemon = testing::daemon(run.path(), SwapDir::new(run.path(), None).unwrap());
        let publish = |number, age_ms, faults| {
            let (mut status, times) = (testing::status(), Some(times(faults)));
            status.age_ms = age_ms;
            let figures = VmFigures { number, status, member: None, piloted: None, times };
            testing::publish_all(&daemon, "web", figures);
            now(&daemon).unwrap().vms[0].fault_ns.clone()
        };
        assert_eq!(publish(1, 3000, 10), None);
        let seen = publish(2, 1000, 15).unwrap();
        assert_eq!(seen.counts, [0, 0, 0, 5]);
        assert!(seen.p50 < seen.p99 && seen.p99.is_some_and(|ns| ns <= 1 << 16), "{seen:?}");
        assert_eq!(publish(3, 6000, 15), None, "what was true seconds ago is not told");
    }
}
