//! Guests at work, and the means that reclaim their free memory.

use std::path::Path;

use vmtest::assets::{self, Kernel};
use vmtest::{Guest, Host, Vm};

use crate::bench::report::Report;
use crate::bench::vm as vms;

const MIB: u64 = 1 << 20;
const LLFREE: &str = "llfree";
/// Kernels with the buddy allocator: the same source and options, or else Debian's own build.
const BUDDY: [&str; 2] = ["buddy", "6.1-cloud"];
/// Memory that a guest with virtio-mem begins with, so that its kernel can boot.
const BOOT_MIB: u64 = 512;
const BALLOON: &str = "-device virtio-balloon-pci,id=balloon";

/// What reclaims a guest's free memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Keeper {
    /// Nothing, in a guest with the buddy allocator.
    Buddy,
    /// Nothing, in a guest with LLFree.
    Llfree,
    /// QEMU's virtio-balloon.
    Balloon,
    /// Free page reporting by QEMU's virtio-balloon.
    Reporting,
    /// QEMU's virtio-mem.
    VirtioMem,
    /// Ebb, by the guest's page metadata.
    VProbe,
    /// Ebb, in the guest's own allocator.
    HyperAlloc,
}

/// Setup of a VM.
#[derive(Clone, Copy)]
pub struct Setup<'a> {
    pub memory_mib: u64,
    pub cpus: u32,
    /// The ext4 image of the VM's disk, if it has one. Writes to the disk are lost at the VM's end.
    pub image: Option<&'a Path>,
}

impl Keeper {
    /// Returns the keeper's name in tables.
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

    /// Whether Ebb manages the keeper's VMs.
    pub fn is_ebb(self) -> bool {
        matches!(self, Keeper::VProbe | Keeper::HyperAlloc)
    }

    /// Starts a VM whose memory is of the same kind with each keeper. Its disk is at `/mnt`.
    ///
    /// # Panics
    /// The test bench panics.
    pub fn start(self, host: &Host, setup: &Setup<'_>) -> Vm {
        let vm = match self {
            // QEMU runs without Ebb here.
            Keeper::VirtioMem => host.qemu(self.guest(setup)),
            // The image belongs to root.
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

    /// Turns automatic reclaim on, if the keeper is Ebb.
    pub fn automatic(self, vm: &Vm) {
        if self.is_ebb() {
            vm.ebb("auto on --interval 5s").ok();
        }
    }

    /// Shrinks the guest to `mib`, or as far as the keeper can.
    pub fn shrink(self, vm: &Vm, mib: u64) {
        match self {
            Keeper::HyperAlloc => drop(vm.ebb(&format!("resize {mib}M")).ok_or_short()),
            Keeper::VProbe => drop(vm.reclaim()),
            Keeper::Balloon => vms::balloon(vm, mib * MIB),
            Keeper::VirtioMem => plug(vm, mib),
            // These work by themselves, or not at all.
            Keeper::Reporting | Keeper::Buddy | Keeper::Llfree => {}
        }
    }

    /// Lets the guest have `mib` again, which is all that it was started with.
    pub fn grow(self, vm: &Vm, mib: u64) {
        match self {
            // Reclaimed memory comes back when it is touched.
            Keeper::VProbe => {}
            _ => self.shrink(vm, mib),
        }
    }

    /// Whether the guest has the size last requested.
    pub fn has_reached(self, vm: &Vm, mib: u64) -> bool {
        match self {
            Keeper::Balloon => vms::balloon_bytes(vm) == mib * MIB,
            Keeper::VirtioMem => plugged_bytes(vm) == (mib - BOOT_MIB) * MIB,
            // The keeper's command has ended by then, or it has none.
            _ => true,
        }
    }

    /// Makes a keeper's VM. This is the only place that does.
    fn guest(self, setup: &Setup<'_>) -> Guest {
        let kernel = assets::kernel(self.kernel()).unwrap_or_else(|why| panic!("{why}"));
        self.guest_of(kernel, setup)
    }

    fn guest_of(self, kernel: Kernel, setup: &Setup<'_>) -> Guest {
        let memory = |mib: u64| format!("{mib}M");
        let guest = Guest::of(kernel).cpus(setup.cpus);
        let guest = match self {
            Keeper::VirtioMem => guest
                .memory(&memory(BOOT_MIB))
                .append("memhp_default_state=online_movable")
                .qemu_args(&virtio_mem_args(setup.memory_mib)),
            _ => guest.memory(&memory(setup.memory_mib)),
        };
        let guest = match self {
            Keeper::Balloon => guest.qemu_args(BALLOON),
            Keeper::Reporting => guest.qemu_args(&format!("{BALLOON},free-page-reporting=on")),
            _ => guest,
        };
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
            // The lean kernel has no memory hotplug.
            Keeper::VirtioMem => BUDDY[1],
            _ => buddy(),
        }
    }
}

fn buddy() -> &'static str {
    let has = |label: &&str| assets::kernel(label).is_ok();
    BUDDY.into_iter().find(has).unwrap_or(BUDDY[1])
}

