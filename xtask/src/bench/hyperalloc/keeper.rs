//! Guests at work, and whoever takes what they do not use.

use std::path::Path;

use vmtest::{Guest, Host, Vm, assets};

use crate::bench::report::Report;
use crate::bench::vm as vms;

const MIB: u64 = 1 << 20;
const LLFREE: &str = "llfree";
/// The same source and options with the buddy allocator, or else Debian's own build.
const BUDDY: [&str; 2] = ["buddy", "6.1-cloud"];
/// What a guest with virtio-mem has besides: its kernel has to boot.
const BOOT_MIB: u64 = 512;
const BALLOON: &str = "-device virtio-balloon-pci,id=balloon";

/// Whoever takes a guest's free memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Keeper {
    /// Nobody, of a guest with the buddy allocator.
    Buddy,
    /// Nobody, of a guest with LLFree.
    Llfree,
    /// QEMU's virtio-balloon.
    Balloon,
    /// The same device's free page reporting.
    Reporting,
    /// QEMU's virtio-mem.
    VirtioMem,
    /// Ebb, by the guest's page metadata.
    VProbe,
    /// Ebb, in the guest's own allocator.
    HyperAlloc,
}

/// What is started.
#[derive(Clone, Copy)]
pub struct Setup<'a> {
    pub memory_mib: u64,
    pub cpus: u32,
    /// Its disk's ext4, if it is to have one: what it writes there goes with it.
    pub image: Option<&'a Path>,
}

impl Keeper {
    /// As tables have it.
    pub fn name(self) -> &'static str {
        match self {
            Keeper::Buddy => "nobody, buddy",
            Keeper::Llfree => "nobody, LLFree",
            Keeper::Balloon => "virtio-balloon",
            Keeper::Reporting => "free page reporting",
            Keeper::VirtioMem => "virtio-mem",
            Keeper::VProbe => "V-Probe",
            Keeper::HyperAlloc => "HyperAlloc",
        }
    }

    /// Whether Ebb holds its VMs.
    pub fn is_ebb(self) -> bool {
        matches!(self, Keeper::VProbe | Keeper::HyperAlloc)
    }

    /// A VM whose memory is of the same kind with each keeper. Its disk is at `/mnt`.
    ///
    /// # Panics
    /// As the test bench.
    pub fn start(self, host: &Host, setup: &Setup<'_>) -> Vm {
        let vm = match self {
            // What is plugged cannot be held.
            Keeper::VirtioMem => host.qemu(self.guest(setup)),
            // The image is root's.
            _ if setup.image.is_some() => host.run(self.guest(setup).user("root")),
            _ => host.run(self.guest(setup)),
        };
        match self {
            Keeper::VirtioMem => wait_plugged(&vm, setup.memory_mib),
            _ if self.is_ebb() => drop(vm.wait_trusted()),
            _ => drop(vm.detach()),
        }
        if setup.image.is_some() {
            vm.guest("mount ext4 /dev/vda /mnt");
        }
        vm
    }

    /// What is free is taken from now on by itself, where the keeper can.
    pub fn automatic(self, vm: &Vm) {
        if self.is_ebb() {
            vm.ebb("auto on --interval 5s").ok();
        }
    }

    /// Takes what it can down to `mib`, of a guest that has `of_mib`.
    pub fn shrink(self, vm: &Vm, mib: u64) {
        match self {
            Keeper::HyperAlloc => drop(vm.ebb(&format!("resize {mib}M")).ok_or_short()),
            Keeper::VProbe => drop(vm.reclaim()),
            Keeper::Balloon => vms::balloon(vm, mib * MIB),
            Keeper::VirtioMem => plug(vm, mib),
            // It works by itself, or not at all.
            Keeper::Reporting | Keeper::Buddy | Keeper::Llfree => {}
        }
    }

    /// The guest may have `mib` again, all that it was started with.
    pub fn grow(self, vm: &Vm, mib: u64) {
        match self {
            // What it took comes back when it is touched.
            Keeper::VProbe => {}
            _ => self.shrink(vm, mib),
        }
    }

    /// Whether the guest has the size last asked for.
    pub fn has_reached(self, vm: &Vm, mib: u64) -> bool {
        match self {
            Keeper::Balloon => vms::balloon_bytes(vm) == mib * MIB,
            Keeper::VirtioMem => plugged_bytes(vm) == (mib - BOOT_MIB) * MIB,
            // Its command ends then, or there is none.
            _ => true,
        }
    }

    fn guest(self, setup: &Setup<'_>) -> Guest {
        let memory = |mib: u64| format!("{mib}M");
        let guest = match self {
            // The lean kernel has no memory hotplug.
            Keeper::VirtioMem => Guest::debian(BUDDY[1])
                .memory(&memory(BOOT_MIB))
                .append("memhp_default_state=online_movable")
                .qemu_args(&virtio_mem_args(setup.memory_mib)),
            _ => Guest::debian(self.kernel()).memory(&memory(setup.memory_mib)),
        };
        let guest = match self {
            Keeper::Balloon => guest.qemu_args(BALLOON),
            Keeper::Reporting => guest.qemu_args(&format!("{BALLOON},free-page-reporting=on")),
            _ => guest,
        };
        let guest = guest.cpus(setup.cpus);
        let Some(image) = setup.image else { return guest };
        guest.qemu_args(&format!(
            "-drive file={},if=none,id=disk,format=raw,snapshot=on \
             -device virtio-blk-pci,drive=disk",
            image.display()
        ))
    }

    fn kernel(self) -> &'static str {
        match self {
            Keeper::Llfree | Keeper::HyperAlloc => LLFREE,
            _ => buddy(),
        }
    }
}

