//! What the daemon does for a VM, without the daemon.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use ebb_ledger::{Content, Ledger};
use ebb_pager::{
    Evicted, FaultThread, Grain, Judge, NoDevices, NoDisk, NothingKnown, Pager, Parts,
    RefillThreads, Restored,
};
use ebb_store::{Protection, SwapFile};
use ebb_sys::process::Process;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};

use crate::machine::{MAILBOX, Machine};

/// Holds a [`Machine`]. When it is dropped the VM is left as it is, as by a
/// daemon that was killed: adopt it, or whoever faults waits.
pub struct Daemon {
    /// Serves its faults, once told to.
    pub pager: Arc<Pager>,
    /// The blocks that were given back because the guest wrote their metadata.
    pub restored: Receiver<Restored>,
    faults: Option<FaultThread>,
    refills: Option<RefillThreads>,
}

impl Daemon {
    /// Takes a VM that nobody held before. Nothing is watched yet.
    pub fn take(machine: &Machine, grain: Grain) -> Daemon {
        let path = machine.run_directory().join("ledger");
        Daemon::over(machine, grain, Ledger::create(&path, machine.ram().end()).expect("ledger"))
    }

    /// Takes up a VM where a daemon before this one left it.
    pub fn adopt(machine: &Machine, grain: Grain) -> Daemon {
        let path = machine.run_directory().join("ledger");
        let mut ledger = Ledger::open(&path, machine.ram().end()).expect("ledger");
        let mut held = Vec::new();
        ledger.recover(|frames, content| held.push((frames, content)));
        let daemon = Daemon::over(machine, grain, ledger);
        daemon.pager.settle().expect("settle");
        for (frames, _) in held.iter().filter(|(_, content)| *content == Content::Resident) {
            daemon.pager.unprotect(*frames).expect("unprotect");
        }
        daemon
    }

    fn over(machine: &Machine, grain: Grain, ledger: Ledger) -> Daemon {
        let slots = machine.ram().bytes() / FRAME_BYTES;
        let run = machine.run_directory();
        let store = SwapFile::open(&run.join("swap"), run, slots, Protection::Encrypted);
        let parts = Parts {
            ram: Arc::clone(machine.ram()),
            ledger,
            uffd: machine.uffd(),
            grain,
            devices: Box::new(NoDevices),
            store: Box::new(store.expect("store")),
            disk: Box::new(NoDisk),
        };
        let (pager, restored) = Pager::new(parts).expect("pager");
        Daemon { pager: Arc::new(pager), restored, faults: None, refills: None }
    }

    /// Starts the fault thread. What a dead one had read comes again.
    pub fn serve(&mut self) {
        let this = Process::open(std::process::id() as i32).expect("pidfd");
        let vmm = this.as_fd().try_clone_to_owned().expect("dup");
        let ended = |why| panic!("the fault thread ended: {why:?}");
        let faults = FaultThread::start(Arc::clone(&self.pager), vmm, ended);
        self.faults = Some(faults.expect("fault thread"));
        self.refills = Some(RefillThreads::start(&self.pager, 2).expect("refill threads"));
        self.pager.wake_all().expect("wake");
    }

    /// Ends the fault thread: who faults waits from now on.
    pub fn stop_serving(&mut self) {
        self.faults = None;
        self.refills = None;
    }

    /// Evicts what is in these frames, but for what the test itself writes.
    pub fn evict(&self, frames: FrameRange) -> Evicted {
        self.evict_by(frames, &NothingKnown)
    }

    /// The same, with a judge.
    pub fn evict_by(&self, frames: FrameRange, judge: &dyn Judge) -> Evicted {
        let frames: Vec<Gfn> = frames.frames().filter(|&gfn| gfn != MAILBOX).collect();
        self.pager.evict(&frames, judge).expect("evict")
    }
}
