//! `ebb observe` and `ebb discover`: what runs on this host, seen without touching it. No daemon is
//! asked, but for the names under which it manages VMs.

use std::io::{self, Write};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use ebb_api::{DiscoveredVm, GuestUsage, ObservedVm, VmName, VmSummary};
use ebb_observe::{Found, Observed, Seen, Watches};

use crate::args::Observe;
use crate::interval::Interval;
use crate::show;

/// Shortest time between two looks.
const EVERY_MS_LEAST: u64 = 100;

/// Looks at VMs once, and returns the answer; or again and again, and prints each.
pub fn observe(args: &Observe) -> anyhow::Result<String> {
    let json = args.output.json;
    let mut watched = Watched { pids: args.pid.clone(), watches: Watches::default() };
    let Some(Interval { ms }) = args.every else {
        let vms = watched.look()?;
        return match json {
            true => Ok(serde_json::to_string_pretty(&vms)? + "\n"),
            false => Ok(show::observed(&vms)),
        };
    };
    ensure!(ms >= EVERY_MS_LEAST, "--every {ms}ms is too short: {EVERY_MS_LEAST}ms is the least");
    let every = Duration::from_millis(ms);
    loop {
        let began = Instant::now();
        let vms = watched.look()?;
        // A line for each look, for programs that read lines.
        let text = match json {
            true => serde_json::to_string(&vms)? + "\n",
            false => show::observed(&vms),
        };
        let mut out = io::stdout().lock();
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            // The reader has all it wanted.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(String::new()),
            result => result?,
        }
        drop(out);
        thread::sleep(every.saturating_sub(began.elapsed()));
    }
}

/// The VMs that are looked at.
struct Watched {
    /// Those that were asked for; empty: all.
    pids: Vec<i32>,
    watches: Watches,
}

impl Watched {
    fn look(&mut self) -> anyhow::Result<Vec<ObservedVm>> {
        let Watched { pids, watches } = self;
        let seen = watches
            .look(|process| pids.is_empty() || pids.contains(&process.pid()))
            .context("/proc")?;
        for pid in pids {
            let runs = seen.iter().any(|vm| vm.pid == *pid);
            ensure!(runs, "process {pid} is no QEMU: ebb discover shows those that run");
        }
        Ok(seen.into_iter().map(observed).collect())
    }
}

fn observed(Seen { pid, name, observed }: Seen) -> ObservedVm {
    match observed {
        Ok(Observed { memory_bytes, resident_bytes, usage }) => {
            let (usage, reason) = match usage {
                Ok(usage) => (Some(of_guest(&usage)), None),
                Err(why) => (None, Some(why.to_string())),
            };
            let (memory_bytes, resident_bytes) = (Some(memory_bytes), Some(resident_bytes));
            ObservedVm { pid, name, memory_bytes, resident_bytes, usage, reason }
        }
        Err(why) => {
            let (memory_bytes, resident_bytes, usage) = (None, None, None);
            ObservedVm {
                pid,
                name,
                memory_bytes,
                resident_bytes,
                usage,
                reason: Some(why.to_string()),
            }
        }
    }
}

fn of_guest(usage: &ebb_observe::Usage) -> GuestUsage {
    let counters = &usage.counters;
    GuestUsage {
        release: usage.release.clone(),
        total_bytes: counters.total_bytes,
        used_bytes: usage.used_bytes(),
        anonymous_bytes: counters.anonymous_bytes,
        slab_bytes: counters.slab_bytes,
        cache_bytes: counters.cache_bytes,
        cold_cache_bytes: counters.cold_cache_bytes,
        free_bytes: counters.free_bytes,
        reclaimable_bytes: usage.reclaimable_bytes,
    }
}

/// Returns every QEMU of this host. `managed` are those of the daemon, if one answers.
pub fn discover(managed: &[VmSummary]) -> anyhow::Result<Vec<DiscoveredVm>> {
    let all = ebb_observe::discover().context("/proc")?;
    Ok(all.into_iter().map(|found| discovered(found, managed)).collect())
}

fn discovered(found: Found, managed: &[VmSummary]) -> DiscoveredVm {
    let managed = managed.iter().find(|vm| vm.pid == found.pid);
    DiscoveredVm {
        pid: found.pid,
        name: found.name,
        uuid: found.uuid,
        manager: found.manager.word().map(Into::into),
        memory_bytes: found.memory_bytes,
        managed_as: managed.map(|vm| vm.name.to_string()),
        obstacle: found.obstacle.filter(|_| managed.is_none()),
    }
}

/// Name and process of each VM that can be managed and is not. A VM's name is that of its command
/// line, as far as Ebb's names allow it and no other VM has it; else `vm-PID`. A VM that was detached
/// keeps its directory, and with it its name.
pub fn attachable(
    all: &[DiscoveredVm],
    managed: &[VmSummary],
    has_directory: impl Fn(&VmName) -> bool,
) -> Vec<(VmName, i32)> {
    let mut names: Vec<VmName> = managed.iter().map(|vm| vm.name.clone()).collect();
    let is_free = |vm: &&DiscoveredVm| vm.managed_as.is_none() && vm.obstacle.is_none();
    let named = |vm: &DiscoveredVm| {
        let name = VmName::of_vm(vm.name.as_deref(), vm.pid, |name| {
            names.contains(name) || has_directory(name)
        })?;
        names.push(name.clone());
        Some((name, vm.pid))
    };
    all.iter().filter(is_free).filter_map(named).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(pid: i32, name: Option<&str>, obstacle: Option<&str>) -> DiscoveredVm {
        DiscoveredVm {
            pid,
            name: name.map(Into::into),
            uuid: None,
            manager: None,
            memory_bytes: 1 << 30,
            managed_as: None,
            obstacle: obstacle.map(Into::into),
        }
    }

    #[test]
    fn vms_are_attached_by_their_names_where_those_fit() {
        let all = [
            vm(1, Some("web"), None),
            vm(2, Some("web"), None),
            vm(3, Some("a b"), None),
            vm(4, None, None),
            vm(5, Some("db"), Some("its RAM is no shared memfd")),
            vm(7, Some("detached"), None),
            DiscoveredVm { managed_as: Some("old".into()), ..vm(6, Some("x"), None) },
        ];
        let names = attachable(&all, &[], |name| name.as_str() == "detached");
        let names: Vec<_> = names.iter().map(|(name, pid)| (*pid, name.as_str())).collect();
        assert_eq!(names, [(1, "web"), (2, "vm-2"), (3, "vm-3"), (4, "vm-4"), (7, "vm-7")]);
    }
}
