//! A VM in this very process, for tests of what is chosen for eviction.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use ebb_inspect::{Guest, GuestMemory};
use ebb_ledger::{Ledger, Tables};
use ebb_pager::{DigestKey, Grain, NoDevices, NoDisk, Pager, PagerParts};
use ebb_store::{Protection, SwapFile};
use ebb_sys::mapping::Mapping;
use ebb_sys::process::Process;
use ebb_sys::ram_file::RamFile;
use ebb_sys::uffd::{HvaRange, Uffd, feature};
use ebb_units::{FRAME_BYTES, FRAMES_PER_HUGE, Gpa, HugeFrame, Hva};
use ebb_vm::ram::{Backing, Ram};
use ebb_vm::{Puncher, Region};
use testkit::forge;

use crate::limit::judge::Sources;
use crate::limit::windows::Vmm;

/// Bytes of a huge frame.
pub const HUGE: u64 = FRAMES_PER_HUGE * FRAME_BYTES;

/// A VM, with this process as its VMM.
pub struct Machine {
    pub pager: Pager,
    pub process: Process,
    guest: Mapping,
}

impl Machine {
    /// Two windows of RAM, a window that is no RAM, and half a window. `None`: this host does not
    /// let the tests be a VMM.
    pub fn new() -> Option<Machine> {
        Machine::with_slots(2048)
    }

    /// The same RAM, with a store that has room for `slots` frames.
    pub fn with_slots(slots: u64) -> Option<Machine> {
        Machine::of(&[(0, 2 * HUGE), (3 * HUGE, HUGE / 2)], slots)
    }

    /// RAM with what a made-up kernel has in memory.
    pub fn forged(forge: &forge::Forge) -> Option<Machine> {
        Machine::forged_above(forge, 0)
    }

    /// The same, with `windows` more windows that the kernel knows nothing of.
    pub fn forged_above(forge: &forge::Forge, windows: u64) -> Option<Machine> {
        let machine = Machine::of(&[(0, forge::RAM_BYTES + windows * HUGE)], 2048)?;
        for frame in 0..forge::FRAMES {
            let at = frame * FRAME_BYTES;
            let words = forge.mem.words(Gpa(at), FRAME_BYTES as usize / 8).unwrap();
            let all = words.iter().enumerate().map(|(index, word)| (index, word.load(Relaxed)));
            for (index, word) in all.filter(|(_, word)| *word != 0) {
                machine.guest.words(at, words.len()).unwrap()[index].store(word, Relaxed);
            }
        }
        Some(machine)
    }

    /// RAM of regions (address, bytes) that lie in a row in one file.
    fn of(parts: &[(u64, u64)], slots: u64) -> Option<Machine> {
        let uffd = Uffd::new().ok()?;
        uffd.handshake(feature::needed()).ok()?;
        let bytes = parts.iter().map(|(_, bytes)| bytes).sum();
        let file = RamFile::create("windows", bytes).unwrap();
        let (guest, mapping) = (small_pages(&file, bytes), small_pages(&file, bytes));
        let mut offset = 0;
        let region = |&(gpa, bytes): &(u64, u64)| {
            let hva = Hva(guest.address().0 + offset);
            let region = Region { gpa: Gpa(gpa), bytes, hva, file: 0, offset };
            offset += bytes;
            region
        };
        let regions = parts.iter().map(region).collect();
        let puncher = Puncher::new(Ram::new(regions, vec![Backing::new(file, mapping)]).unwrap());
        let run = tempfile::tempdir().unwrap();
        let ledger =
            Ledger::create(&run.path().join("ledger"), puncher.ram().end(), Tables::AtOnce)
                .unwrap();
        let swap = run.path().join("swap");
        let store = SwapFile::open(&swap, run.path(), slots, Protection::Encrypted).unwrap();
        let (devices, disk) = (Box::new(NoDevices), Box::new(NoDisk));
        let (grain, store) = (Grain::Frame, Box::new(store));
        let digest_key = Arc::new(DigestKey::random().unwrap());
        let parts = PagerParts { puncher, ledger, uffd, grain, devices, store, disk, digest_key };
        let pager = Pager::new(parts).unwrap().0;
        Some(Machine { pager, process: Process::own().unwrap(), guest })
    }

    /// Has the guest use frames. `first` is a frame of the file.
    pub fn touch(&self, first: u64, frames: u64) {
        self.guest.populate(first * FRAME_BYTES, frames * FRAME_BYTES).unwrap();
    }

    /// Has the guest use frames and write something different to each.
    pub fn write(&self, first: u64, frames: u64) {
        self.touch(first, frames);
        for frame in first..first + frames {
            let words = self.guest.words(frame * FRAME_BYTES, 2).unwrap();
            words.iter().zip(frame..).for_each(|(word, value)| word.store(value, Relaxed));
        }
    }

    /// The made-up kernel of the guest.
    pub fn kernel(&self) -> Guest {
        Guest::inspect(&self.pager.view(), &[forge::ROOT.0]).expect("a sound guest")
    }

    pub fn sources(&self) -> Sources<'_> {
        Sources { process: &self.process, guest: None, pins: false, hears_late: false }
    }
}

/// A mapping of a RAM file in small pages.
pub fn small_pages(file: &RamFile, bytes: u64) -> Mapping {
    let mapping = Mapping::new(file, 0, bytes).unwrap();
    // A kernel without huge pages need not be told.
    let _ = mapping.use_huge_pages(false);
    mapping
}

/// A VMM that cannot be made to do anything.
pub struct NoVmm;

impl Vmm for NoVmm {
    fn forget(&self, _: &[HvaRange]) -> io::Result<u64> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn break_up(&self, _: &Pager, _: &[HugeFrame]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}
