//! Fast memory that VMs share: who may have how much of it becomes their limits.
//! `docs/tiers.md`.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ebb_api::{
    LOWER_PERCENT_DEFAULT, PoolMember, PoolRequest, PoolStatus, ShareRequest,
    UPPER_PERCENT_DEFAULT, UPPER_PERCENT_MAX, VmName,
};
use ebb_tier::{Limits, Need, Pool};
use ebb_units::{Bytes, FRAME_BYTES};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

use crate::daemon::Daemon;
use crate::kept;
use crate::problem::{Answer, Refused, failed, not_allowed, unsaved};
use crate::record::{BYTES_MAX, Record};
use crate::server::ask;
use crate::worker::Command;

const FILE: &str = "pool.json";
/// So often it is looked who needs what.
const EVERY: Duration = Duration::from_secs(1);

/// A VM's share, on record.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Share {
    /// The share.
    pub bytes: u64,
    /// Of it, what the VM never has less than.
    pub lower_percent: u32,
    /// And never more.
    pub upper_percent: u32,
}

impl Share {
    fn limits(self) -> Limits {
        let Share { bytes, lower_percent, upper_percent } = self;
        Limits { share_frames: bytes / FRAME_BYTES, lower_percent, upper_percent }
    }

    /// Whether it is one that could be asked for.
    pub(crate) fn adds_up(self) -> bool {
        let Share { bytes, lower_percent, upper_percent } = self;
        bytes <= BYTES_MAX
            && lower_percent <= 100
            && (100..=UPPER_PERCENT_MAX).contains(&upper_percent)
    }

    /// The least that the VM has.
    pub fn lower_bytes(self) -> u64 {
        self.limits().lower_frames() * FRAME_BYTES
    }
}

/// What a worker says of a VM in the pool.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    /// On record.
    pub share: Share,
    /// It takes so much.
    pub held_bytes: u64,
    /// It may have so much; none: all of its memory.
    pub limit_bytes: Option<u64>,
    /// What it uses again and again, if it was monitored lately: a page below comes back by a
    /// fault, so more is hot than where slow memory is only slower.
    pub hot_bytes: Option<u64>,
    /// What it needs besides, since nobody could see it used: its kernel's own memory, as far as that
    /// is there. What was evicted of it is not missed.
    pub unseen_bytes: u64,
    /// All of its memory.
    pub memory_bytes: u64,
}

impl Member {
    /// Of a VM that is not taken up yet: it has what it was given last.
    pub fn on_record(record: &Record) -> Option<Member> {
        let (share, memory_bytes) = (record.share?, record.memory_bytes());
        let limit_bytes = record.limit_bytes.map(|bytes| bytes.min(memory_bytes));
        let held_bytes = limit_bytes.unwrap_or(memory_bytes);
        Some(Member {
            share,
            held_bytes,
            limit_bytes,
            hot_bytes: None,
            unseen_bytes: 0,
            memory_bytes,
        })
    }

    /// Of a hot set that is not known: the share.
    fn wanted_bytes(&self) -> u64 {
        self.hot_bytes.map_or(self.share.bytes, |bytes| bytes + self.unseen_bytes)
    }

    /// What it was given counts as held, whether it took it or not.
    fn need(&self) -> Need {
        let given = self.limit_bytes.unwrap_or(self.memory_bytes);
        Need {
            held_frames: self.held_bytes.max(given).div_ceil(FRAME_BYTES),
            hot_frames: self.wanted_bytes().div_ceil(FRAME_BYTES),
        }
    }
}

type Members = BTreeMap<VmName, Member>;

/// How much memory the pool has, kept in the run directory. Nobody holds it while a VM is asked.
pub struct Shared {
    path: PathBuf,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// None: there is no pool.
    bytes: Option<u64>,
    /// Shares that VMs are about to have, so that those who ask together fit together.
    coming: BTreeMap<VmName, Share>,
}

