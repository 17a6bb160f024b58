//! Whoever keeps a guest's memory small.

use std::borrow::Cow;

use vmtest::Vm;

use super::linux::{Linux, Memory, PLAIN};
use crate::bench::vm as vms;

const MIB: u64 = 1 << 20;
/// Of `EbbCompressed`.
const COMPRESSED: &str = "64M";
/// Of `EbbPool`: a monitoring is 8 windows of 0.6 s.
const PERIOD_S: &str = "6";
/// Of `EbbByThreshold`: windows, of 8.
const THRESHOLD: &str = "4";

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Keeper {
    /// Nobody: it has all it believes to have.
    Nobody,
    /// Nobody, and the guest believes to have no more than the limit.
    Small,
    /// Linux swaps QEMU.
    Linux(Linux),
    /// The guest's balloon driver, and Linux for what it cannot give.
    Balloon,
    /// Ebb.
    Ebb,
    /// Ebb, which shares the host's memory among guests by what it sees them use.
    EbbPool,
    /// Ebb, which monitors the guest besides, and so knows how hot its memory is.
    EbbByHeat,
    /// The same, for whom pages are hot that were used in half of the windows, and no others.
    EbbByThreshold,
    /// Ebb, which keeps a part of what it evicts in memory, compressed.
    EbbCompressed,
    /// Ebb, which must read what the guest is about to overwrite.
    EbbBlind,
    /// The balloon, and Ebb for what it cannot give.
    EbbBalloon,
}

/// Linux with its own defaults.
pub const PLAIN_LINUX: [Keeper; 2] = [Keeper::Linux(PLAIN[0]), Keeper::Linux(PLAIN[1])];

impl Keeper {
    /// As tables have it.
    pub fn name(self) -> Cow<'static, str> {
        Cow::Borrowed(match self {
            Keeper::Linux(way) => return Cow::Owned(way.name()),
            Keeper::Nobody => "no limit",
            Keeper::Small => "a guest that knows its limit",
            Keeper::Balloon => "balloon",
            Keeper::Ebb => "Ebb",
            Keeper::EbbPool => "Ebb, pool",
            Keeper::EbbByHeat => "Ebb, by temperature",
            Keeper::EbbByThreshold => "Ebb, fixed threshold",
            Keeper::EbbCompressed => "Ebb, compressed",
            Keeper::EbbBlind => "Ebb, blind",
            Keeper::EbbBalloon => "Ebb and balloon",
        })
    }

    /// One VM's guest has so much from now on, as far as its keeper works by VMs.
    pub fn limit(self, vm: &Vm, mib: u64) {
        let bytes = mib * MIB;
        if self.has_balloon() {
            vms::balloon(vm, bytes);
            // It may not get all.
            vmtest::until_or(|| (vms::balloon_bytes(vm) <= bytes).then_some(()));
        }
        if self.is_ebb() {
            match self {
                _ if self.is_monitored() => {
                    vm.host().ebb(&format!("pool {mib}M")).ok();
                    vm.ebb(&format!("share {mib}M --lower 100 --upper 100")).ok();
                }
                _ => drop(vm.ebb(&format!("limit {mib}M")).ok()),
            }
            vmtest::until("the limit to hold", || (vm.host_bytes() <= bytes).then_some(()));
        }
    }

    /// The same for a guest that believes to have `of_mib`, without waiting until it holds.
    pub fn share(self, vm: &Vm, mib: u64, of_mib: u64) {
        if self.has_balloon() {
            vms::balloon(vm, mib * MIB);
        }
        if self.is_ebb() {
            let limit = if mib < of_mib { format!("{mib}M") } else { "off".into() };
            vm.ebb(&format!("limit {limit}")).ok();
        }
    }

    /// What the kernel holds a guest to that believes to have `of_mib`, if the kernel is to hold it.
    pub fn cgroup_limit(self, mib: u64, of_mib: u64) -> Option<u64> {
        (mib < of_mib && self != Keeper::Nobody && !self.is_ebb()).then_some(mib)
    }

    /// Whether Ebb holds its VMs.
    pub fn is_ebb(self) -> bool {
        use Keeper::{Ebb, EbbBalloon, EbbBlind, EbbCompressed, EbbPool};
        self.is_monitored() || matches!(self, Ebb | EbbPool | EbbBlind | EbbBalloon | EbbCompressed)
    }

    /// How Linux swaps what it holds; none: Ebb holds it.
    pub fn linux(self) -> Option<Linux> {
        match self {
            Keeper::Linux(way) => Some(way),
            Keeper::Balloon => Some(PLAIN[0]),
            // As Ebb's guests: a memfd with huge pages, where the host gives them.
            Keeper::Nobody | Keeper::Small => Some(Linux { memory: Memory::MemfdHuge, ..PLAIN[1] }),
            _ => None,
        }
    }

    /// What its daemon is told.
    pub fn setting(self) -> Option<(&'static str, &'static str)> {
        match self {
            Keeper::EbbBlind => Some(("EBB_READ_FREED", "true")),
            Keeper::EbbCompressed => Some(("EBB_COMPRESSED", COMPRESSED)),
            Keeper::EbbPool => Some(("EBB_HEAT_PERIOD_S", PERIOD_S)),
            Keeper::EbbByThreshold => Some(("EBB_HEAT_THRESHOLD", THRESHOLD)),
            _ => None,
        }
    }

    /// Whether Ebb looks at what its VMs use.
    pub fn is_monitored(self) -> bool {
        matches!(self, Keeper::EbbByHeat | Keeper::EbbByThreshold)
    }

    pub fn has_balloon(self) -> bool {
        matches!(self, Keeper::Balloon | Keeper::EbbBalloon)
    }
}
