//! The sides of a figure: who keeps a guest's memory small.

use std::borrow::Cow;

use vmtest::Vm;

use super::linux::{Linux, Memory, PLAIN};
use crate::bench::vm as vms;

const MIB: u64 = 1 << 20;
/// Compressed memory of `EbbCompressed` and `EbbPilot`.
const COMPRESSED: &str = "64M";
/// Seconds between two monitorings with `EbbPool`. A monitoring is 8 windows of 0.6 s.
const PERIOD_S: &str = "6";
/// Threshold of `EbbByThreshold`: windows, of 8.
const THRESHOLD: &str = "4";

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Keeper {
    /// Nobody: the guest has all memory that it believes to have.
    Nobody,
    /// Nobody, and the guest believes to have no more than the limit.
    Small,
    /// Linux swaps QEMU.
    Linux(Linux),
    /// The guest's balloon driver, and Linux for what the balloon cannot give.
    Balloon,
    /// Ebb.
    Ebb,
    /// Ebb, which shares the host's memory among the guests by what they use.
    EbbPool,
    /// Ebb, which also monitors the guest, and so knows how hot its memory is.
    EbbByHeat,
    /// Ebb, which monitors the guest, and takes exactly those pages as hot that were used in half
    /// of the windows.
    EbbByThreshold,
    /// Ebb, which keeps a part of the evicted memory compressed.
    EbbCompressed,
    /// Ebb, whose pilot shares the host's memory among the guests, with compressed memory.
    EbbPilot,
    /// Ebb, which must read frames that the guest is about to overwrite.
    EbbBlind,
    /// The balloon, and Ebb for what the balloon cannot give.
    EbbBalloon,
}

/// Linux with its own defaults.
pub const PLAIN_LINUX: [Keeper; 2] = [Keeper::Linux(PLAIN[0]), Keeper::Linux(PLAIN[1])];

impl Keeper {
    /// Returns the keeper's name in tables.
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
            Keeper::EbbPilot => "Ebb, pilot",
            Keeper::EbbBlind => "Ebb, blind",
            Keeper::EbbBalloon => "Ebb and balloon",
        })
    }

    /// Limits a VM's guest, if its keeper works on single VMs.
    pub fn limit(self, vm: &Vm, mib: u64) {
        let bytes = mib * MIB;
        if self.has_balloon() {
            vms::balloon(vm, bytes);
            // The balloon may not get everything.
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

    /// Limits a guest that believes to have `of_mib`, without waiting until it is at its limit.
    pub fn share(self, vm: &Vm, mib: u64, of_mib: u64) {
        if self.has_balloon() {
            vms::balloon(vm, mib * MIB);
        }
        if self.is_ebb() {
            let limit = if mib < of_mib { format!("{mib}M") } else { "off".into() };
            vm.ebb(&format!("limit {limit}")).ok();
        }
    }

    /// Returns the kernel's limit of a guest that believes to have `of_mib`, if the kernel limits
    /// it.
    pub fn cgroup_limit(self, mib: u64, of_mib: u64) -> Option<u64> {
        (mib < of_mib && self != Keeper::Nobody && !self.is_ebb()).then_some(mib)
    }

    /// Whether Ebb manages the keeper's VMs.
    pub fn is_ebb(self) -> bool {
        use Keeper::{Ebb, EbbBalloon, EbbBlind, EbbPool};
        let is_plain = matches!(self, Ebb | EbbPool | EbbBlind | EbbBalloon);
        is_plain || self.is_monitored() || self.compresses()
    }

    /// Returns how Linux swaps the VMs, or `None` if Ebb manages them.
    pub fn linux(self) -> Option<Linux> {
        match self {
            Keeper::Linux(way) => Some(way),
            Keeper::Balloon => Some(PLAIN[0]),
            // Like Ebb's guests, these have a memfd with huge pages, if the host gives them.
            Keeper::Nobody | Keeper::Small => Some(Linux { memory: Memory::MemfdHuge, ..PLAIN[1] }),
            _ => None,
        }
    }

    /// Returns the environment variable that the daemon gets, with its value.
    pub fn setting(self) -> Option<(&'static str, &'static str)> {
        match self {
            Keeper::EbbBlind => Some(("EBB_READ_FREED", "true")),
            _ if self.compresses() => Some(("EBB_COMPRESSED", COMPRESSED)),
            Keeper::EbbPool => Some(("EBB_HEAT_PERIOD_S", PERIOD_S)),
            Keeper::EbbByThreshold => Some(("EBB_HEAT_THRESHOLD", THRESHOLD)),
            _ => None,
        }
    }

    /// Whether Ebb monitors what its VMs use.
    pub fn is_monitored(self) -> bool {
        matches!(self, Keeper::EbbByHeat | Keeper::EbbByThreshold)
    }

    /// Whether Ebb keeps a part of the evicted memory compressed.
    pub fn compresses(self) -> bool {
        matches!(self, Keeper::EbbCompressed | Keeper::EbbPilot)
    }

    pub fn has_balloon(self) -> bool {
        matches!(self, Keeper::Balloon | Keeper::EbbBalloon)
    }
}
