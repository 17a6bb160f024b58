//! What guests with less memory than they believe stand on.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use vmtest::{Host, Scratch, Vm};

use super::cgroup::Cgroup;
use super::keeper::Keeper;
use super::linux::{Pooled, Swapping};
use super::medium::{self, Content, Drive, Medium, Mounted, Traffic};
use super::setup::Setup;
use super::warden::{self, Guest};
use crate::bench::cpu;
use crate::bench::held::Holders;
use crate::interrupt;

const MIB: u64 = 1 << 20;
/// The disk to swap to, in percent of what guests believe to have.
const SWAP_PERCENT: u64 = 300;
/// A guest whose job takes longer does not get through.
const PATIENCE: Duration = Duration::from_secs(480);
/// What is on its way is beyond a limit for a moment; a guest that has more for long is not held.
const HELD_PERCENT: u64 = 108;

/// What guests stand on: a control group, something to swap to, and a daemon of their own.
pub struct Ground {
    // Taken away in this order.
    host: Host,
    swapping: Option<Swapping>,
    _swap_directory: Option<Mounted>,
    cgroup: Cgroup,
    swap: Drive,
    files: Scratch,
}

/// A guest with its disk at `/mnt`, and all that holds it.
pub struct Rig {
    // Taken away in this order.
    pub vm: Vm,
    disk: Drive,
    ground: Ground,
    keeper: Keeper,
    memory_mib: u64,
    limit_mib: u64,
}

/// What went over both drives.
#[derive(Clone, Copy, Default, Debug)]
pub struct Both {
    pub disk: Traffic,
    pub swap: Traffic,
}

/// Seconds of processors so far.
#[derive(Clone, Copy, Debug)]
pub struct Ran {
    /// Of QEMU and, where there is one, the daemon: of all threads, also those that have ended.
    pub group: f64,
    /// Of all that the host did, its kernel's own threads among it.
    pub host: f64,
}

impl Ground {
    /// Makes it; `memory_mib`: what all guests on it believe to have.
    ///
    /// # Errors
    /// The host lacks what it needs, or does not let us.
    pub fn new(keeper: Keeper, medium: Medium, memory_mib: u64) -> anyhow::Result<Ground> {
        interrupt::check()?;
        let files = Scratch::new("ebb-bench-")?;
        let content = Content::Empty(memory_mib * MIB * SWAP_PERCENT / 100);
        let swap = Drive::new(&files.path().join("swap.img"), content, medium)?;
        let cgroup = Cgroup::new("vm")?;
        swap.throttle(&cgroup, medium)?;
        let (mut swapping, mut swap_directory) = (None, None);
        let host = Host::in_memory().unwrap_or_default();
        // Of QEMU's threads, too, the kernel touches memory that it cannot have back at once, and
        // kills them for it.
        host.set("GLIBC_TUNABLES", "glibc.pthread.rseq=0");
        match keeper.linux() {
            None => {
                medium::format(&swap)?;
                let mounted = Mounted::on(&swap, &files.path().join("swap"))?;
                host.set("EBB_SWAP_DIR", mounted.path());
                keeper.setting().into_iter().for_each(|(name, value)| host.set(name, value));
                swap_directory = Some(mounted);
            }
            Some(way) => swapping = Some(Swapping::new(way, &swap, memory_mib * MIB)?),
        }
        Ok(Ground { host, swapping, _swap_directory: swap_directory, cgroup, swap, files })
    }

    /// Boots a guest on it that has all its memory still.
    ///
    /// # Errors
    /// As [`Ground::new`], or it is not on the terms of all others.
    pub fn boot(&self, setup: &Setup<'_>) -> anyhow::Result<(Vm, Drive)> {
        let (_, file) = tempfile::NamedTempFile::new_in(self.files.path())?.keep()?;
        let disk = Drive::new(&file, Content::Copy(setup.image), setup.medium)?;
        disk.throttle(&self.cgroup, setup.medium)?;
        let guest = setup.guest(disk.device())?;
        let inside = self.cgroup.enter()?;
        let vm = match setup.keeper.is_ebb() {
            true => self.host.run(guest.clone()),
            false => self.host.alike(guest.clone()),
        };
        drop(inside);
        setup.check(&guest, &vm)?;
        vm.be_patient(PATIENCE);
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
        self.cgroup.limit_guests(guests.collect(), mib * MIB, self.pooled())
    }

