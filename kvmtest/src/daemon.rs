//! What the daemon does for a VM, without the daemon.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc::Receiver;

use ebb_ledger::{Content, Ledger, Tables};
use ebb_pager::{
    DigestKey, Evicted, FaultThread, Grain, IoMapping, Judge, NoDevices, NoDisk, NothingKnown,
    Pager, PagerParts, RefillThreads, Restored,
};
use ebb_store::{Compressed, Disk, Medium, Protection, Store, SwapFile};
use ebb_sys::process::Process;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};

use crate::machine::{MAILBOX, Machine};

/// Manages a [`Machine`]. Dropping it leaves the VM as a killed daemon would: every fault waits
/// until another one recovers the VM.
pub struct Daemon {
    /// The pager. It serves faults after [`Daemon::serve`].
    pub pager: Arc<Pager>,
    /// Receives the blocks that came back because the guest wrote their metadata.
    pub restored: Receiver<Restored>,
    /// Health of the disk: how its next requests end.
    pub disk: Arc<Health>,
    faults: Option<FaultThread>,
    refills: Option<RefillThreads>,
}

impl Daemon {
    /// Attaches to a VM that nobody managed before. Nothing is watched yet.
    pub fn take(machine: &Machine, grain: Grain) -> Daemon {
        Daemon::take_with(machine, grain, Box::new(NoDevices))
    }

    /// Does what [`Daemon::take`] does, with devices that reach the memory by themselves.
    pub fn take_with(machine: &Machine, grain: Grain, devices: Box<dyn IoMapping>) -> Daemon {
        let path = machine.run_directory().join("ledger");
        let ledger = Ledger::create(&path, machine.ram().end(), Tables::WhenSplit).expect("ledger");
        Daemon::over(machine, grain, ledger, devices)
    }

    /// Recovers a VM that an earlier daemon left.
    pub fn recover(machine: &Machine, grain: Grain) -> Daemon {
        Daemon::recover_with(machine, grain, Box::new(NoDevices))
    }

    /// Does what [`Daemon::recover`] does, with devices that reach the memory by themselves.
    pub fn recover_with(machine: &Machine, grain: Grain, devices: Box<dyn IoMapping>) -> Daemon {
        let path = machine.run_directory().join("ledger");
        let mut ledger = Ledger::open(&path, machine.ram().end()).expect("ledger");
        let mut locked = Vec::new();
        ledger.recover(|frames, content| locked.push((frames, content)));
        let daemon = Daemon::over(machine, grain, ledger, devices);
        for (frames, content) in &locked {
            daemon
                .pager
                .residency()
                .settle_locked(*frames, *content)
                .expect("settle locked frames");
        }
        daemon.pager.returner().settle().expect("settle");
        for (frames, _) in locked.iter().filter(|(_, content)| *content == Content::Resident) {
            daemon.pager.frames().unprotect(*frames).expect("unprotect");
        }
        daemon
    }

    fn over(
        machine: &Machine,
        grain: Grain,
        ledger: Ledger,
        devices: Box<dyn IoMapping>,
    ) -> Daemon {
        let slots = machine.ram().bytes() / FRAME_BYTES;
        let run = machine.run_directory();
        let health = Arc::new(Health::default());
        let disk = Disk::open(&run.join("swap"), slots * FRAME_BYTES).expect("disk");
        let disk = Failing { disk, health: Arc::clone(&health) };
        let store = SwapFile::over(disk, run, slots, Protection::Encrypted);
        let parts = PagerParts {
            puncher: machine.puncher(),
            ledger,
            uffd: machine.uffd(),
            grain,
            devices,
            store: compressing(run, store.expect("store")),
            disk: Box::new(NoDisk),
            digest_key: Arc::new(DigestKey::random().expect("a key")),
        };
        let (pager, restored) = Pager::new(parts).expect("pager");
        Daemon { pager: Arc::new(pager), restored, disk: health, faults: None, refills: None }
    }

    /// Limits the store's compressed memory to `bytes`; at first the limit is 0. Fails with the
    /// reason if there can be none.
    pub fn compress(&self, bytes: u64) -> Result<(), String> {
        self.pager.residency().limit_store_memory(bytes).expect("memory for the store");
        match self.pager.residency().store_usage().memory_limit_bytes == bytes {
            true => Ok(()),
            false => Err("there is no tmpfs at /dev/shm".into()),
        }
    }

    /// Starts the fault thread. Faults that a dead thread had read are read again.
    pub fn serve(&mut self) {
        let this = Process::open(std::process::id() as i32).expect("pidfd");
        let vmm = this.as_fd().try_clone_to_owned().expect("dup");
        let ended = |why| panic!("the fault thread ended: {why:?}");
        let faults = FaultThread::start(Arc::clone(&self.pager), vmm, ended);
        self.faults = Some(faults.expect("fault thread"));
        self.refills = Some(RefillThreads::start(&self.pager, 2).expect("refill threads"));
        self.pager.frames().wake_all().expect("wake");
    }

    /// Ends the fault thread. Every fault waits from then on.
    pub fn stop_serving(&mut self) {
        self.faults = None;
        self.refills = None;
    }

    /// Evicts these frames, but not the mailbox, which the test itself writes.
    pub fn evict(&self, frames: FrameRange) -> Evicted {
        self.evict_by(frames, &NothingKnown)
    }

    /// Does what [`Daemon::evict`] does, with a judge.
    pub fn evict_by(&self, frames: FrameRange, judge: &dyn Judge) -> Evicted {
        let frames: Vec<Gfn> = frames.frames().filter(|&gfn| gfn != MAILBOX).collect();
        self.pager.evictor().evict(&frames, judge).expect("evict")
    }
}

const COMPRESSED_BYTES: u64 = 1 << 20;

/// Wraps the disk in a store with room for compressed pages, none of which is used until it is
/// allowed.
fn compressing(run: &Path, disk: SwapFile<Failing>) -> Box<dyn Store> {
    if !ebb_store::is_in_memory(run).expect("run directory") {
        return Box::new(disk);
    }
    let store = Compressed::open(run, COMPRESSED_BYTES, disk).expect("compressed store");
    store.limit_memory(0).expect("no more memory");
    Box::new(store)
}

/// Whether a disk's requests succeed.
#[derive(Default)]
pub struct Health {
    /// Whether writes fail for want of space.
    pub full: AtomicBool,
    /// Whether reads fail with errors.
    pub blind: AtomicBool,
    /// Number of reads that failed.
    pub failed_reads: AtomicU64,
}

/// A real disk that fails on command.
struct Failing {
    disk: Disk,
    health: Arc<Health>,
}

impl Medium for Failing {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        if self.health.blind.load(SeqCst) {
            self.health.failed_reads.fetch_add(1, SeqCst);
            return Err(rustix::io::Errno::IO.into());
        }
        self.disk.read_at(offset, bytes)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<usize> {
        match self.health.full.load(SeqCst) {
            true => Err(rustix::io::Errno::NOSPC.into()),
            false => self.disk.write_at(offset, bytes),
        }
    }

    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.disk.discard(offset, bytes)
    }

    fn is_direct(&self) -> bool {
        self.disk.is_direct()
    }
}
