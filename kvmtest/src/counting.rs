//! A guest that counts in many pages and keeps its own books: a lost write shows, whichever page
//! lost it.

use ebb_inspect::GuestMemory;
use ebb_pager::{Grain, Pager};
use ebb_sys::kvm_vm::Registers;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa};

use crate::daemon::Daemon;
use crate::machine::Machine;
use crate::program::Program;
use crate::vcpu::Running;

const RAM_BYTES: u64 = 4 << 20;
/// The pages to count in, behind what the machine itself needs.
pub const PAGES: FrameRange = FrameRange::new(Gfn(0x200), 256);
/// First frame of the books: a word for each page and vCPU.
const BOOKS: Gfn = PAGES.end();
const BOOKS_FRAMES: u64 = PAGES.count * 8 / FRAME_BYTES + 1;

/// A machine with such a guest.
pub struct Counting {
    /// The machine.
    pub machine: Machine,
    running: Vec<Running>,
    vcpus: u64,
}

impl Counting {
    /// Makes a machine whose daemon watches all of it, with all its counted pages resident.
    pub fn new(grain: Grain) -> (Counting, Daemon) {
        let machine = Machine::new(RAM_BYTES);
        for page in PAGES.frames() {
            // The guest checks that each page is the right one.
            machine.set(Gpa(page.gpa().0 + FRAME_BYTES - 8), page.gpa().0);
        }
        let mut daemon = Daemon::take(&machine, grain);
        daemon.pager.frames().watch_all().expect("the pager");
        daemon.serve();
        (Counting { machine, running: Vec::new(), vcpus: 0 }, daemon)
    }

    /// Returns all frames of RAM.
    pub fn all(&self) -> FrameRange {
        FrameRange::new(Gfn(0), self.machine.ram().end().0)
    }

    /// Starts `vcpus` more vCPUs, which pause for `rest` after each count.
    pub fn start(&mut self, vcpus: u64, rest: u64) {
        for vcpu in self.vcpus..self.vcpus + vcpus {
            let arguments = Registers {
                rdi: PAGES.start.gpa().0,
                rsi: books(vcpu).0,
                rdx: PAGES.count - 1,
                rbp: counter(Gpa(0), vcpu).0,
                rcx: rest,
                r9: vcpu,
                ..Registers::default()
            };
            self.running.push(self.machine.start(Program::Counters, arguments));
        }
        self.vcpus += vcpus;
    }

    /// Makes all vCPUs leave. Returns how many writes are known to be lost, by the guest's own
    /// checks and by the sum of all its counters.
    pub fn lost(&mut self, pager: &Pager) -> u64 {
        self.machine.tell_to_leave(true);
        let left: Vec<Registers> = self.running.drain(..).map(Running::leave).collect();
        let counts: u64 = left.iter().map(|registers| registers.r8).sum();
        let wrong: u64 = left.iter().map(|registers| registers.r10).sum();
        eprintln!("{counts} counts, {wrong} of them wrong");
        assert!(counts > 0);
        wrong.max(counts.abs_diff(self.counted(pager)))
    }

    /// Returns what was counted in a resident page.
    pub fn counted_in(&self, page: Gfn) -> u64 {
        (0..self.vcpus).map(|vcpu| self.machine.get(counter(page.gpa(), vcpu))).sum()
    }

    /// Returns the sum of all counters, wherever their pages are.
    fn counted(&self, pager: &Pager) -> u64 {
        let view = pager.view();
        let pages = PAGES
            .frames()
            .flat_map(|page| (0..self.vcpus).map(move |vcpu| counter(page.gpa(), vcpu)));
        pages.map(|gpa| view.word(gpa).expect("in RAM")).sum()
    }
}

/// Returns the address of a vCPU's counter: each has its own, on pages that all share.
fn counter(page: Gpa, vcpu: u64) -> Gpa {
    Gpa(page.0 + vcpu * 8)
}

fn books(vcpu: u64) -> Gpa {
    Gfn(BOOKS.0 + vcpu * BOOKS_FRAMES).gpa()
}
