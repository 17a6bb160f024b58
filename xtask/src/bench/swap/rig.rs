//! A guest with less memory than it believes, and whoever sees to that.

use std::path::{Path, PathBuf};

use anyhow::Context;
use vmtest::{Host, HostSetting, Vm};

use super::cgroup::Cgroup;
use super::medium::{self, Content, Drive, Medium, Mounted, SwapArea, Traffic};
use super::warden::{self, Guest};
use crate::bench::vm as vms;
use crate::interrupt;

const MIB: u64 = 1 << 20;
const TRANSLATOR: &str = "tcg,tb-size=32";
const SWAP_BYTES: u64 = 1536 * MIB;
/// Of `EbbCompressed`.
const COMPRESSED: &str = "64M";
/// Of `EbbByThreshold`: windows, of 8.
const THRESHOLD: &str = "4";

/// Whoever keeps a guest's memory small.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Keeper {
    /// Nobody: it has all it believes to have.
    Nobody,
    /// Linux swaps QEMU, whose guest has anonymous memory: the stronger baseline.
    Anonymous,
    /// The same, and what is swapped is compressed and in memory, as far as it shrinks.
    Zswap,
    /// Linux swaps QEMU, whose guest has a memfd.
    Memfd,
    /// The guest's balloon driver, and Linux for what it cannot give.
    Balloon,
    /// Ebb.
    Ebb,
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

impl Keeper {
    /// As tables have it.
    pub fn name(self) -> &'static str {
        match self {
            Keeper::Nobody => "no limit",
            Keeper::Anonymous => "Linux, anonymous",
            Keeper::Zswap => "Linux, zswap",
            Keeper::Memfd => "Linux, memfd",
            Keeper::Balloon => "balloon",
            Keeper::Ebb => "Ebb",
            Keeper::EbbByHeat => "Ebb, by temperature",
            Keeper::EbbByThreshold => "Ebb, fixed threshold",
            Keeper::EbbCompressed => "Ebb, compressed",
            Keeper::EbbBlind => "Ebb, blind",
            Keeper::EbbBalloon => "Ebb and balloon",
        }
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

    /// Whether Ebb holds its VMs.
    pub fn is_ebb(self) -> bool {
        use Keeper::{Ebb, EbbBalloon, EbbBlind, EbbCompressed};
        self.is_monitored() || matches!(self, Ebb | EbbBlind | EbbBalloon | EbbCompressed)
    }

    /// Whether Ebb looks at what its VMs use.
    pub fn is_monitored(self) -> bool {
        matches!(self, Keeper::EbbByHeat | Keeper::EbbByThreshold)
    }

    fn has_balloon(self) -> bool {
        matches!(self, Keeper::Balloon | Keeper::EbbBalloon)
    }
}

/// What is started.
#[derive(Clone, Copy)]
pub struct Setup<'a> {
    pub keeper: Keeper,
    pub medium: Medium,
    /// What the guest believes to have.
    pub memory_mib: u64,
    /// What it has.
    pub limit_mib: u64,
    pub cpus: u32,
    /// To its kernel's command line.
    pub append: &'static str,
    /// Its disk, an ext4 on which it finds what it works on; it gets a copy.
    pub image: &'a Path,
}

/// What guests stand on: a control group, something to swap to, and a daemon of their own.
pub struct Ground {
    // Taken away in this order.
    host: Host,
    _zswap: Option<HostSetting>,
    _swap_area: Option<SwapArea>,
    _swap_directory: Option<Mounted>,
    cgroup: Cgroup,
    swap: Drive,
    files: tempfile::TempDir,
}

/// A guest with its disk at `/mnt`, and all that holds it.
pub struct Rig {
    // Taken away in this order.
    pub vm: Vm,
    disk: Drive,
    ground: Ground,
    memory_mib: u64,
    is_ebb: bool,
}

/// What went over both drives.
#[derive(Clone, Copy, Default, Debug)]
pub struct Both {
    pub disk: Traffic,
    pub swap: Traffic,
}