fn buddy() -> &'static str {
    let has = |label: &&str| assets::kernel(label).is_ok();
    BUDDY.into_iter().find(has).unwrap_or(BUDDY[1])
}

/// Says what the guests' kernels are.
///
/// # Errors
/// There is none with LLFree.
pub fn note_kernels(report: &mut Report) -> anyhow::Result<()> {
    let package = |label| assets::kernel(label).map_err(anyhow::Error::msg);
    let (llfree, buddy) = (package(LLFREE)?.package, (buddy(), package(buddy())?.package));
    report.note(match buddy.0 == BUDDY[0] {
        true => format!(
            "Guests with LLFree: {llfree}; all others the same source and options, with the \
             buddy allocator."
        ),
        false => format!("Guests with LLFree: {llfree}; all others: Debian's own {}.", buddy.1),
    });
    Ok(())
}

/// Everything above what it boots with is plugged; maximal and plugged memory in QEMU's words.
fn virtio_mem_args(memory_mib: u64) -> String {
    let more_mib = memory_mib - BOOT_MIB;
    format!(
        "-m slots=0,maxmem={}M \
         -object memory-backend-memfd,id=more,size={more_mib}M,share=on,reserve=off \
         -device virtio-mem-pci,id=vmem0,memdev=more,requested-size={more_mib}M",
        2 * memory_mib
    )
}

/// As much as makes the guest's memory `mib`.
fn plug(vm: &Vm, mib: u64) {
    let bytes = mib.saturating_sub(BOOT_MIB) * MIB;
    let arguments = serde_json::json!({
        "path": "/machine/peripheral/vmem0", "property": "requested-size", "value": bytes
    });
    vm.qmp("qom-set", arguments);
}

fn plugged_bytes(vm: &Vm) -> u64 {
    let arguments = serde_json::json!({ "path": "/machine/peripheral/vmem0", "property": "size" });
    vm.qmp("qom-get", arguments).as_u64().unwrap_or(0)
}

fn wait_plugged(vm: &Vm, memory_mib: u64) {
    let is_there = || Keeper::VirtioMem.has_reached(vm, memory_mib).then_some(());
    vmtest::until("the guest's memory", is_there);
}