    /// What these guests have in memory, of theirs and compressed.
    ///
    /// # Errors
    /// As the file system's.
    pub fn guests_mib(&self, vms: &[&Vm], memory_mib: u64) -> anyhow::Result<f64> {
        let each = vms.iter().map(|vm| match self.swapping {
            None => Ok(vm.host_bytes() + vm.last_status().limit.compressed_bytes),
            Some(_) => warden::guest_bytes(Guest { pid: vm.pid(), memory_bytes: memory_mib * MIB }),
        });
        let all: u64 = each.sum::<anyhow::Result<u64>>()?;
        Ok((all + self.pooled().bytes()?) as f64 / MIB as f64)
    }

    /// What the daemon of these guests has for itself; nothing without one.
    pub fn daemon_mib(&self, vms: &[&Vm]) -> f64 {
        match (&self.swapping, vms.first()) {
            (None, Some(vm)) => Holders::of(vm.host()).bytes() as f64 / MIB as f64,
            _ => 0.0,
        }
    }

    /// That guests have no more than their limit now, all of them together.
    ///
    /// # Errors
    /// They have: this way does not hold them.
    pub fn check_held(&self, vms: &[&Vm], memory_mib: u64, limit_mib: u64) -> anyhow::Result<()> {
        let (has, may) = (self.guests_mib(vms, memory_mib)?, limit_mib * HELD_PERCENT / 100);
        ensure!(has <= may as f64, "{has:.0} MiB of {limit_mib} are taken: it does not hold");
        Ok(())
    }

    /// What processors did for them so far.
    ///
    /// # Errors
    /// As the file system's.
    pub fn ran(&self) -> anyhow::Result<Ran> {
        let host = cpu::of_host().as_secs_f64();
        Ok(Ran { group: self.cgroup.ran()?.as_secs_f64(), host })
    }

    fn pooled(&self) -> Pooled {
        self.swapping.as_ref().map_or(Pooled::Nothing, Swapping::pooled)
    }
}

impl Rig {
    /// Boots a guest and brings it down to its limit.
    ///
    /// # Errors
    /// The host lacks what it needs, or does not let us.
    pub fn start(setup: &Setup<'_>) -> anyhow::Result<Rig> {
        let Setup { keeper, memory_mib, limit_mib, .. } = *setup;
        let ground = Ground::new(keeper, setup.medium, memory_mib)?;
        let (vm, disk) = ground.boot(setup)?;
        if limit_mib < memory_mib && keeper != Keeper::Nobody {
            keeper.limit(&vm, limit_mib);
            if !keeper.is_ebb() {
                ground.limit(&[&vm], memory_mib, limit_mib)?;
            }
        }
        // Asking forgets.
        ground.cgroup.peak_bytes()?;
        Ok(Rig { vm, disk, ground, keeper, memory_mib, limit_mib })
    }

    /// What went over the drives so far.
    ///
    /// # Errors
    /// As the file system's.
    pub fn traffic(&self) -> anyhow::Result<Both> {
        Ok(Both { disk: self.disk.traffic()?, swap: self.ground.swap.traffic()? })
    }

    /// As [`Ground::ran`].
    ///
    /// # Errors
    /// As the file system's.
    pub fn ran(&self) -> anyhow::Result<Ran> {
        self.ground.ran()
    }

    /// What the host gives for the guest's memory, compressed memory among it.
    ///
    /// # Errors
    /// As the file system's.
    pub fn guest_mib(&self) -> anyhow::Result<f64> {
        self.ground.guests_mib(&[&self.vm], self.memory_mib)
    }

    /// As [`Ground::daemon_mib`].
    pub fn daemon_mib(&self) -> f64 {
        self.ground.daemon_mib(&[&self.vm])
    }

    /// That the guest has no more than its limit now.
    ///
    /// # Errors
    /// It has: this way does not hold it.
    pub fn check_held(&self) -> anyhow::Result<()> {
        match self.keeper {
            Keeper::Nobody => Ok(()),
            _ => self.ground.check_held(&[&self.vm], self.memory_mib, self.limit_mib),
        }
    }

    /// The most memory that all processes took together since this was asked last, with what is
    /// pooled now.
    ///
    /// # Errors
    /// As the file system's.
    pub fn peak_mib(&self) -> anyhow::Result<f64> {
        let pooled = self.ground.pooled().bytes()?;
        Ok((self.ground.cgroup.peak_bytes()? + pooled) as f64 / MIB as f64)
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
