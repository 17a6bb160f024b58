//! What the pool is told of a VM, put together from the controllers that know a part of it.

use ebb_api::HeatRequest;

use super::context::VmContext;
use super::limit::Limit;
use super::tiering::Tiering;
use super::tiering::heat::Heat;
use crate::model::api_error::{Answer, failed};
use crate::model::member::Member;

/// Returns what the pool wants to know of the VM; `None`: it is not in the pool. If only a
/// monitoring can tell what the VM needs, one is asked for.
///
/// # Errors
/// As fstat(2) of the VM's RAM.
pub fn of(cx: &VmContext, limit: &mut Limit, tiering: &mut Tiering) -> Answer<Option<Member>> {
    let Some(share) = cx.record.share else { return Ok(None) };
    let held_bytes = cx.pager.residency().taken_bytes().map_err(failed("the VM's RAM"))?;
    let heat = tiering.recent_heat();
    let is_by_guest = heat.is_some_and(Heat::is_by_guest);
    let (demand_bytes, is_monitoring_wanted) = limit.demand(cx, held_bytes, heat.map(Heat::began));
    let member = Member {
        share,
        held_bytes,
        limit_bytes: cx.record.limit_bytes,
        hot_bytes: heat.map(Heat::reused_bytes),
        unseen_bytes: limit.kernel_bytes().filter(|_| is_by_guest).unwrap_or(0),
        demand_bytes,
        memory_bytes: cx.memory_bytes(),
    };
    if is_monitoring_wanted {
        // Where nothing can be monitored, the demand alone counts.
        let _ = tiering.ask(cx, HeatRequest { fresh: true });
    }
    Ok(Some(member))
}
