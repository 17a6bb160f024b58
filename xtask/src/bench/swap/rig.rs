//! The environment of guests with less memory than they believe to have.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use vmtest::{Host, HostSetting, Scratch, Vm};

use super::cgroup::Cgroup;
use super::held::{Held, Sample};
use super::keeper::Keeper;
use super::linux::{Swapping, huge_pages};
use super::medium::{self, Content, Drive, Medium, Mounted, Traffic};
use super::pin::{self, Pin};
use super::pool::Pooled;
use super::setup::Setup;
use super::warden::{self, Guest, Waits};
use crate::bench::blocks::HostFails;
use crate::bench::cpu;
use crate::bench::held::Holders;
use crate::bench::sweep;
use crate::guard::{guard, reason};
use crate::interrupt;

const MIB: u64 = 1 << 20;
/// Size of the disk to swap to, in percent of what guests believe to have.
const SWAP_PERCENT: u64 = 300;
/// Number of guests that boot at once.
const AT_ONCE: usize = 2;
/// Longest time for a job. A guest whose job takes longer has failed.
const PATIENCE: Duration = Duration::from_secs(480);
/// Time between two samples of a guest's memory: a sample takes some 12 ms of a processor.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The environment of guests: a control group, something to swap to, and a daemon of their own.
pub struct Ground {
    // The fields are dropped in this order.
    host: Host,
    keeper: Keeper,
    swapping: Option<Swapping>,
    _swap_directory: Option<Mounted>,
    cgroup: Cgroup,
    swap: Drive,
    pin: Pin,
    files: Scratch,
    /// QEMU's own memory gets huge pages on all sides.
    _huge_pages: HostSetting,
}

/// A guest with its disk at `/mnt`, and everything that serves it.
pub struct Rig {
    // The fields are dropped in this order.
    pub vm: Vm,
    disk: Drive,
    ground: Ground,
    keeper: Keeper,
    memory_mib: u64,
    limit_mib: u64,
}

/// Traffic of both drives.
#[derive(Clone, Copy, Default, Debug)]
pub struct Both {
    pub disk: Traffic,
    pub swap: Traffic,
}

/// Processor time so far, in seconds.
#[derive(Clone, Copy, Debug)]
pub struct Ran {
    /// Time of QEMU and, if there is one, the daemon: of all their threads, also those that have
    /// ended.
    pub group: f64,
    /// Time of everything on the host, the kernel's own threads included, except this benchmark.
    pub host: f64,
    /// Time taken by other VMs of the machine beneath.
    pub stolen: f64,
}

impl Ground {
    /// Makes the environment. The array is what all guests on it believe to have, and what they
    /// have.
    ///
    /// # Errors
    /// The host lacks what it needs, or does not permit it.
    pub fn new(
        keeper: Keeper,
        medium: Medium,
        [memory_mib, limit_mib]: [u64; 2],
    ) -> anyhow::Result<Ground> {
        interrupt::check()?;
        let huge_pages = huge_pages().context(HostFails)?;
        let files = sweep::scratch()?;
        let pin = Pin::new(files.path()).context(HostFails)?;
        let content = Content::Empty(memory_mib * MIB * SWAP_PERCENT / 100);
        let swap = Drive::new(&files.path().join("swap.img"), content, medium);
        let swap = swap.context(HostFails)?;
        let cgroup = Cgroup::new("vm").context(HostFails)?;
        swap.throttle(&cgroup, medium).context(HostFails)?;
        let (mut swapping, mut swap_directory) = (None, None);
        let host = Host::in_memory().unwrap_or_default();
        // With rseq, the kernel touches memory of QEMU's threads that it cannot have back at once,
        // and kills them for it.
        host.set("GLIBC_TUNABLES", "glibc.pthread.rseq=0");
        match keeper.linux() {
            None => {
                medium::format(&swap)?;
                let mounted = Mounted::on(&swap, &files.path().join("swap"))?;
                host.set("EBB_SWAP_DIR", mounted.path());
                keeper.setting().into_iter().for_each(|(name, value)| host.set(name, value));
                swap_directory = Some(mounted);
            }
            Some(way) => {
                swapping = Some(Swapping::new(way, &swap, [memory_mib * MIB, limit_mib * MIB])?)
            }
        }
        Ok(Ground {
            host,
            keeper,
            swapping,
            _swap_directory: swap_directory,
            cgroup,
            swap,
            pin,
            files,
            _huge_pages: huge_pages,
        })
    }

    /// Boots a guest, which still has all its memory.
    ///
    /// # Errors
    /// Those of [`Ground::new`], or the guest's VM differs from all others in more than it may.
    pub fn boot(&self, setup: &Setup<'_>) -> anyhow::Result<(Vm, Drive)> {
        self.boot_all(setup, 1)?.pop().context("a guest")
    }

