//! The pool: fast memory that VMs share. Each VM's part of it becomes its limit. See
//! `docs/tiers.md`.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebb_api::{PoolMember, PoolRequest, PoolStatus, VmName};
use ebb_tier::{Need, Pool};
use ebb_units::{Bytes, FRAME_BYTES};

use crate::model::api_error::{Answer, ApiError, failed, not_allowed};
use crate::model::member::Member;
use crate::model::record::Record;
use crate::model::share::Share;
use crate::support::state_file;

const FILE: &str = "pool.json";

pub(super) type Members = BTreeMap<VmName, Member>;

/// The size of the pool, on record in the run directory. Its lock is not held while a VM is asked.
pub struct PoolRecord {
    path: PathBuf,
    state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    /// Size of the pool; none: there is no pool.
    pub(super) bytes: Option<u64>,
    /// Shares that VMs are about to have, so that shares that are asked for together fit together.
    pub(super) coming: BTreeMap<VmName, Share>,
}

impl PoolRecord {
    /// The pool that an earlier daemon left.
    ///
    /// # Errors
    /// The file exists and cannot be read.
    pub fn open(run_dir: &Path) -> io::Result<Arc<PoolRecord>> {
        let path = run_dir.join(FILE);
        let last = state_file::load_own::<PoolRequest>(&path)?;
        let bytes = last.and_then(|last| last.bytes);
        Ok(Arc::new(PoolRecord { path, state: Mutex::new(State { bytes, ..State::default() }) }))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // The state is whole between any two statements that change it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn bytes(&self) -> Option<u64> {
        self.state().bytes
    }

    pub(super) fn save(&self, bytes: Option<u64>) -> io::Result<()> {
        state_file::save(&self.path, &PoolRequest { bytes })
    }
}

/// Memory that each VM may have now; none: all of its memory.
pub(super) fn limits(pool: &Pool, members: &Members) -> Vec<(VmName, Option<u64>)> {
    let targets = pool.targets(&needs(members));
    let limit = |(name, member): (&VmName, &Member)| {
        let frames = *targets.get(name.as_str())?;
        let bytes = (frames * FRAME_BYTES).max(member.share.lower_bytes());
        Some((name.clone(), (bytes < member.memory_bytes).then_some(bytes)))
    };
    members.iter().filter_map(limit).collect()
}

fn needs(members: &Members) -> BTreeMap<String, Need> {
    members.iter().map(|(name, member)| (name.to_string(), member.need())).collect()
}

/// The pool of these VMs, without shares that no longer fit.
pub(super) fn of(bytes: u64, members: &Members) -> Answer<Pool> {
    let mut pool = Pool::new(bytes / FRAME_BYTES);
    for (name, member) in members {
        pool.set(name.as_str(), member.share.limits()).map_err(not_allowed)?;
    }
    Ok(pool)
}

/// Adds the shares that VMs are about to have. The larger of two shares counts, since it is not
/// known yet which one a VM will have.
pub(super) fn with_coming(mut pool: Pool, state: &State, members: &Members) -> Answer<Pool> {
    for (name, coming) in &state.coming {
        let has = members.get(name).map_or(0, |member| member.share.lower_bytes());
        if coming.lower_bytes() > has {
            pool.set(name.as_str(), coming.limits()).map_err(not_allowed)?;
        }
    }
    Ok(pool)
}

/// Checks that this host has that much memory.
pub(super) fn has(bytes: u64) -> Answer<()> {
    let nodes = ebb_tier::host::nodes().map_err(failed("this host's memory"))?;
    let total: u64 = nodes.iter().map(|node| node.total_bytes).sum();
    match bytes > total {
        true => Err(not_allowed(format!(
            "a pool of {} is more than the {} that this host has",
            Bytes(bytes),
            Bytes(total)
        ))),
        false => Ok(()),
    }
}

/// The pool that a daemon left in `run_dir`, with VMs that are not recovered yet, and the limit of
/// each of them.
///
/// # Errors
/// Says in one line that the pool's record cannot be read, or that the shares do not fit together.
pub fn on_record(
    run_dir: &Path,
    records: &[Record],
) -> Result<(PoolStatus, BTreeMap<VmName, Option<u64>>), String> {
    let bytes = PoolRecord::open(run_dir).map_err(|error| error.to_string())?.bytes();
    let member = |record: &Record| Some((record.name.clone(), Member::on_record(record)?));
    let members: Members = records.iter().filter_map(member).collect();
    let text = |refused: ApiError| refused.to_string();
    let pool = of(bytes.unwrap_or(u64::MAX), &members).map_err(text)?;
    let limits = limits(&pool, &members).into_iter().collect();
    Ok((status_of(bytes, &members).map_err(text)?, limits))
}

