//! What outlives a daemon: the VM and its disk. Also what most daemons over it are made of.

use std::cell::Cell;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard};

use ebb_ledger::{Ledger, Tables};
use ebb_pager::{
    DigestKey, FaultThread, Grain, NoDevices, NoDisk, Pager, PagerParts, RefillThreads,
};
use ebb_store::{Page, Protection, SwapFile};
use ebb_sys::mapping::Mapping;
use ebb_sys::process::Process;
use ebb_sys::ram_file::RamFile;
use ebb_sys::uffd::{Uffd, feature};
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa};
use ebb_vm::Region;
use ebb_vm::ram::{Backing, Ram};
use tempfile::TempDir;

/// Number of frames that the guest uses in its only huge frame.
pub const FRAMES: u64 = 12;
pub const BLOCKS: u64 = 10;
const RAM_BYTES: u64 = 2 << 20;

/// Returns the page that a number stands for: zeros, one byte repeated, or a pattern.
pub fn page_of(seed: u64) -> Page {
    match seed {
        0 | 1 => [seed as u8; FRAME_BYTES as usize],
        _ => std::array::from_fn(|at| (seed as usize * 31 + at / 8 * 7 + at) as u8),
    }
}

/// A VM in this process: whatever touches `guest` is the guest.
pub struct Machine {
    pub ram: Arc<Ram>,
    guest: Arc<Mapping>,
    uffd: Uffd,
    run: TempDir,
    /// Number of daemons that have managed it.
    daemons: Cell<u32>,
    /// The grain in which its memory is given.
    pub grain: Grain,
}

/// Whether this host lets the tests be a VMM.
pub fn available() -> Result<(), String> {
    new_uffd().map(drop).map_err(|error| format!("no userfaultfd: {error}"))
}

pub fn new_uffd() -> io::Result<Uffd> {
    let uffd = Uffd::new()?;
    uffd.handshake(feature::needed())?;
    Ok(uffd)
}

fn small_pages(file: &RamFile) -> Mapping {
    let mapping = Mapping::new(file, 0, RAM_BYTES).unwrap();
    // A kernel without huge pages need not be told.
    let _ = mapping.use_huge_pages(false);
    mapping
}

impl Machine {
    pub fn new() -> Machine {
        let file = RamFile::create("consistency", RAM_BYTES).unwrap();
        let guest = Arc::new(small_pages(&file));
        let mapping = small_pages(&file);
        let hva = guest.address();
        let region = Region { gpa: Gpa(0), bytes: RAM_BYTES, hva, file: 0, offset: 0 };
        let ram = Ram::new(vec![region], vec![Backing { file, mapping }]).unwrap();
        let run = tempfile::tempdir().unwrap();
        let (uffd, daemons) = (new_uffd().unwrap(), Cell::new(0));
        Machine { ram: Arc::new(ram), guest, uffd, run, daemons, grain: Grain::Frame }
    }

    /// Punches frames as another process does that has the file.
    ///
    /// # Errors
    /// As fallocate(2).
    pub fn punch(ram: &Ram, frames: FrameRange) -> io::Result<()> {
        let place = ram.range(frames).ok_or(io::ErrorKind::InvalidInput)?;
        ram.files()[place.file].file.punch(place.offset, frames.bytes())
    }

    /// Makes a machine of this grain: with huge pages, if the grain is huge and the host gives
    /// them.
    pub fn of(grain: Grain) -> Machine {
        let machine = Machine { grain, ..Machine::new() };
        if grain == Grain::Huge {
            machine.allow_huge_pages(true);
        }
        machine
    }

    /// Allows or forbids huge pages, in the VMM and in this process.
    pub fn allow_huge_pages(&self, yes: bool) {
        let ours = self.ram.files().iter().map(|file| &file.mapping);
        ours.chain([&*self.guest]).for_each(|mapping| mapping.use_huge_pages(yes).unwrap());
    }

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
            ram: Arc::clone(&self.ram),
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
        Guest(Arc::clone(&self.guest))
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

/// The threads that serve a pager's faults, in the order in which they end.
pub struct Threads(FaultThread, Option<RefillThreads>);

/// Serves the faults, with `refills` refill threads.
pub fn serve(pager: &Arc<Pager>, refills: usize) -> Threads {
    let refills = (refills > 0).then(|| RefillThreads::start(pager, refills).unwrap());
    let vmm = Process::own().unwrap().as_fd().try_clone_to_owned().unwrap();
    let ended = |why| panic!("the fault thread ended: {why:?}");
    Threads(FaultThread::start(Arc::clone(pager), vmm, ended).unwrap(), refills)
}

/// Makes a pager that watches all first touches of the VM.
pub fn watching(parts: PagerParts) -> Arc<Pager> {
    let pager = Arc::new(Pager::new(parts).unwrap().0);
    pager.frames().watch_all().unwrap();
    pager
}

pub struct Guest(Arc<Mapping>);

impl Guest {
    pub fn write(&self, gfn: Gfn, page: &Page) {
        let words = self.0.words(gfn.gpa().0, 512).unwrap();
        for (word, bytes) in words.iter().zip(page.as_chunks().0) {
            word.store(u64::from_ne_bytes(*bytes), Relaxed);
        }
    }

    /// Removes all of it from the page table.
    pub fn forget(&self) {
        self.0.forget(0, RAM_BYTES).unwrap();
    }

    pub fn read(&self, gfn: Gfn) -> Page {
        let words = self.0.words(gfn.gpa().0, 512).unwrap();
        let mut page = [0; FRAME_BYTES as usize];
        for (word, bytes) in words.iter().zip(page.as_chunks_mut().0) {
            *bytes = word.load(Relaxed).to_ne_bytes();
        }
        page
    }
}

/// A disk that loses nothing: a block is on it as a whole or not at all.
pub struct FakeDisk(Mutex<Vec<Page>>);

impl FakeDisk {
    pub fn new() -> FakeDisk {
        FakeDisk(Mutex::new(vec![page_of(0); BLOCKS as usize]))
    }

    pub fn blocks(&self) -> MutexGuard<'_, Vec<Page>> {
        self.0.lock().unwrap()
    }
}