    /// Boots several guests, some at once.
    ///
    /// # Errors
    /// Those of [`Ground::boot`].
    pub fn boot_all(&self, setup: &Setup<'_>, count: u64) -> anyhow::Result<Vec<(Vm, Drive)>> {
        if let Some(way) = setup.keeper.linux() {
            let pinned = self.pin.environment(way, setup.memory_mib * MIB);
            pinned.into_iter().for_each(|(name, value)| self.host.set(name, value));
        }
        let mut disks: Vec<Drive> =
            (0..count).map(|_| self.disk(setup)).collect::<Result<_, _>>()?;
        let inside = self.cgroup.enter()?;
        let mut booted = Vec::new();
        while !disks.is_empty() {
            // The first guest starts the daemon.
            let most = if booted.is_empty() { 1 } else { AT_ONCE.min(disks.len()) };
            let some: Vec<Drive> = disks.drain(..most).collect();
            let vms = thread::scope(|scope| {
                let each = |disk| scope.spawn(move || guard(|| self.start(setup, disk)));
                let jobs: Vec<_> = some.iter().map(each).collect();
                let ended = jobs.into_iter().map(|job| job.join());
                let ended = ended.map(|vm| vm.unwrap_or_else(|panic| Err(reason(&*panic))));
                ended.collect::<anyhow::Result<Vec<Vm>>>()
            })?;
            booted.extend(vms.into_iter().zip(some));
        }
        drop(inside);
        for (vm, _) in &booted {
            vm.guest("mount ext4 /dev/vda /mnt");
            if setup.keeper.is_ebb() {
                vm.wait_trusted();
            }
        }
        Ok(booted)
    }

    fn disk(&self, setup: &Setup<'_>) -> anyhow::Result<Drive> {
        let (_, file) = tempfile::NamedTempFile::new_in(self.files.path())?.keep()?;
        let disk = Drive::new(&file, Content::Copy(setup.image), setup.medium);
        let disk = disk.context(HostFails)?;
        disk.throttle(&self.cgroup, setup.medium)?;
        Ok(disk)
    }

    fn start(&self, setup: &Setup<'_>, disk: &Drive) -> anyhow::Result<Vm> {
        let guest = setup.guest(disk.device())?;
        let vm = match setup.keeper.is_ebb() {
            true => self.host.run(guest.clone()),
            false => self.host.alike(guest.clone()),
        };
        setup.check(&guest, &vm)?;
        if setup.keeper.linux().is_some() {
            pin::check(self::guest(&vm, setup.memory_mib))?;
        }
        vm.console().be_patient(PATIENCE);
        Ok(vm)
    }

    /// Boots another guest that Ebb manages, without a disk.
    ///
    /// # Errors
    /// Those of [`Ground::new`].
    pub fn run(&self, guest: vmtest::Guest) -> anyhow::Result<Vm> {
        let inside = self.cgroup.enter()?;
        let vm = self.host.run(guest.privileged());
        drop(inside);
        Ok(vm)
    }

    /// Limits the memory that all guests have together. `None` means that nobody limits them who
    /// does not do so already.
    ///
    /// # Errors
    /// The kernel cannot bring them down to that.
    pub fn limit(&self, mib: Option<u64>) -> anyhow::Result<()> {
        match mib {
            Some(mib) => self.cgroup.limit_guests(mib * MIB, self.pooled()),
            None => self.cgroup.look_at_guests(),
        }
    }

    /// Bounds all memory of the group, so that the guests have `host_mib` of it: to the pilot, the
    /// group is the host.
    ///
    /// # Errors
    /// A file operation fails, or other VMs run on this machine.
    pub fn bound(&self, vms: &[&Vm], (memory_mib, host_mib): (u64, u64)) -> anyhow::Result<()> {
        let guests = self.look(vms, memory_mib)?.guests;
        self.cgroup.bound(host_mib * MIB, (guests * MIB as f64) as u64).context(HostFails)
    }

    /// Returns what these guests have in memory now, compressed memory included, and what their
    /// daemon has.
    ///
    /// # Errors
    /// A file operation fails.
    pub fn look(&self, vms: &[&Vm], memory_mib: u64) -> anyhow::Result<Sample> {
        let (mut bytes, mut compressed) = (self.pooled().bytes()?, 0);
        for vm in vms {
            // All sides read this, because it takes its time.
            let mapped = warden::parts(guest(vm, memory_mib))?.guest;
            bytes += if self.swapping.is_some() { mapped } else { vm.host_bytes() };
            if self.keeper.compresses() {
                compressed += vm.last_status().limit.compressed_bytes;
            }
        }
        let mib = |bytes: u64| bytes as f64 / MIB as f64;
        // Compressed memory is part of the daemon's memory, but counts as the guests'.
        let daemon = (self.daemon_mib(vms) - mib(compressed)).max(0.0);
        Ok(Sample { guests: mib(bytes + compressed), daemon })
    }

