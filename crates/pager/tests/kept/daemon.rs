//! A daemon over a VM, some of whose frames keep their slots.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use ebb_ledger::Content;
use ebb_pager::testing::{Machine, Threads, page_of, serve, watching};
use ebb_pager::{Evicted, NothingKnown, Pager, PagerParts};
use ebb_store::{Page, Store};
use ebb_units::{FrameRange, Gfn};
use testkit::until;

pub struct Daemon {
    pub machine: Machine,
    pub pager: Arc<Pager>,
    pub _threads: Threads,
}

pub fn first_of(gfn: Gfn) -> Page {
    page_of(gfn.0 + 20)
}

impl Daemon {
    pub fn over(machine: Machine, parts: PagerParts) -> Daemon {
        let pager = watching(parts);
        let _threads = serve(&pager, 1);
        Daemon { machine, pager, _threads }
    }

    pub fn new() -> Daemon {
        let machine = Machine::small();
        let parts = machine.parts();
        Daemon::over(machine, parts)
    }

    pub fn with_store(store: Box<dyn Store>) -> Daemon {
        let machine = Machine::small();
        let parts = PagerParts { store, ..machine.parts() };
        Daemon::over(machine, parts)
    }

    /// Makes frames that were saved, came back, and keep their slots.
    pub fn with_kept(self, frames: FrameRange) -> Daemon {
        frames.frames().for_each(|gfn| self.write(gfn, &first_of(gfn)));
        assert_eq!(self.evict(frames).saved, frames.count);
        self.bring_back(frames);
        assert_eq!((self.kept(), self.slots()), (frames.count, frames.count));
        self
    }

    pub fn bring_back(&self, frames: FrameRange) {
        let guest = self.machine.guest();
        for gfn in frames.frames() {
            let _ = guest.read(gfn);
        }
        // The thread that serves a fault unlocks the frame a little later than the guest goes on.
        let is_back = |gfn| self.pager.ledger().unlocked(gfn) == Some(Content::Resident);
        until("all to be back", || frames.frames().all(is_back).then_some(()));
    }

    pub fn write(&self, gfn: Gfn, page: &Page) {
        self.machine.guest().write(gfn, page);
    }

    pub fn evict(&self, frames: FrameRange) -> Evicted {
        self.pager.evictor().evict(&frames.frames().collect::<Vec<Gfn>>(), &NothingKnown).unwrap()
    }

    pub fn kept(&self) -> u64 {
        self.pager.counters().clean_frames.load(Relaxed)
    }

    pub fn slots(&self) -> u64 {
        self.pager.residency().store_usage().disk_slots_used
    }

    pub fn reads(&self, gfn: Gfn, page: &Page) {
        assert!(self.machine.guest().read(gfn) == *page, "{gfn:?}");
    }

    /// Asserts that no frame keeps a slot, and that no slot is lost.
    pub fn assert_none_kept(&self) {
        assert_eq!((self.kept(), self.slots()), (0, 0));
    }
}
