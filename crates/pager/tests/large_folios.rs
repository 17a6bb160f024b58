//! Memory in huge pages and in parts of them: no page of zeros comes to where content is
//! elsewhere. The guest is this very process.

#[allow(dead_code)]
#[path = "consistency/machine.rs"]
mod machine;

use std::os::fd::AsFd;
use std::sync::Arc;

use ebb_ledger::Ledger;
use ebb_pager::{FaultThread, Grain, NoDevices, NoDisk, NothingKnown, Pager, Parts, RefillThreads};
use ebb_store::{Protection, SwapFile};
use ebb_sys::process::Process;
use ebb_units::{FrameRange, Gfn};
use vmtest::{HostSetting, require};

use machine::{Machine, new_uffd, page_of};

const ALL: FrameRange = FrameRange::new(Gfn(0), 512);

fn available() -> Result<HostSetting, String> {
    new_uffd().map_err(|error| format!("no userfaultfd: {error}"))?;
    HostSetting::shared_huge_pages()
}

struct Daemon {
    machine: Machine,
    pager: Arc<Pager>,
    _threads: (RefillThreads, FaultThread),
}

impl Daemon {
    fn new(machine: Machine, grain: Grain) -> Daemon {
        let ledger = Ledger::create(&machine.run().join("ledger"), machine.ram.end()).unwrap();
        let store = SwapFile::open(&machine.swap(), machine.run(), 512, Protection::Encrypted);
        let parts = Parts {
            ram: Arc::clone(&machine.ram),
            ledger,
            uffd: machine.uffd(),
            grain,
            devices: Box::new(NoDevices),
            store: Box::new(store.unwrap()),
            disk: Box::new(NoDisk),
        };
        let pager = Arc::new(Pager::new(parts).unwrap().0);
        pager.watch_all().unwrap();
        let vmm = Process::own().unwrap().as_fd().try_clone_to_owned().unwrap();
        let ended = |why| panic!("the fault thread ended: {why:?}");
        let refills = RefillThreads::start(&pager, 1).unwrap();
        let faults = FaultThread::start(Arc::clone(&pager), vmm, ended).unwrap();
        Daemon { machine, pager, _threads: (refills, faults) }
    }

    fn fill(&self) {
        let guest = self.machine.guest();
        ALL.frames().for_each(|gfn| guest.write(gfn, &page_of(gfn.0 + 2)));
    }

    /// Frames in which the guest finds something else than [`Daemon::fill`] has put there.
    fn wrong(&self) -> Vec<Gfn> {
        let guest = self.machine.guest();
        ALL.frames().filter(|gfn| guest.read(*gfn) != page_of(gfn.0 + 2)).collect()
    }
}

/// A huge frame is elsewhere but for one frame, which the VMM has punched, as a balloon does. A
/// device writes to that hole by the daemon's own mapping, which may get huge pages.
#[test]
fn a_pin_on_a_hole_brings_no_huge_page() {
    let setting = available();
    require!(setting.as_ref());
    let machine = Machine::new();
    let _ = machine.ram.files()[0].mapping.use_huge_pages(true);
    let daemon = Daemon::new(machine, Grain::Huge);
    let (pager, frame) = (&daemon.pager, FrameRange::new(Gfn(7), 1));
    daemon.fill();
    let all: Vec<Gfn> = ALL.frames().collect();
    assert_eq!(pager.evict(&all, &NothingKnown).unwrap().frames(), 512);
    assert!(daemon.machine.guest().read(frame.start) == page_of(9));
    // It, and those that came with it.
    let back: Vec<Gfn> =
        ALL.frames().filter(|gfn| daemon.machine.in_file(*gfn).is_some()).collect();
    back.iter().for_each(|gfn| pager.ram().punch(FrameRange::new(*gfn, 1)).unwrap());
    pager.pin(frame, true).unwrap();
    Machine::put(pager.ram(), frame.start, &page_of(9));
    pager.unpin(frame);
    let punched: Vec<Gfn> = back.into_iter().filter(|gfn| *gfn != frame.start).collect();
    assert!(punched.len() < 256 && daemon.wrong() == punched);
}