pub(super) fn status_of(bytes: Option<u64>, members: &Members) -> Answer<PoolStatus> {
    let pool = of(bytes.unwrap_or(u64::MAX), members)?;
    let goals = pool.goals(&needs(members));
    let vms = members.iter().map(|(name, member)| PoolMember {
        name: name.clone(),
        share_bytes: member.share.bytes,
        lower_bytes: member.share.lower_bytes(),
        upper_bytes: member.share.limits().upper_frames() * FRAME_BYTES,
        hot_bytes: member.hot_bytes,
        held_bytes: member.held_bytes,
        goal_bytes: goals.get(name.as_str()).map_or(0, |frames| frames * FRAME_BYTES),
        limit_bytes: member.limit_bytes,
    });
    let given: u64 = members.values().map(|member| member.need().held_frames * FRAME_BYTES).sum();
    Ok(PoolStatus {
        bytes,
        shares_bytes: members.values().map(|member| member.share.bytes).sum(),
        free_bytes: bytes.map_or(0, |bytes| bytes.saturating_sub(given)),
        vms: vms.collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const MIB: u64 = 1 << 20;

    fn member(share_mib: u64, held_mib: u64, hot_mib: Option<u64>) -> Member {
        Member {
            share: Share { bytes: share_mib * MIB, lower_percent: 75, upper_percent: 125 },
            held_bytes: held_mib * MIB,
            limit_bytes: Some(share_mib * MIB),
            hot_bytes: hot_mib.map(|mib| mib * MIB),
            unseen_bytes: 0,
            demand_bytes: None,
            memory_bytes: 512 * MIB,
        }
    }

    fn limits_of(bytes: u64, all: &[(&str, Member)]) -> Vec<Option<u64>> {
        let members: Members =
            all.iter().map(|(name, member)| (name.parse().unwrap(), *member)).collect();
        let limits = limits(&of(bytes, &members).unwrap(), &members);
        limits.into_iter().map(|(_, limit)| limit.map(|bytes| bytes / MIB)).collect()
    }

    #[test]
    fn who_needs_less_gives_up_to_its_lower_limit() {
        let idle = member(200, 200, Some(10));
        let busy = member(200, 200, Some(400));
        // First one VM gives up what it has too much; the other gets it once it is free.
        assert_eq!(limits_of(400 * MIB, &[("a", idle), ("b", busy)]), [Some(150), Some(200)]);
        let limited = Member { limit_bytes: Some(150 * MIB), ..member(200, 140, Some(10)) };
        assert_eq!(limits_of(400 * MIB, &[("a", limited), ("b", busy)]), [Some(150), Some(250)]);
    }

    #[test]
    fn who_was_never_monitored_has_its_share() {
        let new = member(200, 50, None);
        assert_eq!(limits_of(400 * MIB, &[("a", new)]), [Some(200)]);
        // More than all of its memory is no limit.
        let small = Member { memory_bytes: 200 * MIB, ..new };
        assert_eq!(limits_of(400 * MIB, &[("a", small)]), [None]);
    }

    #[test]
    fn a_kernel_needs_its_memory_too() {
        let hot = Member { unseen_bytes: 40 * MIB, ..member(200, 200, Some(180)) };
        assert_eq!(limits_of(400 * MIB, &[("a", hot)]), [Some(220)]);
        let unknown = Member { hot_bytes: None, ..hot };
        assert_eq!(limits_of(400 * MIB, &[("a", unknown)]), [Some(200)]);
    }

    #[test]
    fn who_is_short_gets_what_others_do_not_need() {
        let idle = Member { limit_bytes: Some(150 * MIB), ..member(200, 150, Some(10)) };
        let works = Member { demand_bytes: Some(240 * MIB), ..member(200, 200, Some(10)) };
        assert_eq!(limits_of(400 * MIB, &[("a", idle), ("b", works)]), [Some(160), Some(240)]);
        // Nobody who uses all of its share gives some of it for that.
        let busy = member(200, 200, Some(200));
        assert_eq!(limits_of(400 * MIB, &[("a", busy), ("b", works)]), [Some(200), Some(200)]);
    }

    #[test]
    fn a_share_is_there_at_once() {
        let late = member(200, 0, Some(200));
        let first = Member { limit_bytes: Some(250 * MIB), ..member(200, 250, Some(250)) };
        assert_eq!(limits_of(400 * MIB, &[("a", late), ("b", first)]), [Some(200), Some(200)]);
    }

    #[test]
    fn nobody_falls_below_its_lower_limit_for_others() {
        // Its limit was lowered before, and the other VM is slow to give up memory.
        let low = Member { limit_bytes: Some(100 * MIB), ..member(200, 100, Some(300)) };
        let slow = Member { limit_bytes: Some(200 * MIB), ..member(200, 300, Some(300)) };
        assert_eq!(limits_of(400 * MIB, &[("a", low), ("b", slow)]), [Some(150), Some(200)]);
    }

    #[test]
    fn a_pool_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let bytes = |shared: &PoolRecord| shared.bytes();
        let shared = PoolRecord::open(directory.path()).unwrap();
        assert_eq!(bytes(&shared), None);
        shared.save(Some(4 << 30)).unwrap();
        assert_eq!(bytes(&PoolRecord::open(directory.path()).unwrap()), Some(4 << 30));
        fs::write(directory.path().join(FILE), "no").unwrap();
        assert!(PoolRecord::open(directory.path()).is_err());
    }
}
