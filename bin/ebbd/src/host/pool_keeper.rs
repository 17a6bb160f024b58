//! Keeps the pool: sets its size, gives VMs their shares of it, and checks at intervals which VM
//! needs how much. See `docs/tiers.md`.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::Method;
use axum::response::{IntoResponse, Response};
use ebb_api::{
    LOWER_PERCENT_DEFAULT, PoolRequest, PoolStatus, ShareRequest, UPPER_PERCENT_DEFAULT, VmName,
};
use ebb_units::FRAME_BYTES;
use tokio::task::JoinHandle;

use super::asking::ask;
use super::link::Reply;
use super::pool::{Members, has, limits, of, status_of, with_coming};
use super::registry::Daemon;
use crate::model::api_error::{Answer, ApiError, failed, not_allowed, unsaved};
use crate::model::figures::VmFigures;
use crate::model::share::Share;
use crate::model::vm_routes::{POOL_LIMIT, POOL_SHARE};

/// Interval between two checks of what VMs need.
const EVERY: Duration = Duration::from_secs(1);

/// Limits that VMs are being told and do not know yet.
type Promises = BTreeMap<VmName, (Option<u64>, JoinHandle<()>)>;

/// Gives VMs their limits at intervals.
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

/// Waits for nobody: a VM that is slow to answer counts as it was last, with what it was promised.
fn look(daemon: &Daemon, promises: &mut Promises) -> Answer<()> {
    let Some(bytes) = daemon.pool().bytes() else { return Ok(()) };
    let mut members = members(daemon);
    promises.retain(|_, (_, telling)| !telling.is_finished());
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
        if has_news && !promises.contains_key(&name) {
            let telling = tokio::spawn(allow(daemon.clone(), name.clone(), limit_bytes));
            promises.insert(name, (limit_bytes, telling));
        }
    }
    Ok(())
}

/// Tells a VM its limit. A VM that has ended since needs none.
async fn allow(daemon: Daemon, name: VmName, limit_bytes: Option<u64>) {
    if let Err(error) = tell(&daemon, &name, POOL_LIMIT, &limit_bytes).await {
        tracing::debug!("{name}: {error}");
    }
}

/// Tells a VM's process something of the pool, and publishes the figures with which it answers.
async fn tell(
    daemon: &Daemon,
    name: &VmName,
    uri: &str,
    what: &impl serde::Serialize,
) -> Answer<Reply> {
    let body = serde_json::to_vec(what).map_err(failed("the pool"))?;
    let reply = ask(daemon, name, Method::PUT, uri, Bytes::from(body)).await?;
    if let (true, Some(listing)) = (reply.status.is_success(), daemon.listed(name)) {
        listing.publish(reply.read::<VmFigures>().map_err(failed("the VM's figures"))?);
    }
    Ok(reply)
}

/// What the workers of all VMs in the pool said last.
fn members(daemon: &Daemon) -> Members {
    let each = daemon.listings().into_iter();
    each.filter_map(|(name, listing)| Some((name, listing.member()?))).collect()
}

/// Sets the size of the pool.
///
/// # Errors
/// The shares need more, or there is to be no pool although VMs are in it.
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

/// Gives a VM a share, or removes it from the pool.
///
/// # Errors
/// The shares do not fit together, or the VM cannot have one. Nothing has changed then.
pub async fn share(daemon: &Daemon, name: &VmName, request: ShareRequest) -> Answer<Response> {
    request.check()?;
    daemon.listed(name).ok_or_else(|| daemon.unknown(name))?.reach()?;
    let share = request.bytes.map(|bytes| Share {
        bytes,
        lower_percent: request.lower_percent.unwrap_or(LOWER_PERCENT_DEFAULT),
        upper_percent: request.upper_percent.unwrap_or(UPPER_PERCENT_DEFAULT),
    });
    let coming = share.map(|share| Coming::new(daemon, name, share)).transpose()?;
    // It stays reserved until the VM has answered, even if the client no longer waits for that.
    let (its, of) = (daemon.clone(), name.clone());
    let telling = tokio::spawn(async move {
        let reply = tell(&its, &of, POOL_SHARE, &share).await;
        // The status is to show the share that the VM has now.
        drop(coming);
        reply
    });
    let reply = telling.await.map_err(failed("the pool"))??;
    match reply.status.is_success() {
        true => status(daemon).map(|status| axum::Json(status).into_response()),
        false => Ok(reply.into_response()),
    }
}

/// A share that fits, reserved until the VM has been told or it is given up.
struct Coming {
    daemon: Daemon,
    name: VmName,
}

impl Coming {
    fn new(daemon: &Daemon, name: &VmName, share: Share) -> Answer<Coming> {
        let mut state = daemon.pool().state();
        let Some(bytes) = state.bytes else {
            let why = "there is no pool: say how large it is, as in ebb pool 4G";
            return Err(ApiError::NotSet(why.into()));
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

/// Status of the pool and of the VMs in it.
///
/// # Errors
/// The shares do not fit together.
pub fn status(daemon: &Daemon) -> Answer<PoolStatus> {
    status_of(daemon.pool().bytes(), &members(daemon))
}
