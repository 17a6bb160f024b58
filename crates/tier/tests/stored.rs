//! Memory, compressed memory and a file as tiers, over the project's own pager and stores. Every
//! byte comes back, by a plan or by a touch.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use ebb_ledger::{Ledger, Tables};
use ebb_pager::{
    DigestKey, FaultThread, Grain, NoDevices, NoDisk, NothingKnown, Pager, PagerParts,
    RefillThreads,
};
use ebb_store::{Compressed, Disk, Medium, Protection, Store, SwapFile};
use ebb_sys::mapping::Mapping;
use ebb_sys::process::Process;
use ebb_sys::ram_file::RamFile;
use ebb_sys::uffd::{Uffd, feature};
use ebb_tier::{
    Heat, Home, MemoryTier, Outcome, PagePlace, Rules, Stored, Tier, TierKind, carry_out, home,
    plan,
};
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa};
use ebb_vm::ram::Backing;
use ebb_vm::{Puncher, Ram, Region};

const FRAMES: u64 = 512;
const BYTES: u64 = FRAMES * FRAME_BYTES;

/// A VM in this very process: whoever touches `guest` is the guest.
struct Machine {
    pager: Arc<Pager>,
    guest: Mapping,
    _threads: (FaultThread, RefillThreads),
    _run: tempfile::TempDir,
}

fn small_pages(file: &RamFile) -> Mapping {
    let mapping = Mapping::new(file, 0, BYTES).unwrap();
    // A kernel without huge pages need not be told.
    let _ = mapping.use_huge_pages(false);
    mapping
}

/// The content of a page. Every second page shrinks.
fn word_of(page: u64, index: u64) -> u64 {
    match page.is_multiple_of(2) {
        true => (index * 8191 + page).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        false => index / 32 + page,
    }
}

impl Machine {
    /// `None`: this process may not make a userfaultfd that does this.
    fn new(store: impl FnOnce(&Path) -> Box<dyn Store>) -> Option<Machine> {
        let uffd = Uffd::new().ok()?;
        uffd.handshake(feature::needed()).ok()?;
        let file = RamFile::create("stored", BYTES).unwrap();
        let (guest, mapping) = (small_pages(&file), small_pages(&file));
        for page in 0..FRAMES {
            let words = mapping.words(page * FRAME_BYTES, 512).unwrap();
            (0..).zip(words).for_each(|(at, word)| word.store(word_of(page, at), Relaxed));
        }
        let hva = guest.address();
        let region = Region { gpa: Gpa(0), bytes: BYTES, hva, file: 0, offset: 0 };
        let puncher =
            Puncher::new(Ram::new(vec![region], vec![Backing::new(file, mapping)]).unwrap());
        let run = tempfile::tempdir_in("/dev/shm").unwrap();
        let store = store(run.path());
        let end = puncher.ram().end();
        let ledger = Ledger::create(&run.path().join("ledger"), end, Tables::WhenSplit).unwrap();
        let (devices, disk) = (Box::new(NoDevices), Box::new(NoDisk));
        let grain = Grain::Frame;
        let digest_key = Arc::new(DigestKey::random().unwrap());
        let parts = PagerParts { puncher, ledger, uffd, grain, devices, store, disk, digest_key };
        let (pager, _) = Pager::new(parts).unwrap();
        pager.frames().watch_all().unwrap();
        let pager = Arc::new(pager);
        let own = Process::open(std::process::id() as i32).unwrap();
        let vmm = own.as_fd().try_clone_to_owned().unwrap();
        let refills = RefillThreads::start(&pager, 1).unwrap();
        let faults = FaultThread::start(Arc::clone(&pager), vmm, |_| ()).unwrap();
        Some(Machine { pager, guest, _threads: (faults, refills), _run: run })
    }

    fn tiers(&self, kind: TierKind) -> (MemoryTier, Stored) {
        let judge = Box::new(NothingKnown);
        let memory = MemoryTier::new(Arc::clone(&self.pager));
        (memory, Stored::new(Arc::clone(&self.pager), kind, judge))
    }

