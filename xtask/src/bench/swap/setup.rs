//! The VM that a figure is about. All VMs of a figure are made here, and differ only in who serves
//! their RAM and their disk.

use std::path::Path;

use anyhow::{Context, ensure};
use ebb_sys::process::Process;
use vmtest::assets::{self, Kernel};
use vmtest::{Guest, Vm};

use super::keeper::Keeper;
use super::medium::Medium;
use crate::bench::vm as vms;

const KERNEL: &str = "6.1-cloud";
/// Options in which a figure's VMs may differ: how an option begins, and why it differs.
const DIFFERENT: [(&str, &str); 10] = [
    ("-object memory-backend-", "who serves the RAM"),
    ("-device vhost-user-blk-pci,", "who serves the disk"),
    ("-object iothread,", "who serves the disk"),
    ("-drive ", "who serves the disk"),
    ("-device virtio-blk-pci,", "who serves the disk"),
    ("-device virtio-balloon-pci,", "whose balloon it is: each has one"),
    ("-chardev socket,id=ebb-", "QEMU inherits its sockets, Ebb's disk among them, or makes them"),
    ("-qmp ", "where the bench's own socket is"),
    ("-S", "Ebb looks at a VM before it runs"),
    ("-name ", "its name"),
];

/// Setup of a VM.
#[derive(Clone, Copy)]
pub struct Setup<'a> {
    pub keeper: Keeper,
    pub medium: Medium,
    /// Memory that the guest believes to have.
    pub memory_mib: u64,
    /// Memory that the guest has.
    pub limit_mib: u64,
    pub cpus: u32,
    /// Addition to the kernel's command line.
    pub append: &'static str,
    /// The guest's disk, an ext4 file system with the files for its work. Each VM gets a copy.
    pub image: &'a Path,
}

impl<'a> Setup<'a> {
    /// Makes the setup of a guest with one processor that believes to have the first size, and has
    /// the second.
    pub fn new(
        keeper: Keeper,
        medium: Medium,
        [memory_mib, limit_mib]: [u64; 2],
        image: &'a Path,
    ) -> Setup<'a> {
        Setup { keeper, medium, memory_mib, limit_mib, cpus: 1, append: "", image }
    }

    /// Makes a figure's VM. This is the only place that does. `disk` is a device.
    ///
    /// # Errors
    /// The guest's kernel is missing.
    pub fn guest(&self, disk: &Path) -> anyhow::Result<Guest> {
        Ok(self.guest_of(assets::kernel(KERNEL).map_err(anyhow::Error::msg)?, disk))
    }

    fn guest_of(&self, kernel: Kernel, disk: &Path) -> Guest {
        // A privileged QEMU stays in this benchmark's group, which counts what it takes.
        let guest = Guest::of(kernel)
            .append(self.append)
            .memory(&format!("{}M", self.memory_mib))
            .cpus(self.cpus)
            .backing("auto")
            .privileged();
        let guest = match self.keeper.has_balloon() {
            true => guest.qemu_args("-device virtio-balloon-pci,id=balloon"),
            false => guest,
        };
        match self.keeper.linux() {
            None => guest.own_device(disk),
            // This is the fastest setting of QEMU's own disk. Blocks and queues are those of Ebb's
            // disk.
            Some(way) => guest.ram(way.backend()).qemu_args(&format!(
                "-object iothread,id=io \
                 -drive file={},if=none,id=disk,format=raw,cache=none,aio=io_uring,discard=unmap \
                 -device virtio-blk-pci,drive=disk,iothread=io,num-queues={},\
                 logical_block_size=4096,physical_block_size=4096",
                disk.display(),
                self.cpus
            )),
        }
    }

    /// Checks that a VM runs with the same options as all others of its figure.
    ///
    /// # Errors
    /// The VM differs, and how.
    pub fn check(&self, guest: &Guest, vm: &Vm) -> anyhow::Result<()> {
        let process = Process::open(vm.pid()).context("QEMU")?;
        let line = process.command_line().context("QEMU's command line")?;
        let (is, due) = (terms(&line[1..]), terms(&guest.ebb_line("", Path::new("/"))));
        ensure!(is == due, "the VM's terms are {is:?} and should be {due:?}");
        Ok(())
    }
}

