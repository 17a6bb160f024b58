//! For tests: a VM in this process, and what most daemons over it are made of.

use std::cell::Cell;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use ebb_digest::DigestKey;
use ebb_ledger::{Ledger, Tables};
use ebb_store::{Page, Protection, SwapFile};
use ebb_sys::mapping::Mapping;
use ebb_sys::process::Process;
use ebb_sys::ram_file::RamFile;
use ebb_sys::uffd::{Uffd, feature};
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa};
use ebb_vm::ram::{Backing, Ram};
use ebb_vm::{Puncher, Region};
use tempfile::TempDir;

use crate::{FaultThread, Grain, NoDevices, NoDisk, Pager, PagerParts, RefillThreads};

/// Usual bytes of a machine's RAM: one huge frame.
const RAM_BYTES: u64 = 2 << 20;

/// Returns the page that a number stands for: zeros, one byte repeated, or a pattern.
pub fn page_of(seed: u64) -> Page {
    match seed {
        0 | 1 => [seed as u8; FRAME_BYTES as usize],
        _ => std::array::from_fn(|at| (seed as usize * 31 + at / 8 * 7 + at) as u8),
    }
}

/// Whether this host lets the tests be a VMM.
///
/// # Errors
/// Why it does not.
pub fn available() -> Result<(), String> {
    new_uffd().map(drop).map_err(|error| format!("no userfaultfd: {error}"))
}

/// Makes a userfaultfd with all features that Ebb needs.
///
/// # Errors
/// As userfaultfd(2) and ioctl_userfaultfd(2).
pub fn new_uffd() -> io::Result<Uffd> {
    let uffd = Uffd::new()?;
    uffd.handshake(feature::needed())?;
    Ok(uffd)
}

/// A VM in this process, usually with one huge frame of RAM: what outlives a daemon. Whatever touches the
/// memory of [`Machine::guest`] is the guest.
pub struct Machine {
    /// The RAM, as the first daemon maps it.
    pub ram: Arc<Ram>,
    /// The grain in which its memory is given.
    pub grain: Grain,
    puncher: Cell<Option<Puncher>>,
    guest: Guest,
    uffd: Uffd,
    run: TempDir,
    /// Number of daemons that have managed it.
    daemons: Cell<u32>,
}

impl Machine {
    /// Makes a machine of small pages.
    pub fn small() -> Machine {
        Machine::at(Gpa(0), RAM_BYTES)
    }

    /// Makes a machine of small pages with so much RAM, which begins there.
    pub fn at(start: Gpa, bytes: u64) -> Machine {
        let file = RamFile::create("machine", bytes).unwrap();
        let memory = Arc::new(small_pages(&file, bytes));
        let guest = Guest { memory, file: Arc::new(file), start, bytes };
        let puncher = Puncher::new(guest.ram());
        Machine {
            ram: Arc::clone(puncher.ram()),
            grain: Grain::Frame,
            puncher: Cell::new(Some(puncher)),
            guest,
            uffd: new_uffd().unwrap(),
            run: tempfile::tempdir().unwrap(),
            daemons: Cell::new(0),
        }
    }

    /// Makes a machine of this grain: with huge pages, if the grain is huge and the host gives
    /// them.
    pub fn of(grain: Grain) -> Machine {
        let machine = Machine { grain, ..Machine::small() };
        if grain == Grain::Huge {
            machine.allow_huge_pages(true);
        }
        machine
    }

    /// Allows or forbids huge pages, in the VMM and in the first daemon.
    pub fn allow_huge_pages(&self, yes: bool) {
        let ours = self.ram.files().iter().map(|file| &file.mapping);
        ours.chain([&*self.guest.memory]).for_each(|mapping| mapping.use_huge_pages(yes).unwrap());
    }

    /// The run directory of its daemons.
    pub fn run(&self) -> &Path {
        self.run.path()
    }