    /// Touches every word. Returns how many are wrong.
    fn wrong_words(&self) -> usize {
        let wrong = |page: u64| {
            let words = self.guest.words(page * FRAME_BYTES, 512).unwrap();
            (0..).zip(words).filter(|(at, word)| word.load(Relaxed) != word_of(page, *at)).count()
        };
        (0..FRAMES).map(wrong).sum()
    }

    fn count(&self, wanted: Home) -> u64 {
        let frames = FrameRange::new(Gfn(0), FRAMES).frames();
        frames.filter(|&gfn| home(&self.pager, gfn) == Some(wanted)).count() as u64
    }
}

fn machine(store: impl FnOnce(&Path) -> Box<dyn Store>) -> Option<Machine> {
    let machine = Machine::new(store);
    if machine.is_none() {
        eprintln!("SKIPPED: no userfaultfd for this process (it takes root and a kernel with it)");
    }
    machine
}

fn swap_file(run: &Path, slots: u64) -> SwapFile {
    SwapFile::open(&run.join("swap"), run, slots, Protection::Encrypted).unwrap()
}

fn with_file(slots: u64) -> impl FnOnce(&Path) -> Box<dyn Store> {
    move |run| Box::new(swap_file(run, slots))
}

/// A disk that fails on command.
struct Failing {
    disk: Disk,
    fails: Arc<AtomicBool>,
}

impl Failing {
    fn check(&self) -> io::Result<()> {
        // 5 is EIO.
        if self.fails.load(SeqCst) { Err(io::Error::from_raw_os_error(5)) } else { Ok(()) }
    }
}

impl Medium for Failing {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        self.check().and_then(|()| self.disk.read_at(offset, bytes))
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<usize> {
        self.check().and_then(|()| self.disk.write_at(offset, bytes))
    }

    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.disk.discard(offset, bytes)
    }

    fn is_direct(&self) -> bool {
        self.disk.is_direct()
    }
}

fn all() -> Vec<Gfn> {
    FrameRange::new(Gfn(0), FRAMES).frames().collect()
}

#[test]
fn pages_go_to_a_file_and_come_back_by_plan_or_touch() {
    let Some(machine) = machine(with_file(FRAMES)) else { return };
    let (memory, file) = machine.tiers(TierKind::File("/swap".into()));
    assert_eq!((memory.kind(), file.kind().is_addressable()), (TierKind::Dram, false));
    assert!(file.bring(&all()).unwrap().iter().all(|&outcome| outcome == Outcome::Moved));
    assert_eq!(machine.count(Home::Disk), FRAMES);
    assert!(machine.pager.ram().is_hole(FrameRange::new(Gfn(0), FRAMES)).unwrap());
    assert!(file.bring(&all()).unwrap().iter().all(|&outcome| outcome == Outcome::There));
    let some: Vec<Gfn> = (0..FRAMES).step_by(3).map(Gfn).collect();
    assert!(memory.bring(&some).unwrap().iter().all(|&outcome| outcome == Outcome::Moved));
    assert_eq!(machine.count(Home::Memory), some.len() as u64);
    assert!(memory.bring(&some).unwrap().iter().all(|&outcome| outcome == Outcome::There));
    assert_eq!(machine.wrong_words(), 0);
    // What was touched has come back, or is just being recorded.
    assert!(memory.bring(&all()).unwrap().iter().all(|outcome| outcome.is_here()));
    assert_eq!(machine.count(Home::Memory), FRAMES);
}

#[test]
fn pages_that_shrink_stay_in_memory_compressed() {
    let store = |run: &Path| -> Box<dyn Store> {
        Box::new(Compressed::open(run, BYTES, swap_file(run, FRAMES)).unwrap())
    };
    let Some(machine) = machine(store) else { return };
    let (memory, stored) = machine.tiers(TierKind::Compressed);
    assert!(stored.bring(&all()).unwrap().iter().all(|&outcome| outcome == Outcome::Moved));
    assert_eq!(
        (machine.count(Home::Compressed), machine.count(Home::Disk)),
        (FRAMES / 2, FRAMES / 2)
    );
    assert_eq!(machine.wrong_words(), 0);
    assert!(memory.bring(&all()).unwrap().iter().all(|outcome| outcome.is_here()));
}