/// Returns the options with their values in order, but for those of [`DIFFERENT`]. A kernel that
/// only root may read has another path with Ebb. Its content is the same for all, but nobody checks
/// that.
fn terms(line: &[String]) -> Vec<String> {
    let mut options = vms::options(line);
    let differs =
        |option: &str| {
            let files = ["-kernel ", "-initrd "];
            DIFFERENT.iter().map(|(begin, _)| *begin).chain(files).any(|begin| {
                option == begin || begin.len() > "-S".len() && option.starts_with(begin)
            })
        };
    options.retain(|option| !differs(option));
    options
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::swap::keeper::PLAIN_LINUX;
    use crate::bench::swap::linux::{Linux, Memory, Swap};
    use crate::bench::vm::no_kernel;

    const EBB: [Keeper; 8] = [
        Keeper::Ebb,
        Keeper::EbbPool,
        Keeper::EbbByHeat,
        Keeper::EbbByThreshold,
        Keeper::EbbCompressed,
        Keeper::EbbPilot,
        Keeper::EbbBlind,
        Keeper::EbbBalloon,
    ];

    fn line(keeper: Keeper) -> Vec<String> {
        let image = Path::new("/image");
        let setup = Setup::new(keeper, Medium::Ssd, [512, 192], image);
        let setup = Setup { cpus: 2, append: "pti=on", ..setup };
        let guest = setup.guest_of(no_kernel(), Path::new("/dev/loop7"));
        let make = if keeper.is_ebb() { Guest::ebb_line } else { Guest::alike_line };
        make(&guest, "vm0", Path::new("/host/vm0"))
    }

    fn keepers() -> Vec<Keeper> {
        let zswap = Linux { memory: Memory::Anonymous, swap: Swap::Zswap("lzo") };
        let linux = [Keeper::Linux(zswap), Keeper::Nobody, Keeper::Small, Keeper::Balloon];
        PLAIN_LINUX.into_iter().chain(linux).chain(EBB).collect()
    }

    #[test]
    fn all_of_a_figures_vms_are_on_equal_terms() {
        let due = terms(&line(Keeper::Ebb));
        for option in ["-accel ", "-machine q35,", "-m 512M", "-smp 2", "-append ", "-nodefaults"] {
            assert!(due.iter().any(|found| found.starts_with(option)), "{option}: {due:?}");
        }
        for keeper in keepers() {
            let line = line(keeper);
            assert_eq!(terms(&line), due, "{}", keeper.name());
            assert!(!line.iter().any(|word| word.contains("tb-size")), "{}", keeper.name());
            let kernel: Vec<_> = line.iter().filter(|word| word.ends_with("vmlinuz")).collect();
            assert_eq!(kernel, ["/vmlinuz"], "{}", keeper.name());
        }
    }

    /// Takes one side of each kind, so that each option that may differ is there on both sides,
    /// exactly once.
    #[test]
    fn each_vm_has_one_ram_one_disk_and_one_balloon() {
        let count = |line: &[String], begins: &[&str]| {
            let is = |word: &&String| begins.iter().any(|begin| word.starts_with(begin));
            line.iter().filter(is).count()
        };
        for keeper in keepers() {
            let line = line(keeper);
            assert_eq!(count(&line, &["memory-backend-"]), 1, "{}", keeper.name());
            assert_eq!(count(&line, &["virtio-blk-pci,", "vhost-user-blk-pci,"]), 1);
            assert_eq!(count(&line, &["virtio-balloon-pci,"]), 1, "{}", keeper.name());
            assert_eq!(line.iter().filter(|word| word.contains("num-queues=2")).count(), 1);
        }
    }

    /// Options that may differ are not checked further. This shows all their values.
    #[test]
    fn keepers_differ_only_in_what_serves_memory_and_disk() {
        let served = |keeper| -> Vec<String> {
            let begins = ["memory-backend-", "file=", "virtio-blk-pci,", "vhost-user-blk-pci,"];
            let is = |word: &String| begins.iter().any(|begin| word.starts_with(begin));
            line(keeper).into_iter().filter(is).collect()
        };
        let bytes = 512 << 20;
        for keeper in keepers() {
            let due = match keeper.linux() {
                Some(way) => [
                    format!("memory-backend-{},id=ram0,size={bytes}", way.backend()),
                    "file=/dev/loop7,if=none,id=disk,format=raw,cache=none,aio=io_uring,\
                     discard=unmap"
                        .into(),
                    "virtio-blk-pci,drive=disk,iothread=io,num-queues=2,logical_block_size=4096,\
                     physical_block_size=4096"
                        .into(),
                ]
                .to_vec(),
                None => [
                    format!(
                        "memory-backend-file,id=ram0,size={bytes},mem-path=/proc/self/fd/0,\
                         share=on,align=2M,dump=off"
                    ),
                    "vhost-user-blk-pci,chardev=ebb-disk0,num-queues=2".into(),
                ]
                .to_vec(),
            };
            assert_eq!(served(keeper), due, "{}", keeper.name());
        }
    }
}