    fn daemon_mib(&self, vms: &[&Vm]) -> f64 {
        match (&self.swapping, vms.first()) {
            (None, Some(vm)) => Holders::of(vm.host()).bytes() as f64 / MIB as f64,
            _ => 0.0,
        }
    }

    /// Returns how much of these VMMs' own memory is swapped out.
    ///
    /// # Errors
    /// A file operation fails.
    pub fn own_swapped_mib(&self, vms: &[&Vm], memory_mib: u64) -> anyhow::Result<f64> {
        let each = vms.iter().map(|vm| Ok(warden::parts(guest(vm, memory_mib))?.own_swapped));
        Ok(each.sum::<anyhow::Result<u64>>()? as f64 / MIB as f64)
    }

    /// Returns [`Cgroup::waits`].
    pub fn waits(&self) -> Waits {
        self.cgroup.waits()
    }

    /// Returns the processor time so far.
    ///
    /// # Errors
    /// A file operation fails.
    pub fn ran(&self) -> anyhow::Result<Ran> {
        let me = cpu::of_all(std::process::id() as i32);
        Ok(Ran {
            group: self.cgroup.ran()?.as_secs_f64(),
            host: cpu::of_host().saturating_sub(me).as_secs_f64(),
            stolen: cpu::stolen().as_secs_f64(),
        })
    }

    /// Returns the most memory that all processes took together since the last call, with what is
    /// pooled now.
    ///
    /// # Errors
    /// A file operation fails.
    pub fn peak_mib(&self) -> anyhow::Result<f64> {
        let pooled = self.pooled().bytes()?;
        Ok((self.cgroup.peak_bytes()? + pooled) as f64 / MIB as f64)
    }

    fn pooled(&self) -> Pooled {
        self.swapping.as_ref().map_or(Pooled::Nothing, Swapping::pooled)
    }
}

impl Rig {
    /// Boots a guest and brings it down to its limit.
    ///
    /// # Errors
    /// The host lacks what it needs, or does not permit it.
    pub fn start(setup: &Setup<'_>) -> anyhow::Result<Rig> {
        let Setup { keeper, memory_mib, limit_mib, .. } = *setup;
        let ground = Ground::new(keeper, setup.medium, [memory_mib, limit_mib])?;
        let (vm, disk) = ground.boot(setup)?;
        if limit_mib < memory_mib && keeper != Keeper::Nobody {
            keeper.limit(&vm, limit_mib);
        }
        ground.limit(keeper.cgroup_limit(limit_mib, memory_mib))?;
        Ok(Rig { vm, disk, ground, keeper, memory_mib, limit_mib })
    }

    /// Returns the traffic of the drives so far.
    ///
    /// # Errors
    /// A file operation fails.
    pub fn traffic(&self) -> anyhow::Result<Both> {
        Ok(Both { disk: self.disk.traffic()?, swap: self.ground.swap.traffic()? })
    }

    /// Does the work. Returns with its result what the guest and its daemon had meanwhile, sampled
    /// alike on all sides.
    ///
    /// # Errors
    /// Those of `work`.
    pub fn watched<T>(
        &self,
        work: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<(T, Held)> {
        Held::during(LOOK_EVERY, || self.ground.look(&[&self.vm], self.memory_mib), work)
    }

    /// Returns the environment, the VM, and what its guest believes to have.
    pub fn ground(&self) -> (&Ground, [&Vm; 1], u64) {
        (&self.ground, [&self.vm], self.memory_mib)
    }

    /// Returns the guest's limit in MiB, if anybody limits it.
    pub fn held_to(&self) -> Option<u64> {
        (self.keeper != Keeper::Nobody).then_some(self.limit_mib)
    }
}

impl std::ops::Sub for Both {
    type Output = Both;

    fn sub(self, before: Both) -> Both {
        Both { disk: self.disk - before.disk, swap: self.swap - before.swap }
    }
}

fn guest(vm: &Vm, memory_mib: u64) -> Guest {
    Guest { pid: vm.pid(), memory_bytes: memory_mib * MIB }
}

/// Makes an image with an ext4 file system on which `fill` puts files. The image is in `directory`.
///
/// # Errors
/// The host does not permit it, or those of `fill`.
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
    // The drive's own file is removed with the drive.
    std::fs::hard_link(directory.join("making.img"), &path)?;
    Ok(path)
}