impl Ground {
    /// Makes it.
    ///
    /// # Errors
    /// The host lacks what it needs, or does not let us.
    pub fn new(keeper: Keeper, medium: Medium) -> anyhow::Result<Ground> {
        interrupt::check()?;
        let files = tempfile::Builder::new().prefix("ebb-bench-").tempdir()?;
        let swap = Drive::new(&files.path().join("swap.img"), Content::Empty(SWAP_BYTES), medium)?;
        let cgroup = Cgroup::new("vm")?;
        swap.throttle(&cgroup, medium)?;
        let (mut swap_area, mut swap_directory, mut zswap) = (None, None, None);
        let host = Host::in_memory().unwrap_or_default();
        match keeper.is_ebb() {
            true => {
                medium::format(&swap)?;
                let mounted = Mounted::on(&swap, &files.path().join("swap"))?;
                host.set("EBB_SWAP_DIR", mounted.path());
                match keeper {
                    Keeper::EbbBlind => host.set("EBB_READ_FREED", "true"),
                    Keeper::EbbCompressed => host.set("EBB_COMPRESSED", COMPRESSED),
                    Keeper::EbbByThreshold => host.set("EBB_HEAT_THRESHOLD", THRESHOLD),
                    _ => (),
                }
                swap_directory = Some(mounted);
            }
            false => {
                let on = keeper == Keeper::Zswap;
                zswap = Some(HostSetting::zswap(on).map_err(anyhow::Error::msg)?);
                // Of QEMU's threads, too, the kernel touches memory that it cannot have back at
                // once, and kills them for it.
                host.set("GLIBC_TUNABLES", "glibc.pthread.rseq=0");
                swap_area = Some(SwapArea::on(&swap)?);
            }
        }
        Ok(Ground {
            host,
            _zswap: zswap,
            _swap_area: swap_area,
            _swap_directory: swap_directory,
            cgroup,
            swap,
            files,
        })
    }

    /// Boots a guest on it that has all its memory still.
    ///
    /// # Errors
    /// As [`Ground::new`].
    pub fn boot(&self, setup: &Setup<'_>) -> anyhow::Result<(Vm, Drive)> {
        let (_, file) = tempfile::NamedTempFile::new_in(self.files.path())?.keep()?;
        let disk = Drive::new(&file, Content::Copy(setup.image), setup.medium)?;
        disk.throttle(&self.cgroup, setup.medium)?;
        let guest = setup.guest(&disk);
        let inside = self.cgroup.enter()?;
        // Privileged, QEMU stays in this group, which counts what it takes.
        let vm = match setup.keeper.is_ebb() {
            true => self.host.run(guest.privileged()),
            false => self.host.qemu(guest),
        };
        drop(inside);
        vm.guest("mount ext4 /dev/vda /mnt");
        if setup.keeper.is_ebb() {
            vm.wait_trusted();
        }
        Ok((vm, disk))
    }

    /// Boots another one that Ebb holds, without a disk.
    ///
    /// # Errors
    /// As [`Ground::new`].
    pub fn run(&self, guest: vmtest::Guest) -> anyhow::Result<Vm> {
        let inside = self.cgroup.enter()?;
        let vm = self.host.run(guest.privileged());
        drop(inside);
        Ok(vm)
    }

    /// Guests that believe to have so much each have so much together.
    ///
    /// # Errors
    /// The kernel cannot bring them down to that.
    pub fn limit(&self, vms: &[&Vm], memory_mib: u64, mib: u64) -> anyhow::Result<()> {
        let guests = vms.iter().map(|vm| Guest { pid: vm.pid(), memory_bytes: memory_mib * MIB });
        self.cgroup.limit_guests(guests.collect(), mib * MIB)
    }
}

impl Rig {
    /// Boots a guest and brings it down to its limit.
    ///
    /// # Errors
    /// The host lacks what it needs, or does not let us.
    pub fn start(setup: &Setup<'_>) -> anyhow::Result<Rig> {
        let ground = Ground::new(setup.keeper, setup.medium)?;
        let (vm, disk) = ground.boot(setup)?;
        if setup.limit_mib < setup.memory_mib && setup.keeper != Keeper::Nobody {
            setup.keeper.limit(&vm, setup.limit_mib);
            if !setup.keeper.is_ebb() {
                ground.limit(&[&vm], setup.memory_mib, setup.limit_mib)?;
            }
        }
        // Asking forgets.
        ground.cgroup.peak_bytes()?;
        Ok(Rig { vm, disk, ground, memory_mib: setup.memory_mib, is_ebb: setup.keeper.is_ebb() })
    }

