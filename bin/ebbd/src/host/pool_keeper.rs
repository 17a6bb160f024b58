//! Keeps the pool: sets its size, gives VMs their shares of it, and looks again and again who needs
//! how much. `docs/tiers.md`.

use std::collections::BTreeMap;
use std::time::Duration;

use ebb_api::{
    LOWER_PERCENT_DEFAULT, PoolRequest, PoolStatus, ShareRequest, UPPER_PERCENT_DEFAULT, VmName,
};
use ebb_units::FRAME_BYTES;
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

use super::asking::ask;
use super::pool::{Members, has, limits, of, status_of, with_coming};
use super::registry::Daemon;
use crate::model::api_error::{Answer, ApiError, not_allowed, unsaved};
use crate::model::share::Share;
use crate::vm::context::mailbox::Command;

/// So often it is looked who needs what.
const EVERY: Duration = Duration::from_secs(1);

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
    let Some(bytes) = daemon.pool().bytes() else { return Ok(()) };
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

/// What the workers of all VMs in the pool said last.
fn members(daemon: &Daemon) -> Members {
    let each = daemon.listings().into_iter();
    each.filter_map(|(name, listing)| Some((name, listing.member()?))).collect()
}

/// Sets how much memory the pool has.
///
/// # Errors
/// The shares need more, or VMs are in it that is to be none.
pub fn set(daemon: &Daemon, request: PoolRequest) -> Answer<PoolStatus> {
    let mut state = daemon.pool().state();
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
    daemon.pool().save(request.bytes).map_err(unsaved("the pool's record"))?;
    state.bytes = request.bytes;
    drop(state);
    status_of(request.bytes, &members)
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
    daemon: Daemon,
    name: VmName,
}

impl Coming {
    fn new(daemon: &Daemon, name: &VmName, share: Share) -> Answer<Coming> {
        let mut state = daemon.pool().state();
        let Some(bytes) = state.bytes else {
            return Err(not_allowed("there is no pool: say how large it is, as in ebb pool 4G"));
        };
        if state.coming.contains_key(name) {
            return Err(ApiError::Unavailable(format!("{name} is being given a share: try again")));
        }
        let members = members(daemon);
        let mut pool = with_coming(of(bytes, &members)?, &state, &members)?;
        pool.set(name.as_str(), share.limits()).map_err(not_allowed)?;
        state.coming.insert(name.clone(), share);
        Ok(Coming { daemon: daemon.clone(), name: name.clone() })
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        self.daemon.pool().state().coming.remove(&self.name);
    }
}

/// The pool, and who has what of it.
///
/// # Errors
/// The shares do not fit together.
pub fn status(daemon: &Daemon) -> Answer<PoolStatus> {
    status_of(daemon.pool().bytes(), &members(daemon))
}