#[test]
fn a_full_store_takes_no_more_and_loses_nothing() {
    let Some(machine) = machine(with_file(64)) else { return };
    let (_, file) = machine.tiers(TierKind::File("/swap".into()));
    let outcomes = file.bring(&all()).unwrap();
    let count = |wanted| outcomes.iter().filter(|&&outcome| outcome == wanted).count() as u64;
    assert_eq!((count(Outcome::Moved), count(Outcome::NoRoom)), (64, FRAMES - 64));
    assert_eq!(machine.wrong_words(), 0);
}

#[test]
fn a_tier_that_fails_loses_nothing() {
    let fails = Arc::new(AtomicBool::new(true));
    let medium_fails = Arc::clone(&fails);
    let Some(machine) = machine(move |run| {
        let disk = Disk::open(&run.join("swap"), BYTES).unwrap();
        let medium = Failing { disk, fails: medium_fails };
        Box::new(SwapFile::over(medium, run, FRAMES, Protection::Encrypted).unwrap())
    }) else {
        return;
    };
    let (memory, file) = machine.tiers(TierKind::File("/swap".into()));
    let said = file.bring(&all()).unwrap_err().to_string();
    assert!(said.starts_with("file=/swap: ") && !said.contains('\n'), "{said}");
    assert_eq!((machine.count(Home::Memory), machine.wrong_words()), (FRAMES, 0));
    fails.store(false, SeqCst);
    assert!(file.bring(&all()).unwrap().iter().all(|&outcome| outcome == Outcome::Moved));
    fails.store(true, SeqCst);
    memory.bring(&all()).unwrap_err();
    assert_eq!(machine.count(Home::Disk), FRAMES);
    fails.store(false, SeqCst);
    assert_eq!(machine.wrong_words(), 0);
}

#[test]
fn pages_that_a_request_uses_wait() {
    let Some(machine) = machine(with_file(FRAMES)) else { return };
    let (_, file) = machine.tiers(TierKind::File("/swap".into()));
    let used = FrameRange::new(Gfn(5), 2);
    machine.pager.devices().pin(used, false).unwrap();
    let frames: Vec<Gfn> = (4..8).map(Gfn).collect();
    let (moved, waits) = (Outcome::Moved, Outcome::InUse);
    assert_eq!(file.bring(&frames).unwrap(), [moved, waits, waits, moved]);
    machine.pager.devices().unpin(used);
    assert!(file.bring(&frames).unwrap().iter().all(|outcome| outcome.is_here()));
    assert_eq!(machine.wrong_words(), 0);
}

#[test]
fn a_plan_leaves_the_hot_half_in_memory() {
    let Some(machine) = machine(with_file(FRAMES)) else { return };
    let (memory, file) = machine.tiers(TierKind::File("/swap".into()));
    let degree = |gfn: Gfn| (gfn.0 * 37 % 101) as u32;
    let mut order: Vec<Heat> =
        all().into_iter().map(|gfn| Heat { gfn, degree: degree(gfn) }).collect();
    order.sort_by_key(|heat| heat.degree);
    let half = FRAMES / 2;
    let cold: Vec<Gfn> = (0..half).map(Gfn).collect();
    file.bring(&cold).unwrap();
    let capacity_frames = vec![half, FRAMES];
    let rules =
        Rules { capacity_frames, margin_degrees: 1, free_degrees: 1, budget_frames: u64::MAX };
    let place = |gfn| match home(&machine.pager, gfn) {
        Some(Home::Memory) => PagePlace::Tier(0),
        Some(_) => PagePlace::Tier(1),
        None => PagePlace::Nowhere,
    };
    let first = plan::plan(&order, place, &rules);
    assert!(!first.steps.is_empty());
    let done = carry_out(&[&memory, &file], &first.steps, 32).unwrap();
    assert_eq!(done.held_back_frames, 0, "{done:?}");
    let coldest = order[half as usize].degree;
    for gfn in all() {
        let is_fast = home(&machine.pager, gfn) == Some(Home::Memory);
        assert!(degree(gfn) == coldest || is_fast == (degree(gfn) > coldest), "{gfn:?}");
    }
    assert_eq!(machine.wrong_words(), 0);
}