/// Notes which kernels the guests have.
///
/// # Errors
/// There is no kernel with LLFree, or none with the buddy allocator.
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

/// Returns QEMU's arguments for a guest of `memory_mib`, which request all memory above what it
/// boots with from the memory device.
fn virtio_mem_args(memory_mib: u64) -> String {
    let more_mib = memory_mib - BOOT_MIB;
    format!(
        "-m slots=0,maxmem={}M \
         -object memory-backend-memfd,id=more,size={more_mib}M,share=on,reserve=off \
         -device virtio-mem-pci,id=vmem0,memdev=more,requested-size={more_mib}M",
        2 * memory_mib
    )
}

/// Requests the plugged size that makes the guest's memory `mib`.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The option of a balloon begins so.
    const A_BALLOON: &str = "-device virtio-balloon-pci,";
    /// Keepers whose VMs `ebb run` starts, each with its balloon. QEMU starts those of
    /// [`Keeper::VirtioMem`], whose memory is of another kind.
    const STARTED: [(Keeper, &str); 6] = [
        (Keeper::HyperAlloc, "id=ebb-balloon,deflate-on-oom=on"),
        (Keeper::VProbe, "id=ebb-balloon,deflate-on-oom=on"),
        (Keeper::Llfree, "id=ebb-balloon,deflate-on-oom=on"),
        (Keeper::Buddy, "id=ebb-balloon,deflate-on-oom=on"),
        (Keeper::Balloon, "id=balloon"),
        (Keeper::Reporting, "id=balloon,free-page-reporting=on"),
    ];

    /// Returns a VM's balloons, and all its other options.
    fn terms(keeper: Keeper) -> (Vec<String>, Vec<String>) {
        let setup = Setup { memory_mib: 2048, cpus: 2, image: Some(Path::new("/image")) };
        let guest = keeper.guest_of(vms::no_kernel(), &setup);
        let options = vms::options(&guest.ebb_line("vm0", Path::new("/host/vm0")));
        options.into_iter().partition(|option| option.starts_with(A_BALLOON))
    }

    /// The kernel is what the figures are about, and a note names it.
    #[test]
    fn all_of_a_figures_vms_are_on_equal_terms_but_for_the_balloon() {
        let (_, due) = terms(Keeper::HyperAlloc);
        for option in ["-accel ", "-machine q35,", "-m 2048M", "-smp 2", "-drive file=/image,"] {
            assert!(due.iter().any(|found| found.starts_with(option)), "{option}: {due:?}");
        }
        for (keeper, balloon) in STARTED {
            let (balloons, others) = terms(keeper);
            assert_eq!(balloons, [format!("{A_BALLOON}{balloon}")], "{}", keeper.name());
            assert_eq!(others, due, "{}", keeper.name());
        }
    }
}
