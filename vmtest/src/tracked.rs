//! A VM that the test itself manages, as the daemon does, to track it. Benchmarks use it too.

use std::os::fd::AsFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use ebb_heat::{GuestTracker, Levels, Observer, PagerTables, Roots, Round, Tracker, Walk};
use ebb_inspect::{Guest, Run};
use ebb_ledger::{Ledger, Tables};
use ebb_pager::{DigestKey, FaultThread, Grain, NoDevices, NoDisk, Pager, PagerParts, Restored};
use ebb_store::{Protection, SwapFile};
use ebb_sys::process::Process;
use ebb_sys::uffd::{Uffd, feature};
use ebb_units::{FRAME_BYTES, FrameRange};
use ebb_vm::{Puncher, Qmp, layout};
use tempfile::TempDir;

use crate::{Ran, Vm, assets};

/// The pager of a VM, and its guest.
pub struct Tracked {
    guest: Guest,
    roots: std::cell::RefCell<Roots>,
    _faults: FaultThread,
    _restored: Receiver<Restored>,
    pager: Arc<Pager>,
    _directory: TempDir,
}

impl Tracked {
    /// Attaches a QEMU that Ebb does not know.
    pub fn take(vm: &Vm) -> Tracked {
        let process = Process::open(vm.pid()).expect("QEMU runs");
        let mut qmp = Qmp::connect(&vm.own_qmp_socket()).expect("QMP");
        let ram = layout::discover(&process, &mut qmp).expect("the RAM");
        let uffd = Uffd::from(process.descriptor(make_uffd(vm)).expect("the userfaultfd"));
        uffd.handshake(feature::needed()).expect("features");
        let directory = tempfile::tempdir().expect("a directory");
        let run = directory.path();
        let slots = ram.bytes() / FRAME_BYTES;
        let store = SwapFile::open(&run.join("swap"), run, slots, Protection::Encrypted);
        let ledger = Ledger::create(&run.join("ledger"), ram.end(), Tables::WhenSplit);
        let parts = PagerParts {
            puncher: Puncher::new(ram),
            ledger: ledger.expect("a ledger"),
            uffd,
            grain: Grain::Frame,
            devices: Box::new(NoDevices),
            store: Box::new(store.expect("a store")),
            disk: Box::new(NoDisk),
            digest_key: Arc::new(DigestKey::random().expect("a key")),
        };
        let (pager, restored) = Pager::new(parts).expect("a pager");
        let pager = Arc::new(pager);
        let ended = process.as_fd().try_clone_to_owned().expect("a pidfd");
        let faults = FaultThread::start(Arc::clone(&pager), ended, |_| ()).expect("a thread");
        let guest = Guest::inspect(&pager.view(), &[]).expect("the guest is trusted");
        let metadata = guest.memmap().runs().iter().map(Run::metadata_frames);
        metadata
            .for_each(|frames| pager.frames().watch_writes(frames).expect("metadata is watched"));
        let roots = std::cell::RefCell::default();
        Tracked { guest, roots, _faults: faults, _restored: restored, pager, _directory: directory }
    }

    /// A queue for all of its memory.
    pub fn levels(&self, top_level: u8) -> Levels {
        let ram: Vec<FrameRange> =
            self.pager.ram().regions().map(|region| region.frames()).collect();
        Levels::new(&ram, top_level)
    }

    /// Runs one round.
    pub fn round(&self, walk: Walk, observer: &mut dyn Observer) -> Round {
        let tables = PagerTables::new(&self.pager);
        let mut roots = self.roots.borrow_mut();
        let mut tracker = GuestTracker::new(&tables, &self.guest, &mut roots, &|| true);
        tracker.round(walk, observer).expect("a round")
    }

    /// The frames that the guest's program uses, in order.
    pub fn frames(&self, vm: &Vm, name: &str) -> Vec<u64> {
        vm.frames(&format!("hotframes {name}"))
    }
}

/// Makes a userfaultfd in the VMM, by another process as the daemon does. Here QEMU is a child of
/// the test, and waiting for its end would take what the kernel tells its tracer.
fn make_uffd(vm: &Vm) -> i32 {
    let mut command = Command::new(assets::program_directory().join("ebbd"));
    let started = Process::open(vm.pid()).and_then(|qemu| qemu.start_ticks());
    let started = started.expect("when QEMU started").to_string();
    let number = Ran::of(command.args(["inject", "make", &vm.pid().to_string(), &started])).ok();
    number.trim().parse().expect("its number")
}
