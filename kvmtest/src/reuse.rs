//! A guest that takes, fills, checks and frees pages, and records the state of each, as a kernel
//! does: freed pages need not be read back.

use std::sync::Arc;

use ebb_inspect::PageWords;
use ebb_pager::{Evicted, Grain, Judge, Witness};
use ebb_sys::kvm_vm::Registers;
use ebb_units::{FrameRange, Gfn, Gpa};
use ebb_vm::Ram;

use crate::daemon::Daemon;
use crate::machine::Machine;
use crate::program::Program;
use crate::vcpu::Running;

const RAM_BYTES: u64 = 4 << 20;
/// First of the guest's pages, behind what the machine itself needs. Each vCPU has as many as the
/// next constant says.
const PAGES: Gfn = Gfn(0x200);
const PAGES_EACH: u64 = 64;
/// Pages whose content is dropped once they are free, of all pages.
const DROPPED_PAGES: usize = 16;
/// First frame of the metadata, which has room for the words of all vCPUs' pages.
const METADATA: Gfn = Gfn(0x1f0);
const METADATA_BYTES: u64 = 16;

/// State of a page, written by the guest: free.
const FREE: u64 = 0;
/// State of a page: handed out, and not filled yet.
pub const NEW: u64 = 1;
/// State of a page: filled, and checked at times.
pub const IN_USE: u64 = 2;

/// A machine with such a guest.
pub struct Reuse {
    /// The machine.
    pub machine: Machine,
    vcpus: u64,
}

impl Reuse {
    /// Makes a machine for `vcpus` vCPUs, whose daemon trusts its metadata.
    pub fn new(vcpus: u64) -> (Reuse, Daemon) {
        let machine = Machine::new(RAM_BYTES);
        let metadata = FrameRange::new(METADATA, PAGES.0 - METADATA.0);
        machine.ram().populate(metadata).expect("metadata");
        let mut daemon = Daemon::take(&machine, Grain::Frame);
        daemon.pager.frames().watch_all().expect("the pager");
        daemon.serve();
        let reuse = Reuse { machine, vcpus };
        daemon.pager.residency().believe(Some(Arc::new(reuse.metadata())));
        (reuse, daemon)
    }

    /// Returns the guest's pages.
    pub fn pages(&self) -> FrameRange {
        FrameRange::new(PAGES, PAGES_EACH * self.vcpus)
    }

    /// Returns the guest's metadata.
    pub fn metadata(&self) -> Metadata {
        Metadata(Arc::clone(self.machine.ram()))
    }

    /// Sets a page's state in the guest's place.
    pub fn set(&self, page: Gfn, state: u64) {
        self.machine.set(place(page), state);
    }

    /// Starts the vCPUs, which pause for `rest` over a page that is half full.
    pub fn start(&self, rest: u64) -> Vec<Running> {
        let arguments = |vcpu| Registers {
            rdi: place(Gfn(PAGES.0 + vcpu * PAGES_EACH)).0,
            rsi: Gfn(PAGES.0 + vcpu * PAGES_EACH).gpa().0,
            rdx: PAGES_EACH - 1,
            rcx: rest,
            r9: vcpu,
            ..Registers::default()
        };
        (0..self.vcpus).map(|vcpu| self.machine.start(Program::Reuse, arguments(vcpu))).collect()
    }

    /// Makes all vCPUs leave. Returns how many words were wrong.
    pub fn wrong(&self, running: Vec<Running>) -> u64 {
        self.machine.tell_to_leave(true);
        let left: Vec<Registers> = running.into_iter().map(Running::leave).collect();
        let taken: u64 = left.iter().map(|registers| registers.r8).sum();
        eprintln!("{taken} pages taken");
        assert!(taken > 0);
        left.iter().map(|registers| registers.r10).sum()
    }

    /// Evicts the resident pages, then drops those of the first few that are free. In between it
    /// removes all memory from the VMM's page table, as a clock hand does.
    pub fn evict(&self, daemon: &Daemon, judge: &dyn Judge) -> Evicted {
        let evicted = daemon.evict_by(self.pages(), judge);
        self.machine.forget();
        self.pages().frames().take(DROPPED_PAGES).for_each(|page| {
            daemon.pager.residency().drop_if_free(page, judge);
        });
        evicted
    }
}

fn place(page: Gfn) -> Gpa {
    Gpa(METADATA.gpa().0 + (page.0 - PAGES.0) * METADATA_BYTES)
}

/// The guest's record of its pages.
pub struct Metadata(Arc<Ram>);

impl Metadata {
    fn state(&self, page: Gfn) -> u64 {
        self.0.word(place(page)).expect("in RAM")
    }
}

impl Judge for Metadata {
    fn is_dead(&self, gfn: Gfn) -> bool {
        self.state(gfn) == FREE
    }

    fn settled(&self, frames: &[Gfn]) -> Vec<bool> {
        vec![true; frames.len()]
    }

    fn in_use(&self, frames: &[Gfn]) -> Vec<bool> {
        frames.iter().map(|&gfn| self.state(gfn) == IN_USE).collect()
    }
}

impl Witness for Metadata {
    fn looks_freed(&self, gfn: Gfn, _read: &dyn Fn(Gpa) -> Option<PageWords>) -> bool {
        self.state(gfn) != IN_USE
    }
}

/// Judges wrongly: takes pages that are just being filled for pages in use.
pub struct Hasty(pub Metadata);

impl Judge for Hasty {
    fn is_dead(&self, gfn: Gfn) -> bool {
        self.0.is_dead(gfn)
    }

    fn settled(&self, frames: &[Gfn]) -> Vec<bool> {
        vec![true; frames.len()]
    }

    fn in_use(&self, frames: &[Gfn]) -> Vec<bool> {
        vec![true; frames.len()]
    }
}
