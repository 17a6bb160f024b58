//! Where a VM of the soak is: one kind of VM, again and again if it is killed.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_api::VmName;

use crate::disk::Disk;
use crate::guest::Guest;
use crate::host::Host;
use crate::process;
use crate::vm::Vm;

const MIB: u64 = 1 << 20;
const KERNEL: &str = "6.1-cloud";
/// What Linux needs to take plugged memory.
const MOVABLE: &str = "memhp_default_state=online_movable";
const FILE_SYSTEM: &str = "ext4";

/// What a VM is like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Release mode, and a disk that Ebb serves.
    Served,
    /// Strict mode, two processors.
    Strict,
    /// Another process serves its disk, so that only free memory can be taken.
    Foreign,
    /// Virtio-mem.
    Grows,
    /// A QEMU that somebody else has started.
    Attached,
    /// A tier in a file.
    Tiered,
}

/// The kinds, in the order in which a soak takes them.
pub const KINDS: [Kind; 6] =
    [Kind::Served, Kind::Strict, Kind::Foreign, Kind::Grows, Kind::Attached, Kind::Tiered];

impl Kind {
    /// Returns the memory with which it begins.
    pub fn memory_mib(self) -> u64 {
        match self {
            Kind::Served | Kind::Strict => 448,
            Kind::Foreign | Kind::Grows | Kind::Attached | Kind::Tiered => 384,
        }
    }

    /// Returns the most memory that it can have.
    fn max_mib(self) -> u64 {
        if self == Kind::Grows { 640 } else { self.memory_mib() }
    }

    /// Whether it has a disk, at `/mnt` in the guest.
    pub fn has_disk(self) -> bool {
        matches!(self, Kind::Served | Kind::Foreign)
    }

    fn guest(self, files: &Path, disk: Option<&Disk>, number: usize) -> Guest {
        let guest = Guest::debian(KERNEL).memory(&format!("{}M", self.memory_mib())).cpus(1);
        match (self, disk) {
            (Kind::Served, Some(disk)) => guest.mode("release").own_disk(disk),
            (Kind::Foreign, Some(disk)) => guest.served_disk(disk),
            (Kind::Strict | Kind::Attached, _) => guest.cpus(2).mode("strict"),
            (Kind::Grows, _) => guest.grow_to(&format!("{}M", self.max_mib())).append(MOVABLE),
            (Kind::Tiered, _) => {
                let file = files.join(format!("tier{number}"));
                guest.tier(&format!("dram=192M,file={}:192M", file.display()))
            }
            _ => guest,
        }
    }
}

/// A VM that runs, as requests and kills need it.
#[derive(Clone)]
pub struct Running {
    pub name: VmName,
    pub pid: i32,
    pub qmp: PathBuf,
    pub memory_bytes: u64,
    pub max_bytes: u64,
    /// Ebb does not manage it now.
    pub is_detached: bool,
    /// Its QEMU is killed, or about to be.
    is_doomed: bool,
}

/// A kind of VM, the one that runs now, and the process that serves its disk.
pub struct Place {
    pub kind: Kind,
    running: Mutex<Option<Running>>,
    server: Mutex<Option<Disk>>,
}

/// A VM that was started, with its disk if nobody else keeps that.
pub struct Started {
    // Dropped first: the disk is in use until then.
    pub vm: Vm,
    pub disk: Option<Disk>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Place {
    pub fn new(kind: Kind) -> Place {
        Place { kind, running: Mutex::default(), server: Mutex::default() }
    }

    /// Starts the VM number `number` of the soak, with its files in `files`, and waits until its
    /// guest answers.
    ///
    /// # Panics
    /// It does not start.
    pub fn start(&self, host: &Host, files: &Path, number: usize) -> Started {
        let disk = self
            .kind
            .has_disk()
            .then(|| Disk::new_in(files, &format!("disk{number}"), "192M").formatted(FILE_SYSTEM));
        let (guest, disk) = match (self.kind, disk) {
            (Kind::Foreign, Some(mut disk)) => {
                disk.start();
                let guest = self.kind.guest(files, Some(&disk), number);
                *lock(&self.server) = Some(disk);
                (guest, None)
            }
            (_, disk) => (self.kind.guest(files, disk.as_ref(), number), disk),
        };
        let vm = match self.kind {
            Kind::Attached => host.qemu(guest),
            _ => host.run(guest),
        };
        let mut qmp = vm.qmp_socket();
        if self.kind == Kind::Attached {
            vm.attach();
            qmp = vm.own_qmp_socket();
        }
        *lock(&self.running) = Some(Running {
            name: vm.name().parse().expect("a name"),
            pid: vm.pid(),
            qmp,
            memory_bytes: self.kind.memory_mib() * MIB,
            max_bytes: self.kind.max_mib() * MIB,
            is_detached: false,
            is_doomed: false,
        });
        Started { vm, disk }
    }

    /// The VM that runs, if it is not about to end.
    pub fn running(&self) -> Option<Running> {
        lock(&self.running).clone().filter(|running| !running.is_doomed)
    }

    /// Notes whether Ebb manages the VM of this name.
    pub fn set_detached(&self, name: &VmName, is_detached: bool) {
        if let Some(running) = lock(&self.running).as_mut().filter(|vm| vm.name == *name) {
            running.is_detached = is_detached;
        }
    }

    /// Kills the QEMU. Returns whether there was one.
    pub fn doom(&self) -> bool {
        let mut running = lock(&self.running);
        let Some(vm) = running.as_mut().filter(|vm| !vm.is_doomed) else { return false };
        vm.is_doomed = true;
        let pid = vm.pid;
        drop(running);
        process::kill(pid);
        true
    }

    /// Whether its QEMU was killed on purpose.
    pub fn is_doomed(&self) -> bool {
        lock(&self.running).as_ref().is_some_and(|vm| vm.is_doomed)
    }

    /// Forgets the VM, which ends.
    pub fn leave(&self) {
        *lock(&self.running) = None;
    }

    /// Kills the process that serves the disk, and starts it again after what `meanwhile` does.
    /// Returns whether there was one.
    pub fn restart_server(&self, meanwhile: impl FnOnce()) -> bool {
        let mut server = lock(&self.server);
        let Some(disk) = server.as_mut() else { return false };
        disk.kill9();
        meanwhile();
        disk.start();
        true
    }

    /// Does the work while no process that serves the disk, if there is one, is killed: QEMU 7.2
    /// does not notice that, if it happens while the guest has no driver, nor a later death.
    pub fn served<T>(&self, work: impl FnOnce() -> T) -> T {
        let _server = self.kind.has_disk().then(|| lock(&self.server));
        work()
    }

    /// Keeps the guest from [`Place::served`] work, unless it is at it: the process that serves its
    /// disk may be killed meanwhile.
    pub fn hold(&self) -> Option<impl Sized> {
        self.server.try_lock().ok()
    }

    /// Checks the file system of a disk that nobody uses any more.
    ///
    /// # Panics
    /// It is damaged.
    pub fn check_disk(&self, started: Started) {
        let Started { vm, disk } = started;
        drop(vm);
        let disk = disk.or_else(|| lock(&self.server).take());
        disk.into_iter().for_each(|mut disk| disk.check(FILE_SYSTEM));
    }
}