    /// What went over the drives so far.
    ///
    /// # Errors
    /// As the file system's.
    pub fn traffic(&self) -> anyhow::Result<Both> {
        Ok(Both { disk: self.disk.traffic()?, swap: self.ground.swap.traffic()? })
    }

    /// What the host gives for the guest's memory.
    ///
    /// # Errors
    /// As the file system's.
    pub fn guest_mib(&self) -> anyhow::Result<u64> {
        if self.is_ebb {
            return Ok(self.vm.host_bytes() / MIB);
        }
        let memory_bytes = self.memory_mib * MIB;
        Ok(warden::guest_bytes(Guest { pid: self.vm.pid(), memory_bytes })? / MIB)
    }

    /// The most memory that all processes took together since this was asked last.
    ///
    /// # Errors
    /// As the file system's.
    pub fn peak_mib(&self) -> anyhow::Result<u64> {
        Ok(self.ground.cgroup.peak_bytes()? / MIB)
    }
}

impl<'a> Setup<'a> {
    /// A guest of one processor that believes to have the first of these, and has the second.
    pub fn new(
        keeper: Keeper,
        medium: Medium,
        [memory_mib, limit_mib]: [u64; 2],
        image: &'a Path,
    ) -> Setup<'a> {
        Setup { keeper, medium, memory_mib, limit_mib, cpus: 1, append: "", image }
    }

    fn guest(&self, disk: &Drive) -> vmtest::Guest {
        let guest = vmtest::Guest::debian("6.1-cloud")
            .append(self.append)
            .memory(&format!("{}M", self.memory_mib))
            .cpus(self.cpus);
        // What Ebb starts has QEMU's own default, and no limit but on the guest's memory.
        let guest = match self.limit_mib < self.memory_mib {
            true => guest.accelerator(TRANSLATOR),
            false => guest,
        };
        let device = disk.device().display();
        let guest = match self.keeper {
            Keeper::Anonymous | Keeper::Zswap | Keeper::Balloon => guest.ram("ram"),
            Keeper::Nobody | Keeper::Memfd => guest.ram("memfd,share=on"),
            _ => return self.with_balloon(guest.backing("small").own_device(disk.device())),
        };
        self.with_balloon(guest.qemu_args(&format!(
            "-drive file={device},if=none,id=disk,format=raw,cache=none,aio=io_uring \
             -device virtio-blk-pci,drive=disk,logical_block_size=4096,physical_block_size=4096"
        )))
    }

    fn with_balloon(&self, guest: vmtest::Guest) -> vmtest::Guest {
        match self.keeper.has_balloon() {
            true => guest.qemu_args("-device virtio-balloon-pci,id=balloon"),
            false => guest,
        }
    }
}

impl std::ops::Sub for Both {
    type Output = Both;

    fn sub(self, before: Both) -> Both {
        Both { disk: self.disk - before.disk, swap: self.swap - before.swap }
    }
}

/// An image with an ext4 that `fill` puts files on; kept in `directory`.
///
/// # Errors
/// The host does not let us, or as `fill`.
pub fn image(
    directory: &Path,
    bytes: u64,
    fill: impl FnOnce(&Path) -> anyhow::Result<()>,
) -> anyhow::Result<PathBuf> {
    let path = directory.join("template.img");
    let drive = Drive::new(&directory.join("making.img"), Content::Empty(bytes), Medium::Ssd)?;
    medium::format(&drive)?;
    let mounted = Mounted::on(&drive, &directory.join("image"))?;
    fill(mounted.path()).context("what the guest is to find on its disk")?;
    drop(mounted);
    // The drive's own file goes with it.
    std::fs::hard_link(directory.join("making.img"), &path)?;
    Ok(path)
}
