//! Who shares a host's memory among its VMs.

use vmtest::Vm;

use super::requests::KINDS;
use crate::bench::swap::held::Sample;
use crate::bench::swap::keeper::Keeper;
use crate::bench::swap::linux::{Linux, Memory, PLAIN, Swap};
use crate::bench::swap::medium::Medium;
use crate::bench::swap::rig::Ground;

/// The pilot's reserve is this part of the host, as it is without a setting.
const RESERVE_PART: u64 = 10;

/// A side of the comparison.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Ebb's pilot, without any setting but the VMs' classes.
    Pilot,
    /// Ebb with a limit for each VM: its part of the host's memory.
    Static,
    /// Linux swaps all VMs together.
    Linux(Linux),
    /// The host has memory for all.
    Plenty,
}

impl Side {
    /// Returns the sides, the judged one first. Of Linux's ways: its default, and anonymous memory
    /// with zswap where the kernel has it.
    pub fn all() -> Vec<Side> {
        let is_zswap =
            |way: &Linux| way.memory == Memory::Anonymous && matches!(way.swap, Swap::Zswap(_));
        let zswap = Linux::offered(true, Medium::Ssd).into_iter().find(is_zswap);
        let linux = Side::Linux(zswap.unwrap_or(PLAIN[1]));
        vec![Side::Pilot, Side::Static, linux, Side::Plenty]
    }

    /// Returns the side's name in tables.
    pub fn name(self) -> String {
        match self {
            Side::Pilot => "Ebb, pilot".into(),
            Side::Static => "Ebb, static limits".into(),
            Side::Linux(way) => way.name(),
            Side::Plenty => "memory for all".into(),
        }
    }

    /// Returns who serves the VMs' memory.
    pub fn keeper(self) -> Keeper {
        match self {
            Side::Pilot => Keeper::EbbPilot,
            Side::Static => Keeper::EbbCompressed,
            Side::Linux(way) => Keeper::Linux(way),
            Side::Plenty => Keeper::Nobody,
        }
    }

    /// Returns what all guests together may have, if anybody bounds them.
    pub fn bound(self, host_mib: u64) -> Option<u64> {
        (self != Side::Plenty).then_some(host_mib)
    }

    /// Looks at the guests, and keeps the bound of the pilot's host: what QEMUs take for themselves
    /// grows while their guests work, and is no part of it.
    ///
    /// # Errors
    /// A file operation fails.
    pub fn look(
        self,
        ground: &Ground,
        vms: &[&Vm],
        (memory_mib, host_mib): (u64, u64),
    ) -> anyhow::Result<Sample> {
        if self == Side::Pilot {
            ground.bound(vms, (memory_mib, host_mib))?;
        }
        ground.look(vms, memory_mib)
    }

    /// Has guests that have just booted share `host_mib` from now on.
    ///
    /// # Errors
    /// The host does not permit it.
    pub fn share(
        self,
        ground: &Ground,
        vms: &[&Vm],
        (memory_mib, host_mib): (u64, u64),
    ) -> anyhow::Result<()> {
        match self {
            Side::Plenty => ground.limit(None),
            Side::Linux(_) => ground.limit(Some(host_mib)),
            Side::Static => {
                let each = host_mib / vms.len() as u64;
                vms.iter().for_each(|vm| self.keeper().share(vm, each, memory_mib));
                ground.limit(None)
            }
            Side::Pilot => {
                ground.limit(None)?;
                ground.bound(vms, (memory_mib, host_mib))?;
                for (vm, kind) in vms.iter().zip(KINDS) {
                    vm.ebb(&format!("rule --class {}", kind.class)).ok();
                }
                // A part of what guests may have, not of the whole group.
                let on = format!("pilot on --reserve {}M", host_mib / RESERVE_PART);
                vms.iter().take(1).for_each(|vm| drop(vm.host().ebb(&on).ok()));
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pilot_is_judged_and_each_side_has_a_name() {
        let sides = Side::all();
        assert!(sides[0] == Side::Pilot && sides.len() == 4);
        let names: std::collections::BTreeSet<String> =
            sides.iter().map(|side| side.name()).collect();
        assert_eq!(names.len(), sides.len());
        assert_eq!(Side::Plenty.bound(7), None);
    }
}