    /// Returns the swap file for another daemon. It is a copy: threads of the last daemon that
    /// stopped in the middle keep its own file locked.
    pub fn swap(&self) -> PathBuf {
        let path = |number| self.run().join(format!("swap{number}"));
        let last = self.daemons.replace(self.daemons.get() + 1);
        match std::fs::copy(path(last), path(last + 1)) {
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::NotFound),
            Ok(_) => std::fs::remove_file(path(last)).unwrap(),
        }
        path(last + 1)
    }

    fn ledger(&self) -> PathBuf {
        self.run().join("ledger")
    }

    /// Returns the RAM for another daemon, which only that daemon punches. The first one gets
    /// [`Machine::ram`]; each later one maps the file anew.
    pub fn puncher(&self) -> Puncher {
        self.puncher.take().unwrap_or_else(|| {
            let ram = self.guest.ram();
            if self.grain == Grain::Huge {
                ram.files()[0].mapping.use_huge_pages(true).unwrap();
            }
            Puncher::new(ram)
        })
    }

    /// Returns the parts of a pager that manages this VM for the first time: a swap file, no
    /// devices, no disks.
    pub fn parts(&self) -> PagerParts {
        let end = self.ram.end();
        self.parts_over(Ledger::create(&self.ledger(), end, Tables::WhenSplit).unwrap())
    }

    /// Returns the parts of a pager that recovers the VM as the daemon before left it.
    pub fn parts_left(&self) -> PagerParts {
        self.parts_over(Ledger::open(&self.ledger(), self.ram.end()).unwrap())
    }

    fn parts_over(&self, ledger: Ledger) -> PagerParts {
        let slots = self.ram.bytes() / FRAME_BYTES;
        let store = SwapFile::open(&self.swap(), self.run(), slots, Protection::Encrypted);
        PagerParts {
            puncher: self.puncher(),
            ledger,
            uffd: self.uffd(),
            grain: self.grain,
            devices: Box::new(NoDevices),
            store: Box::new(store.unwrap()),
            disk: Box::new(NoDisk),
            digest_key: Arc::new(DigestKey::random().unwrap()),
        }
    }

    /// Returns a copy of the userfaultfd, as a daemon takes it out of the VMM.
    pub fn uffd(&self) -> Uffd {
        Uffd::from(self.uffd.as_fd().try_clone_to_owned().unwrap())
    }

    /// Returns the guest's processor; its touches fault.
    pub fn guest(&self) -> Guest {
        self.guest.clone()
    }

    /// Writes a page into a frame as a device does, through a mapping of its own.
    pub fn put(ram: &Ram, gfn: Gfn, page: &Page) {
        let words = ram.words(gfn.gpa(), 512).unwrap();
        for (word, bytes) in words.iter().zip(page.as_chunks().0) {
            word.store(u64::from_ne_bytes(*bytes), Relaxed);
        }
    }

    /// Returns the page in the RAM file; `None`: a hole.
    pub fn in_file(&self, gfn: Gfn) -> Option<Page> {
        let frame = FrameRange::new(gfn, 1);
        let mut page = [0; FRAME_BYTES as usize];
        self.ram.read(frame, &mut page).unwrap();
        (!self.ram.is_hole(frame).unwrap()).then_some(page)
    }
}

fn small_pages(file: &RamFile, bytes: u64) -> Mapping {
    let mapping = Mapping::new(file, 0, bytes).unwrap();
    // A kernel without huge pages need not be told.
    let _ = mapping.use_huge_pages(false);
    mapping
}

/// The guest and its VMM.
#[derive(Clone)]
pub struct Guest {
    memory: Arc<Mapping>,
    file: Arc<RamFile>,
    /// Where its RAM begins; at the beginning of the file.
    start: Gpa,
    bytes: u64,
}

impl Guest {
    /// The RAM as a daemon finds it, by a descriptor and a mapping of its own.
    fn ram(&self) -> Ram {
        let file = RamFile::from(self.file.as_fd().try_clone_to_owned().unwrap());
        let mapping = small_pages(&file, self.bytes);
        let hva = self.memory.address();
        let region = Region { gpa: self.start, bytes: self.bytes, hva, file: 0, offset: 0 };
        Ram::new(vec![region], vec![Backing::new(file, mapping)]).unwrap()
    }

    /// The RAM file, as the VMM has it.
    pub fn file(&self) -> &RamFile {
        &self.file
    }

    /// Punches frames, as the VMM does for a balloon: no daemon knows.
    ///
    /// # Errors
    /// As fallocate(2).
    pub fn punch(&self, frames: FrameRange) -> io::Result<()> {
        self.file.punch(self.offset(frames.start), frames.bytes())
    }

    /// Where a frame is in the file.
    fn offset(&self, gfn: Gfn) -> u64 {
        gfn.gpa().0 - self.start.0
    }

    /// Writes a page.
    pub fn write(&self, gfn: Gfn, page: &Page) {
        let words = self.memory.words(self.offset(gfn), 512).unwrap();
        for (word, bytes) in words.iter().zip(page.as_chunks().0) {
            word.store(u64::from_ne_bytes(*bytes), Relaxed);
        }
    }

    /// Removes all of the memory from the page table.
    pub fn forget(&self) {
        self.memory.forget(0, self.bytes).unwrap();
    }

    /// Reads a page.
    pub fn read(&self, gfn: Gfn) -> Page {
        let words = self.memory.words(self.offset(gfn), 512).unwrap();
        let mut page = [0; FRAME_BYTES as usize];
        for (word, bytes) in words.iter().zip(page.as_chunks_mut().0) {
            *bytes = word.load(Relaxed).to_ne_bytes();
        }
        page
    }
}

/// The threads that serve a pager's faults, in the order in which they end.
pub struct Threads {
    _faults: FaultThread,
    _refills: Option<RefillThreads>,
}

/// Serves the faults, with `refills` refill threads.
pub fn serve(pager: &Arc<Pager>, refills: usize) -> Threads {
    let _refills = (refills > 0).then(|| RefillThreads::start(pager, refills).unwrap());
    let vmm = Process::own().unwrap().as_fd().try_clone_to_owned().unwrap();
    let ended = |why| panic!("the fault thread ended: {why:?}");
    let _faults = FaultThread::start(Arc::clone(pager), vmm, ended).unwrap();
    Threads { _faults, _refills }
}

/// Makes a pager that watches all first touches of the VM.
pub fn watching(parts: PagerParts) -> Arc<Pager> {
    let pager = Arc::new(Pager::new(parts).unwrap().0);
    pager.frames().watch_all().unwrap();
    pager
}