impl Shared {
    /// As a daemon before this one left it.
    ///
    /// # Errors
    /// The file is there and cannot be read.
    pub fn open(run_dir: &Path) -> io::Result<Arc<Shared>> {
        let path = run_dir.join(FILE);
        let last = kept::load_own::<PoolRequest>(&path)?;
        let bytes = last.and_then(|last| last.bytes);
        Ok(Arc::new(Shared { path, state: Mutex::new(State { bytes, ..State::default() }) }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // It is whole between any two statements that change it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bytes(&self) -> Option<u64> {
        self.state().bytes
    }

    fn save(&self, bytes: Option<u64>) -> io::Result<()> {
        kept::save(&self.path, &PoolRequest { bytes })
    }
}

/// What VMs were told that they may have, and have not heard of yet.
type Promises = BTreeMap<VmName, (Option<u64>, oneshot::Receiver<Answer<()>>)>;

/// Gives VMs what they may have, again and again.
pub async fn keep(daemon: Daemon) {
    let mut interval = tokio::time::interval(EVERY);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut promises = Promises::new();
    loop {
        interval.tick().await;
        if let Err(error) = look(&daemon, &mut promises) {
            tracing::debug!("the pool: {error}");
        }
    }
}

/// Waits for nobody: who is slow to answer is as it was last, and may take what it was promised.
fn look(daemon: &Daemon, promises: &mut Promises) -> Answer<()> {
    let Some(bytes) = daemon.pool.bytes() else { return Ok(()) };
    let mut members = members(daemon);
    promises.retain(|_, (_, heard)| matches!(heard.try_recv(), Err(TryRecvError::Empty)));
    for (name, (limit_bytes, _)) in &*promises {
        if let Some(member) = members.get_mut(name) {
            let most = |limit: Option<u64>| limit.unwrap_or(u64::MAX);
            member.limit_bytes =
                std::cmp::max_by_key(member.limit_bytes, *limit_bytes, |limit| most(*limit));
        }
    }
    let pool = of(bytes, &members)?;
    for (name, limit_bytes) in limits(&pool, &members) {
        let has_news = members.get(&name).is_some_and(|member| member.limit_bytes != limit_bytes);
        // One that ended since needs no limit.
        if has_news
            && !promises.contains_key(&name)
            && let Ok(commands) = daemon.commands(&name)
        {
            let (to, heard) = oneshot::channel();
            let _ = commands.send(Command::Allow(limit_bytes, to));
            promises.insert(name, (limit_bytes, heard));
        }
    }
    Ok(())
}

/// What each may have now; none: all of its memory.
fn limits(pool: &Pool, members: &Members) -> Vec<(VmName, Option<u64>)> {
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

/// The pool of these VMs. Shares that do not fit any more are not in it.
fn of(bytes: u64, members: &Members) -> Answer<Pool> {
    let mut pool = Pool::new(bytes / FRAME_BYTES);
    for (name, member) in members {
        pool.set(name.as_str(), member.share.limits()).map_err(not_allowed)?;
    }
    Ok(pool)
}

/// What the workers of all VMs in the pool said last.
fn members(daemon: &Daemon) -> Members {
    let each = daemon.listings().into_iter();
    each.filter_map(|(name, listing)| Some((name, listing.member()?))).collect()
}

/// With the shares that they are about to have. Of two the larger counts: nobody knows yet which
/// it will be.
fn with_coming(mut pool: Pool, state: &State, members: &Members) -> Answer<Pool> {
    for (name, coming) in &state.coming {
        let has = members.get(name).map_or(0, |member| member.share.lower_bytes());
        if coming.lower_bytes() > has {
            pool.set(name.as_str(), coming.limits()).map_err(not_allowed)?;
        }
    }
    Ok(pool)
}

/// Sets how much memory the pool has.
///
/// # Errors
/// The shares need more, or VMs are in it that is to be none.
pub fn set(daemon: &Daemon, request: PoolRequest) -> Answer<PoolStatus> {
    let mut state = daemon.pool.state();
    let members = members(daemon);
    match request.bytes {
        Some(wanted) => {
            let pool = of(state.bytes.unwrap_or(0).max(wanted), &members)?;
            let mut pool = with_coming(pool, &state, &members)?;
            pool.set_capacity(wanted / FRAME_BYTES).map_err(not_allowed)?;
            has(wanted)?;
        }
        None => {
            if let Some(name) = members.keys().chain(state.coming.keys()).next() {
                return Err(not_allowed(format!(
                    "{name} has a share of the pool: take it out first, ebb share {name} off"
                )));
            }
        }
    }
    daemon.pool.save(request.bytes).map_err(unsaved("the pool's record"))?;
    state.bytes = request.bytes;
    drop(state);
    status_of(request.bytes, &members)
}

/// Whether this host has so much memory.
fn has(bytes: u64) -> Answer<()> {
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

/// Gives a VM a share, or takes it out of the pool.
///
/// # Errors
/// The shares do not fit together, or the VM cannot have one; nothing has changed then.
pub async fn share(daemon: &Daemon, name: &VmName, request: ShareRequest) -> Answer<PoolStatus> {
    request.check()?;
    daemon.commands(name)?;
    let share = request.bytes.map(|bytes| Share {
        bytes,
        lower_percent: request.lower_percent.unwrap_or(LOWER_PERCENT_DEFAULT),
        upper_percent: request.upper_percent.unwrap_or(UPPER_PERCENT_DEFAULT),
    });
    let coming = share.map(|share| Coming::new(daemon, name, share)).transpose()?;
    ask(daemon, name, |to| Command::Share(share, to)).await?;
    // What it has now was published before it answered.
    drop(coming);
    status(daemon)
}

/// A share that fits, kept free until it is told to the VM or given up.
struct Coming {
    pool: Arc<Shared>,
    name: VmName,
}

impl Coming {
    fn new(daemon: &Daemon, name: &VmName, share: Share) -> Answer<Coming> {
        let mut state = daemon.pool.state();
        let Some(bytes) = state.bytes else {
            return Err(not_allowed("there is no pool: say how large it is, as in ebb pool 4G"));
        };
        if state.coming.contains_key(name) {
            return Err(Refused::Unavailable(format!("{name} is being given a share: try again")));
        }
        let members = members(daemon);
        let mut pool = with_coming(of(bytes, &members)?, &state, &members)?;
        pool.set(name.as_str(), share.limits()).map_err(not_allowed)?;
        state.coming.insert(name.clone(), share);
        Ok(Coming { pool: Arc::clone(&daemon.pool), name: name.clone() })
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        self.pool.state().coming.remove(&self.name);
    }
}

/// The pool, and who has what of it.
///
/// # Errors
/// The shares do not fit together.
pub fn status(daemon: &Daemon) -> Answer<PoolStatus> {
    status_of(daemon.pool.bytes(), &members(daemon))
}

/// The pool that a daemon left in `run_dir`, with VMs that nobody has taken up yet, and what each
/// of them may have.
///
/// # Errors
/// The pool's record cannot be read, or the shares do not fit together; in one line.
pub fn on_record(
    run_dir: &Path,
    records: &[Record],
) -> Result<(PoolStatus, BTreeMap<VmName, Option<u64>>), String> {
    let bytes = Shared::open(run_dir).map_err(|error| error.to_string())?.bytes();
    let member = |record: &Record| Some((record.name.clone(), Member::on_record(record)?));
    let members: Members = records.iter().filter_map(member).collect();
    let text = |refused: Refused| refused.to_string();
    let pool = of(bytes.unwrap_or(u64::MAX), &members).map_err(text)?;
    let limits = limits(&pool, &members).into_iter().collect();
    Ok((status_of(bytes, &members).map_err(text)?, limits))
}

fn status_of(bytes: Option<u64>, members: &Members) -> Answer<PoolStatus> {
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
        // At first what the one has too much of goes; it is given out once it is free.
        assert_eq!(limits_of(400 * MIB, &[("a", idle), ("b", busy)]), [Some(150), Some(200)]);
        let gone = Member { limit_bytes: Some(150 * MIB), ..member(200, 140, Some(10)) };
        assert_eq!(limits_of(400 * MIB, &[("a", gone), ("b", busy)]), [Some(150), Some(250)]);
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
    fn a_share_is_there_at_once() {
        let late = member(200, 0, Some(200));
        let first = Member { limit_bytes: Some(250 * MIB), ..member(200, 250, Some(250)) };
        assert_eq!(limits_of(400 * MIB, &[("a", late), ("b", first)]), [Some(200), Some(200)]);
    }

    #[test]
    fn nobody_falls_below_its_lower_limit_for_others() {
        // It was put down to less before, and another is slow to give up what it has.
        let low = Member { limit_bytes: Some(100 * MIB), ..member(200, 100, Some(300)) };
        let slow = Member { limit_bytes: Some(200 * MIB), ..member(200, 300, Some(300)) };
        assert_eq!(limits_of(400 * MIB, &[("a", low), ("b", slow)]), [Some(150), Some(200)]);
    }

    #[test]
    fn a_pool_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let bytes = |shared: &Shared| shared.bytes();
        let shared = Shared::open(directory.path()).unwrap();
        assert_eq!(bytes(&shared), None);
        shared.save(Some(4 << 30)).unwrap();
        assert_eq!(bytes(&Shared::open(directory.path()).unwrap()), Some(4 << 30));
        fs::write(directory.path().join(FILE), "no").unwrap();
        assert!(Shared::open(directory.path()).is_err());
    }
}
