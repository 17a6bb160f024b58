//! All VMs of the host, managed or not, for clients: what `ebb observe` and `ebb discover` tell.
//! None of them is asked.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ebb_api::{GuestUsage, HOST_VMS_MAX, HostVm, HostVms, VmName};
use ebb_observe::{Found, Observed, Usage, discover_wanted};

use super::guests::{Guest, Guests, is_wanted};
use super::kept::Kept;
use super::listing::Listing;
use super::registry::Daemon;
use crate::model::api_error::{Answer, ApiError, failed};
use crate::model::figures::millis;

/// What is kept between two questions.
pub struct Observing {
    guests: Arc<Guests>,
    found: Kept<(), Result<Vec<Found>, String>>,
}

impl Observing {
    /// Whoever else needs the guests shares them, so that nobody looks twice.
    pub fn new(guests: Arc<Guests>) -> Observing {
        Observing { guests, found: Kept::default() }
    }

    /// The VMs as they are now, or were a few seconds ago.
    ///
    /// # Errors
    /// `/proc` cannot be read, or nothing is known and another one looks.
    pub fn now(&self, daemon: &Daemon) -> Answer<HostVms> {
        let of = |(name, listing): (VmName, Arc<Listing>)| (listing.summary().pid, name);
        let managed: BTreeMap<i32, VmName> = daemon.listings().into_iter().map(of).collect();
        let pids: Vec<i32> = managed.keys().copied().collect();
        let (seen_at, guests) = self.guests.look(&pids).ok_or_else(looking)?;
        let discover =
            |_: &mut ()| discover_wanted(is_wanted(&pids)).map_err(|error| error.to_string());
        let (found_at, found) = self.found.look(discover).ok_or_else(looking)?;
        let vms = both(guests, found.map_err(failed("/proc"))?);
        // A VM that was detached keeps its directory, and with it its name.
        let is_taken =
            |name: &VmName| daemon.is_known(name) || daemon.site().directory(name).exists();
        Ok(HostVms {
            age_ms: millis(seen_at.min(found_at).elapsed()),
            left_out: vms.len().saturating_sub(HOST_VMS_MAX) as u64,
            vms: told(vms, &managed, is_taken),
        })
    }
}

fn looking() -> ApiError {
    ApiError::Unavailable("the host's VMs are being looked at: ask again in a moment".into())
}

/// What is known of each VM by both looks. One that began or ended between them is left out.
fn both(guests: Vec<Guest>, found: Vec<Found>) -> Vec<(Found, Guest)> {
    let mut guests: BTreeMap<i32, Guest> =
        guests.into_iter().map(|guest| (guest.pid, guest)).collect();
    found.into_iter().filter_map(|vm| guests.remove(&vm.pid).map(|guest| (vm, guest))).collect()
}

/// The VMs as clients see them, so many at most.
fn told(
    vms: Vec<(Found, Guest)>,
    managed: &BTreeMap<i32, VmName>,
    is_taken: impl Fn(&VmName) -> bool,
) -> Vec<HostVm> {
    let mut given: BTreeSet<VmName> = BTreeSet::new();
    let tell = |(found, guest): (Found, Guest)| {
        let managed_as = managed.get(&found.pid).cloned();
        let obstacle = found.obstacle.clone().filter(|_| managed_as.is_none());
        let attach_as = match (&managed_as, &obstacle) {
            (None, None) => VmName::of_vm(found.name.as_deref(), found.pid, |name| {
                given.contains(name) || is_taken(name)
            }),
            _ => None,
        };
        given.extend(attach_as.clone());
        HostVm { managed_as, obstacle, attach_as, ..plain(found, guest) }
    };
    vms.into_iter().take(HOST_VMS_MAX).map(tell).collect()
}

/// A VM, without what Ebb does with it.
fn plain(found: Found, guest: Guest) -> HostVm {
    let (resident_bytes, usage, reason) = match guest.observed {
        Ok(Observed { resident_bytes, usage: Ok(usage), .. }) => {
            (Some(resident_bytes), Some(of_guest(usage)), None)
        }
        Ok(Observed { resident_bytes, usage: Err(why), .. }) => {
            (Some(resident_bytes), None, Some(why.to_string()))
        }
        Err(why) => (None, None, Some(why)),
    };
    HostVm {
        pid: found.pid,
        name: found.name,
        uuid: found.uuid,
        manager: found.manager.word().map(Into::into),
        memory_bytes: found.memory_bytes,
        resident_bytes,
        usage,
        reason,
        managed_as: None,
        obstacle: None,
        attach_as: None,
    }
}

fn of_guest(usage: Usage) -> GuestUsage {
    let counters = usage.counters;
    GuestUsage {
        total_bytes: counters.total_bytes,
        used_bytes: usage.used_bytes(),
        anonymous_bytes: counters.anonymous_bytes,
        slab_bytes: counters.slab_bytes,
        cache_bytes: counters.cache_bytes,
        cold_cache_bytes: counters.cold_cache_bytes,
        free_bytes: counters.free_bytes,
        reclaimable_bytes: usage.reclaimable_bytes,
        release: usage.release,
    }
}

#[cfg(test)]
mod tests;
